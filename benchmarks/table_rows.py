"""What the tables of `table.py` say: rows with their goals, and how a figure is read from raw results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from common import SPEC

Raw = dict[str, dict[str, Any]]  # piece -> {"complete", "seconds", "rows"}
LOWER = ("_ms", " ms", "_s", "seconds", "GiB")  # ends of keys of which less is better


@dataclass(frozen=True)
class At:
    """A figure in the raw results: of a piece, by key, and by batch size or work (a switch, a variant) if the piece has
    several. Rounds of one thing are a median; of several things (attentions, pieces) it is the best."""

    piece: str | tuple[str, ...]
    key: str
    batch: int | None = None
    work: str = ""

    @property
    def pieces(self) -> tuple[str, ...]:
        return (self.piece,) if isinstance(self.piece, str) else self.piece


@dataclass(frozen=True)
class Computed:
    """A figure made of several; its row says so."""

    parts: tuple[At, ...]
    make: Callable[..., float]
    how: str  # in words

    @property
    def pieces(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.pieces)


Figure = At | Computed


@dataclass(frozen=True)
class Row:
    """`ours` against `base` of the same run. `how` makes the result that the goal is about:

    rate   ours / base, more is better            time   base / ours, for what takes less time
    cost   ours / base - 1, at most the goal      share  ours itself, at least the goal, in percent
    below  ours itself, at most the goal          above  ours itself, at least the goal
    """

    what: str
    ours: Figure
    base: Figure | None
    against: str
    how: str
    goal: float | None  # none: told for comparison
    unit: str
    peak: str


COMPUTE: dict[str, Callable[[float, float], float]] = {
    "rate": lambda ours, base: ours / base, "time": lambda ours, base: base / ours,
    "cost": lambda ours, base: ours / base - 1, "share": lambda ours, base: ours, "below": lambda ours, base: ours,
    "above": lambda ours, base: ours,
}
AT_MOST, NEEDS_BASE = ("cost", "below"), ("rate", "time", "cost")


def goal_text(row: Row) -> str:
    if row.goal is None:
        return ""
    if row.how in ("rate", "time"):
        return f"≥ {row.goal:.4g}x"
    if row.how in ("cost", "share"):
        return f"{'≤' if row.how == 'cost' else '≥'} {row.goal:.0%}"
    return f"{'≤' if row.how == 'below' else '≥'} {row.goal:.4g} {row.unit}".rstrip()


def result_text(row: Row, value: float) -> str:
    if row.how in ("rate", "time"):
        text = f"{value:.2f}x"
        # not to be rounded up to the goal
        just_below = row.goal is not None and value < row.goal and text == f"{row.goal:.2f}x"
        return f"{value:.3f}x" if just_below else text
    if row.how in ("cost", "share"):
        return f"{value:+.1%}" if row.how == "cost" else f"{value:.0%}"
    return f"{value:,.{1 if row.unit in ('ms', 's') and value < 100 else 0}f} {row.unit}".rstrip()


# ---- reading --------------------------------------------------------------------------------------------------------


def found(raw: Raw, at: At) -> list[list[float]]:
    """The values of each thing that `at` names, one a round."""
    groups: dict[tuple[str, str], list[float]] = {}
    for piece in at.pieces:
        for row in raw.get(piece, {}).get("rows", []):
            if (at.batch is not None and row["batch"] != at.batch) or (at.work and row.get("work") != at.work):
                continue
            if "error" in row or "note" in row:
                continue
            if at.key not in row and row.get("engine", "").startswith("peer"):
                continue  # another engine need not report everything
            groups.setdefault((piece, row.get("work", "")), []).append(row[at.key])
    return list(groups.values())


def best(raw: Raw, at: At) -> list[float]:
    """The rounds of the best thing; none if none has been run."""
    pick = min if at.key.endswith(LOWER) else max
    return pick(found(raw, at), key=median, default=[])


def look(raw: Raw, at: Figure | None) -> float | None:
    """The figure; None if it has not been run. A row without the key is our mistake, and raises."""
    if at is None:
        return None
    if isinstance(at, Computed):
        parts = [look(raw, part) for part in at.parts]
        return None if any(part is None for part in parts) else at.make(*parts)
    values = best(raw, at)
    return median(values) if values else None


def rounds_text(raw: Raw, at: Figure | None) -> str:
    """How many rounds, and by how much the largest exceeds the smallest."""
    values = [] if at is None or isinstance(at, Computed) else best(raw, at)
    if not values:
        return ""
    return f"{len(values)}, {max(values) / min(values) - 1:.1%}" if len(values) > 1 and min(values) > 0 else "1"


@dataclass(frozen=True)
class Reading:
    """A row with its figures; None where a piece has not been run."""

    row: Row
    ours: float | None
    base: float | None
    result: float | None
    peak: float | None
    rounds: str = ""

    @property
    def met(self) -> bool | None:
        if self.result is None or self.row.goal is None:
            return None
        return self.result <= self.row.goal if self.row.how in AT_MOST else self.result >= self.row.goal

    def cells(self) -> list[str]:
        """what, ours, baseline, result, goal, verdict, peak GiB"""
        row = self.row
        told = self.base is not None or row.how != "share"  # a share is for comparison; not every engine reports it
        base = f"{_number(self.base, row.unit)} ({row.against})" if row.base is not None and told else ""
        result = "not run" if self.result is None else result_text(row, self.result)
        verdict = {True: "met", False: "missed", None: ""}[self.met]
        peak = "" if self.peak is None else f"{self.peak:.0f}"
        return [row.what, _number(self.ours, row.unit), base, result, goal_text(row), verdict, peak]


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "not run"
    if unit == "share":
        return f"{value:.0%}"
    return (f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}").rstrip()


def read(raw: Raw, row: Row) -> Reading:
    ours, base = look(raw, row.ours), look(raw, row.base)
    result = None
    if ours is not None and (base is not None or row.how not in NEEDS_BASE):
        result = COMPUTE[row.how](ours, 0.0 if base is None else base)
    at = row.ours
    peaks = best(raw, At(at.piece, row.peak, at.batch, at.work)) if isinstance(at, At) and row.peak else []
    rounds = [text for text in (rounds_text(raw, row.ours), rounds_text(raw, row.base)) if text]
    return Reading(row, ours, base, result, max(peaks, default=None), " / ".join(rounds))


def pieces_of(row: Row) -> set[str]:
    """The pieces that the row is read from."""
    return {name for figure in (row.ours, row.base) if figure is not None for name in figure.pieces}


# ---- the first goals ------------------------------------------------------------------------------------------------


def _speed(what: str, ours: str, base: str, against: str, batch: int, goal: float) -> Row:
    key = "tokens/s"
    return Row(what, At(ours, key, batch), At(base, key, batch), against, "rate", goal, "tok/s", "peak GiB")


def _floor(what: str, precision: str) -> Row:
    key = "share of floor"
    base = At(f"peer rollout {precision}", key, 64)
    return Row(what, At(f"rollout {precision}", key, 64), base, "vLLM", "share", 0.75, "share", "peak GiB")


def _cost(what: str, piece: str, key: str, peak: str) -> Row:
    return Row(what, At(piece, key), At(f"{piece} nonexact", key), "non-exact", "cost", 0.02, key.split("_")[-1], peak)


GOALS = [
    _speed("rollout, batch 64, FP8", "rollout fp8", "peer rollout bf16", "vLLM BF16", 64, 1.5),
    _speed("rollout, batch 256, FP8", "rollout fp8", "peer rollout bf16", "vLLM BF16", 256, 1.35),
    _speed("rollout, batch 64, FP8, FP8 cache", "rollout fp8 kv8", "peer rollout bf16", "vLLM BF16", 64, 1.5),
    _speed("rollout, batch 256, FP8, FP8 cache", "rollout fp8 kv8", "peer rollout bf16", "vLLM BF16", 256, 1.35),
    _speed("rollout, batch 64, BF16", "rollout bf16", "peer rollout bf16", "vLLM BF16", 64, 1.1),
    _speed("rollout, batch 256, BF16", "rollout bf16", "peer rollout bf16", "vLLM BF16", 256, 1.1),
    _speed("rollout, batch 64, prompt 8192 + 512", "long fp8", "peer long fp8", "vLLM FP8", 64, 1.1),
    _speed("the same, FP8 cache", "long fp8 kv8", "peer long fp8", "vLLM FP8", 64, 1.1),
    Row("actor update, FP8", At("update fp8", "update_ms"), At("update bf16", "update_ms"), "our BF16", "time", 1.5,
        "ms", "update peak GiB"),
    Row("BF16 update, share of 785 TFLOP/s", At("update bf16", "MFU"), None, "", "share", 0.5, "share",
        "update peak GiB"),
    Row("reference log-probs, FP8", At("update fp8", "logprob_ms"), At("update bf16", "logprob_ms"), "our BF16", "time",
        1.7, "ms", "logprob peak GiB"),
    Row("whole RL step, 4K new tokens, FP8", At("whole fp8", "whole_s"), At("whole bf16", "whole_s"), "our BF16",
        "time", 1.4, "s", "whole peak GiB"),
    Row("whole RL step, FP8, FP8 cache", At("whole fp8 kv8", "whole_s"), At("whole bf16", "whole_s"), "our BF16",
        "time", 1.4, "s", "whole peak GiB"),
    _cost("cost of exactness, whole step, FP8", "whole fp8", "whole_s", "whole peak GiB"),
    _cost("cost of exactness, update, FP8", "update fp8", "update_ms", "update peak GiB"),
    _cost("cost of exactness, update, BF16", "update bf16", "update_ms", "update peak GiB"),
    Row("publishing after an update, FP8", At("update fp8", "publish_ms"), None, "", "below", 30, "ms",
        "publish peak GiB"),
    _floor("decode step of the floor, batch 64, FP8", "fp8"),
    _floor("decode step of the floor, batch 64, BF16", "bf16"),
]

# ---- rollouts as RL has them ----------------------------------------------------------------------------------------

VLLM_BEST = "vLLM FP8, FP8 KV"


def _rate(
    what: str, work: str, switch: str, peer: str, against: str, goal: float | None, batch: int | None = None
) -> Row:
    key = "tokens/s"
    return Row(what, At(work, key, work=switch), At(peer, key, batch), against, "rate", goal, "tok/s", "peak GiB")


def _group(size: int, prompt: int, switch: str, goal: float | None = None) -> Row:
    work, how = f"groups of {size}, prompt {prompt}", "merged" if switch == "merged" else "not merged"
    what = f"groups of {size}, {prompt} + 1024, batch 256, {how}"
    return _rate(what, work, switch, f"peer {work}", f"{VLLM_BEST}, prefix caching", goal)


def _never(work: str, what: str) -> Row:
    ours, base = (At(work, "seconds", work=switch) for switch in ("never", "plain"))
    return Row(f"cost of drafts that never hold, {what}", ours, base, "no drafts", "cost", 0.02, "s", "")


def _alone(keys: int) -> Row:
    ours = At(f"alone {keys}", "share of floor", work="plain")
    return Row(f"one sequence of {keys:,} keys: decode step of its floor (4.47 TB/s)", ours, None, "", "share", 0.6,
               "share", "peak GiB")


def _whole(what: str, goal: float) -> Row:
    return Row(what, At("whole fp8 kv8", "whole_s"), At("whole bf16 before", "whole_s"), "our BF16 of 107d9e3", "time",
               goal, "s", "whole peak GiB")


def _bits(key: str) -> Computed:
    works = "unique 64", "groups of 16, prompt 4096", "ragged", "alone 10000"
    return Computed(tuple(At(work, key, work="bits") for work in works), lambda *parts: float(sum(parts)), "sum")


ROLLOUTS = [
    _rate("unique prompts, 64 x (512 + 1024)", "unique 64", "plain", "peer unique bf16", "vLLM BF16", 1.9, 64),
    _rate("unique prompts, 256 x (512 + 1024)", "unique 256", "plain", "peer unique bf16", "vLLM BF16", 1.8, 256),
    _rate("the same, 64", "unique 64", "plain", "peer unique fp8 kv8", VLLM_BEST, 1.55, 64),
    _rate("the same, 256", "unique 256", "plain", "peer unique fp8 kv8", VLLM_BEST, 1.5, 256),
    _group(16, 4096, "merged", 2.5),
    _group(16, 4096, "plain"),
    _rate("ragged, 512 answers over 256 slots, no drafts", "ragged", "plain", "peer ragged", VLLM_BEST, 2.0),
    _rate("the same, drafts forced to hold at 0.6", "ragged", "drafts", "peer ragged", VLLM_BEST, 2.5),
    Row("compilation in the first rollout of a fresh machine", At("compilation", "seconds", work="sum"), None, "",
        "below", 40, "s", ""),
    _alone(10_000),
    _alone(32_768),
    _whole("whole RL step, 64 x 4K, FP8, FP8 cache", 1.55),
    _never("unique 64", "batch 64"),
    _never("alone 10000", "one sequence"),
    Row("answers with other bits than plain ones: merged, drafts", _bits("different"), _bits("compared"), "compared",
        "below", 0, "", ""),
]
OTHER_GROUPS = [
    _group(size, prompt, switch)
    for size in (16, 8) for prompt in (512, 2048, 4096, 8192) for switch in ("merged", "plain")
    if (size, prompt) != (16, 4096)
]

# ---- the update -----------------------------------------------------------------------------------------------------

FOREIGN = ("foreign liger", "foreign compile")
NEW, TRAINS = "BF16 masters and moments", "FP32 masters, 8-bit moments"


def foreign_seconds(rollout_s: float, tflops: float, sequences: int = 64, length: int = 512 + 4096) -> float:
    """A step of another engine and another trainer: the rollout as measured, the update at the measured speed."""
    from bench_step import flops

    return rollout_s + flops(SPEC.num_layers, [length] * sequences, 3) / tflops / 1e12


def _tflops(what: str, piece: str) -> Row:
    return Row(what, At(piece, "TFLOP/s", work="lean"), None, "", "above", 820, "TFLOP/s", "peak GiB")


def _shared(case: str, goal: float) -> Row:
    ours, base = (At("shared prompts", f"{how} update ms", work=case) for how in ("shared", "packed"))
    what = f"update, {case.replace('x', ', ').replace('+', ' + ')} samples share the prompt, 18 layers"
    return Row(what, ours, base, "whole sequences", "time", goal, "ms", "shared update peak GiB")


_BOTH = Computed(
    (At("peer whole bf16", "seconds"), At(FOREIGN, "TFLOP/s")), foreign_seconds,
    "vLLM's rollout as measured, and the update at the foreign trainer's measured speed",
)
UPDATES = [
    _tflops(f"update, 32K tokens of 8K, {NEW}", "update"),
    _tflops(f"the same, {TRAINS}", "update that trains"),
    Row(f"update against the best foreign trainer, {NEW}", At("update", "TFLOP/s", work="lean"), At(FOREIGN, "TFLOP/s"),
        "BF16, transformers with Liger or torch.compile", "rate", 2.0, "TFLOP/s", "peak GiB"),
    Row(f"the same, {TRAINS}", At("update that trains", "TFLOP/s", work="lean"), At(FOREIGN, "TFLOP/s"),
        "all in BF16", "rate", 2.0, "TFLOP/s", "peak GiB"),
    Row("reference log-probs, 32K tokens", At("update", "logprob_ms", work="reference pass"),
        At(FOREIGN, "logprob_ms"), "foreign BF16", "below", 630, "ms", "peak GiB"),
    _shared("2048+1024x8", 1.9),
    _shared("8192+1024x8", 3.5),
    _whole("whole RL step, 64 x 4K, FP8, FP8 cache", 1.6),
    Row("the same against vLLM BF16 + the best foreign trainer, *computed*", At("whole fp8 kv8", "whole_s"), _BOTH,
        "computed of parts", "time", 2.0, "s", "whole peak GiB"),
    Row(f"peak memory of the update, {NEW}", At("update", "peak GiB", work="lean"), None, "", "below", 110, "GiB", ""),
    Row(f"the same, {TRAINS}", At("update that trains", "peak GiB", work="lean"), None, "", "below", 110, "GiB", ""),
    Row("cost of exactness, update", At("update", "update_ms", work="lean"),
        At("update", "update_ms", work="lean nonexact"), "non-exact", "cost", 0.02, "ms", "peak GiB"),
    Row("cost of exactness, whole step", At("whole exact", "whole_s"), At("whole nonexact", "whole_s"),
        "non-exact", "cost", 0.02, "s", "whole peak GiB"),
]
