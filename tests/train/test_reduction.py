"""Updates on several ranks: under `fixed` everything has the bits of one process; under `fast` sums are the same sums.

The processes start once for each number of ranks and make all cases (`everything`); tests compare what came back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks, whole_weights
from rich.console import Console
from tiny import numbers, tiny_config, tiny_run, weights_hash
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.model.master import Master, masters_of, own_rows
from jetrl.model.sharding import fill
from jetrl.model.shards import gathered, shard
from jetrl.model.weights import published
from jetrl.parallel.world import ALONE, World
from jetrl.precision.recipe import recipe_of
from jetrl.report.console import Display
from jetrl.run.gather import gather
from jetrl.run.loop import Clock
from jetrl.run.prepare import load_spec
from jetrl.run.setup import build, build_learner, build_model, check_lanes
from jetrl.train import reduction
from jetrl.train.batches import MicroBatch, PackedBatch
from jetrl.train.packing import pack
from jetrl.train.passes import estimate
from jetrl.train.publish import publish
from jetrl.train.step import Learner, forward_rows, update
from jetrl.train.trainer import NonFiniteError, optimizer_step

# 3 blocks of vocabulary; fused sections that end within blocks; matrices of one block, of which most ranks own no rows
WIDE = {"model.arch.hidden_size": 64, "model.arch.intermediate_size": 200, "model.arch.vocab_size": 300}
QWEN2 = {"model.arch.model_type": "qwen2", "model.arch.tie_word_embeddings": False}  # with a bias of qkv
UNTIED, LANES, FROZEN = "fp8, untied, bias, updates", "fp8, 5 lanes", "fp8, frozen linears"
CASES: dict[str, dict[str, Any]] = {
    "fp8, tied": {"train.activation_checkpointing": True},
    UNTIED: WIDE | QWEN2 | {"rl.updates_per_step": 2},
    LANES: WIDE | {"train.reduction_lanes": 5},
    FROZEN: WIDE | QWEN2 | {"name": "frozen"},
    "w8a16, adapters": WIDE | QWEN2 | {"lora.rank": 8, "train.lr": 3e-2, "precision": "w8a16"},
    # more matrices of experts than blocks that one rank owns; an expert may get no token
    "fp8, experts": {
        "model.arch.model_type": "qwen3_moe", "model.arch.num_experts": 6, "model.arch.num_experts_per_tok": 2,
        "model.arch.moe_intermediate_size": 72, "train.router_aux_loss_coef": 0.05, "train.router_z_loss_coef": 0.01,
        "train.compare_routing": True},
    # a convolution of 4 columns, and two projections of 6 rows in one table
    "fp8, hybrid": {
        "model.arch.model_type": "qwen3_5_text", "model.arch.layer_types": ["linear_attention", "full_attention"],
        "model.arch.linear_num_key_heads": 3, "model.arch.linear_num_value_heads": 6,
        "model.arch.linear_key_head_dim": 8, "model.arch.linear_value_head_dim": 16, "train.share_prompts": True},
    "bf16, bf16 masters": WIDE | {
        "precision": "bf16", "train.master_dtype": "bfloat16", "train.optimizer_dtype": "bfloat16"},
    "ppo, bf16 gradients, offload": {
        "rl.algo": "ppo", "rl.critic_lr": 3e-3, "train.master_dtype": "bfloat16", "train.grad_dtype": "bfloat16",
        "train.offload_optimizer": True, "train.reduction_lanes": 4},
    "ppo, shared, fp8_rollout, pow2": QWEN2 | {
        "rl.algo": "ppo", "rl.critic": "shared", "precision": "fp8_rollout", "quant.weight_scale": "pow2"},
}
FAST = ("fp8, tied", "ppo, shared, fp8_rollout, pow2")
MAX_TOKENS = (40, 80, 4096)  # of the micro-batches in three steps: seven or eight, three or four, one


def data_of(name: str, folder: Path, how: str) -> tuple[Config, list[list[PackedBatch]]]:
    """A config and the batches of three steps: the samples of its first step, cut in three ways."""
    threads = torch.get_num_threads()
    config = tiny_config(folder, {"train.max_grad_norm": 0.05, "train.reduction": how, **CASES[name]})
    session = build(config)
    torch.set_num_threads(threads)
    session.engine.load(publish(session.model, 0, session.flow_digest))
    kept = gather(session, Clock(Display(1, "test", console=Console(quiet=True))), 1).learnt
    steps = []
    for tokens in MAX_TOKENS:
        batches = pack(
            kept, max_tokens_per_gpu=tokens, flow_digest=session.flow_digest, weight_version=0,
            updates_per_step=config.rl.updates_per_step,
        )
        steps.append(estimate(kept, batches, session.learner, None, config, session.unified)[1])
    return config, steps


def learner_of(config: Config, world: World) -> Learner:
    _, spec, _ = load_spec(config)
    model = build_model(config, spec, recipe_of(config, spec), world=world)
    if config.name == "frozen":
        model.freeze(lambda name: name.startswith("layers.") and not name.endswith("norm.weight"))
    learner = build_learner(config, model, world)
    model.publish()
    return learner


def trained(world: World, config: Config, steps: list[list[PackedBatch]]) -> dict[str, Any]:
    """Three steps: metrics of each, and all weights, moments and published tensors, whole."""
    torch.use_deterministic_algorithms(True)
    learner = learner_of(config, world)
    metrics = []
    for number, batches in enumerate(steps, 1):
        metrics.append(update(learner, batches, config, number))
        learner.model.publish()
    tensors = {f"master {k}": v for k, v in whole_weights(learner.model).items()}
    for name, weight in published(learner.model).items():
        tensors[f"published {name}"] = weight.values.clone()
        if weight.scales is not None:
            tensors[f"scales {name}"] = weight.scales.clone()
    if learner.critic is not None:
        tensors |= {f"critic {k}": v for k, v in whole_weights(learner.critic).items()}
    for i, (_, optimizer, masters) in enumerate(learner.optimizers()):
        known = {master.param: master for master in masters.values()}
        for j, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer {i}.{j} {key}"] = whole_moment(optimizer, known[param], key)
    return {"metrics": metrics, "tensors": tensors}


def whole_moment(optimizer: torch.optim.Optimizer, master: Master, key: str) -> Tensor:
    param, cut = master.param, master.shard
    dtype = getattr(optimizer, "state_dtype", torch.float32)
    state = optimizer.state.get(param, {})
    value = state.get(key, torch.zeros(0, *param.shape[1:], dtype=dtype))
    assert bool(state) == bool(param.numel())
    return value if cut is None else gathered(cut, None, value, value.dtype)


# ---- further cases, which the ranks make as well --------------------------------------------------------------------


def held_memory(world: World, config: Config, batches: list[PackedBatch]) -> dict[str, Any]:
    """What a rank holds while the optimizer steps, in bytes, and whole gradients at any time."""
    learner, sizes, whole = learner_of(config, world), [], []
    masters = masters_of(learner.model)
    send = World.send_rows

    def counted(self: World, matrix: Tensor, rows: Any, senders: int) -> Any:
        (sink,) = {m.gradient.sink for m in masters.values() if m.param.ndim > 1}
        whole.append(-1 if sink is None else len(sink._buffers) + len(sink._flying) + 1)
        return send(self, matrix, rows, senders)

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for master in masters.values():
            if (cut := master.shard) is None:
                continue
            param = master.param
            rows = cut.rows[world.rank]
            held = [param, *(v for k, v in optimizer.state.get(param, {}).items() if k != "step")]
            held += [] if param.grad is None else [param.grad]
            assert len(held) == (4 if rows else 1)
            sizes.extend((t.untyped_storage().nbytes(), rows * param.shape[1] * 4) for t in held)

    learner.optimizer.register_step_post_hook(count)
    World.send_rows = counted  # type: ignore[method-assign]
    try:
        update(learner, batches, config, 1)
    finally:
        World.send_rows = send  # type: ignore[method-assign]
    quantized = [m.published.numel() for m in learner.model.modules() if getattr(m, "quantized", None) is not None]
    return {"sizes": sizes, "whole": whole, "published in fp8 layers": quantized}


def broken_loss(world: World, config: Config, batches: list[PackedBatch]) -> dict[str, Any]:
    """The loss of micro-batch 1 alone is no number; another rank's too. All must say the same and change nothing."""
    learner = learner_of(config, world)
    before = whole_weights(learner.model)
    micro_batches = batches[0].micro_batches

    def loss_of(micro: MicroBatch) -> Any:
        index = next(i for i, m in enumerate(micro_batches) if torch.equal(m.tokens, micro.tokens))
        loss = -forward_rows(learner.model, micro, 1.0).logprobs.sum()
        return loss * (math.nan if index == 1 else 1.0), {}

    try:
        optimizer_step(
            list(masters_of(learner.model).values()), learner.optimizer, batches[0], loss_of, lr=1e-3,
            max_grad_norm=1.0, world=world, reduction="fixed",
        )
    except NonFiniteError as error:
        after = whole_weights(learner.model)
        same = all(torch.equal(after[name], value) for name, value in before.items())
        sinks = any(m.gradient.sink is not None for m in masters_of(learner.model).values())
        return {"message": str(error), "same": same, "sinks": sinks}
    return {}


def reloaded(world: World, config: Config) -> bool:
    """Whether the ranks' rows of other weights, in a model that is filled with them, make these weights."""
    learner = learner_of(config, world)
    rows, want = own_rows(learner.model), whole_weights(learner.model)
    fill(learner.model, ((name, value[slice(*rows[name])] + 1) for name, value in want.items()))
    got = whole_weights(learner.model)
    return got.keys() == want.keys() and all(torch.equal(got[k], want[k] + 1) for k in want)


Cases = dict[str, tuple[Config, list[list[PackedBatch]]]]


def everything(world: World, cases: Cases) -> dict[str, Any]:
    found: dict[str, Any] = {name: trained(world, *case) for name, case in cases.items()}
    config, steps = cases[UNTIED]
    return found | {
        "memory": held_memory(world, config, steps[0][:1]),
        "broken": broken_loss(world, config, steps[0]),
        "reloaded": reloaded(world, config),
        "again": trained(world, *cases["fast: fp8, tied"]),
    }


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    folder = tmp_path_factory.mktemp("cases")
    with one_thread():
        found = {name: data_of(name, folder / str(i), "fixed") for i, name in enumerate(CASES)}
    for name in FAST:
        config, steps = found[name]
        train = config.train.model_copy(update={"reduction": "fast", "reduction_lanes": None})
        found[f"fast: {name}"] = (config.model_copy(update={"train": train}), steps)
    counts = {len(batch.micro_batches) for _, steps in found.values() for batches in steps for batch in batches}
    assert {1, 3} <= counts and any(n > 4 and n % 2 for n in counts), counts
    return found


@pytest.fixture(scope="module")
def alone(cases: Cases) -> dict[str, Any]:
    with one_thread():
        return everything(ALONE, cases)


@pytest.fixture(scope="module", params=[2, 4])
def spread(cases: Cases, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(everything, request.param, cases, seconds=120.0)


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["tensors"].keys() == want["tensors"].keys()
    for name, value in want["tensors"].items():
        assert_bitwise_equal(got["tensors"][name], value, name)
    assert got["metrics"] == want["metrics"]


@settings(max_examples=30, deadline=None)
@given(
    sections=st.lists(st.integers(1, 400), min_size=1, max_size=3).map(tuple), size=st.integers(2, 5),
    width=st.sampled_from([32, 40, 1]),
)
def test_squares_of_each_rank_are_those_of_the_whole_matrix(sections: tuple[int, ...], size: int, width: int) -> None:
    matrix = torch.randn(sum(sections), width, generator=torch.Generator().manual_seed(0))
    want = torch.zeros(reduction._num_sums(sections, width), dtype=torch.float64)
    reduction._squares(matrix, sections, want)
    found = []
    for rank in range(size):
        cut = shard(sections, World(rank, size))
        found.append(torch.zeros(reduction._num_sums(cut.parts(rank), width), dtype=torch.float64))
        reduction._squares(cut.own(matrix), cut.parts(rank), found[-1])
    assert torch.equal(torch.cat(found), want)
    assert float(want.sum()) == pytest.approx(float(matrix.double().square().sum()), rel=1e-12)


@pytest.mark.parametrize("name", ["fp8, tied", UNTIED])
def test_in_one_process_both_add_the_same(cases: Cases, name: str) -> None:
    """Micro-batch by micro-batch to the bit, but for a table with two sources in each; the norms round differently."""
    config, ((batch, *_), *_) = cases[name]
    found = {}
    for how in ("fast", "fixed"):
        model = learner_of(config, ALONE).model
        masters = list(masters_of(model).values())
        tokens = [micro.tokens for micro in batch.micro_batches]
        gradients = reduction.gradient_sum(masters, len(tokens), ALONE, how, tokens=tokens)
        table = model.embed.weight
        assert [turn.micro for turn in gradients.turns] == [(i,) for i in range(len(batch.micro_batches))]
        for turn, micro in zip(gradients.turns, batch.micro_batches, strict=True):
            with gradients.turn(turn):
                forward_rows(model, micro, 1.0).logprobs.sum().backward()
                if how == "fast" and len(tokens) > 1 and not model.spec.tie_embeddings:  # only rows that are in use
                    used = len(torch.cat(tokens).unique())
                    assert table.grad is None and masters[0].gradient._row_sum.shape[0] == used < len(table)
        found[how] = {name: p.grad for name, p in model.named_parameters()}
        exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
        assert gradients.norm() == pytest.approx(exact, rel=1e-12)
    for key, want in found["fast"].items():
        if key == "embed.weight" and model.spec.tie_embeddings:
            assert torch.allclose(found["fixed"][key], want, rtol=1e-4, atol=1e-4)
        else:
            assert_bitwise_equal(found["fixed"][key] + 0.0, want + 0.0, key)


@given(count=st.integers(1, 40), lanes=st.integers(1, 40), size=st.integers(1, 9))
def test_turns_deal_lanes_to_ranks(count: int, lanes: int, size: int) -> None:
    turns = reduction.turns_of(count, lanes, size)
    dealt = [[turn.micro[r] for turn in turns if turn.micro[r] is not None] for r in range(size)]
    assert sorted(number for own in dealt for number in own) == list(range(count))
    full = min(lanes, count)
    for rank, own in enumerate(dealt):
        of = [list(range(lane, count, full)) for lane in range(rank, full, size)]
        assert own == [number for lane in of for number in lane]
    assert [turn.last for turn in turns] == [False] * (len(turns) - 1) + [True]
    ends = [turn for turn in turns if turn.senders]
    assert sum(turn.senders for turn in ends) == full and turns[-1].senders
    # between two exchanges a rank stays in one lane
    part: list[list[int]] = [[] for _ in range(size)]
    for turn in turns:
        for rank, number in enumerate(turn.micro):
            part[rank] += [] if number is None else [number % full]
        if turn.senders:
            assert all(len(set(lanes_of)) == (rank < turn.senders) for rank, lanes_of in enumerate(part))
            part = [[] for _ in range(size)]


def test_lanes_decide_the_sum(tmp_path: Path) -> None:
    changes = {"train.steps": 1, "train.max_tokens_per_gpu": 40, "train.lr": 1e-4, "train.reduction": "fixed"}
    runs = [tiny_run(tmp_path / str(n), changes | {"train.reduction_lanes": n}) for n in (1, 2)]
    assert weights_hash(runs[0], 1) != weights_hash(runs[1], 1)


def test_fewer_lanes_than_ranks_are_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, {"train.reduction": "fixed", "train.reduction_lanes": 3})
    check_lanes(config, World(0, 3))
    with pytest.raises(UserError, match="reduction_lanes = 3 gives work to 3 ranks, and this run has 4"):
        check_lanes(config, World(0, 4))
    with pytest.raises(UserError, match="reduction_lanes"):
        tiny_config(tmp_path, {"train.reduction_lanes": 3})


def test_a_run_takes_the_setting(tmp_path: Path) -> None:
    changes = {"train.steps": 2, "train.max_tokens_per_gpu": 40, "train.lr": 1e-4}
    runs = {how: tiny_run(tmp_path / how, changes | {"train.reduction": how}) for how in ("fast", "fixed")}
    first, second = (numbers(run_dir) for run_dir in runs.values())
    for row, other in zip(first[1:], second[1:], strict=True):
        assert row["parity/logprob_abs_diff_max"] == other["parity/logprob_abs_diff_max"] == 0.0
    assert first[1]["policy/grad_norm"] == pytest.approx(second[1]["policy/grad_norm"], rel=1e-6)
    assert weights_hash(runs["fast"], 2) != weights_hash(runs["fixed"], 2)


def test_fixed_has_the_bits_of_one_process(alone: dict[str, Any], spread: list[dict[str, Any]]) -> None:
    for name in CASES:
        for one in spread:
            assert_same(one[name], alone[name])


def test_fast_repeats_and_is_the_same_on_every_rank(spread: list[dict[str, Any]]) -> None:
    for one in spread:
        assert_same(one["again"], one["fast: fp8, tied"])
        for name in FAST:
            assert_same(one[f"fast: {name}"], spread[0][f"fast: {name}"])


def test_fast_adds_the_same_gradients(alone: dict[str, Any], spread: list[dict[str, Any]]) -> None:
    for name in FAST:
        want, got = (run[f"fast: {name}"]["metrics"][0] for run in (alone, spread[0]))
        assert got["policy/grad_norm"] == pytest.approx(want["policy/grad_norm"], rel=1e-5)
        assert got["policy/loss"] == pytest.approx(want["policy/loss"], rel=1e-6, abs=1e-9)
        fixed = alone[name]["metrics"][0]
        assert fixed["policy/grad_norm"] == pytest.approx(want["policy/grad_norm"], rel=1e-5)


def test_a_rank_holds_its_rows_only(spread: list[dict[str, Any]]) -> None:
    for one in spread:
        memory = one["memory"]
        assert memory["sizes"] and all(held == own for held, own in memory["sizes"])
        assert memory["published in fp8 layers"] == [0] * 8
    total = [sum(own for _, own in one["memory"]["sizes"]) for one in spread]
    assert all(0 < bytes_ < sum(total) for bytes_ in total)


def test_whole_gradients_leave_during_the_backward_pass(spread: list[dict[str, Any]]) -> None:
    for one in spread:
        inside = [n for n in one["memory"]["whole"] if n > 0]
        assert inside and max(inside) <= reduction.IN_FLIGHT + 1, one["memory"]["whole"]


def test_a_loss_that_is_no_number_on_one_rank_stops_all(alone: dict[str, Any], spread: list[dict[str, Any]]) -> None:
    for one in [alone, *spread]:
        assert one["broken"] == alone["broken"] and "loss nan" in one["broken"]["message"]
        assert one["broken"]["same"] and not one["broken"]["sinks"]


def test_whole_weights_come_and_go(spread: list[dict[str, Any]]) -> None:
    assert all(one["reloaded"] for one in spread)
