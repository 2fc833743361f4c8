"""Adapters of gate and up, and SwiGLU, in one Triton kernel: the bits of `_expand_kernel`, then `_swiglu_kernel`.

So the sum of the base and its adapters [T, 2F] is neither written nor read again, and one launch fewer is made. Where
the next linear reads codes, they are made here, as there.

Legend: `T` tokens, `F` feed-forward. FP fusion is off, as in `adapters/triton.py`.
`tests/kernels/triton_adapter_cases.py` runs it in the interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.adapters.ops import Begun, Places
from jetrl.kernels.adapters.triton import fetch_rows, left_of, multiplied, right_of, unrolled
from jetrl.kernels.launch import LAUNCH, begin
from jetrl.kernels.pointwise.triton import sigmoid32
from jetrl.kernels.qtensor import Coded, QTensor
from jetrl.kernels.quantize.triton import _FLOOR_BITS, abs_bits, new_codes, new_scale, quotient, scale_from, to_bf16
from jetrl.precision.formats import BLOCK


@triton.jit(do_not_specialize=["m", "units_stride"])
def _finish_swiglu_kernel(
    y, u, b, out, codes, units, scale, m, y_stride, u_stride, codes_stride, units_stride, written, F: tl.constexpr,
    T: tl.constexpr, N: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, CHAINS: tl.constexpr, UNROLL: tl.constexpr,
    GATE: tl.constexpr, UP: tl.constexpr, KEEP: tl.constexpr, QUANT: tl.constexpr, FLOOR: tl.constexpr,
    POW2: tl.constexpr, PDL: tl.constexpr,
):
    """T tokens by N columns of gate and of up. GATE, UP: whether it has an adapter; gate's come first in `u` and `b`.
    KEEP: BF16 to `out` [m, F]. QUANT: `codes`, and for each 128 columns a scale in `units`."""
    col = tl.program_id(0) * N + tl.arange(0, N)
    FIRST: tl.constexpr = F if GATE else 0  # row of b with up's first
    if PDL and CHAINS and tl.program_id(1) == 0:
        if GATE:
            fetch_rows(b, col, F - 1, RANK)
        if UP:
            fetch_rows(b, FIRST + col, FIRST + F - 1, RANK)
    begin(PDL)
    token = (tl.program_id(1) * T + tl.arange(0, T)).to(tl.int64)
    alive, real = (token < m)[:, None], (col < F)[None, :]
    mask = alive & real
    at = y + token[:, None] * y_stride + col[None, :]
    gate = tl.load(at, mask=mask, other=0.0)
    up = tl.load(at + F, mask=mask, other=0.0)
    of_gate, of_up = tl.zeros((T, N), tl.float32), tl.zeros((T, N), tl.float32)
    for r in tl.static_range(0, RANK, R):
        if GATE:
            right = right_of(b, col, real, r, R, RANK)
        if UP:
            right_up = right_of(b, FIRST + col, real, r, R, RANK)
        if GATE:
            left = left_of(u, token, alive, 0, m, u_stride, r, R, RANK, CHAINS, UNROLL)
        if UP:
            left_up = left_of(u, token, alive, RANK if GATE else 0, m, u_stride, r, R, RANK, CHAINS, UNROLL)
            of_up = multiplied(left_up, right_up, of_up, CHAINS)
        if GATE:
            of_gate = multiplied(left, right, of_gate, CHAINS)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if GATE:
        gate = (gate + of_gate * scale).to(tl.bfloat16).to(tl.float32)
    if UP:
        up = (up + of_up * scale).to(tl.bfloat16).to(tl.float32)
    v = gate * sigmoid32(gate) * up
    if KEEP:
        tl.store(out + token[:, None] * F + col[None, :], v.to(tl.bfloat16), mask=mask)
    if QUANT:
        groups = tl.reshape(tl.where(mask, to_bf16(v), 0.0), (T, N // 128, 128))
        s = scale_from(tl.max(abs_bits(groups), axis=2), FLOOR, POW2)
        q = tl.reshape(quotient(groups, s[:, :, None], True).to(tl.float8e4nv).to(tl.uint8, bitcast=True), (T, N))
        write = alive & (col < written)[None, :]
        tl.store(codes + token[:, None] * codes_stride + col[None, :], q, mask=write)
        group = tl.program_id(0) * (N // 128) + tl.arange(0, N // 128)
        to = units + group[None, :].to(tl.int64) * units_stride + token[:, None]
        tl.store(to, s, mask=alive & (group * 128 < F)[None, :])


def adapter_finish_swiglu(
    y: Tensor, begun: Begun, b: Tensor, scale: float, places: Places, pow2: bool | None, keep: bool
) -> Tensor | QTensor | Coded:
    """`reference.adapter_finish_swiglu`."""
    (m, width), rank, u = y.shape, b.shape[1], begun.left
    f = width // 2
    assert y.dtype == b.dtype == torch.bfloat16 and y.stride(1) == 1 and b.is_contiguous() and u.is_contiguous()
    columns = [start for (start, _), _ in places]
    assert columns and all(stop - start == f and start in (0, f) for (start, stop), _ in places)
    out = torch.empty(m, f, dtype=y.dtype, device=y.device) if keep else y
    codes = units = y
    if pow2 is not None:
        codes, units = new_codes(m, f, y.device), new_scale(m, triton.cdiv(f, BLOCK), y.device)
    few, chains = m <= 64, len(u) if u.ndim == 3 else 0
    t, n = (16, 128) if few else (32, 256)
    if m:
        _finish_swiglu_kernel[(triton.cdiv(f, n), triton.cdiv(m, t))](
            y, u, b, out, codes.view(torch.uint8) if pow2 is not None else codes, units, scale, m, y.stride(0),
            u.shape[-1], codes.stride(0), units.stride(1), codes.stride(0), F=f, T=t, N=n,
            R=min(128, max(16, triton.next_power_of_2(rank))), RANK=rank, CHAINS=chains,
            UNROLL=unrolled(chains, 24 if few else 12), GATE=0 in columns, UP=f in columns, KEEP=keep,
            QUANT=pow2 is not None, FLOOR=_FLOOR_BITS, POW2=bool(pow2), num_warps=4 if few else 8,
            enable_fp_fusion=False, **LAUNCH,
        )
    if pow2 is None:
        return out
    quantized = QTensor(codes, units, "1x128", (m,), (f,))
    return Coded(out, quantized) if keep else quantized
