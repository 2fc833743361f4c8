"""Cases of the portable kernels (`kernels = "triton"`): GEMMs and attention bit for bit against the steps of their
definitions, a row's bits whatever is around it, gradients against the reference's, as in `triton_cases.py`:
`python tests/kernels/triton_portable_cases.py [part of a name]`, in the interpreter.

In the interpreter a product adds 16 elements at a time to FP32 sums, here and there, as in
`triton_attention_cases.py`; `tests/gpu/test_portable.py` compares rows with rows on a GPU. Tiles are those of each kind
of tensor core, so all of the tables in `kernels/tiles.py` are run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton_attention_cases as attention  # also makes the interpreter's products those of the definition
import triton_cases as base
from torch import Tensor

from jetrl.kernels import launch
from jetrl.kernels import reference as ref
from jetrl.kernels.attention import latent_portable as lp
from jetrl.kernels.attention import latent_reference
from jetrl.kernels.attention import portable as pa
from jetrl.kernels.attention import portable_backward as pb
from jetrl.kernels.attention import reference as attention_reference
from jetrl.kernels.attention.latent import LatentSizes
from jetrl.kernels.attention.ops import varlen_plan
from jetrl.kernels.experts import operands as eo
from jetrl.kernels.experts import portable as pe
from jetrl.kernels.experts import quantize as eq
from jetrl.kernels.experts import route
from jetrl.kernels.gemm import operands
from jetrl.kernels.gemm import portable as pg
from jetrl.kernels.gemm import portable_fp8 as pf
from jetrl.kernels.quantize import e4m3
from jetrl.kernels.quantize import triton as tq
from jetrl.kernels.tiles import keys_for
from jetrl.types import LayerCache, PagedPlan, VarlenPlan

DEVICE, Case, equal = base.DEVICE, base.Case, base.equal
KINDS = {"mma": (8, 0), "wgmma": (9, 0), "tcgen05": (10, 0)}


def steps(start: Any, stop: Any, step: int = 1, num_stages: int = 0) -> range:
    first, last, by = (int(x.handle.data.item()) if hasattr(x, "handle") else int(x) for x in (start, stop, step))
    return range(first, last, by)


def fix_interpreter() -> None:
    """Products of codes add up 16 at a time, too; FP16 is what E4M3 is read by where there is no instruction."""
    from triton.runtime import interpreter

    builder, plain, convert = interpreter.InterpreterBuilder, attention_dot(), interpreter._convert_float

    def dot(self: object, a: Any, b: Any, d: Any, *rest: object) -> object:
        if a.dtype.scalar != tl.float8e4nv:
            return plain(self, a, b, d, *rest)
        values = (torch.from_numpy(x.data.copy()).view(torch.float8_e4m3fn).float().numpy() for x in (a, b))
        return interpreter.TensorHandle(attention.product(*values, d.data), d.dtype.scalar)

    def converted(data: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
        if source == tl.float16:
            assert target == tl.float32
            return np.ascontiguousarray(data).view(np.float16).astype(np.float32).view(np.uint32)
        return convert(data, source, target, mode)

    builder.create_dot, interpreter._convert_float, tl.range = dot, converted, steps


def attention_dot() -> Any:
    from triton.runtime import interpreter

    return interpreter.InterpreterBuilder.create_dot


if base.INTERPRET:
    fix_interpreter()


def on(kind: str) -> None:
    """Take the tiles of a kind of tensor core from now on."""
    launch.CAPABILITY = KINDS[kind]


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a` [M, K] @ `b` [N, K].T: one chain over K for each output."""
    start = np.zeros((len(a), len(b)), np.float32)
    return torch.from_numpy(attention.product(a.float().numpy(), b.float().T.numpy(), start))


def gemm_cases() -> Iterator[tuple[str, Case]]:
    def multiply(kind: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        on(kind)
        g = torch.Generator().manual_seed(m + n + k)
        x, w = (torch.randn(rows, k, generator=g).bfloat16() for rows in (m, n))
        held = operands.prepare_bf16(w.to(DEVICE))
        assert held.size == n and held.weight.shape[0] % 8 == 0
        got = pg.bf16_gemm(x.to(DEVICE), held, dtype)
        equal("output", got, product(x, w).to(dtype))
        equal("a row alone", pg.bf16_gemm(x[m // 2 : m // 2 + 1].to(DEVICE), held, dtype)[0], got[m // 2])

    def gradients(dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(1)
        dy, x = torch.randn(9, 40, generator=g).bfloat16(), torch.randn(9, 24, generator=g).bfloat16()
        w = torch.randn(40, 24, generator=g).bfloat16()
        held = torch.randn(40, 24, generator=g).to(dtype)
        grad, at_once = held.to(DEVICE, copy=True), pg._AT_ONCE
        pg._AT_ONCE = 24 * 16  # in three parts
        try:
            pg.bf16_wgrad_into(dy.to(DEVICE), x.to(DEVICE), grad)
        finally:
            pg._AT_ONCE = at_once
        want = held.double() + dy.double().T @ x.double()
        tolerance = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(grad.cpu().double(), want, rtol=tolerance, atol=tolerance)
        dx = pg.bf16_dgrad(dy.to(DEVICE), w.to(DEVICE)).cpu()
        torch.testing.assert_close(dx.double(), dy.double() @ w.double(), rtol=2**-8, atol=2**-8)

    for dtype in (torch.float32, torch.bfloat16):
        yield f"gradients {dtype}", partial(gradients, dtype)
    for kind in KINDS:
        for m, n, k, dtype in (
            (1, 40, 64, torch.bfloat16), (17, 130, 136, torch.float32), (70, 33, 24, torch.bfloat16),
            (300, 72, 128, torch.bfloat16),
        ):
            yield f"gemm {kind} {m} x {n} x {k} {dtype}", partial(multiply, kind, m, n, k, dtype)


def fp8_cases() -> Iterator[tuple[str, Case]]:
    def by_groups(a: ref.QTensor, b: ref.QTensor) -> Tensor:
        """`reference.fp8_gemm`, the products of a group added 16 at a time."""
        acc, (left, right) = torch.zeros(len(a.codes), len(b.codes)), (x.codes.float().numpy() for x in (a, b))
        scales = ref.row_scales(b)
        for g, (start, stop) in enumerate(a.col_blocks()):
            x, y = np.zeros((2, max(len(left), len(right)), 128), np.float32)
            x[: len(left), : stop - start], y[: len(right), : stop - start] = left[:, start:stop], right[:, start:stop]
            zeros = np.zeros((len(left), len(right)), np.float32)
            part = torch.from_numpy(attention.product(x[: len(left)], y[: len(right)].T, zeros))
            acc += part * a.scale[:, g : g + 1] * scales[:, g]
        return acc

    def forward(kind: str, m: int, sections: tuple[int, ...], k: int) -> None:
        on(kind)
        g = torch.Generator().manual_seed(m + k)
        x, w = torch.randn(m, k, generator=g).bfloat16(), torch.randn(sum(sections), k, generator=g).bfloat16()
        weight = tq.quantize_weight(w.to(DEVICE), False, sections)
        a, held = tq.quantize_act(x.to(DEVICE)), operands.prepare_fp8(weight)
        got = pf.fp8_gemm(a, held, torch.bfloat16)
        want = by_groups(ref.quantize_1x128(x), ref.quantize_128x128(w, False, sections)).bfloat16()
        equal("output", got, want)
        alone = pf.fp8_gemm(tq.quantize_act(x[m // 2 : m // 2 + 1].to(DEVICE)), held, torch.bfloat16)
        equal("a row alone", alone[0], got[m // 2])
        turned = operands.prepare_fp8_t(weight)
        dy = torch.randn(m, sum(sections), generator=g).bfloat16()
        got = pf.fp8_gemm(tq.quantize_act(dy.to(DEVICE), False, sections), turned, torch.bfloat16)
        want = by_groups(
            ref.quantize_1x128(dy, False, sections), ref.transpose(ref.quantize_128x128(w, False, sections))
        ).bfloat16()
        equal("dgrad", got, want)

    def backward(tokens: int, n: int, k: int, tile: bool, dtype: torch.dtype) -> None:
        on("wgmma")
        g = torch.Generator().manual_seed(tokens + n)
        dy, x = (torch.randn(tokens, size, generator=g).bfloat16() for size in (n, k))
        a, b = tq.quantize_act_t(dy.to(DEVICE)), tq.quantize_act_t(x.to(DEVICE), False, tile)
        right = ref.quantize_128x128(x.T.contiguous()) if tile else ref.quantize_128x1(x)
        want = by_groups(ref.quantize_128x1(dy), right)
        if tile:
            want = want.bfloat16().float()
            equal("rounded", pf.wgrad_rounded(a, b), want.bfloat16())
        equal("alone", pf.wgrad_gemm(a, b), want)
        grad = torch.randn(n, k, generator=g).to(dtype)
        total = grad.to(DEVICE, copy=True)
        pf.wgrad_into(a, b, total)
        equal("added", total, (want + grad.float()).to(dtype))

    for kind in KINDS:
        for m, sections, k in ((1, (128,), 256), (5, (40, 16, 16), 136), (130, (72, 24), 128)):
            yield f"fp8 {kind} {m} x {sections} x {k}", partial(forward, kind, m, sections, k)
    for tile in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"fp8 wgrad, tile {tile} {dtype}", partial(backward, 300, 40, 136, tile, dtype)


def grouped_cases() -> Iterator[tuple[str, Case]]:
    def groups_of(tokens: int, experts: int, k: int, block: int | None) -> route.PaddedGroups:
        """Of which one expert has no rows, and one has many."""
        g = torch.Generator().manual_seed(tokens + experts)
        scores = torch.rand(tokens, experts, generator=g)
        scores[:, 1], scores[:, 2] = -1.0, 2.0
        chosen = scores.topk(k).indices
        return route.group(chosen.to(DEVICE), experts, block)

    def rows(kind: str, tokens: int, experts: int, k: int, block: int, n: int, width: int) -> None:
        on(kind)
        groups = groups_of(tokens, experts, k, block)
        g = torch.Generator().manual_seed(n)
        x = torch.randn(len(groups.tokens), width, generator=g).bfloat16()
        x[(groups.tokens < 0).cpu()] = float("nan")  # whatever padding holds
        w = torch.randn(experts * n, width, generator=g).bfloat16()
        got = pe.grouped_bf16_gemm(x.to(DEVICE), eo.prepare_experts_bf16(w.to(DEVICE), experts), groups, torch.bfloat16)
        clean = x.nan_to_num(0.0)
        weight = tq.quantize_weight(w.to(DEVICE), False, (n,) * experts)
        held, turned = (make(weight, experts) for make in (eo.prepare_experts_fp8, eo.prepare_experts_fp8_t))
        quantized = pe.grouped_fp8_gemm(tq.quantize_act(clean.to(DEVICE)), held, groups, torch.bfloat16)
        dy = torch.randn(len(clean), n, generator=g).bfloat16()
        dx = pe.grouped_fp8_gemm(tq.quantize_act(dy.to(DEVICE)), turned, groups, torch.bfloat16)
        plain = pe.grouped_bf16_dgrad(dy.to(DEVICE), w.to(DEVICE), groups)
        for e in range(experts):
            at = slice(int(groups.starts[e]), int(groups.ends[e]))
            if at.start == at.stop:
                continue
            matrix = w[e * n : (e + 1) * n]
            dense = pg.bf16_gemm(clean[at].to(DEVICE), operands.prepare_bf16(matrix.to(DEVICE)), torch.bfloat16)
            equal(f"expert {e}", got[at], dense)
            own = tq.quantize_weight(matrix.contiguous().to(DEVICE))
            a, d = (tq.quantize_act(t[at].contiguous().to(DEVICE)) for t in (clean, dy))
            equal(f"expert {e}, fp8", quantized[at], pf.fp8_gemm(a, operands.prepare_fp8(own), torch.bfloat16))
            equal(f"expert {e}, dgrad fp8", dx[at], pf.fp8_gemm(d, operands.prepare_fp8_t(own), torch.bfloat16))
            error = (plain[at].cpu().float() - dy[at].float() @ matrix.float()).norm()
            assert error <= 0.01 * (dy[at].float() @ matrix.float()).norm(), f"expert {e}, dgrad"

    def gradients(dtype: torch.dtype) -> None:
        on("wgmma")
        n, width, experts = 40, 72, 5
        groups = groups_of(70, experts, 2, 128)
        g = torch.Generator().manual_seed(3)
        real = (groups.tokens >= 0).cpu()[:, None]
        dy, x = (torch.randn(len(real), size, generator=g).bfloat16() * real for size in (n, width))
        begun = torch.randn(experts * n, width, generator=g).to(dtype)
        plain, coded = begun.to(DEVICE, copy=True), begun.to(DEVICE, copy=True)
        pe.grouped_bf16_wgrad_into(dy.to(DEVICE), x.to(DEVICE), groups, plain)
        columns = (eq.quantize_rows_t(t.to(DEVICE), groups, False) for t in (dy, x))
        pe.grouped_wgrad_into(*columns, groups, coded)
        for e in range(experts):
            at, mine = slice(int(groups.starts[e]), int(groups.ends[e])), slice(e * n, (e + 1) * n)
            if at.start == at.stop:
                equal(f"expert {e} without rows", plain[mine], begun[mine])
                equal(f"expert {e} without rows", coded[mine], begun[mine])
                continue
            want = begun[mine].float() + dy[at].float().T @ x[at].float()
            torch.testing.assert_close(plain[mine].cpu().float(), want, rtol=2**-7, atol=1e-3)
            of = (tq.quantize_act_t(t[at].contiguous().to(DEVICE)) for t in (dy, x))
            total = begun[mine].to(DEVICE, copy=True)
            pf.wgrad_into(*of, total)
            equal(f"expert {e}, fp8", coded[mine], total)

    for kind, tokens, block in (("mma", 6, 16), ("wgmma", 70, 128), ("tcgen05", 3, 16)):
        yield f"experts {kind}, {tokens} tokens", partial(rows, kind, tokens, 6, 2, block, 40, 72)
    for dtype in (torch.float32, torch.bfloat16):
        yield f"experts' gradients {dtype}", partial(gradients, dtype)


@triton.jit
def _codes_kernel(x, rounded, converted, values, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    v = tl.load(x + at)
    code = e4m3.rounded_codes(v)
    tl.store(rounded + at, code)
    tl.store(converted + at, e4m3.codes_of(v))
    tl.store(values + at, e4m3.values_of(code))


@triton.jit
def _scaled_kernel(codes, units, values, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(values + at, e4m3.scaled_values(tl.load(codes + at), tl.load(units + at)))


def code_cases() -> Iterator[tuple[str, Case]]:
    def scaled() -> None:
        """Every code times every power of two that a head may have, to BF16; NaN codes where the power is NaN."""
        codes, powers = torch.arange(256, dtype=torch.uint8), 2.0 ** torch.arange(-100.0, 110.0)
        values = codes.view(torch.float8_e4m3fn).float()[None, :].expand(len(powers), 256)
        units = torch.where(values.isnan(), float("nan"), powers[:, None]).bfloat16()
        got = torch.zeros(units.shape, dtype=torch.bfloat16, device=DEVICE)
        given = codes[None, :].expand(units.shape).contiguous()
        _scaled_kernel[(units.numel() // 256,)](given.to(DEVICE), units.to(DEVICE), got, SIZE=256)
        equal("values", got, (values * units.float()).bfloat16())

    def codes() -> None:
        """Every code, the middle between two, and the numbers next to each; beyond 448 and NaN."""
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        finite = every[every.isfinite()].sort().values
        middle = (finite[1:] + finite[:-1]) / 2
        exact = torch.cat([finite, middle])
        up, down = (torch.nextafter(exact, torch.full_like(exact, x)) for x in (float("inf"), float("-inf")))
        more = torch.tensor([448.00003, -448.00003, 1e-30, -1e-30, 0.0, -0.0, float("nan")])
        x = torch.cat([exact, up, down, more])
        x = torch.nn.functional.pad(x, (0, -len(x) % 64))
        rounded, converted = (torch.zeros(len(x), dtype=torch.uint8, device=DEVICE) for _ in range(2))
        values = torch.zeros(len(x), device=DEVICE)
        _codes_kernel[(len(x) // 64,)](x.to(DEVICE), rounded, converted, values, SIZE=64)
        want = x.clamp(-448, 448).to(torch.float8_e4m3fn)
        equal("rounded", rounded.view(torch.float8_e4m3fn), want)
        equal("by the instruction", converted.view(torch.float8_e4m3fn), want)
        equal("values", values, want.float())

    yield "codes of E4M3", codes
    yield "codes of E4M3 times powers of two", scaled


# ---- attention ------------------------------------------------------------------------------------------------------


def attend_by_steps(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: np.float32) -> np.ndarray:
    """Rows `q` [R, H] that see all of `k`, `v` [J, H], by the text of `attention/portable.py`."""
    (rows, h), size = q.shape, keys_for(q.shape[1])
    top, total = np.full(rows, -np.inf, np.float32), np.zeros((rows, 1), np.float32)
    acc = np.zeros((rows, h), np.float32)
    for start in range(0, len(k), size):
        count = min(size, len(k) - start)
        keys, values = np.zeros((2, size, h), np.float32)
        keys[:count], values[:count] = k[start : start + count], v[start : start + count]
        s = attention.product(q, keys.T, np.zeros((rows, size), np.float32))
        s[:, count:] = -np.inf
        new = np.maximum(top, s.max(1))
        with np.errstate(all="ignore"):
            shrink = attention.exp2((top - new) * scale)[:, None]
        p = attention.exp2(attention.fma(s, scale, -(new * scale)[:, None]))
        p = torch.from_numpy(p).bfloat16().float().numpy()
        acc = attention.product(p, values, acc * shrink)
        total = attention.product(p, np.ones((size, 1), np.float32), total * shrink)
        top = new
    return acc / total


def by_definition(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One sequence: the last len(q) of its tokens, each over the keys up to its own."""
    out, share = torch.empty_like(q), q.shape[1] // k.shape[1]
    log2 = np.float32(scale * np.log2(np.e))
    for i in range(len(q)):
        seen = len(k) - len(q) + i + 1
        for g in range(k.shape[1]):
            mine = slice(g * share, (g + 1) * share)
            heads = (x.float().numpy() for x in (q[i, mine], k[:seen, g], v[:seen, g]))
            out[i, mine] = torch.from_numpy(attend_by_steps(*heads, log2)).bfloat16()
    return out


class Sequences:
    """Heads of packed sequences, and the pages of a cache that holds their keys."""

    def __init__(self, lengths: list[int], n: int, g: int, h: int, page: int, fp8: bool) -> None:
        gen = torch.Generator().manual_seed(sum(lengths) + n + h)
        total = sum(lengths)
        self.lengths, self.scale, self.page, self.fp8 = lengths, h**-0.5, page, fp8
        self.q = (1.5 * torch.randn(total, n, h, generator=gen)).bfloat16()
        self.k, self.v = (torch.randn(total, g, h, generator=gen).mul_(2).bfloat16() for _ in "kv")
        if fp8:
            self.k, self.v = ref.round_heads(self.k), ref.round_heads(self.v)
        self.starts = np.concatenate(([0], np.cumsum(lengths))).tolist()
        width = -(-max(lengths) // page) + 1
        self.table = 1 + torch.randperm(len(lengths) * width, generator=gen).view(-1, width).to(torch.int32)
        self.want = torch.cat([
            by_definition(self.q[a:b], self.k[a:b], self.v[a:b], self.scale)
            for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)
        ])

    def plan(self) -> VarlenPlan:
        return VarlenPlan(torch.tensor(self.starts, dtype=torch.int32, device=DEVICE), tuple(self.lengths))

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q.to(DEVICE), self.k.to(DEVICE), self.v.to(DEVICE)

    def cache(self) -> LayerCache:
        """Pages in random order; what nobody owns is NaN."""
        pages, (_, g, h) = int(self.table.max()) + 1, self.k.shape
        keys, values = (torch.full((pages, self.page, g, h), float("nan")).bfloat16() for _ in "kv")
        slots = torch.cat([
            row[torch.arange(n) // self.page].long() * self.page + torch.arange(n) % self.page
            for row, n in zip(self.table, self.lengths, strict=True)
        ])
        cache = LayerCache(keys.to(DEVICE), values.to(DEVICE))
        if self.fp8:
            codes = (torch.full((pages, self.page, g, h), 0x7F, dtype=torch.uint8).to(DEVICE) for _ in "kv")
            scales = torch.full((pages, g, self.page, 2), float("nan")).bfloat16().to(DEVICE)
            cache = LayerCache(*(x.view(torch.float8_e4m3fn) for x in codes), scales)
        pa.write_cache(self.k.to(DEVICE), self.v.to(DEVICE), slots.to(DEVICE), cache)
        return cache

    def paged(self, cache: LayerCache, counts: list[int]) -> tuple[Tensor, Tensor]:
        """Attention of the last tokens of each sequence over the cache, and what it should be."""
        plan, rows = self.plan_of(cache, counts)
        return pa.attend_cached(self.q[rows].to(DEVICE), plan, 0, self.scale), self.want[rows]

    def plan_of(self, cache: LayerCache, counts: list[int]) -> tuple[PagedPlan, Tensor]:
        """A step with the last tokens of each sequence, and which these are."""
        rows = torch.cat([torch.arange(b - n, b) for b, n in zip(self.starts[1:], counts, strict=True)])
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=DEVICE)
        plan = PagedPlan(
            cache=SimpleNamespace(layer=lambda layer: cache), cu_seqlens=starts, query_lengths=tuple(counts),
            kv_lengths=torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE),
            kv_pages=tuple(self.table.shape[1] for _ in counts), block_table=self.table.to(DEVICE),
            slots=torch.full((len(rows),), -1, device=DEVICE),
        )
        return plan, rows


def attention_cases() -> Iterator[tuple[str, Case]]:
    def attend(kind: str, lengths: list[int], n: int, g: int, h: int, page: int, fp8: bool) -> None:
        on(kind)
        case = Sequences(lengths, n, g, h, page, fp8)
        got, _ = pa.attend_varlen(*case.packed(), case.plan(), case.scale, True)
        equal("packed", got, case.want)
        cache = case.cache()
        for counts in ([1] * len(lengths), [min(3, n) for n in lengths], [1, *(max(1, n // 2) for n in lengths[1:])]):
            equal(f"the last {counts}", *case.paged(cache, counts))

    def quantized(fp8: bool, pow2: bool) -> None:
        """Codes of the result from the same kernel, heads of 128: what the quantizer makes of it."""
        on("mma")
        case = Sequences([70, 3], 4, 2, 128, 16, fp8)
        cache = case.cache()
        for counts in ([1, 1], [5, 2], [20, 1]):  # the last by the tile for many
            plan, rows = case.plan_of(cache, counts)
            q = case.q[rows].to(DEVICE)
            want = tq.quantize_act(pa.attend_cached(q, plan, 0, case.scale).flatten(1), pow2)
            got = pa.attend_cached_quantize(q, plan, 0, case.scale, pow2)
            equal(f"codes {counts}", got.codes.view(torch.uint8), want.codes.view(torch.uint8))
            equal(f"scales {counts}", got.scale, want.scale)

    def broken() -> None:
        """What is infinite or NaN in a key or a value comes out as in training."""
        on("mma")
        case = Sequences([40, 30], 2, 1, 32, 16, True)
        case.k[3, 0, 5], case.k[41, 0, 1] = float("inf"), float("nan")
        case.v[45, 0] = float("-inf")
        case.v[50, 0, 2] = float("nan")
        case.k, case.v = case.k.clone(), case.v.clone()
        packed = pa.attend_varlen(
            case.q.to(DEVICE), ref.round_heads(case.k).to(DEVICE), ref.round_heads(case.v).to(DEVICE), case.plan(),
            case.scale, False,
        )[0]
        assert packed.isnan().any() and packed.isfinite().any()
        got, _ = case.paged(case.cache(), [1, 1])
        equal("the last rows", got, packed[[39, 69]])

    sizes = (
        ([70, 1, 129], 4, 2, 16, 16), ([64, 65], 3, 3, 40, 128), ([150, 2, 33], 6, 1, 64, 24), ([40], 2, 1, 136, 16),
    )
    for kind in KINDS:
        for fp8 in (False, True):
            for lengths, n, g, h, page in sizes if kind == "mma" else sizes[:2] if kind == "wgmma" else sizes[1:2]:
                yield f"attention {kind} {lengths} {n}/{g} x {h}, page {page}, fp8 {fp8}", partial(
                    attend, kind, lengths, n, g, h, page, fp8
                )
    for fp8, pow2 in ((False, False), (True, True)):
        yield f"attention and codes of it, fp8 {fp8}", partial(quantized, fp8, pow2)
    yield "attention of what is not finite", broken


def gradient_cases() -> Iterator[tuple[str, Case]]:
    def latent(stems: tuple[int, ...]) -> None:
        """Of latent attention, with values smaller and larger than keys."""
        from jetrl.kernels.dispatch import served_by
        from jetrl.kernels.registry import load

        for sizes in (LatentSizes(3, 12, 16, 16, 16), LatentSizes(2, 8, 16, 16, 40)):
            gen, lengths = torch.Generator().manual_seed(sizes.heads), (40, 9, 30)
            q = torch.randn(sum(lengths), sizes.heads, sizes.nope + sizes.rope, generator=gen).bfloat16()
            row = torch.randn(sum(lengths), sizes.rank + sizes.rope, generator=gen).bfloat16()
            w = torch.randn(sizes.heads * (sizes.nope + sizes.value), sizes.rank, generator=gen).mul_(0.3).bfloat16()
            grad = torch.randn(sum(lengths), sizes.heads * sizes.value, generator=gen).bfloat16()
            starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
            plan = varlen_plan(starts.to(DEVICE), lengths, stems)
            operand = latent_reference.prepare_latent(w, sizes)
            absorbed = latent_reference.latent_absorb(q, operand, sizes)
            host = varlen_plan(starts, lengths, stems)
            a, _ = latent_reference.latent_attend(absorbed, row, host, 0.2, sizes, False)
            out = latent_reference.latent_lift(a, operand, sizes)
            want = latent_reference.latent_backward(grad, q, row, w, operand, host, 0.2, sizes, out, None)
            sees = row if host.keys is None else row[host.keys.rows]
            spans = host.cu_seqlens if host.keys is None else host.keys.cu_seqlens
            lse = torch.empty(sizes.heads, len(q))
            for i, n in enumerate(lengths):  # log-sums by float64
                mine, keys = slice(int(starts[i]), int(starts[i]) + n), sees[int(spans[i]) : int(spans[i + 1])]
                s = torch.einsum("tnh,kh->ntk", absorbed[mine].double(), keys.double()) * 0.2
                unseen = torch.ones(s.shape[1:], dtype=torch.bool).triu(len(keys) - n + 1)
                lse[:, mine] = s.masked_fill(unseen, float("-inf")).logsumexp(-1).float()
            with served_by(torch.device("cpu"), load("triton")):
                given = (x.to(DEVICE) for x in (grad, q, row, w))
                held = lp.prepare_latent(w.to(DEVICE), sizes)
                got = lp.latent_backward(*given, held, plan, 0.2, sizes, out.to(DEVICE), lse.to(DEVICE))
            for name, x, y in zip(("dq", "d_row", "d_kv"), got, want, strict=True):
                error = (x.cpu().float() - y.float()).norm() / y.float().norm()
                assert error < 0.012, f"{sizes} {name}: relative error {error:.4f}"

    def gradients(lengths: list[int], stems: tuple[int, ...], n: int, g: int, h: int) -> None:
        on("wgmma")
        gen = torch.Generator().manual_seed(sum(lengths))
        q = torch.randn(sum(lengths), n, h, generator=gen).bfloat16()
        k, v = (torch.randn(sum(lengths), g, h, generator=gen).bfloat16() for _ in "kv")
        grad = torch.randn(q.shape, generator=gen).bfloat16()
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        plan, there = varlen_plan(starts, tuple(lengths), stems), varlen_plan(starts.to(DEVICE), tuple(lengths), stems)
        want = attention_reference.attend_backward(grad.float(), q.float(), k.float(), v.float(), plan, h**-0.5)
        given = [x.to(DEVICE) for x in (grad, q, k, v)]
        got = pa.attend_backward(*given, there, h**-0.5)
        assert pb._QUERIES == pb._KEYS == 64, "the lengths below are around a tile"
        again = pa.attend_backward(*given, there, h**-0.5, *pa.attend_varlen(*given[1:], there, h**-0.5, True))
        for name, x, same, y in zip(("dq", "dk", "dv"), got, again, want, strict=True):
            equal(name, x, same)
            error = (x.cpu().float() - y).norm() / y.norm()
            assert error < 0.01, f"{name}: relative error {error:.4f}"

    for lengths, stems, n, g, h in (
        ([70, 1, 131], (), 4, 2, 16), ([64, 30, 75], (-1, 0, 0), 2, 1, 40), ([65, 128], (), 3, 3, 64),
        ([50], (), 2, 1, 136),
    ):
        yield f"gradients of attention {lengths} {stems} {n}/{g} x {h}", partial(gradients, lengths, stems, n, g, h)


    for stems in ((), (-1, 0, 0)):
        yield f"gradients of latent attention {stems}", partial(latent, stems)


def all_cases() -> list[tuple[str, Case]]:
    kinds = (gemm_cases, fp8_cases, grouped_cases, code_cases, attention_cases, gradient_cases)
    return [case for kind in kinds for case in kind()]


if __name__ == "__main__":
    if base.INTERPRET:  # torch's CPU has no product of BF16 with an FP32 result
        pg.bf16_wgrad = lambda dy, x: dy.float().T @ x.float()
    raise SystemExit(base.main(all_cases()))
