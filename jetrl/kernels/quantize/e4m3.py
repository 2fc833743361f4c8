"""E4M3 codes without the instructions that convert them, which GPUs before sm_89 lack: the same codes and values."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl

from jetrl.kernels.launch import ON_GPU


@triton.jit
def values_of(codes):
    """The values of E4M3 codes (bytes) in FP32: exact, NaN for both NaN codes.

    As FP16, a code's bits are 2**-8 of its value: both formats have their exponents above the significand, FP16's bias
    is 15 and E4M3's 7, and denormals match, too.
    """
    bits = codes.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def held(x):
    """BF16 `x` as it is. Behind an instruction that is "not pure", Triton does not look for the load that it came from.

    From a load of 8 bits it makes an operand that holds four neighbours of the sum per thread, which the tensor core
    would multiply in another order than an operand that was loaded in BF16.
    """
    if ON_GPU:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.bfloat16, False, 2)
    else:
        return x
