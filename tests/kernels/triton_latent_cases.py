"""The kernels of latent attention (`latent_triton`, and `latent_portable` with other steps) against `latent_reference`;
run by the interpreter test and a GPU.

Bits are compared among ways to compute a row: alone, packed, in chunks over pages, one query at a time. Against the
definition of the CPU, whose sums are exact, results are compared up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton_cases as base  # also makes the interpreter round as a GPU does
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels.attention import latent_portable, latent_products, latent_shared, latent_split, latent_triton
from jetrl.kernels.attention import latent_reference as definition
from jetrl.kernels.attention.latent import Entry, LatentSizes
from jetrl.kernels.attention.ops import varlen_plan
from jetrl.kernels.attention.state import SharedPages
from jetrl.types import PagedPlan, VarlenPlan

DEVICE, INTERPRET, Case, equal = base.DEVICE, base.INTERPRET, base.Case, base.equal
# On a GPU the sizes of the models; the interpreter has no BF16 products, and is slow.
DTYPE = torch.float32 if INTERPRET else torch.bfloat16
SIZES = {
    "16 heads": LatentSizes(4, 24, 16, 32, 20) if INTERPRET else LatentSizes(16, 128, 64, 512, 128),
    "20 heads": LatentSizes(5, 24, 16, 32, 40) if INTERPRET else LatentSizes(20, 192, 64, 512, 256),
}
LENGTHS = (1, 70, 3, 66) if INTERPRET else (1, 127, 64, 129, 1000, 1025, 2300)
PAGE = 64 if INTERPRET else 128
SCALE = 192**-0.5
STEPS = {latent_triton: latent_triton.HOPPER, latent_portable: latent_portable.STEPS}
if INTERPRET:
    from triton.runtime import interpreter

    def dot(self: object, a: Any, b: Any, d: Any, *_: object) -> object:
        """A row's sum does not depend on the other rows, as on a tensor core; numpy's in FP32 does."""
        found = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(found.astype(d.data.dtype), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot
    latent_triton.CHUNK = 64
    latent_triton._PARTIAL_BYTES = 1 << 16  # several slabs
    latent_triton._MAXIMA = latent_triton._PARTS = interpreter.tl.constexpr(2)  # type: ignore[attr-defined]
    latent_triton._AT_ONCE = interpreter.tl.constexpr(4)  # type: ignore[attr-defined]  # several rounds of a search


def inputs(sizes: LatentSizes, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    s, tokens = sizes, sum(lengths)
    q = torch.randn(tokens, s.heads, s.nope + s.rope, generator=g)
    row = torch.randn(tokens, s.rank + s.rope, generator=g)
    w = torch.randn(s.heads * (s.nope + s.value), s.rank, generator=g) * 0.05
    return q.to(DTYPE), row.to(DTYPE), w.to(DTYPE)


def plan_of(lengths: tuple[int, ...], device: torch.device) -> VarlenPlan:
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return VarlenPlan(ends.to(device), lengths)


def near(name: str, got: Tensor, want: Tensor) -> None:
    error = float((got.cpu().double() - want.double()).norm() / want.double().norm())
    assert error < (1e-5 if INTERPRET else 6e-3), f"{name}: {error}"


def absorbed(kernels: Any, q: Tensor, w: Tensor, sizes: LatentSizes) -> Tensor:
    return latent_products.latent_absorb(q.to(DEVICE), kernels.prepare_latent(w.to(DEVICE), sizes), sizes)


def products_case(kernels: Any, sizes: LatentSizes, tokens: int) -> None:
    """Absorb and lift: near the definition, and a token alone as among others."""
    q, _, w = inputs(sizes, (tokens,))
    held, exact = kernels.prepare_latent(w.to(DEVICE), sizes), definition.prepare_latent(w, sizes)
    got = latent_products.latent_absorb(q.to(DEVICE), held, sizes)
    near("absorb", got, definition.latent_absorb(q, exact, sizes))
    equal("rope", got[..., sizes.rank :], q[..., sizes.nope :])
    lifted = latent_products.latent_lift(got[..., : sizes.rank].contiguous(), held, sizes)
    near("lift", lifted, definition.latent_lift(got[..., : sizes.rank].cpu(), exact, sizes))
    for i in (0, tokens - 1):
        equal("one", latent_products.latent_absorb(q[i : i + 1].to(DEVICE), held, sizes), got[i : i + 1].cpu())
        one = latent_products.latent_lift(got[i : i + 1, :, : sizes.rank].contiguous(), held, sizes)
        equal("one lifted", one, lifted[i : i + 1].cpu())


def entered_case(kernels: Any, sizes: LatentSizes, tokens: int, paged: bool) -> None:
    """The ops before attention in one kernel: the bits of one after another, of rows in pages too; a slice of a wider
    projection, in which nothing else is read."""
    g, n, query = torch.Generator().manual_seed(5), sizes.heads, sizes.nope + sizes.rope
    width = n * query + sizes.rank + sizes.rope
    projected = torch.randn(tokens, width + 16, generator=g).to(DTYPE)[:, :width]
    w = (torch.randn(n * (sizes.nope + sizes.value), sizes.rank, generator=g) * 0.05).to(DTYPE)
    norm = (1 + 0.1 * torch.randn(sizes.rank, generator=g)).to(DTYPE)
    angles = torch.rand(50, sizes.rope // 2, generator=g) * 6
    positions = torch.randint(50, (tokens,), generator=g)
    slots = torch.randperm(3 * tokens, generator=g)[:tokens]
    slots[tokens // 2] = -1  # padding
    before = torch.randn(3, tokens, sizes.rank + sizes.rope, generator=g).to(DTYPE)
    q, kv = projected.split((n * query, sizes.rank + sizes.rope), -1)

    def found(enter: Any, held: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        there = torch.zeros(tokens, width + 16, dtype=DTYPE, device=device)[:, :width].copy_(projected)
        pages = before.clone().to(device)
        entry = Entry(
            norm.to(device), 1e-6, (angles.cos().to(device), angles.sin().to(device)), positions.to(device),
            (pages, slots.to(device)) if paged else None,
        )
        out, row = enter(*there.split((n * query, sizes.rank + sizes.rope), -1), held, entry, sizes)
        assert (row is None) == paged
        return out, pages if row is None else row

    held = kernels.prepare_latent(w.to(DEVICE), sizes)
    out, rows = found(latent_products.latent_enter, held, DEVICE)
    defined, want = found(definition.latent_enter, definition.prepare_latent(w, sizes), torch.device("cpu"))
    equal("rows", rows, want)
    equal("rotated", out[..., sizes.rank :], defined[..., sizes.rank :])
    near("absorbed", out, defined)
    turned = torch.cat((q.reshape(tokens, n, query)[..., : sizes.nope], defined[..., sizes.rank :]), -1)
    equal("absorbed", out, latent_products.latent_absorb(turned.to(DEVICE), held, sizes))


def quantized_case(kernels: Any, sizes: LatentSizes, tokens: int) -> None:
    """Lifted rows as codes: those of the quantizer."""
    _, _, w = inputs(sizes, (1,))
    a = torch.randn(tokens, sizes.heads, sizes.rank, generator=torch.Generator().manual_seed(6)).to(DTYPE).to(DEVICE)
    held = kernels.prepare_latent(w.to(DEVICE), sizes)
    lifted = latent_products.latent_lift(a, held, sizes).cpu()
    for pow2 in (False, True):
        got = latent_products.latent_lift_quantize(a, held, sizes, pow2)
        want = base.backend.quantize_act(lifted, pow2, None)
        equal("codes", got.codes.view(torch.uint8), want.codes.view(torch.uint8))
        equal("scales", got.scale, want.scale)
        assert (got.granularity, got.row_sections, got.col_sections) == (
            want.granularity, want.row_sections, want.col_sections
        )


def split_case(kernels: Any, sizes: LatentSizes, longest: int) -> None:
    """Few sequences with one token each: scores by tiles and values by columns have the bits of one program a chunk."""
    unit, g = 64 if INTERPRET else 128, torch.Generator().manual_seed(7)
    lengths = [1, longest, 63, longest // 2 + 1]
    count, width = len(lengths), -(-longest // unit)
    table = torch.randperm(count * width, generator=g).view(count, width).int().to(DEVICE)
    pages = torch.randn(count * width, unit, sizes.rank + sizes.rope, generator=g).to(DTYPE).to(DEVICE)
    q = (torch.randn(count, sizes.heads, sizes.rank + sizes.rope, generator=g) * 0.5).to(DTYPE).to(DEVICE)
    plan = PagedPlan(
        None, torch.arange(count + 1, dtype=torch.int32, device=DEVICE), (1,) * count,  # type: ignore[arg-type]
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE), (width,) * count, table,
        torch.full((count,), -1, device=DEVICE),
    )
    calls: list[int] = []
    attend = latent_split.attend_chunks
    counted = mock.patch.object(latent_triton, "attend_chunks", lambda *given: (calls.append(1), attend(*given)))
    with counted, mock.patch.object(latent_split, "SEQUENCES", len(lengths)):
        got = kernels.latent_attend_cached(q, None, pages, plan, SCALE, sizes)
        with mock.patch.object(latent_split, "SEQUENCES", 0):
            want = kernels.latent_attend_cached(q, None, pages, plan, SCALE, sizes)
    assert calls == [1], "the kernels of few sequences were to be called once"
    equal("split", got, want)
    there = replace(plan, kv_lengths=plan.kv_lengths.cpu(), block_table=table.cpu(), cu_seqlens=plan.cu_seqlens.cpu())
    near("split", got, definition.latent_attend_cached(q.cpu(), None, pages.cpu(), there, SCALE, sizes))


def packed_case(kernels: Any, sizes: LatentSizes) -> None:
    q, row, w = inputs(sizes, LENGTHS)
    q = absorbed(kernels, q, w, sizes)
    out, lse = kernels.latent_attend(q, row.to(DEVICE), plan_of(LENGTHS, DEVICE), SCALE, sizes, True)
    plan = plan_of(LENGTHS, torch.device("cpu"))
    near("packed", out, definition.latent_attend(q.cpu(), row, plan, SCALE, sizes, False)[0])
    assert lse is not None
    again, none = kernels.latent_attend(q, row.to(DEVICE), plan_of(LENGTHS, DEVICE), SCALE, sizes, False)
    equal("without log-sums", again, out.cpu())
    assert none is None
    start = 0
    for n in LENGTHS:
        part, own = q[start : start + n], row[start : start + n].to(DEVICE)
        alone, sums = kernels.latent_attend(part, own, plan_of((n,), DEVICE), SCALE, sizes, True)
        equal(f"alone {n}", alone, out[start : start + n].cpu())
        assert sums is not None
        equal(f"log-sums alone {n}", sums, lse[:, start : start + n].cpu())
        s = torch.einsum("tnh,kh->ntk", part.double(), own.double()) * SCALE
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool, device=DEVICE).triu(1), float("-inf"))
        near("log-sums", sums, s.logsumexp(-1).cpu())
        start += n


def ragged_case(kernels: Any, sizes: LatentSizes, together: bool) -> None:
    """Many sequences, some of them empty: each token's row is that of its sequence alone, wherever slabs begin."""
    lengths = (3, 1, 1, 66, 2, 5, 1, 17, 1) if INTERPRET else (3, 1, 1, 1066, 2, 5, 1, 77, *(1,) * 300, 2)
    if not together:
        lengths = (0, 0, *lengths[:2], 0, *lengths[2:5], *(0,) * 40, *lengths[5:], 0)
    q, row, w = inputs(sizes, lengths)
    q, row = absorbed(kernels, q, w, sizes), row.to(DEVICE)
    before, latent_triton._PARTIAL_BYTES = latent_triton._PARTIAL_BYTES, 2 * 4 * sizes.heads * sizes.rank * 13
    try:  # slabs of 13 tokens in the interpreter, which begin anywhere in a block
        out = kernels.latent_attend(q, row, plan_of(lengths, DEVICE), SCALE, sizes, False)[0]
    finally:
        latent_triton._PARTIAL_BYTES = before
    alone = [
        kernels.latent_attend(a, b, plan_of((len(a),), DEVICE), SCALE, sizes, False)[0]
        for a, b in zip(q.split(lengths), row.split(lengths), strict=True) if len(a)
    ]
    equal("ragged", out, torch.cat(alone).cpu())


def shared_case(kernels: Any, sizes: LatentSizes) -> None:
    """A stem and two parts: the rows of whole sequences."""
    stem, n = LENGTHS[1], LENGTHS[3]
    q, row, w = inputs(sizes, (stem + n,))
    q, row = absorbed(kernels, q, w, sizes), row.to(DEVICE)
    whole = kernels.latent_attend(q, row, plan_of((stem + n,), DEVICE), SCALE, sizes, False)[0]
    ends = torch.tensor([0, stem, stem + n, stem + 2 * n], dtype=torch.int32, device=DEVICE)
    plan = varlen_plan(ends, (stem, n, n), (-1, 0, 0))
    q, row = (torch.cat((t, t[stem:])) for t in (q, row))
    out = kernels.latent_attend(q, row, plan, SCALE, sizes, False)[0]
    equal("shared", out, torch.cat((whole, whole[stem:])).cpu())


def paged_case(kernels: Any, sizes: LatentSizes, chunk: int) -> None:
    """All sequences in steps of up to `chunk` tokens each over scattered pages; those with one token come first."""
    q, row, w = inputs(sizes, LENGTHS)
    q, row = absorbed(kernels, q, w, sizes), row.to(DEVICE)
    want = kernels.latent_attend(q, row, plan_of(LENGTHS, DEVICE), SCALE, sizes, False)[0].cpu()
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    per = -(-max(LENGTHS) // PAGE)
    order = torch.randperm(per * len(LENGTHS), generator=torch.Generator().manual_seed(1)).view(len(LENGTHS), per)
    pages = torch.full((per * len(LENGTHS), PAGE, sizes.rank + sizes.rope), 1e30, dtype=DTYPE, device=DEVICE)
    done = [0] * len(LENGTHS)
    while True:
        left = [i for i, n in enumerate(LENGTHS) if done[i] < n]
        if not left:
            break
        counts = {i: min(chunk if i % 2 else 1, LENGTHS[i] - done[i]) for i in left}
        members = sorted(left, key=lambda i: counts[i] != 1)
        at = [starts[i] + done[i] + j for i in members for j in range(counts[i])]
        places = [(i, done[i] + j) for i in members for j in range(counts[i])]
        slots = torch.tensor([int(order[i, p // PAGE]) * PAGE + p % PAGE for i, p in places], device=DEVICE)
        lengths = tuple(counts[i] for i in members)
        kv = torch.tensor([done[i] + counts[i] for i in members], dtype=torch.int32, device=DEVICE)
        plan = PagedPlan(
            None, plan_of(lengths, DEVICE).cu_seqlens, lengths, kv, (per,) * len(members),  # type: ignore[arg-type]
            order[members].int().to(DEVICE), slots,
        )
        out = kernels.latent_attend_cached(q[at], row[at], pages, plan, SCALE, sizes)
        equal(f"step {done}", out, want[at])
        for i in members:
            done[i] += counts[i]


def merged_case(kernels: Any, sizes: LatentSizes, slab: int | None) -> None:
    """Decoding with pages that groups share: each sequence's bits as without, though shared tiles are read from the
    first one's pages alone. Shared keys end with a chunk, inside one, or before the first chunk does; `slab`: sequences
    whose parts are held at once."""
    unit, chunk = (64, 128) if INTERPRET else (128, 1024)
    groups = ((2, 3), (9, 1), (3, 3), (1, 0)) if INTERPRET else ((5, 17), (4, 8), (16, 12), (9, 3), (2, 32), (1, 0))
    most = 64 // sizes.heads  # sequences of a chunk of `SharedPages`
    g, width = torch.Generator().manual_seed(4), max(tiles for _, tiles in groups) + 2
    count = sum(n for n, _ in groups)
    table = torch.randperm(count * width + 1, generator=g)[: count * width].view(count, width).int()
    members, tiles_of, lengths, first, at = [], [], [], [0] * count, 0
    for n, tiles in groups:
        mine = list(range(at, at + n))
        table[mine, :tiles] = table[at, :tiles].clone()
        lengths += [tiles * unit + int(torch.randint(1, 2 * unit, (1,), generator=g)) for _ in mine]
        for part in (mine[i : i + most] for i in range(0, n, most)):
            if tiles and len(part) > 1:
                members, tiles_of = [*members, part + [-1] * (most - len(part))], [*tiles_of, tiles]
                first = [tiles if i in part else f for i, f in enumerate(first)]
        at += n
    room = len(members) + 1  # one is padding
    members += [[-1] * most] * (room - len(members))
    shared = SharedPages(*(
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (first, members, tiles_of + [0])
    ))
    pages = torch.randn(count * width + 1, unit, sizes.rank + sizes.rope, generator=g).to(DTYPE)
    rubbish = int(np.setdiff1d(np.arange(count * width + 1), table.numpy())[0])
    pages[rubbish] = 1e30
    q = (torch.randn(count, sizes.heads, sizes.rank + sizes.rope, generator=g) * 0.5).to(DTYPE).to(DEVICE)
    row = torch.randn(count, sizes.rank + sizes.rope, generator=g).to(DTYPE).to(DEVICE)
    slots = torch.tensor([int(table[i, (n - 1) // unit]) * unit + (n - 1) % unit for i, n in enumerate(lengths)])
    slots[-1] = -1  # padding

    def attended(table: Tensor, shared: Any) -> Tensor:
        plan = PagedPlan(
            None, torch.arange(count + 1, dtype=torch.int32, device=DEVICE), (1,) * count,  # type: ignore[arg-type]
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE), (width,) * count, table.to(DEVICE),
            slots.to(DEVICE), shared,
        )
        return kernels.latent_attend_cached(q, row, pages.clone().to(DEVICE), plan, SCALE, sizes)

    part = sizes.heads * sizes.rank * 4 * -(-width * unit // chunk)
    with ExitStack() as stack:
        for module, name, value in (
            (latent_triton, "CHUNK", chunk), (latent_shared, "UNIT", unit), (latent_triton, "UNIT", unit),
            (latent_triton, "_PARTIAL_BYTES", slab * part if slab else latent_triton._PARTIAL_BYTES << 4),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        want = attended(table, None).cpu()
        equal("merged", attended(table, shared), want)
        known = table.clone()
        for i, tiles in enumerate(first):
            if i not in [m[0] for m in members]:
                known[i, :tiles] = rubbish
        equal("merged, read once", attended(known, shared), want)
        assert not torch.equal(attended(known, None).cpu(), want), "the rubbish is seen by who reads it"


def gluon_case(sizes: LatentSizes) -> None:
    """Programs of 64 rows by `latent_rows`: the bits of `latent_triton`'s, packed and over pages, of several chunks,
    with and without log-sums, wherever slabs begin; and those of decode steps."""
    q, row, w = inputs(sizes, LENGTHS)
    q, row, plan = absorbed(latent_triton, q, w, sizes), row.to(DEVICE), plan_of(LENGTHS, DEVICE)
    short = plan_of((1, 300, 77), DEVICE)

    def attended() -> list[Any]:
        return [
            *latent_triton.latent_attend(q, row, plan, SCALE, sizes, True),
            latent_triton.latent_attend(q, row, plan, SCALE, sizes, False)[0],
            *latent_triton.latent_attend(q[:378], row[:378], short, SCALE, sizes, True),
        ]

    with mock.patch.multiple(latent_triton, ROWS_IN_GLUON=False, FEW_IN_GLUON=False):
        want = attended()
    with mock.patch.multiple(latent_triton, ROWS_IN_GLUON=True, FEW_IN_GLUON=True):
        for name, got, known in zip("abcde", attended(), want, strict=True):
            equal(f"gluon {name}", got, known.cpu())
        ragged_case(latent_triton, sizes, False)
        ragged_case(latent_triton, sizes, True)
        shared_case(latent_triton, sizes)
        for chunk in (7, 300):
            paged_case(latent_triton, sizes, chunk)
        for slab in (None, 4):
            merged_case(latent_triton, sizes, slab)
    if sizes.heads <= 16:
        gluon_decode(sizes)


def gluon_decode(sizes: LatentSizes) -> None:
    """Decode steps by `latent_few`: the bits of `latent_triton`'s programs, of one chunk and of several; the last one's
    row is written first, and what lies behind it is rubbish."""
    g = torch.Generator().manual_seed(8)
    for lengths in ((1, 63, 64, 65, 128, 129, 1000, 1024), (1, 1024, 1025, 1088, 1089, 2048, 3000, 5000, 7)):
        count, width = len(lengths), -(-max(lengths) // PAGE)
        table = torch.randperm(count * width, generator=g).view(count, width).int()
        pages = torch.randn(count * width, PAGE, sizes.rank + sizes.rope, generator=g).to(DTYPE)
        for i, n in enumerate(lengths):
            pages[table[i, (n - 1) // PAGE], (n - 1) % PAGE + 1 :] = 1e30
        q = (torch.randn(count, sizes.heads, sizes.rank + sizes.rope, generator=g) * 0.5).to(DTYPE).to(DEVICE)
        plan = PagedPlan(
            None, torch.arange(count + 1, dtype=torch.int32, device=DEVICE), (1,) * count,  # type: ignore[arg-type]
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE), (width,) * count, table.to(DEVICE),
            torch.full((count,), -1, device=DEVICE),
        )

        found: list[Tensor] = []
        for gluon in (False, True):
            flag = mock.patch.object(latent_triton, "FEW_IN_GLUON", gluon)
            with flag, mock.patch.object(latent_split, "SEQUENCES", 0):
                found.append(latent_triton.latent_attend_cached(q, None, pages.to(DEVICE), plan, SCALE, sizes))
        assert found[0].isfinite().all()
        equal("gluon decode", found[1], found[0].cpu())


def refused_case(kernels: Any) -> None:
    for sizes in (LatentSizes(16, 128, 64, 500, 128), LatentSizes(128, 128, 64, 512, 128)):
        try:
            kernels.prepare_latent(torch.zeros(1), sizes)
        except UserError as error:
            assert "latent attention on a GPU takes" in str(error)
        else:
            raise AssertionError(f"{sizes} were taken")


def all_cases() -> list[tuple[str, Case]]:
    return list(_cases())


def _cases() -> Iterator[tuple[str, Case]]:
    for name, sizes in SIZES.items():
        for kernels in (latent_triton, latent_portable):
            if INTERPRET and kernels is latent_portable and name != "16 heads":
                continue
            of = f"{kernels.__name__.rpartition('.')[2]} {name}"
            for tokens in (1, 66) if INTERPRET else (1, 64, 150):
                yield f"products {of} {tokens}", partial(products_case, kernels, sizes, tokens)
            for tokens, paged in ((1, True), (70, False)):
                yield f"entered {of} {tokens}", partial(entered_case, kernels, sizes, tokens, paged)
            yield f"quantized {of}", partial(quantized_case, kernels, sizes, 70)
            for longest in (60, 150) if INTERPRET else (900, 5000):
                yield f"split {of} {longest}", partial(split_case, kernels, sizes, longest)
            yield f"packed {of}", partial(packed_case, kernels, sizes)
            yield f"shared {of}", partial(shared_case, kernels, sizes)
            if latent_shared.merges(STEPS[kernels], sizes.heads):
                yield f"merged {of}", partial(merged_case, kernels, sizes, None)
            for together in (True, False) if name == "16 heads" else ():
                yield f"ragged {of} {together}", partial(ragged_case, kernels, sizes, together)
            if kernels is latent_triton and not INTERPRET and torch.cuda.get_device_capability()[0] == 9:
                yield f"gluon {of}", partial(gluon_case, sizes)
            for chunk in (40,) if INTERPRET else (7, 64, 300):
                yield f"paged {of} {chunk}", partial(paged_case, kernels, sizes, chunk)
    for kernels in (latent_triton, latent_portable):
        yield f"merged in slabs {kernels.__name__}", partial(merged_case, kernels, SIZES["16 heads"], 4)
        whole = SIZES["16 heads"]._replace(value=128)
        yield f"quantized heads {kernels.__name__}", partial(quantized_case, kernels, whole, 66)
        yield f"refused {kernels.__name__}", partial(refused_case, kernels)


if __name__ == "__main__":
    raise SystemExit(base.main(all_cases()))
