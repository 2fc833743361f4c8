"""A whole model and its data by name: train, resume, dry run, parity, eval, export and the API, from a cache alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import NOBODY, ONE, TWO, files_of, use, write_cache
from tiny import ARCH, numbers, tiny_config, tiny_run, weights_hash
from tolerances import assert_bitwise_equal

from jetrl import load_model
from jetrl.api import evaluate_checkpoint, export_checkpoint, load_for_parity
from jetrl.chat.tokenizer import load_tokenizer
from jetrl.cli import app
from jetrl.config import load_config, to_toml
from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.model.transformer import Transformer
from jetrl.parity.certificate import Workload, certify
from jetrl.precision.recipe import build_recipe
from jetrl.report.recorder import ENV_FILE
from jetrl.run import loop
from jetrl.run.prepare import prepare

BY_NAME = {"model": {"path": "acme/tiny"}}
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one shape, as folders, by commit."""
    tokenizer = load_tokenizer("builtin:arithmetic")
    spec = hf.spec_from_hf(ARCH | {"vocab_size": len(tokenizer)})
    made = {}
    for commit, seed in ((ONE, 1), (TWO, 2)):
        model = Transformer(spec, build_recipe("bf16", spec.num_layers)).init_random(seed)
        made[commit] = tmp_path_factory.mktemp("model") / "m"
        hf.save_model(made[commit], spec, model.state_dict(), tokenizer=tokenizer,
                      generation_config={"eos_token_id": [1, 5]})
    return made


@pytest.fixture
def cache(tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds acme/tiny, without network."""
    monkeypatch.chdir(tmp_path)
    use(monkeypatch, tmp_path / "cache", offline=True)
    write_cache(tmp_path / "cache", "acme/tiny", files_of(models[ONE]))
    return tmp_path / "cache"


def test_a_run_by_name_is_the_run_of_its_folder(cache: Path, models: dict[str, Path], tmp_path: Path) -> None:
    named = tiny_run(tmp_path / "named", BY_NAME | {"train.steps": 2})
    folder = tiny_run(tmp_path / "folder", {"model": {"path": str(models[ONE])}, "train.steps": 2})
    assert weights_hash(named, 2) == weights_hash(folder, 2) and numbers(named) == numbers(folder)
    assert all(row.get("parity/logprob_abs_diff_max", 0.0) == 0.0 for row in numbers(named))
    assert load_config(named / "config.toml").model.revision == ONE
    (pin,) = json.loads((named / ENV_FILE).read_text())["hub"]
    assert pin == {"key": "model.path", "name": "acme/tiny", "asked": None, "commit": ONE}
    kept = named / "checkpoints" / "step_000002" / "model" / "generation_config.json"
    assert json.loads(kept.read_text())["eos_token_id"] == [1, 5]


def test_a_resumed_run_stays_on_its_commit_and_needs_no_weights_of_the_hub(
    cache: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    straight = tiny_run(tmp_path / "straight", BY_NAME)
    run_dir = tiny_run(tmp_path / "stopped", BY_NAME | {"train.steps": 2})
    snapshot = write_cache(cache, "acme/tiny", files_of(models[TWO]), TWO).parent / ONE  # main moves on
    (snapshot / "model.safetensors").unlink()
    resumed = tiny_run(tmp_path / "stopped", BY_NAME | {"checkpoint.resume": "auto"})
    assert resumed == run_dir and weights_hash(run_dir, 4) == weights_hash(straight, 4)
    assert load_config(run_dir / "config.toml").model.revision == ONE
    with pytest.raises(UserError, match="was written by a run with other settings"):
        tiny_run(tmp_path / "stopped", {"model": {"path": "acme/tiny", "revision": TWO}, "checkpoint.resume": "auto"})


def test_a_data_set_and_a_tokenizer_by_name(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    rows = "".join(json.dumps({"a": i, "b": i + 1, "sum": 2 * i + 1}) + "\n" for i in range(12))
    write_cache(cache, "acme/sums", {"train.jsonl": rows.encode()}, TWO, "dataset")
    task = {"name": "file", "dataset": "acme/sums", "prompt_template": "{a}+{b}=", "answer_column": "sum"}
    settings = {"task.params": None, **{f"task.{key}": value for key, value in task.items()}}
    run_dir = tiny_run(tmp_path, settings | {"model.tokenizer": "acme/tiny", "train.steps": 1})
    config = load_config(run_dir / "config.toml")
    assert (config.task.dataset_revision, config.model.tokenizer_revision) == (TWO, ONE)
    sample = json.loads((run_dir / "samples.jsonl").read_text().splitlines()[0])
    left, right = sample["prompt"].rstrip("=").split("+")
    assert int(right) == int(left) + 1 and int(sample["answer"]) == int(left) + int(right)


def test_the_python_api(cache: Path, models: dict[str, Path]) -> None:
    tokens = [3, 4, 5, 6, 7]
    by_name, by_folder = load_model("acme/tiny"), load_model(models[ONE])
    assert_bitwise_equal(by_name.logprobs(tokens), by_folder.logprobs(tokens))
    assert by_name.engine.eos_token_ids == by_folder.engine.eos_token_ids == {1, 5}
    write_cache(cache, "acme/tiny", files_of(models[TWO]), TWO)
    assert torch.equal(load_model("acme/tiny", revision=ONE).logprobs(tokens), by_folder.logprobs(tokens))
    assert not torch.equal(load_model("acme/tiny").logprobs(tokens), by_folder.logprobs(tokens)), "main has moved"


def test_parity_eval_and_export(cache: Path, models: dict[str, Path], tmp_path: Path) -> None:
    model, name, _ = load_for_parity("acme/tiny", "", "cpu", revision=ONE)
    assert name == "acme/tiny" and certify(model, Workload(2, 8, 4, 7, 16), name, lambda _: None).ok
    (tmp_path / "r.toml").write_text(to_toml(tiny_config(tmp_path, BY_NAME)))
    folder, count, metrics = evaluate_checkpoint("acme/tiny", tmp_path / "r.toml", [])
    assert folder.name == ONE and count == 4 and metrics
    out = export_checkpoint("acme/tiny", tmp_path / "out", fp8=False)
    state, spec = hf.load_state(out, hf.spec_from_folder(out)), hf.spec_from_folder(models[ONE])
    for key, value in hf.load_state(models[ONE], spec).items():
        assert_bitwise_equal(state[key], value.to(torch.bfloat16))
    with pytest.raises(UserError, match=r"revision v1 \(--revision\) is for a model of the hub"):
        load_for_parity("random:smollm2-135m", "", "cpu", revision="v1")
    (tmp_path / "config.toml").write_text('precision = "bf16"')  # the folder where one works is no run of acme/tiny
    (tmp_path / "checkpoints").mkdir()
    assert load_for_parity("acme/tiny", "", "cpu")[0].recipe.name == "fp8"
    with pytest.raises(UserError, match="acme/tiny is not a folder here, .* belongs to no run.*Give --recipe"):
        evaluate_checkpoint("acme/tiny", None, [])


@pytest.fixture
def adapters(cache: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """acme/lora in the cache, without a tokenizer: adapters over acme/tiny, which they name without a revision; their
    folder, and what a run says that goes on from them."""
    lora: dict[str, Any] = {"lora.rank": 2, "lora.targets": ["q_proj", "down_proj"], "train.lr": 1e-2}
    run_dir = tiny_run(tmp_path / "made", BY_NAME | lora | {"train.steps": 1, "checkpoint.save_interval": 1})
    saved = run_dir / "checkpoints" / "step_000001" / "model"
    said = json.loads((saved / "adapter_config.json").read_text())
    assert (said["base_model_name_or_path"], said["revision"]) == ("acme/tiny", ONE)
    files = {name: data for name, data in files_of(saved).items() if "adapter" in name}
    files["adapter_config.json"] = json.dumps(said | {"revision": None}).encode()
    return write_cache(cache, "acme/lora", files, TWO), lora | {"model": {"path": "acme/lora"}}


def test_a_run_from_adapters_of_the_hub_stays_on_their_commit_and_on_that_of_their_base(
    cache: Path, adapters: tuple[Path, dict[str, Any]], models: dict[str, Path], tmp_path: Path
) -> None:
    folder, changes = adapters
    straight = tiny_run(tmp_path / "folder", changes | {"model": {"path": str(folder)}})
    run_dir = tiny_run(tmp_path / "named", changes | {"train.steps": 2})
    config = load_config(run_dir / "config.toml")
    assert (config.model.revision, config.model.base_revision) == (TWO, ONE)
    assert json.loads((run_dir / ENV_FILE).read_text())["hub"] == [
        {"key": "model.path", "name": "acme/lora", "asked": None, "commit": TWO},
        {"key": "model.base_revision", "name": "acme/tiny", "asked": None, "commit": ONE},
    ]
    saved = json.loads((run_dir / "checkpoints/step_000002/model/adapter_config.json").read_text())
    assert (saved["base_model_name_or_path"], saved["revision"]) == ("acme/tiny", ONE)
    write_cache(cache, "acme/tiny", files_of(models[TWO]), TWO)  # the base moves on
    again = tiny_run(tmp_path / "named", changes | {"checkpoint.resume": "auto"})
    assert again == run_dir and weights_hash(run_dir, 4) == weights_hash(straight, 4)
    with pytest.raises(UserError, match="adapters of another base: they were trained over one with the digest"):
        tiny_run(tmp_path / "moved", changes)


def test_adapters_of_the_hub_in_every_command(
    cache: Path, adapters: tuple[Path, dict[str, Any]], models: dict[str, Path], tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    folder, changes = adapters
    tokens = [3, 4, 5, 6, 7]
    by_name, by_folder = load_model("acme/lora"), load_model(folder)
    assert torch.equal(by_name.logprobs(tokens), by_folder.logprobs(tokens))
    assert not torch.equal(by_name.logprobs(tokens), load_model("acme/tiny").logprobs(tokens))
    model, name, formats = load_for_parity("acme/lora", "", "cpu")
    assert "adapters of rank 2 beside q_proj, down_proj" in formats
    assert certify(model, Workload(2, 8, 4, 7, 16), name, lambda _: None).ok
    (tmp_path / "r.toml").write_text(to_toml(tiny_config(tmp_path, changes)))
    assert evaluate_checkpoint("acme/lora", tmp_path / "r.toml", [])[2]
    out = export_checkpoint("acme/lora", tmp_path / "out", fp8=False)
    assert (out / "adapter_model.safetensors").read_bytes() == (folder / "adapter_model.safetensors").read_bytes()
    called = CliRunner().invoke(app, ["train", "r.toml", "--dry-run"])
    assert called.exit_code == 0 and f'base_revision = "{ONE}"' in called.stdout, called.exception
    assert "weights of acme/lora are in" in called.stderr and "weights of acme/tiny are in" in called.stderr
    assert CliRunner().invoke(app, ["flow", "r.toml"]).exit_code == 0
    for path, told in (("acme/tiny", "acme/tiny holds no adapters"), (str(models[ONE]), "holds no adapters")):
        with pytest.raises(UserError, match=rf"model.base_revision = 'v1' has no effect: model.path = .*{told}"):
            prepare(tiny_config(tmp_path, changes | {"model": {"path": path, "base_revision": "v1"}}))
    with pytest.raises(UserError, match="teacher.path: acme/lora holds adapters, and a teacher is a whole model"):
        distill = BY_NAME | {"rl.algo": "distill", "teacher": {"path": "acme/lora"}}
        prepare(tiny_config(tmp_path, distill))
    (cache / "models--acme--tiny" / "refs" / "main").unlink()
    with pytest.raises(UserError, match="holds adapters of acme/tiny, and that is needed too. .* HF_HUB_OFFLINE is"):
        load_model("acme/lora")


def test_a_dry_run_needs_no_weights_and_says_so(cache: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    (tmp_path / "r.toml").write_text(to_toml(tiny_config(tmp_path, BY_NAME)))
    called = CliRunner().invoke(app, ["train", "r.toml", "--dry-run"])
    assert called.exit_code == 0 and f'revision = "{ONE}"' in called.stdout
    assert "The weights of acme/tiny are in" in called.stderr
    (cache / "models--acme--tiny" / "snapshots" / ONE / "model.safetensors").unlink()
    called = CliRunner().invoke(app, ["train", "r.toml", "--dry-run"])
    assert called.exit_code == 0 and "are not in the cache (no model.safetensors)" in called.stderr
    flow = CliRunner().invoke(app, ["flow", "r.toml"])
    assert flow.exit_code == 0, flow.exception
    flow = CliRunner().invoke(app, ["flow", "r.toml", "model.path=acme/other", "device=cuda", "kernels=auto"])
    told = "jetrl flow reads the model's config.json, which must come from the hub. acme/other: "
    assert str(flow.exception).startswith(told) and "does not hold acme/other" in str(flow.exception)
    with pytest.raises(UserError, match="is not complete: model.safetensors is missing"):
        loop.run(tiny_config(tmp_path, BY_NAME), tmp_path / "run", [], loop.StopRequest())
    assert not (tmp_path / "run").exists()


def test_without_network_the_command_ends_in_one_message_at_once(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {"path": "acme/nothing"}}
    (tmp_path / "r.toml").write_text(to_toml(tiny_config(tmp_path, changes)))
    env = {**os.environ, "HF_ENDPOINT": NOBODY, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    env["NO_PROXY"] = "127.0.0.1"
    for variable in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
        env.pop(variable, None)
    start = time.monotonic()
    command = [sys.executable, "-m", "jetrl.cli", "train", "r.toml"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and time.monotonic() - start < 40
    assert done.stderr.startswith("jetrl: acme/nothing: there is no such folder") and done.stderr.count("\n") == 1
    assert f"the cache {tmp_path}/home/hub does not hold" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
