"""Routers in whole runs: parity and metrics of tiny mixtures of experts, the losses of routers, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ARCH, numbers, saved, tiny_config, tiny_run, weights_hash
from torch import Tensor

from jetrl.api import load_model, random_model
from jetrl.engine.engine import PagedEngine
from jetrl.engine.runner import ModelRunner
from jetrl.engine.settings import EngineSettings
from jetrl.errors import UserError
from jetrl.huggingface.read import spec_from_hf
from jetrl.model.block import Routes
from jetrl.model.transformer import Transformer
from jetrl.parity.certificate import NoText
from jetrl.parity.rows import varlen
from jetrl.run.prepare import prepare
from jetrl.run.setup import build
from jetrl.run.sft import cache_path
from jetrl.train.routing import KEYS, check_routing
from jetrl.train.routing import LOSSES as LOSSES_KEYS
from jetrl.types import ForwardBatch, PagedPlan, Request, SamplingParams, WeightSet

EXPERTS: dict[str, Any] = {
    "model.arch.model_type": "qwen3_moe", "model.arch.num_experts": 6, "model.arch.num_experts_per_tok": 2,
    "model.arch.moe_intermediate_size": 72, "train.steps": 2,
}
PARITY, ROUTING = "parity/logprob_abs_diff_max", "parity/frac_routing_different"
LOSSES = {"train.router_aux_loss_coef": 0.05, "train.router_z_loss_coef": 0.01}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("plain"), EXPERTS)


def test_parity_is_zero_and_the_load_is_shown(plain: Path) -> None:
    rows = numbers(plain)[1:]
    assert [row[PARITY] for row in rows] == [0.0, 0.0]
    for row in rows:
        assert 1.0 < row["moe/load_max_over_mean"] <= 3.0  # 6 experts, 2 of a token: at most 3 times the mean
        assert 1.0 < row["moe/router_entropy"] < 1.792  # log 6
        assert not {"moe/aux_loss", "moe/z_loss", ROUTING} & row.keys()


@pytest.mark.parametrize(
    "changes",
    [{"precision": "bf16"}, {"quant.kv_cache": "fp8", "model.arch.decoder_sparse_step": 2, "rollout.page_size": 3},
     {"rl.updates_per_step": 2, "rl.algo": "ppo", "rl.critic_lr": 3e-3, "model.arch.norm_topk_prob": True}],
    ids=["bf16", "fp8 cache, every second layer", "ppo"],
)
def test_the_same_experts_are_chosen_on_both_sides(tmp_path: Path, changes: dict[str, Any]) -> None:
    rows = numbers(tiny_run(tmp_path, EXPERTS | changes | {"train.compare_routing": True}))[1:]
    assert [(row[PARITY], row[ROUTING]) for row in rows] == [(0.0, 0.0)] * 2
    assert all(row["policy/grad_norm"] > 0 for row in rows)


def test_in_two_precisions_other_experts_are_chosen(tmp_path: Path) -> None:
    rows = numbers(tiny_run(tmp_path, EXPERTS | {"precision": "fp8_rollout", "train.compare_routing": True}))[1:]
    assert all(1e-4 < row[PARITY] for row in rows)
    assert all(0.001 < row[ROUTING] < 0.5 for row in rows), [row[ROUTING] for row in rows]


@torch.no_grad()
def test_what_is_compared_are_the_engines_own_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded in a mixed batch from pages of 4, against the rollout's flow over whole sequences, as in `Routing`."""
    model, plans, seen = random_model("tiny-moe", "fp8_rollout", "cpu", layers=2), [], {}
    run, forward = ModelRunner.run, Transformer.forward

    def watched_run(self: ModelRunner, plan: Any, *args: Any) -> Any:
        plans.append(plan)
        return run(self, plan, *args)

    def watched_forward(self: Transformer, batch: ForwardBatch, tap: Any = None, routes: Any = None) -> Tensor:
        noted = routes or Routes()
        hidden = forward(self, batch, tap, noted)
        if isinstance(batch.plan, PagedPlan):
            columns = (plans[-1].sample_rows, plans[-1].sample_requests, plans[-1].sample_positions)
            for row, request, position in zip(*(c.tolist() for c in columns), strict=True):
                seen[request, position] = [x[row] for x in noted.chosen.values()]
        return hidden

    monkeypatch.setattr(ModelRunner, "run", watched_run)
    monkeypatch.setattr(Transformer, "forward", watched_forward)
    engine = PagedEngine(model, NoText(), "test", EngineSettings(page_size=4, max_num_seqs=3, max_tokens_per_step=8))
    engine.load(WeightSet(0, "test", {}))
    requests = [Request(i, tuple(range(i, 2 * i + 3)), SamplingParams(9, seed=1)) for i in range(5)]
    differ = 0
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        batch, sides = varlen([torch.tensor([*request.tokens, *completion.tokens])]), (Routes(), Routes())
        for side, routes in zip(("rollout", "train"), sides, strict=True):
            model(replace(batch, side=side), routes=routes)
        for at in range(len(request.tokens), len(request.tokens) + 9):
            rollout, train = ([x[at - 1] for x in routes.chosen.values()] for routes in sides)
            assert all(map(torch.equal, seen[request.id, at], rollout))
            differ += not all(map(torch.equal, seen[request.id, at], train))
    assert 0 < differ < 45


def test_what_is_only_measured_changes_no_bit(plain: Path, tmp_path: Path) -> None:
    again = tiny_run(tmp_path, EXPERTS | {"train.compare_routing": True, "train.activation_checkpointing": True})
    assert weights_hash(again, 2) == weights_hash(plain, 2)


def test_losses_of_routers_move_the_weights_and_are_logged(plain: Path, tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path / "a", EXPERTS | LOSSES)
    rows = numbers(run_dir)[1:]
    assert weights_hash(run_dir, 2) != weights_hash(plain, 2)
    assert all(row[PARITY] == 0 and 0.9 < row["moe/aux_loss"] < 3 and row["moe/z_loss"] > 1 for row in rows)
    before = numbers(plain)[1]
    more = 0.05 * rows[0]["moe/aux_loss"] + 0.01 * rows[0]["moe/z_loss"]
    assert rows[0]["policy/loss"] == pytest.approx(before["policy/loss"] + more, abs=1e-5)
    # in smaller micro-batches, and with layers computed again, the step is the same up to the order of FP32 sums
    small = EXPERTS | LOSSES | {"train.max_tokens_per_gpu": 40, "train.activation_checkpointing": True}
    split = numbers(tiny_run(tmp_path / "b", small))[1]
    for key in ("moe/aux_loss", "moe/z_loss", "moe/router_entropy", "moe/load_max_over_mean", "policy/grad_norm"):
        assert split[key] == pytest.approx(rows[0][key], rel=2e-2 if "norm" in key else 1e-9), key


def test_warm_starts_of_other_router_losses_are_other_files(tmp_path: Path) -> None:
    paths = set()
    for i, changes in enumerate(({}, {"train.router_aux_loss_coef": 0.1}, {"train.compare_routing": True})):
        session = build(tiny_config(tmp_path / str(i), EXPERTS | changes | {"task.reward": None}))
        paths.add(cache_path(session.config, session.model, session.task, session.tokenizer).name)
    assert len(paths) == 2


def test_frozen_routers_stay_and_have_nothing_but_their_copies(plain: Path, tmp_path: Path) -> None:
    """No master, moment or gradient; checkpoints hold them, and so does a run that goes on; the rest learns."""
    frozen = EXPERTS | {"train.freeze_router": True, "checkpoint.save_interval": 1, "rl.kl_coef": 0.01}
    run, names = tiny_run(tmp_path / "a", frozen), [f"layers.{i}.mlp.router.weight" for i in range(2)]
    assert [row[PARITY] for row in numbers(run)[1:]] == [0.0, 0.0]
    session = build(tiny_config(tmp_path / "a", frozen))
    assert session.model.frozen() == names
    states = [saved(run, step) for step in (1, 2)]
    for state in states:
        for name in names:
            kept = state[f"frozen.{name}"]
            assert torch.equal(kept, session.model.get_submodule(name.removesuffix(".weight")).published)
            assert kept.dtype == torch.bfloat16 and not any(name in key for key in state if key != f"frozen.{name}")
    moved = [key for key in states[0] if key.startswith("model.") and not torch.equal(states[0][key], states[1][key])]
    assert len(moved) == len([key for key in states[0] if key.startswith("model.")])
    free = saved(plain, 2)
    assert all(f"model.{name}" in free and f"frozen.{name}" not in free for name in names)
    again = tiny_run(tmp_path / "b", frozen | {"train.steps": 1})
    assert tiny_run(tmp_path / "b", frozen | {"checkpoint.resume": "auto"}) == again
    after = saved(again, 2)
    assert after.keys() == states[1].keys() and all(torch.equal(after[key], states[1][key]) for key in after)
    model = load_model(again, device="cpu").model
    for name in names:
        assert torch.equal(model.get_submodule(name.removesuffix(".weight")).published, after[f"frozen.{name}"])


@pytest.mark.parametrize(("changes", "message"), [
    ({"lora.rank": 4}, "has no effect with lora.rank = 4: adapters alone are trained"),
    ({"train.router_aux_loss_coef": 0.01}, "together with train.router_aux_loss_coef = 0.01, a loss for routers that"),
    ({"train.router_z_loss_coef": 0.5}, "together with train.router_z_loss_coef = 0.5, a loss for routers that learn"),
])  # fmt: skip
def test_what_does_not_go_with_frozen_routers(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"train.freeze_router.*{message}"):
        tiny_config(tmp_path, EXPERTS | {"train.freeze_router": True} | changes)


@pytest.mark.parametrize("key", KEYS)
def test_settings_of_routers_are_refused_for_dense_models(tmp_path: Path, key: str) -> None:
    config = tiny_config(tmp_path, {f"train.{key}": 0.1 if key in LOSSES_KEYS else True})
    with pytest.raises(UserError, match=rf"train\.{key} = .* has no effect: the qwen3 model has no experts"):
        check_routing(config.train, spec_from_hf(ARCH | {"vocab_size": 20}))
    with pytest.raises(UserError, match="has no experts"):
        build(config)


def test_what_only_dense_layers_save_is_refused_where_all_are_experts(tmp_path: Path) -> None:
    saved = EXPERTS | {"quant.saved_gate_up": "fp8"}
    for changes in ({}, {"model.arch.mlp_only_layers": [1], "quant.num_last_layers_in_bf16": 1}):
        with pytest.raises(UserError, match='quant.saved_gate_up = "fp8" has no effect: no layer of this qwen3_moe'):
            prepare(tiny_config(tmp_path, saved | changes))
    prepare(tiny_config(tmp_path, saved | {"model.arch.mlp_only_layers": [1]}))
    prepare(tiny_config(tmp_path, {"quant.saved_gate_up": "fp8"}))
