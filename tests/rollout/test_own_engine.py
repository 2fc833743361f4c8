"""An engine outside the package, examples/transformers_engine.py: it gets weights by name and shares nothing else."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import numbers, tiny_config, tiny_run
from torch import Tensor

from jetrl.errors import UserError
from jetrl.model.weights import checksum
from jetrl.report.recorder import read_samples
from jetrl.rollout.requests import STEP_STRIDE
from jetrl.run import loop
from jetrl.run.setup import Session, build
from jetrl.train import passes
from jetrl.types import Request, SamplingParams, WeightTensor

FILE = Path(__file__).parents[2] / "examples" / "transformers_engine.py"
ENGINE = {"rollout.engine": f"{FILE}:TransformersEngine", "train.steps": 2}
GAP = "parity/logprob_abs_diff_max"


def value(tensor: WeightTensor) -> Tensor:
    """`code * scale`, element by element."""
    if tensor.scales is None:
        return tensor.values.float()
    row, column = (torch.arange(n) // 128 for n in tensor.values.shape)
    return tensor.values.float() * tensor.scales[row][:, column]


def content(tensors: Mapping[str, Tensor]) -> str:
    return checksum({name: WeightTensor(tensor.to(torch.bfloat16)) for name, tensor in tensors.items()})


class Watch:
    """What a run published by version, and what its engine held when a step's requests came, by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.published: dict[int, str] = {}
        self.held: dict[int, str] = {}
        make, publish = loop.build, loop.publish

        def watched_build(config: Any, **options: Any) -> Session:
            session = make(config, **options)
            engine, add = session.engine, session.engine.add

            def watched_add(requests: list[Request]) -> None:
                names = session.engine.names
                held = content({name: engine.inner.parameter(name) for name in names})
                self.held[requests[0].id // STEP_STRIDE] = held
                add(requests)

            load = engine.load

            def watched_load(weights: Any) -> None:
                engine.names = list(weights.tensors)
                load(weights)

            engine.add, engine.load = watched_add, watched_load  # type: ignore[method-assign]
            return session

        def watched_publish(*args: Any) -> Any:
            weights = publish(*args)
            self.published[weights.version] = content({name: value(t) for name, t in weights.tensors.items()})
            return weights

        monkeypatch.setattr(loop, "build", watched_build)
        monkeypatch.setattr(loop, "publish", watched_publish)


EXPERTS = {
    "model.arch.model_type": "qwen3_moe", "model.arch.num_experts": 4, "model.arch.num_experts_per_tok": 2,
    "model.arch.moe_intermediate_size": 72,
}


@pytest.mark.parametrize(
    "changes", [{"precision": "bf16"}, {"precision": "fp8"}, EXPERTS], ids=["bf16", "fp8", "experts"]
)
def test_a_run_samples_each_step_with_the_weights_published_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    watch = Watch(monkeypatch)
    run_dir = tiny_run(tmp_path, ENGINE | {"eval.eval_interval": 0} | changes)
    assert watch.held == {1: watch.published[0], 2: watch.published[1]}
    assert len(set(watch.published.values())) == 3, "each update changes what is published"
    rows = numbers(run_dir)
    assert len(rows) == 3 and all(0 < row[GAP] < 0.5 for row in rows[1:]), [row.get(GAP) for row in rows]
    assert len(list(read_samples(run_dir))) == 32


@pytest.mark.parametrize("own", [True, False])
def test_with_several_updates_the_learner_computes_the_old_log_probs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """And where the engine keeps the learner's bits, it does not."""
    calls, filled = [], []
    logprob_pass, estimate = passes.logprob_pass, loop.estimate
    monkeypatch.setattr(passes, "logprob_pass", lambda *args: calls.append(1) or logprob_pass(*args))

    def watched(*args: Any, **options: Any) -> Any:
        result = estimate(*args, **options)
        filled.append(result[1])
        return result

    monkeypatch.setattr(loop, "estimate", watched)
    changes = {"rl.updates_per_step": 2, "eval.eval_interval": 0} | (ENGINE if own else {"train.steps": 2})
    rows = numbers(tiny_run(tmp_path, changes))
    if not own:
        assert not calls and all(m.old_logprobs is None for bs in filled for b in bs for m in b.micro_batches)
        return
    assert len(calls) == 4, "two batches in each of two steps"
    for row, (first, second) in zip(rows[1:], filled, strict=True):
        gaps = []
        for batch in (first, second):
            for micro in batch.micro_batches:
                assert micro.old_logprobs is not None
                in_loss = micro.loss_mask > 0
                assert micro.old_logprobs[~in_loss].isnan().all(), "nothing is computed outside the loss"
                gap = (micro.old_logprobs.double() - micro.rollout_logprobs.double()).abs()[in_loss]
                gaps.append((batch is first, gap.max().item()))
        assert all(0 < gap < 0.5 for _, gap in gaps)
        # The run's gap is that of the first update, whose weights are those that sampled: the same pass, the same bits.
        assert row[GAP] == max(gap for is_first, gap in gaps if is_first)


def session_of(folder: Path, changes: dict[str, Any] | None = None) -> Session:
    before = torch.get_num_threads()
    session = build(tiny_config(folder, ENGINE | (changes or {})))
    torch.set_num_threads(before)
    session.engine.load(loop.publish(session.model, 7, session.flow_digest))
    return session


def finish(engine: Any) -> dict[int, Any]:
    found = []
    while engine.has_work:
        report = engine.step()
        found += engine.collect()
        assert report.finished == len(found)
    return {completion.request_id: completion for completion in found}


def test_completions_are_what_transformers_says_of_each_sequence_alone(tmp_path: Path) -> None:
    """Prompts of many lengths, more than run together; log-probs of the whole sequence without cache or padding."""
    session = session_of(tmp_path, {"rollout.max_num_seqs": 3})
    kinds = (SamplingParams(9, 0.0, ignore_eos=True), SamplingParams(8, 0.7, seed=3), SamplingParams(12, 1.0))
    requests = [Request(50 + i, tuple(range(1, 2 + 2 * i)), kinds[i % 3]) for i in range(7)]
    engine: Any = session.engine
    engine.add(requests[:4])
    engine.step()
    engine.add(requests[4:])
    found = finish(engine)
    assert sorted(found) == [r.id for r in requests]
    for request in requests:
        completion, p = found[request.id], request.sampling
        n, drawn = len(request.tokens), torch.tensor(completion.tokens)
        with torch.no_grad():
            whole = torch.tensor([[*request.tokens, *completion.tokens.tolist()]])
            logits = engine.inner.model(whole).logits[0, n - 1 : -1].float()
        expected = (logits / (p.temperature or 1.0)).log_softmax(-1).gather(1, drawn[:, None])[:, 0]
        assert (expected - torch.tensor(completion.logprobs)).abs().max() < 0.02
        ended = session.tokenizer.eos_token_id in completion.tokens and not p.ignore_eos
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(drawn) == p.max_tokens
        assert (completion.weight_version, completion.flow_digest) == (7, session.flow_digest)
        if p.temperature == 0:
            near = logits.max(-1).values - logits.gather(1, drawn[:, None])[:, 0]
            assert near.max() < 0.02, "a greedy token is the most probable one, up to rounding"


def test_draws_follow_the_request_and_repeat(tmp_path: Path) -> None:
    engine: Any = session_of(tmp_path).engine
    params = SamplingParams(10, ignore_eos=True)
    engine.add([Request(i, (1, 2, 3), params) for i in range(6)])
    first = finish(engine)
    engine.add([Request(i, (1, 2, 3), params) for i in range(6)])
    second = finish(engine)
    assert [first[i].tokens.tolist() for i in range(6)] == [second[i].tokens.tolist() for i in range(6)]
    assert len({first[i].tokens.tobytes() for i in range(6)}) == 6


def test_stop_strings_forgetting_and_refusals(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    engine, tokenizer = session.engine, session.tokenizer
    digits = tuple("0123456789")
    engine.add([Request(1, (1, 2), SamplingParams(40, stop=digits, ignore_eos=True))])
    (completion,) = finish(engine).values()
    assert completion.finish_reason == "stop" and completion.text[-1] in digits
    assert not any(d in completion.text[:-1] for d in digits)
    assert completion.text == tokenizer.decode(completion.tokens.tolist())
    engine.add([Request(i, (1, 2), SamplingParams(40, ignore_eos=True)) for i in (1, 2, 3)])
    engine.step()
    engine.add([Request(4, (1, 2), SamplingParams(5))])
    engine.forget([1, 2, 4, 99])
    assert sorted(finish(engine)) == [3]
    engine.add([Request(5, (1, 2), SamplingParams(40))])
    engine.step()
    engine.forget([5])
    assert not engine.has_work and engine.collect() == []
    with pytest.raises(UserError, match="has no top_p, top_k and min_p"):
        engine.add([Request(6, (1, 2), SamplingParams(5, top_k=3))])


def test_conversations_go_through_it(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(
        "class Talk:\n"
        "    def reset(self, problem):\n        self.turns = 0\n        return '1+1='\n"
        "    def step(self, action):\n        self.turns += 1\n        return '2', len(set(action)), self.turns == 3\n"
    )
    changes = {
        "task.name": "environment", "task.params": {}, "task.reward": None,
        "environment.name": f"{tmp_path}/talk.py:Talk", "environment.max_turn_tokens": 4,
        "rollout.max_response_length": 30, "eval.eval_interval": 0,
    }
    run_dir = tiny_run(tmp_path, ENGINE | changes)
    assert all(0 < row[GAP] < 0.5 and row["environment/turns_mean"] == 3.0 for row in numbers(run_dir)[1:])


def test_weights_of_blocks_cut_short_are_dequantized() -> None:
    """Sizes that are no multiples of 128, as FP8 weights of small models have them."""
    spec = importlib.util.spec_from_file_location("transformers_engine", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    tensor = WeightTensor(codes, torch.rand(2, 3, generator=generator))
    assert torch.equal(module.dequantized(tensor), value(tensor))
