"""Whole runs on several ranks: the bits of one process, on any number of them, through stops, resumption and errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiny import numbers, tiny_config, tiny_run, weights_hash

from jetrl.config import to_toml
from jetrl.loop import run
from jetrl.parallel.world import World
from jetrl.report.recorder import read_samples
from jetrl.rollout.engine import PagedEngine
from jetrl.train import gather
from jetrl.train.stopping import StopRequest

FIXED: dict[str, Any] = {
    "train.reduction": "fixed", "train.max_tokens_per_gpu": 64, "checkpoint.save_interval": 1, "checkpoint.keep": 9
}
PPO = FIXED | {  # a critic of its own, a reference policy, a warm start, BF16 moments, shared prompts, few slots
    "train.steps": 2, "rl.adv_estimator": "gae", "rl.kl_coef": 0.01, "train.optimizer_dtype": "bfloat16",
    "train.share_prompts": True, "rollout.max_num_seqs": 3, "sft": {"steps": 2, "batch_size": 4, "lr": 1e-3},
}
ROOT = Path(__file__).parents[1]


def rank_run(world: World, folder: Path, changes: dict[str, Any]) -> bool:
    """The tiny run on the ranks of `world`; whether it came to its last step."""
    changes = {key: value.format(folder=folder) if isinstance(value, str) else value for key, value in changes.items()}
    with StopRequest(world) as stop:
        return run(tiny_config(folder / str(world.rank), changes), folder / "runs" / "tiny", ["test"], stop)


def plain(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics without times and without what only several ranks have."""
    return [{k: v for k, v in row.items() if not k.startswith("rollout/")} for row in numbers(run_dir)]


def assert_same_run(run_dir: Path, other: Path) -> None:
    assert plain(run_dir) == plain(other)
    assert list(read_samples(run_dir)) == list(read_samples(other))
    steps = [row["step"] for row in plain(other)]
    assert [weights_hash(run_dir, n) for n in steps] == [weights_hash(other, n) for n in steps]


def with_cache(changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    own = {"sft": changes["sft"] | {"cache_dir": str(folder / "cache")}} if "sft" in changes else {}
    return changes | own | {"task.reward": f"{folder}/reward.py:reward"}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("straight")
    return tiny_run(folder, with_cache(FIXED, folder))


def both_runs(world: World, folder: Path, changes: list[dict[str, Any]]) -> list[bool]:
    return [rank_run(world, folder / str(i), one) for i, one in enumerate(changes)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_the_whole_run_has_the_bits_of_one_process(straight: Path, tmp_path: Path, size: int) -> None:
    (tmp_path / "ppo").mkdir()
    changes = [with_cache(FIXED, straight.parents[1]), with_cache(PPO, tmp_path / "ppo")]
    ppo = tiny_run(tmp_path / "ppo", changes[1])
    changes[1]["sft"] = changes[1]["sft"] | {"cache_dir": str(tmp_path / "another")}  # made again, by a rank
    assert run_ranks(both_runs, size, tmp_path, changes) == [[True, True]] * size
    assert_same_run(tmp_path / "0" / "runs" / "tiny", straight)
    assert plain(tmp_path / "1" / "runs" / "tiny") == plain(ppo)
    assert weights_of(tmp_path / "1" / "runs" / "tiny") == weights_of(ppo)
    assert all(row["parity/logprob_abs_diff_max"] == 0.0 for row in plain(straight)[1:])


def weights_of(run_dir: Path) -> list[bytes]:
    """The files of masters, moments and reference policy."""
    return [file.read_bytes() for file in sorted((run_dir / "checkpoints").rglob("*.safetensors"))]


def one_more_step(world: World, folder: Path, changes: dict[str, Any]) -> bool:
    return rank_run(world, folder, changes | {"checkpoint.resume": "auto"})


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(straight: Path, tmp_path: Path) -> None:
    changes = with_cache(FIXED, straight.parents[1])
    tiny_run(tmp_path, changes | {"train.steps": 1})
    assert run_ranks(one_more_step, 2, tmp_path, changes | {"train.steps": 2}) == [True] * 2
    assert run_ranks(one_more_step, 4, tmp_path, changes | {"train.steps": 3}) == [True] * 4
    tiny_run(tmp_path, changes | {"train.steps": 4, "checkpoint.resume": "auto"})
    run_dir = tmp_path / "runs" / "tiny"
    assert weights_hash(run_dir, 4) == weights_hash(straight, 4)
    assert list(read_samples(run_dir)) == list(read_samples(straight))


def signalled(world: World, folder: Path, changes: dict[str, Any]) -> list[bool]:
    """One rank alone gets SIGTERM in the rollout of step 2; then, resumed, the other Ctrl-C in an evaluation."""
    step, evaluate, steps = PagedEngine.step, gather.roll_out, []

    def killed(engine: PagedEngine) -> Any:
        steps.append(1)
        if world.rank == 1 and len(steps) == 25:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(engine)

    PagedEngine.step = killed  # type: ignore[method-assign]
    first = rank_run(world, folder, changes)
    PagedEngine.step = step  # type: ignore[method-assign]

    def interrupted(*args: Any) -> Any:
        if world.rank == 0 and args[2].first_id == asked_by_evaluation:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*args)

    asked_by_evaluation = gather.eval_asked(tiny_config(folder / "asked", changes)).first_id
    gather.roll_out = interrupted
    second = rank_run(world, folder, changes | {"checkpoint.resume": "auto"})
    gather.roll_out = evaluate
    return [first, second]


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_where_they_meet(straight: Path, tmp_path: Path) -> None:
    """And the steps that were done are saved; the resumed run ends with the bits of one left alone."""
    changes = with_cache(FIXED, straight.parents[1])
    assert run_ranks(signalled, 2, tmp_path, changes) == [[False, False]] * 2
    saved = sorted(p.name for p in (tmp_path / "runs" / "tiny" / "checkpoints").glob("step_*"))
    assert 0 < len(saved) < 5, saved
    tiny_run(tmp_path, changes | {"checkpoint.resume": "auto"})
    assert_same_run(tmp_path / "runs" / "tiny", straight)


def train_by_command(recipe: Path, *more: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "jetrl", "train", str(recipe), "--nproc", "2", *more], capture_output=True, text=True,
        timeout=200, env=clean | {"PYTHONPATH": str(ROOT)}, cwd=recipe.parent,
    )


@pytest.mark.slow
def test_the_command_starts_ranks_and_tells_a_mistake_once(straight: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, FIXED | {"train.steps": 1, "eval.eval_interval": 0})
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(to_toml(config))
    done = train_by_command(recipe)
    run_dir = tmp_path / "runs" / "tiny"
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.count("step 1/1") == 1
    assert json.loads((run_dir / "env.json").read_text())["ranks"] == 2
    bad = tmp_path / "bad.py"
    bad.write_text("def reward(completions, **_):\n    return [0.0] * (len(completions) - 1)\n")
    done = train_by_command(recipe, f"task.reward={bad}:reward", "task.params.check_gold=false")
    assert done.returncode == 2, done
    assert done.stderr.startswith("jetrl: ") and done.stderr.count("bad.py") == 1, done.stderr
    done = train_by_command(recipe, "train.stepps=3")
    assert done.returncode == 2 and done.stderr.count("stepps") == 1, done.stderr
