"""Cases of the adapters' Triton kernels, bit for bit against their order of sums in numpy, as in `triton_cases.py`:
`python tests/kernels/triton_adapter_cases.py [part of a name]`, in the interpreter.

In the interpreter a product adds 16 elements at a time to FP32 sums, here and there, as in
`triton_attention_cases.py`; `tests/gpu/test_adapter_hopper.py` compares sizes with sizes on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import triton_attention_cases as attention  # also makes the interpreter's products those of the definition
import triton_cases as base
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.adapters import heads as tq
from jetrl.kernels.adapters import reference
from jetrl.kernels.adapters import swiglu as tw
from jetrl.kernels.adapters import triton as ta
from jetrl.kernels.adapters.ops import Heads
from jetrl.kernels.attention import heads as th
from jetrl.kernels.experts.groups import Groups
from jetrl.kernels.pointwise import swiglu as ts
from jetrl.kernels.qtensor import Coded, QTensor
from jetrl.precision.lora import edges
from jetrl.types import LayerCache

Case, equal = base.Case, base.equal


def in_chains(x: Tensor, a: Tensor) -> Tensor:
    """u: the sums, rounded."""
    return sums(x, a).bfloat16()


def sums(x: Tensor, a: Tensor) -> Tensor:
    """FP32: each chain from zero, their sums added in order."""
    total = np.zeros((len(x), len(a)), np.float32)
    for start in range(0, x.shape[1], ta.CHAIN):
        part = slice(start, start + ta.CHAIN)
        zero = np.zeros_like(total)
        total = total + attention.product(x[:, part].float().numpy(), a[:, part].float().numpy().T, zero)
    return torch.from_numpy(total)


def added(y: Tensor, u: Tensor, b: Tensor, scale: float, places: ta.Places) -> Tensor:
    out, rank = y.clone(), b.shape[1]
    for i, ((start, stop), (first, last)) in enumerate(places):
        own = u[:, i * rank : (i + 1) * rank].float().numpy()
        zero = np.zeros((len(y), last - first), np.float32)
        t = torch.from_numpy(attention.product(own, b[first:last].float().numpy().T, zero))
        out[:, start:stop] = (y[:, start:stop].float() + t * torch.tensor(scale, dtype=torch.float32)).bfloat16()
    return out


def both_halves(x: Tensor, y: Tensor, a: Tensor, b: Tensor, scale: float, places: ta.Places) -> Tensor:
    return ta.adapter_finish(y, ta.adapter_begin(x, a, None), b, scale, places)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def adapter_cases() -> Iterator[tuple[str, Case]]:
    def both(rows: int, k: int, sections: tuple[int, ...], chosen: tuple[int, ...], rank: int) -> None:
        of_base, own = edges(sections), edges(tuple(sections[i] for i in chosen))
        places = tuple((of_base[i], rows) for i, rows in zip(chosen, own, strict=True))
        x, y = drawn(rows, k, seed=0), drawn(rows, sum(sections), seed=1)
        a, b = drawn(rank * len(chosen), k, seed=2), drawn(own[-1][1], rank, seed=3)
        scale = 32 / rank**0.5
        u = in_chains(x, a)
        want = added(y, u, b, scale, places)
        equal("u", ta.adapter_shrink(x, a), u)
        got = ta.adapter_expand(y, u, b, scale, places, y.clone())
        equal("y", got, want)
        few, alone = y.clone(), y[-1:].clone()
        equal("both", both_halves(x, few, a, b, scale, places), want)
        equal("a row alone", both_halves(x[-1:], alone, a, b, scale, places), want[-1:])
        for pow2 in (False, True):
            begun = ta.adapter_begin(x, a, pow2)
            assert begun.codes is not None and begun.left.ndim == 3
            base.equal_q("codes", begun.codes, ref.quantize_1x128(x, pow2))
            equal("y beside codes", ta.adapter_finish(y.clone(), begun, b, scale, places), want)
        # the reference adds without rounding inside of a sum
        true = reference.adapter_expand(y, reference.adapter_shrink(x, a), b, scale, places, y.clone())
        assert float((got.double() - true.double()).norm() / true.double().norm()) < 1e-2

    sizes = [
        (3, 1152, (96, 40, 40), (0, 1, 2), 8), (18, 512, (64,), (0,), 16), (70, 200, (72, 40, 40), (0, 2), 24),
        (5, 640, (136, 264), (0, 1), 32), (2, 64, (24, 8), (1,), 136),
    ]
    for rows, k, sections, chosen, rank in sizes:
        what = f"adapters {rows} x {k}, {sections}, {chosen}, rank {rank}"
        yield what, partial(both, rows, k, sections, chosen, rank)

    def many() -> None:
        """More tokens than have a program for each chain."""
        x, a, b = drawn(ta.FEW + 3, 520, seed=0), drawn(8, 520, seed=1), drawn(8, 8, seed=2)
        y, places = drawn(ta.FEW + 3, 8, seed=3), (((0, 8), (0, 8)),)
        want = added(y, in_chains(x, a), b, 2.0, places)
        equal("many", both_halves(x, y.clone(), a, b, 2.0, places), want)
        equal("few of them", both_halves(x[:5], y[:5].clone(), a, b, 2.0, places), want[:5])

    yield "adapters of many tokens", many

    def order() -> None:
        """Two chains cancel, so that what a third adds shows where each begins and ends."""
        v, c = drawn(6, ta.CHAIN, seed=0), drawn(16, ta.CHAIN, seed=1)
        x = torch.cat([v, -v, drawn(6, 200, seed=2) * 2**-13], 1)
        a = torch.cat([c, c, drawn(16, 200, seed=3)], 1)
        u = in_chains(x, a)
        assert 0 < float(u.abs().max()) < 0.02 and not torch.equal(u, in_chains(x.roll(128, 1), a.roll(128, 1)))
        y, b, places = torch.zeros(6, 8).bfloat16(), drawn(8, 16, seed=4), (((0, 8), (0, 8)),)
        equal("one program", ta.adapter_shrink(x, a), u)
        want = added(y, u, b, 1.0, places)
        equal("a program for each chain", both_halves(x, y.clone(), a, b, 1.0, places), want)

    yield "chains begin from zero", order


def swiglu_cases() -> Iterator[tuple[str, Case]]:
    """The sum of the base and its adapters in SwiGLU's kernel: bits of one op after the other."""
    def fused(rows: int, f: int, chosen: tuple[int, ...], rank: int) -> None:
        k, of_base, own = 520, edges((f, f)), edges((f,) * len(chosen))
        places = tuple((of_base[i], at) for i, at in zip(chosen, own, strict=True))
        x, y = drawn(rows, k, seed=0), drawn(rows, 2 * f, seed=1)
        a, b = drawn(rank * len(chosen), k, seed=2) * 2**-5, drawn(own[-1][1], rank, seed=3)
        begun, scale = ta.adapter_begin(x, a, None), 32 / rank**0.5
        assert (begun.left.ndim == 3) == (rows <= ta.FEW)
        whole = ta.adapter_finish(y.clone(), begun, b, scale, places)
        want = ts.swiglu(whole)
        equal("SwiGLU", want, ref.swiglu(whole))
        assert not torch.equal(want, ref.swiglu(y)) and bool(want.isfinite().all())
        call = partial(tw.adapter_finish_swiglu, begun=begun, b=b, scale=scale, places=places)
        equal("in BF16", call(y.clone(), pow2=None, keep=True), want)
        alone = y[-1:].clone()
        of_one = ta.adapter_begin(x[-1:], a, None)
        equal("a row alone", tw.adapter_finish_swiglu(alone, of_one, b, scale, places, None, True), want[-1:])
        for pow2 in (False, True):
            both, q = call(y.clone(), pow2=pow2, keep=True), ref.quantize_1x128(want, pow2)
            assert isinstance(both, Coded)
            equal("beside codes", both.values, want)
            base.equal_q("codes", both.codes, q)
            codes = call(y.clone(), pow2=pow2, keep=False)
            assert isinstance(codes, QTensor)
            base.equal_q("codes alone", codes, q)

    sizes = [
        (1, 256, (0, 1), 8), (17, 200, (0, 1), 32), (64, 136, (0, 1), 40), (66, 264, (0, 1), 32), (3, 72, (0,), 16),
        (18, 392, (1,), 8), (2, 128, (0, 1), 136), (ta.FEW + 3, 136, (0, 1), 8),
    ]
    for rows, f, chosen, rank in sizes:
        yield f"SwiGLU after adapters {chosen}, {rows} x {f}, rank {rank}", partial(fused, rows, f, chosen, rank)


def heads_cases() -> Iterator[tuple[str, Case]]:
    """The sum of the base and its adapters in the kernel of norms, RoPE and the cache: bits of one op after the other.
    """
    def fused(rows: int, heads: tuple[int, int], h: int, chosen: tuple[int, ...], rank: int, normed: bool) -> None:
        tq.JOINED, ((n, g), k) = True, (heads, 520)
        sections = (n * h, g * h, g * h)
        of_base, own = edges(sections), edges(tuple(sections[i] for i in chosen))
        places = tuple((of_base[i], at) for i, at in zip(chosen, own, strict=True))
        x, y = drawn(rows, k, seed=0), drawn(rows, sum(sections), seed=1)
        a, b = drawn(rank * len(chosen), k, seed=2) * 2**-5, drawn(own[-1][1], rank, seed=3)
        begun, scale = ta.adapter_begin(x, a, None), 32 / rank**0.5
        whole = ta.adapter_finish(y.clone(), begun, b, scale, places)
        norms = (drawn(h, seed=4), drawn(h, seed=5)) if normed else None
        angles = torch.rand(rows + 7, h // 2, generator=torch.Generator().manual_seed(6)) * 6
        positions = torch.arange(rows).flip(0) + 3
        slots = torch.where(torch.arange(rows) % 5 == 3, -1, torch.arange(rows) * 2 + 1)
        for fp8 in (False, True):
            for paged in (False, True):
                def of(keys: LayerCache | None, fp8: bool = fp8) -> Heads:
                    cache = None if keys is None else (keys, slots)
                    return Heads(heads, h, norms, 1e-6, (angles.cos(), angles.sin()), positions, cache, fp8)

                ours, theirs = (pages(rows, g, h, fp8) if paged else None for _ in range(2))
                got = tq.adapter_finish_heads(y.clone(), begun, b, scale, places, of(ours))
                want = th.qkv_norm_rope(whole, *of(theirs))
                defined = reference.qkv_norm_rope(whole, *of(pages(rows, g, h, fp8) if paged else None))
                for name, one, two, three in zip("qkv", got, want, defined, strict=True):
                    equal(f"{name}, paged {paged}, FP8 {fp8}", bits(one), bits(two))
                    equal(f"{name} as defined, paged {paged}, FP8 {fp8}", bits(one), bits(three))
                if paged and fp8:
                    assert ours is not None and theirs is not None
                    equal("scales", ours.scales, theirs.scales)
                    assert bool(ours.scales.any()) and bool(bits(ours.keys).any())
        assert not torch.equal(whole, y)

    sizes = [
        (1, (4, 2), 128, (0, 1, 2), 8, True), (17, (3, 1), 64, (0, 1, 2), 32, True),
        (64, (2, 1), 128, (0, 2), 40, False), (5, (2, 2), 96, (1,), 16, True),
        (18, (2, 1), 64, (2,), 8, True), (3, (2, 1), 32, (0, 1), 136, False),
        (2, (2, 1), 16, (0, 1, 2), 8, True), (ta.FEW + 1, (2, 1), 64, (0, 1, 2), 8, True),
    ]
    for rows, heads, h, chosen, rank, normed in sizes:
        what = f"heads after adapters {chosen}, {rows} rows, {heads} of {h}, rank {rank}"
        yield what, partial(fused, rows, heads, h, chosen, rank, normed)


def pages(rows: int, g: int, h: int, fp8: bool) -> LayerCache:
    """Two for each slot that is written, of 16 tokens."""
    shape = (-(-2 * rows // 16) + 1, 16, g, h)
    keys = torch.zeros(2, *shape, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    scales = torch.zeros(shape[0], g, 16, 2, dtype=torch.bfloat16) if fp8 else None
    return LayerCache(keys[0], keys[1], scales)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def expert_cases() -> Iterator[tuple[str, Case]]:
    """Groups as a GPU has them: from multiples of 16 on, rows of padding between, rows of nobody behind."""
    def rows(rank: int) -> None:
        counts, k, places = (3, 0, 17, 1), 640, (((0, 40), (0, 40)), ((40, 64), (40, 64)))
        sizes = [-(-n // 16) * 16 for n in counts]
        starts = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32)
        groups = Groups(torch.empty(0), torch.empty(0), starts, torch.tensor(counts))
        total, behind = int(starts[-1]), 32
        x, y, dy = (drawn(total + behind, size, seed=i) for i, size in enumerate((k, 64, 64)))
        a, b = drawn(4 * 2 * rank, k, seed=3), drawn(4 * 64, rank, seed=4)
        u, out = ta.adapter_shrink_rows(x, a, groups), torch.full_like(y, 7.0)
        ta.adapter_expand_rows(y, u, b, 0.75, places, groups, out)
        du = ta.adapter_expand_rows_backward(dy, b, 0.75, places, groups)
        for e, (start, count) in enumerate(zip(starts.tolist(), counts, strict=False)):
            at = slice(start, start + count)
            own_a, own_b = a[e * 2 * rank : (e + 1) * 2 * rank], b[e * 64 : (e + 1) * 64]
            equal(f"u of expert {e}", u[at], in_chains(x[at], own_a))
            equal(f"y of expert {e}", out[at], added(y[at], u[at], own_b, 0.75, places))
            for i, ((begin, end), _) in enumerate(places):
                turned, of_u = own_b[begin:end].T.contiguous(), slice(i * rank, (i + 1) * rank)
                want = (sums(dy[at, begin:end], turned) * 0.75).bfloat16()
                equal(f"du of expert {e}", du[at, of_u].contiguous(), want)
        assert bool((out[total:] == 7.0).all()), "rows behind the last group"

    yield "adapters of experts, rank 8", partial(rows, 8)
    yield "adapters of experts, rank 24", partial(rows, 24)


if __name__ == "__main__":
    raise SystemExit(base.main([*adapter_cases(), *swiglu_cases(), *heads_cases(), *expert_cases()]))
