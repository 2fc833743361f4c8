"""`jetrl eval`, `compare` and `parity` on several ranks: what one process gives, to the bit, told once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from test_ranks_loop import assert_same_run
from tiny import tiny_config, tiny_run

from jetrl.api import evaluate_checkpoint, evaluation_config
from jetrl.cli import main
from jetrl.config import to_toml
from jetrl.errors import UserError
from jetrl.parallel.world import ALONE, World
from jetrl.rollout.rollout import Rollout
from jetrl.run import gather
from jetrl.run.compare import flows_of, run_all, said_of

ROOT = Path(__file__).parents[1]
CHANGES: dict[str, Any] = {
    "train.steps": 1, "train.reduction": "fixed", "train.max_tokens_per_gpu": 64, "task.num_eval": 7,
    "eval.num_samples": 3, "eval.temperature": 1.0, "rollout.max_num_seqs": 4, "checkpoint.save_interval": 1,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    return tiny_run(tmp_path_factory.mktemp("finished"), CHANGES)


def evaluated(world: World, run_dir: Path) -> tuple[Any, list[Rollout]]:
    """What an evaluation returns, and what was sampled for it."""
    seen: list[Rollout] = []
    real = gather.roll_out
    gather.roll_out = lambda *args: seen.append(real(*args)) or seen[-1]
    try:
        return evaluate_checkpoint(run_dir, None, ["eval.temperature=0.9"], None, world), seen
    finally:
        gather.roll_out = real


def compared(world: World, data: Path, folder: Path, flows: str) -> tuple[list[str], bool]:
    configs = [tiny_config(data, CHANGES | {"precision": flow}) for flow in flows_of(flows)]
    configs = [config.model_copy(update={"output_dir": str(folder)}) for config in configs]
    folders, report = run_all(configs, ["test"], world, lambda text: None)
    return [path.name for path in folders], report is not None and report.is_file()


def everything(world: World, finished: Path, folder: Path) -> dict[str, Any]:
    refused = ""
    try:
        evaluate_checkpoint(finished, None, ["task.num_eval=0"], None, world)
    except UserError as error:
        refused = str(error)
    return {
        "eval": evaluated(world, finished), "compare": compared(world, finished.parents[1], folder, "bf16,fp8"),
        "refused": refused,
    }


@pytest.mark.slow
def test_ranks_evaluate_and_compare_as_one_process(finished: Path, tmp_path: Path) -> None:
    wanted, sampled = evaluated(ALONE, finished)
    alone = compared(ALONE, finished.parents[1], tmp_path / "a", "bf16,fp8")
    assert len({t.num_policy_tokens for g in sampled[0].groups for t in g.trajectories}) > 3
    results = run_ranks(everything, 2, finished, tmp_path / "b")
    for result in results:
        (found, shared), runs = result["eval"], result["compare"]
        assert found == wanted and shared == sampled and len(shared[0].parts) == 2
        assert runs == alone == (["tiny-bf16", "tiny-fp8"], True)
        assert "num_eval" in result["refused"] and result["refused"] == results[0]["refused"]
    assert all(part.trajectories for part in shared[0].parts), "every rank has sampled"
    for name in runs[0]:
        assert_same_run(tmp_path / "b" / name, tmp_path / "a" / name)


def command(*words: str | Path, torchrun: bool = False) -> tuple[int, str, str]:
    """A command in processes of its own: status, output, error output."""
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"] if torchrun else []
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", *start, "jetrl", *map(str, words)], capture_output=True, text=True, timeout=200,
        env=clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_eval_prints_what_one_process_prints(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["jetrl", "eval", str(finished), "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    wanted = capsys.readouterr().out
    assert list(json.loads(wanted)) == ["model", "num_problems", "metrics"] and json.loads(wanted)["num_problems"] == 7
    assert command("eval", finished, "--json", "--nproc", "2")[:2] == (0, wanted)
    status, out, err = command("eval", finished / "none", "--nproc", "2")
    assert status == 2 and out == "" and err.startswith("jetrl: ") and err.count("\n") == 1, err


@pytest.mark.slow
def test_parity_under_torchrun_has_one_certificate_and_its_status(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(to_toml(tiny_config(tmp_path)))
    sizes = ("--sequences", "3", "--max-prompt", "12", "--new-tokens", "6")
    status, out, err = command("parity", recipe, *sizes, "--json", torchrun=True)
    certificate = json.loads(out)
    assert status == 0 and certificate["bit_equal"] and certificate["ranks"] == 2, err
    assert [link["link"] for link in certificate["links"]] == ["a", "b", "c", "v", "s", "w", "e", "f", "g"]
    assert certificate["formats"].startswith(f"precision fp8 (as {recipe} says)")
    status, out, err = command("parity", recipe, *sizes, "--precision", "fp8_rollout", "--update", "no", "--nproc", "2")
    assert status == 1 and out.rstrip().endswith("No certificate.") and err == "", (out, err)
    assert "rank 0: sequence 0" in out and "The update" not in out


def test_what_a_flow_is_told() -> None:
    assert said_of("bf16", ["quant.kv_cache=fp8", "train.lr=1"]) == ["train.lr=1", "precision=bf16"]
    assert flows_of("bf16, fp8,") == ["bf16", "fp8"]
    for wrong in ("", "fp8,fp8"):
        with pytest.raises(UserError, match="each flow once"):
            flows_of(wrong)


def test_an_evaluation_needs_a_task(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="belongs to no run"):
        evaluation_config(tmp_path, None, [])
