"""Recipe: the format of every GEMM operand, for both sides at once. Built from the config before any tensor exists."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, get_args

from jetrl.choices import CacheKind, Precision, ScaleKind, WgradKind
from jetrl.errors import UserError
from jetrl.precision.formats import BF16, FP32, Format, act_1x128, act_128x128, kv_head, weight_128x128, wgrad_128x1
from jetrl.precision.lora import Lora, expanded
from jetrl.spec import ModelSpec
from jetrl.types import Side

Role = str  # of a linear within its layer: "qkv", "gate_up"; blocks declare theirs (`block.Block.linears`)


class Operands(NamedTuple):
    """The formats of the two inputs of one GEMM, in the order of the formula."""

    left: Format
    right: Format


@dataclass(frozen=True, slots=True)
class LinearRecipe:
    """One FP8 linear y = x W^T, x [T, K], W [N, K]. Sums run in FP32 or wider; `out` and `grad` are rounded once.

    fprop:  y  [T, N] = x  [T, K] @ W [N, K]^T     x in blocks along K, W in tiles
    dgrad:  dx [T, K] = dy [T, N] @ W [N, K]       dy in blocks along N, W the same codes as in fprop
    wgrad:  dW [N, K] = dy [T, N]^T @ x [T, K]     dy in blocks along T; x likewise, or in tiles (then dW is BF16)
    """

    fprop: Operands  # activation, weight
    dgrad: Operands  # output gradient, weight
    wgrad: Operands  # output gradient along tokens, activation along tokens
    saved_activation: Format  # the one copy of x kept for backward, in the orientation that wgrad reads
    out: Format = BF16  # y
    grad: Format = BF16  # dx and dy between operators
    saved_out: Format = BF16  # y as SwiGLU's backward reads it, and down's wgrad through it
    weight_grad: Format = FP32  # what a micro-batch's dW is rounded to before FP32 addition

    @property
    def wgrad_tiles(self) -> bool:
        """Whether wgrad reads activations in 128x128 tiles."""
        return self.wgrad.right.name == "act_128x128"

    def with_row_wgrad(self) -> LinearRecipe:
        """The same linear with both operands of wgrad in blocks along tokens: what experts compute."""
        left = self.wgrad.left
        return replace(self, wgrad=Operands(left, left), saved_activation=left, saved_out=BF16, weight_grad=FP32)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The precision of the whole model on both sides. `linear` answers for one GEMM group of one layer.

    `kv_cache` holds in all layers and on both sides: keys and values that the rollout caches in FP8 are rounded the
    same way before training's attention, even where the GEMMs are BF16 (first and last layers, training under
    `fp8_rollout`, all of them under `w8a16`).

    `lora`: adapters beside the linears, which are frozen then, as all else is; None: none.

    `w8a16`: weights are codes with scales of 2^k, and both sides multiply BF16 activations by code * 2^k, which is a
    BF16 number. So its linears are BF16 GEMMs (`linear` is None) of weights that are codes (`weight_only`).
    """

    name: Precision
    num_layers: int
    weight_scale: ScaleKind = "fp32"
    activation_scale: ScaleKind = "fp32"
    num_first_layers_in_bf16: int = 0
    num_last_layers_in_bf16: int = 0
    kv_cache: Format = BF16
    wgrad: WgradKind = "row"
    saved_gate_up: CacheKind = "bf16"
    lora: Lora | None = None

    def __post_init__(self) -> None:
        _require_one_of("precision", self.name, get_args(Precision))
        _require_one_of("quant.weight_scale", self.weight_scale, get_args(ScaleKind))
        _require_one_of("quant.activation_scale", self.activation_scale, get_args(ScaleKind))
        _require_one_of("quant.wgrad", self.wgrad, get_args(WgradKind))
        _require_one_of("quant.saved_gate_up", self.saved_gate_up, get_args(CacheKind))
        if self.saved_gate_up == "fp8" and self.wgrad == "row":
            raise UserError("quant.saved_gate_up = 'fp8' has no effect with quant.wgrad = 'row'; set 'tile' there.")
        if self.name == "bf16" and self.kv_cache.is_quantized:
            raise UserError("quant.kv_cache = 'fp8' has no effect with precision = 'bf16'; change one of the two.")
        first, last = self.num_first_layers_in_bf16, self.num_last_layers_in_bf16
        for key, value in (("num_first_layers_in_bf16", first), ("num_last_layers_in_bf16", last)):
            if value < 0:
                raise UserError(f"quant.{key} = {value} is negative; give a number from 0 to {self.num_layers}.")
        if first + last > self.num_layers:
            raise UserError(
                f"quant.num_first_layers_in_bf16 = {first} and quant.num_last_layers_in_bf16 = {last} ask for "
                f"{first + last} layers in BF16, but the model has {self.num_layers}. Lower them to a sum of at most "
                f"{self.num_layers}."
            )

    def is_bf16_layer(self, layer: int) -> bool:
        """True where the recipe keeps a layer in BF16 on both sides, as one of the first or last."""
        assert 0 <= layer < self.num_layers, f"layer {layer} of {self.num_layers}"
        return layer < self.num_first_layers_in_bf16 or layer >= self.num_layers - self.num_last_layers_in_bf16

    def linear(self, layer: int, role: Role, side: Side) -> LinearRecipe | None:
        """Formats of one linear on one side; None means plain BF16 GEMMs. On the rollout side only `fprop` runs."""
        assert side in get_args(Side), f"side {side!r}, not one of {get_args(Side)}"
        plain = self.name in ("bf16", "w8a16") or (self.name == "fp8_rollout" and side == "train")
        return None if plain or self.is_bf16_layer(layer) else self.fp8_linear()

    def weight_only(self, layer: int) -> Format | None:
        """The codes from whose values BF16 GEMMs of a layer's linears are made, on both sides; None: from the weights
        themselves, or the linears are FP8."""
        return weight_128x128("pow2") if self.name == "w8a16" and not self.is_bf16_layer(layer) else None

    @property
    def pow2_weights(self) -> bool:
        """Whether scales of weights are powers of two."""
        return self.name == "w8a16" or self.weight_scale == "pow2"

    @property
    def quantizes_activations(self) -> bool:
        """Whether linears of the rollout read their inputs as codes."""
        return self.name in ("fp8", "fp8_rollout")

    def fp8_linear(self) -> LinearRecipe:
        """The one FP8 linear of this recipe, operand by operand."""
        rows = wgrad_128x1(self.activation_scale)
        saved = rows if self.wgrad == "row" else act_128x128(self.activation_scale)
        return LinearRecipe(
            fprop=Operands(act_1x128(self.activation_scale), weight_128x128(self.weight_scale)),
            dgrad=Operands(act_1x128(self.activation_scale), weight_128x128(self.weight_scale)),
            wgrad=Operands(rows, saved),
            saved_activation=saved,
            saved_out=act_1x128(self.activation_scale) if self.saved_gate_up == "fp8" else BF16,
            weight_grad=FP32 if self.wgrad == "row" else BF16,
        )


def _require_one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{key} = {value!r} is not known; use one of {', '.join(map(repr, allowed))}.")


def build_recipe(
    precision: str,
    num_layers: int,
    weight_scale: str = "fp32",
    activation_scale: str = "fp32",
    num_first_layers_in_bf16: int = 0,
    num_last_layers_in_bf16: int = 0,
    kv_cache: str = "bf16",
    head_dim: int | None = None,
    wgrad: str = "row",
    saved_gate_up: str = "bf16",
    lora: Lora | None = None,
) -> Recipe:
    """The recipe from a config's `precision` key and [quant] table; raises UserError for values that cannot work.

    `head_dim` is the model's: an FP8 cache has one scale per head.
    """
    _require_one_of("quant.kv_cache", kv_cache, get_args(CacheKind))
    assert kv_cache == "bf16" or head_dim is not None, "an FP8 cache needs the model's head size"
    return Recipe(
        name=precision,  # type: ignore[arg-type]  # the Literal types are checked by Recipe itself
        num_layers=num_layers,
        weight_scale=weight_scale,  # type: ignore[arg-type]
        activation_scale=activation_scale,  # type: ignore[arg-type]
        num_first_layers_in_bf16=num_first_layers_in_bf16,
        num_last_layers_in_bf16=num_last_layers_in_bf16,
        kv_cache=kv_head(head_dim) if kv_cache == "fp8" and head_dim is not None else BF16,
        wgrad=wgrad,  # type: ignore[arg-type]
        saved_gate_up=saved_gate_up,  # type: ignore[arg-type]
        lora=lora,
    )


class RecipeConfig(Protocol):
    """What `recipe_of` reads of a config: its precision and its tables [quant] and [lora]."""

    @property
    def precision(self) -> str: ...
    @property
    def quant(self) -> Any: ...
    @property
    def lora(self) -> Any: ...


def recipe_of(config: RecipeConfig, spec: ModelSpec) -> Recipe:
    """The recipe of a run. UserError for an FP8 cache of a model that keeps latents: they are BF16."""
    q = config.quant
    if spec.latent is not None and q.kv_cache != "bf16":
        raise UserError(
            f'quant.kv_cache = "{q.kv_cache}": this {spec.family} model keeps latents, which take '
            f"{2 * spec.latent.row} bytes a token and layer in BF16; there is no FP8 cache of them. Set it to bf16."
        )
    return build_recipe(
        config.precision, spec.num_layers, q.weight_scale, q.activation_scale, q.num_first_layers_in_bf16,
        q.num_last_layers_in_bf16, q.kv_cache, spec.head_dim, q.wgrad, q.saved_gate_up, lora_of(config.lora),
    )


def lora_of(settings: Any) -> Lora | None:
    """The adapters of a table [lora]; None without a rank."""
    if settings.rank is None:
        return None
    return Lora(settings.rank, settings.alpha, expanded(settings.targets), settings.rslora, settings.expert_rank)
