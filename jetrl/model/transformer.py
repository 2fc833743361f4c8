"""The model: one definition, called both by the trainer (packed sequences) and by the engine (paged cache).

    x = embed(tokens)
    for each block of each layer:  x = x + branch(rms_norm(x))      (`attention.py`, `mlp.py`; `blocks.py`: the layer)
    hidden = rms_norm(x);  logits = hidden @ lm_head.T

Legend: `T` packed tokens, `D` model, `V` vocabulary. `kernels/reference.py` defines the rounding points; every
activation between operators is rounded to `dtype` (BF16).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jetrl.errors import UserError
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.logprob import ops as logprob
from jetrl.kernels.logprob import several
from jetrl.kernels.logprob.truncation import Support
from jetrl.kernels.pointwise import ops as pointwise
from jetrl.kernels.qtensor import QTensor
from jetrl.model.adapter import first_values, is_adapter
from jetrl.model.attention import Attention
from jetrl.model.block import Block, Context, Routes, no_tap
from jetrl.model.block import Tap as Tap
from jetrl.model.blocks import Layer
from jetrl.model.flips import Flips
from jetrl.model.linear import FlowLinear
from jetrl.model.master import HoldsMasters, masters_of
from jetrl.model.published import Embedding, Norm, Note, Published, Together
from jetrl.model.rope import rope_tables
from jetrl.phrases import some
from jetrl.precision.blocks.layouts import linears_of
from jetrl.precision.formats import BF16, kv_head
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec
from jetrl.types import ForwardBatch

NO_MASTERS = (
    "this model holds no master weights, so that it takes less memory (load_model and jetrl parity train nothing): {}. "
    "For gradients and weights, load it with load_model(..., masters=True)."
)
FROZEN = (
    "{} of this model's {} parameters are frozen ({}), so they have no master weights: {}. What is published of a "
    "frozen one is jetrl.model.master.frozen_values(model)[name]()."
)


class _NoGradient(torch.autograd.Function):
    """The hidden states of a model without masters: a backward pass that comes here raises an error."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, asked: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UserError(NO_MASTERS.format("it has no gradients"))


class Transformer(nn.Module):
    """A Llama-style decoder. `forward` gives final hidden states; `logits` and `token_logprobs` read the lm_head.

    `dtype` is BF16; FP32 exists to check the definition against other implementations. Master weights are FP32 or BF16.
    Call `publish` after loading or changing weights: forward reads the published copies only. `master_dtype` None: no
    masters are held, `publish_values` takes the place of `publish`, and a backward pass is refused. `freeze` does the
    same to some of the parameters: the others are trained. Where the recipe has adapters (`precision.lora`), they
    alone have masters, and all else is frozen from the start.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, spec: ModelSpec, recipe: Recipe, *, master_dtype: torch.dtype | None = torch.float32,
        dtype: torch.dtype = torch.bfloat16, activation_checkpointing: bool = False, lean_backward: bool = True,
    ) -> None:
        super().__init__()
        assert recipe.num_layers == spec.num_layers
        assert recipe.kv_cache in (BF16, kv_head(spec.head_dim)), f"no kernels for a KV cache in {recipe.kv_cache}"
        self.spec, self.recipe, self.dtype = spec, recipe, dtype
        self.activation_checkpointing, self.lean_backward = activation_checkpointing, lean_backward
        self.master_dtype, adapter_dtype = master_dtype, master_dtype
        if recipe.lora is not None:
            master_dtype = None
        self.embed = Embedding((spec.vocab_size, spec.hidden_size), master_dtype, dtype, spec.tie_embeddings)
        self.layers = nn.ModuleList(
            Layer(i, spec, recipe, master_dtype, dtype, adapter_dtype) for i in range(spec.num_layers)
        )
        self.norm = Norm((spec.hidden_size,), master_dtype, dtype, spec.norm_offset)
        if not spec.tie_embeddings:
            self.lm_head = Published((spec.vocab_size, spec.hidden_size), master_dtype, dtype)
        with torch.device("cpu"):  # also where the parameters are only shapes
            cos, sin = rope_tables(spec.rope, spec.head_dim, spec.max_position, spec.rotary_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._head_operand: Any = None
        self.base_digest: str | None = None  # of a frozen base (`adapter.BaseHash`), where it was taken
        self._note = Note()
        self._adapters: Together | None = None  # once they are looked for
        for module in self.modules():  # to save memory: the backward pass makes what it reads
            if isinstance(module, FlowLinear):
                module.keeps_transposed = not (activation_checkpointing or lean_backward)
            elif isinstance(module, Attention):
                module.makes_heads_again = lean_backward

    @property
    def head(self) -> Published:
        """The lm_head, which is the embedding where they are tied."""
        return self.embed if self.spec.tie_embeddings else self.lm_head

    @property
    def head_weight(self) -> Tensor:
        return self.head.weight

    @property
    def holds_masters(self) -> bool:
        """Whether anything can be trained."""
        return any(not master.frozen for module in self.published_modules() for master in module.masters.values())

    def frozen(self) -> list[str]:
        """The names of parameters that are frozen."""
        return [name for name, master in masters_of(self).items() if master.frozen]

    @torch.no_grad()
    def freeze(self, which: Iterable[str] | Callable[[str], bool]) -> Transformer:
        """Keep of these parameters, given by names or by a predicate of a name, only what is published: FP8 codes and
        scales, or BF16 values. They have no master, no gradient and no moments from then on, for good.

        What the model computes stays what it is, and gradients of the other parameters are those that they would be
        anyway. Optimizers come after this. Collective if the model is sharded. UserError for a name that is none.
        """
        names = [name for name, _ in self.named_parameters()]
        chosen = [name for name in names if which(name)] if callable(which) else list(which)
        if unknown := [name for name in chosen if name not in names]:
            raise UserError(
                f"freeze: this model has no parameter {some(unknown)}. It has {some(names)}: see named_parameters()."
            )
        for name in sorted(set(chosen), key=names.index):  # in one order on all ranks
            owner, _, kind = name.rpartition(".")
            module = self.get_submodule(owner)
            if not isinstance(module, HoldsMasters):
                raise UserError(f"freeze: {name} is not published: it belongs to no linear, norm or table.")
            module.freeze(kind)
        self._note.drop(chosen)
        return self

    @torch.no_grad()
    def init_random(self, seed: int) -> Transformer:
        """Fill the masters with `random_values`, or publish these where there are no masters."""
        if not self.holds_masters:
            return self.publish_values(self.random_values(seed))
        masters = masters_of(self)
        for name, value in self.random_values(seed):
            if masters[name].frozen:
                self._publish_value(name, value)
            else:
                masters[name].param.copy_(value)
        return self.publish()

    def random_values(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """By parameter, one at a time, FP32 on the CPU: Normal(0, 0.02) matrices (those that write the residual scaled
        by 1/sqrt(2 L)), zero biases, unit norms. Of a sharded matrix the whole is drawn, and this rank's rows given.
        Adapters come last, as `adapter.first_values` has them: the base is what it is without them."""
        generator = torch.Generator().manual_seed(seed)
        writers = {
            f"layers.{layer}.{block}.{role}.weight"
            for layer in range(self.spec.num_layers)
            for (block, role), linear in linears_of(self.spec, layer).items()
            if linear.writes_residual
        }
        masters = masters_of(self)
        for name, shape, cut in [(n, m.whole_shape(), m.split) for n, m in masters.items() if not is_adapter(n)]:
            if (own := self._initial(name, shape, generator)) is not None:
                yield name, own if cut is None else cut.own(own)
                continue
            std = 0.02 / (2 * self.spec.num_layers) ** 0.5 if name in writers else 0.02
            whole = torch.randn(shape, generator=generator).mul_(std)
            yield name, whole if cut is None else cut.own(whole)
            del whole  # before the next one is drawn
        yield from first_values(self, seed)

    def _initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """The first value of a vector, or of what a block wants another value of than a matrix has."""
        module = self.get_submodule(name.rpartition(".")[0])
        if name.startswith("layers."):
            _, layer, block, own = name.split(".", 3)
            found = self.layers[int(layer)].get_submodule(block)
            value = found.initial(own, shape, generator) if isinstance(found, Block) else None
            if value is not None:
                return value
        if len(shape) == 1:
            zero = name.endswith("bias") or (isinstance(module, Norm) and module.offset)
            return torch.full(shape, 0.0 if zero else 1.0)
        return None

    def publish(self, flips: Flips | None = None) -> Transformer:
        """Refresh every forward copy from its master: the last part of an optimizer step. `flips` counts the codes that
        change."""
        if self.recipe.lora is not None and flips is None:
            return self._publish_adapters()
        for module in self.published_modules():
            with flips.watch(module) if flips is not None and isinstance(module, FlowLinear) else nullcontext():
                module.publish()
        if self._head_operand is not None:
            self._head_operand = gemm.prepare_bf16(self.head.published, self._head_operand)
        self._note.take((name, m.param) for name, m in masters_of(self).items() if not m.frozen)
        return self

    @torch.no_grad()
    def _publish_adapters(self) -> Transformer:
        """`publish` where adapters alone have masters: they are small, so what counts is how often the host is asked.
        Whole ones that have been published before are rounded in one call."""
        if self._adapters is None or not self._adapters.hold():
            self._adapters = Together((name, m) for name, m in self.named_modules() if isinstance(m, Published))
        self._adapters.publish()
        self._note.take(self._adapters.named)
        return self

    def require_published(self) -> None:
        """UserError if a master has moved since the last `publish`: what is computed would be of the old weights.

        `published.Note` says what is seen. `forward` asks where gradients are on; without them the published weights
        are the model.
        """
        if (name := self._note.moved()) is not None:
            raise UserError(
                f"The master weight {name} has changed since the model was last published, so it would compute with "
                "the old weights. Call model.publish() after each optimizer step."
            )

    @torch.no_grad()
    def publish_values(self, values: Iterable[tuple[str, Tensor | QTensor]]) -> Transformer:
        """Publish each parameter's value, one after the other, with the bits of `publish`; the values are not kept.

        `values` has every parameter once, by name; codes are published as they are, where the flow has such. Memory is
        what is published and the value at hand.
        """
        missing = {name for name, _ in self.named_parameters()}
        for name, value in values:
            missing.remove(name)
            self._publish_value(name, value)
        assert not missing, f"no value for {sorted(missing)}"
        self._head_operand = None
        return self

    @torch.no_grad()
    def publish_frozen(self, values: Iterable[tuple[str, Tensor | QTensor]]) -> Transformer:
        """Publish other values, whole, of frozen parameters: what was published of them before is gone."""
        for name, value in values:
            self._publish_value(name, value)
        self._head_operand = None
        return self

    def _publish_value(self, name: str, value: Tensor | QTensor) -> None:
        owner, _, kind = name.rpartition(".")
        module = self.get_submodule(owner)
        assert isinstance(module, HoldsMasters), name
        module.publish_value(kind, value.to(self.cos.device))

    def requires_grad_(self, requires_grad: bool = True) -> Transformer:
        """torch's, for all that is not frozen."""
        if requires_grad and not self.holds_masters:
            raise UserError(NO_MASTERS.format("its parameters take no gradient"))
        for master in masters_of(self).values():
            if not master.frozen:
                master.param.requires_grad_(requires_grad)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._require_masters("there are no weights to save or copy")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._require_masters("there are no weights to load into")
        return super().load_state_dict(*args, **kwargs)

    def _require_masters(self, lack: str) -> None:
        """UserError if a parameter has none."""
        if not self.holds_masters:
            raise UserError(NO_MASTERS.format(lack))
        if frozen := self.frozen():
            raise UserError(FROZEN.format(len(frozen), len(masters_of(self)), some(frozen), lack))

    def _apply(self, fn: Any, recurse: bool = True) -> Transformer:
        for module in self.published_modules():  # before any of them moves
            module.require_in_place(fn)
        self._head_operand = None  # as in FlowLinear
        super()._apply(fn, recurse)
        return self

    def addresses(self) -> tuple[int, ...]:
        """Addresses of the published values: a captured graph is valid as long as none of them changes."""
        held = [m.published for m in self.published_modules()]
        held += [m.quantized.codes for m in self.published_modules() if isinstance(m, FlowLinear) and m.quantized]
        return tuple(t.data_ptr() for t in held)

    def published_modules(self) -> Iterator[Published | FlowLinear]:
        """Every module that holds a forward copy, in a fixed order."""
        return (m for m in self.modules() if isinstance(m, Published | FlowLinear))

    def forward(self, batch: ForwardBatch, tap: Tap | None = None, routes: Routes | None = None) -> Tensor:
        """Final hidden states [T, D]. `tap(name, tensor)` sees the output of every operator (no checkpointing then).

        `routes`, if given, is filled with what the routers of layers with experts do.
        """
        if grad := torch.is_grad_enabled():
            self.require_published()
        see, context = tap or no_tap, Context(batch, (self.cos, self.sin), routes)
        x, residual = self.embed(batch.tokens), None
        see("embed", x)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            if tap is None and not grad:
                x, residual = layer.infer(x, residual, context)
            elif tap is None and self.activation_checkpointing:
                x, residual = checkpoint(layer, x, residual, context, see, use_reentrant=False)
            else:
                x, residual = layer(x, residual, context, see)
        hidden = self._final_norm(x, residual)
        see("norm", hidden)
        if grad and not self.holds_masters:
            return _NoGradient.apply(hidden, torch.empty(0, requires_grad=True))
        return hidden

    def _final_norm(self, x: Tensor, residual: Tensor | None) -> Tensor:
        norm = self.norm
        return pointwise.add_rms_norm(x, residual, norm.weight, norm.factor, self.spec.rms_norm_eps)[0]

    def head_operand(self) -> Any:
        """The published lm_head as a GEMM operand."""
        if self._head_operand is None:
            self._head_operand = gemm.prepare_bf16(self.head.published)
        return self._head_operand

    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 logits [T, V]."""
        return logprob.head_logits(hidden, self.head_operand())

    def token_logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: float, keep: bool = True, support: Support | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of `targets` [T] and entropies at the sampling temperature, FP32 [T] each; differentiable.

        `keep` as in `logprob.ops.token_logprobs`: False if the entropies will have a gradient. `support`: of truncated
        distributions.
        """
        head, operand = self.head, self.head_operand()
        gradient = head.masters["weight"].gradient
        return logprob.token_logprobs(hidden, gradient, head.published, operand, targets, temperature, keep, support)

    def top_tokens(self, hidden: Tensor, count: int, vocab: int | None = None) -> Tensor:
        """The most probable tokens of each row, the first one first: int64 [T, count]. `vocab`: of so many alone."""
        return several.top_tokens(hidden, self.head_operand(), vocab or self.spec.vocab_size, count)

    def several_logprobs(
        self, hidden: Tensor, targets: Tensor, logprobs: Tensor, tokens: Tensor, temperature: float
    ) -> Tensor:
        """Log-probs of `tokens` [T, K], FP32 [T, K], from those of `targets` [T] that `token_logprobs` has made."""
        head = self.head
        gradient = head.masters["weight"].gradient
        return several.several_logprobs(hidden, gradient, head.published, targets, logprobs, tokens, temperature)
