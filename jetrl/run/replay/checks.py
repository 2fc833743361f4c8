"""What can be computed again of a recorded step, and compared with its record bit for bit.

    logprobs    every recorded token's log-prob by the learner's forward, with the weights of its span
    rollout     every token drawn again with those weights: the token, and the log-prob's bits
    update      the step's updates: batches, log-probs, losses, gradients, masters, moments, published weights

Letters: R rows whose targets are tokens of the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jetrl.branches import Row, rows_of
from jetrl.errors import UserError
from jetrl.kernels.attention.ops import varlen_plan
from jetrl.kernels.logprob.truncation import Support
from jetrl.rollout.requests import train_asked
from jetrl.run.replay import record
from jetrl.run.replay.record import StepRecord
from jetrl.run.replay.rerun import Rerun, Say, config_of, opened
from jetrl.run.setup import Session
from jetrl.train.step import truncation_of
from jetrl.types import ForwardBatch, Group, Request, SamplingParams, Segment, Trajectory

WHATS = ("logprobs", "rollout", "update")


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay: of `checked` tokens (or digests) so many are `different`; `first` names the first of
    them. `notes`: what else differs from the run, such as versions or the device."""

    what: str
    step: int
    unit: str
    checked: int
    different: int
    first: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return self.different == 0


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `end` of a `row` of a trajectory, all of whose segments count, that the weights of `version`
    drew. `name` names the trajectory; `turn`: the place of its segment among the policy's, `before`: of its tokens in
    that turn."""

    name: str
    trajectory: Trajectory
    row: Row
    segment: Segment
    version: int
    start: int
    end: int
    turn: int
    before: int

    @property
    def drawn(self) -> np.ndarray:
        return self.segment.tokens[self.before : self.before + self.end - self.start]

    @property
    def logprobs(self) -> np.ndarray:
        return self.segment.logprobs[self.before : self.before + self.end - self.start]

    @property
    def whole(self) -> bool:
        """Whether these are all tokens of the segment."""
        return len(self.drawn) == len(self.segment.tokens)

    def prefix(self, end: int) -> np.ndarray:
        """The row's first tokens."""
        return np.concatenate([segment.tokens for segment in self.row.segments])[:end]


def spans_of(one: StepRecord) -> list[Span]:
    """All spans of a step's trajectories."""
    return [span for name, trajectory in one.trajectories() for span in _spans(name, trajectory)]


def _spans(name: str, trajectory: Trajectory) -> Iterator[Span]:
    turn = 0
    for row in rows_of(trajectory.segments):
        first = 0
        for place, segment in enumerate(row.segments):
            if place >= row.own:
                edges = [*(start for start, _ in segment.spans), len(segment.tokens)]
                for (start, version), end in zip(segment.spans, edges[1:], strict=True):
                    yield Span(name, trajectory, row, segment, version, first + start, first + end, turn, start)
                turn += segment.author == "policy"
            first += len(segment.tokens)


def replay(run_dir: Path, step: int, what: str, say: Say = lambda text: None) -> Replayed:
    """Compute what `what` names of a step of a run again. UserError where it cannot be."""
    if what not in WHATS:
        raise UserError(f"What to replay is one of {', '.join(WHATS)}, and not {what!r}.")
    if not record.steps_of(run_dir):
        config_of(run_dir)  # says so of runs that never keep a step
    one = record.read(run_dir, step)
    if what == "update":
        return _update(run_dir, one, say)
    spans = sorted(spans_of(one), key=lambda span: span.version)  # stable
    if not spans:
        return Replayed(what, step, "tokens", 0, 0)
    compared = _Compared(what, step)
    with opened(run_dir, spans[0].version, say) as rerun:
        rerun.require_tokens(one)
        for version in sorted({span.version for span in spans}):
            rerun.to(version)
            own = [span for span in spans if span.version == version]
            say(f"{sum(span.end - span.start for span in own)} tokens of version {version}")
            (_logprobs if what == "logprobs" else _draws)(rerun, own, compared)
        if not rerun.session.unified:
            rerun.notes.append(
                "this run's flow or engine does not promise equal bits of rollout and training"
            )
        return compared.result(rerun.notes)


@dataclass(slots=True)
class _Compared:
    what: str
    step: int
    checked: int = 0
    different: int = 0
    first: str | None = None
    unit: str = field(default="tokens")

    def add(self, span: Span, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """What was computed for a span, which may be shorter or longer."""
        count = len(span.drawn)
        shared = min(count, len(tokens))
        unequal = np.ones(max(count, len(tokens)), dtype=bool)
        bits = np.asarray(logprobs[:shared], np.float32).view(np.int32) != span.logprobs[:shared].view(np.int32)
        unequal[:shared] = bits | (np.asarray(tokens[:shared]) != span.drawn[:shared])
        self.checked += count
        self.different += int(unequal.sum())
        if self.first is None and unequal.any():
            self.first = self._named(span, int(np.flatnonzero(unequal)[0]), tokens, logprobs)

    def _named(self, span: Span, place: int, tokens: np.ndarray, logprobs: np.ndarray) -> str:
        where = f"{span.name}, token {span.start + place} (version {span.version})"
        if place >= len(span.drawn):
            return f"{where}: nothing was recorded, and token {tokens[place]} is drawn now"
        there = f"token {span.drawn[place]} with log-prob {_bits(span.logprobs[place])} was recorded"
        if place >= len(tokens):
            return f"{where}: {there}, and the answer ends before it now"
        return f"{where}: {there}, token {tokens[place]} with {_bits(logprobs[place])} is computed now"

    def result(self, notes: Sequence[str]) -> Replayed:
        return Replayed(self.what, self.step, self.unit, self.checked, self.different, self.first, tuple(notes))


def _bits(value: float) -> str:
    return f"{value:.7g} (0x{np.float32(value).view(np.uint32):08x})"


# ---- log-probs ------------------------------------------------------------------------------------------------------


def _logprobs(rerun: Rerun, spans: Sequence[Span], compared: _Compared) -> None:
    for batch in _batches(spans, rerun.session.config.train.max_tokens_per_gpu):
        for span, values in zip(batch, learners_logprobs(rerun, batch), strict=True):
            compared.add(span, span.drawn, values)


def _batches(spans: Sequence[Span], most: int) -> Iterator[list[Span]]:
    """Neighbours that fit into a forward pass of so many tokens; at least one each."""
    batch, used = list[Span](), 0
    for span in spans:
        if batch and used + span.end > most:
            yield batch
            batch, used = [], 0
        batch.append(span)
        used += span.end
    if batch:
        yield batch


@torch.no_grad()
def learners_logprobs(rerun: Rerun, spans: Sequence[Span]) -> list[np.ndarray]:
    """The log-probs of each span's tokens by the learner's forward pass over all that comes before them, FP32."""
    session = rerun.session
    model, config, device = session.model, session.config, session.model.head_weight.device
    sequences = [torch.from_numpy(span.prefix(span.end).astype(np.int64)) for span in spans]
    lengths = tuple(map(len, sequences))
    edges = torch.tensor([0, *np.cumsum(lengths)])
    tokens = torch.cat(sequences).to(device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    hidden = model(ForwardBatch(tokens, positions, varlen_plan(edges.to(torch.int32).to(device), lengths, ()), "train"))
    places = [torch.arange(span.start, span.end) + int(edge) for span, edge in zip(spans, edges, strict=False)]
    rows = torch.cat(places).to(device)
    targets, truncation = tokens[rows], truncation_of(config)
    support = None if truncation is None else Support(truncation, targets)
    values: Tensor = model.token_logprobs(hidden[rows - 1], targets, config.rollout.temperature, True, support)[0]
    return [part.cpu().numpy() for part in values.split([len(place) for place in places])]


# ---- draws ----------------------------------------------------------------------------------------------------------


def _draws(rerun: Rerun, spans: Sequence[Span], compared: _Compared) -> None:
    """Turns of a trajectory share a request id, so they are drawn one after the other."""
    waiting = list(spans)
    while waiting:
        now: dict[int, Span] = {}
        for span in waiting:
            now.setdefault(_id_of(span), span)
        waiting = [span for span in waiting if now[_id_of(span)] is not span]
        own = list(now.values())
        for span, (tokens, logprobs) in zip(own, draw(rerun, own), strict=True):
            compared.add(span, tokens, logprobs)


def draw(rerun: Rerun, spans: Sequence[Span]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The tokens of spans of different trajectories drawn again, with their log-probs."""
    engine = rerun.session.engine
    engine.add([
        Request(_id_of(span), tuple(span.prefix(span.start).tolist()), _sampling(rerun, span)) for span in spans
    ])
    while engine.has_work:
        engine.step()
    found = {completion.request_id: completion for completion in engine.collect()}
    return [(found[_id_of(span)].tokens, found[_id_of(span)].logprobs) for span in spans]


def _id_of(span: Span) -> int:
    if span.trajectory.request_id is None:
        raise UserError(f"{span.name} has no request id in its record, so it cannot be drawn again.")
    return span.trajectory.request_id if span.row.stream is None else span.row.stream


def _sampling(rerun: Rerun, span: Span) -> SamplingParams:
    """How the span was drawn. A part of a turn ends where it ended, and so does one of a changed history; a whole one
    has the room that it had."""
    config = rerun.session.config
    asked = train_asked(config, 1)
    if not span.whole or any(segment.branch for segment in span.trajectory.segments):
        return replace(asked.sampling, max_tokens=len(span.drawn))
    room = asked.sampling.max_tokens - (span.start - len(span.trajectory.segments[0].tokens))
    limit = asked.max_turn_tokens
    return replace(asked.sampling, max_tokens=room if limit is None else min(limit, room))


# ---- the update -----------------------------------------------------------------------------------------------------


def _update(run_dir: Path, one: StepRecord, say: Say) -> Replayed:
    with opened(run_dir, one.version, say) as rerun:
        say(f"the update of step {one.step}")
        found, learnt = rerun.repeat(one)
        names = [*one.digests, *(name for name in found if name not in one.digests)]
        unequal = [name for name in names if one.digests.get(name) != found.get(name)]
        first, wrong = None, unlike_advantages(one, learnt)
        if wrong:
            first = wrong[0]
        elif unequal:
            name = unequal[0]
            first = (
                f"{spoken(name, rerun.session)}: the digest {_hex(one.digests.get(name))} was recorded, "
                f"{_hex(found.get(name))} is computed now"
            )
        checked = len(names) + sum(len(group.trajectories) for group in learnt)
        return Replayed(
            "update", one.step, "digests and advantages", checked, len(unequal) + len(wrong), first, tuple(rerun.notes)
        )


def unlike_advantages(one: StepRecord, learnt: Sequence[Group]) -> list[str]:
    """Words for each trajectory whose recorded advantage is not the one that is computed now."""
    return [
        f"advantage of completion {number} of prompt {mine.prompt.index}: {was} was recorded, {now} is computed now"
        for mine, other in zip(one.learnt, learnt, strict=True)
        for number, (was, now) in enumerate(zip(mine.advantages, other.advantages, strict=True)) if was != now
    ]


def spoken(name: str, session: Session) -> str:
    """The name of a digest in words: `gradient of layers.0.mlp.down.weight, update 0`."""
    kind, _, rest = name.partition("/")
    names = {path: optimizer for path, optimizer, _ in session.learner.optimizers()}
    if kind == "moments":
        optimizer, number, key = rest.split(".", 2)
        return f"{key} of {_stepped(session, names[optimizer])[int(number)]} in the {optimizer.replace('_', ' ')}"
    if kind == "masters":
        return f"master weight {rest.removeprefix('model.')}"
    if kind == "published":
        return f"published weight {rest}"
    if kind == "batch":
        update, micro, column = rest.split("/")
        return f"{column} in micro-batch {micro} of update {update}"
    return _of_update(rest.split("/"), session)


def _of_update(words: list[str], session: Session) -> str:
    """Of the name's words after `update`: NUMBER, perhaps `critic`, then what it is."""
    update, *rest = words
    whose = "critic's " if rest[0] == "critic" else ""
    rest = rest[1:] if whose else rest
    if rest[0] == "gradient":
        masters = session.learner.optimizers()[-1 if whose else 0][2]
        return f"{whose}gradient of {list(masters)[int(rest[1])]} in update {update}"
    return f"{whose}{rest[2]} of micro-batch {rest[1]} in update {update}"


def _stepped(session: Session, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of what an optimizer steps, in the order of its numbers."""
    names = {master.param: name for _, _, masters in session.learner.optimizers() for name, master in masters.items()}
    return [names[param] for group in optimizer.param_groups for param in group["params"]]


def _hex(value: int | None) -> str:
    return "nothing" if value is None else f"{value:016x}"
