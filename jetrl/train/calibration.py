"""Measuring the bounds of a calibrated clip: ratios of one batch in the run's precision and in BF16.

The BF16 policy is made of the same masters for two passes without gradients, one before the step's first update and
one before its last, and is gone after each: both are of the batch of the last update, whose ratios are the widest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from jetrl.config import Config
from jetrl.errors import OutOfMemory, gpu_full
from jetrl.model.master import frozen_values, masters_of
from jetrl.model.sharding import whole_value
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe
from jetrl.rl.calibration import Bounds, calibrated, smoothed
from jetrl.train.batches import PackedBatch
from jetrl.train.packing import held, with_rows
from jetrl.train.passes import logprob_pass
from jetrl.train.step import Learner, truncation_of

LOW, HIGH = "policy/clip_bound_low", "policy/clip_bound_high"
SHADOW, BY_NOISE = "policy/clip_frac_shadow", "policy/clip_frac_not_in_shadow"


def recipe_bounds(config: Config) -> Bounds:
    """The recipe's own bounds, which hold in BF16."""
    return Bounds(1 - config.rl.clip_ratio_low, 1 + config.rl.clip_ratio_high)


def with_bounds(config: Config, bounds: Bounds | None) -> Config:
    """The config of an update that clips at `bounds`; None: at the recipe's."""
    if bounds is None:
        return config
    clip = {"clip_ratio_low": 1 - bounds.low, "clip_ratio_high": bounds.high - 1}
    return config.model_copy(update={"rl": config.rl.model_copy(update=clip)})


def shadow_of(model: Transformer) -> Transformer:
    """The policy in BF16, published from its masters as they are, whole on every rank. Collective."""
    with torch.device("meta"):
        recipe = build_recipe("bf16", model.spec.num_layers, lora=model.recipe.lora)
        shadow = Transformer(model.spec, recipe, master_dtype=None)
    shadow.to(model.head_weight.device)
    frozen = frozen_values(model)
    return shadow.publish_values(
        (name, frozen[name]() if master.frozen else whole_value(master, shadow.dtype))
        for name, master in masters_of(model).items()
    )


class Calibration:
    """The clip of one step: `config` is the run's with the `bounds` in use (None: none were found so far). Afterwards
    `bounds` are those of the next step."""

    def __init__(self, learner: Learner, config: Config, bounds: Bounds | None) -> None:
        self.learner, self.config, self.bounds = learner, with_bounds(config, bounds), bounds
        self._aim = recipe_bounds(config)
        self._batch: PackedBatch | None = None  # that is measured
        self._before: PackedBatch | None = None  # it, with the shadow's log-probs before the first update
        self._found: dict[str, float] = {}

    def begin(self, batches: list[PackedBatch], step: int) -> dict[str, float]:
        """Before the step's first update: every `rl.calibration_interval` steps, from the first one on. The bounds that
        are used, as metrics. Collective."""
        rl, learning = self.config.rl, [batch for batch in batches if batch.num_loss_tokens]
        if rl.clip == "calibrated" and (step - 1) % rl.calibration_interval == 0 and len(learning) > 1:
            self._batch = learning[-1]
            self._before = self._with_shadow(self._batch, "old_logprobs")
        return dict(zip((LOW, HIGH), recipe_bounds(self.config), strict=True)) if rl.clip == "calibrated" else {}

    def measure(self, batch: PackedBatch) -> None:
        """Before an update: if it is the one of `begin`, find the bounds. Collective."""
        if batch is not self._batch:
            return
        assert self._before is not None
        after = self._with_shadow(batch, "ref_logprobs")
        ours = with_rows(batch, "ref_logprobs", self._pass(self.learner.model, batch))
        made = any(micro.old_logprobs is not None for micro in batch.micro_batches)
        old = "old_logprobs" if made else "rollout_logprobs"
        own = [
            _column(batch, "advantages"), np.exp(_column(ours, "ref_logprobs") - _column(batch, old)),
            np.exp(_column(after, "ref_logprobs") - _column(self._before, "old_logprobs")),
        ]
        self._take(*(np.concatenate(parts) for parts in zip(*self.learner.world.replicas.gather(own), strict=True)))
        self._batch = self._before = None

    def _take(self, advantages: np.ndarray, ratios: np.ndarray, shadow: np.ndarray) -> None:
        aim, used = self._aim, recipe_bounds(self.config)
        bad, good = advantages < 0, advantages > 0
        in_shadow = (bad & (shadow < aim.low)) | (good & (shadow > aim.high))
        ours = (bad & (ratios < used.low)) | (good & (ratios > used.high))
        self._found = {SHADOW: float(in_shadow.mean()), BY_NOISE: float((ours & ~in_shadow).mean())}
        if (found := calibrated(advantages, ratios, shadow, aim)) is not None:
            self.bounds = smoothed(used, found)

    def metrics(self) -> dict[str, float]:
        """Where bounds were measured: how much BF16 clips at the recipe's, and what else the run clips at those used.
        """
        return self._found

    def _with_shadow(self, batch: PackedBatch, column: str) -> PackedBatch:
        with self._told():
            shadow = shadow_of(self.learner.model)
            return with_rows(batch, column, self._pass(shadow, batch))

    def _pass(self, model: Transformer, batch: PackedBatch) -> list[Tensor]:
        return logprob_pass(model, batch, self.config.rollout.temperature, truncation_of(self.config))

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not gpu_full(error):
                raise
            model = self.learner.model
            size = 2 * sum(p.numel() for p in model.parameters()) * self.learner.world.replicas.size / 2**30
            raise OutOfMemory(
                f'rl.clip = "calibrated": the GPU has no memory for a pass of the policy in BF16, whose weights take '
                f'some {size:.1f} GiB. Set rl.clip = "fixed" with wider bounds (rl.clip_ratio_low, '
                'rl.clip_ratio_high), rollout.keep_kv_cache = "never", or a smaller train.max_tokens_per_gpu.'
            ) from error


def _column(batch: PackedBatch, name: str) -> np.ndarray:
    """A column [T] float64 of the loss rows held, in order."""
    return np.concatenate([np.zeros(0), *(values.astype(np.float64) for values in held([batch], name).values())])
