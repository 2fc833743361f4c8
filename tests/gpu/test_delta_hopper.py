"""Kernels of Gated DeltaNet on a Hopper GPU: packed sequences, pieces and single tokens, bit for bit.

Whole models: `test_portable.py`, as hybrids run by the portable kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jetrl.kernels.delta import backward, reference
from jetrl.kernels.delta.parts import HeadSizes, Parts, empty_state
from jetrl.types import StateRows

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SIZES = HeadSizes(2, 4, 128, 128)


def inputs(count: int, seed: int, sizes: HeadSizes = SIZES) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(seed)
    hk, hv, dk, dv = sizes
    q, k = (torch.nn.functional.normalize(torch.randn(count, hk, dk, generator=gen) + 0.3, dim=-1) for _ in "qk")
    g = -torch.rand(count, hv, generator=gen) * 0.2
    v, beta = torch.randn(count, hv, dv, generator=gen), torch.rand(count, hv, generator=gen)
    return tuple(t.cuda() for t in (q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta))


def parts_of(lengths: list[int], before: list[int] | None = None, rows: StateRows | None = None) -> Parts:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
    return Parts(ends, tuple(lengths), None if before is None else torch.tensor(before, dtype=torch.int32).cuda(), rows)


@pytest.mark.parametrize(("file", "least"), [("triton_delta_cases.py", 53), ("triton_delta_backward_cases.py", 25)])
def test_cases(file: str, least: int) -> None:
    """Against the definition to rounding; pieces, forks and single tokens against the whole, bit for bit. Gradients
    against float64, and twice."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "kernels")])}
    command = [sys.executable, str(ROOT / "tests" / "kernels" / file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["cases"] >= least, done.stdout


@pytest.mark.parametrize("count", [1, 64, 512])
@torch.no_grad()
def test_every_phase_in_a_captured_step(count: int) -> None:
    """Prompts of 1 to 64 tokens, then 70 steps of one token each as a CUDA graph, over two ends of chunks. In one of
    them states go to other rows."""
    from jetrl.kernels.delta import triton as td

    lengths = [1 + i % 64 for i in range(count)]
    xs = [inputs(n + 70, i % 64) for i, n in enumerate(lengths)]
    total = [n + 70 for n in lengths]
    whole = td.delta_rule(*(torch.cat(t) for t in zip(*xs, strict=True)), parts_of(total), None).split(total)
    rows = torch.arange(2, 2 + count, device="cuda")
    kept = empty_state(2 + 2 * count, SIZES, torch.bfloat16, "cuda")
    beginnings = [[t[:n] for t in x] for x, n in zip(xs, lengths, strict=True)]
    prompts = tuple(torch.cat(t) for t in zip(*beginnings, strict=True))
    begun = parts_of(lengths, [0] * count, StateRows(torch.zeros_like(rows), rows))
    first = td.delta_rule(*prompts, begun, kept).split(lengths)
    held = tuple(torch.stack([t[0] for t in each]) for each in zip(*xs, strict=True))
    parts = parts_of([1] * count, lengths, StateRows(rows.clone(), rows.clone()))
    assert parts.before is not None and parts.rows is not None
    td.delta_rule(*held, parts, empty_state(2 + count, SIZES, torch.bfloat16, "cuda"))  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = td.delta_rule(*held, parts, kept)
    outs = []
    for step in range(70):
        for buffer, each in zip(held, zip(*xs, strict=True), strict=True):
            buffer.copy_(torch.stack([t[n + step] for t, n in zip(each, lengths, strict=True)]))
        if step == 33:
            parts.rows.write.add_(count)
        graph.replay()
        outs.append(out.clone())
        parts.before.add_(1)
        parts.rows.read.copy_(parts.rows.write)
    for i, (prompt, want) in enumerate(zip(first, whole, strict=True)):
        got = torch.cat([prompt, torch.stack([o[i] for o in outs])])
        assert torch.equal(got.view(torch.int16), want.view(torch.int16)), f"sequence {i}"


@torch.no_grad()
def test_a_row_does_not_depend_on_the_batch() -> None:
    from jetrl.kernels.delta import triton as td

    lengths = [300, 1, 64, 77, 129]
    xs = [inputs(n, i) for i, n in enumerate(lengths)]
    whole = td.delta_rule(*(torch.cat(t) for t in zip(*xs, strict=True)), parts_of(lengths), None).split(lengths)
    for x, want, n in zip(xs, whole, lengths, strict=True):
        assert torch.equal(td.delta_rule(*x, parts_of([n]), None), want)
        half = (n + 1) // 2
        cut = tuple(t[:half].contiguous() for t in x)
        assert torch.equal(td.delta_rule(*cut, parts_of([half]), None), want[:half])


def test_gradients_are_those_of_a_cpu_and_repeat() -> None:
    lengths = [70, 131]
    x = inputs(201, 5)
    up = torch.randn(201, 4, 128, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    first, again = (backward.delta_rule_backward(up, *x, parts_of(lengths)) for _ in range(2))
    host = tuple(t.cpu() for t in x)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    want = backward.delta_rule_backward(up.cpu(), *host, Parts(ends, tuple(lengths)))
    for mine, same, theirs in zip(first, again, want, strict=True):
        assert torch.equal(mine, same)
        assert (mine.cpu().float() - theirs.float()).norm() < 4e-3 * theirs.float().norm()
    assert reference.BLOCK == 16


def test_gradients_of_a_long_pack() -> None:
    """At the sizes of the 9B model, against the plain pass in FP32: to the rounding of operands; ten times, and with
    other sequences around, the same bits."""
    from jetrl.kernels.delta.backward_triton import delta_rule_backward

    sizes, lengths = HeadSizes(16, 32, 128, 128), [1000, 3000, 1, 63, 64, 65]
    x = inputs(sum(lengths), 8, sizes)
    up = torch.randn(sum(lengths), 32, 128, generator=torch.Generator().manual_seed(2)).bfloat16().cuda()
    first = delta_rule_backward(up, *x, parts_of(lengths))
    for name, mine, theirs in zip(
        ("q", "k", "v", "g", "beta"), first, backward.delta_rule_backward(up, *x, parts_of(lengths)), strict=True
    ):
        error = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        assert error < 7e-3, f"d{name}: {error:.5f}"
    for _ in range(9):
        for mine, again in zip(first, delta_rule_backward(up, *x, parts_of(lengths)), strict=True):
            assert torch.equal(mine, again)
    cut = tuple(t[1000:4000].contiguous() for t in (up, *x))
    for mine, alone in zip(first, delta_rule_backward(*cut, parts_of([3000])), strict=True):
        assert torch.equal(mine[1000:4000], alone)
