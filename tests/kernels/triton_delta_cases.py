"""Cases of the kernels of Gated DeltaNet: whole sequences against the CPU's definition to rounding, and pieces, forks
and single tokens against whole sequences bit for bit, as in `triton_cases.py`:
`python tests/kernels/triton_delta_cases.py [part of a name]`, on a GPU or in the interpreter.

In the interpreter a product adds 16 elements at a time to FP32 sums, as in `triton_attention_cases.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
import triton_attention_cases as attention  # also makes the interpreter's products those of the definition
import triton_cases as base
import triton_portable_cases  # noqa: F401  (loops over numbers that a kernel computes)
from rewinding import KEPT, rewound, within_a_block
from torch import Tensor

from jetrl.kernels.delta import conv as convolution
from jetrl.kernels.delta import general, packed, reference, tokens
from jetrl.kernels.delta import triton as td
from jetrl.kernels.delta.parts import CHUNK, DeltaState, HeadSizes, Parts, empty_state
from jetrl.types import StateRows

DEVICE, Case, equal = base.DEVICE, base.Case, base.equal
SMALL, LARGE = HeadSizes(1, 2, 16, 16), HeadSizes(2, 4, 128, 128)
assert attention.DEVICE == DEVICE
if base.INTERPRET:
    tokens._PART = packed._COLUMNS = 16  # several programs for a head


def inputs(count: int, sizes: HeadSizes, seed: int) -> tuple[Tensor, ...]:
    """q, k, v in BF16, g, beta in FP32, on the CPU."""
    gen = torch.Generator().manual_seed(seed)
    hk, hv, dk, dv = sizes
    q, k = (torch.nn.functional.normalize(torch.randn(count, hk, dk, generator=gen) + 0.3, dim=-1) for _ in "qk")
    v = torch.randn(count, hv, dv, generator=gen)
    g = -torch.rand(count, hv, generator=gen) * 0.2
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), g, torch.rand(count, hv, generator=gen)


def parts_of(lengths: Sequence[int], before: Sequence[int] = (), rows: Any = None) -> Parts:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)
    there = torch.tensor(before, dtype=torch.int32, device=DEVICE) if before else None
    return Parts(ends, tuple(lengths), there, rows)


@triton.jit
def _planes_kernel(s_p, high_p, joined_p, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    high, low = general.planes(tl.load(s_p + at))
    tl.store(high_p + at, high)
    tl.store(joined_p + at, general.joined(high, low))


def plane_cases() -> Iterator[tuple[str, Case]]:
    def planes() -> None:
        """Every bit of a state comes back, and what products read is the definition's."""
        gen = torch.Generator().manual_seed(4)
        words = torch.randint(-(2**31), 2**31, (4096,), generator=gen, dtype=torch.int64).to(torch.int32)
        words[:6] = torch.tensor([0, 0x8000, 0x7FFF, 0x3F808000, 0x3F80FFFF, -0x80000000])
        s = words.view(torch.float32)
        s = torch.where(s.isfinite(), s, 1.0)
        high, joined = torch.empty(4096, dtype=torch.bfloat16, device=DEVICE), torch.empty(4096, device=DEVICE)
        _planes_kernel[(4,)](s.to(DEVICE), high, joined, N=1024)
        equal("joined", joined.view(torch.int32), s.view(torch.int32))
        equal("high", high.float().view(torch.int32), reference._high(s, torch.bfloat16).view(torch.int32))

    yield "planes of a state", planes


def rule_cases() -> Iterator[tuple[str, Case]]:
    def against_the_definition(lengths: list[int], sizes: HeadSizes) -> None:
        x = inputs(sum(lengths), sizes, sum(lengths))
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        want = reference.delta_rule(*x, Parts(ends, tuple(lengths)), None).float()
        got = td.delta_rule(*(t.to(DEVICE) for t in x), parts_of(lengths), None).cpu().float()
        error = (got - want).norm() / want.norm()
        assert error < 4e-3, f"relative error {error:.5f}"

    def pieces(lengths: list[int], most: int, sizes: HeadSizes) -> None:
        rng, count = random.Random(most), len(lengths)
        xs = [tuple(t.to(DEVICE) for t in inputs(n, sizes, n)) for n in lengths]
        together = tuple(torch.cat(t) for t in zip(*xs, strict=True))
        whole = td.delta_rule(*together, parts_of(lengths), None).split(lengths)
        kept = DeltaState(*(t.fill_(0.37) for t in empty_state(2 + 2 * count, sizes, torch.bfloat16, DEVICE)))
        for tensor in kept:
            tensor[0] = 0.0
        free, row, done = list(range(2, 2 + 2 * count)), [0] * count, [0] * count
        outs: list[list[Tensor]] = [[] for _ in lengths]
        while any(n < length for n, length in zip(done, lengths, strict=True)):
            chosen = [s for s in range(count) if done[s] < lengths[s] and rng.random() < 0.8]
            if not chosen:
                continue
            sizes_now = [min(lengths[s] - done[s], rng.randint(1, most)) for s in chosen]
            read = [row[s] for s in chosen]
            for s in chosen:
                if row[s] == 0 or rng.random() < 0.3:
                    old, row[s] = row[s], free.pop(0)
                    free += [old] if old else []
            rows = StateRows(*(torch.tensor(r, device=DEVICE) for r in (read, [row[s] for s in chosen])))
            spans = [(xs[s], done[s], done[s] + n) for s, n in zip(chosen, sizes_now, strict=True)]
            cut = tuple(torch.cat(t) for t in zip(*[[t[a:b] for t in x] for x, a, b in spans], strict=True))
            o = td.delta_rule(*cut, parts_of(sizes_now, [done[s] for s in chosen], rows), kept)
            for s, n, one in zip(chosen, sizes_now, o.split(sizes_now), strict=True):
                outs[s].append(one)
                done[s] += n
        fresh, rows = empty_state(1 + count, sizes, torch.bfloat16, DEVICE), torch.arange(1, 1 + count, device=DEVICE)
        once = StateRows(torch.zeros_like(rows), rows)
        td.delta_rule(*together, parts_of(lengths, [0] * count, once), fresh)
        for s, length in enumerate(lengths):
            equal(f"outputs of sequence {s}", torch.cat(outs[s]), whole[s])
            equal(f"state of sequence {s}", kept.state[row[s]], fresh.state[1 + s])
            for name, mine, theirs in zip(kept._fields[1:4], kept[1:4], fresh[1:4], strict=True):
                live = length % CHUNK
                equal(f"{name} of sequence {s}", mine[row[s]][:, :live], theirs[1 + s][:, :live])

    def whole_sequences(lengths: list[int], sizes: HeadSizes) -> None:
        """The form of training against the general one."""
        x = [t.to(DEVICE) for t in inputs(sum(lengths), sizes, 11)]
        parts = parts_of(lengths)
        alike("outputs", td.delta_rule(*x, parts, None), general.general_rule(*x, parts, None))  # type: ignore[arg-type]

    sizes = SMALL if base.INTERPRET else LARGE
    if base.INTERPRET:
        yield "packed, 3 value heads", partial(whole_sequences, [16, 1, 63, 64, 130], HeadSizes(1, 3, 16, 32))
    else:
        for heads in (LARGE, HeadSizes(1, 1, 16, 32), HeadSizes(1, 3, 64, 64), HeadSizes(4, 4, 64, 128)):
            for lengths in ([*range(1, 131)], [1], [64], [3000, 5, 1000], [128] * 65):
                name = f"packed, {len(lengths)} sequences, heads {tuple(heads)}"
                yield name, partial(whole_sequences, lengths, heads)
        yield "packed, heads of 9B", partial(whole_sequences, [4096, 100, 1, 2049], HeadSizes(16, 32, 128, 128))
    for lengths in ([1], [15, 17, 66]) if base.INTERPRET else ([1], [15, 16, 17], [63, 64, 65, 130], [200, 3]):
        yield f"delta_rule {lengths}", partial(against_the_definition, lengths, sizes)
    for most in (20,) if base.INTERPRET else (1, 7, 40, 150):
        lengths = [5, 17, 70] if base.INTERPRET else [1, 15, 16, 17, 63, 64, 65, 127, 129, 300]
        yield f"pieces of up to {most} tokens", partial(pieces, lengths, most, sizes)
    if not base.INTERPRET:
        for wide in (HeadSizes(1, 1, 128, 128), HeadSizes(1, 3, 128, 128), HeadSizes(4, 4, 64, 128)):
            yield f"pieces with heads {tuple(wide)}", partial(pieces, [70, 64, 140], 30, wide)


def alike(name: str, got: Tensor, want: Tensor) -> None:
    """`equal`, without a copy to the host where that is so."""
    kind = torch.int16 if got.element_size() == 2 else torch.int32
    if not torch.equal(got.contiguous().view(kind), want.contiguous().view(kind)):
        equal(name, got, want)


def live_rows(held: DeltaState, totals: dict[int, int]) -> list[Tensor]:
    """What later passes read of states, whose sequences have so many tokens by row; of other rows, all."""
    out = []
    for name, tensor in zip(held._fields, held, strict=True):
        block = {"state": 0, "errors": 16, "inverse": 16}.get(name, CHUNK)
        live = torch.ones(len(tensor), max(block, 1), dtype=torch.bool)
        for row, total in totals.items() if block else ():
            live[row] = torch.arange(block) < total % block
        shape = (len(tensor), 1, -1) + (1,) * (tensor.dim() - 3)
        out.append(torch.where(live.view(shape).to(tensor.device), tensor, 0.0))
    return out


def token_cases() -> Iterator[tuple[str, Case]]:
    def single_tokens(sizes: HeadSizes, begun: list[int], steps: int) -> None:
        """Single tokens by their own kernels and by the general one: outputs, what is kept, and nothing else."""
        rng, count = random.Random(steps), len(begun)
        held = DeltaState(*(t.fill_(0.37) for t in empty_state(2 + 2 * count, sizes, torch.bfloat16, DEVICE)))
        for tensor in held:
            tensor[0] = 0.0
        row = [2 + i if n else 0 for i, n in enumerate(begun)]
        free, total = list(range(2 + count, 2 + 2 * count)), list(begun)
        if some := [n for n in begun if n]:
            there = torch.tensor([r for r in row if r], device=DEVICE)
            x = [t.to(DEVICE) for t in inputs(sum(some), sizes, 7)]
            first = parts_of(some, [0] * len(some), StateRows(torch.zeros_like(there), there))
            general.general_rule(*x, first, held)  # type: ignore[arg-type]
        for step in range(steps):
            read = list(row)
            for i in range(count):
                if row[i] == 0 or free and rng.random() < 0.4:
                    row[i] = free.pop()
            rows = StateRows(*(torch.tensor(r, device=DEVICE) for r in (read, row)))
            x = [t.to(DEVICE) for t in inputs(count, sizes, 100 + step)]
            parts, other = parts_of([1] * count, total, rows), DeltaState(*(t.clone() for t in held))
            assert parts.single
            got, want = td.delta_rule(*x, parts, held), general.general_rule(*x, parts, other)  # type: ignore[arg-type]
            alike(f"outputs of step {step}", got, want)
            total = [n + 1 for n in total]
            ends = dict(zip(row, total, strict=True))
            for name, mine, theirs in zip(held._fields, live_rows(held, ends), live_rows(other, ends), strict=True):
                alike(f"{name} after step {step}", mine, theirs)
            free += [r for r in read if r and r not in row]

    def padding() -> None:
        """A place of a captured step that no sequence has: it leaves the rows of others alone."""
        held, x = empty_state(4, SMALL, torch.bfloat16, DEVICE), [t.to(DEVICE) for t in inputs(2, SMALL, 3)]
        rows = StateRows(*(torch.tensor(r, device=DEVICE) for r in ([2, 0], [2, 1])))
        alone, kept = StateRows(rows.read[:1], rows.write[:1]), DeltaState(*(t.clone() for t in held))
        td.delta_rule(*x, parts_of([1, 1], [0, -1], rows), held)  # type: ignore[arg-type]
        td.delta_rule(*(t[:1] for t in x), parts_of([1], [0], alone), kept)  # type: ignore[arg-type]
        for name, mine, theirs in zip(held._fields, held, kept, strict=True):
            for row in (0, 2, 3):
                equal(f"{name} of row {row}", mine[row], theirs[row])

    if base.INTERPRET:
        yield f"tokens with heads {tuple(SMALL)}", partial(single_tokens, SMALL, [0, 1, 15, 30, 47, 62, 63, 127], 2)
        yield "tokens with heads (1, 3, 16, 32)", partial(single_tokens, HeadSizes(1, 3, 16, 32), [0, 62], 3)
    else:
        for sizes in (LARGE, HeadSizes(1, 1, 16, 32), HeadSizes(1, 3, 64, 64)):
            for count, steps in ((1, 130), (64, 66), (257, 3)):
                begun = [i % 130 for i in range(count)]
                yield f"{count} tokens with heads {tuple(sizes)}", partial(single_tokens, sizes, begun, steps)
        yield "a token with the heads of 9B", partial(single_tokens, HeadSizes(16, 32, 128, 128), list(range(64)), 3)
    yield "padding", padding


def conv_cases() -> Iterator[tuple[str, Case]]:
    def conv(sizes: HeadSizes) -> None:
        gen, lengths = torch.Generator().manual_seed(1), [1, 2, 9, 21]
        channels = sum(sizes.columns)
        wide = torch.randn(sum(lengths), channels + 16, generator=gen).bfloat16()  # with the gate behind
        weight = torch.rand(channels, 4, generator=gen).sub(0.5).bfloat16()
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        want = reference.conv_heads(wide[:, :channels], weight, sizes, Parts(ends, tuple(lengths)), None)
        x, w = wide.to(DEVICE)[:, :channels], weight.to(DEVICE)
        got = convolution.conv_heads(x, w, sizes, parts_of(lengths), None)
        for name, mine, theirs in zip("qkv", got, want, strict=True):
            error = (mine.cpu().float() - theirs.float()).norm() / theirs.float().norm()
            assert mine.shape == theirs.shape and error < 2e-3, f"{name}: relative error {error:.5f}"
        for size in (3, KEPT):
            state = torch.full((5, size, channels), 7.0, dtype=torch.bfloat16, device=DEVICE)
            long, outs, read = x[12:], [], 0
            for at, n in ((0, 2), (2, 1), (3, 1), (4, 12), (16, 5)):
                write = 3 if at < 4 else 2  # another row from then on
                rows = StateRows(*(torch.tensor([r], device=DEVICE) for r in (read, write)))
                outs.append(convolution.conv_heads(long[at : at + n], w, sizes, parts_of([n], [at], rows), state))
                read = write
                for position in range(max(0, at + n - size), at + n):
                    equal(f"kept row {position}", state[write, position % size], long[position])
            for name, whole, cut in zip("qkv", got, zip(*outs, strict=True), strict=True):
                equal(f"{name} in pieces", torch.cat(cut), whole[12:])

    def single(sizes: HeadSizes, size: int) -> None:
        """One row of each sequence, next to what a pass with another length gives."""
        gen, channels, before = torch.Generator().manual_seed(5), sum(sizes.columns), [0, 1, 2, 3, 7, 40, 64]
        count = len(before)
        x = torch.randn(count + 2, channels, generator=gen).bfloat16().to(DEVICE)
        w = torch.rand(channels, 4, generator=gen).sub(0.5).bfloat16().to(DEVICE)
        state = torch.randn(2 * count + 4, size, channels, generator=gen).bfloat16().to(DEVICE)
        read, write = list(range(2, 2 + count)), [2 + i if i % 2 else 2 + count + i for i in range(count)]
        one = StateRows(*(torch.tensor(r, device=DEVICE) for r in (read, write)))
        more = StateRows(*(torch.tensor([*r, 2 * count + 3], device=DEVICE) for r in (read, write)))
        other = state.clone()
        got = convolution.conv_heads(x[:count], w, sizes, parts_of([1] * count, before, one), state)
        want = convolution.conv_heads(x, w, sizes, parts_of([1] * count + [2], [*before, 0], more), other)
        for name, mine, theirs in zip("qkv", got, want, strict=True):
            equal(name, mine, theirs[:count])
        equal("rows", state[:-1], other[:-1])

    def gates(sizes: HeadSizes) -> None:
        gen = torch.Generator().manual_seed(2)
        z = torch.randn(33, 2 * sizes.value_heads, generator=gen) * 4
        a, dt = (torch.randn(sizes.value_heads, generator=gen) for _ in range(2))
        got = td.delta_gates(*(t.to(DEVICE) for t in (z, a, dt)))
        for mine, theirs in zip(got, reference.delta_gates(z, a, dt), strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-6)

    def gated(sizes: HeadSizes) -> None:
        gen, (_, hv, _, dv) = torch.Generator().manual_seed(3), sizes
        x, wide = (torch.randn(19, hv, n, generator=gen).bfloat16() for n in (dv, 2 * dv))
        weight, gate = torch.rand(dv, generator=gen).bfloat16() + 0.5, wide[:, :, dv:]
        there = wide.to(DEVICE)[:, :, dv:]
        for got, want in (
            (td.gated_norm(x.to(DEVICE), there, weight.to(DEVICE), 1e-6), reference.gated_norm(x, gate, weight, 1e-6)),
            (td.output_gate(x.to(DEVICE), there), reference.output_gate(x, gate)),
        ):
            error = (got.cpu().float() - want.float()).norm() / want.float().norm()
            assert got.shape == want.shape and error < 2e-3, f"relative error {error:.5f}"

    sizes = SMALL if base.INTERPRET else LARGE
    for size in (3, KEPT):
        yield f"conv_heads of single rows, {size} kept", partial(single, sizes, size)
    for name, case in (("conv_heads", conv), ("delta_gates", gates), ("gated_norm and output_gate", gated)):
        yield name, partial(case, sizes)


def draft_cases() -> Iterator[tuple[str, Case]]:
    def drafts(deepest: int) -> None:
        if base.INTERPRET:
            found = rewound(td, (14, 61), 6, deepest, within_a_block, SMALL, DEVICE)
        else:
            found = rewound(td, range(1, 65), 70, deepest, within_a_block, LARGE, DEVICE)
        for s, (got, want) in enumerate(found):
            equal(f"outputs of sequence {s}", got, want)

    for deepest in (3,) if base.INTERPRET else (1, 3, 7, 15):
        yield f"up to {deepest} drafts taken back", partial(drafts, deepest)


def all_cases() -> list[tuple[str, Case]]:
    return [case for kind in (plane_cases, rule_cases, token_cases, conv_cases, draft_cases) for case in kind()]


if __name__ == "__main__":
    raise SystemExit(base.main(all_cases()))
