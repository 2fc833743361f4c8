"""Where two runs begin to differ: the first op, its index and both bit patterns.

Records are compared step by step and phase by phase, up to the first that differs. Both sides then compute that piece
here under taps (`replay/taps.py`), each from its own checkpoint and records. What one side has recorded and neither
computes is a fault of the other kind: it happened once, or under other code or another device.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl.config.keys import changes_no_bit
from jetrl.config.load import by_full_key
from jetrl.config.toml import toml_literal
from jetrl.errors import UserError
from jetrl.run.checkpoint import store
from jetrl.run.replay import keeping, record
from jetrl.run.replay.checks import Span, draw, learners_logprobs, spans_of, spoken
from jetrl.run.replay.record import StepRecord
from jetrl.run.replay.rerun import Rerun, Say, config_of, learn, opened, unlike
from jetrl.run.replay.taps import Trace, tapped
from jetrl.types import Group

Around = Callable[[], AbstractContextManager[Any]]
_ANYWAY = ("name", "output_dir")


@dataclass(frozen=True, slots=True)
class Bisected:
    """Where runs A and B part. `differences`: settings, versions and devices that are not the same. `step` None: of
    `compared` steps all are equal. `phase`: rollout, rewards, selection, advantages, batch, update or weights; `what`
    names the first value there that differs, `index` its first number, `bits` those of A and B. `here`: what both sides
    compute here, in words."""

    a: str
    b: str
    differences: tuple[str, ...]
    compared: tuple[int, ...]
    step: int | None = None
    phase: str | None = None
    recorded: str | None = None
    what: str | None = None
    index: tuple[int, ...] | None = None
    bits: tuple[str, str] | None = None
    here: str = ""

    @property
    def same(self) -> bool:
        return self.step is None


@dataclass(frozen=True, slots=True)
class _Found:
    """A difference of two records: its phase, what it is in words, both values; the digest's or span's own."""

    phase: str
    said: str
    bits: tuple[str, str] | None = None
    digest: str | None = None
    spans: tuple[Span, Span] | None = None
    place: int = 0


def bisect(
    a: Path, b: Path, say: Say = lambda text: None, around: tuple[Around, Around] = (nullcontext, nullcontext)
) -> Bisected:
    """Find where run folders A and B begin to differ. `around`: a context for all that each side computes."""
    if a.resolve() == b.resolve():
        raise UserError(f"{a} and {b} are the same run. Give two, such as a run and its repetition.")
    differences = [*_unlike_configs(a, b), *_unlike_machines(a, b)]
    steps = sorted({*record.steps_of(a)} & {*record.steps_of(b)})
    if not steps:
        raise UserError(_nothing_in_common(a, b))
    base = Bisected(str(a), str(b), tuple(differences), tuple(steps))
    for step in steps:
        ones = record.read(a, step), record.read(b, step)
        found = next(_compared(*ones), None)
        if found is not None:
            say(f"step {step} differs: {found.said}")
            return _located(replace(base, step=step, phase=found.phase, recorded=found.said), found, ones, say, around)
    return base


def _unlike_configs(a: Path, b: Path) -> Iterator[str]:
    mine, other = by_full_key(config_of(a)), by_full_key(config_of(b))
    for key in {**mine, **other}:
        if mine.get(key) != other.get(key) and key not in _ANYWAY and not changes_no_bit(key):
            yield f"{key} = {toml_literal(mine.get(key))} in A, {toml_literal(other.get(key))} in B"


def _unlike_machines(a: Path, b: Path) -> list[str]:
    steps = record.steps_of(a), record.steps_of(b)
    if not all(steps):
        return []
    mine, other = (record.read(run, of[-1]).made_with for run, of in zip((a, b), steps, strict=True))
    return [f"{key}: {text}" for key, text in unlike(mine, other, ("A", "B")).items()]


def _nothing_in_common(a: Path, b: Path) -> str:
    kept = [record.ranges(record.steps_of(run)) or "no steps" for run in (a, b)]
    return (
        f"No step is recorded in both runs: {a} keeps {kept[0]}, {b} keeps {kept[1]}. Keep more in the next runs "
        "(checkpoint.replay_steps)."
    )


# ---- records --------------------------------------------------------------------------------------------------------


def _compared(a: StepRecord, b: StepRecord) -> Iterator[_Found]:
    """The differences of two records of one step, in the order in which a step computes."""
    yield from _unlike_spans(a, b)
    yield from _unlike_rewards(a, b)
    learnt = [[group.prompt.index for group in one.learnt] for one in (a, b)]
    if learnt[0] != learnt[1]:
        yield _Found("selection", f"A learns from prompts {learnt[0]}, B from {learnt[1]}")
        return
    yield from _unlike_advantages(a, b)
    for name in {**a.digests, **b.digests}:
        values = a.digests.get(name), b.digests.get(name)
        if values[0] != values[1]:
            kind = name.partition("/")[0]
            phase = kind if kind in ("batch", "update") else "weights"
            yield _Found(phase, f"the digest {name}", _pair(values, lambda v: f"{v:016x}"), digest=name)


def _pair(values: Sequence[Any], shown: Callable[[Any], str]) -> tuple[str, str]:
    first, second = ("nothing" if value is None else shown(value) for value in values)
    return first, second


def _unlike_spans(a: StepRecord, b: StepRecord) -> Iterator[_Found]:
    for mine, other in zip_longest(spans_of(a), spans_of(b)):
        if mine is None or other is None:
            left = mine or other
            yield _Found("rollout", f"{left.name} has turns that the other run lacks")
            return
        where = f"{mine.name}, turn {mine.turn}"
        about = [(s.trajectory.request_id, s.version, s.start, s.end - s.start) for s in (mine, other)]
        for key, *values in zip(("request id", "weight version", "first token", "length"), *about, strict=True):
            if values[0] != values[1] and key != "length":
                yield _Found("rollout", f"the {key} of {where}", _pair(values, str), spans=(mine, other))
        if (prompts := [s.prefix(s.start) for s in (mine, other)])[0].tolist() != prompts[1].tolist():
            place = next((i for i, (x, y) in enumerate(zip(*prompts, strict=False)) if x != y), 0)
            bits = _pair([p[place] if place < len(p) else None for p in prompts], str)
            yield _Found("rollout", f"token {place}, before {where}", bits)
            return
        yield from _unlike_tokens(mine, other, where)


def _unlike_tokens(mine: Span, other: Span, where: str) -> Iterator[_Found]:
    for place in range(max(len(mine.drawn), len(other.drawn))):
        both = [s if place < len(s.drawn) else None for s in (mine, other)]
        drawn = [None if s is None else (int(s.drawn[place]), _bits_of(s.logprobs[place], "f")) for s in both]
        if drawn[0] != drawn[1]:
            said = f"token {mine.start + place} of {where}"
            bits = _pair(drawn, lambda v: f"{v[0]} with log-prob {v[1]}")
            yield _Found("rollout", said, bits, spans=(mine, other), place=place)
            return


def _bits_of(value: float, kind: str) -> str:
    return f"{value:.9g} (0x{struct.pack('>' + kind, value).hex()})"


def _groups(one: StepRecord) -> tuple[Group, ...]:
    return tuple(sorted((*one.learnt, *one.others), key=lambda group: group.prompt.index))


def _unlike_rewards(a: StepRecord, b: StepRecord) -> Iterator[_Found]:
    for mine, other in zip(_groups(a), _groups(b), strict=False):
        for key in ("rewards", "signals", "scores"):
            values = getattr(mine, key), getattr(other, key)
            if values[0] == values[1]:
                continue
            if key == "scores":
                yield _Found("rewards", f"the scores of prompt {mine.prompt.index}", _pair(values, str))
            for number, pair in enumerate(zip_longest(*map(tuple, values))):
                if pair[0] != pair[1] and key != "scores":
                    said = f"{key[:-1]} of completion {number} of prompt {mine.prompt.index}"
                    yield _Found("rewards", said, _pair(pair, lambda v: _bits_of(v, "d")))


def _unlike_advantages(a: StepRecord, b: StepRecord) -> Iterator[_Found]:
    for mine, other in zip(a.learnt, b.learnt, strict=True):
        for number, pair in enumerate(zip_longest(mine.advantages, other.advantages)):
            rows = [value if isinstance(value, tuple) else (value,) for value in pair]
            for place, values in enumerate(zip_longest(*rows)):
                if values[0] != values[1]:
                    token = f"token {place} of " if len(rows[0]) > 1 else ""
                    said = f"advantage of {token}completion {number} of prompt {mine.prompt.index}"
                    yield _Found("advantages", said, _pair(values, lambda v: _bits_of(v, "d")))
                    break


# ---- both sides compute ---------------------------------------------------------------------------------------------


Piece = Callable[[Rerun, Trace], None]


def _located(
    base: Bisected, found: _Found, ones: tuple[StepRecord, StepRecord], say: Say, around: tuple[Around, Around]
) -> Bisected:
    """Both sides compute the piece that differs; the answer names the first value of it that does."""
    pieces = _pieces(found, ones)
    runs = Path(base.a), Path(base.b)
    versions = [one.version if found.spans is None else found.spans[0].version for one in ones]
    known = dict[str, str]()

    def computed(side: int, wanted: str | None = None) -> Trace:
        say(f"{'AB'[side]} computes {'the step' if found.spans is None else 'the sequence'} under taps")
        trace = Trace(wanted)
        with around[side](), opened(runs[side], versions[side], say) as rerun:
            with trace.within("start"):
                keeping.add_weights(trace, rerun.session)
            rerun.require_tokens(ones[side])
            with tapped(rerun.session.model, trace):
                pieces[side](rerun, trace)
            for name, _ in trace.rows():
                known.setdefault(name, _words(name, rerun))
        return trace

    rows = [computed(side).rows() for side in (0, 1)]
    name = next((x[0] for x, y in zip_longest(*rows, fillvalue=("", 0)) if x != y), None)
    if name is None:
        return _not_here(base, found, dict(rows[0]), ones, known)
    a, b = (computed(side, name).kept for side in (0, 1))
    index, bits = _first(a, b)
    return replace(base, what=known.get(name, name), index=index, bits=bits, here="both sides differ here as well")


def _pieces(found: _Found, ones: tuple[StepRecord, StepRecord]) -> tuple[Piece, Piece]:
    if found.spans is not None:
        mine, other = found.spans
        # the same tokens on both sides: those of A up to the one that differs
        shorter = replace(mine, end=min(mine.end, mine.start + found.place + 1))
        return _sequence(shorter), _sequence(replace(shorter, version=other.version))
    first, second = (_step(one) for one in ones)
    return first, second


def _sequence(span: Span) -> Piece:
    """The learner's forward pass over a sequence, then its draws again by the engine. Where steps are CUDA graphs, no
    op is called at a replay, so there are the learner's alone."""

    def run(rerun: Rerun, trace: Trace) -> None:
        with trace.within("learner"):
            (values,) = learners_logprobs(rerun, [span])
            trace.add("log-probs", torch.from_numpy(values.copy()))
        if rerun.session.model.head_weight.device.type != "cpu":
            return
        with trace.within("sampler"):
            ((tokens, logprobs),) = draw(rerun, [span])
            count = span.end - span.start
            trace.add("tokens", torch.from_numpy(tokens[:count].copy()))
            trace.add("log-probs", torch.from_numpy(logprobs[:count].copy()))

    return run


def _step(one: StepRecord) -> Piece:
    def run(rerun: Rerun, trace: Trace) -> None:
        learnt = learn(rerun.session, one.learnt, one.step, one.next_prompt, trace)
        for group in learnt:
            rows = [a for value in group.advantages for a in (value if isinstance(value, tuple) else (value,))]
            numbers = [float("nan") if a is None else a for a in rows]
            trace.add(f"advantages of prompt {group.prompt.index}", torch.tensor(numbers, dtype=torch.float64))
        keeping.add_weights(trace, rerun.session)

    return run


def _words(name: str, rerun: Rerun) -> str:
    """A name of a trace for people."""
    if name.startswith("start/"):
        kept = name.removeprefix("start/")
        return f"{spoken(kept, rerun.session)}, before the step"
    kind, _, rest = name.partition("/")
    place, _, op = rest.rpartition("/")
    if "op " in op:
        where, _, call = op.partition("op ")
        said = f"op {call}" + (f" of {where.rstrip(', ')}" if where else "")
        if kind == "update":
            words = place.split("/")
            said += (f" in micro-batch {words[-1]} of" if "micro" in words else " in") + f" update {words[0]}"
        return f"{said} in the {kind}'s pass" if kind in ("learner", "sampler") else said
    if kind in ("batch", "update", "masters", "moments", "published"):
        return spoken(name, rerun.session)
    return name.replace("/", ": ")


def _not_here(
    base: Bisected, found: _Found, rows: Mapping[str, int], ones: tuple[StepRecord, StepRecord],
    known: Mapping[str, str],
) -> Bisected:
    """Both sides compute the same: whose record is it, and where are the bits of the other?"""
    name = found.digest
    said = "both sides compute the same here, bit for bit"
    if name is not None and name in rows:
        agree = ["AB"[side] for side in (0, 1) if ones[side].digests.get(name) == rows[name] % (1 << 64)]
        if agree:
            said += f", and it is what {' and '.join(agree)} recorded: the other's difference does not happen again"
        index, bits = _from_checkpoints(base, name)
        return replace(base, what=known[name], index=index, bits=bits or found.bits, here=said)
    index = None if found.spans is None else (found.spans[0].start + found.place,)
    return replace(base, what=found.said, index=index, bits=found.bits, here=said)


def _from_checkpoints(base: Bisected, name: str) -> tuple[tuple[int, ...] | None, tuple[str, str] | None]:
    """The first bits that differ of a master weight or a moment, if both runs have a checkpoint of that step."""
    kind, _, key = name.partition("/")
    folders = [Path(run) / "checkpoints" / f"step_{base.step:06d}" / "state" for run in (base.a, base.b)]
    if kind not in ("masters", "moments") or not all(folder.is_dir() for folder in folders):
        return None, None
    values = [store.whole(folder).get(key) for folder in folders]
    return _first(*values)


def _first(a: Tensor | None, b: Tensor | None) -> tuple[tuple[int, ...] | None, tuple[str, str] | None]:
    """The first index at which two tensors differ in a bit, and both patterns."""
    if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
        return None, _pair([a, b], lambda t: f"a tensor {t.dtype} {list(t.shape)}".replace("torch.", ""))
    words = [t.contiguous().view(-1).view(torch.uint8).view(t.numel(), -1) for t in (a, b)]
    unequal = (words[0] != words[1]).any(1).nonzero()
    if not len(unequal):
        return None, None
    place = int(unequal[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), a.shape))
    return index, _pair([a.view(-1)[place], b.view(-1)[place]], _pattern)


def _pattern(value: Tensor) -> str:
    data = bytes(value.reshape(1).view(torch.uint8).tolist())[::-1]  # little-endian
    shown = f"{float(value):.9g}" if value.is_floating_point() else str(int(value))
    return f"{shown} (0x{data.hex()})"
