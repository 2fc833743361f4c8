"""How the prompts of a step or an evaluation are answered: sampling, number of answers, ids, turns."""

from __future__ import annotations

from dataclasses import dataclass

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.types import Problem, SamplingParams

STEP_STRIDE = 1 << 24  # request ids of a step: step * stride + number; evaluations use step 0 and steps are 1-based


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """`count` trajectories per prompt; trajectory i of all has id `first_id + i`, which names its random stream.

    `sampling.max_tokens` bounds all tokens after the prompt, the environment's included; `max_turn_tokens` bounds those
    of one turn of the policy.
    """

    sampling: SamplingParams
    count: int
    first_id: int
    max_turns: int = 1
    max_turn_tokens: int | None = None


def without_tokens(problem: Problem, text: str) -> UserError:
    """Why a problem whose prompt is `text` has no answers."""
    return UserError(f"Problem {problem.id}: the prompt {text!r} has no tokens. Remove it or write a prompt.")


def train_asked(config: Config, step: int, first_number: int = 0) -> RolloutRequest:
    """`group_size` trajectories per prompt; ids never repeat in a run. Later rounds of a step set `first_number`, the
    number of trajectories in the rounds before."""
    assert step >= 1 and first_number >= 0
    r = config.rollout
    sampling = SamplingParams(
        r.max_response_length, r.temperature, r.top_p, r.top_k, r.min_p, tuple(r.stop), seed=config.seed,
        logprobs=r.logprobs or "full",
    )
    return RolloutRequest(sampling, r.group_size, step * STEP_STRIDE + first_number, *_turns(config))


def eval_asked(config: Config) -> RolloutRequest:
    """`eval.num_samples` trajectories per held-out prompt; the same random streams at every evaluation."""
    length = config.eval.max_response_length or config.rollout.max_response_length
    sampling = SamplingParams(length, config.eval.temperature, stop=tuple(config.rollout.stop), seed=config.seed)
    return RolloutRequest(sampling, config.eval.num_samples, 0, *_turns(config))


def _turns(config: Config) -> tuple[int, int | None]:
    environment = config.environment
    return (1, None) if environment.name is None else (environment.max_turns, environment.max_turn_tokens)
