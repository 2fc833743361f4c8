"""The section [lora]: low-rank adapters, trained beside a model that stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from jetrl.choices import LoraTarget
from jetrl.config.base import Problem, Section
from jetrl.config.markers import Elsewhere, Kernels, NoEffectWhile, Since
from jetrl.config.toml import toml_literal

WITH_RANK = NoEffectWhile("lora.rank", (None,))


class LoraConfig(Section):
    """Low-rank adapters beside the linears of a frozen base (docs/LORA.md)."""

    section: ClassVar[str] = "lora"
    rank: Annotated[
        int | None, Since("0.2.0", None), Kernels(),
        Elsewhere("TRL: lora_r; verl: lora_rank; PEFT: r; NeMo RL: dim"),
    ] = Field(
        default=None, ge=1, le=4096, description="Rank of the adapters. none: no adapters, and all weights are "
        "trained. With a rank nothing else is trained, and the base keeps no masters, gradients or moments.")
    expert_rank: Annotated[int | None, WITH_RANK, Since("0.3.0", None), Kernels()] = Field(
        default=None, ge=1, le=4096, description="Rank of the adapters in experts: each expert has its own, beside "
        "those of gate, up and down that are targets. none: experts are frozen. Attention has lora.rank.")
    alpha: Annotated[
        float, WITH_RANK, Since("0.2.0", 32.0), Elsewhere("TRL, verl, PEFT: lora_alpha"),
    ] = Field(
        default=32.0, gt=0, le=1e6, description="What an adapter adds is scaled by alpha / rank, so that one learning "
        "rate fits all ranks.")
    targets: Annotated[
        tuple[LoraTarget, ...], WITH_RANK, Since("0.2.0", ["all"]), Kernels(),
        Elsewhere("TRL: lora_target_modules; verl, PEFT: target_modules"),
    ] = Field(
        default=("all",), description="Projections with an adapter, by name or by group: attention "
        "(q, k, v, o), mlp (gate, up, down), linear_attention (in_proj_qkv, in_proj_z, out_proj of Gated DeltaNet), "
        "all. Those of experts need lora.expert_rank.")
    rslora: Annotated[bool, WITH_RANK, Since("0.2.0", False), Elsewhere("TRL, PEFT: use_rslora")] = Field(
        default=False, description="Scale by alpha / sqrt(rank) instead.")

    def problems(self) -> Iterator[Problem | str]:
        if not self.targets:
            yield 'lora.targets: names no projection; take "all", or leave it out'
        if len(set(self.targets)) < len(self.targets):
            yield f"lora.targets: names a target twice: {toml_literal(self.targets)}"
