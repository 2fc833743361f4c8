"""Latent attention on a CPU (`kernels.attention.latent`, `latent_reference`): the expanded form in float64, equal bits
for packing, chunks, pages and rubbish in them, and gradients."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tolerances import assert_bitwise_equal
from torch import Tensor, nn

from jetrl.errors import UserError
from jetrl.kernels import dispatch
from jetrl.kernels.attention import latent, latent_reference
from jetrl.kernels.attention.latent import LatentSizes, Up
from jetrl.kernels.attention.ops import varlen_plan
from jetrl.kernels.registry import tables
from jetrl.kernels.update.gradient import Gradient
from jetrl.types import PagedPlan, VarlenPlan

SIZES = LatentSizes(heads=3, nope=24, rope=8, rank=40, value=20)
LENGTHS, PAGE, SCALE = (1, 33, 7, 20), 4, 32**-0.5


def plan_of(lengths: tuple[int, ...]) -> VarlenPlan:
    return VarlenPlan(torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), lengths)


def inputs(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, N, P + R], rows [T, L + R], and kv_b."""
    g, s = torch.Generator().manual_seed(tokens), SIZES
    shapes = (
        (tokens, s.heads, s.nope + s.rope), (tokens, s.rank + s.rope), (s.heads * (s.nope + s.value), s.rank)
    )
    q, row, w = (torch.randn(shape, generator=g) for shape in shapes)
    return (q * 2).to(dtype), row.to(dtype), (w * 0.3).to(dtype)


def up_of(w: Tensor) -> Up:
    return Up(Gradient(nn.Parameter(w.float())), w, latent.prepare(w, SIZES))


def expanded(q: Tensor, row: Tensor, w: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Keys and values of every head, and a softmax, sequence by sequence, in the type of the inputs."""
    s, out = SIZES, []
    kv = (row[:, : s.rank] @ w.T).view(-1, s.heads, s.nope + s.value)
    shared = row[:, None, s.rank :].expand(-1, s.heads, -1)
    k, v = torch.cat((kv[..., : s.nope], shared), -1), kv[..., s.nope :]
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        scores = torch.einsum("tnh,knh->ntk", a, b) * SCALE
        scores = scores.masked_fill(torch.ones(len(a), len(a), dtype=torch.bool).triu(1), float("-inf"))
        out.append(torch.einsum("ntk,knv->tnv", torch.softmax(scores, -1), c).flatten(1))
    return torch.cat(out)


@torch.no_grad()
def absorbed(q: Tensor, row: Tensor, w: Tensor, plan: VarlenPlan | PagedPlan, pages: Tensor | None = None) -> Tensor:
    up = up_of(w)
    a = latent.attend_absorbed(latent.absorb(q, up, SIZES), row, pages, plan, SCALE, SIZES)
    return latent.lift(a, up, SIZES)


def test_the_absorbed_form_is_the_expanded_one() -> None:
    q, row, w = inputs(sum(LENGTHS), torch.float32)
    want = expanded(q.double(), row.double(), w.double(), LENGTHS)
    assert (absorbed(q, row, w, plan_of(LENGTHS)) - want).abs().max() < 1e-4
    q, row, w = inputs(sum(LENGTHS))
    want = expanded(q.double(), row.double(), w.double(), LENGTHS)
    error = (absorbed(q, row, w, plan_of(LENGTHS)).double() - want).norm() / want.norm()
    assert 1e-4 < error < 1e-2  # three roundings to BF16


def test_a_row_depends_on_its_sequence_alone() -> None:
    """Packed, alone, shared with a stem, in chunks over scattered pages full of rubbish."""
    q, row, w = inputs(sum(LENGTHS))
    whole = absorbed(q, row, w, plan_of(LENGTHS))
    alone = [
        absorbed(*parts, w, plan_of((n,)))
        for *parts, n in zip(q.split(LENGTHS), row.split(LENGTHS), LENGTHS, strict=True)
    ]
    assert_bitwise_equal(torch.cat(alone), whole)
    q33, row33 = q.split(LENGTHS)[1], row.split(LENGTHS)[1]
    stem = varlen_plan(torch.tensor([0, 20, 33], dtype=torch.int32), (20, 13), (-1, 0))
    assert_bitwise_equal(absorbed(q33, row33, w, stem), alone[1])
    for chunk in (1, 5, 33):
        pages = torch.full((20, PAGE, SIZES.rank + SIZES.rope), float("nan")).bfloat16()
        pages[::2] = 1e30
        table = torch.arange(18, 0, -2, dtype=torch.int32)[None]
        found = []
        for start in range(0, 33, chunk):
            stop = min(33, start + chunk)
            at = torch.arange(start, stop)
            slots = table[0, at // PAGE].long() * PAGE + at % PAGE
            plan = PagedPlan(
                SimpleNamespace(), torch.tensor([0, stop - start], dtype=torch.int32), (stop - start,),
                torch.tensor([stop], dtype=torch.int32), (-(-stop // PAGE),), table, slots,
            )
            found.append(absorbed(q33[start:stop], row33[start:stop], w, plan, pages))
        assert_bitwise_equal(torch.cat(found), alone[1])
        assert_bitwise_equal(pages.flatten(0, 1)[slots[-1]], row33[-1])


def test_padding_writes_nothing() -> None:
    q, row, w = inputs(2)
    pages = torch.zeros(2, PAGE, SIZES.rank + SIZES.rope).bfloat16()
    plan = PagedPlan(
        SimpleNamespace(), torch.tensor([0, 1, 2], dtype=torch.int32), (1, 1), torch.ones(2, dtype=torch.int32), (1, 1),
        torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([4, -1]),
    )
    absorbed(q, row, w, plan, pages)
    assert_bitwise_equal(pages[1, 0], row[0])
    assert not pages[0].any() and not pages[1, 1:].any()


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_those_of_the_expanded_form(shared: bool) -> None:
    """Against autograd in float64 of what was multiplied; keys and values are in BF16 in between."""
    q, row, w = inputs(33)
    plan = varlen_plan(torch.tensor([0, 20, 33], dtype=torch.int32), (20, 13), (-1, 0)) if shared else plan_of((33,))
    up, leaves = up_of(w), [t.clone().requires_grad_() for t in (q, row)]
    out = latent.latent_attention(*leaves, up, plan, SCALE, SIZES)
    assert_bitwise_equal(out.detach(), absorbed(q, row, w, plan))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    out.backward(grad)
    wide = [t.double().requires_grad_() for t in (q, row, w)]
    want = torch.autograd.grad(expanded(*wide, (33,)), wide, grad.double())
    for got, exact in zip((*(t.grad for t in leaves), up.gradient.param.grad), want, strict=True):
        assert got is not None
        assert (got.double() - exact).norm() / exact.norm() < 8e-3


def test_a_backend_without_a_certificate_is_refused() -> None:
    with pytest.raises(UserError, match='kernels = "hopper_scaled_mm" cannot compute latent attention'):
        dispatch.require_latent("hopper_scaled_mm")
    with pytest.raises(UserError, match="up to 32 heads; this model has 64 heads"):
        latent.require_sizes(LatentSizes(64, 128, 64, 512, 128), latent.STEPS["triton"])
    latent.require_sizes(LatentSizes(64, 128, 64, 512, 128), latent.STEPS["hopper"])
    for name in ("hopper", "triton"):
        assert all(op.module(name) is not None for op in tables()["attention"] if "latent" in op.name)
    assert dispatch.require_latent("reference").latent_attend is latent_reference.latent_attend
    assert latent_reference.latent_attend.__module__.endswith("latent_reference")


@pytest.mark.parametrize(("size", "lengths"), [
    (1, (32768,)), (4, (32768,)), (1, (2048,) * 16), (4, (32768, *(64,) * 500)), (3, tuple(range(1, 200))),
])  # fmt: skip
def test_programs_of_a_slab_are_those_with_work_and_few_more(size: int, lengths: tuple[int, ...]) -> None:
    """In slabs of 256 tokens: enough for every block that a slab touches, and not twice as many beside one for each of
    its sequences. (A block of a sequence had a program in every slab once: 134M for 32K tokens.)"""
    triton = pytest.importorskip("jetrl.kernels.attention.latent_triton", reason="needs Triton", exc_type=ImportError)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    block = np.concatenate([np.arange(n) // size for n in lengths])
    programs = work = 0
    for low in range(0, len(owner), 256):
        here = slice(low, low + 256)
        touched = len(set(zip(owner[here].tolist(), block[here].tolist(), strict=True)))
        found = triton.blocks_of(len(owner[here]), lengths, size)
        assert touched <= found <= 2 * touched + 256 * (len(lengths) > 1)
        programs, work = programs + found, work + touched
    assert len(lengths) > 1 or programs <= 1.1 * work
