"""Whole runs on several ranks: the bits of one process, on any number of them, through stops, resumption and errors."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import numbers, tiny_config, tiny_run, weights_hash
from torch import Tensor

from jetrl.config import to_toml
from jetrl.engine.engine import PagedEngine
from jetrl.parallel.world import World
from jetrl.report.recorder import read_metrics, read_samples
from jetrl.run import gather
from jetrl.run.checkpoint import store
from jetrl.run.loop import run
from jetrl.run.stopping import StopRequest

FIXED: dict[str, Any] = {
    "train.reduction": "fixed", "train.max_tokens_per_gpu": 64, "checkpoint.save_interval": 1, "checkpoint.keep": 9
}
PPO = FIXED | {  # a critic of its own, a reference, a warm start in pieces, BF16 moments, few slots, truncation
    "train.steps": 2, "rl.adv_estimator": "gae", "rl.kl_coef": 0.01, "train.optimizer_dtype": "bfloat16",
    "train.share_prompts": True, "rollout.max_num_seqs": 3, "rollout.top_p": 0.9,
    "sft": {"steps": 2, "batch_size": 12, "lr": 1e-3},
}
ROOT = Path(__file__).parents[1]


def rank_run(world: World, folder: Path, changes: dict[str, Any]) -> bool:
    """The tiny run on the ranks of `world`; whether it came to its last step."""
    changes = {key: value.format(folder=folder) if isinstance(value, str) else value for key, value in changes.items()}
    with StopRequest(world) as stop:
        return run(tiny_config(folder / str(world.rank), changes), folder / "runs" / "tiny", ["test"], stop)


def assert_same_run(run_dir: Path, other: Path) -> None:
    assert numbers(run_dir) == numbers(other)
    assert list(read_samples(run_dir)) == list(read_samples(other))
    steps = [row["step"] for row in numbers(other)]
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
def test_given_answers_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """Supervised fine-tuning: which rank encodes, packs and learns what changes nothing, nor the held-out loss."""
    changes = FIXED | {
        "method": "sft", "rollout": {}, "task.reward": None, "task.max_prompt_length": None, "train.max_length": 64,
        "train.batch_size": 12, "train.steps": 2,
    }
    one = tiny_run(tmp_path / "one", changes)
    assert run_ranks(rank_run, 2, tmp_path, changes) == [True, True]
    assert_same_run(tmp_path / "runs" / "tiny", one)


@pytest.mark.parametrize("size", [2, 4])
def test_the_whole_run_has_the_bits_of_one_process(straight: Path, tmp_path: Path, size: int) -> None:
    (tmp_path / "ppo").mkdir()
    changes = [with_cache(FIXED, straight.parents[1]), with_cache(PPO, tmp_path / "ppo")]
    ppo = tiny_run(tmp_path / "ppo", changes[1])
    changes[1]["sft"] = changes[1]["sft"] | {"cache_dir": str(tmp_path / "another")}  # made again, by all
    assert run_ranks(both_runs, size, tmp_path, changes) == [[True, True]] * size
    assert_same_run(tmp_path / "0" / "runs" / "tiny", straight)
    assert numbers(tmp_path / "1" / "runs" / "tiny") == numbers(ppo)
    have, want = contents(tmp_path / "1" / "runs" / "tiny"), contents(ppo)
    assert have.keys() == want.keys() and [name for name in want if have[name] != want[name]] == []
    assert any(name.startswith("reference") for name in want) and any("critic_optimizer" in name for name in want)
    cached = [store.whole(next((tmp_path / cache).iterdir()) / "tensors") for cache in ("ppo/cache", "another")]
    assert {n: bits(v) for n, v in cached[0].items()} == {n: bits(v) for n, v in cached[1].items()}
    assert all(row["parity/logprob_abs_diff_max"] == 0.0 for row in numbers(straight)[1:])
    rows = read_metrics(tmp_path / "0" / "runs" / "tiny")[1:]
    assert any("perf/checkpoint_beside_s" in row for row in rows), "its checkpoints were written beside it"
    assert all(row["perf/communication_s"] > 0 and "perf/rank_idle_max_s" in row for row in rows)
    assert not any("communication" in key or "rank" in key for row in read_metrics(straight) for key in row)


@pytest.mark.slow
def test_a_teacher_judges_what_each_rank_holds(tmp_path: Path) -> None:
    """The bits of one process: each rank has the teacher whole, and makes its passes over its own micro-batches."""
    teacher = tiny_run(tmp_path / "teacher", {"train.steps": 1, "checkpoint.save_interval": 1, "eval.eval_interval": 0})
    changes = FIXED | {"rl.algo": "distill", "teacher.path": str(teacher), "train.steps": 2, "rl.updates_per_step": 2}
    alone = tiny_run(tmp_path / "alone", with_cache(changes | {"seed": 3}, tmp_path / "alone"))
    given = with_cache(changes | {"seed": 3}, tmp_path / "alone")
    assert run_ranks(rank_run, 2, tmp_path, given) == [True, True]
    assert_same_run(tmp_path / "runs" / "tiny", alone)
    assert all(row["policy/teacher_kl"] != 0 for row in numbers(alone)[1:])


def contents(run_dir: Path) -> dict[str, Any]:
    """All that is saved: masters, moments and reference policy, whoever wrote which rows; the model's files as they
    are."""
    folder, found = run_dir / "checkpoints", {}
    for path in [*folder.glob("step_*/state"), folder / "reference" / "tensors"]:
        found |= {f"{path.relative_to(folder)} {name}": bits(value) for name, value in store.whole(path).items()}
    found |= {str(file.relative_to(folder)): file.read_bytes() for file in folder.glob("step_*/model/*")}
    return found


def bits(value: Tensor) -> bytes:
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


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


# ---- the command, as users start it ---------------------------------------------------------------------------------

SLOWLY = """\
import time


def reward(completions, answer, **_):
    time.sleep(0.5)
    return [len(set(c) & set(a)) / len(set(a)) for c, a in zip(completions, answer)]
"""
ONE_A_MACHINE = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
"$@" & first=$!
"$@" & second=$!
wait $first; status=$?
wait $second && exit $status
"""


def recipe_in(folder: Path) -> Path:
    """The recipe of `straight`, with a reward that takes a while."""
    recipe = folder / "tiny.toml"
    recipe.write_text(to_toml(tiny_config(folder, FIXED)))
    (folder / "reward.py").write_text(SLOWLY)
    return recipe


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"PYTHONPATH": str(ROOT)}


def rank_process(launcher: int, rank: int) -> int:
    """The process id of a rank, by the launcher's."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (found,) = (c for c in children if f"\0RANK={rank}\0".encode() in Path(f"/proc/{c}/environ").read_bytes())
    return int(found)


@pytest.mark.slow
def test_the_command_starts_ranks_survives_a_kill_and_goes_on(straight: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jetrl", "train", str(recipe_in(tmp_path)), "--nproc", "2"]
    run_dir = tmp_path / "runs" / "tiny"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None and any(line.startswith("step 1/4") for line in process.stdout)
        pid = rank_process(process.pid, 1)
        os.kill(pid, signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    assert err == (
        f"jetrl: rank 1 (process {pid}) was ended by SIGKILL. Most likely the machine ran out of memory.\n"
    )
    assert process.returncode == 1 and "step 4/4" not in out
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=200, env=environment())
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.count("step 4/4") == 1 and json.loads((run_dir / "env.json").read_text())["ranks"] == 2
    assert_same_run(run_dir, straight)


@pytest.mark.slow
def test_the_slurm_example_on_two_machines_of_two_ranks(straight: Path, tmp_path: Path) -> None:
    """Its whole script, with an `srun` that starts two torchruns here. It goes on from a checkpoint of one process, as
    a job does that is put back into the queue, and has the bits of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("srun", ONE_A_MACHINE), ("scontrol", "#!/bin/bash\necho 127.0.0.1\necho other\n"),
        ("python", f'#!/bin/bash\nexec {sys.executable} "$@"\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "some", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "2",
        "PATH": f"{programs}:{os.environ['PATH']}", "NAME": "tiny", "OUTPUT": str(tmp_path / "runs"), "PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    script = ["bash", str(ROOT / "examples" / "slurm" / "train.sbatch"), str(recipe_in(tmp_path))]
    tiny_run(tmp_path, FIXED | {"train.steps": 2})
    done = subprocess.run(
        [*script, "train.steps=4"], capture_output=True, text=True, timeout=200, env=environment() | slurm
    )
    assert done.returncode == 0, done.stderr[:3000]
    assert "step 2/4" not in done.stdout and done.stdout.count("step 4/4") == 1
    (again,) = json.loads((tmp_path / "runs" / "tiny" / "env.json").read_text())["resumed"]
    assert again["ranks"] == 4 and again["after_step"] == 2
    assert_same_run(tmp_path / "runs" / "tiny", straight)
