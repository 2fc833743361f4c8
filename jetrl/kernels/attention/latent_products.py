"""What latent attention computes head by head, before and after its attention, as Triton kernels of any GPU.

    enter    of the fused projection, in one kernel: absorbed and rotated queries; normed and rotated rows, which go to
             pages where there are some. The bits are those of the ops one after another (`latent_reference`)
    absorb   queries that are rotated already
    lift     the heads' outputs, in BF16 or as codes of the linear behind them

Products are BF16 in tiles of 64 tokens, with FP32 sums over steps from the first to the last; a row and a column depend
on themselves alone. Few tokens take narrower tiles, so that more programs read the weights.

Legend: as in `latent_triton`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.attention.latent import Entry, LatentSizes
from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.launch import LAUNCH, begin, fetch
from jetrl.kernels.pointwise.triton import inv_rms
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import _FLOOR_BITS, abs_bits, encode, new_codes, new_scale, scale_from
from jetrl.precision.formats import BLOCK

Operand = Tensor  # kv_b [N * (P + V), L], as it is published: captured steps read its memory
_TOKENS = 64  # of a program
_FEW = 64  # tokens up to which tiles are narrow
_ROWS = 4  # rows that a program norms
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _product(
    x, w, alive, column, w_k, w_out, K: tl.constexpr, B: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):
    """FP32 [64, B]: the rows at `x` [64, 1] times a matrix at `w`, at the columns `column` [B]."""
    acc = tl.zeros([64, B], tl.float32)
    for first in range(0, K, STEP):
        k = first + tl.arange(0, STEP)
        a = tl.load(x + k[None, :], mask=alive & (k < K)[None, :], other=0.0)
        at = w + k[:, None] * w_k + column[None, :] * w_out
        b = tl.load(at, mask=(k < K)[:, None] & (column < COLUMNS)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit(do_not_specialize=["T", "units_stride"])
def _product_kernel(
    x, w, out, codes, units, T, x_token, x_head, w_head, w_k, w_out, out_token, out_head, codes_stride, units_stride,
    K: tl.constexpr, B: tl.constexpr, COLUMNS: tl.constexpr, COPIED: tl.constexpr, copied_from, copied_to,
    STEP: tl.constexpr, DTYPE: tl.constexpr, QUANT: tl.constexpr, FLOOR: tl.constexpr, POW2: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):
    """`out = x @ w` of a head for 64 tokens, a tile of B columns; the first tile also copies COPIED columns of x.
    QUANT: not the result, but its codes and scales; a tile is a group. AHEAD: a tile's matrix is one piece of memory,
    and is asked for before the kernel before this one has ended."""
    head, column = tl.program_id(1), tl.program_id(2) * B + tl.arange(0, B)
    if AHEAD and PDL:
        fetch(w + head * w_head + tl.program_id(2) * (B * K) + tl.arange(0, B * K // 64) * 64)
    begin(PDL)
    token = tl.program_id(0).to(tl.int64) * 64 + tl.arange(0, 64)
    alive = (token < T)[:, None]
    at = x + token[:, None] * x_token + head * x_head
    y = _product(at, w + head * w_head, alive, column, w_k, w_out, K, B, COLUMNS, STEP).to(DTYPE)
    if QUANT:
        y = y.to(tl.float32)
        unit = scale_from(tl.max(abs_bits(y), axis=1), FLOOR, POW2)
        to = codes + token[:, None] * codes_stride + head * COLUMNS + column[None, :]
        tl.store(to, encode(y, unit[:, None]).to(tl.uint8, bitcast=True), mask=alive)
        group = head * (COLUMNS // B) + tl.program_id(2)
        tl.store(units + group.to(tl.int64) * units_stride + token, unit, mask=token < T)
    else:
        to = out + token[:, None] * out_token + head * out_head + column[None, :]
        tl.store(to, y, mask=alive & (column < COLUMNS)[None, :])
    if COPIED > 0:
        if tl.program_id(2) == 0:
            e = tl.arange(0, COPIED)
            v = tl.load(at + copied_from + e[None, :], mask=alive, other=0.0)
            tl.store(out + token[:, None] * out_token + head * out_head + copied_to + e[None, :], v, mask=alive)


@triton.jit
def _rotate(
    x, to, cos, sin, positions, token, alive, R: tl.constexpr, DTYPE: tl.constexpr,
):
    """Pairs side by side at `x` [rows, 1], rotated by their tokens' positions, to `to` [rows, 1] where `alive` [rows]:
    first halves of all pairs, then second ones."""
    pair = tl.arange(0, R // 2)[None, :]
    here = alive[:, None]
    x1 = tl.load(x + 2 * pair, mask=here, other=0.0).to(tl.float32)
    x2 = tl.load(x + 2 * pair + 1, mask=here, other=0.0).to(tl.float32)
    at = tl.load(positions + token, mask=alive, other=0)[:, None] * (R // 2) + pair
    c, s = tl.load(cos + at, mask=here, other=0.0), tl.load(sin + at, mask=here, other=0.0)
    tl.store(to + pair, (x1 * c - x2 * s).to(DTYPE), mask=here)
    tl.store(to + R // 2 + pair, (x2 * c + x1 * s).to(DTYPE), mask=here)


@triton.jit
def _enter_rows(
    kv, norm, cos, sin, positions, slots, rows, T, kv_token, R: tl.constexpr, L: tl.constexpr, EPS: tl.constexpr,
    PAGED: tl.constexpr, FEW: tl.constexpr, DTYPE: tl.constexpr,
):
    """FEW rows, normed and rotated."""
    token, e = tl.program_id(0).to(tl.int64) * FEW + tl.arange(0, FEW), tl.arange(0, L)[None, :]
    alive = token < T
    at = kv + token[:, None] * kv_token
    v = tl.load(at + e, mask=alive[:, None], other=0.0).to(tl.float32)
    y = (v * inv_rms(v, L, EPS)[:, None]).to(DTYPE).to(tl.float32) * tl.load(norm + e).to(tl.float32)
    slot = token
    if PAGED:
        slot = tl.load(slots + token, mask=alive, other=-1)
    kept = alive & (slot >= 0)
    to = rows + slot[:, None] * (L + R)
    tl.store(to + e, y.to(DTYPE), mask=kept[:, None])
    _rotate(at + L, to + L, cos, sin, positions, token, kept, R, DTYPE)


@triton.jit(do_not_specialize=["T", "norm_blocks"], do_not_specialize_on_alignment=["positions", "slots"])
def _enter_kernel(
    x, kv, w, norm, cos, sin, positions, slots, out, rows, T, norm_blocks, x_token, kv_token, w_head, w_k,
    N: tl.constexpr, P: tl.constexpr, R: tl.constexpr, L: tl.constexpr, EPS: tl.constexpr, PAGED: tl.constexpr,
    FEW: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):
    """The first `norm_blocks` programs: FEW rows each, to `rows` at `slots` (PAGED; -1: nowhere) or at their tokens.
    The others: queries of a head for 64 tokens, a tile of B columns; the first tile's rotate what meets the shared
    key."""
    TILES: tl.constexpr = (L + B - 1) // B
    block = tl.program_id(0) - norm_blocks
    if AHEAD and PDL and block >= 0:  # a tile's rows of the matrix are lines of memory
        line = tl.arange(0, AHEAD)
        fetch(w + block // TILES % N * w_head + tl.minimum(line, P - 1) * w_k + block % TILES * B)
    begin(PDL)
    if block < 0:
        _enter_rows(kv, norm, cos, sin, positions, slots, rows, T, kv_token, R, L, EPS, PAGED, FEW, DTYPE)
    else:
        tile, head = block % TILES, block // TILES % N
        token = (block // (TILES * N)).to(tl.int64) * 64 + tl.arange(0, 64)
        column, alive = tile * B + tl.arange(0, B), token < T
        at = x + token[:, None] * x_token + head * (P + R)
        to = out + (token[:, None] * N + head) * (L + R)
        y = _product(at, w + head * w_head, alive[:, None], column, w_k, 1, P, B, L, STEP).to(DTYPE)
        tl.store(to + column[None, :], y, mask=alive[:, None] & (column < L)[None, :])
        if tile == 0:
            _rotate(at + P, to + L, cos, sin, positions, token, alive, R, DTYPE)


def latent_enter(
    q: Tensor, kv: Tensor, operand: Operand, entry: Entry, sizes: LatentSizes
) -> tuple[Tensor, Tensor | None]:
    """`latent_reference.latent_enter` in one kernel."""
    n, tokens = sizes.heads, len(q)
    width = sizes.rank + sizes.rope
    assert q.stride(1) == kv.stride(1) == 1 and q.shape[1] == n * (sizes.nope + sizes.rope)
    assert all(table.is_contiguous() for table in entry.tables) and entry.positions.is_contiguous()
    out = torch.empty(tokens, n, width, dtype=q.dtype, device=q.device)
    if entry.cache is None:
        rows, slots = torch.empty(tokens, width, dtype=kv.dtype, device=kv.device), entry.positions
    else:
        rows, slots = entry.cache
    assert rows.is_contiguous() and rows.shape[-1] == width
    if tokens:
        block = min(64 if tokens <= _FEW else 128, sizes.rank)
        norm_blocks = triton.cdiv(tokens, _ROWS)
        products = triton.cdiv(tokens, _TOKENS) * n * triton.cdiv(sizes.rank, block)
        _enter_kernel[(norm_blocks + products,)](
            q, kv, operand, entry.norm, *entry.tables, entry.positions, slots, out, rows, tokens, norm_blocks,
            q.stride(0), kv.stride(0), (sizes.nope + sizes.value) * sizes.rank, sizes.rank, N=n, P=sizes.nope,
            R=sizes.rope, L=sizes.rank, EPS=entry.eps, PAGED=entry.cache is not None, FEW=_ROWS, B=block,
            STEP=_step(sizes.nope), DTYPE=_TYPES[q.dtype], num_warps=4, num_stages=3, enable_fp_fusion=False,
            AHEAD=triton.next_power_of_2(sizes.nope) if tokens <= _FEW else 0, **LAUNCH,
        )
    return out, rows if entry.cache is None else None


def _step(k: int) -> int:
    return 64 if k >= 64 else 16


def _products(
    x: Tensor, w: Tensor, out: Tensor | QTensor, sizes: LatentSizes, k: int, columns: int, strides: tuple[int, int],
    copied: tuple[int, int, int] = (0, 0, 0), pow2: bool = False,
) -> None:
    """Head by head; `strides` of a head's matrix along k and along the columns. `x`, `out` are [T, N, ...]."""
    tokens, block = len(x), min(128, triton.next_power_of_2(columns))
    few = tokens <= _FEW
    if not tokens:
        return
    if isinstance(out, QTensor):
        codes, units, y = out.codes.view(torch.uint8), out.scale, x
    else:
        codes, units, y = out, out, out
        block = min(block, 32) if few else block
    _product_kernel[(triton.cdiv(tokens, _TOKENS), sizes.heads, triton.cdiv(columns, block))](
        x, w, y, codes, units, tokens, x.stride(0), x.stride(1), (sizes.nope + sizes.value) * sizes.rank, *strides,
        y.stride(0), y.stride(1), codes.stride(0), units.stride(1), K=k, B=block, COLUMNS=columns, COPIED=copied[0],
        copied_from=copied[1], copied_to=copied[2], STEP=_step(k), DTYPE=_TYPES[x.dtype],
        QUANT=isinstance(out, QTensor), FLOOR=_FLOOR_BITS, POW2=pow2, AHEAD=few and strides == (1, k) and k % 64 == 0,
        num_warps=4, num_stages=4 if few else 3, enable_fp_fusion=False, **LAUNCH,
    )


def latent_absorb(q: Tensor, operand: Operand, sizes: LatentSizes) -> Tensor:
    """`q` [T, N, P + R] -> [T, N, L + R]."""
    assert q.stride(2) == 1
    out = torch.empty(len(q), sizes.heads, sizes.rank + sizes.rope, dtype=q.dtype, device=q.device)
    copied = (sizes.rope, sizes.nope, sizes.rank)
    _products(q, operand, out, sizes, sizes.nope, sizes.rank, (sizes.rank, 1), copied)
    return out


def latent_lift(a: Tensor, operand: Operand, sizes: LatentSizes) -> Tensor:
    """`a` [T, N, L] -> [T, N * V]."""
    out = torch.empty(len(a), sizes.heads, sizes.value, dtype=a.dtype, device=a.device)
    _lift(a, operand, out, sizes, False)
    return out.flatten(1)


def latent_lift_quantize(a: Tensor, operand: Operand, sizes: LatentSizes, pow2: bool) -> QTensor:
    """`quantize_act(latent_lift(...))`; in one kernel where a head's values are whole groups."""
    if sizes.value % BLOCK:
        found: QTensor = backend_of(a).quantize_act(latent_lift(a, operand, sizes), pow2)
        return found
    tokens, columns = len(a), sizes.heads * sizes.value
    codes, scale = new_codes(tokens, columns, a.device), new_scale(tokens, columns // BLOCK, a.device)
    out = QTensor(codes, scale, "1x128", (tokens,), (columns,))
    _lift(a, operand, out, sizes, pow2)
    return out


def _lift(a: Tensor, operand: Operand, out: Tensor | QTensor, sizes: LatentSizes, pow2: bool) -> None:
    values = operand[sizes.nope :]  # of the first head; the others follow at the same distance
    _products(a, values, out, sizes, sizes.rank, sizes.value, (1, sizes.rank), pow2=pow2)
