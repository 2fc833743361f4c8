"""The model: one definition, called by the trainer (packed sequences) and by the engine (paged cache) alike.

    x = embed(tokens)
    for each layer:  x = x + o(attention(rope(qk_norm(qkv(rms_norm(x))))));  x = x + down(swiglu(gate_up(rms_norm(x))))
    hidden = rms_norm(x);  logits = hidden @ lm_head.T

Legend: `T` packed tokens, `D` model, `N` query heads, `G` key/value heads, `H` head size, `F` feed-forward,
`V` vocabulary. Rounding points stand in `kernels/reference.py`; every activation between operators is rounded to
`dtype` (BF16).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from jetrl.kernels import gemm, logprob, pointwise
from jetrl.kernels.attention import attend, attend_cached, attend_cached_quantize
from jetrl.kernels.gradient import grad_dtype, grad_in_place
from jetrl.kernels.qtensor import QTensor
from jetrl.model.linear import FlowLinear, rounded_into
from jetrl.precision.formats import BF16, kv_head
from jetrl.precision.recipe import Recipe, Role
from jetrl.spec import ModelSpec, RopeSpec
from jetrl.types import ForwardBatch, PagedPlan, Side

Tap = Callable[[str, Tensor], None]


def _no_tap(name: str, value: Tensor) -> None:
    """The default tap looks at nothing."""


class _Embed(torch.autograd.Function):
    """Rows of the published table; the gradient is summed in FP32, in token order, into the master."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, master: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.master = master
        return table[tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        (tokens,), grad = ctx.saved_tensors, grad_in_place(ctx.master)
        if grad is None:
            dw = torch.zeros(ctx.master.shape, dtype=torch.float32, device=dy.device)
            dw.index_put_((tokens,), dy.to(torch.float32), accumulate=True)
            return None, dw.to(grad_dtype(ctx.master)), None
        # only rows in use are touched; `place` is one number for equal tokens (unique() would wait for the device)
        place = torch.searchsorted(tokens.sort().values, tokens)
        rows = torch.zeros(dy.shape, dtype=torch.float32, device=dy.device)
        rows.index_put_((place,), dy.to(torch.float32), accumulate=True)
        grad[tokens] = (grad[tokens].to(torch.float32) + rows[place]).to(grad.dtype)  # equal tokens write one value
        return None, None, None


class Published(nn.Module):
    """A vector or table whose forward value is the BF16-rounded copy of its master, refreshed by `publish`."""

    def __init__(self, shape: tuple[int, ...], master_dtype: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=master_dtype))
        self.dtype = dtype
        self.published: Tensor = torch.empty(0)

    @torch.no_grad()
    def publish(self) -> None:
        self.published = rounded_into(self.published, self.weight, self.dtype)


class Layer(nn.Module):
    """One decoder layer. The residual stream travels beside the last branch's output, added at the next norm."""

    def __init__(self, index: int, spec: ModelSpec, recipe: Recipe, master: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.index, self.spec, self.fp8_kv = index, spec, recipe.kv_cache.is_quantized
        d, h, f = spec.hidden_size, spec.head_dim, spec.intermediate_size

        def linear(role: Role, k: int, sections: tuple[int, ...], bias: bool = False) -> FlowLinear:
            sides: tuple[Side, Side] = ("train", "rollout")
            return FlowLinear(k, sections, bias, {s: recipe.linear(index, role, s) for s in sides}, master, dtype)

        self.attn_norm = Published((d,), master, dtype)
        self.qkv = linear("qkv", d, spec.qkv_sections, spec.qkv_bias)
        if spec.qk_norm:
            self.q_norm = Published((h,), master, dtype)
            self.k_norm = Published((h,), master, dtype)
        self.o = linear("o", spec.num_heads * h, (d,))
        self.mlp_norm = Published((d,), master, dtype)
        self.gate_up = linear("gate_up", d, spec.gate_up_sections)
        self.down = linear("down", f, (d,))

    def forward(
        self, x: Tensor, residual: Tensor | None, tables: tuple[Tensor, Tensor], batch: ForwardBatch, tap: Tap
    ) -> tuple[Tensor, Tensor]:
        """`x` [T, D] is the branch output not yet added to `residual` [T, D]; returns the same pair.

        `tables`: cos and sin, whole.
        """
        spec, at, side = self.spec, f"layers.{self.index}", batch.side
        y, residual = self._norm(self.attn_norm, x, residual)
        tap(f"{at}.attn_norm", y)
        qkv = self.qkv(y, side)
        tap(f"{at}.qkv", qkv)
        if tap is _no_tap:
            heads, masters, norms = (spec.num_heads, spec.num_kv_heads), None, None
            if spec.qk_norm:
                masters = (self.q_norm.weight, self.k_norm.weight)
                norms = (self.q_norm.published, self.k_norm.published)
            q, k, v = pointwise.norm_rope(
                qkv, heads, spec.head_dim, masters, norms, spec.rms_norm_eps, tables, batch.positions, self.fp8_kv
            )
        else:
            q, k, v = self._tapped_heads(qkv, tables, batch.positions, tap)
        a = attend(q, k, v, batch.plan, self.index, spec.head_dim**-0.5).flatten(1)
        tap(f"{at}.attention", a)
        y = self.o(a, side)
        tap(f"{at}.o", y)
        y, residual = self._norm(self.mlp_norm, y, residual)
        tap(f"{at}.mlp_norm", y)
        y = self.gate_up(y, side)
        tap(f"{at}.gate_up", y)
        y = pointwise.swiglu(y)
        tap(f"{at}.swiglu", y)
        y = self.down(y, side)
        tap(f"{at}.down", y)
        return y, residual

    def _tapped_heads(
        self, qkv: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor, tap: Tap
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`pointwise.norm_rope` op by op, the same bits, for a tap to see what lies between."""
        spec, at = self.spec, f"layers.{self.index}"
        q, k, v = qkv.view(-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim).split(
            (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1
        )
        if spec.qk_norm:
            q = self._norm(self.q_norm, q, None)[0]
            k = self._norm(self.k_norm, k, None)[0]
            tap(f"{at}.q_norm", q)
            tap(f"{at}.k_norm", k)
        cos, sin = tables[0][positions], tables[1][positions]
        q, k = pointwise.rope(q, cos, sin), pointwise.rope(k, cos, sin)
        tap(f"{at}.rope_q", q)
        tap(f"{at}.rope_k", k)
        v = v.contiguous()
        if self.fp8_kv:
            k, v = pointwise.round_heads(k), pointwise.round_heads(v)
            tap(f"{at}.k.quantize", k)
            tap(f"{at}.v.quantize", v)
        return q, k, v

    def infer(
        self, x: Tensor, residual: Tensor | None, tables: tuple[Tensor, Tensor], batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """`forward` without gradients or taps: the same bits from fewer kernels. `tables`: cos and sin, whole."""
        spec, side, scale = self.spec, batch.side, self.spec.head_dim**-0.5
        y, residual = self._norm_for(self.qkv, self.attn_norm, x, residual, side)
        qkv = self.qkv.infer(y, side)
        norms = (self.q_norm.published, self.k_norm.published) if spec.qk_norm else None
        plan, heads = batch.plan, (spec.num_heads, spec.num_kv_heads)
        cache = (plan.cache.layer(self.index), plan.slots) if isinstance(plan, PagedPlan) else None
        q, k, v = pointwise.qkv_norm_rope(
            qkv, heads, spec.head_dim, norms, spec.rms_norm_eps, tables, batch.positions, cache, self.fp8_kv
        )
        a: Tensor | QTensor
        if not isinstance(plan, PagedPlan):
            a = attend(q, k, v, plan, self.index, scale).flatten(1)
        elif (recipe := self.o.recipes[side]) is None:
            a = attend_cached(q, plan, self.index, scale).flatten(1)
        else:
            a = attend_cached_quantize(q, plan, self.index, scale, recipe.fprop.left.pow2)
        y = self.o.infer(a, side)
        y, residual = self._norm_for(self.gate_up, self.mlp_norm, y, residual, side)
        y = self.gate_up.infer(y, side)
        recipe = self.down.recipes[side]
        act = pointwise.swiglu(y) if recipe is None else pointwise.swiglu_quantize(y, recipe.fprop.left.pow2)
        return self.down.infer(act, side), residual

    def _norm_for(
        self, linear: FlowLinear, norm: Published, x: Tensor, residual: Tensor | None, side: Side
    ) -> tuple[Tensor | QTensor, Tensor]:
        """The norm before `linear`, quantized in the same kernel where that layer is FP8."""
        recipe = linear.recipes[side]
        if recipe is None:
            return self._norm(norm, x, residual)
        pow2 = recipe.fprop.left.pow2
        return pointwise.add_rms_norm_quantize(x, residual, norm.published, self.spec.rms_norm_eps, pow2)

    def _norm(self, norm: Published, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return pointwise.add_rms_norm(x, residual, norm.weight, norm.published, self.spec.rms_norm_eps)


class Transformer(nn.Module):
    """A Llama-style decoder. `forward` gives final hidden states; `logits` and `token_logprobs` read the lm_head.

    `dtype` is BF16; FP32 exists to check the definition against other implementations. Master weights are FP32 or BF16.
    Call `publish` after loading or changing weights: forward reads the published copies only.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, spec: ModelSpec, recipe: Recipe, *, master_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.bfloat16, activation_checkpointing: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        assert recipe.num_layers == spec.num_layers
        assert recipe.kv_cache in (BF16, kv_head(spec.head_dim)), f"no kernels for a KV cache in {recipe.kv_cache}"
        self.spec, self.recipe, self.dtype = spec, recipe, dtype
        self.activation_checkpointing = activation_checkpointing
        self.embed = Published((spec.vocab_size, spec.hidden_size), master_dtype, dtype)
        self.layers = nn.ModuleList(Layer(i, spec, recipe, master_dtype, dtype) for i in range(spec.num_layers))
        self.norm = Published((spec.hidden_size,), master_dtype, dtype)
        if not spec.tie_embeddings:
            self.lm_head = Published((spec.vocab_size, spec.hidden_size), master_dtype, dtype)
        cos, sin = rope_tables(spec.rope, spec.head_dim, spec.max_position)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._head_operand: Any = None

    @property
    def head(self) -> Published:
        """The lm_head, which is the embedding where they are tied."""
        return self.embed if self.spec.tie_embeddings else self.lm_head

    @property
    def head_weight(self) -> Tensor:
        return self.head.weight

    @torch.no_grad()
    def init_random(self, seed: int) -> Transformer:
        """Normal(0, 0.02) matrices (the two that write the residual scaled by 1/sqrt(2 L)), zero biases, unit norms."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 1:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = 0.02 / (2 * self.spec.num_layers) ** 0.5 if name.split(".")[-2] in ("o", "down") else 0.02
            p.copy_(torch.randn(p.shape, generator=generator) * std)
        return self.publish()

    def publish(self) -> Transformer:
        """Refresh every forward copy from its master: the last act of an optimizer step."""
        for module in self.published_modules():
            module.publish()
        if self._head_operand is not None:
            self._head_operand = gemm.prepare_bf16(self.head.published, self._head_operand)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Transformer:
        self._head_operand = None  # as in FlowLinear
        super()._apply(fn, recurse)
        return self

    def addresses(self) -> tuple[int, ...]:
        """Where the published values lie: a captured graph is good as long as none of these changes."""
        held = [m.published for m in self.published_modules()]
        held += [m.quantized.codes for m in self.published_modules() if isinstance(m, FlowLinear) and m.quantized]
        return tuple(t.data_ptr() for t in held)

    def published_modules(self) -> Iterator[Published | FlowLinear]:
        """Every module that holds a forward copy, in a fixed order."""
        return (m for m in self.modules() if isinstance(m, Published | FlowLinear))

    def checksum(self) -> str:
        """Hash of all published values, quantized codes included: equal checksums mean equal policies."""
        digest = hashlib.sha256()
        for m in self.published_modules():
            tensors = [m.published]
            if isinstance(m, FlowLinear):
                tensors += [] if m.published_bias is None else [m.published_bias]
                tensors += [] if m.quantized is None else [m.quantized.codes, m.quantized.scale]
            for t in tensors:
                digest.update(t.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def forward(self, batch: ForwardBatch, tap: Tap | None = None) -> Tensor:
        """Final hidden states [T, D]. `tap(name, tensor)` sees the output of every operator (no checkpointing then)."""
        see = tap or _no_tap
        x = _Embed.apply(batch.tokens, self.embed.weight, self.embed.published)
        see("embed", x)
        residual: Tensor | None = None
        tables = (self.cos, self.sin)
        if tap is None and not torch.is_grad_enabled():
            for layer in self.layers:
                assert isinstance(layer, Layer)
                x, residual = layer.infer(x, residual, tables, batch)
            return self._final_norm(x, residual)
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled() and tap is None:
                x, residual = checkpoint(layer, x, residual, tables, batch, see, use_reentrant=False)
            else:
                x, residual = layer(x, residual, tables, batch, see)
        hidden = self._final_norm(x, residual)
        see("norm", hidden)
        return hidden

    def _final_norm(self, x: Tensor, residual: Tensor | None) -> Tensor:
        norm = self.norm
        return pointwise.add_rms_norm(x, residual, norm.weight, norm.published, self.spec.rms_norm_eps)[0]

    def head_operand(self) -> Any:
        """The published lm_head as a GEMM operand."""
        if self._head_operand is None:
            self._head_operand = gemm.prepare_bf16(self.head.published)
        return self._head_operand

    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 logits [T, V]."""
        return logprob.head_logits(hidden, self.head_operand())

    def token_logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of `targets` [T] and entropies at the sampling temperature, FP32 [T] each; differentiable."""
        head = self.head
        return logprob.token_logprobs(hidden, head.weight, head.published, self.head_operand(), targets, temperature)


def rope_tables(rope: RopeSpec, head_dim: int, max_position: int) -> tuple[Tensor, Tensor]:
    """cos and sin [max_position, H/2] in FP32 of the FP32 angles `position * inv_freq`, Llama 3 scaling included."""
    inv_freq = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.factor is not None:
        wavelength = 2 * np.pi / inv_freq
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        between = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
        inv_freq = np.where(wavelength > low, inv_freq / rope.factor, np.where(wavelength < high, inv_freq, between))
    angles = np.arange(max_position, dtype=np.float32)[:, None] * inv_freq.astype(np.float32)
    angles = angles.astype(np.float64)
    return torch.from_numpy(np.cos(angles).astype(np.float32)), torch.from_numpy(np.sin(angles).astype(np.float32))
