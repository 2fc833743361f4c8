"""E4M3 codes on any GPU: conversions by the instructions of sm_89 and later, and without them. Both give the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl

from jetrl.kernels.launch import E4M3, OLD_MMA, ON_GPU

_NAN = tl.constexpr(0x7F)
# Four codes, and the BF16 that each is multiplied by, in two words. A code's bits, four places up in 16 bits, are
# 2**-120 of its value in BF16; a product with 0x7b80, 2**120, is exact, denormals included, and so is the next one.
# (`fma` with -0, as a product alone begins with sm_90.)
_SCALED = tl.constexpr("""{ .reg .b32 high, low, t, c, z; mov.b32 c, 0x7b807b80; mov.b32 z, 0x80008000;
    shr.b32 t, $2, 4; and.b32 t, t, 0x07070707; and.b32 high, $2, 0x80808080; or.b32 high, high, t;
    shl.b32 low, $2, 4; and.b32 low, low, 0xf0f0f0f0;
    prmt.b32 t, low, high, 0x5140; fma.rn.bf16x2 t, t, c, z; fma.rn.bf16x2 $0, t, $3, z;
    prmt.b32 t, low, high, 0x7362; fma.rn.bf16x2 t, t, c, z; fma.rn.bf16x2 $1, t, $4, z; }""")


@triton.jit
def values_of(codes):
    """The values of E4M3 codes (bytes) in FP32: exact, NaN for both NaN codes.

    As FP16, a code's bits are 2**-8 of its value: both formats have their exponents above the significand, FP16's bias
    is 15 and E4M3's 7, and denormals match, too.
    """
    bits = codes.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == _NAN, float("nan"), value)


@triton.jit
def scaled_values(codes, unit):
    """The values of E4M3 codes (bytes) times BF16 powers of two of their shape, in BF16: exact where BF16 has the
    product. Both NaN codes count as 480 (the quantizer writes them where the power is NaN or infinite, too).

    "Not pure", as in `held`.
    """
    if ON_GPU:
        return tl.inline_asm_elementwise(_SCALED, "=&r,=&r,r,r,r", [codes, unit], tl.bfloat16, False, 4)
    else:
        return (values_of(codes) * unit.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def rounded_codes(x):
    """E4M3 codes (bytes) of FP32 `x`, rounded half to even; beyond 448 the largest code, NaN for NaN.

    Normal codes: the significand is rounded to three bits in place. Below 2**-6 codes are multiples of 2**-9, which is
    what FP32 numbers around 2**14 differ by.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0x3C800000, small, tl.minimum(normal - 960, 0x7E))
    code = tl.where(size > 0x7F800000, _NAN, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def codes_of(x):
    """`rounded_codes` by the conversion where there is one. It saturates."""
    if E4M3:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return rounded_codes(x)


@triton.jit
def held(x):
    """BF16 `x` as it is. Behind an instruction that is "not pure", Triton does not look for the load that it came from.

    From a load of 8 bits it makes an operand that holds four neighbours of the sum per thread, which the tensor core
    would multiply in another order than an operand that was loaded in BF16. Other instructions read shared memory.
    """
    if OLD_MMA:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.bfloat16, False, 2)
    else:
        return x
