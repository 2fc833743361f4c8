"""Cases of the decode attention kernels in Triton, bit for bit against the steps of their definition, as in
`triton_cases.py`: `python tests/kernels/triton_attention_cases.py [part of a name]`, interpreter or GPU as there.

The definition is `attend_by_steps`, the text of `attention/decode.py` in numpy: a sequence, one tile after another. In
the interpreter a product adds 16 elements at a time to FP32 sums, here and there (a GPU rounds inside of the 16 in its
own way; `tests/gpu/test_decode_hopper.py` compares kernels with kernels there).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton_cases as base  # also makes the interpreter round as a GPU does
from torch import Tensor

from jetrl.engine.sharing import find_sharing
from jetrl.kernels import reference as ref
from jetrl.kernels.attention import decode_chain as chain
from jetrl.kernels.attention import decode_shared as shared
from jetrl.kernels.attention import decode_split as split
from jetrl.kernels.attention.state import SharedPages
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize import triton as tq
from jetrl.types import LayerCache

DEVICE, Case, equal = base.DEVICE, base.Case, base.equal
TILE = 128


# ---- the interpreter's arithmetic -----------------------------------------------------------------------------------


def product(a: np.ndarray, b: np.ndarray, acc: np.ndarray) -> np.ndarray:
    """`acc + a @ b`, 16 elements of the sum at a time, each group in float64 and then rounded to FP32."""
    for start in range(0, a.shape[1], 16):
        part = slice(start, start + 16)
        # added one by one: a matrix product by a library has another order for another shape
        total = (a[:, part, None].astype(np.float64) * b[None, part].astype(np.float64)).cumsum(1)[:, -1]
        acc = (acc.astype(np.float64) + total).astype(np.float32)
    return acc


def exp2(x: np.ndarray) -> np.ndarray:
    """One element at a time alike, whatever the shape."""
    with np.errstate(all="ignore"):
        return np.exp2(x.astype(np.float64)).astype(np.float32)


def plain_reciprocal(x):  # type: ignore[no-untyped-def]
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


def fix_interpreter() -> None:
    import triton
    from triton.runtime import interpreter

    def dot(self: object, a: Any, b: Any, d: Any, *_: object) -> object:
        def widened(x: Any) -> np.ndarray:
            if x.dtype.scalar == tl.float32:
                return np.asarray(x.data)
            assert x.dtype.scalar == tl.bfloat16
            bits = np.ascontiguousarray(x.data).view(np.uint16).astype(np.uint32) << 16
            return bits.view(np.float32)

        return interpreter.TensorHandle(product(widened(a), widened(b), d.data), d.dtype.scalar)

    def in_order(self: Any, x: Any) -> Any:
        data = np.add.accumulate(x.handle.data, axis=self.axis).take(-1, axis=self.axis)
        return self.to_tensor(np.expand_dims(data, self.axis) if self.keep_dims else data, x.dtype)

    builder = interpreter.InterpreterBuilder
    builder.create_dot = dot
    builder.create_exp2 = lambda self, x: interpreter.TensorHandle(exp2(x.data), x.dtype.scalar)
    interpreter.ReduceOps.sum = in_order
    tl.range = lambda start, stop, num_stages=0: range(start, int(stop.handle.data.item()))
    chain._reciprocal = shared._reciprocal = triton.jit(plain_reciprocal)  # no assembly here


if base.INTERPRET:
    fix_interpreter()


# ---- the definition -------------------------------------------------------------------------------------------------


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return (x.astype(np.float64) * y + z).astype(np.float32)


State = tuple[np.ndarray, np.ndarray, np.ndarray]


def tiles_by_steps(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, units: np.ndarray, scale: np.float32, first: int = 0
) -> State:
    """One key head of one sequence: `q` [Q, H], `k`, `v` [J, H] BF16 numbers or codes, `units` [J, 2], without the
    first tiles -> maxima [Q], sums [Q, 4], outputs [Q, H]."""
    n, h = q.shape
    top, sums = np.full(n, -np.inf, np.float32), np.zeros((n, 4), np.float32)
    acc = np.zeros((n, h), np.float32)
    for start in range((len(k) - 1) // TILE * TILE, first * TILE - 1, -TILE):
        keys, values, unit = (np.zeros((TILE, x.shape[1]), np.float32) for x in (k, v, units))
        count = min(TILE, len(k) - start)
        for tile, x in ((keys, k), (values, v), (unit, units)):
            tile[:count] = x[start : start + count]
        s = product(q, keys.T, np.zeros((n, TILE), np.float32)) * unit[:, 0]
        s[:, count:] = -np.inf
        new = np.maximum(top, s.max(1))
        with np.errstate(all="ignore"):
            shrink, offset = exp2((top - new) * scale), -(new * scale)
        p = exp2(fma(s, scale, offset[:, None]))
        for part in range(4):
            mine = [8 * i + 2 * part + e for i in range(TILE // 8) for e in (0, 1)]
            sums[:, part] = fma(sums[:, part], shrink, p[:, mine[0]])
            for key in mine[1:]:
                sums[:, part] += p[:, key]
        weights = torch.from_numpy(p * unit[:, 1]).bfloat16().float().numpy()
        acc, top = product(weights, values, acc * shrink[:, None]), new
    return top, sums, acc


def attend_by_steps(q: np.ndarray, k: np.ndarray, v: np.ndarray, units: np.ndarray, scale: np.float32) -> np.ndarray:
    _, sums, acc = tiles_by_steps(q, k, v, units, scale)
    total = (sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3])
    return acc * (np.float32(1) / total)[:, None]


# ---- cases ----------------------------------------------------------------------------------------------------------


class Case_:
    """Sequences over pages in random order; what nobody owns is NaN. `shared`: for each group of sequences, how many
    leading pages are the same."""

    def __init__(self, lengths: list[int], n: int, g: int, h: int, page: int, fp8: bool) -> None:
        gen = torch.Generator().manual_seed(sum(lengths) + n + h)
        self.lengths, self.g, self.fp8, self.page = lengths, g, fp8, page
        width = -(-max(lengths) // page) + 2  # a table wider than any sequence
        table = 1 + torch.randperm(len(lengths) * width, generator=gen).view(len(lengths), width)  # page 0 is nobody's
        shape = (1 + table.numel(), page, g, h)
        self.k, self.v = (torch.randn(shape, generator=gen).mul_(2).bfloat16() for _ in "kv")
        self.units = torch.ones(*shape[:3], 2)
        if fp8:
            parts = [ref.quantize_heads(x.flatten(0, 1)) for x in (self.k, self.v)]
            codes, units = zip(*((c.view(shape), u.view(shape[:3])) for c, u in parts), strict=True)
            (self.k, self.v), self.units = codes, torch.stack(units, -1).float()
        self.table = table.to(torch.int32)
        self.q = (1.5 * torch.randn(len(lengths), n, h, generator=gen)).bfloat16()
        self.scale = h**-0.5

    def share(self, groups: list[tuple[list[int], int]]) -> None:
        """Members of a group take the first `pages` pages of the first of them."""
        for members, pages in groups:
            self.table[members, :pages] = self.table[members[0], :pages].clone()

    def cache(self) -> LayerCache:
        """The pages, with NaN wherever no sequence has a key."""
        owned = torch.zeros(self.k.shape[:2], dtype=torch.bool)
        for row, length in zip(self.table.tolist(), self.lengths, strict=True):
            for i, at in enumerate(row[: -(-length // self.page)]):
                owned[at, : min(self.page, length - i * self.page)] = True
        k, v, units = self.k.clone(), self.v.clone(), self.units.clone()
        units[~owned] = float("nan")
        if not self.fp8:
            k[~owned], v[~owned] = float("nan"), float("nan")
            return LayerCache(k.to(DEVICE), v.to(DEVICE))
        for codes in (k, v):
            codes.view(torch.uint8)[~owned] = 0x7F
        return LayerCache(k.to(DEVICE), v.to(DEVICE), units.transpose(1, 2).bfloat16().contiguous().to(DEVICE))

    def heads(self, b: int) -> Iterator[tuple[slice, tuple[Any, ...]]]:
        """The query heads of each key head of sequence b, and the arguments of the definition."""
        n, length = self.q.shape[1] // self.g, self.lengths[b]
        at = self.table[b, : -(-length // self.page)].long()
        k, v, units = (x[at].flatten(0, 1)[:length].float().numpy() for x in (self.k, self.v, self.units))
        scale = np.float32(self.scale) * np.float32(np.log2(np.e))
        for group in range(self.g):
            mine = slice(group * n, group * n + n)
            yield mine, (self.q[b, mine].float().numpy(), k[:, group], v[:, group], units[:, group], scale)

    def want(self) -> Tensor:
        out = torch.empty_like(self.q)
        for b in range(len(self.lengths)):
            for mine, arguments in self.heads(b):
                out[b, mine] = torch.from_numpy(attend_by_steps(*arguments)).bfloat16()
        return out

    def own(self, first: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """What the Gluon kernel keeps of each sequence without its first tiles; NaN where it has none to leave out."""
        batch, n, h = self.q.shape
        tops, sums, accs = (torch.full((batch, n, *x), float("nan")) for x in ((), (4,), (h,)))
        for b, tiles in enumerate(first):
            for mine, arguments in self.heads(b) if tiles else ():
                for target, x in zip((tops, sums, accs), tiles_by_steps(*arguments, tiles), strict=True):
                    target[b, mine] = torch.from_numpy(x)
        return tops, sums, accs

    def arguments(self) -> tuple[Tensor, LayerCache, Tensor, Tensor, float]:
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        return self.q.to(DEVICE), self.cache(), self.table.to(DEVICE), lengths, self.scale


def check_split(lengths: list[int], n: int, g: int, h: int, page: int, fp8: bool, shape: split.Shape) -> None:
    case = Case_(lengths, n, g, h, page, fp8)
    arguments = case.arguments()
    got = split.decode(*arguments, shape=shape)
    equal("heads", got.cpu(), case.want())
    if h == 128:
        for pow2 in (False, True):
            one, two = split.decode_quantize(*arguments, pow2, shape), tq.quantize_act(got.flatten(1), pow2)
            equal("codes", one.codes.view(torch.uint8), two.codes.view(torch.uint8))
            equal("scale", one.scale, two.scale)


def check_shared(
    lengths: list[int], groups: list[tuple[list[int], int]], n: int, g: int, h: int, page: int, fp8: bool
) -> None:
    """Groups of (members, shared pages), as the scheduler's page table shows them."""
    case = Case_(lengths, n, g, h, page, fp8)
    case.share(groups)
    positions = np.array(lengths) - 1
    found = find_sharing(case.table.numpy(), positions, page, shared.ROWS // (n // g))
    assert found.saved > 0 or not groups
    # chunks behind the last are padding
    members = np.concatenate((found.members, np.full((2, found.members.shape[1]), -1, np.int32)))
    tiles = np.concatenate((found.tiles, np.zeros(2, np.int32)))
    plan = SharedPages(*(torch.from_numpy(x).to(DEVICE) for x in (found.first, members, tiles)))
    q, cache, table, _, scale = case.arguments()
    state = tuple(x.to(DEVICE) for x in case.own(found.first.tolist()))
    out, want = torch.full_like(q, 7.0), case.want()
    merged = found.first > 0
    want[~torch.from_numpy(merged)] = 7.0  # nothing of theirs is shared: they are not touched
    shared.go_on(q, cache, table, plan, scale, out, None, False, state)
    equal("heads", out.cpu(), want)
    if h == 128:
        plain = tq.quantize_act(out.flatten(1), True)
        codes = torch.full_like(plain.codes.view(torch.uint8), 9).view(plain.codes.dtype)
        one = QTensor(codes, torch.full_like(plain.scale, 9.0), "1x128", plain.row_sections, plain.col_sections)
        shared.go_on(q, cache, table, plan, scale, q, one, True, state)
        equal("codes", one.codes.view(torch.uint8)[merged], plain.codes.view(torch.uint8)[merged])
        rows = torch.from_numpy(merged).nonzero()[:, 0]
        equal("scale", one.scale[rows], plain.scale[rows])


def shared_cases() -> Iterator[tuple[str, Case]]:
    for fp8 in (False, True):
        for lengths, groups, n, g, h, page in (
            ([300, 385, 257, 129, 260, 300], [([0, 1, 2], 2), ([3, 4], 1)], 8, 2, 128, 128),
            ([258, 400, 300, 513, 300], [([0, 2, 4, 1], 1)], 9, 3, 64, 256),
            ([129 + i for i in range(9)], [(list(range(9)), 1)], 16, 1, 64, 128),
            ([642, 700], [([0, 1], 5)], 4, 4, 128, 128),
        ):
            yield f"shared {groups} of {lengths} {n}/{g} x {h}, page {page}, fp8 {fp8}", partial(
                check_shared, lengths, groups, n, g, h, page, fp8
            )


def split_cases() -> Iterator[tuple[str, Case]]:
    narrow, wide = split.Shape(16, 3), split.Shape(32, 2)
    for fp8 in (False, True):
        for lengths, n, g, h, page, shape in (
            ([1, 127, 128, 129, 300], 8, 2, 128, 128, narrow),
            ([1000], 4, 1, 128, 128, wide),
            ([257, 1, 640], 3, 3, 64, 256, narrow),
            ([385, 2], 9, 3, 64, 128, wide),
            ([513], 16, 1, 64, 128, narrow),
            ([5000], 1, 1, 64, 128, narrow),
            ([1 + 9 * i for i in range(16)], 2, 1, 64, 128, wide),
        ):
            yield f"split {lengths} {n}/{g} x {h}, page {page}, fp8 {fp8}", partial(
                check_split, lengths, n, g, h, page, fp8, shape
            )


def all_cases() -> list[tuple[str, Case]]:
    return [case for kind in (split_cases, shared_cases) for case in kind()]


if __name__ == "__main__":
    raise SystemExit(base.main(all_cases()))
