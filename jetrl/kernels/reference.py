"""The definition of every op, and the CPU backend: plain tensor operations, exact by `kernels.exact`.

Every fast kernel is bit-equal to this file where it says so. Legend: `T` tokens, `D` model, `N` query heads, `G`
key/value heads, `H` head size, `F` feed-forward, `V` vocabulary; in GEMMs `M, N, K`. "Rounded" means half to even to
the dtype of the op's input (BF16 in a real run; FP32 in checks against other programs). No operation is fused.
Attention has its own file, `attention/reference.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from jetrl.kernels import exact
from jetrl.kernels.qtensor import QTensor, blocks_of
from jetrl.kernels.update.adamw import AdamWStep
from jetrl.precision.formats import AMAX_FLOOR, BLOCK, E4M3_MAX

_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64).numpy()
PROB_BITS = 35  # grid of exp(z - max) in `exp_weights`


# ---- quantization ---------------------------------------------------------------------------------------------------


def scale_of(amax: Tensor, pow2: bool) -> Tensor:
    """`scale = max(amax, 1e-12) / 448` (one FP32 division); `pow2`: the next power of two at or above it.

    NaN in a block gives a NaN scale; infinity an infinite one.
    """
    scale = amax.to(torch.float32).clamp_min(AMAX_FLOOR) / E4M3_MAX
    if pow2:
        rounded = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, rounded)  # the integer sum would wrap a NaN round to zero
    return scale


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """`code = e4m3(clamp(x / scale, -448, 448))`: one FP32 division, then rounding half to even."""
    return (x.to(torch.float32) / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode(codes: Tensor) -> Tensor:
    """The values of E4M3 codes in float64 (exact; a table look-up, faster than torch's conversion)."""
    values = np.take(_E4M3_VALUES, codes.contiguous().view(torch.uint8).numpy())
    return torch.from_numpy(values)


def _pad_blocks(x: Tensor, sections: tuple[int, ...]) -> Tensor:
    """[R, C] -> [R, blocks, 128]: the columns cut into blocks, short ones filled with zeros."""
    if len(sections) == 1 and x.shape[1] % BLOCK == 0:
        return x.view(x.shape[0], -1, BLOCK)
    blocks = blocks_of(sections)
    padded = x.new_zeros(x.shape[0], len(blocks), BLOCK)
    start = block = 0
    for size in sections:
        whole, rest = divmod(size, BLOCK)
        if whole:
            padded[:, block : block + whole] = x[:, start : start + whole * BLOCK].reshape(x.shape[0], whole, BLOCK)
        if rest:
            padded[:, block + whole, :rest] = x[:, start + whole * BLOCK : start + size]
        start, block = start + size, block + whole + (rest > 0)
    return padded


def quantize_1x128(x: Tensor, pow2: bool = False, sections: tuple[int, ...] | None = None) -> QTensor:
    """One scale for each row and group of 128 columns (activations, output gradients). `x` [R, C] BF16 or FP32."""
    sections = sections or (x.shape[1],)
    padded = _pad_blocks(x, sections)
    scale = scale_of(padded.abs().amax(-1), pow2)  # [R, B]
    codes = encode(padded, scale[..., None])
    if len(sections) == 1:
        codes = codes.view(x.shape[0], -1)[:, : x.shape[1]].contiguous()
    else:
        codes = torch.cat([codes[:, i, : b - a] for i, (a, b) in enumerate(blocks_of(sections))], dim=1)
    return QTensor(codes, scale, "1x128", (x.shape[0],), sections)


def quantize_128x1(x: Tensor, pow2: bool = False) -> QTensor:
    """One scale for each column and group of 128 rows (tokens): the orientation of wgrad, returned transposed.

    `x` [T, C] -> QTensor of `x.T` [C, T] with granularity 1x128.
    """
    return quantize_1x128(x.T.contiguous(), pow2)


def quantize_128x128(w: Tensor, pow2: bool = False, sections: tuple[int, ...] | None = None) -> QTensor:
    """One scale for each block of 128x128 (weights). `w` [N, K] BF16; blocks of rows restart at every section."""
    sections = sections or (w.shape[0],)
    padded = _pad_blocks(w, (w.shape[1],))  # [N, KB, 128]
    row_amax = padded.abs().amax(-1)  # [N, KB]
    blocks = blocks_of(sections)
    scale = scale_of(torch.stack([row_amax[a:b].amax(0) for a, b in blocks]), pow2)  # [NB, KB]
    rows = scale.repeat_interleave(torch.tensor([b - a for a, b in blocks]), dim=0)  # [N, KB]
    codes = encode(padded, rows[..., None]).view(w.shape[0], -1)[:, : w.shape[1]].contiguous()
    return QTensor(codes, scale, "128x128", sections, (w.shape[1],))


def swiglu_backward_act(grad: Tensor, gate_up: Tensor | QTensor, pow2_t: bool) -> tuple[Tensor, QTensor]:
    """`swiglu_backward(grad, gate_up)` [T, 2F], and SwiGLU's output again in tiles [F, T], for down's wgrad.

    The second is `quantize_128x128(swiglu(gate_up).T, pow2_t)`. A quantized `gate_up` is read as
    `rounded(code * scale)`.
    """
    if isinstance(gate_up, QTensor):
        gate_up = dequantize(gate_up).to(grad.dtype)
    return swiglu_backward(grad, gate_up), quantize_128x128(swiglu(gate_up).T.contiguous(), pow2_t)


def wgrad(dy_t: QTensor, x_t: QTensor) -> Tensor:
    """`fp8_gemm` of `dy_t` [N, T] (1x128) and `x_t` [K, T] -> FP32 [N, K]; by tiles of x it is rounded to BF16."""
    dw = fp8_gemm(dy_t, x_t)
    return dw if x_t.granularity == "1x128" else dw.to(torch.bfloat16).to(torch.float32)


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """One power-of-two scale for each head vector (the FP8 KV cache). `x` [..., H] -> codes [..., H], scales [...].

    The scales are BF16, which holds every power of two that an FP32 one can be (zero and denormals do not occur).
    """
    scale = scale_of(x.abs().amax(-1), pow2=True)
    return encode(x, scale[..., None]), scale.to(torch.bfloat16)


def dequantize_heads(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`code * scale` of `quantize_heads`, in `dtype`: exact in BF16, as a code has 4 significant bits.

    (An entry beyond 1.9375 * 2**127 rounds up to infinity. A head with NaN or infinity in it is all NaN.)
    """
    return (decode(codes).to(torch.float32) * scales.to(torch.float32)[..., None]).to(dtype)


def round_heads(x: Tensor) -> Tensor:
    """What the FP8 KV cache makes of `x` [..., H]: `quantize_heads` and back. Rounding again changes no value."""
    return dequantize_heads(*quantize_heads(x), x.dtype)


def row_scales(q: QTensor) -> Tensor:
    """One row of scales for each row of codes, [R, column groups]: those of 128x128 blocks are repeated."""
    if q.granularity == "1x128":
        return q.scale
    return q.scale.repeat_interleave(torch.tensor([b - a for a, b in q.row_blocks()]), dim=0)


def dequantize(q: QTensor) -> Tensor:
    """`code * scale` in FP32."""
    widths = torch.tensor([b - a for a, b in q.col_blocks()])
    return decode(q.codes).to(torch.float32) * row_scales(q).repeat_interleave(widths, dim=1)


def transpose(q: QTensor) -> QTensor:
    """The same 128x128-quantized matrix transposed (for dgrad): the same codes, the same blocks."""
    assert q.granularity == "128x128"
    return QTensor(q.codes.T.contiguous(), q.scale.T.contiguous(), "128x128", q.col_sections, q.row_sections)


# ---- GEMM -----------------------------------------------------------------------------------------------------------


class PreparedFP8:
    """A quantized GEMM operand decoded once to float64 (weights: kept from publish to publish)."""

    def __init__(self, q: QTensor) -> None:
        self.blocks = q.col_blocks()
        self.values = decode(q.codes)
        self.scale = row_scales(q).T.contiguous()  # [KB, N]


def fp8_gemm(a: QTensor, b: QTensor | PreparedFP8) -> Tensor:
    """`a @ b.T` for a [M, K] (1x128) and b [N, K] (128x128, or 1x128 for wgrad) -> FP32 [M, N].

    For each group g of K, in order: `acc = acc + (f32(sum_k a_code * b_code) * a_scale) * b_scale`. The inner
    sum is exact (43 bits of E4M3 products fit float64); its rounding to FP32, both products and the addition are FP32
    operations.
    """
    b = b if isinstance(b, PreparedFP8) else PreparedFP8(b)
    assert a.col_blocks() == b.blocks, "operands must be quantized in the same groups along K"
    values = decode(a.codes)
    acc: Tensor | None = None
    for g, (start, stop) in enumerate(b.blocks):
        part = (values[:, start:stop] @ b.values[:, start:stop].T).to(torch.float32)
        part.mul_(a.scale[:, g : g + 1]).mul_(b.scale[g])
        acc = part if acc is None else acc.add_(part)
    assert acc is not None
    return acc


class PreparedBF16:
    """A BF16 GEMM operand [N, K] as aligned integers (weights: kept from publish to publish)."""

    def __init__(self, w: Tensor) -> None:
        self.values, self.unit = exact.align(w)


def bf16_gemm(x: Tensor, w: Tensor | PreparedBF16) -> Tensor:
    """`x @ w.T` for x [M, K] and w [N, K] (BF16 or FP32) -> FP32 [M, N]: exact sums, rounded once."""
    w = w if isinstance(w, PreparedBF16) else PreparedBF16(w)
    m, unit = exact.align(x)
    return exact.matmul_nt(m, w.values).mul_(unit).mul_(w.unit.T).to(torch.float32)


# ---- pointwise ------------------------------------------------------------------------------------------------------


def inv_rms(x: Tensor, eps: float) -> Tensor:
    """`1 / sqrt(mean(x**2) + eps)` over the last dimension, [..., 1]: sum exact, the rest float64, rounded to FP32."""
    return (1.0 / (exact.sum_of_squares(x) / x.shape[-1] + eps).sqrt()).to(torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rounded(weight * rounded(x * inv_rms(x)))` over the last dimension, in FP32. `x` [..., D], `weight` [D]."""
    normed = (x.to(torch.float32) * inv_rms(x, eps)).to(x.dtype)
    return (normed.to(torch.float32) * weight.to(torch.float32)).to(x.dtype)


def add(x: Tensor, y: Tensor) -> Tensor:
    """The residual sum (and a bias): FP32 addition, rounded."""
    return (x.to(torch.float32) + y.to(torch.float32)).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half RoPE: `(x1*cos - x2*sin, x2*cos + x1*sin)`, in FP32, rounded. `x` [T, N, H], `cos` [T, H/2]."""
    x1, x2 = x.to(torch.float32).chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))` in FP32 with `exact.exp` (so x is clamped to [-88, 87])."""
    return 1.0 / (exact.exp(-x.to(torch.float32)) + 1.0)


def swiglu(gate_up: Tensor) -> Tensor:
    """`rounded((gate * sigmoid(gate)) * up)` with FP32 products. `gate_up` [T, 2F] (gate, then up) -> [T, F]."""
    gate, up = gate_up.chunk(2, -1)
    return (gate.to(torch.float32) * sigmoid(gate) * up.to(torch.float32)).to(gate_up.dtype)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of `swiglu` [T, 2F]: `dgate = (grad*up) * (sig * (1 + gate*(1-sig)))`, `dup = grad * (gate*sig)`."""
    gate, up = (t.to(torch.float32) for t in gate_up.chunk(2, -1))
    g, sig = grad.to(torch.float32), sigmoid(gate)
    return torch.cat(((g * up) * (sig * (gate * (1.0 - sig) + 1.0)), g * (gate * sig)), -1).to(gate_up.dtype)


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def exp_weights(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax numerators as integers. `logits` [T, V] FP32 -> `weights` [T, V] float64, `max` [T] FP32, `total` [T].

    `weights = round(exp(z - max) * 2**35)` are integers, so `total`, their sum, is exact in any order (V <= 2**18).
    """
    assert logits.shape[-1] <= 1 << 18, f"a vocabulary of {logits.shape[-1]} is beyond 2**18"
    top = logits.amax(-1)
    weights = exact.exp(logits - top[:, None]).to(torch.float64).mul_(float(1 << PROB_BITS)).round_()
    return weights, top, weights.sum(-1)


def log_total(total: Tensor) -> Tensor:
    """`log(total * 2**-35)` in float64: with `max`, the log-sum-exp of a row."""
    return exact.log(total * 2.0**-PROB_BITS)


def logprob(logits: Tensor, targets: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """`f32((z[target] - max) - log(total))`, float64 inside. `logits` [T, V], the rest [T] -> [T] FP32."""
    z = logits.gather(-1, targets[:, None])[:, 0].to(torch.float64)
    return (z - top.to(torch.float64) - log_total(total)).to(torch.float32)


def entropy(logits: Tensor, weights: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """Entropy of the softmax in nats, FP32 [T] (a metric and a bonus; backends may differ in its last bits)."""
    mean = (weights * (logits - top[:, None]).to(torch.float64)).sum(-1) / total
    return (log_total(total) - mean).to(torch.float32)


# ---- optimizer ------------------------------------------------------------------------------------------------------


def adamw_step_(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamWStep) -> None:
    """In place, each operation a separate FP32 operation, the three results rounded once on storing:

        g = rounded(grad * factor), to the gradient's type
        m = m + (g - m) * (1 - beta1)          v = v * beta2 + (g * g) * (1 - beta2)
        p = p * (1 - lr * weight_decay) + (m * (-lr / (1 - beta1^t))) / (sqrt(v / (1 - beta2^t)) + eps)
    """
    beta1, beta2 = numbers.betas
    g, m, v, p = (x.to(torch.float32) for x in (grad * numbers.factor, exp_avg, exp_avg_sq, param))
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + (g * g) * (1 - beta2)
    root = v / torch.tensor(1 - beta2**numbers.step, dtype=torch.float32)
    root = root.double().sqrt().to(torch.float32) + numbers.eps  # in float64: libraries' FP32 roots differ in a bit
    p = p * (1 - numbers.lr * numbers.weight_decay) + (m * (-numbers.lr / (1 - beta1**numbers.step))) / root
    for target, value in ((exp_avg, m), (exp_avg_sq, v), (param, p)):
        target.copy_(value)
