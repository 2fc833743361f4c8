"""The command line as a user meets it: each verb, and one clear message with status 2 for every mistake."""

from __future__ import annotations

import errno
import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import numbers, tiny_config, tiny_run

from jetrl import cli
from jetrl.config import to_toml
from jetrl.report.recorder import read_eval_samples
from jetrl.run import loop
from jetrl.run.checkpoint import checkpoint

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def jetrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Cli]:
    """Calls the real entry point in a folder of its own: (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()

    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["jetrl", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        done = capsys.readouterr()
        return status, done.out, done.err

    yield call
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(tiny_config(tmp_path)))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, for the verbs that read one."""
    return tiny_run(tmp_path_factory.mktemp("finished"), {"train.steps": 2})


def assert_refused(result: tuple[int, str, str], *patterns: str) -> None:
    status, _, err = result
    assert status == 2, (status, err)
    assert "Traceback" not in err and err.startswith("jetrl: "), err
    for pattern in patterns:
        assert re.search(pattern, err, re.DOTALL), f"{pattern!r} is not in {err!r}"


# ---- mistakes in recipes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "patterns"),
    [
        ("train.lerning_rate=1", [r"train\.lerning_rate", r"\blr\b|learning"]),
        ("rollout.group_sice=4", [r"group_sice", r"group_size"]),
        ("rollout.num_generations=4", [r"num_generations", r"group_size"]),  # what other programs call it
        ("precision=fp9", [r"precision", r"fp9", r"fp8_rollout"]),
        ("precision=fp8-rollout", [r"fp8_rollout"]),
        ("rl.loss_agg=token-mean", [r"token_mean"]),
        ("train.steps=many", [r"train\.steps", r"many"]),
        ("train.steps=-1", [r"train\.steps", r"-1"]),
        ("train.steps", [r"train\.steps", r"="]),
        ("model.arch.model_type=gpt2", [r"gpt2", r"qwen3"]),
        ("model.arch.rope_scaling={rope_type='yarn',factor=2.0}", [r"yarn"]),
        ("model.arch.vocab_size=5", [r"vocab", r"\b5\b"]),
        ("model.arch.max_position_embeddings=20", [r"26", r"20"]),
        ("model.arch.num_key_value_heads=3", [r"\b3\b", r"\b4\b"]),
        ("task.max_prompt_length=3", [r"max_prompt_length", r"\b3\b", r"tokens"]),
        ("task.params.digit=[2]", [r"digit", r"digits"]),
        ("task.num_eval=100000", [r"num_eval", r"100000"]),
        ("task.reward=reward.py", [r"reward\.py", r"function"]),
        ("task.reward=nowhere.py:reward", [r"nowhere\.py"]),
        ("task.reward=reward.py:nothing", [r"nothing"]),
        ("train.max_tokens_per_gpu=11", [r"max_tokens_per_gpu"]),
        ("rollout.kv_cache_tokens=8", [r"kv_cache_tokens|cache"]),
        ("quant.num_first_layers_in_bf16=3", [r"\b3\b", r"\b2\b"]),
        ("device=cuda", [r"GPU|cuda"]),
        ("kernels=hopper", [r"hopper"]),
        ("model.tokenizer=nowhere", [r"nowhere"]),
        ("checkpoint.resume=nowhere", [r"nowhere"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_settings(jetrl: Cli, recipe: Path, override: str, patterns: list[str]) -> None:
    assert_refused(jetrl("train", recipe, override), *patterns)
    rows = recipe.parent / "runs" / "tiny" / "metrics.jsonl"
    assert not rows.exists() or len(rows.read_text().splitlines()) <= 1, "training had begun"


def test_several_mistakes_are_listed_at_once(jetrl: Cli, recipe: Path) -> None:
    assert_refused(jetrl("train", recipe, "train.stepz=4", "precision=fp9"), "stepz", "fp9")


def test_recipes_that_cannot_be_read(jetrl: Cli, tmp_path: Path) -> None:
    assert_refused(jetrl("train", tmp_path / "none.toml"), "none.toml")
    (tmp_path / "bad.toml").write_text("name = \n")
    assert_refused(jetrl("train", tmp_path / "bad.toml"), "bad.toml", "line 1")
    assert_refused(jetrl("train", tmp_path), "tmp|toml")


def test_debug_shows_the_traceback(jetrl: Cli, recipe: Path) -> None:
    status, _, err = jetrl("train", recipe, "precision=fp9", "--debug")
    assert status == 2 and "Traceback" in err and "UserError" in err


# ---- mistakes in data, rewards, models ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        ("", [r"data\.jsonl", r"no problems|empty"]),
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", \n', [r"data\.jsonl:2", r"JSON"]),
        ('{"prompt": "1+1="}\n', [r"data\.jsonl:1", r"answer"]),
        ('{"prompt": "what is it", "answer": "2"}\n' * 2, [r"token"]),
    ],
    ids=["empty", "bad json", "no answer", "unknown characters"],
)
def test_bad_data(jetrl: Cli, recipe: Path, tmp_path: Path, text: str, patterns: list[str]) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    eval_file = tmp_path / "eval.jsonl"
    eval_file.write_text('{"prompt": "3+3=", "answer": "6"}\n')
    data = ("task.name=file", f"task.train_file={tmp_path}/data.jsonl", f"task.eval_file={eval_file}")
    recipe.write_text(re.sub(r"\[task\.params\]\ndigits.*\n", "", recipe.read_text()))
    assert_refused(jetrl("train", recipe, *data, "task.reward=jetrl.rewards.text:exact_match"), *patterns)
    assert_refused(jetrl("train", recipe, *data[:1], "task.train_file=nowhere.jsonl", data[2]), r"nowhere\.jsonl")


@pytest.mark.parametrize(
    ("body", "patterns"),
    [
        ("raise KeyError('gold')", [r"reward\.py:reward|reward", r"KeyError", r"gold"]),
        ("return [1.0]", [r"returned 1 scores? for"]),
        ("return 'good'", [r"list of numbers", r"str"]),
        ("return [float('nan')] * len(completions)", [r"nan"]),
        ("return ['1'] * len(completions)", [r"not a number"]),
        ("return [0.0] * len(completions)", [r"\d+\+\d+", r"gold"]),
        ("return [None] * len(completions)", [r"None|scored"]),
    ],
)
def test_bad_reward_functions(jetrl: Cli, recipe: Path, tmp_path: Path, body: str, patterns: list[str]) -> None:
    (tmp_path / "bad.py").write_text(f"def reward(completions, **_):\n    {body}\n")
    assert_refused(jetrl("train", recipe, f"task.reward={tmp_path}/bad.py:reward"), *patterns)


def test_a_reward_function_that_fails_in_the_middle_loses_nothing(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text(
        "calls = []\ndef reward(completions, answer, **_):\n    calls.append(1)\n"
        "    if len(calls) == 6:\n        raise ZeroDivisionError('late')\n"
        "    return [len(set(c) & set(a)) for c, a in zip(completions, answer)]\n"
    )
    override = f"task.reward={tmp_path}/later.py:reward"
    assert_refused(jetrl("train", recipe, override), "ZeroDivisionError", "late")
    run_dir = tmp_path / "runs" / "tiny"
    kept = numbers(run_dir)
    assert len(kept) >= 3 and checkpoint.newest(run_dir / "checkpoints") is not None
    status, out, err = jetrl("train", recipe, override, "--resume")
    assert status == 0, err
    assert [row["step"] for row in numbers(run_dir)] == [0, 1, 2, 3, 4] and numbers(run_dir)[:3] == kept[:3]


def test_bad_model_folders(jetrl: Cli, recipe: Path, tmp_path: Path, finished: Path) -> None:
    import shutil

    text = re.sub(r"(?s)\[model\.arch\].*?(?=\n\[|\Z)", "", recipe.read_text())
    recipe.write_text(text.replace('tokenizer = "builtin:arithmetic"\n', "").replace("init_seed = 0\n", ""))
    good = checkpoint.newest(finished / "checkpoints") / "model"
    model = tmp_path / "model"

    def attempt(*patterns: str) -> None:
        assert_refused(jetrl("train", recipe, f"model.path={model}"), *patterns)
        assert_refused(jetrl("parity", model), *patterns)

    attempt(r"model")
    model.mkdir()
    attempt(r"config\.json")
    shutil.copytree(good, model, dirs_exist_ok=True)
    weights = model / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    attempt(r"model\.safetensors")
    weights.unlink()
    attempt(r"safetensors")
    weights.write_bytes(data)
    (model / "config.json").write_text("{")
    attempt(r"config\.json")
    shutil.copy(good / "config.json", model)
    status, _, err = jetrl("parity", model, "--max-prompt", 8, "--new-tokens", 4, "--sequences", 3)
    assert status == 0, err
    (model / "tokenizer.json").unlink()
    assert_refused(jetrl("train", recipe, f"model.path={model}"), r"tokenizer")


# ---- disk and checkpoints -------------------------------------------------------------------------------------------


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_disk_space_for_a_checkpoint(
    jetrl: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = checkpoint.store.write, []

    def later(*arguments: Any) -> list[Path]:
        calls.append(1)
        if len(calls) > 1:
            full_disk()
        return real(*arguments)

    monkeypatch.setattr(checkpoint.store, "write", later)
    assert_refused(jetrl("train", recipe), "[Nn]o disk space", "MiB", "step_000002", "--resume")
    folder = tmp_path / "runs" / "tiny" / "checkpoints"
    assert {p.name for p in folder.iterdir()} == {"latest", "step_000000"}
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert jetrl("train", recipe, "--resume")[0] == 0
    assert len(numbers(tmp_path / "runs" / "tiny")) == 5


def test_no_disk_space_in_safetensors(jetrl: Cli, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors reports a full disk by an exception of its own."""
    from safetensors import SafetensorError

    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint.store, "write", full)
    assert_refused(jetrl("train", recipe), "[Nn]o disk space")


def test_no_disk_space_for_metrics(jetrl: Cli, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jetrl.report import recorder

    monkeypatch.setattr(recorder.os, "write", full_disk)
    assert_refused(jetrl("train", recipe), r"metrics\.jsonl", "space")


def test_a_checkpoint_with_a_wrong_hash(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    assert jetrl("train", recipe, "train.steps=2")[0] == 0
    (state,) = (tmp_path / "runs" / "tiny" / "checkpoints" / "step_000002" / "state").iterdir()
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    assert_refused(jetrl("train", recipe, "--resume"), "hash", "step_000002", "another step")


def test_a_run_is_never_written_over(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    for _ in range(2):
        status, out, err = jetrl("train", recipe, "train.steps=1")
        assert status == 0, err
    assert "tiny-2" in out and {p.name for p in (tmp_path / "runs").iterdir()} == {"tiny", "tiny-2"}


def test_a_run_with_a_number_goes_on_where_it_is(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    """It carries its own name: resumed, it neither is refused nor touches the run it was numbered after."""
    for _ in range(2):
        assert jetrl("train", recipe, "train.steps=1", "checkpoint.save_interval=1")[0] == 0
    first, second = (tmp_path / "runs" / name for name in ("tiny", "tiny-2"))
    before = (first / "metrics.jsonl").read_bytes()
    status, _, err = jetrl("train", second / "config.toml", "train.steps=2", "--resume")
    assert status == 0, err
    assert len((second / "metrics.jsonl").read_text().splitlines()) == 3  # steps 0 to 2
    assert (first / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_run_does_not_go_on_in_a_finished_one(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert jetrl("train", recipe, "train.steps=1", "checkpoint.save_interval=1")[0] == 0
    first = tmp_path / "runs" / "tiny"
    before = sorted((p, p.stat().st_mtime_ns) for p in first.rglob("*"))
    checkpoint = tmp_path / "runs" / "tiny-2" / "checkpoints" / "step_000001"
    assert_refused(jetrl("train", recipe, f"checkpoint.resume={checkpoint}"), "already holds a run", "output_dir")
    assert sorted((p, p.stat().st_mtime_ns) for p in first.rglob("*")) == before


# ---- the verbs ------------------------------------------------------------------------------------------------------


def test_train_ends_with_what_to_do_next(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    status, out, err = jetrl("train", recipe)
    assert status == 0, err
    for words in ("held-out reward", "report.html", "jetrl parity", "jetrl export"):
        assert words in out, out
    environment = json.loads((tmp_path / "runs" / "tiny" / "env.json").read_text())
    assert "train" in json.dumps(environment)


def test_dry_run_prints_the_config_and_runs_nothing(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    status, out, _ = jetrl("train", recipe, "train.lr=2e-5", "--dry-run")
    assert status == 0 and "lr = 2e-05" in out and not (tmp_path / "runs").exists()
    assert 'kv_cache = "bf16"' in out
    assert 'kv_cache = "fp8"' in jetrl("train", recipe, "quant.kv_cache=fp8", "--dry-run")[1]
    err = jetrl("train", recipe, "--dry-run")[2]
    assert "The first prompt of the run" in err and "Its tokens: " in err and "Data: " in err
    status, out, err = jetrl("train", recipe, "precision=bf16", "--dry-run", "--nproc", "2", "--gpu", "h100")
    assert status == 0 and "\nkv_cache =" not in out
    assert "Memory of each of 2 GPUs, predicted, in GiB, for H100" in err and "It fits" in err, err
    assert_refused(jetrl("train", recipe, "--gpu", "h100"), "--gpu needs --dry-run")
    assert_refused(
        jetrl("train", recipe, "quant.kv_cache=fp8", "precision=bf16", "--dry-run"), "kv_cache: has no effect"
    )


def test_dry_run_for_a_gpu_checks_its_name_first_and_needs_none(
    jetrl: Cli, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = jetrl("train", recipe, "--dry-run", "--gpu", "b17")
    assert (status, out) == (2, "") and "--gpu b17: write h100, h200" in err
    status, out, err = jetrl("train", recipe, "device=cuda", "--dry-run", "--gpu", "h200")
    assert status == 0 and 'device = "cuda"' in out and 'kernels = "hopper"' in out, err
    assert "There is no GPU here, so the kernels were not tried." in err and "for H200" in err and "It fits" in err
    assert_refused(jetrl("train", recipe, "device=cuda", "--dry-run"), "cuda")
    assert_refused(jetrl("train", recipe, "device=cuda", "--dry-run", "--gpu", "h200", "task.reward=no:x"), "no")


@pytest.mark.parametrize(("shipped", "setting", "said"), [
    ("quickstart_mla", "device=cuda", "this model has .*kv_lora_rank = 96"),
    ("quickstart_hybrid", "model.arch.linear_key_head_dim=24", "linear_key_head_dim = 24: the kernels of a GPU have"),
])
def test_a_dry_run_for_a_gpu_refuses_sizes_that_its_kernels_lack(
    jetrl: Cli, shipped: str, setting: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(jetrl("train", shipped, "--dry-run", "--gpu", "h200", "device=cuda", setting), said)


def test_lists_fit_a_terminal_of_80_columns(jetrl: Cli) -> None:
    status, out, _ = jetrl("recipes")
    assert status == 0 and "quickstart\n  " in out and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("override", "words"),
    [("task.params.digits=0", "digits"), ("model.arch.num_attention_heads=5", "heads"),
     ("task.params.colour=1", "colour"), ("rollout.max_response_length=100000", "positions"),
     ("task.reward=nowhere:score", "nowhere")],
)
def test_dry_run_finds_what_the_run_would_stumble_over(
    jetrl: Cli, recipe: Path, tmp_path: Path, override: str, words: str
) -> None:
    long = ["train.max_tokens_per_gpu=200000"] if "length" in override else []
    status, out, err = jetrl("train", recipe, override, *long, "--dry-run")
    assert status != 0 and words in err and "Traceback" not in err, err
    assert not (tmp_path / "runs").exists()


def test_too_few_held_out_problems_are_said_at_once_if_there_are_evaluations(jetrl: Cli, recipe: Path) -> None:
    many = ["task.num_eval=1000000", "--dry-run"]
    status, _, err = jetrl("train", recipe, "eval.eval_interval=1", *many)
    assert status != 0 and "held-out sums are needed" in joined(err), err
    status, _, err = jetrl("train", recipe, "eval.eval_interval=0", *many)
    assert status == 0, err


@pytest.mark.parametrize(("precision", "status"), [("bf16", 0), ("fp8", 0), ("fp8_rollout", 1)])
def test_parity_json_and_status(jetrl: Cli, recipe: Path, precision: str, status: int) -> None:
    sizes = ("--sequences", 3, "--max-prompt", 12, "--new-tokens", 6)
    code, out, err = jetrl("parity", recipe, "--precision", precision, "--json", *sizes)
    certificate = json.loads(out)
    assert code == status and certificate["bit_equal"] == (status == 0), err
    assert [link["link"] for link in certificate["links"]] == ["a", "b", "c", "v", "s", "w"]
    code, out, _ = jetrl("parity", recipe, "--precision", precision, *sizes)
    assert code == status and ("layers.0.qkv" in out) == (status == 1)
    assert "KV cache bf16" in out and certificate["kv_cache"] == "bf16"


def joined(text: str) -> str:
    """Without line breaks."""
    return " ".join(text.split())


def test_parity_with_an_fp8_cache(jetrl: Cli, recipe: Path, finished: Path) -> None:
    """The recipe's, the option's and the run's; the certificate says so."""
    sizes = ("--sequences", 2, "--max-prompt", 8, "--new-tokens", 4)
    for model in (recipe, finished):
        code, out, err = jetrl("parity", model, "--kv-cache", "fp8", *sizes)
        assert code == 0 and "KV cache e4m3[1x16,pow2]" in out, err
    recipe.write_text(recipe.read_text().replace('kv_cache = "bf16"', 'kv_cache = "fp8"'))
    assert "KV cache e4m3[1x16,pow2]" in jetrl("parity", recipe, *sizes)[1]
    assert "KV cache bf16" in jetrl("parity", recipe, "--kv-cache", "bf16", *sizes)[1]
    assert "KV cache bf16" in jetrl("parity", recipe, "--precision", "bf16", *sizes)[1]
    assert f"KV cache fp8 (as {recipe} says)" in joined(jetrl("parity", recipe, *sizes)[1])
    assert_refused(jetrl("parity", finished, "--kv-cache", "int8", *sizes), "quant.kv_cache", "fp8")
    refused = jetrl("parity", finished, "--precision", "bf16", "--kv-cache", "fp8", *sizes)
    assert_refused(refused, "quant.kv_cache: has no effect")


def test_parity_goes_by_what_the_folder_says(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    """A checkpoint's model, and its export, far away from the run; an older folder goes by its run."""
    sizes = ("--sequences", 2, "--max-prompt", 8, "--new-tokens", 4)
    recipe.write_text(recipe.read_text().replace('kv_cache = "bf16"', 'kv_cache = "fp8"'))
    status, _, err = jetrl("train", recipe, "train.steps=1", "checkpoint.save_interval=1")
    assert status == 0, err
    run, out = tmp_path / "runs" / "tiny", tmp_path / "out"
    assert jetrl("export", run, out)[0] == 0
    (model,) = run.glob("checkpoints/*1/model")
    for folder in (model, out):
        status, said, err = jetrl("parity", folder, *sizes)
        assert status == 0 and "KV cache e4m3[1x16,pow2]" in said, err
        assert f"precision fp8 (as {folder / 'config.json'} says), KV cache fp8 (as {folder / 'config.json'}" in joined(
            said
        )
    status, said, _ = jetrl("parity", out, "--kv-cache", "bf16", *sizes)
    assert status == 0 and "KV cache bf16 (as asked)" in joined(said) and "KV cache bf16, on" in joined(said)
    said = json.loads(jetrl("parity", out, "--json", *sizes)[1])
    assert "as " in said["formats"] and said["kv_cache"] == "e4m3[1x16,pow2]"
    older = json.loads((model / "config.json").read_text())
    del older["jetrl_training"]
    (model / "config.json").write_text(json.dumps(older))
    status, said, _ = jetrl("parity", model, *sizes)
    assert status == 0 and f"KV cache fp8 (as {run / 'config.toml'} says)" in joined(said)


def test_parity_of_a_run_and_unknown_precision(jetrl: Cli, finished: Path) -> None:
    sizes = ("--sequences", 2, "--max-prompt", 8, "--new-tokens", 4)
    assert jetrl("parity", finished, *sizes)[0] == 0
    assert_refused(jetrl("parity", finished, "--precision", "fp4"), "fp4", "fp8")
    assert_refused(jetrl("parity", finished, "--sequences", 1), "--sequences.*at least 2")


def test_flow(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    status, out, _ = jetrl("flow", recipe, "--svg", tmp_path / "flow.svg")
    assert status == 0 and "the same function, edge by edge" in out
    assert (tmp_path / "flow.svg").read_text().startswith("<svg")
    for gpu in (["device=cuda", "kernels=auto"], ["device=auto", "kernels=hopper"], ["device=cuda", "kernels=hopper"]):
        assert jetrl("flow", recipe, *gpu)[:2] == (0, out.replace(f"{tmp_path}/flow.svg", "tiny-flow.svg")), gpu
    status, out, _ = jetrl("flow", recipe, "quant.kv_cache=fp8", "--svg", tmp_path / "kv.svg")
    assert status == 0 and "the same function, edge by edge" in out and "K8p = e4m3[1x16,pow2]" in out
    assert "e4m3[1x16,pow2]" in (tmp_path / "kv.svg").read_text()
    assert "e4m3[1x16,pow2]" not in (tmp_path / "flow.svg").read_text()
    status, out, _ = jetrl("flow", recipe, "precision=fp8_rollout")
    assert status == 0 and "DIFFERENT in 32 places" in out and "qkv" in out and "the same function" not in out
    other = tmp_path / "other.toml"
    lines = recipe.read_text().replace('precision = "fp8"', 'precision = "fp8_rollout"').splitlines()
    other.write_text("\n".join(line for line in lines if not line.startswith(("wgrad", "saved_gate_up"))))
    status, out, err = jetrl("flow", recipe, "--against", other)
    assert status == 0 and "fp8_rollout" in out and "e4m3" in out, err
    other.write_text(recipe.read_text().replace("hidden_size = 40", "hidden_size = 48"))
    assert_refused(jetrl("flow", recipe, "--against", other), "different shapes")
    assert_refused(jetrl("flow", tmp_path / "none.toml"), "none.toml")


def test_eval_equals_the_last_evaluation_of_the_run(jetrl: Cli, finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "some" / "kept.jsonl"
    status, out, err = jetrl("eval", finished, "--samples", file, "eval.num_samples_kept=2")
    assert " step" not in out + err, "it takes none"
    last = max(row["step"] for row in read_eval_samples(finished))
    texts = [row["completion"] for row in read_eval_samples(finished) if row["step"] == last]
    assert [row["completion"] for row in map(json.loads, file.read_text().splitlines())] == [texts[0], texts[2]]
    assert status == 0, err
    value = float(re.search(r"eval/addition/avg@1\s+([0-9.]+)", out).group(1))
    assert value == pytest.approx(numbers(finished)[-1]["eval/addition/avg@1"], abs=1e-4)
    assert "rl.signal" not in out, "the reward, as usual"
    two = 'task.reward=["jetrl.rewards.text:exact_match", "jetrl.rewards.text:last_integer"]'
    status, out, err = jetrl("eval", finished, two, "rl.signal=exact_match", "task.num_eval=2")
    assert status == 0 and "avg@k and pass@k are those of rl.signal = 'exact_match'" in out, err


def test_export_gives_transformers_the_same_greedy_tokens(jetrl: Cli, finished: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from jetrl.api import load_model

    status, _, err = jetrl("export", finished, tmp_path / "out")
    assert status == 0, err
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = load_model(tmp_path / "out", precision="bf16")
    for prompt in ("12+34=", "90+15=", "77+77="):
        tokens = ours.tokenizer.encode(prompt, add_special_tokens=False)
        (mine,) = ours.generate([tokens], max_tokens=8, temperature=0.0)
        logits = theirs(torch.tensor([tokens + list(mine.tokens[:-1])])).logits[0, len(tokens) - 1 :]
        chosen = logits.gather(1, torch.tensor(mine.tokens)[:, None])[:, 0]
        assert bool((logits.amax(1) - chosen < 0.02).all()), "not the greedy token, beyond a tie within BF16's rounding"


def test_export_in_fp8(
    jetrl: Cli, recipe: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_refused(jetrl("export", finished, tmp_path / "out", "--fp8"), "multiples of 128", "BF16")
    assert not (tmp_path / "out").exists()
    sizes = ["hidden_size=128", "intermediate_size=128", "head_dim=64", "num_attention_heads=2"]
    sizes += ["num_key_value_heads=2"]
    status, _, err = jetrl("train", recipe, "train.steps=1", *(f"model.arch.{s}" for s in sizes))
    assert status == 0, err
    find, there = importlib.util.find_spec, {"vllm": "json", "deep_gemm": "json"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find(there.get(name, name)))
    for deep_gemm, options, told in ("json", ["--fp8"], True), ("json", [], False), ("no_such", ["--fp8"], False):
        there["deep_gemm"] = deep_gemm
        status, out, err = jetrl("export", tmp_path / "runs" / "tiny", tmp_path / "out", *options)
        assert status == 0 and ("set VLLM_USE_DEEP_GEMM=0" in out) == told, out + err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_report_of_one_and_of_several(jetrl: Cli, finished: Path, recipe: Path, tmp_path: Path) -> None:
    assert jetrl("train", recipe, "precision=bf16", "train.steps=1", "name=other")[0] == 0
    assert jetrl("report", finished, "--out", tmp_path / "one.html")[0] == 0
    assert jetrl("report", finished, tmp_path / "runs" / "other", "--out", tmp_path / "two.html")[0] == 0
    assert (tmp_path / "one.html").stat().st_size > 10_000 and (tmp_path / "two.html").exists()


def test_compare(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    status, out, err = jetrl("compare", recipe, "train.steps=1", "--precision", "bf16,fp8_rollout")
    assert status == 0, err
    assert {p.name for p in (tmp_path / "runs").iterdir()} >= {"tiny-bf16", "tiny-fp8_rollout"}
    assert (tmp_path / "runs" / "tiny-compare.html").is_file()
    rows = [line.split() for line in out.splitlines() if line.startswith(("bf16", "fp8_rollout"))]
    assert [row[0] for row in rows] == ["bf16", "fp8_rollout"] and ["0/1" in row for row in rows] == [True, False]
    assert "1/1" in rows[1], out
    assert_refused(jetrl("compare", recipe, "--precision", "bf16,fp3"), "fp3")
    assert not (tmp_path / "runs" / "tiny-bf16-2").exists(), "all precisions are checked before the first run"


def test_compare_takes_settings_of_fp8_for_the_flows_that_have_them(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    status, _, err = jetrl("compare", recipe, "train.steps=1", "quant.kv_cache=fp8", "--precision", "bf16,fp8")
    assert status == 0, err
    held = {flow: (tmp_path / "runs" / f"tiny-{flow}" / "config.toml").read_text() for flow in ("bf16", "fp8")}
    assert 'kv_cache = "fp8"' in held["fp8"] and "\nkv_cache =" not in held["bf16"]


def test_paths_that_are_nothing(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    out = tmp_path / "out"
    commands = [("report", empty), ("eval", empty), ("eval", tmp_path / "none"), ("export", empty, out)]
    commands += [("export", tmp_path / "none", out), ("parity", empty)]
    for command in commands:
        assert_refused(jetrl(*command), r"empty|none")
    assert not (tmp_path / "out").exists()
    assert_refused(jetrl("fetch", "gpt5"), "gpt5", "smollm2")


def test_sft_needs_a_warm_start_in_the_recipe(jetrl: Cli, recipe: Path, tmp_path: Path) -> None:
    assert_refused(jetrl("sft", recipe), r"sft\.steps")
    settings = ("sft.steps=2", f"sft.cache_dir={tmp_path}/cache", "sft.batch_size=4")
    status, out, err = jetrl("sft", recipe, *settings)
    assert status == 0, err
    (made,) = (tmp_path / "cache").iterdir()
    before = made.stat().st_mtime_ns
    assert jetrl("train", recipe, "train.steps=1", *settings)[0] == 0
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [made.name] and made.stat().st_mtime_ns == before


def test_the_installed_command(tmp_path: Path) -> None:
    """Once in a process of its own: no traceback, a status, the message on standard error."""
    command = [sys.executable, "-m", "jetrl.cli"]
    done = subprocess.run([*command, "train", "none.toml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("jetrl: ") and "none.toml" in done.stderr
    assert done.stdout == ""
    helped = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True)
    verbs = ("train", "sft", "compare", "parity", "flow", "eval", "export", "report", "fetch")
    assert helped.returncode == 0 and all(verb in helped.stdout for verb in verbs)


@pytest.mark.parametrize("arguments", [("study",), ("study", "quick", "--jobs", "2"), ("study", "--help"), ("--help",)])
def test_without_its_package_the_study_says_how_to_get_it(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code = "import sys; sys.modules['jetrl_study'] = None; from jetrl.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    if "--help" in arguments:
        told = " ".join(done.stdout.replace("\u2502", " ").split())
        assert done.returncode == 0 and "study" in told and "Not here: the study of flows is the package" in told, done
    else:
        assert done.returncode == 2 and done.stderr.startswith("jetrl: ") and "Traceback" not in done.stderr, done
        assert "jetrl_study is not installed" in done.stderr and "pip install ." in done.stderr


def test_a_study_package_that_lacks_something_else_is_not_taken_for_absent(tmp_path: Path) -> None:
    (tmp_path / "jetrl_study").mkdir()
    (tmp_path / "jetrl_study" / "__init__.py").touch()
    (tmp_path / "jetrl_study" / "command.py").write_text("import no_such_library\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import jetrl.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "No module named 'no_such_library'" in done.stderr


@pytest.mark.parametrize("verb", ["train", "sft"])
def test_a_full_gpu_has_a_status_of_its_own(
    verb: str, jetrl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    path = tmp_path / "warm.toml"
    path.write_text(to_toml(tiny_config(tmp_path, {"sft.steps": 2})))
    monkeypatch.setattr(loop, "warm_start", full)
    status, _, told = jetrl(verb, path)
    assert status == 3 and "jetrl: out of GPU memory in the phase warm start" in told and "Traceback" not in told
