"""Mishaps around a run, as a user meets them: two runs in a folder, damaged files, rewards that exit, closed pipes."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from test_cli import Cli, assert_refused
from test_cli import finished as finished
from test_cli import jetrl as jetrl
from test_cli import recipe as recipe

import jetrl as package
from jetrl.report.recorder import read_metrics


def test_two_processes_cannot_write_one_run(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert_refused(jetrl("train", recipe), "Another process is writing")
    assert jetrl("train", recipe, "train.steps=1")[0] == 0  # the system let go of it


def test_resume_needs_something_to_go_on_from(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    assert_refused(jetrl("train", recipe, "name=tyni", "--resume"), r"no run folder .*tyni", "name")
    assert not (tmp_path / "runs" / "tyni").exists()
    assert jetrl("train", recipe, "train.steps=1", "checkpoint.save_interval=0")[0] == 0
    before = read_metrics(tmp_path / "runs" / "tiny")
    never = "checkpoint.save_interval=0", "checkpoint.keep=2"  # nothing of the recipe is dropped, which would be told
    assert_refused(jetrl("train", recipe, *never, "--resume"), "2 rows", "no checkpoint")
    assert read_metrics(tmp_path / "runs" / "tiny") == before, "the rows are still there"


def test_a_start_that_fails_leaves_the_name_free(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    assert_refused(jetrl("train", recipe, "task.max_prompt_length=3"), "max_prompt_length")
    status, out, _ = jetrl("train", recipe, "train.steps=1")
    assert status == 0 and "already holds a run" not in out and not (tmp_path / "runs" / "tiny-2").exists()


@pytest.mark.parametrize("where", ["in the call", "on import"])
def test_a_reward_that_exits_does_not_end_the_run_quietly(jetrl: Cli, recipe: Path, tmp_path: Path, where: str) -> None:
    inside = "import sys\ndef reward(completions, **_):\n    sys.exit(0)\n"
    (tmp_path / "exit.py").write_text("import sys\nsys.exit(0)\n" if where == "on import" else inside)
    assert_refused(jetrl("train", recipe, f"task.reward={tmp_path}/exit.py:reward"), "SystemExit", r"exit\.py")


def test_a_reward_that_raises_names_the_line(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def reward(completions, **_):\n    x = 1\n    return answ\n")
    assert_refused(jetrl("train", recipe, f"task.reward={tmp_path}/bad.py:reward"), "NameError", r"bad\.py, line 3")


@pytest.mark.parametrize("value", ["1e308", "10**400", "-1e31"])
def test_a_reward_beyond_all_measure(jetrl: Cli, recipe: Path, tmp_path: Path, value: str) -> None:
    (tmp_path / "big.py").write_text(f"def reward(completions, **_):\n    return [{value}] * len(completions)\n")
    assert_refused(jetrl("train", recipe, f"task.reward={tmp_path}/big.py:reward"), "Reward function")


def test_a_damaged_warm_start_cache_is_named(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    warm = (recipe, "sft.steps=2", f"sft.cache_dir={tmp_path}/cache", "train.steps=1")
    assert jetrl("train", *warm)[0] == 0
    (cache,) = (tmp_path / "cache").iterdir()
    for file in (cache / "files.json", *(cache / "tensors").iterdir()):
        whole = file.read_bytes()
        for damaged in (whole[:50], whole[:-50] + bytes([whole[-50] ^ 64]) + whole[-49:]):
            file.write_bytes(damaged)
            assert_refused(jetrl("train", *warm, "name=again"), re.escape(str(cache)), "Remove the cached warm start")
        file.write_bytes(whole)
    shutil.rmtree(cache)
    assert jetrl("train", *warm, "name=again")[0] == 0


def test_a_warm_start_that_diverges(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    wild = ("sft.steps=4", "sft.lr=1e30", f"sft.cache_dir={tmp_path}/cache")
    for verb in ("train", "sft"):
        assert_refused(jetrl(verb, recipe, *wild), "warm start stops", r"Lower sft\.lr")


def test_weights_that_are_not_finite(jetrl: Cli, recipe: Path, finished: Path, tmp_path: Path) -> None:
    assert jetrl("export", finished, tmp_path / "model")[0] == 0
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    next(iter(weights.values())).view(-1)[3] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    for command in (("parity", tmp_path / "model"), ("export", tmp_path / "model", tmp_path / "out")):
        assert_refused(jetrl(*command), r"model\.safetensors", "not finite")


def test_a_damaged_model_in_a_checkpoint(jetrl: Cli, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    file = tmp_path / "copy" / "checkpoints" / "step_000002" / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-7] ^= 1
    file.write_bytes(data)
    for command in (("eval", tmp_path / "copy"), ("export", tmp_path / "copy", tmp_path / "out")):
        assert_refused(jetrl(*command), "does not have the recorded hash")


def test_the_certificate_of_a_run_is_that_of_its_precision(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    sizes = ("--sequences", 2, "--max-prompt", 8, "--new-tokens", 4)
    assert jetrl("train", recipe, "precision=fp8_rollout", "train.steps=1", "name=mixed")[0] == 0
    status, out, _ = jetrl("parity", tmp_path / "runs" / "mixed", *sizes)
    assert status == 1 and "precision fp8_rollout" in out and "No certificate" in out
    assert jetrl("parity", tmp_path / "runs" / "mixed", "--precision", "fp8", *sizes)[0] == 0


def test_odd_files_of_a_run(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    assert jetrl("train", recipe, "train.steps=1")[0] == 0
    folder = tmp_path / "runs" / "tiny"
    (folder / "env.json").write_text("{")
    (folder / "checkpoints" / "latest").write_bytes(b"\xff\xfe")
    assert jetrl("train", recipe, "train.steps=2", "--resume")[0] == 0, "neither may keep a run from going on"
    for name, row in (("samples.jsonl", '{"step": 1}\n'), ("metrics.jsonl", '{"step": "x"}\n')):
        with (folder / name).open("a") as file:
            file.write(row)
        assert_refused(jetrl("report", folder), name.replace(".", r"\."), "Remove that row")


@pytest.mark.parametrize(
    "command",
    [("flow", "RECIPE", "--svg", "."), ("train", "RECIPE", "output_dir=/proc/x"),
     ("train", "RECIPE", "name=" + "a" * 300)],
)
def test_paths_that_cannot_be_written(jetrl: Cli, recipe: Path, command: tuple[str, ...]) -> None:
    assert_refused(jetrl(*(recipe if part == "RECIPE" else part for part in command)), r"\w")


@pytest.mark.parametrize("option", ["--sequences", "--new-tokens", "--max-prompt"])
def test_sizes_of_the_certificate(jetrl: Cli, recipe: Path, option: str) -> None:
    status, _, err = jetrl("parity", recipe, option, 0)
    assert status == 2 and "Traceback" not in err and option in err


def test_compare_wants_each_flow_once(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    assert_refused(jetrl("compare", recipe, "--precision", "bf16,bf16"), "each flow once")
    assert not (tmp_path / "runs").exists()


def test_a_bad_prompt_stops_the_run_before_it_begins(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    lines = [f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}' for a in range(10, 20) for b in range(10, 14)]
    (tmp_path / "data.jsonl").write_text("\n".join([*lines, '{"prompt": "what?", "answer": "1"}']))
    changes = ("task.name=file", f"task.train_file={tmp_path}/data.jsonl", "task.params={}", "train.steps=1")
    assert_refused(jetrl("train", recipe, *changes), r"data\.jsonl:41", "cannot encode")


def test_closed_output_and_version(recipe: Path, tmp_path: Path) -> None:
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": str(Path(package.__file__).parents[1])}
    command = [sys.executable, "-m", "jetrl.cli"]
    asked = subprocess.run([*command, "--version"], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert asked.stdout == f"jetrl {package.__version__}\n"
    with subprocess.Popen(
        [*command, "train", str(recipe)], env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()
        told = run.stderr.read()
    assert run.returncode == 2 and "standard output was closed" in told and "Traceback" not in told, told


def test_a_broken_record_of_a_checkpoint(jetrl: Cli, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    (tmp_path / "copy" / "checkpoints" / "step_000002" / "state.json").write_text("{")
    for command in (("eval", tmp_path / "copy"), ("export", tmp_path / "copy", tmp_path / "out")):
        assert_refused(jetrl(*command), r"state\.json cannot be read")
