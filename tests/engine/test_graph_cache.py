"""All graphs of an engine in one cache: what runs, is captured and replayed in which order, and what goes when."""

from __future__ import annotations

import gc
import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import hopper_inputs
import numpy as np
import pytest
from hash_model import Letters, real_model
from replays import Mixed, Replays, Static, graph_cache

from jetrl.engine.engine import PagedEngine
from jetrl.engine.graphs import cache
from jetrl.engine.graphs.cache import GraphCache, HeldStep, own_or_larger
from jetrl.engine.graphs.decode import GraphSize
from jetrl.engine.graphs.drafts import DraftSize
from jetrl.engine.graphs.mixed import MixedSize
from jetrl.engine.plan import Plan
from jetrl.engine.runner import ModelRunner
from jetrl.engine.settings import EngineSettings
from jetrl.engine.speculation.depth import DepthRule
from jetrl.engine.speculation.sources import SOURCES
from jetrl.engine.speculation.speculator import Speculator
from jetrl.kernels.dispatch import load_backend
from jetrl.types import Request, SamplingParams, WeightSet

KINDS = {GraphSize: "d", DraftSize: "s", MixedSize: "m"}

# What ran, as the three holders of graphs before `GraphCache` had it: d decode, s with drafts, m with prompts, and the
# size; "!" is a capture, "*n" n times in a row.
BEFORE = """
d8.32.1.0 d8.32.1.0! d8.32.1.0*6 m4.2.64.32 m4.2.64.32! d8.32.1.0*7 m4.2.64.32 s8.32.3.0 s8.32.3.0! s8.32.3.0
s8.32.1.0 s8.32.1.0! s8.32.1.0 d8.32.0.0 d8.32.0.0! d8.32.0.0*7 s8.32.3.0*2 s8.32.1.0 s2.32.1.0 s2.32.1.0!
d2.32.0.0 d2.32.0.0! d2.32.0.0*5 d1.32.0.0 d1.32.0.0! d1.32.0.0 s8.32.3.1 s8.32.3.1! s8.32.3.1*2 m4.2.64.32*3
s8.32.3.1 s8.32.1.1 s8.32.1.1! s8.32.1.1*2 m8.2.64.32 m8.2.64.32! s8.32.1.0 d8.32.0.0*8 s8.32.3.0*2 s8.32.1.0
s4.32.1.0 s4.32.1.0! d8.32.0.0*2 d4.32.0.0 d4.32.0.0! d4.32.0.0*3 d2.32.0.0*2 s2.32.3.0 s2.32.3.0! s2.32.3.0
release s8.32.1.1 s8.32.1.1! s8.32.1.1*4 m4.2.64.32 m4.2.64.32! d8.32.1.0 d8.32.1.0! d8.32.1.0*6 m4.2.64.32
d8.32.0.0 d8.32.0.0! d8.32.0.0*2 s8.32.3.0 s8.32.3.0! s8.32.3.0 s8.32.1.0 s8.32.1.0! s8.32.1.0 d8.32.0.0*8
s8.32.3.0*2 s8.32.1.0 s2.32.1.0 s2.32.1.0! d2.32.0.0 d2.32.0.0! d2.32.0.0*3
"""


class Logged(GraphCache):
    """Writes down what runs and what is captured."""

    def __init__(self, model: Any) -> None:
        super().__init__(self, model)  # type: ignore[arg-type]
        self.lines: list[str] = []

    device, make_room = Replays.device, Replays().make_room

    def held(self, size: Any, make: Any) -> Any:
        return super().held(size, lambda size: self._static(make(size)))

    def _static(self, made: HeldStep[Any, Any, Any]) -> HeldStep[Any, Any, Any]:
        name = KINDS[type(made.size)] + ".".join(str(int(n)) for n in made.size)
        static = made.step if isinstance(made.step, Static) else Static(made.step)

        def step() -> Any:
            self.lines.append(name)
            return static()

        made.step, step.name, step.static = step, name, static  # type: ignore[attr-defined]
        return made

    def __call__(self, step: Any) -> tuple[Any, Any]:
        """The capture."""
        self.lines.append(f"{step.name}!")
        assert step.static.runs == 1, "a step runs once before its capture"
        return SimpleNamespace(replay=step), step.static.found

    def text(self) -> list[str]:
        counted = [(line, len(list(same))) for line, same in itertools.groupby(self.lines)]
        return [line if n == 1 else f"{line}*{n}" for line, n in counted]


class Runner(ModelRunner):
    """Takes the graphs wherever there are any, on a CPU."""

    on_graphs = True  # type: ignore[assignment]

    @property
    def graphs(self) -> GraphCache:
        self._graphs = self._graphs or Logged(self.model)
        return self._graphs

    def _hidden(self, plan: Plan) -> Any:
        if self.mixed is None:
            self.mixed = Mixed(self.model, self.cache, self.graphs)
        return super()._hidden(plan)


class Turns(DepthRule):
    """Drafts or none by the number of the burst, never by a clock."""

    def choose(self, batch: int, most_rows: int) -> int:
        return (0, 0, 0, 3, 1, 0)[self._bursts // 2 % 6]

    def compares(self) -> bool:
        return self._bursts % 3 == 0


def test_a_fixed_workload_runs_captures_and_replays_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps, drafts and prompts in turns; published weights keep their graphs, a released cache does not."""
    monkeypatch.setattr(  # the CPU draws with `sample_rows`; a padding row is at position 0
        load_backend("reference"), "sample", lambda *args: hopper_inputs.draw(*args[:3], args[3].clamp_min(1)),
        raising=False,
    )
    g, model = np.random.default_rng(3), real_model("bf16", "bf16")
    prompts = [tuple(g.integers(1, 40, n).tolist()) for n in (5, 17, 9, 30, 3, 12)]
    cut = {i: 0.9 for i in (15, 20, 23)}
    requests = [
        Request(i, prompts[i // 3 % 6], SamplingParams(4 + 5 * (i % 4), seed=i, top_p=cut.get(i, 1.0)))
        for i in range(24)
    ]
    settings = EngineSettings(page_size=4, max_num_seqs=6, max_burst=4, max_tokens_per_step=24)
    plain, engine = (PagedEngine(model, Letters(), "flow", settings) for _ in range(2))
    plain.load(WeightSet(1, "flow", {}))
    expected = plain.generate(requests)
    engine.speculator, engine.runner = Speculator(Turns(len(SOURCES), 7), 6), Runner(model, settings)
    graphs = engine.runner.graphs
    assert isinstance(graphs, Logged)
    for version in (1, 2, 3):
        if version == 3:
            engine.runner.release()
            graphs.lines.append("release")
        engine.load(WeightSet(version, "flow", {}))
        found = engine.generate(requests)
        assert [(c.tokens.tolist(), c.logprobs.tolist()) for c in found] == [
            (c.tokens.tolist(), c.logprobs.tolist()) for c in expected
        ]
    assert graphs.text() == BEFORE.split()
    assert graphs.take()[0] == sum(line.endswith("!") for line in graphs.lines) and graphs.take() == (0, 0.0)


class Model:
    place = 1

    def addresses(self) -> tuple[int, ...]:
        return (self.place,)


def step_of(size: Any) -> HeldStep[Any, Any, Any]:
    return HeldStep(size, None, Static(lambda: None))


def run(graphs: GraphCache, rows: int, width: int = 32) -> HeldStep[Any, Any, Any]:
    held = graphs.held(graphs.choose(GraphSize(rows, width, True), own_or_larger), step_of)
    graphs.run(held)
    return held


def test_equal_numbers_of_two_kinds_are_two_steps() -> None:
    graphs = graph_cache(Model())
    sizes = GraphSize(4, 32, True, 0), DraftSize(4, 32, 1, False)
    assert sizes[0] == sizes[1], "as tuples"
    steps = [graphs.held(size, step_of) for size in sizes]
    assert steps[0] is not steps[1] and graphs.sizes(GraphSize) == [sizes[0]]
    graphs.drop(GraphSize)
    assert not graphs.sizes(GraphSize) and graphs.sizes(DraftSize) == [sizes[1]]


def test_where_memory_is_short_the_step_that_was_not_used_for_longest_goes() -> None:
    capture = Replays(room=False)
    graphs = graph_cache(Model(), capture)
    for i in range(cache._LEAST):
        run(graphs, 4 ** (i + 1))  # no size serves another
    kept = graphs.sizes(GraphSize)
    assert len(kept) == cache._LEAST, "so many stay, however short memory is"
    first = run(graphs, 4)  # the oldest capture is used again
    assert capture.number == len(kept)
    gone = weakref.ref(graphs.held(kept[1], step_of).step)
    graphs.held(kept[0], step_of)
    for size in kept[2:]:
        graphs.held(size, step_of)
    run(graphs, 1)
    assert len(graphs.sizes(GraphSize)) == cache._LEAST and kept[1] not in graphs.sizes(GraphSize)
    gc.disable()
    try:
        assert gone() is None, "its memory is free at once"
    finally:
        gc.enable()
    assert run(graphs, 4) is first
    capture.room = True
    run(graphs, 2, 64)
    assert len(graphs.sizes(GraphSize)) == cache._LEAST + 1, "with room none goes"


def test_a_step_that_went_has_to_prove_again_that_it_is_needed() -> None:
    graphs = graph_cache(Model(), Replays(room=False))
    for _ in range(3):
        run(graphs, 100)
    run(graphs, 150)
    for i in range(1, cache._LEAST):
        run(graphs, 4**i * 1000)
    assert GraphSize(100, 32, True) not in graphs.sizes(GraphSize)
    run(graphs, 100)
    run(graphs, 100)
    assert GraphSize(100, 32, True) not in graphs.sizes(GraphSize), "a larger one serves it at first"
    run(graphs, 100)
    assert GraphSize(100, 32, True) in graphs.sizes(GraphSize)


def test_weights_that_move_take_all_steps_with_them() -> None:
    model = Model()
    graphs = graph_cache(model)
    graphs.check_addresses()
    run(graphs, 4)
    graphs.check_addresses()
    assert graphs.sizes(GraphSize)
    model.place = 2
    graphs.check_addresses()
    assert not graphs.sizes(GraphSize)
    run(graphs, 4)
    graphs.check_addresses()
    assert graphs.sizes(GraphSize), "captured with the new places"


def test_a_first_run_that_fails_is_a_first_run_again() -> None:
    graphs, fails = graph_cache(Model()), [True]

    def step() -> int:
        if fails.pop():
            raise ZeroDivisionError
        return 3

    size = GraphSize(1, 32, True)
    held = graphs.held(size, lambda size: HeldStep(size, None, Static(step)))
    with pytest.raises(ZeroDivisionError):
        graphs.run(held)
    fails += [False, False]
    assert graphs.held(size, step_of) is held and held.graph is None
    assert graphs.run(held) == 3 and held.graph is not None and graphs.number == 1
