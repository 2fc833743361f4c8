"""Runs that carry answers over from one step to the next: their bits, their checkpoints, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import numbers, tiny_config, tiny_run, weights_hash

from jetrl.engine import engine as engine_module
from jetrl.engine.engine import PagedEngine
from jetrl.errors import UserError
from jetrl.report.recorder import read_samples
from jetrl.rl.mismatch import SampleSize
from jetrl.run import gather as gather_module
from jetrl.run.carried import Carry, dropped_told, ess_told, lags
from jetrl.run.checkpoint import suspended
from jetrl.run.loop import run
from jetrl.run.replay import checks, record
from jetrl.run.replay.checks import _spans as spans_of
from jetrl.run.replay.checks import replay
from jetrl.run.setup import build
from jetrl.run.stopping import GivenUp, StopRequest
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory

RAGGED: dict[str, Any] = {
    "rollout.overcommit": 1.0, "rollout.group_size": 2, "rollout.max_response_length": 40, "rl.rollout_is": "token",
    "eval.eval_interval": 3, "train.steps": 6, "checkpoint.save_interval": 3, "train.lr": 1e-3,
    "model.arch": None, "rl.max_off_policy_steps": 3,
}


def ragged(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Answers that end after 1 to 40 tokens, about half of them before 15."""
    from tiny import ARCH

    return RAGGED | {"model.arch": ARCH | {"initializer_range": 0.02}} | (changes or {})


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what became of drafts."""
    return {k: v for k, v in row.items() if "rollout/draft" not in k and "tokens_per_decode_step" not in k}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without an interruption."""
    return tiny_run(tmp_path_factory.mktemp("whole"), ragged())


def test_a_run_learns_from_tokens_of_several_versions(whole: Path) -> None:
    rows = numbers(whole)[1:]
    assert all(row["parity/logprob_abs_diff_max"] == 0 for row in rows if "parity/logprob_abs_diff_max" in row)
    assert max(row["rollout/off_policy_steps_max"] for row in rows) >= 2
    assert max(row["rollout/version_spans"] for row in rows) > 1
    assert all(row["rollout/carried"] == 4 and row["rollout/off_policy_steps_max"] <= 3 for row in rows)
    for row in rows:
        assert row["parity/frac_checked_live"] == pytest.approx(1 - row["rollout/frac_stale_tokens"])
        assert (row["rl/ess"] == 1.0) == (row["rollout/frac_stale_tokens"] == 0)
    by_step = [[s for s in read_samples(whole) if s["step"] == row["step"]] for row in rows]
    assert all(len(samples) == 8 for samples in by_step), "a step learns from prompts_per_step groups"
    groups = [{s["group"] for s in samples} for samples in by_step]
    assert len(set.union(*groups)) == 4 * 6, "no group is learned from twice"
    assert any(min(later) < max(earlier) for earlier, later in zip(groups, groups[1:], strict=False))


@pytest.mark.parametrize("change", [
    {"rollout.max_num_seqs": 3}, {"rollout.speculate": "on"}, {"rollout.kv_cache_tokens": 120, "rollout.page_size": 4},
], ids=str)
def test_how_the_engine_works_changes_no_bit(change: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    """What is cut where is a matter of tokens: slots, pages, preemption and drafts have no part in it."""
    other = tiny_run(tmp_path, ragged(change))
    assert weights_hash(other, 6) == weights_hash(whole, 6)
    assert [plain(row) for row in numbers(other)] == numbers(whole)


def test_a_run_that_stops_goes_on_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    """From a checkpoint in which groups are under way; the drafts of the engine may be others."""
    tiny_run(tmp_path, ragged({"train.steps": 3}))
    found = json.loads((tmp_path / "runs/tiny/checkpoints/step_000003/state.json").read_text())
    assert len(found["under_way"]) == 4 and suspended.FILE in found["files"]
    run_dir = tiny_run(tmp_path, ragged({"checkpoint.resume": "auto", "rollout.speculate": "on"}))
    assert weights_hash(run_dir, 6) == weights_hash(whole, 6)
    assert [plain(r) for r in numbers(run_dir) if r["step"] > 3] == [r for r in numbers(whole) if r["step"] > 3]


def test_a_rollout_that_is_given_up_keeps_what_was_under_way_before(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal in the middle of step 5: the run is saved after step 4, with the answers as they were then."""
    right = Carry.round

    def interrupted(self: Carry, count: int, on_step: Any) -> Any:
        steps: list[int] = []

        def stops(report: Any) -> None:
            steps.append(report.step)
            if self.step == 5 and len(steps) == 3:
                raise GivenUp
            on_step(report)

        return right(self, count, stops)

    monkeypatch.setattr(Carry, "round", interrupted)
    assert not run(tiny_config(tmp_path, ragged()), tmp_path / "runs/tiny", ["test"], StopRequest())
    monkeypatch.undo()
    found = json.loads((tmp_path / "runs/tiny/checkpoints/step_000004/state.json").read_text())
    assert len(found["under_way"]) == 4 and any(row["tokens"] for g in found["under_way"] for row in g["answers"])
    run_dir = tiny_run(tmp_path, ragged({"checkpoint.resume": "auto"}))
    assert weights_hash(run_dir, 6) == weights_hash(whole, 6) and numbers(run_dir)[1:] == numbers(whole)[1:]


def test_what_is_under_way_in_a_checkpoint_is_whole_or_refused(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, ragged({"train.steps": 1, "eval.eval_interval": 0}))
    folder = run_dir / "checkpoints/step_000001"
    meta = json.loads((folder / "state.json").read_text())
    session = build(tiny_config(tmp_path, ragged()))
    groups = suspended.unpacked(folder, meta["under_way"], meta["files"], session)
    table, content = suspended.packed(groups)
    assert table == meta["under_way"] and content == (folder / suspended.FILE).read_bytes()
    assert len(groups) == 4 and any(group.oldest == 0 for group in groups)
    with pytest.raises(UserError, match="under_way.safetensors cannot be read: .* the table has"):
        suspended.unpacked(folder, meta["under_way"][:1], meta["files"], session)
    data = bytearray((folder / suspended.FILE).read_bytes())
    data[-1] ^= 1
    (folder / suspended.FILE).write_bytes(bytes(data))
    with pytest.raises(UserError, match="does not have the hash .* Resume from another step of the run"):
        tiny_run(tmp_path, ragged({"train.steps": 2, "checkpoint.resume": "auto"}))
    (folder / suspended.FILE).unlink()
    with pytest.raises(UserError, match="under_way.safetensors cannot be read"):
        tiny_run(tmp_path, ragged({"train.steps": 2, "checkpoint.resume": "auto"}))


def test_what_would_get_too_old_waits_or_is_dropped(tmp_path: Path) -> None:
    """One step's bound: what is carried over must end in the next step, or goes."""
    short = {"rl.max_off_policy_steps": 1, "eval.eval_interval": 0}
    waits = numbers(tiny_run(tmp_path, ragged(short), "waits"))[1:]
    drops = numbers(tiny_run(tmp_path, ragged(short | {"rl.on_stale": "drop"}), "drops"))[1:]
    assert all(row["rollout/off_policy_steps_max"] <= 1 for row in (*waits, *drops))
    assert sum(row["rollout/dropped_stale"] for row in waits) == 0 < sum(row["rollout/dropped_stale"] for row in drops)


def test_every_token_is_replayed_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs by the learner, draws by the engine, updates by the trainer: 0 of them different. A span that is moved
    by one token, in the record alone, is found."""
    run_dir = tiny_run(tmp_path, ragged({"train.steps": 4, "eval.eval_interval": 0, "checkpoint.save_interval": 1}))
    for step in (2, 3, 4):
        for what in ("logprobs", "rollout", "update"):
            found = replay(run_dir, step, what)
            assert found.same and found.checked > 20, found
    one = record.read(run_dir, 3)
    assert max(len(t.turns[0].spans) for g in one.learnt for t in g.trajectories) > 1
    monkeypatch.setattr(checks, "_spans", lambda name, t: [
        replace(s, start=s.start - 1, before=s.before - 1) if s.before > 1 else s for s in spans_of(name, t)
    ])
    assert replay(run_dir, 3, "logprobs").different > 0


def test_a_step_without_a_record_needs_what_was_carried_into_it(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, ragged({"train.steps": 4, "eval.eval_interval": 0, "checkpoint.save_interval": 100}))
    (run_dir / "replay/step_000002.safetensors").unlink()
    with pytest.raises(UserError, match="no record of step 2, and cannot roll it out again: of the answers"):
        replay(run_dir, 4, "update")
    (run_dir / "replay/step_000001.safetensors").unlink()  # both are rolled out again, from the beginning
    assert replay(run_dir, 4, "update").same


def test_a_span_that_is_moved_is_found_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of the older weights that claims to be of the current ones: parity is not zero."""
    right = engine_module.spans_with
    monkeypatch.setattr(
        engine_module, "spans_with", lambda before, number, *rest: right(before, number - (number > 1), *rest)
    )
    rows = numbers(tiny_run(tmp_path, ragged({"train.steps": 3, "eval.eval_interval": 0})))[1:]
    assert max(row["parity/logprob_abs_diff_max"] for row in rows) > 0


def test_dynamic_sampling_fills_a_step_with_groups_that_carry_a_signal(tmp_path: Path) -> None:
    refill = {"rl.dynamic_sampling": "refill", "rl.max_refill_rounds": 20, "train.steps": 3, "eval.eval_interval": 0}
    run_dir = tiny_run(tmp_path, ragged(refill))
    rows = numbers(run_dir)[1:]
    assert max(row["rollout/refill_rounds"] for row in rows) > 1
    samples = list(read_samples(run_dir))
    for row in rows:
        own = [s for s in samples if s["step"] == row["step"]]
        learnt = {s["group"] for s in own if s["advantage"] is not None}
        assert len(learnt) == 4 and len(own) == 2 * row["rollout/num_prompts_sampled"]
    assert len({(s["group"]) for s in samples}) == len(samples) // 2, "no group is seen twice"


@pytest.mark.parametrize("more", [
    {"rl.updates_per_step": 2}, {"rl.updates_per_step": 2, "rl.surrogate": "cispo"}, {"rl.kl_coef": 0.1},
    {"rl.algo": "ppo"},
], ids=str)
def test_losses_that_compare_policies(more: dict[str, Any], tmp_path: Path) -> None:
    """Several updates, a reference and a critic: the old policy of stale tokens is the learner's own pass."""
    rows = numbers(tiny_run(tmp_path, ragged({"train.steps": 3, "eval.eval_interval": 0} | more)))[1:]
    assert all(row.get("parity/logprob_abs_diff_max", 0) == 0 and np.isfinite(row["policy/loss"]) for row in rows)
    assert max(row["rollout/frac_stale_tokens"] for row in rows) > 0


@pytest.mark.parametrize(("changes", "message"), [
    ({"rollout.engine": "vllm"}, 'rollout.engine = "vllm" cannot suspend answers'),
    ({"rollout.top_p": 0.9}, "the learner does not know what older weights kept"),
    ({"rl.rollout_is": "none"}, 'set rl.rollout_is = "token"'),
    ({"rl.max_off_policy_steps": 0}, "= 0 leaves nothing to carry over"),
    ({"rollout.overcommit": 1.5}, "must be at most 1, got 1.5"),
    ({"rollout.overcommit": 0.0, "rl.on_stale": "drop"}, "has no effect while rollout.overcommit = 0"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_what_does_not_go_together(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = {"rollout.overcommit": 0.5, "rl.rollout_is": "token"}
    with pytest.raises((UserError, ValueError), match=message):
        tiny_config(tmp_path, base | changes)


def test_lags_and_sample_sizes_by_hand() -> None:
    prompt = Segment("environment", (1, 2), "")
    answers = tuple(
        Trajectory((prompt, Segment("policy", (3,) * n, "", (-1.0,) * n, spans=spans)), "stop", "flow")
        for n, spans in ((4, ((0, 5), (1, 7))), (2, ((0, 7),)))
    )
    groups = [Group(Prompt(0, Problem("p", "", ""), (1, 2)), answers)]
    assert lags(groups, 7) == {
        "rollout/off_policy_steps_mean": 2 / 6, "rollout/off_policy_steps_max": 2.0, "rollout/frac_stale_tokens": 1 / 6,
        "rollout/version_spans": 1.5,
    }
    assert lags([], 7) == {}
    size = SampleSize()
    size.add(np.log([2.0, 1.0]), np.log([1.0, 1.0]))
    other = SampleSize()
    other.add(np.log([1.0]), np.log([1.0]))
    size.merge(other)
    assert size.share == pytest.approx((4 / 3) ** 2 / (6 / 3)) and other.share == 1.0
    other.add([0.0], [-1e6])  # beyond float64: one weight is all there is
    assert other.share == pytest.approx(0.5)
    assert "rl/ess = 0.40" in ess_told({"rl/ess": 0.4}) and ess_told({"rl/ess": 0.5}) == "" == ess_told({})


def test_an_age_limit_that_drops_most_of_what_is_under_way_is_told() -> None:
    said = dropped_told({"rollout/dropped_stale": 3.0, "rollout/carried": 2.0})
    assert "rollout/dropped_stale = 3, of 5 groups under way" in said and 'Set rl.on_stale = "wait"' in said
    for dropped, carried in ((2.0, 2.0), (0.0, 0.0), (0.0, 4.0)):
        assert not dropped_told({"rollout/dropped_stale": dropped, "rollout/carried": carried})
    assert not dropped_told({})


def test_a_repeat_of_a_step_gives_the_same(tmp_path: Path) -> None:
    """A rollout that is given up changes nothing in the session."""
    from jetrl.train.publish import publish

    session = build(tiny_config(tmp_path, ragged()))
    session.engine.load(publish(session.model, 0, session.flow_digest))
    found = []
    for _ in range(2):
        carry = Carry(session, 1)
        rollout = carry.round(4, lambda report: None)
        found.append((rollout.groups, carry.left(), carry.place))
    assert found[0] == found[1] and session.progress.under_way == () and found[0][2] == 8


def test_memory_is_predicted_for_all_that_is_under_way(tmp_path: Path) -> None:
    from jetrl.run.fit.memory import _asked

    plain, more = (tiny_config(tmp_path, ragged({"rollout.overcommit": share, "eval.eval_interval": 0} | (
        {"rl.max_off_policy_steps": 2} if not share else {}))) for share in (0.0, 0.5))
    assert list(_asked(plain, 1)) == [(8, 56)] and list(_asked(more, 1)) == [(12, 56)]


def test_without_overcommit_a_step_runs_none_of_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the feature costs where it is off: a look at the setting."""
    from jetrl.rollout import carry, carry_turns
    from jetrl.run import carried

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a function of carried answers ran")

    for module, names in (
        (carry, ("begin", "roll_on", "chosen", "Work")), (carry_turns, ("begin_talks", "talk_on")),
        (carried, ("Carry", "begin", "roll_on", "begin_talks", "talk_on", "lags")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, fails)
    monkeypatch.setattr(gather_module, "Carry", fails)
    monkeypatch.setattr(PagedEngine, "suspend", fails)
    monkeypatch.setattr(PagedEngine, "drawn", fails)
    monkeypatch.setattr(suspended, "packed", fails)
    off = {"rollout.overcommit": 0.0, "rl.max_off_policy_steps": 2, "train.steps": 1, "eval.eval_interval": 0}
    assert "rollout/carried" not in numbers(tiny_run(tmp_path, ragged(off)))[-1]
    with pytest.raises(AssertionError, match="a function of carried answers ran"):
        tiny_run(tmp_path / "on", ragged({"train.steps": 1, "eval.eval_interval": 0}))
