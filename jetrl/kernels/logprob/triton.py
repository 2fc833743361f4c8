"""Log-probabilities, entropy and sampling over the vocabulary as Triton kernels, bit-equal to `reference`.

A row of logits is cut into segments of 4096. Softmax numerators are the integers `round(exp(z - max) * 2**35)`, whose
sums are exact in float64 (below 2**53) in any order, so neither the segments nor their number can change a bit. A row
needs three launches: maxima of the segments, sums of the segments, and a last one that reads the sum of each segment.

Legend: `T` rows, `V` vocabulary, `S` segments.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.pointwise.triton import exp32

SEGMENT = 4096
_TWO23 = tl.constexpr(8388608.0)


@triton.jit
def numerators(z, top):
    """`round(exp(z - top) * 2**35)` in float64; `z` FP32 <= top. FP32 values from 2**23 on are integers already."""
    v = exp32(z - top) * 34359738368.0
    return tl.where(v < _TWO23, (v + _TWO23) - _TWO23, v).to(tl.float64)


@triton.jit
def log64(x):
    """`exact.log` of positive normal float64."""
    bits = x.to(tl.int64, bitcast=True)
    e = ((bits + (1 << 51)) >> 52) - 1023
    m = (bits - (e << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = z * (1.0 / 23)
    p = (p + 1.0 / 21) * z
    p = (p + 1.0 / 19) * z
    p = (p + 1.0 / 17) * z
    p = (p + 1.0 / 15) * z
    p = (p + 1.0 / 13) * z
    p = (p + 1.0 / 11) * z
    p = (p + 1.0 / 9) * z
    p = (p + 1.0 / 7) * z
    p = (p + 1.0 / 5) * z
    p = (p + 1.0 / 3) * z
    return e.to(tl.float64) * 0.6931471805599453 + (p * s + s) * 2.0


@triton.jit
def load_scaled(logits, temperature, row, cols, V, stride):
    """A row's logits divided by its temperature, -inf beyond the vocabulary."""
    z = tl.load(logits + row * stride + cols, mask=cols < V, other=float("-inf"))
    t = tl.load(temperature + row)
    if t != 1.0:
        z = tl.div_rn(z, t + tl.zeros_like(z))
    return z


@triton.jit
def row_max(maxima, row, S, SB: tl.constexpr):
    """The largest of a row's segment maxima; NaN if one is."""
    at = tl.arange(0, SB)
    m = tl.load(maxima + row * S + at, mask=at < S, other=float("-inf"))
    nan = tl.max((m != m).to(tl.int32), axis=0)
    top = tl.max(m, axis=0)
    return tl.where(nan > 0, float("nan"), top)


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def _max_kernel(logits, temperature, maxima, V, stride, B: tl.constexpr):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    z = load_scaled(logits, temperature, row, segment * B + tl.arange(0, B), V, stride)
    nan = tl.max((z != z).to(tl.int32), axis=0)
    top = tl.where(nan > 0, float("nan"), tl.max(z, axis=0))
    tl.store(maxima + row * tl.num_programs(1) + segment, top)


@triton.jit(do_not_specialize_on_alignment=["temperature", "maxima", "sums", "moments"])
def _sum_kernel(
    logits, temperature, maxima, sums, moments, weights, V, stride, B: tl.constexpr, SB: tl.constexpr,
    MOMENT: tl.constexpr, STORE: tl.constexpr,
):
    """Sums of numerators and, for the entropy, of numerator * (z - max); STORE writes the numerators too."""
    row, segment, S = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    cols = segment * B + tl.arange(0, B)
    z = load_scaled(logits, temperature, row, cols, V, stride)
    top = row_max(maxima, row, S, SB)
    w = tl.where(cols < V, numerators(z, top), 0.0)
    tl.store(sums + row * S + segment, tl.sum(w, axis=0))
    if MOMENT:
        tl.store(moments + row * S + segment, tl.sum(tl.where(w > 0, w * (z - top).to(tl.float64), 0.0), axis=0))
    if STORE:
        tl.store(weights + row * V + cols, w, mask=cols < V)


_BY_ROW = ["temperature", "targets", "logprobs", "entropies", "tops", "log_totals"]  # one element a program


@triton.jit(do_not_specialize_on_alignment=[*_BY_ROW, "sums", "moments"])
def _finish_kernel(
    logits, temperature, maxima, sums, moments, targets, logprobs, entropies, tops, log_totals, V, stride, S,
    SB: tl.constexpr, MOMENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SB)
    top = row_max(maxima, row, S, SB)
    total = tl.sum(tl.load(sums + row * S + at, mask=at < S, other=0.0), axis=0)
    log_total = log64(total * 0.000000000029103830456733704)  # 2**-35
    target = tl.load(targets + row)
    z = tl.load(logits + row * stride + target)
    t = tl.load(temperature + row)
    if t != 1.0:
        z = tl.div_rn(z, t)
    tl.store(logprobs + row, ((z.to(tl.float64) - top.to(tl.float64)) - log_total).to(tl.float32))
    if MOMENT:
        moment = tl.sum(tl.load(moments + row * S + at, mask=at < S, other=0.0), axis=0)
        tl.store(entropies + row, (log_total - moment / total).to(tl.float32))
        tl.store(tops + row, top)
        tl.store(log_totals + row, log_total.to(tl.float32))


@triton.jit
def mix64(x):
    """One step of SplitMix64, as in `engine.sampler`."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize_on_alignment=["temperature", "keys", "positions", "greedy", "tokens", "logprobs"])
def _sample_kernel(
    logits, temperature, maxima, sums, keys, positions, greedy, tokens, logprobs, V, stride, S,
    B: tl.constexpr, SB: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SB)
    part = tl.load(sums + row * S + at, mask=at < S, other=0.0)
    maximum = tl.load(maxima + row * S + at, mask=at < S, other=float("-inf"))
    top = row_max(maxima, row, S, SB)
    total = tl.sum(part, axis=0)
    # floor(total * u / 2**53) by halves of 27 bits, u the 53 high bits of the hash of (key, position)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True) + tl.load(positions + row).to(tl.uint64, bitcast=True)
    u = (mix64(mix64(key)) >> 11).to(tl.int64)
    t = total.to(tl.int64)
    low = (1 << 27) - 1
    th, tlow, uh, ulow = t >> 27, t & low, u >> 27, u & low
    threshold = (2 * (th * uh) + ((th * ulow + tlow * uh + ((tlow * ulow) >> 27)) >> 26)).to(tl.float64)
    upto = tl.cumsum(part, axis=0)
    take_first = tl.load(greedy + row) != 0
    drawn = tl.sum(((upto <= threshold) & (at < S)).to(tl.int32), axis=0)
    best = tl.min(tl.where(maximum == top, at, S - 1), axis=0)
    segment = tl.where(take_first, best, tl.minimum(drawn, S - 1))
    before = tl.sum(tl.where(at < segment, part, 0.0), axis=0)
    cols = segment * B + tl.arange(0, B)
    z = load_scaled(logits, temperature, row, cols, V, stride)
    w = tl.where(cols < V, numerators(z, top), 0.0)
    inside = tl.sum(((tl.cumsum(w, axis=0) + before <= threshold) & (cols < V)).to(tl.int32), axis=0)
    first = tl.min(tl.where((z == top) & (cols < V), tl.arange(0, B), B - 1), axis=0)
    token = tl.minimum(segment * B + tl.where(take_first, first, inside), V - 1)
    chosen = tl.load(logits + row * stride + token)
    temp = tl.load(temperature + row)
    if temp != 1.0:
        chosen = tl.div_rn(chosen, temp)
    log_total = log64(total * 0.000000000029103830456733704)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, ((chosen.to(tl.float64) - top.to(tl.float64)) - log_total).to(tl.float32))


@triton.jit(do_not_specialize_on_alignment=[*_BY_ROW[:2], *_BY_ROW[3:], "grad_logprob", "grad_entropy"])
def _dlogits_kernel(
    logits, temperature, entropies, tops, log_totals, targets, grad_logprob, grad_entropy, out, V, stride, out_stride,
    B: tl.constexpr, ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * B + tl.arange(0, B)
    z = load_scaled(logits, temperature, row, cols, V, stride)
    log_p = (z - tl.load(tops + row)) - tl.load(log_totals + row)
    p = tl.exp(log_p)
    g = tl.load(grad_logprob + row)
    dz = tl.where(cols == tl.load(targets + row), g, 0.0) - g * p
    if ENTROPY:
        dz -= tl.where(p > 0, p * (log_p + tl.load(entropies + row)), 0.0) * tl.load(grad_entropy + row)
    dz = dz / tl.load(temperature + row)
    tl.store(out + row * out_stride + cols, dz.to(tl.bfloat16), mask=cols < V)


@triton.jit(do_not_specialize_on_alignment=["temperature", "tops", "log_totals", "targets"])
def _residual_kernel(logits, temperature, tops, log_totals, targets, out, V, stride, out_stride, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * B + tl.arange(0, B)
    z = load_scaled(logits, temperature, row, cols, V, stride)
    p = tl.exp((z - tl.load(tops + row)) - tl.load(log_totals + row))
    r = tl.where(cols == tl.load(targets + row), p - 1.0, p)
    tl.store(out + row * out_stride + cols, r.to(tl.bfloat16), mask=cols < V)


class RowStatistics:
    """Maxima, sums and (with `moment`) entropy sums of the segments of `logits` [T, V] at `temperature` [T], FP32."""

    def __init__(self, logits: Tensor, temperature: Tensor, moment: bool, store: bool = False) -> None:
        assert logits.dtype == torch.float32 and logits.stride(1) == 1 and temperature.is_contiguous()
        if logits.shape[1] > 1 << 18:
            raise ValueError(f"a vocabulary of {logits.shape[1]} is beyond 2**18")
        self.logits, self.temperature = logits, temperature
        rows, self.vocab = logits.shape
        self.segments = triton.cdiv(self.vocab, SEGMENT)
        self.block = triton.next_power_of_2(self.segments)
        shape = (rows, self.segments)
        self.maxima = torch.empty(shape, dtype=torch.float32, device=logits.device)
        self.sums, self.moments = torch.empty((2, *shape), dtype=torch.float64, device=logits.device)
        size = (rows, self.vocab) if store else (1, 1)
        self.weights = torch.empty(size, dtype=torch.float64, device=logits.device)
        if rows:
            _max_kernel[shape](
                logits, temperature, self.maxima, self.vocab, logits.stride(0), B=SEGMENT, num_warps=8,
                enable_fp_fusion=False,
            )
            _sum_kernel[shape](
                logits, temperature, self.maxima, self.sums, self.moments, self.weights, self.vocab, logits.stride(0),
                B=SEGMENT, SB=self.block, MOMENT=moment, STORE=store, num_warps=8, enable_fp_fusion=False,
            )

    def finish(self, targets: Tensor, moment: bool) -> Tensor:
        """FP32 [4, T]: log-probs of `targets`, then (only with `moment`) entropies, maxima and logs of the totals."""
        assert targets.is_contiguous()
        rows = self.logits.shape[0]
        out = torch.empty(4, rows, dtype=torch.float32, device=self.logits.device)
        if rows:
            _finish_kernel[(rows,)](
                self.logits, self.temperature, self.maxima, self.sums, self.moments, targets, *out, self.vocab,
                self.logits.stride(0), self.segments, SB=self.block, MOMENT=moment, num_warps=1,
                enable_fp_fusion=False,
            )
        return out


def ones(logits: Tensor) -> Tensor:
    return torch.ones(logits.shape[0], dtype=torch.float32, device=logits.device)


def exp_weights(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.exp_weights`: numerators [T, V] float64, maximum [T] FP32, total [T] float64."""
    stats = RowStatistics(logits, ones(logits), moment=False, store=True)
    return stats.weights, logits.amax(-1), stats.sums.sum(-1)


def logprobs(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """Log-prob of `targets` [T] under softmax(logits / temperature), FP32 [T]; `temperature` FP32 [T]."""
    return RowStatistics(logits, temperature, moment=False).finish(targets, moment=False)[0]


def logprobs_and_statistics(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """FP32 [4, T]: log-probs as above, then what `dlogits` reads: entropies in nats, maxima, logs of the totals."""
    return RowStatistics(logits, temperature, moment=True).finish(targets, moment=True)


def sample(
    logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row without filters, the same draws as `engine.sampler.sample_rows`.

    `logits` [B, V] FP32; `temperature` FP32 [B], 0 for the first maximum; `keys` int64 [B], the bits of the stream's
    uint64 key; `positions` int64 [B]. Returns tokens int64 [B], log-probs FP32 [B], and the maxima FP32 [B], which are
    not finite where the logits are broken (the caller checks). The host never waits, so a CUDA graph may capture it.
    """
    assert keys.is_contiguous() and positions.is_contiguous()
    greedy = temperature == 0
    temperature = torch.where(greedy, 1.0, temperature)
    stats = RowStatistics(logits, temperature, moment=False)
    rows = logits.shape[0]
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _sample_kernel[(rows,)](
            logits, temperature, stats.maxima, stats.sums, keys, positions, greedy.to(torch.int32), tokens, out,
            stats.vocab, logits.stride(0), stats.segments, B=SEGMENT, SB=stats.block, num_warps=8,
            enable_fp_fusion=False,
        )
    return tokens, out, stats.maxima.amax(-1)


def residual(logits: Tensor, targets: Tensor, temperature: Tensor, statistics: Tensor, out: Tensor) -> None:
    """`out` [T, V] BF16 = `rounded(p - onehot)`, p the softmax of logits / temperature; `statistics` as for `dlogits`.
    """
    assert logits.stride(1) == out.stride(1) == 1 and targets.is_contiguous() and temperature.is_contiguous()
    assert statistics.shape == (3, logits.shape[0]) and statistics.stride(1) == 1 and out.shape == logits.shape
    rows, vocab = logits.shape
    if rows:
        _residual_kernel[(rows, triton.cdiv(vocab, SEGMENT))](
            logits, temperature, statistics[1], statistics[2], targets, out, vocab, logits.stride(0), out.stride(0),
            B=SEGMENT, num_warps=8, enable_fp_fusion=False,
        )


def dlogits(
    logits: Tensor, targets: Tensor, temperature: Tensor, statistics: Tensor, grad_logprob: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Gradient of the logits before division by the temperature, BF16 [T, V] (rows a multiple of 8 elements apart).

    `statistics` [3, T]: entropies, maxima and logs of the totals of these rows, as the forward pass had them.
    """
    assert grad_logprob.is_contiguous() and (grad_entropy is None or grad_entropy.is_contiguous())
    assert logits.stride(1) == 1 and targets.is_contiguous() and temperature.is_contiguous()
    assert statistics.shape == (3, logits.shape[0]) and statistics.stride(1) == 1
    rows, vocab = logits.shape
    width = triton.cdiv(vocab, 8) * 8
    out = torch.zeros if width != vocab else torch.empty
    dz = out(rows, width, dtype=torch.bfloat16, device=logits.device)
    _dlogits_kernel[(rows, triton.cdiv(vocab, SEGMENT))](
        logits, temperature, *statistics, targets, grad_logprob,
        grad_logprob if grad_entropy is None else grad_entropy, dz, vocab, logits.stride(0), width,
        B=SEGMENT, ENTROPY=grad_entropy is not None, num_warps=8, enable_fp_fusion=False,
    )
    return dz[:, :vocab]
