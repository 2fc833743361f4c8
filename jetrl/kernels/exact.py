"""Arithmetic whose bits depend on nothing but the values: not on shapes, thread counts, the BLAS or the machine.

The whole reference backend rests on two tricks:

* **Aligned dot products.** `align` writes every row as integers times one power of two. Products and sums of these
  stay below 2**53, so float64 holds each partial sum exactly and any order of summation gives the same bits. A float64
  matrix product by any library then *is* the exact result, whatever its blocking. A GEMM operand keeps 21 bits below
  the row's largest value (BF16 has 8), so the alignment loses at most 2**-21 of the row maximum.
* **Functions from IEEE basics.** `exp` and `log` use only +, -, *, / and bit operations, one tensor operation each,
  which IEEE 754 fixes to the last bit (vector or scalar, tail or body); library versions differ between lanes and CPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

GEMM_BITS = 21  # |integer| <= 2**21: 2048 products of two such stay within 2**53
CHUNK_K = 2048
_LOG2E = 1.44269504088896340736
_LN2_HI = 0.693359375  # 10 bits, so that n * _LN2_HI is exact in FP32
_LN2_LO = -2.12194440e-4
_EXP_POLY = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_BLOCK = 1 << 16  # elements processed at once: the temporaries stay in the L2 cache


def power_of_two(exponent: Tensor) -> Tensor:
    """`2.0 ** exponent` (float64, exact) for an integer tensor with values in [-1022, 1023]."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def exponent_of(x: Tensor) -> Tensor:
    """Unbiased exponent field of `x` as FP32: floor(log2|x|) for normal numbers, -127 for zero and denormals."""
    return ((x.to(torch.float32).contiguous().view(torch.int32) >> 23) & 0xFF) - 127


def align(x: Tensor, bits: int = GEMM_BITS) -> tuple[Tensor, Tensor]:
    """Write each row (last dimension) as integers times a power of two.

    `x` [..., K] -> `(m, unit)`: `m` [..., K] float64 integers, |m| <= 2**bits, `unit` [..., 1] float64 power of two,
    with `m * unit = x` rounded (half to even) to multiples of `unit = 2**(floor(log2 max|x|) + 1 - bits)`.
    """
    exponent = exponent_of(x.abs().amax(-1, keepdim=True)) + (1 - bits)
    m = x.to(torch.float64)
    if m.data_ptr() == x.data_ptr():
        m = m.clone()
    return m.mul_(power_of_two(-exponent)).round_(), power_of_two(exponent)


def matmul_nt(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.mT` of aligned integers (float64 [..., M, K] and [..., N, K]).

    Exact for K <= 2048; beyond, exact chunks of 2048 are added in order of K, each addition rounded to float64.
    """
    k = a.shape[-1]
    if k <= CHUNK_K:
        return a @ b.mT
    out = a[..., :CHUNK_K] @ b[..., :CHUNK_K].mT
    for start in range(CHUNK_K, k, CHUNK_K):
        out += a[..., start : start + CHUNK_K] @ b[..., start : start + CHUNK_K].mT
    return out


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum over the last dimension of `x**2`, float64 [..., 1]; exact for rows aligned to 20 bits up to 8192 long."""
    m, unit = align(x, bits=20)
    return m.square_().sum(-1, keepdim=True).mul_(unit * unit)


def exp(x: Tensor) -> Tensor:
    """`e**x` in FP32 (error below 2 ulp), the same bits for a value at any place. Clamps inputs to [-87, 88].

    Method (Cephes `expf`): n = rint(x * log2 e); r = (x - n*ln2_hi) - n*ln2_lo; e**x = 2**n * (1 + r + r**2 * P(r));
    every operation is rounded to FP32 separately (no fused multiply-add). `exp(0) == 1` exactly.
    """
    x = x.to(torch.float32).contiguous()
    flat, out = x.view(-1), torch.empty_like(x)
    flat_out = out.view(-1)
    for start in range(0, flat.numel(), _EXP_BLOCK):
        v = flat[start : start + _EXP_BLOCK].clamp(-87.0, 88.0)
        n = (v * _LOG2E).round_()
        r = v.sub_(n * _LN2_HI).sub_(n * _LN2_LO)
        p = r * _EXP_POLY[0]
        for c in _EXP_POLY[1:-1]:
            p.add_(c).mul_(r)
        p.add_(_EXP_POLY[-1]).mul_(r * r).add_(r).add_(1.0)
        scale = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
        torch.mul(p, scale, out=flat_out[start : start + _EXP_BLOCK])
    return out


def log(x: Tensor) -> Tensor:
    """Natural logarithm in float64 of positive normal `x`, from IEEE basics (relative error below 1e-15).

    x = m * 2**e with m in [0.75, 1.5); s = (m - 1) / (m + 1); log x = e * ln 2 + 2 * (s + s**3/3 + ... + s**23/23).
    """
    bits = x.to(torch.float64).contiguous().view(torch.int64)
    # adding the difference of 2.0 and 1.5 in the fraction carries into the exponent exactly for m >= 1.5
    shifted = bits + (1 << 51)
    e = (shifted >> 52) - 1023
    m = (bits - (e << 52)).view(torch.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = z * (1.0 / 23)
    for k in range(21, 1, -2):
        p = (p + 1.0 / k) * z
    return e.to(torch.float64) * 0.6931471805599453 + (p * s + s) * 2.0
