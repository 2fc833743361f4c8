"""Quantizers as Triton kernels, bit-equal to `reference.quantize_*` (NaN codes may differ in sign).

Every kernel reads BF16 or FP32 once and writes E4M3 codes and FP32 scales. Scales of activations are written MN-major
with a column stride that is a multiple of 4 (16 bytes), the layout that the GEMM's TMA reads: no transform kernel runs.
Rows of codes are padded with zeros to a multiple of 128 if the matrix ends in a partial block.

Legend: `T` tokens, `C` columns (features), `N`, `K` weight rows and columns. Launches switch FP fusion off: a fused
multiply-add would round once where the definition rounds twice.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.launch import LAUNCH, ON_GPU, begin
from jetrl.kernels.qtensor import QTensor, blocks_of
from jetrl.kernels.quantize.e4m3 import codes_of
from jetrl.precision.formats import BLOCK

_FLOOR_BITS = 0x2B8CBCCC  # bits of FP32 1e-12, `formats.AMAX_FLOOR`
_HIGH_448 = tl.constexpr(9586980 * 2.0**-32)  # 1 / 448: the FP32 below it
_LOW_448 = tl.constexpr(9586981 * 2.0**-56)  # and FP32 of the rest


@triton.jit
def abs_bits(x):
    """Bits of |x| (FP32): integers in the order of the values, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def to_bf16(x):
    """FP32 rounded to BF16, as FP32: one instruction, as the upper half of a pair (alone it is a slow conversion)."""
    if ON_GPU:
        pair = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=r,f", [x], tl.int32, True, 1)
        return pair.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def scale_from(amax_bits, FLOOR: tl.constexpr, POW2: tl.constexpr):
    """`reference.scale_of` for the integer maximum of `abs_bits`; NaN and infinity pass through.

    The quotient by 448 = 7 * 2**6 is a product with 1/448 in two parts, of relative error 2**-46 before it is rounded
    once: exact, because x / 7 is never nearer than 2**-28 to the middle of two FP32 (7 times an odd number is odd).
    """
    amax = tl.maximum(amax_bits, FLOOR).to(tl.float32, bitcast=True)
    scale = tl.fma(amax, _HIGH_448, amax * _LOW_448)
    if POW2:
        up = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale != scale, scale, up)
    return scale


@triton.jit
def reciprocal(x):
    """1 / x to within two units in the last place, where neither is denormal."""
    if ON_GPU:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def inverse(scale):
    """1 / scale in two parts, both positive (so that -0 stays -0): a little too small, and what it lacks.

The first is the reciprocal less three units. An infinite or NaN scale gives 0 or NaN, and 0.
    """
    r = reciprocal(scale)
    less = (r.to(tl.int32, bitcast=True) - 3).to(tl.float32, bitcast=True)
    finite = scale < float("inf")
    high = tl.where(finite, less, r)
    return high, tl.where(finite, tl.fma(high * -1.0, scale, 1.0) * high, 0.0)


@triton.jit
def corrected(x, scale):
    """`x / scale` of any FP32: the product with the reciprocal, corrected twice, is exact.

    Exact wherever |x / scale| >= 2**-11; below, the code is a zero with the sign of x, whatever the last bit.
    """
    r = tl.div_rn(1.0, scale)
    less, first = scale * -1.0, x * r
    q = tl.fma(tl.fma(first, less, x), r, first)
    q = tl.fma(tl.fma(q, less, x), r, q)
    return tl.where(first == 0.0, first, q)  # keeps -0, and 0 where the scale is infinite


@triton.jit
def quotient(x, scale, BF16: tl.constexpr):
    """`x / scale` as `corrected`; for BF16 values and the scale of their maximum with a third of the steps.

    Then scales have the significands of 128 / 7 to 255 / 7 and of the floor, and x those of BF16. For each of these
    pairs the product with both parts of the inverse, rounded once, is the quotient (`tests/kernels/test_quotients.py`
    tries all). Where the second part is denormal, the last bit may differ next to no boundary between two codes.
    """
    if BF16:
        high, low = inverse(scale)
        return tl.fma(x, high, x * low)
    else:
        return corrected(x, scale)


# PTX: four E4M3 codes in $2 -> BF16, in order, two in $0 and two in $1; 2**120 corrects the exponent's bias
_WIDEN = tl.constexpr("""{ .reg .b32 high, low, t, c; mov.b32 c, 0x7b807b80;
    shr.b32 t, $2, 4; and.b32 t, t, 0x07070707; and.b32 high, $2, 0x80808080; or.b32 high, high, t;
    shl.b32 low, $2, 4; and.b32 low, low, 0xf0f0f0f0;
    prmt.b32 t, low, high, 0x5140; mul.bf16x2 $0, t, c; prmt.b32 t, low, high, 0x7362; mul.bf16x2 $1, t, c; }""")


@triton.jit
def widened(x, FP8: tl.constexpr, ON_GPU: tl.constexpr):
    """E4M3 codes (as bytes) -> BF16, exact.

    "Not pure" is for Triton's choice of layouts: it looks through pure operations, and from a load of 8 bits it makes
    an operand that holds four neighbours of the sum per thread, which the tensor core would multiply in another order.
    """
    if FP8 and ON_GPU:
        return tl.inline_asm_elementwise(_WIDEN, "=&r,=&r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=4)
    elif FP8:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    else:
        return x


@triton.jit
def encode(x, scale):
    """`reference.encode`, as bytes. The conversion saturates, and |x / scale| is at most 448 * (1 + 2**-23)."""
    return codes_of(corrected(x, scale))


@triton.jit
def quantize_group(
    x, codes, scale, rows, group, num_rows, num_cols, written_cols, x_stride, codes_stride, scale_stride,
    FLOOR: tl.constexpr, POW2: tl.constexpr,
):
    """One group of 128 columns of some `rows`."""
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    cols = group * 128 + tl.arange(0, 128)
    alive = rows < num_rows
    v = tl.load(
        x + rows[:, None] * x_stride + cols[None, :], mask=alive[:, None] & (cols < num_cols)[None, :], other=0.0
    ).to(tl.float32)
    s = scale_from(tl.max(abs_bits(v), axis=1), FLOOR, POW2)
    tl.store(
        codes + rows[:, None] * codes_stride + cols[None, :], codes_of(quotient(v, s[:, None], BF16)),
        mask=alive[:, None] & (cols < written_cols)[None, :],
    )
    tl.store(scale + group.to(tl.int64) * scale_stride + rows, s, mask=alive)


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def _rows_kernel(
    x, codes, scale, num_rows, num_cols, written_cols, x_stride, codes_stride, scale_stride,
    FLOOR: tl.constexpr, POW2: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr,
):
    """One group of 128 columns of R rows."""
    begin(PDL)
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    quantize_group(
        x, codes, scale, rows, tl.program_id(1), num_rows, num_cols, written_cols, x_stride, codes_stride, scale_stride,
        FLOOR, POW2,
    )


@triton.jit
def pack4(a, b, c, d):
    """E4M3 codes of four FP32 in one word, the first in the lowest byte."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; "
            "mov.b32 $0, {l, h}; }",
            "=r,f,f,f,f", [a, b, c, d], tl.int32, True, 1,
        )
    else:
        word = _byte(a) | (_byte(b) << 8) | (_byte(c) << 16) | (_byte(d) << 24)
        return word.to(tl.int32, bitcast=True)


@triton.jit
def _byte(x):
    return codes_of(x).to(tl.uint32)


@triton.jit
def _row_of_four(at, row, x_stride, num_rows, inside):
    mask = (row < num_rows)[:, None] & inside[None, :]
    return tl.load(at + row[:, None] * x_stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_columns(
    a, b, c, d, words_t, scale_t, group, column_group, cols, inside, words_t_stride, scale_t_stride,
    FLOOR: tl.constexpr, POW2: tl.constexpr, TILE: tl.constexpr, BF16: tl.constexpr,
):
    """Codes and scales of 128 rows, of which `a` to `d` hold every fourth one each (FP32 [32, C]), written transposed.

    TILE: with one scale for all. BF16: the values are BF16 numbers.
    """
    top = tl.maximum(tl.maximum(abs_bits(a), abs_bits(b)), tl.maximum(abs_bits(c), abs_bits(d)))
    top = tl.max(top, axis=0)
    if TILE:
        s = scale_from(tl.max(top, axis=0), FLOOR, POW2)
        tl.store(scale_t + column_group * scale_t_stride + group, s)
        unit = s
    else:
        s = scale_from(top, FLOOR, POW2)
        tl.store(scale_t + group * scale_t_stride + cols, s, mask=inside)
        unit = s[None, :]
    a, b = quotient(a, unit, BF16), quotient(b, unit, BF16)
    word = pack4(a, b, quotient(c, unit, BF16), quotient(d, unit, BF16))
    four = group * 32 + tl.arange(0, 32)
    tl.store(words_t + cols[:, None] * words_t_stride + four[None, :], tl.trans(word), mask=inside[:, None])


@triton.jit(do_not_specialize=["num_rows", "scale_t_stride"])
def _columns_kernel(
    x, words_t, scale_t, num_rows, num_cols, x_stride, words_t_stride, scale_t_stride,
    FLOOR: tl.constexpr, POW2: tl.constexpr, TILE: tl.constexpr, C: tl.constexpr,
):
    """One group of 128 rows of C columns, written transposed; TILE: with one scale for all (then C is 128).

    A thread holds four rows of a column, whose codes are one word: a quarter of the bytes' steps through shared memory.
    """
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    group = tl.program_id(0).to(tl.int64)
    four = group * 32 + tl.arange(0, 32)
    cols = tl.program_id(1).to(tl.int64) * C + tl.arange(0, C)
    inside = cols < num_cols
    at, row = x + cols[None, :], four * 4
    a = _row_of_four(at, row, x_stride, num_rows, inside)
    b = _row_of_four(at, row + 1, x_stride, num_rows, inside)
    c = _row_of_four(at, row + 2, x_stride, num_rows, inside)
    d = _row_of_four(at, row + 3, x_stride, num_rows, inside)
    store_columns(
        a, b, c, d, words_t, scale_t, group, tl.program_id(1), cols, inside, words_t_stride, scale_t_stride,
        FLOOR, POW2, TILE, BF16,
    )


@triton.jit(do_not_specialize=["first_row", "last_row", "first_block", "scale_stride"])
def _blocks_kernel(
    w, codes, scale, first_row, last_row, first_block, num_cols, written_cols, w_stride, codes_stride, scale_stride,
    FLOOR: tl.constexpr, POW2: tl.constexpr, ROUND: tl.constexpr,
):
    BF16: tl.constexpr = ROUND or w.dtype.element_ty == tl.bfloat16
    block, group = tl.program_id(0), tl.program_id(1)
    rows = first_row + block.to(tl.int64) * 128 + tl.arange(0, 128)
    cols = group * 128 + tl.arange(0, 128)
    alive = rows < last_row
    v = tl.load(
        w + rows[:, None] * w_stride + cols[None, :], mask=alive[:, None] & (cols < num_cols)[None, :], other=0.0
    ).to(tl.float32)
    if ROUND:
        v = to_bf16(v)
    s = scale_from(tl.max(tl.max(abs_bits(v), axis=1), axis=0), FLOOR, POW2)
    tl.store(
        codes + rows[:, None] * codes_stride + cols[None, :], codes_of(quotient(v, s, BF16)),
        mask=alive[:, None] & (cols < written_cols)[None, :],
    )
    tl.store(scale + (first_block + block) * scale_stride + group, s)


def padded(size: int, multiple: int = BLOCK) -> int:
    """`size` rounded up."""
    return -(-size // multiple) * multiple


def has_gaps(sections: tuple[int, ...]) -> bool:
    """Whether a section before the last ends in a partial block, so that blocks are not simply 128 apart."""
    return any(size % BLOCK for size in sections[:-1])


def new_codes(rows: int, cols: int, device: torch.device) -> Tensor:
    """Empty E4M3 [rows, cols] with rows a multiple of 128 bytes apart; the writer fills the rest with zeros."""
    stride = padded(cols)
    return torch.empty(rows, stride, dtype=torch.float8_e4m3fn, device=device)[:, :cols]


def new_scale(rows: int, groups: int, device: torch.device) -> Tensor:
    """Empty FP32 [rows, groups], MN-major with an aligned column stride: what the GEMM's TMA reads."""
    stride = padded(rows, 4)
    return torch.empty_strided((rows, groups), (1, stride), dtype=torch.float32, device=device)


def new_heads(q: Tensor) -> QTensor:
    """What `quantize_act` would make of heads [T, N, 128], still empty: a head is a group of 128 columns."""
    tokens, heads, head_dim = q.shape
    assert head_dim == BLOCK, "a group of the quantizer is a head"
    codes, scale = new_codes(tokens, heads * head_dim, q.device), new_scale(tokens, heads, q.device)
    return QTensor(codes, scale, "1x128", (tokens,), (heads * head_dim,))


def new_tile_scale(rows: int, cols: int, device: torch.device) -> Tensor:
    """Empty FP32 scales of the 128x128 tiles of a matrix [rows, cols]."""
    return torch.empty(triton.cdiv(rows, BLOCK), triton.cdiv(cols, BLOCK), dtype=torch.float32, device=device)


def _quantize_section(x: Tensor, codes: Tensor, scale: Tensor, pow2: bool, written: int) -> None:
    r, warps = (32, 2) if x.shape[0] >= 4096 else (8, 4)
    grid = (triton.cdiv(x.shape[0], r), scale.shape[1])
    _rows_kernel[grid](
        x, codes.view(torch.uint8), scale, x.shape[0], x.shape[1], written, x.stride(0), codes.stride(0),
        scale.stride(1),
        FLOOR=_FLOOR_BITS, POW2=pow2, R=r, num_warps=warps, enable_fp_fusion=False, **LAUNCH,
    )


def quantize_act(x: Tensor, pow2: bool = False, sections: tuple[int, ...] | None = None) -> QTensor:
    """`reference.quantize_1x128`: `x` [T, C], rows contiguous; groups of 128 columns restart at every section."""
    assert x.stride(1) == 1
    sections = sections or (x.shape[1],)
    rows, cols = x.shape
    scale = new_scale(rows, len(blocks_of(sections)), x.device)
    codes = new_codes(rows, cols, x.device)
    if not has_gaps(sections):
        if rows:
            _quantize_section(x, codes, scale, pow2, codes.stride(0))
        return QTensor(codes, scale, "1x128", (rows,), sections)
    start = group = 0
    for size in sections:
        groups = triton.cdiv(size, BLOCK)
        part = slice(start, start + size)
        _quantize_section(x[:, part], codes[:, part], scale[:, group : group + groups], pow2, size)
        start, group = start + size, group + groups
    return QTensor(codes, scale, "1x128", (rows,), sections)


def quantize_act_t(x: Tensor, pow2: bool = False, tile: bool = False) -> QTensor:
    """`reference.quantize_128x1`: `x` [T, C] -> the quantized `x.T` [C, T], groups of 128 tokens.

    `tile`: `reference.quantize_128x128` of `x.T`, one scale for 128 features and 128 tokens.
    """
    (rows, cols), groups = x.shape, triton.cdiv(x.shape[0], BLOCK)
    assert x.stride(1) == 1 and rows > 0
    codes = new_codes(cols, rows, x.device)
    if tile:
        c, warps, scale = BLOCK, 8, new_tile_scale(cols, rows, x.device)
    else:
        c, warps, scale = 64, 4, new_scale(cols, groups, x.device)
    words = codes.as_strided((cols, codes.stride(0)), (codes.stride(0), 1)).view(torch.int32)
    _columns_kernel[(groups, triton.cdiv(cols, c))](
        x, words, scale, rows, cols, x.stride(0), words.stride(0), scale.stride(0) if tile else scale.stride(1),
        FLOOR=_FLOOR_BITS, POW2=pow2, TILE=tile, C=c, num_warps=warps, enable_fp_fusion=False,
    )
    return QTensor(codes, scale, "128x128" if tile else "1x128", (cols,), (rows,))


def quantize_weight(
    w: Tensor, pow2: bool = False, sections: tuple[int, ...] | None = None, out: QTensor | None = None,
    dtype: torch.dtype | None = None,
) -> QTensor:
    """`reference.quantize_128x128` of `w` [N, K]; of FP32 its values in `dtype`, if given. `out` is overwritten."""
    assert w.stride(1) == 1
    rounds = w.dtype == torch.float32 and dtype == torch.bfloat16
    sections = sections or (w.shape[0],)
    groups = triton.cdiv(w.shape[1], BLOCK)
    if out is None:
        codes = new_codes(w.shape[0], w.shape[1], w.device)
        scale = torch.empty(len(blocks_of(sections)), groups, dtype=torch.float32, device=w.device)
        out = QTensor(codes, scale, "128x128", sections, (w.shape[1],))
    codes, scale = out.codes, out.scale
    assert out.row_sections == sections and codes.shape == w.shape and codes.stride(0) == padded(w.shape[1])
    start = block = 0
    for size in sections if has_gaps(sections) else (w.shape[0],):  # without gaps blocks are 128 apart throughout
        blocks = triton.cdiv(size, BLOCK)
        _blocks_kernel[(blocks, groups)](
            w, codes.view(torch.uint8), scale, start, start + size, block, w.shape[1], codes.stride(0), w.stride(0),
            codes.stride(0), scale.stride(0), FLOOR=_FLOOR_BITS, POW2=pow2, ROUND=rounds, num_warps=8,
            enable_fp_fusion=False,
        )
        start, block = start + size, block + blocks
    return out
