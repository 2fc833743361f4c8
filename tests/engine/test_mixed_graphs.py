"""Short steps with prompts as graphs of fixed shapes: the same bits as plain steps, and few captures."""

from __future__ import annotations

import hopper_inputs
import numpy as np
import pytest
import torch
from hash_model import Letters, real_model
from replays import Mixed, graph_cache

from jetrl.engine.engine import PagedEngine
from jetrl.engine.graphs import mixed as mixed_graphs
from jetrl.engine.graphs.cache import GraphCache
from jetrl.engine.graphs.mixed import MixedSize, choose
from jetrl.engine.plan import Plan
from jetrl.engine.runner import ModelRunner
from jetrl.engine.settings import EngineSettings
from jetrl.types import Request, SamplingParams, WeightSet


def size(lead: int, *lengths: int, pages: int = 1) -> MixedSize:
    return MixedSize.of(lead, np.array(lengths), pages, 128)


@pytest.mark.parametrize(
    ("made", "expected"),
    [(size(255, 512), (256, 2, 576, 32)), (size(0, 63), (0, 2, 64, 32)), (size(3, 64), (4, 2, 128, 32)),
     (size(40, 5, 5, 5, pages=33), (48, 4, 64, 64)), (size(1, 7, 7, 7, 7), (1, 8, 64, 32))],
)
def test_sizes_have_room_for_a_part_of_padding(made: MixedSize, expected: tuple[int, ...]) -> None:
    assert made == expected


def test_the_table_of_pages_holds_the_padding() -> None:
    assert MixedSize.of(0, np.array([500]), 1, 4).width == 128


def test_which_steps_have_a_graph() -> None:
    need = size(250, 400)
    assert choose([], need, 2, 128) is None, "met twice: not worth a capture"
    assert choose([], need, 3, 128) == need and choose([need], need, 1, 128) == need
    assert choose([size(255, 512)], need, 1, 128) == size(255, 512)
    assert choose([size(255, 700)], need, 1, 128) is None, "more than a quarter for nothing"
    assert choose([size(0, 512)], size(3, 400), 1, 128) is None, "no sequence decodes there"
    assert choose([], size(255, 2000), 9, 128) is None, "long steps keep the device busy"
    assert choose([], size(255, 512, pages=1024), 9, 128) is None, "too much scratch"
    tight, many = MixedSize(0, 2, 64, 32), MixedSize(0, 8, 64, 32)
    assert not many.holds(tight), "each part of padding needs a row"
    full = [MixedSize(0, 2, 64 * i, 32) for i in range(1, 33)]
    assert choose(full, size(255, 512), 9, 128) is None and choose(full[1:], size(255, 512), 9, 128) is not None


class MixedRunner(ModelRunner):
    """Takes the graphs wherever there is one."""

    served = 0

    @property
    def graphs(self) -> GraphCache:
        self._graphs = self._graphs or graph_cache(self.model)
        return self._graphs

    def _hidden(self, plan: Plan) -> tuple[torch.Tensor, np.ndarray | None]:
        if self.mixed is None:
            self.mixed = Mixed(self.model, self.cache, self.graphs)
        if (found := self.mixed.run(plan, self._slots(plan))) is None:
            return super()._hidden(plan)
        self.served += 1
        return found


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_steps_with_prompts_give_the_same_bits(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged sequences that take each other's slots, groups that share prompts, prompts in chunks; two sessions."""
    monkeypatch.setattr(mixed_graphs, "_CAPTURE_FROM", 2)
    calls = hopper_inputs.require(monkeypatch)
    model = real_model(precision, "fp8" if precision == "fp8" else "bf16")
    g = np.random.default_rng(3)
    prompts = [tuple(g.integers(1, 40, n).tolist()) for n in (5, 17, 9, 30, 3, 12)]
    requests = [
        Request(i, prompts[i // 3 % 6], SamplingParams(4 + 5 * (i % 4), seed=i, top_p=0.9 if i % 5 == 0 else 1.0))
        for i in range(36)
    ]

    def engine(max_tokens_per_step: int = 2048, kv_cache_tokens: int | None = None) -> PagedEngine:
        settings = EngineSettings(
            page_size=4, max_num_seqs=6, max_tokens_per_step=max_tokens_per_step, kv_cache_tokens=kv_cache_tokens
        )
        made = PagedEngine(model, Letters(), "flow", settings)
        made.load(WeightSet(1, "flow", {}))
        return made

    expected = engine().generate(requests)
    for sizes in ({}, {"max_tokens_per_step": 14}, {"kv_cache_tokens": 140}):
        made = engine(**sizes)
        runner = made.runner = MixedRunner(model, EngineSettings(page_size=4))
        assert made.generate(requests) == expected
        served = runner.served
        assert served and runner.graphs.number, "no step had a graph"
        made.load(WeightSet(1, "flow", {}))  # forgets the beginnings that it knows: all is computed again
        assert made.generate(requests) == expected, "a second session with what the first captured"
        assert len(runner.graphs.sizes(MixedSize)) == runner.graphs.number
        assert runner.served - served > served, "graphs outlive a session"
    assert calls["forward"]
