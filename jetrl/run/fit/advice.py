"""Whether a run fits a GPU, as a table by part, and which settings would make it fit (`run/fit/memory.py` predicts)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from jetrl.config import Config, load_config, resolve
from jetrl.config.keys import marked, value_of
from jetrl.config.load import quiet
from jetrl.config.markers import SavesMemory
from jetrl.config.paths import absolute_paths
from jetrl.errors import OutOfMemory, UserError, gpu_full
from jetrl.parallel.progress import PROGRESS, came_by_lost_contact
from jetrl.parallel.world import World
from jetrl.run.fit.memory import GIB, SPARE, Memory, predict
from jetrl.run.prepare import load_spec
from jetrl.spec import ModelSpec

GPUS = {"h100": int(79.1 * GIB), "h200": int(139.8 * GIB)}  # as torch reports them
MOST_RANKS = 64
_ROLLOUT = ("rollout", "eval", "evaluation")  # phases in which the engine runs


@dataclass(frozen=True, slots=True)
class Change:
    """Settings with other values, by full key."""

    values: tuple[tuple[str, Any], ...]

    def apply(self, config: Config) -> Config:
        for key, value in self.values:
            section, _, name = key.partition(".")
            part = getattr(config, section).model_copy(update={name: value})
            config = config.model_copy(update={section: part})
        return config

    def __str__(self) -> str:
        return " ".join(f"{key}={str(value).lower()}" for key, value in self.values)


def changes(config: Config) -> list[list[Change]]:
    """What could be set to save memory, one list of values for each setting, cheapest first (`SavesMemory`)."""
    found = []
    for key, way in sorted(marked(SavesMemory).items(), key=lambda each: each[1].cost):
        options = [Change(((key, value),)) for value in _better(config, key, way)]
        found.append(options + [Change((*option.values, *way.also)) for option in options if way.also])
    return [options for options in found if options]


def _better(config: Config, key: str, way: SavesMemory) -> Sequence[Any]:
    """The values of a key that need less memory than the one it has, mildest first."""
    if way.unless is not None and value_of(config, way.unless[0]) == way.unless[1]:
        return []
    if not isinstance(way.ways, Mapping):
        return way.ways(config)
    value = value_of(config, key)
    return [way.ways[value]] if value in way.ways else []


def cure(config: Config, fits: Callable[[Config], bool]) -> Change | None:
    """The first single setting, else pair, else some of the list from its start, with which the run `fits`."""
    options = changes(config)
    for size in (1, 2):
        for places in sorted(combinations(range(len(options)), size), key=lambda c: c[::-1]):
            if (found := _first(config, [options[i] for i in places], fits)) is not None:
                return found
    for count in range(3, len(options) + 1):
        chosen = [values[-1] for values in options[:count]]
        if fits(_joined(chosen).apply(config)):
            return _relaxed(config, options, chosen, fits)
    return None


def _joined(chosen: Sequence[Change]) -> Change:
    return Change(tuple(value for change in chosen for value in change.values))


def _relaxed(
    config: Config, options: Sequence[Sequence[Change]], chosen: list[Change], fits: Callable[[Config], bool]
) -> Change:
    """`chosen` without what is not needed: beginning with the most expensive setting, each is left out, or taken at its
    mildest value, if the others then still suffice."""
    for i in reversed(range(len(chosen))):
        for milder in (Change(()), *options[i]):
            if fits(_joined([*chosen[:i], milder, *chosen[i + 1 :]]).apply(config)):
                chosen[i] = milder
                break
    return _joined(chosen)


def _first(config: Config, options: Sequence[Sequence[Change]], fits: Callable[[Config], bool]) -> Change | None:
    """The mildest values of these settings that fit: the first setting's vary slowest."""
    combined: list[tuple[tuple[str, Any], ...]] = [()]
    for values in options:
        combined = [(*before, *change.values) for before in combined for change in values]
    return next((Change(one) for one in combined if fits(Change(one).apply(config))), None)


def advice(config: Config, spec: ModelSpec, ranks: int, capacity: int, of: Callable[[Memory], int]) -> str:
    """What would make `of` the memory fit: settings as overrides, and how many GPUs."""

    def fits(changed: Config, count: int = ranks) -> bool:
        memory = predict(changed, spec, count, capacity)
        return of(memory) + SPARE <= capacity and memory.sequences >= 1

    found = cure(config, fits)
    more = next((n for n in (ranks << i for i in range(1, 7)) if n <= MOST_RANKS and fits(config, n)), None)
    ways = [f"set {found}"] if found is not None else []
    ways += [f"use {more} GPUs (--nproc {more})"] if more is not None else []
    if not ways:
        return f"no settings that are known here make it fit on up to {MOST_RANKS} GPUs"
    return ", or ".join(ways)


def gpu_named(text: str) -> tuple[str, int]:
    """Name and bytes of `--gpu`: h100, h200, or GiB."""
    if text.lower() in GPUS:
        return text.upper(), GPUS[text.lower()]
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 1 <= size < 10_000:
        raise UserError(f"--gpu {text}: write h100, h200, or the GPU's memory in GiB, such as 80.")
    return f"GPU of {size:g} GiB", int(size * GIB)


def on_gpu(config: Config) -> Config:
    """A config as written, resolved as on a GPU: sizes that are not set differ there."""
    kernels = "auto" if config.kernels == "reference" else config.kernels
    return resolve(config.model_copy(update={"device": "cuda", "kernels": kernels}), cuda_available=True)


def report(recipe: Path, overrides: Sequence[str], spec: ModelSpec, ranks: int, gpu: str) -> Iterator[str]:
    """The lines that `--dry-run` prints. UserError, after them, if the run cannot fit this machine's GPU.

    That is what counts unless `gpu` names another, or the run is one for a CPU; without any, an H200.
    """
    given = load_config(recipe, overrides, quiet)
    config, is_here = on_gpu(given), not gpu and given.device != "cpu" and torch.cuda.is_available()
    if is_here:
        properties = torch.cuda.get_device_properties(0)
        name, capacity = properties.name, properties.total_memory
    else:
        name, capacity = gpu_named(gpu or "h200")
    memory = predict(config, spec, ranks, capacity)
    yield from table(memory, config, ranks, f"{name} ({capacity / GIB:.1f} GiB)")
    if not gpu and not is_here:
        others = [f"{key.upper()}: {_answer(config, spec, ranks, size)}" for key, size in GPUS.items()]
        yield f"Fits {'; '.join(others)} (--gpu for another)."
    if memory.fits(capacity):
        yield f"It fits: {SPARE / GIB:.0f} GiB are kept for the GPU's context and gaps in its memory."
        return
    text = f"{memory.peak / GIB:.1f} GiB and {SPARE / GIB:.0f} of reserve do not fit {name} ({capacity / GIB:.1f} GiB)"
    text = f"{text}: {advice(config, spec, ranks, capacity, lambda m: m.peak)}."
    if is_here:
        raise UserError(text)
    yield text


def _answer(config: Config, spec: ModelSpec, ranks: int, capacity: int) -> str:
    return "yes" if predict(config, spec, ranks, capacity).fits(capacity) else "no"


def table(memory: Memory, config: Config, ranks: int, gpu: str) -> Iterator[str]:
    """The memory by part in GiB, in 80 columns: what is held in the rollout, and in the update."""
    m, train = memory, config.train
    where = "one GPU" if ranks == 1 else f"each of {ranks} GPUs"
    yield f"Memory of {where}, predicted, in GiB, for {gpu}:"
    yield f"  {'':<46}{'rollout':>10}{'update':>10}"
    cache = f"KV cache ({config.quant.kv_cache}, {m.sequences:,} of {m.wanted:,} sequences at once)"
    rows: list[tuple[str, int | None, int | None]] = [
        (f"master weights ({train.master_dtype})", m.masters, m.masters),
        (f"Adam's moments ({train.optimizer_dtype})", m.moments, m.moments),
        ("published weights", m.published, m.published),
        ("rotary tables", m.tables, m.tables),
        ("reference policy, critic, teacher", m.others, m.others),
        (cache, m.cache, m.kept_cache),
        (f"gradients ({train.grad_dtype})", None, m.gradients),
        ("gradients on their way to their owners", None, m.in_flight),
        (f"activations of {m.tokens:,} tokens", None, max(m.activations, max(m.optimizer, m.judging) - m.passing)),
        ("logits and other passing tensors", m.rollout_passing, m.passing),
    ]
    rest = m.rollout - sum(row[1] or 0 for row in rows), m.update - sum(row[2] or 0 for row in rows)
    rows += [("workspace", *rest), ("together", m.rollout, m.update)]
    for what, rollout, update in rows:
        if rollout or update:
            yield f"  {what:<46}{_gib(rollout)}{_gib(update)}"
    if config.rollout.engine != "jetrl":
        yield f"  What {config.rollout.engine} holds is not known."
    if m.host:
        yield f"  {'host memory of each rank (moments)':<46}{_gib(m.host)}{_gib(m.host)}"
    if m.copy:
        yield f"  {'host memory of each rank (for checkpoints)':<46}{_gib(m.copy)}{_gib(m.copy)}"


def _gib(value: int | None) -> str:
    return f"{value / GIB:>10.2f}" if value else f"{'':>10}"


@contextmanager
def told_when_out_of_memory(config: Config, world: World) -> Iterator[None]:
    """An error of a full GPU (`gpu_full`) becomes OutOfMemory, which names the phase and settings that would help.

    The launcher names the rank. Where the prediction says that the run fits, the advice is for a tenth less.
    """
    try:
        yield
    except RuntimeError as error:
        if came_by_lost_contact(error) or not gpu_full(error):
            raise
        spec, phase = load_spec(absolute_paths(config))[1], PROGRESS.phase
        raise OutOfMemory(out_of_memory(config, spec, world.size, phase, _capacity(), _line(error))) from error


def out_of_memory(config: Config, spec: ModelSpec, ranks: int, phase: str, capacity: int, line: str) -> str:
    """The message for a GPU of `capacity` bytes that is full."""
    def of(memory: Memory) -> int:
        return memory.rollout if phase in _ROLLOUT else memory.update

    memory = predict(config, spec, ranks, capacity)
    predicted = of(memory)
    text = f"out of GPU memory in the phase {phase}, of {capacity / GIB:.1f} GiB ({predicted / GIB:.1f} predicted). "
    if phase not in (*_ROLLOUT, "warm start") and memory.kept_cache >= GIB / 10:
        text += (f"The KV cache of {memory.kept_cache / GIB:.1f} GiB stays during the update: set "
                 "rollout.keep_kv_cache=never to free it. ")
    if predicted + SPARE < 0.7 * capacity:
        text += "Something else holds memory there: another process, a reward function, or an engine of your own."
    else:
        aim = min(capacity, int(0.9 * predicted) + SPARE)
        text += (f"To need less: {advice(config, spec, ranks, aim, of)}. `jetrl train RECIPE --dry-run` shows memory "
                 "by part.")
    return f"{text} {line}"


def _capacity() -> int:
    if not torch.cuda.is_available():
        return GPUS["h200"]  # only in tests
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
