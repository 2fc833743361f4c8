"""`Speculator`: exact speculation for the engine. What to draft and how much, and what became of it.

It joins the parts: `texts` and `draft` find drafts, `depth` chooses how many, the runner computes them (`drafted`).
Everything it knows is a matter of speed: with any drafts, at any depth, tokens and log-probs are the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from jetrl.engine.plan import Drawn, Finished, Plan
from jetrl.engine.runner import ModelRunner
from jetrl.engine.sampler import SamplingTable
from jetrl.engine.scheduler import Scheduler
from jetrl.engine.slots import Slots
from jetrl.engine.speculation.depth import DEPTHS, DepthRule
from jetrl.engine.speculation.drafts import DraftIndex, num_texts
from jetrl.engine.speculation.sources import SOURCES, Texts


@dataclass(slots=True)
class Counts:
    """What became of drafts since the last `take_metrics`."""

    drafted: np.ndarray  # [sources], tokens that were computed as drafts
    accepted: np.ndarray
    steps: int = 0  # decode steps of one sequence
    tokens: int = 0  # that they drew

    @classmethod
    def none(cls) -> Counts:
        return cls(np.zeros(len(SOURCES), dtype=np.int64), np.zeros(len(SOURCES), dtype=np.int64))


def build_speculator(mode: str, max_draft_tokens: int, num_slots: int) -> Speculator | None:
    """What the config's `rollout.speculate` and `rollout.max_draft_tokens` ask for."""
    assert mode in ("off", "auto", "on"), mode
    if mode == "off":
        return None
    return Speculator(DepthRule(len(SOURCES), max_draft_tokens, always=mode == "on"), num_slots)


class Speculator:
    """Drafts for the sequences of one engine with `num_slots` slots."""

    def __init__(self, rule: DepthRule, num_slots: int) -> None:
        self.rule, self.num_slots = rule, num_slots
        self.index: DraftIndex | None = None
        self.texts: Texts | None = None
        self.counts = Counts.none()

    def decode(
        self, scheduler: Scheduler, runner: ModelRunner, plan: Plan, table: SamplingTable
    ) -> tuple[Plan, Drawn]:
        """Run a decode plan, as a burst where the runner has bursts, with drafts where they pay."""
        batch, limit = len(plan.tokens), runner.burst(plan, table)
        self.rule.begin(greedy=not table.temperature[plan.sample_slots].any())
        plan, steps = scheduler.extend(
            max(limit, 1), self.rule.choose(batch, scheduler.max_tokens_per_step)
        )
        if plan.depth:
            return plan, self._drafted(scheduler, runner, plan, table, steps)
        guessed = None
        if self.rule.compares():
            index, rows = self._ready(scheduler, runner, plan)
            guessed = index.draft(torch.from_numpy(rows).to(index.device), DEPTHS[-1])
        start = time.perf_counter()
        drawn = Drawn.full(*runner.run(plan, table, steps))
        self.rule.ran(batch, 0, steps, time.perf_counter() - start)
        self.counts.steps += steps * batch
        self.counts.tokens += int(drawn.counts.sum())
        if guessed is not None:
            drafts, counts, source = (x.cpu().numpy() for x in guessed)
            count = min(steps, DEPTHS[-1])
            drafted = np.minimum(counts, count)
            agree = (drafts[:, :count] == drawn.tokens[:count].T) & (np.arange(count) < drafted[:, None])
            assert self.texts is not None
            self.rule.compared(self.texts.sources(rows, source), drafted, agree.cumprod(1).sum(1))
        return plan, drawn

    def _drafted(
        self, scheduler: Scheduler, runner: ModelRunner, plan: Plan, table: SamplingTable, steps: int
    ) -> Drawn:
        index, rows = self._ready(scheduler, runner, plan)
        assert self.texts is not None
        start = time.perf_counter()
        burst = runner.run_drafted(plan, table, steps, index, rows)
        self.rule.ran(len(rows), plan.depth, steps, time.perf_counter() - start)
        index.tick(steps)
        self.texts.drawn(rows, burst.drawn.counts)
        source = self.texts.sources(np.broadcast_to(rows, burst.source.shape), burst.source)
        ran = burst.drafted >= 0
        self.rule.acceptance.add(source[ran], burst.drafted[ran], burst.accepted[ran])
        for s in range(len(SOURCES)):
            mine = ran & (source == s)
            self.counts.drafted[s] += burst.drafted[mine].sum()
            self.counts.accepted[s] += burst.accepted[mine].sum()
        self.counts.steps += int(ran.sum())
        self.counts.tokens += int(burst.drawn.counts.sum())
        return burst.drawn

    def _ready(self, scheduler: Scheduler, runner: ModelRunner, plan: Plan) -> tuple[DraftIndex, np.ndarray]:
        """The index with the texts of the plan's sequences, and the row of each."""
        at = scheduler.slots
        index, texts = self._opened(at, runner.device)
        rows = texts.rows(at, plan.sample_slots)
        news = texts.news(at, plan.sample_slots, rows)
        index.put(texts.lengths, texts.groups)
        for append in news:
            index.extend(*append)
        return index, rows

    def _opened(self, at: Slots, device: torch.device) -> tuple[DraftIndex, Texts]:
        """An index wide enough for the longest sequence so far; a wider one begins without texts."""
        longest = at.tokens.shape[1]
        if self.index is None or self.texts is None or self.index.longest < longest or self.index.device != device:
            longest = -(-longest // 256) * 256
            rows = num_texts(self.num_slots, longest)
            self.index = None  # free the old one before the new one is allocated
            self.index, self.texts = self.new_index(rows, longest, device), Texts(rows, self.num_slots)
        return self.index, self.texts

    def new_index(self, rows: int, longest: int, device: torch.device) -> DraftIndex:
        """Where drafts come from; a benchmark puts its own here."""
        return DraftIndex(rows, longest, device)

    def end(self, ended: Finished) -> None:
        """A request has ended."""
        if self.texts is not None:
            self.texts.end(ended)

    def forget(self, ids: Collection[int]) -> None:
        """These conversations have ended."""
        if self.texts is not None:
            self.texts.forget(ids)

    def rest(self) -> None:
        """No request is left; what they drew stays for drafts of later ones."""
        if self.texts is not None:
            self.texts.rest()

    def take_metrics(self) -> dict[str, float]:
        """What became of drafts since the last call; empty if there were no decode steps. Acceptance of a source: its
        share of tokens that held."""
        counts, self.counts = self.counts, Counts.none()
        if not counts.steps:
            return {}
        found = {"rollout/tokens_per_decode_step": counts.tokens / counts.steps}
        found["rollout/draft_share"] = float(counts.drafted.sum()) / max(counts.tokens, 1)
        pairs = [("", counts.drafted.sum(), counts.accepted.sum())]
        pairs += [(f"_{s}", d, a) for s, d, a in zip(SOURCES, counts.drafted, counts.accepted, strict=True)]
        return found | {f"rollout/draft_acceptance{name}": float(a) / float(d) for name, d, a in pairs if d}
