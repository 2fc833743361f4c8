"""E4M3 codes on any GPU: conversions by the instructions of sm_89 and later, and without them. Both give the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl

from jetrl.kernels.launch import E4M3, OLD_MMA

_NAN = tl.constexpr(0x7F)


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
