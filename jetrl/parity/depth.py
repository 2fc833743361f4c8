"""The gap between sampler and learner by depth: long conversations through an engine, then the training forward.

The task makes faults of long contexts visible. Each turn's message ends in the beginning of a passage from earlier in
the conversation, by turns from its very first tokens and from anywhere, so that what comes next depends on keys far
back: of a cache that has lost a page, of positions that are wrong from some depth on, or of a turn that was computed
another way, the turn that looks there has the gap. Turns grow by a constant factor, so that every depth up to the
whole has some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetrl.config import Config
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.errors import UserError
from jetrl.kernels.dispatch import definition
from jetrl.model.transformer import Transformer
from jetrl.model.weights import published
from jetrl.parity.model_under_test import Subject
from jetrl.parity.rows import NoText, Packed, page_size_of
from jetrl.precision.flow import flow_digest
from jetrl.run.engines import build_engine, require_engine
from jetrl.run.prepare import load_spec, model_source
from jetrl.types import Completion, Engine, Request, SamplingParams, WeightSet

_FIRST = 8  # tokens of the first turn, its answer included
_LEAST = 4  # tokens of a turn
_ANSWER = 64  # most tokens that the policy draws in a turn
_QUOTE = 16  # most tokens of a passage that a message ends in


@dataclass(frozen=True, slots=True)
class DepthWork:
    """Sizes of the traffic: tokens of a conversation at its end, turns, and conversations at the same time."""

    depth: int = 32768
    turns: int = 20
    conversations: int = 2
    seed: int = 0

    def ends(self) -> list[int]:
        """Tokens of a conversation at the end of each turn."""
        found = [_FIRST]
        for turn in range(1, self.turns):
            wanted = round(_FIRST * (self.depth / _FIRST) ** (turn / (self.turns - 1)))
            found.append(max(found[-1] + _LEAST, wanted))
        return [*found[:-1], self.depth]

    def check(self, positions: int) -> None:
        """UserError for sizes that make no conversation of a model with so many positions."""
        least, most = _FIRST + _LEAST * max(1, self.turns - 1), positions
        if not 2 <= self.turns or not least <= self.depth <= most:
            raise UserError(
                f"--depth {self.depth} with --turns {self.turns}: give at least 2 turns, and from {least} tokens (for "
                f"these turns) to the model's {most} positions."
            )


@dataclass(frozen=True, slots=True)
class Gaps:
    """Of some tokens that were drawn: |log-prob of the sampler - log-prob of the learner|. They are those of positions
    `start` to `end` - 1; with a `turn`, of that turn (from 1), which looked back so many tokens (None: at nothing)."""

    start: int
    end: int
    tokens: int
    different: int
    mean: float
    largest: float
    turn: int | None = None
    looks_back: int | None = None


@dataclass(frozen=True, slots=True)
class DepthResult:
    """The gap of one engine by position (each octave of the conversation) and by turn."""

    engine: str
    model: str
    precision: str
    kv_cache: str
    device: str
    depth: int
    conversations: int
    positions: tuple[Gaps, ...]
    turns: tuple[Gaps, ...]

    @property
    def bit_equal(self) -> bool:
        return not any(gaps.different for gaps in self.turns)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"bit_equal": self.bit_equal}


@dataclass(slots=True)
class _Conversation:
    """Tokens so far, and of each drawn one its position, turn and log-prob."""

    tokens: list[int]
    drawn: list[tuple[int, int, float]]


def depths_of(
    subject: Subject, work: DepthWork, beside: str, progress: Callable[[str], None]
) -> list[DepthResult]:
    """`jetrl parity --depth`: of jetrl's engine and, with `beside = "vllm"`, of vLLM next to it. UserError where vLLM
    is not there or does not take the model."""
    work.check(subject.spec.max_position)
    config = subject.config
    digest = flow_digest(subject.spec, subject.recipe, definition(config.kernels))
    if beside:
        config = _with_vllm(subject, work, beside)
        require_engine(config, subject.spec, subject.recipe)
    model = subject.published()
    found = [measure_depth(model, own_engine(model, work, digest), work, subject.name, "jetrl", digest, progress)]
    if beside:
        tokenizer, _, base = load_spec(config)
        engine = build_engine(config, model, tokenizer, base, model_source(config))
        try:
            found.append(measure_depth(model, engine, work, subject.name, "vLLM", digest, progress))
        finally:
            engine.close()
    return found


def _with_vllm(subject: Subject, work: DepthWork, beside: str) -> Config:
    config = subject.config
    if beside != "vllm":
        raise UserError(f"--beside {beside}: only vllm can be measured beside jetrl's own engine.")
    if config.quant.kv_cache == "fp8":
        raise UserError(
            "--beside vllm: with an FP8 cache, training rounds keys and values as jetrl's cache does, and vLLM's cache "
            "has different scales. Give --kv-cache bf16."
        )
    rollout = config.rollout.model_copy(update={
        "engine": "vllm", "max_response_length": work.depth - _FIRST, "max_num_seqs": max(2, work.conversations),
    })
    task = config.task.model_copy(update={"max_prompt_length": _FIRST})
    return config.model_copy(update={"rollout": rollout, "task": task})


def own_engine(model: Transformer, work: DepthWork, digest: str) -> PagedEngine:
    """jetrl's engine as runs have it, with prompts in chunks of a fiftieth of the depth or more."""
    settings = EngineSettings(
        page_size=page_size_of(model), max_num_seqs=work.conversations, max_tokens_per_step=max(64, work.depth // 50),
        kv_cache_tokens=work.conversations * (work.depth + 256),
    )
    return PagedEngine(model, NoText(), digest, settings)


@torch.no_grad()
def measure_depth(
    model: Transformer, engine: Engine, work: DepthWork, name: str, label: str, digest: str,
    progress: Callable[[str], None],
) -> DepthResult:
    """Conversations of `engine`, which is called `label`, over the published `model`, and the learner's log-probs of
    what it drew, at temperature 1."""
    work.check(model.spec.max_position)
    engine.load(WeightSet(0, digest, published(model)))
    told: list[_Conversation] = [_Conversation([], []) for _ in range(work.conversations)]
    looks: list[int | None] = [None] * work.turns
    generator, before = np.random.default_rng(work.seed), 0
    for turn, end in enumerate(work.ends()):
        count = min(_ANSWER, (end - before) // 2)
        for one in told:
            message, looks[turn] = _message(one.tokens, end - before - count, turn, model.spec.vocab_size, generator)
            one.tokens += message
        _answer(engine, told, turn, count, work)
        progress(f"turn {turn + 1} of {work.turns}: {end} tokens")
        before = end
    engine.forget(range(len(told)))
    engine.release()
    rows = np.concatenate([_gaps(model, one) for one in told])
    ends, position = work.ends(), rows[:, 0]
    octaves = [0, *(1 << n for n in range(3, math.ceil(math.log2(work.depth)) + 1))]
    recipe = model.recipe
    return DepthResult(
        label, name, recipe.name, str(recipe.kv_cache), str(model.head_weight.device), work.depth, work.conversations,
        tuple(
            _sums(rows[here], a, b) for a, b in pairwise(octaves)
            if (here := (position >= a) & (position < b)).any()
        ),
        tuple(
            _sums(rows[rows[:, 1] == turn], a, b, turn + 1, looks[turn])
            for turn, (a, b) in enumerate(pairwise([0, *ends]))
        ),
    )


def _message(
    history: Sequence[int], count: int, turn: int, vocab: int, generator: np.random.Generator
) -> tuple[list[int], int | None]:
    """A message of `count` tokens that ends in a passage of the history, and how far from its end that passage is; None
    where both are too short for one."""
    quoted = min(_QUOTE, count // 2, len(history) // 2)
    fresh = generator.integers(vocab, size=count - quoted).tolist()
    if not quoted:
        return fresh, None
    place = 0 if turn % 2 else int(generator.integers(len(history) - quoted))
    return fresh + list(history[place : place + quoted]), len(history) + count - (place + quoted)


def _answer(engine: Engine, told: Sequence[_Conversation], turn: int, count: int, work: DepthWork) -> None:
    """One turn of the policy in each conversation, of `count` tokens."""
    sampling = SamplingParams(count, ignore_eos=True, seed=work.seed)
    engine.add([Request(i, tuple(one.tokens), sampling, work.depth) for i, one in enumerate(told)])
    completions: list[Completion] = []
    while engine.has_work:
        engine.step()
        completions += engine.collect()
    completions += engine.collect()
    for completion in completions:
        one = told[completion.request_id]
        first = len(one.tokens)
        pairs = enumerate(zip(completion.tokens.tolist(), completion.logprobs.tolist(), strict=True))
        for n, (token, logprob) in pairs:
            one.tokens.append(token)
            one.drawn.append((first + n, turn, logprob))
    assert len(completions) == len(told), "one answer for each conversation"


def _gaps(model: Transformer, told: _Conversation) -> np.ndarray:
    """Position, turn and |gap| of each drawn token [n, 3] float64."""
    tokens = torch.tensor(told.tokens, device=model.head_weight.device)
    hidden = Packed(model, [tokens]).hidden[0]
    places = torch.tensor([position for position, _, _ in told.drawn], device=tokens.device)
    learner: Tensor = model.token_logprobs(hidden[places - 1], tokens[places], 1.0)[0]
    sampler = torch.tensor([logprob for _, _, logprob in told.drawn], dtype=torch.float32)
    gap = (learner.cpu().double() - sampler.double()).abs().numpy()
    return np.stack([places.cpu().numpy(), [turn for _, turn, _ in told.drawn], gap], 1)


def _sums(rows: np.ndarray, start: int, end: int, turn: int | None = None, looks_back: int | None = None) -> Gaps:
    gap = rows[:, 2]
    different = int(np.count_nonzero(gap))
    return Gaps(start, end, len(gap), different, float(gap.mean()), float(gap.max()), turn, looks_back)
