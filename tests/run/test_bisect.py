"""`jetrl bisect`: planted last-bit faults are named: the op or value, its index, and both bit patterns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import typer
from cpu_ops import owners
from rich.console import Console
from tiny import tiny_run
from torch import Tensor
from typer.testing import CliRunner

from jetrl.cli import app
from jetrl.errors import UserError
from jetrl.model.master import masters_of
from jetrl.run import loop
from jetrl.run.replay import command, record
from jetrl.run.replay.bisect import bisect
from jetrl.run.replay.record import StepRecord
from jetrl.run.replay.rerun import opened
from jetrl.run.replay.taps import Trace, tapped
from jetrl.types import Segment

SMALL: dict[str, Any] = {
    "train.steps": 1, "checkpoint.save_interval": 1, "rollout.prompts_per_step": 2, "rollout.max_response_length": 6,
    "eval.eval_interval": 0, "train.max_tokens_per_gpu": 64,
}
PLACE = 3  # the first element in which an op is wrong


def small(run_dir: Path) -> dict[str, Any]:
    """The settings of another run with the same reward function."""
    return SMALL | {"task.reward": f"{run_dir.parents[1]}/reward.py:reward"}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("right"), SMALL)


# ---- ops ------------------------------------------------------------------------------------------------------------


def turn_last_bits(value: Tensor) -> None:
    """Flip the last bit of every element from PLACE on; of E4M3, where that gives no NaN."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    bits = value.view(kind)
    mask = torch.zeros(value.numel(), dtype=torch.bool)
    mask[PLACE:] = True
    mask = mask.view(value.shape)
    if value.dtype == torch.float8_e4m3fn:
        mask &= (bits & 0x7F) < 0x70
    bits.copy_(torch.where(mask, bits ^ 1, bits))


def first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    parts = value if isinstance(value, tuple) else [getattr(value, key, None) for key in ("codes",)]
    return next((found for part in parts if part is not None and (found := first_tensor(part)) is not None), None)


@contextmanager
def wrong(op: str) -> Iterator[None]:
    """The op computes other last bits, wherever it is called."""
    holders = owners(op)
    true = getattr(holders[0], op)

    def faulty(*given: Any, **named: Any) -> Any:
        result = true(*given, **named)
        value = first_tensor(result)
        with torch.no_grad():
            turn_last_bits(given[0] if value is None else value)
        return result

    with ExitStack() as stack:
        for holder in holders:
            stack.enter_context(mock.patch.object(holder, op, faulty))
        yield


# op -> phase, and what is named: the op, a fused one of which it is a part, or the weight that it makes
OPS = {
    "rms_norm": ("rollout", "op add_rms_norm_quantize, output 0 of layer 0 in the learner's pass"),
    "add_rms_norm_quantize": ("rollout", "op add_rms_norm_quantize, output 0 of layer 0 in the learner's pass"),
    "quantize_act": ("rollout", "op add_rms_norm_quantize, output 0 of layer 0 in the learner's pass"),
    "fp8_gemm": ("rollout", "op fp8_gemm of layer 0 in the learner's pass"),
    "qkv_norm_rope": ("rollout", "op qkv_norm_rope, output 0 of layer 0 in the learner's pass"),
    "swiglu_quantize": ("rollout", "op swiglu_quantize, output 0 of layer 0 in the learner's pass"),
    "head_logits": ("rollout", "op logprob_entropy, output 0 in the learner's pass"),
    "attend_cached": ("rollout", "op attend_cached_quantize, output 0 of layer 0 in the sampler's pass"),
    "attend_varlen": ("update", "op attend_varlen of layer 0 in micro-batch 0 of update 0"),
    "logprob_entropy": ("update", "op logprob_entropy, output 0 in micro-batch 0 of update 0"),
    "logprob_backward": ("update", "op logprob_backward in micro-batch 0 of update 0"),
    "swiglu_backward_act": ("update", "op swiglu_backward_act, output 0 in micro-batch 0 of update 0"),
    "qkv_norm_rope_backward": ("update", "op qkv_norm_rope_backward, output 0 in micro-batch 0 of update 0"),
    "attend_backward": ("update", "op attend_backward, output 0 in micro-batch 0 of update 0"),
    "rms_norm_backward": ("update", "op rms_norm_backward, output 0 in micro-batch 0 of update 0"),
    "quantize_weight": ("rollout", "published weight model.layers.0.self_attn.q_proj.weight, before the step"),
}


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_an_op_with_other_last_bits_is_named(right: Path, tmp_path: Path, op: str) -> None:
    with wrong(op):
        other = tiny_run(tmp_path, small(right))
    found = bisect(right, other, around=(nullcontext, lambda: wrong(op)))
    assert found.differences == () and found.here == "both sides differ here as well", found
    assert (found.step, found.phase, found.what) == (1, *OPS[op]), found
    assert found.index is not None and found.bits is not None and found.bits[0] != found.bits[1], found
    if op == str(found.what).split()[1].rstrip(","):  # the op itself, not one that it is a part of
        assert found.index[-1] == PLACE and not any(found.index[:-1]), found
        a, b = (int(text.partition("(0x")[2].rstrip(")"), 16) for text in found.bits)
        assert a ^ b == 1, found.bits


def test_an_optimizer_with_other_last_bits_is_named(tmp_path: Path) -> None:
    mixed = {"train.optimizer_dtype": "bfloat16"}
    right = tiny_run(tmp_path / "right", SMALL | mixed)
    with wrong("adamw_step_"):
        other = tiny_run(tmp_path / "other", small(right) | mixed)
    found = bisect(right, other, around=(nullcontext, lambda: wrong("adamw_step_")))
    assert found.phase == "weights" and "op adamw_step_" in str(found.what), found
    assert found.index is not None and found.index[-1] == PLACE, found


# ---- weights and moments: a fault that happens once -----------------------------------------------------------------


def turn_once(value: Tensor) -> None:
    bits = value.detach().view(-1).view(torch.int32)
    bits[PLACE] ^= 1


@contextmanager
def hit(what: str, name: str) -> Iterator[None]:
    """Before the publishing that ends step 1, one bit of a master weight, or of its first moment, turns."""
    true, held = loop.publish, list[Any]()

    def learner_of(*given: Any) -> Any:
        held.append(given[0])
        return update(*given)

    def publish(model: Any, version: int, *rest: Any) -> Any:
        if version == 1:
            param = masters_of(model)[name].param
            turn_once(param if what == "masters" else held[-1].optimizer.state[param]["exp_avg"])
        return true(model, version, *rest)

    update = loop.update
    with mock.patch.object(loop, "publish", publish), mock.patch.object(loop, "update", learner_of):
        yield


@pytest.mark.parametrize(("what", "name"), [
    ("masters", "embed.weight"), ("masters", "layers.1.mlp.down.weight"), ("masters", "norm.weight"),
    ("moments", "layers.0.attn.qkv.weight"),
])
def test_a_bit_of_a_weight_or_moment_is_named(right: Path, tmp_path: Path, what: str, name: str) -> None:
    with hit(what, name):
        other = tiny_run(tmp_path, small(right))
    found = bisect(right, other)
    assert found.phase == "weights" and name in str(found.what), found
    assert found.index == ((PLACE,) if name == "norm.weight" else (0, PLACE)) and found.bits is not None, found
    a, b = (int(text.partition("(0x")[2].rstrip(")"), 16) for text in found.bits)
    assert a ^ b == 1 and "it is what A recorded: the other's difference does not happen again" in found.here, found


# ---- data -----------------------------------------------------------------------------------------------------------


def answer_changed(how: Callable[[Segment], Segment]) -> Callable[[StepRecord], StepRecord]:
    def change(one: StepRecord) -> StepRecord:
        group = one.learnt[0]
        first = group.trajectories[0]
        changed = replace(first, segments=(first.segments[0], how(first.segments[1])))
        return replace(one, learnt=(
            replace(group, trajectories=(changed, *group.trajectories[1:])), *one.learnt[1:]
        ))

    return change


def group_changed(**values: Callable[[Any], Any]) -> Callable[[StepRecord], StepRecord]:
    def change(one: StepRecord) -> StepRecord:
        group = one.learnt[0]
        changed = {key: (how(getattr(group, key)[0]), *getattr(group, key)[1:]) for key, how in values.items()}
        return replace(one, learnt=(replace(group, **changed), *one.learnt[1:]))

    return change


def token(segment: Segment) -> Segment:
    tokens = segment.tokens.copy()
    tokens[0] = (tokens[0] + 1) % 10
    return replace(segment, tokens=tokens)


def log_prob(segment: Segment) -> Segment:
    bits = segment.logprobs.copy().view(np.int32)
    bits[0] ^= 1
    return replace(segment, logprobs=bits.view(np.float32))


def request_id(one: StepRecord) -> StepRecord:
    group = one.learnt[0]
    first = replace(group.trajectories[0], request_id=99)
    return replace(one, learnt=(replace(group, trajectories=(first, *group.trajectories[1:])), *one.learnt[1:]))


def packing(one: StepRecord) -> StepRecord:
    return replace(one, digests={**one.digests, "batch/0/0/cu_seqlens": 1})


def up(value: float) -> float:
    return float(np.nextafter(value, 9.0))


DATA: dict[str, tuple[Callable[[StepRecord], StepRecord], str, str]] = {
    "token": (answer_changed(token), "rollout", "of completion 0 of prompt 0, turn 0"),
    "log-prob": (answer_changed(log_prob), "rollout", "of completion 0 of prompt 0, turn 0"),
    "request id": (request_id, "rollout", "the request id of completion 0 of prompt 0"),
    "reward": (group_changed(rewards=up), "rewards", "reward of completion 0 of prompt 0"),
    "advantage": (group_changed(advantages=up), "advantages", "advantage of completion 0 of prompt 0"),
    "packing": (packing, "batch", "the digest batch/0/0/cu_seqlens"),
}


@pytest.mark.parametrize("what", DATA)
def test_a_changed_record_is_named(right: Path, tmp_path: Path, what: str) -> None:
    change, phase, said = DATA[what]
    other = Path(shutil.copytree(right, tmp_path / "tiny"))
    record.write(other, change(record.read(other, 1)))
    found = bisect(right, other)
    assert found.phase == phase and said in str(found.recorded), found
    assert found.bits is not None and found.bits[0] != found.bits[1], found


def test_micro_batches_packed_otherwise_are_named(right: Path, tmp_path: Path) -> None:
    from jetrl.train import packing as room

    def turned(*given: Any) -> Any:
        return [*reversed(true(*given))]

    true = room.bin_pack
    with mock.patch.object(room, "bin_pack", turned):
        other = tiny_run(tmp_path, small(right))
    found = bisect(right, other, around=(nullcontext, lambda: mock.patch.object(room, "bin_pack", turned)))
    assert found.phase == "batch" and found.what == "tokens in micro-batch 0 of update 0", found
    assert found.bits == ("a tensor int64 [60]", "a tensor int64 [31]"), found


# ---- equal runs, and bad input --------------------------------------------------------------------------------------


def test_a_run_and_its_repetition_are_equal(right: Path, tmp_path: Path) -> None:
    other = tiny_run(tmp_path, small(right))
    found = bisect(right, other)
    assert found.same and found.compared == (1,) and found.differences == (), found


def test_taps_change_nothing_and_are_the_same_twice(right: Path) -> None:
    rows = []
    for _ in range(2):
        trace = Trace()
        with opened(right, 0) as rerun:
            before = rerun.session.model.layers[0].forward
            with tapped(rerun.session.model, trace):
                found, _ = rerun.repeat(record.read(right, 1), trace)
            assert rerun.session.model.layers[0].forward == before
        rows.append(trace.rows())
        digests = record.read(right, 1).digests
        assert {name: value % (1 << 64) for name, value in trace.rows() if name in digests} == digests
    assert rows[0] == rows[1] and len(rows[0]) > 200


def test_other_settings_and_machines_are_named(right: Path, tmp_path: Path) -> None:
    other = tiny_run(tmp_path, small(right) | {"rollout.temperature": 0.9})
    record.write(other, replace(record.read(other, 1), made_with={"jetrl": "9", "torch": "1", "device": "a GPU"}))
    found = bisect(right, other)
    assert found.differences[0] == "rollout.temperature = 1.0 in A, 0.9 in B"
    assert [text.partition(":")[0] for text in found.differences[1:]] == ["jetrl", "torch", "device"]
    assert found.phase == "rollout" and "log-probs" in str(found.what) or "op " in str(found.what), found


def test_runs_that_cannot_be_compared_are_refused(right: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="are the same run. Give two"):
        bisect(right, right)
    with pytest.raises(UserError, match="there is no such folder. Give a run folder"):
        bisect(right, tmp_path / "none")
    other = Path(shutil.copytree(right, tmp_path / "tiny"))
    shutil.rmtree(other / "replay")
    with pytest.raises(UserError, match="No step is recorded in both runs: .* keeps 1, .* keeps no steps. Keep more"):
        bisect(right, other)


def test_the_command_names_the_op(right: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(right, tmp_path / "tiny"))
    same = CliRunner().invoke(app, ["bisect", str(right), str(other)])
    assert same.exit_code == 0 and "All recorded values are equal: step 1" in same.output, same.output
    record.write(other, answer_changed(log_prob)(record.read(other, 1)))
    told = CliRunner().invoke(app, ["bisect", str(right), str(other)])
    assert told.exit_code == 1 and "Step 1 differs first, in its rollout" in told.output, told.output
    as_json = CliRunner().invoke(app, ["bisect", str(right), str(other), "--json"])
    assert json.loads(as_json.output)["phase"] == "rollout" and as_json.exit_code == 1


def test_both_commands_are_those_of_one_module() -> None:
    bare = typer.Typer()
    command.add_to(bare, Console(), lambda resumed: None)
    assert [(c.name or c.callback.__name__) for c in bare.registered_commands if c.callback] == ["replay", "bisect"]
