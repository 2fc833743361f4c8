"""`jetrl replay`: what a run keeps of its steps, and that a replay gives the same bits or names what differs."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import ARCH, numbers, tiny_config, tiny_run, weights_hash
from torch import Tensor
from typer.testing import CliRunner

from jetrl.cli import app
from jetrl.errors import Notice, UserError
from jetrl.model.names import tensor_table
from jetrl.model.weights import published_bytes
from jetrl.precision.recipe import build_recipe
from jetrl.run.loop import StopRequest, run
from jetrl.run.replay import keeping, record, rerun, show
from jetrl.run.replay.checks import WHATS, replay, spans_of
from jetrl.run.replay.record import StepRecord
from jetrl.spec import SHAPES
from jetrl.train import digests
from jetrl.train.digests import UNSEEN
from jetrl.types import Group, Prompt, Request, SamplingParams, Segment, Trajectory

RUNS: dict[str, dict[str, Any]] = {
    "updates": {
        "rl.updates_per_step": 2, "train.max_tokens_per_gpu": 64, "rl.kl_coef": 0.1, "precision": "bf16",
        "rl.adv_estimator": "reinforce_pp", "rl.kl_in": "reward",
    },
    "critic": {"rl.algo": "ppo", "rl.updates_per_step": 2, "rl.mask_truncated": True},
    "truncated": {
        "rollout.top_p": 0.8, "rollout.logprobs": "sampled", "rl.dynamic_sampling": "refill",
        "train.share_prompts": True, "train.optimizer_dtype": "bfloat16",
    },
    "adapters": {"lora.rank": 4, "rl.kl_coef": 0.1},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints 0, 2 and 4."""
    return tiny_run(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def copied(plain: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(plain, tmp_path / "tiny"))


def change(run_dir: Path, step: int, how: Callable[[StepRecord], StepRecord]) -> None:
    """Write a record anew, with something changed; its hash is right."""
    record.write(run_dir, how(record.read(run_dir, step)))


def first_answer(one: StepRecord, how: Callable[[Segment], Segment]) -> StepRecord:
    """The record with a change in the first answer of its first group."""
    group = one.learnt[0]
    trajectory = group.trajectories[0]
    prompt, answer = trajectory.segments
    changed = replace(trajectory, segments=(prompt, how(answer)))
    return replace(one, learnt=(
        replace(group, trajectories=(changed, *group.trajectories[1:])), *one.learnt[1:],
    ))


def flipped(values: np.ndarray, place: int) -> np.ndarray:
    """Log-probs with the last bit of one turned."""
    bits = values.copy().view(np.int32)
    bits[place] ^= 1
    return bits.view(np.float32)


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_every_step_gives_the_recorded_bits(plain: Path, step: int, what: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in plain.rglob("*")}
    found = replay(plain, step, what)
    assert found.same and found.first is None and found.notes == () and found.checked > 100, found
    assert before == {path: path.stat().st_mtime_ns for path in plain.rglob("*")}, "it writes nothing"


@pytest.mark.parametrize("kind", RUNS)
def test_all_kinds_of_updates_give_the_recorded_bits(tmp_path: Path, kind: str) -> None:
    run_dir = tiny_run(tmp_path, RUNS[kind] | {"train.steps": 2})
    for what in WHATS:
        found = replay(run_dir, 2, what)
        assert found.same and found.checked > 20, found


def test_conversations_are_drawn_turn_by_turn(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, {
        "environment.name": "retry", "environment.params": {"attempts": 2, "feedback": "?"}, "task.reward": None,
        "environment.at_limit": "zero", "environment.max_turn_tokens": 8, "rollout.max_response_length": 30,
        "train.steps": 2,
    })
    assert max(span.turn for span in spans_of(record.read(run_dir, 2))) > 0
    assert all(replay(run_dir, 2, what).same for what in WHATS)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    def answer(text: str, *tokens: int, spans: tuple[tuple[int, int], ...] = ((0, 3),)) -> Segment:
        return Segment("policy", list(tokens), text, np.float32(tokens) / -7, 0.1, spans=spans)  # type: ignore[arg-type]

    opening, reply = (Segment("environment", [70000, 2], ""), Segment("environment", [5], ""))  # type: ignore[arg-type]
    first = Trajectory((opening, answer("", 1, 2), reply, answer("", 4, spans=((0, 4),))), "turns", "flow", "", 17)
    second = Trajectory((opening, answer("", 9, 8, 7, spans=((0, 2), (2, 4)))), "stop", "flow", "", 18)
    prompt = Prompt(3, record._MISSING, ())
    group = Group(
        prompt, (first, second), (0.1, 1 / 3), (None, (1e-30, -0.5, 0.0)), {"a": (0.5, None)}, (1.0, 2.0), {},
        (0.2, 0.4), (3.0, 4.0),
    )
    failed = Trajectory((opening,), "error", "", "it broke", 19)
    one = StepRecord(5, 4, "flow", 8, 12, 1, (group,), (replace(group, advantages=(None, None)),), ((7, failed),),
                     {"a": (1 << 64) - 1, "b": 0}, {"jetrl": "1"})
    path = record.write(tmp_path, one)
    again = record.read(tmp_path, 5)
    assert again == one and [t.request_id for _, t in again.trajectories()] == [17, 18, 17, 18, 19]
    assert [p.name for p in path.parent.iterdir()] == ["step_000005.safetensors"]


def test_a_token_takes_few_bytes(plain: Path) -> None:
    config = tiny_config(plain.parent.parent)
    one = record.read(plain, 1)
    arrays = sum(2 * len(s.tokens) + 4 * len(s.logprobs) for _, t in one.trajectories() for s in t.segments[1:])
    most = keeping.bytes_of_step(config, rerun.build(config, weights=False).model.spec)
    assert arrays < most < 2 * arrays
    assert record.path_of(plain, 1).stat().st_size < most + 12_000  # digests and rows
    assert "newest 100 steps" in keeping.told(config, rerun.build(config, weights=False).model.spec)


def test_digests_read_every_byte_of_a_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/REPLAY.md counts for 8 billion parameters: masters, gradients, moments, what is published."""
    read: list[int] = []
    true = digests.digests

    def counted(values: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
        read.extend(value.nbytes for value in values)
        return true(values, starts)

    monkeypatch.setattr(digests, "digests", counted)
    run_dir = tiny_run(tmp_path, {"train.steps": 1, "eval.eval_interval": 0})
    with rerun.opened(run_dir, 0) as opened:
        model = opened.session.model
        count, tokens = sum(p.numel() for p in model.parameters()), 4 * 4 * 26
        expected = count * (4 + 4 + 8) + published_bytes(model.spec, model.recipe)
    assert expected <= sum(read) <= expected + 60 * tokens + 8 * 20, (expected, sum(read))
    spec = SHAPES["qwen3-8b"]
    shapes = [piece.shape for pieces in tensor_table(spec).values() for piece in pieces]
    large = sum(prod(shape) for shape in shapes)
    published = published_bytes(spec, build_recipe("fp8", spec.num_layers))
    assert (large * 16 + published) / 1e9 == pytest.approx(140, abs=1)
    assert (large * 8 + published) / 1e9 == pytest.approx(75, abs=1)


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["logprobs", "rollout"])
def test_the_last_bit_of_a_log_prob_is_found(copied: Path, what: str) -> None:
    change(copied, 3, lambda one: first_answer(one, lambda s: replace(s, logprobs=flipped(s.logprobs, 2))))
    found = replay(copied, 3, what)
    one = record.read(copied, 3).learnt[0]
    place = len(one.trajectories[0].segments[0].tokens) + 2
    assert found.different == 1 and found.first is not None
    assert f"completion 0 of prompt {one.prompt.index}, token {place} (version 2)" in found.first, found.first


def test_a_changed_token_is_found_by_draws_log_probs_and_the_update(copied: Path) -> None:
    def other(s: Segment) -> Segment:
        tokens = s.tokens.copy()
        tokens[1] = (tokens[1] + 1) % 10
        return replace(s, tokens=tokens)

    change(copied, 3, lambda one: first_answer(one, other))
    for what in ("logprobs", "rollout"):
        found = replay(copied, 3, what)
        assert found.different >= 1 and "(version 2)" in str(found.first), found
    found = replay(copied, 3, "update")
    assert found.first is not None and "tokens in micro-batch 0 of update 0" in found.first, found


def test_a_wrong_advantage_and_a_wrong_digest_are_found(copied: Path) -> None:
    def advantage(one: StepRecord) -> StepRecord:
        group = one.learnt[1]
        values = (float(np.nextafter(group.advantages[0], 9.0)), *group.advantages[1:])  # type: ignore[arg-type]
        return replace(one, learnt=(one.learnt[0], replace(group, advantages=values), *one.learnt[2:]))

    change(copied, 3, advantage)
    found = replay(copied, 3, "update")
    assert found.different == 1 and "advantage of completion 0 of prompt" in str(found.first), found
    name = next(n for n in record.read(copied, 1).digests if n.startswith("update/0/gradient/"))
    change(copied, 1, lambda one: replace(one, digests={**one.digests, name: one.digests[name] ^ 1}))
    found = replay(copied, 1, "update")
    assert found.different == 1 and "gradient of embed.weight in update 0" in str(found.first), found


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose third step learns from answers that several versions drew."""
    return tiny_run(tmp_path_factory.mktemp("carried"), {
        "rollout.overcommit": 1.0, "rollout.group_size": 2, "rollout.max_response_length": 40,
        "rl.rollout_is": "token", "rl.max_off_policy_steps": 3, "model.arch": ARCH | {"initializer_range": 0.02},
        "train.steps": 3, "eval.eval_interval": 0, "checkpoint.save_interval": 1, "checkpoint.keep": 4,
    })


def with_spans(one: StepRecord, how: Callable[[Segment], Segment]) -> StepRecord:
    """The record with a change in its first answer that several versions drew."""
    for place, group in enumerate(one.learnt):
        for number, trajectory in enumerate(group.trajectories):
            prompt, answer = trajectory.segments
            if len(answer.spans) > 1:
                changed = replace(trajectory, segments=(prompt, how(answer)))
                trajectories = list(group.trajectories)
                trajectories[number] = changed
                learnt = list(one.learnt)
                learnt[place] = replace(group, trajectories=tuple(trajectories))
                return replace(one, learnt=tuple(learnt))
    raise AssertionError("no answer has several spans")


@pytest.mark.parametrize("by", [1, -1])
def test_a_span_that_is_moved_by_one_token_is_found(carried: Path, tmp_path: Path, by: int) -> None:
    def moved(answer: Segment) -> Segment:
        first, (start, version), *rest = answer.spans
        return replace(answer, spans=(first, (start + by, version), *rest))

    assert replay(carried, 3, "logprobs").same
    run_dir = Path(shutil.copytree(carried, tmp_path / "tiny"))
    change(run_dir, 3, lambda one: with_spans(one, moved))
    found = replay(run_dir, 3, "logprobs")
    assert found.different == 1 and "(version" in str(found.first), found


@pytest.mark.parametrize("kept", [True, False])
def test_old_keys_that_are_kept_are_found(carried: Path, tmp_path: Path, kept: bool) -> None:
    """An answer of version 1 that goes on after an update, with the keys and values that it has, or computed again."""
    run_dir, one = Path(shutil.copytree(carried, tmp_path / "tiny")), record.read(carried, 3)
    trajectory = one.learnt[0].trajectories[0]
    with rerun.opened(run_dir, 1) as opened:
        session, engine = opened.session, opened.session.engine
        prompt = tuple(trajectory.segments[0].tokens.tolist())
        sampling = SamplingParams(30, ignore_eos=True, seed=session.config.seed)
        engine.add([Request(7, prompt, sampling)])
        while engine.drawn()[7] < 5:
            engine.step()
        first = engine.drawn()[7]
        if kept:
            rerun.learn(session, record.read(run_dir, 2).learnt, 2, 0, UNSEEN)
        else:
            (under_way,) = engine.suspend()
            opened.to(2)
            engine.resume([under_way])
        while engine.has_work:
            engine.step()
        (completion,) = engine.collect()
    assert first < len(completion.tokens)
    answer = Segment("policy", completion.tokens, "", completion.logprobs, spans=((0, 1), (first, 2)))
    other = replace(trajectory, segments=(trajectory.segments[0], answer), request_id=7)
    change(run_dir, 3, lambda one: replace(one, learnt=(
        replace(one.learnt[0], trajectories=(other, *one.learnt[0].trajectories[1:])), *one.learnt[1:],
    )))
    found = replay(run_dir, 3, "logprobs")
    if not kept:
        assert found.same, found
        return
    assert found.different > 0 and f"prompt {one.learnt[0].prompt.index}, token" in str(found.first), found
    token = int(str(found.first).partition(", token ")[2].split()[0])
    assert token >= len(prompt) + first and "(version 2)" in str(found.first), "those before it are of version 1"


def test_weights_that_cannot_be_made_again_are_noted(copied: Path) -> None:
    name = next(n for n in record.read(copied, 1).digests if n.startswith("published/"))
    change(copied, 1, lambda one: replace(one, digests={**one.digests, name: one.digests[name] ^ 1}))
    found = replay(copied, 2, "logprobs")
    assert found.same and "replay the update of step 1" in found.notes[0], found


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_keeping_steps_changes_no_bit(tmp_path: Path, plain: Path) -> None:
    off = tiny_run(tmp_path, {"checkpoint.replay_steps": 0})
    assert not (off / "replay").exists() and numbers(off) == numbers(plain)
    assert weights_hash(off, 4) == weights_hash(plain, 4)
    with pytest.raises(UserError, match="no record of any step. Set checkpoint.replay_steps above 0"):
        replay(off, 1, "logprobs")
    assert "no steps are kept" in keeping.told(
        tiny_config(tmp_path, {"checkpoint.replay_steps": 0}), rerun.build(rerun.config_of(off)).model.spec
    )


def test_only_the_newest_steps_are_kept_and_others_are_rolled_out_again(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, {"checkpoint.replay_steps": 1, "checkpoint.save_interval": 3})
    assert record.steps_of(run_dir) == [4]
    shutil.rmtree(run_dir / "checkpoints" / "step_000003")
    said: list[str] = []
    found = replay(run_dir, 4, "logprobs", said.append)
    assert found.same and [text for text in said if "rolled out anew" in text] == [
        f"step {step} again, rolled out anew" for step in (1, 2, 3)
    ]
    with pytest.raises(UserError, match="no record of step 2: it keeps those of steps 4. Take one of these"):
        replay(run_dir, 2, "rollout")


def test_an_estimator_of_ones_own_is_not_asked_for_recorded_steps(tmp_path: Path) -> None:
    """It reads texts, which records do not hold; a step that is rolled out again has them, and asks it."""
    (tmp_path / "mine.py").write_text(
        "def mine(groups, config):\n"
        "    texts = [[''.join(s.text for s in one.trajectory.turns) for one in group] for group in groups]\n"
        "    assert any(map(any, texts)), 'no text'\n"
        "    return [[one.score - len(text) / 7 for one, text in zip(*pair)] for pair in zip(groups, texts)]\n"
    )
    run_dir = tiny_run(tmp_path, {
        "rl.adv_estimator": f"{tmp_path}/mine.py:mine", "train.steps": 3, "checkpoint.replay_steps": 1,
        "checkpoint.save_interval": 3, "eval.eval_interval": 0,
    })
    shutil.rmtree(run_dir / "checkpoints" / "step_000003")
    assert replay(run_dir, 3, "update").same


def test_a_run_without_checkpoints_begins_anew(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, {
        "checkpoint.save_interval": 0, "checkpoint.keep": None, "rl.kl_coef": 0.1, "train.steps": 2,
    })
    assert all(replay(run_dir, 2, what).same for what in WHATS)


def test_a_resumed_run_makes_later_records_again(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path)
    before = record.read(run_dir, 3)
    shutil.rmtree(run_dir / "checkpoints" / "step_000004")
    (run_dir / "checkpoints" / "latest").write_text("step_000002\n")
    config = tiny_config(tmp_path, {"train.steps": 3, "checkpoint.resume": "auto"})
    assert run(config, run_dir, ["test"], StopRequest())
    assert record.steps_of(run_dir) == [1, 2, 3]
    assert record.read(run_dir, 3) == before


def test_a_full_disk_is_told_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(arrays: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record, "save_file", full)
    with pytest.warns(Notice, match="this step is not kept for `jetrl replay`: No space left on device. Training goes"):
        run_dir = tiny_run(tmp_path, {"train.steps": 2})
    assert not any((run_dir / "replay").iterdir()) and (run_dir / "checkpoints" / "step_000002").is_dir()


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_versions_that_are_gone_are_named(tmp_path: Path, plain: Path) -> None:
    run_dir = tiny_run(tmp_path, {"sft.steps": 2, "sft.cache_dir": str(tmp_path / "c"), "checkpoint.keep": 1})
    with pytest.raises(UserError, match="the weights of version 1, with which step 2 began, are gone: its checkpoints "
                                        "are of steps 4, .* Take a later step, or keep more checkpoints"):
        replay(run_dir, 2, "logprobs")


def test_what_is_no_run_and_no_step_is_refused(tmp_path: Path, plain: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder. Give a run folder"):
        rerun.config_of(tmp_path / "none")
    with pytest.raises(UserError, match="has no config.toml, so it is not a run folder"):
        rerun.config_of(tmp_path)
    with pytest.raises(UserError, match="no record of step 9: it keeps those of steps 1 to 4"):
        replay(plain, 9, "update")
    with pytest.raises(UserError, match="one of logprobs, rollout, update, and not 'weights'"):
        replay(plain, 1, "weights")


@pytest.mark.parametrize("place", [3, 100, -1])
def test_a_damaged_record_is_one_message(copied: Path, place: int) -> None:
    path = record.path_of(copied, 2)
    data = bytearray(path.read_bytes())
    data[place] ^= 255
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"step_000002.safetensors cannot be read: .*restore it, or take another step"):
        replay(copied, 2, "logprobs")


def test_another_flow_ranks_and_versions_are_told(copied: Path) -> None:
    change(copied, 3, lambda one: replace(one, ranks=2))
    with pytest.raises(UserError, match="was computed by 2 ranks with train.reduction"):
        replay(copied, 3, "update")
    assert replay(copied, 3, "logprobs").same  # they are those of a checkpoint
    change(copied, 3, lambda one: replace(one, ranks=1, flow_digest="other"))
    with pytest.raises(UserError, match="was computed in the flow other, and here it is"):
        replay(copied, 3, "update")
    change(copied, 4, lambda one: replace(one, made_with={**one.made_with, "torch": "1.0"}))
    assert "torch: 1.0 in the run" in replay(copied, 1, "logprobs").notes[0]


@pytest.mark.parametrize("what", WHATS)
def test_tokens_that_the_model_does_not_have_are_refused(copied: Path, what: str) -> None:
    change(copied, 3, lambda one: first_answer(one, lambda s: replace(s, tokens=s.tokens + 500)))
    with pytest.raises(UserError, match="step 3 .* has the token 5.., and the model knows 0 to"):
        replay(copied, 3, what)


def test_ranges_are_read_by_people() -> None:
    assert record.ranges([1, 2, 3, 5, 7, 8]) == "1 to 3, 5, 7 to 8"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_the_outcome_and_ends_with_it(copied: Path) -> None:
    shown = CliRunner().invoke(app, ["replay", str(copied), "--what", "rollout"])
    assert shown.exit_code == 0 and "all equal, bit for bit" in shown.output and "Step 4:" in shown.output
    change(copied, 4, lambda one: first_answer(one, lambda s: replace(s, logprobs=flipped(s.logprobs, 0))))
    assert show.newest(copied) == 4
    told = CliRunner().invoke(app, ["replay", str(copied), "--json"])
    assert told.exit_code == 1
    found = json.loads(told.output)
    assert found["different"] == 1 and found["same"] is False and found["first"]
