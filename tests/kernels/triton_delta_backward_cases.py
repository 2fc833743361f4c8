"""Cases of the backward kernels of Gated DeltaNet: against `delta/backward.py` in float64, and run twice for the same
bits, as in `triton_cases.py`: `python tests/kernels/triton_delta_backward_cases.py [part of a name]`, on a GPU or in
the interpreter.

What is allowed is what BF16 operands of products leave: the forward pass has 3.5e-3 to 8.5e-3 for the same kinds of
inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
import triton_cases as base
import triton_portable_cases  # noqa: F401  (products in the interpreter, loops over numbers that a kernel computes)
from torch import Tensor

from jetrl.kernels.delta import backward as plain
from jetrl.kernels.delta import backward_rows as br
from jetrl.kernels.delta import backward_triton as bt
from jetrl.kernels.delta.parts import HeadSizes, Parts

DEVICE, Case, equal = base.DEVICE, base.Case, base.equal
NAMES = ("q", "k", "v", "g", "beta")
# norm(error) / norm(gradient), of the worst of several lengths and heads, rounded up
MOST = {"random": 6e-3, "keys": 1.2e-2, "slow": 1.2e-2}


def inputs(count: int, sizes: HeadSizes, kind: str, seed: int) -> tuple[Tensor, ...]:
    """q, k, v in BF16, g, beta in FP32, and a gradient in BF16, on the CPU. `keys`: keys alike; `slow`: keys alike, a
    slow decay and steps of nearly 1."""
    gen = torch.Generator().manual_seed(seed)
    hk, hv, dk, dv = sizes
    shift = {"random": 0.0, "keys": 0.3, "slow": 0.1}[kind]
    q, k = (torch.nn.functional.normalize(torch.randn(count, hk, dk, generator=gen) + shift, dim=-1) for _ in "qk")
    v, up = (torch.randn(count, hv, dv, generator=gen).bfloat16() for _ in range(2))
    g, beta = -torch.rand(count, hv, generator=gen), torch.rand(count, hv, generator=gen)
    if kind == "slow":
        g, beta = g * 0.02, 1.0 - 0.05 * beta
    return q.bfloat16(), k.bfloat16(), v, g, beta, up


def in_float64(x: tuple[Tensor, ...], lengths: list[int]) -> list[Tensor]:
    """Gradients of `plain.rule`, by autograd, of the five inputs."""
    q, k, v, g, beta, up = (t.double() for t in x)
    leaves = [t.requires_grad_() for t in (q, k, v, g, beta)]
    repeat, at, total = v.shape[1] // k.shape[1], 0, torch.zeros((), dtype=torch.float64)
    for n in lengths:
        pad = -n % plain.CHUNK
        cut = [F.pad(t[at : at + n].transpose(0, 1), (0, 0) * (t.ndim - 2) + (0, pad)) for t in leaves]
        cut[:2] = (t.repeat_interleave(repeat, 0) for t in cut[:2])
        out = plain.rule(*(t[None] for t in cut))[0].transpose(0, 1)[:n]
        total, at = total + (out * up[at : at + n]).sum(), at + n
    return list(torch.autograd.grad(total, leaves))


def parts_of(lengths: list[int]) -> Parts:
    return Parts(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE), tuple(lengths))


def errors(x: tuple[Tensor, ...], lengths: list[int]) -> dict[str, float]:
    """Of the kernels' gradients, relative; the kernels run twice."""
    *five, up = (t.to(DEVICE) for t in x)
    first, again = (bt.delta_rule_backward(up, *five, parts_of(lengths)) for _ in range(2))
    found, wanted = {}, in_float64(x, lengths)
    for name, mine, same, given, want in zip(NAMES, first, again, five, wanted, strict=True):
        equal(f"d{name} again", mine, same)
        assert mine.dtype == given.dtype and mine.shape == given.shape
        # No state decays at a first token: of it alone dg is 0, and what is left of sums counts as of dbeta's size.
        size = want.norm() if want.any() else wanted[NAMES.index("beta")].norm()
        found[name] = float((mine.cpu().double() - want).norm() / size)
    return found


def rule_cases() -> Iterator[tuple[str, Case]]:
    def against_float64(lengths: list[int], sizes: HeadSizes, kind: str) -> None:
        found = errors(inputs(sum(lengths), sizes, kind, sum(lengths)), lengths)
        print(kind, lengths, tuple(sizes), {name: f"{error:.1e}" for name, error in found.items()})
        for name, error in found.items():
            assert error < MOST[kind], f"d{name}: relative error {error:.5f}"

    small, wide, square = HeadSizes(1, 2, 16, 32), HeadSizes(1, 1, 64, 16), HeadSizes(2, 2, 32, 32)
    large = HeadSizes(2, 4, 128, 128)
    few = {"random": [([70, 1, 33], small), ([1], small)], "keys": [([90], HeadSizes(1, 2, 128, 128))]}
    few["slow"] = [([64], wide)]
    many = [([70, 1, 33], small), ([64], wide), ([130], square)]
    many += [([1], large), ([63, 64, 65, 300], large), ([2000, 3], large)]
    for kind in MOST:
        for lengths, sizes in few[kind] + [([130], square)][: kind == "slow"] if base.INTERPRET else many:
            yield f"{kind} {lengths} {tuple(sizes)}", partial(against_float64, lengths, sizes, kind)


def pack_cases() -> Iterator[tuple[str, Case]]:
    def alone(lengths: list[int], sizes: HeadSizes) -> None:
        """A sequence's gradients do not depend on those around it."""
        *five, up = (t.to(DEVICE) for t in inputs(sum(lengths), sizes, "keys", 3))
        packed = bt.delta_rule_backward(up, *five, parts_of(lengths))
        at = 0
        for n in lengths:
            cut = [t[at : at + n].contiguous() for t in (up, *five)]
            for name, mine, whole in zip(NAMES, bt.delta_rule_backward(*cut, parts_of([n])), packed, strict=True):
                equal(f"d{name} of rows {at} to {at + n}", mine, whole[at : at + n])
            at += n

    yield "a sequence alone", partial(alone, [20, 65], HeadSizes(1, 2, 16, 16))


def row_cases() -> Iterator[tuple[str, Case]]:
    """FP32 here and there: BF16 results to their rounding, the others to that of sums."""
    def close(names: str, got: Sequence[Tensor], again: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        for name, mine, same, theirs in zip(names.split(), got, again, want, strict=True):
            equal(f"{name} again", mine, same)
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, name
            error = (mine.cpu().double() - theirs.double()).norm() / theirs.double().norm()
            assert error < (2e-5 if mine.dtype == torch.float32 else 3e-4), f"{name}: relative error {error:.6f}"

    def conv(sizes: HeadSizes, width: int) -> None:
        gen, lengths = torch.Generator().manual_seed(1), [1, 2, 9, 40, 3]
        channels = sum(sizes.columns)
        x = torch.randn(sum(lengths), channels + 16, generator=gen).bfloat16()  # with the gate behind
        weight = torch.rand(channels, width, generator=gen).sub(0.5).bfloat16()
        hk, hv, dk, dv = sizes
        ups = tuple(torch.randn(len(x), h, d, generator=gen).bfloat16() for h, d in ((hk, dk), (hk, dk), (hv, dv)))
        on_host = Parts(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), tuple(lengths))
        want = plain.conv_heads_backward(ups, x[:, :channels], weight, sizes, on_host)
        given = tuple(t.to(DEVICE) for t in ups), x.to(DEVICE)[:, :channels], weight.to(DEVICE), sizes
        got, again = (br.conv_heads_backward(*given, parts_of(lengths)) for _ in range(2))
        close("dx dw", got, again, want)

    def gated(heads: int, size: int) -> None:
        gen = torch.Generator().manual_seed(3)
        x, up, wide = (torch.randn(19, heads, n, generator=gen).bfloat16() for n in (size, size, 2 * size))
        weight, gate = torch.rand(size, generator=gen).bfloat16() + 0.5, wide[:, :, size:]
        there = wide.to(DEVICE)[:, :, size:]
        want = plain.gated_norm_backward(up, x, gate, weight, 1e-6)
        given = up.to(DEVICE), x.to(DEVICE), there
        got, again = (br.gated_norm_backward(*given, weight.to(DEVICE), 1e-6) for _ in range(2))
        close("dx dgate dw", got, again, want)
        got, again = (br.output_gate_backward(*given) for _ in range(2))
        close("dx dgate", got, again, plain.output_gate_backward(up, x, gate))

    for sizes, width in ((HeadSizes(1, 2, 16, 32), 4), (HeadSizes(2, 2, 32, 16), 3)):
        yield f"conv_heads {tuple(sizes)}, width {width}", partial(conv, sizes, width)
    for heads, size in ((3, 16), (2, 24)):
        yield f"gated_norm and output_gate, {heads} heads of {size}", partial(gated, heads, size)
    if not base.INTERPRET:
        yield "conv_heads of 9B", partial(conv, HeadSizes(16, 32, 128, 128), 4)
        yield "gated_norm and output_gate of 9B", partial(gated, 32, 128)


def all_cases() -> list[tuple[str, Case]]:
    return [*rule_cases(), *pack_cases(), *row_cases()]


if __name__ == "__main__":
    raise SystemExit(base.main(all_cases()))
