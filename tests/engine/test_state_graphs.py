"""Decode steps of hybrids as graphs, on a CPU: states in rows, forks, preemption, bursts over the ends of chunks.

A graph is stood in for by its step, run again with the tensors that it holds: what a replay does, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from enlarged import enlarged
from hash_model import Letters, learners_logprobs
from torch import Tensor

from jetrl.engine import runner
from jetrl.engine.engine import PagedEngine
from jetrl.engine.graphs import decode
from jetrl.engine.graphs.decode import DecodeGraphs
from jetrl.engine.rows import PADDING, ZEROS
from jetrl.engine.runner import ModelRunner
from jetrl.engine.sampler import SamplingTable, sample_rows
from jetrl.engine.settings import EngineSettings
from jetrl.precision.recipe import build_recipe
from jetrl.spec import DeltaSpec, ModelSpec, RopeSpec
from jetrl.types import Request, SamplingParams, WeightSet

SPEC = ModelSpec(
    family="qwen3_5_text", vocab_size=40, hidden_size=48, intermediate_size=72, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=256, tie_embeddings=True,
    qkv_bias=False, qk_norm=True, rotary_dim=8, attention_gate=True, norm_offset=True,
    delta=DeltaSpec(key_heads=1, value_heads=2, key_dim=8, value_dim=16, conv_width=4, layers=(0,)),
)


class Device(str):
    """A CPU that says it is a GPU."""

    type = "cuda"


class Replays:
    """In the place of `Capture`: capturing computes nothing, and a replay runs the step."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def make_room(self) -> bool:
        return True

    def __call__(self, step: Callable[[], Any]) -> tuple[Any, None]:
        return SimpleNamespace(replay=step), None


def drawn(logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.logprob.ops.draw` by what draws on a CPU."""
    table = SamplingTable.build([SamplingParams(1)] * len(logits), [0] * len(logits))
    table.temperature[:], table.key[:] = temperature.numpy(), keys.numpy().view(np.uint64)
    tokens, logprobs = sample_rows(logits.nan_to_num(0.0), table, positions.numpy())  # padding may hold anything
    return tokens, logprobs.double(), logits.amax(-1).double()


@contextmanager
def as_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Decode steps run as graphs; gives the number of real rows and of steps of each call."""
    calls: list[tuple[int, int]] = []
    plain = DecodeGraphs.run

    def noted(self: Any, step: Any, steps: int) -> Any:
        calls.append((len(step.tokens), steps))
        return plain(self, step, steps)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "device", property(lambda self: Device("cpu")))
        patch.setattr(runner, "Capture", Replays)
        patch.setattr(decode, "draw", drawn)
        patch.setattr(DecodeGraphs, "run", noted)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 28, 1 << 28))
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(total_memory=1 << 40))
        yield calls


def requests() -> list[Request]:
    """Groups of three whose answers pass the end of a chunk at different steps, or begin behind it."""
    prompts = [tuple(1 + (i * n) % 38 for i in range(n)) for n in (5, 57, 61, 64)]
    return [
        Request(100 + i, prompts[i // 3], SamplingParams(6 + 3 * (i % 3), ignore_eos=True, seed=1)) for i in range(12)
    ]


def preempt(step: int, running: tuple[int, ...]) -> tuple[int, ...]:
    return running[step % 2 :: 3] if step % 4 == 3 else ()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_steps_in_graphs_have_the_learners_log_probs(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = enlarged(SPEC, build_recipe(precision, 2))

    def generated(force: Any = None, **sizes: int) -> list[Any]:
        engine = PagedEngine(model, Letters(), "flow", EngineSettings(**{"page_size": 8} | sizes))
        engine.load(WeightSet(3, "flow", {}))
        return engine.generate(requests(), force_preempt=force)

    plain = generated()
    with as_graphs(monkeypatch) as calls:
        assert generated() == plain
        assert max(steps for _, steps in calls) > 4, "bursts, some of which pass the end of a chunk"
        assert any(rows not in (1, 2, 4, 8, 16) for rows, _ in calls), "with padding next to sequences"
        assert generated(max_num_seqs=5, max_burst=3) == plain
        assert generated(preempt, max_num_seqs=7, kv_cache_tokens=400, max_tokens_per_step=40) == plain
    for r, c in zip(requests(), plain, strict=True):
        assert learners_logprobs(model, [*r.tokens, *c.tokens.tolist()])[len(r.tokens) - 1 :] == c.logprobs.tolist()


def test_a_step_that_reads_the_rows_of_the_step_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that did not go on from what it wrote would decode every token of a burst from one state."""
    model = enlarged(SPEC, build_recipe("bf16", 2))
    engine = PagedEngine(model, Letters(), "flow", EngineSettings(page_size=8))
    engine.load(WeightSet(3, "flow", {}))
    with as_graphs(monkeypatch):
        right = engine.generate(requests())
        engine.release()
        advance = decode.advance

        def stuck(state: Any, *found: Tensor) -> None:
            advance(state, *found)
            held = next(one for one in engine.runner.graphs._held.values() if one.inputs.state is state)
            held.inputs.batch.plan.rows.read.fill_(ZEROS)

        monkeypatch.setattr(decode, "advance", stuck)
        wrong = engine.generate(requests())
    assert ZEROS != PADDING and [c.tokens.tolist() for c in wrong] != [c.tokens.tolist() for c in right]
