"""Loads the parts of the objective that a recipe names in the user's code, and tries each on small inputs: what is
wrong with a function shows up before anything is trained, in `--dry-run` as well."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.rl import own, own_terms
from jetrl.rl.losses import Denominators
from jetrl.rl.surrogate import Clip
from jetrl.types import Segment, Trajectory, log_probs, token_ids
from jetrl.user_code.guard import user_code
from jetrl.user_code.importing import import_attribute

_BUILT_IN = {"rl.surrogate": "clip", "rl.adv_estimator": "grpo", "rl.loss_agg": "token_mean"}


def load_own_parts(config: Config) -> None:
    """Load and try the functions that `own.KEYS` name. UserError, which names key, function and line, if one is not
    there, raises, or returns something else than it should."""
    for key in own.KEYS:
        name = getattr(config.rl, key.removeprefix("rl."))
        if own.is_own(name):
            own.put(key, name, _guarded(import_attribute(name, key, "function"), key, name))
            _TRIALS[key](name, config)


def built_in(config: Config) -> Config:
    """The config with parts of jetrl's in place of the user's: for what only needs the shapes of an update."""
    changed = {
        key.removeprefix("rl."): usual for key, usual in _BUILT_IN.items()
        if own.is_own(getattr(config.rl, key.removeprefix("rl.")))
    }
    return config.model_copy(update={"rl": config.rl.model_copy(update=changed)}) if changed else config


def _guarded(function: Any, key: str, name: str) -> Callable[..., Any]:
    if not callable(function):
        raise UserError(f"{key}: {name} is of type {type(function).__name__}, not a function.")

    @functools.wraps(function)
    def call(*given: Any) -> Any:
        with user_code(f"{key} = {name}"):
            return function(*given)

    return call


def _try_surrogate(name: str, config: Config) -> None:
    """On ratios around 1, with both signs of the advantage and with none; a single token too."""
    rl = config.rl
    clip = Clip(rl.clip_ratio_low, rl.clip_ratio_high, rl.clip_ratio_c)
    with torch.enable_grad():
        for number in (6, 1):
            logprobs = torch.tensor([-1.0, -0.5, -2.0, -0.1, -9.0, -3.0][:number], requires_grad=True)
            log_ratio = logprobs - (logprobs.detach() - torch.tensor([0.0, 0.1, -0.1, 3.0, -3.0, 0.5][:number]))
            adv = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0][:number])
            losses = own_terms.token_losses(name, log_ratio, logprobs, adv, clip)
            (slope,) = torch.autograd.grad(losses.sum(), logprobs, allow_unused=True)
            if slope is None or not bool(slope.isfinite().all()) or not bool(slope.any()):
                raise UserError(
                    f"rl.surrogate: {name} has the gradient {None if slope is None else slope.tolist()} in the "
                    "log-probs of tokens with advantages; it must be finite, and other than 0 at ratio 1."
                )


def _try_weights(name: str, config: Config) -> None:
    """Three sequences in one micro-batch and in two: a token's weight must not depend on what it is packed with. Not
    all may be 0; nor those of an answer of the full length, if a function leaves out short ones."""
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    shares = Denominators(8, 4, (3, 2, 1, 2, 0), config.rollout.max_response_length)  # two tokens are elsewhere
    whole = own_terms.token_weights(name, ids, shares)
    cuts = (slice(0, 3), slice(3, 5), slice(5, 6))
    parts = torch.cat([own_terms.token_weights(name, ids[rows], shares) for rows in cuts])
    if not torch.allclose(whole, parts, rtol=1e-6, atol=0):
        raise UserError(
            f"rl.loss_agg: {name} gives the tokens of three sequences the weights {whole.tolist()} in one micro-batch "
            f"and {parts.tolist()} in micro-batches of their own. Use the counts of the Denominators, which are of the "
            "whole update, and not those of the tokens at hand."
        )
    longest = config.rollout.max_response_length
    full = torch.zeros(longest, dtype=ids.dtype)
    if not whole.any() and not own_terms.token_weights(name, full, Denominators(longest, 1, (longest,), longest)).any():
        raise UserError(f"rl.loss_agg: {name} gives every token the weight 0, so nothing would be learned.")


def _try_advantages(name: str, config: Config) -> None:
    """A group of three, one of one, and one without a trajectory in the loss."""
    def scored(score: float, length: int, in_loss: bool = True) -> own.Scored:
        drawn = Segment("policy", token_ids([2] * length), "x", log_probs([-0.5] * length), spans=((0, 0),))
        segments = (Segment("environment", token_ids([1]), "?"), drawn)
        trajectory = Trajectory(segments, "stop" if in_loss else "length", "")
        return own.Scored(trajectory, score, (0.0,) * (length - 1) + (score,), in_loss)

    groups = [[scored(1.0, 2), scored(0.0, 1), scored(0.5, 3)], [scored(1.0, 2)], [scored(0.0, 2, False)]]
    own.advantages(name, groups, config.rl)


_TRIALS: dict[str, Callable[[str, Config], None]] = {
    "rl.surrogate": _try_surrogate, "rl.loss_agg": _try_weights, "rl.adv_estimator": _try_advantages,
}
