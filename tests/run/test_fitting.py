"""What fits which GPU, the settings that make a run fit, the table of --dry-run, and messages of a full GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import tiny_run

from jetrl.config import Config, load_config
from jetrl.config.shipped import find_recipe
from jetrl.errors import OutOfMemory, UserError
from jetrl.parallel import launch
from jetrl.parallel.progress import LostContact
from jetrl.parallel.world import World
from jetrl.run import loop
from jetrl.run.fit.advice import (
    GIB,
    GPUS,
    Change,
    advice,
    changes,
    cure,
    on_gpu,
    out_of_memory,
    report,
    told_when_out_of_memory,
)
from jetrl.run.fit.memory import Memory, predict
from jetrl.spec import SHAPES

RECIPE = find_recipe("gsm8k_qwen3_8b")
H100, H200 = GPUS["h100"], GPUS["h200"]


def config_of(*overrides: str) -> Config:
    return on_gpu(load_config(RECIPE, overrides))


def peak(memory: Memory) -> int:
    return memory.peak


@pytest.mark.parametrize(
    ("shape", "ranks", "overrides"),
    [
        ("qwen3-8b", 2, ["train.optimizer_dtype=float32", "train.offload_optimizer=false"]),
        ("qwen3-14b", 2, ["train.reduction=fixed", "train.max_tokens_per_gpu=4096"]),
        ("qwen3-32b", 2, ["train.activation_checkpointing=true", "train.master_dtype=bfloat16",
                          "train.grad_dtype=bfloat16", "train.reduction=fixed"]),
    ],
)
def test_models_on_two_h200(shape: str, ranks: int, overrides: list[str]) -> None:
    """The overrides that docs/MEMORY.md gives; one GPU is not enough."""
    assert predict(config_of(*overrides), SHAPES[shape], ranks, H200).fits(H200)
    assert not predict(config_of(*overrides), SHAPES[shape], 1, H200).fits(H200)


def test_advice_names_the_cheapest_that_fits() -> None:
    spec = SHAPES["qwen3-8b"]
    fits_in_host = config_of("train.offload_optimizer=false", "train.optimizer_dtype=float32")
    told = advice(fits_in_host, spec, 1, H200, peak)
    assert told == "set train.offload_optimizer=true, or use 2 GPUs (--nproc 2)"
    told = advice(config_of("train.offload_optimizer=false"), SHAPES["qwen3-14b"], 2, int(0.85 * H200), peak)
    assert told == "set train.offload_optimizer=true train.activation_checkpointing=true"
    told = advice(config_of("train.optimizer_dtype=float32"), SHAPES["qwen3-8b"], 1, int(100 * GIB), peak)
    assert told.startswith("set train.activation_checkpointing=true"), told
    everything = config_of("train.activation_checkpointing=true", "train.max_tokens_per_gpu=1536")
    assert advice(everything, SHAPES["qwen3-32b"], 1, H100, peak).startswith("no settings that are known here")


def test_what_is_advised_fits_and_no_part_of_it_can_be_left_out() -> None:
    spec, config = SHAPES["qwen3-32b"], config_of()

    def fits(changed: Config) -> bool:
        return predict(changed, spec, 2, H200).fits(H200)

    found = cure(config, fits)
    assert found is not None and len(found.values) > 2 and fits(found.apply(config))
    for i in range(len(found.values)):
        assert not fits(Change((*found.values[:i], *found.values[i + 1 :])).apply(config))
    load_config(RECIPE, str(found).split(" "))  # a recipe may say so


def test_only_what_a_config_allows_is_tried() -> None:
    keys = {key for values in changes(config_of("precision=bf16")) for c in values for key, _ in c.values}
    assert "quant.kv_cache" not in keys and "train.offload_optimizer" not in keys
    eight = changes(config_of("train.offload_optimizer=false", "train.optimizer_dtype=8bit"))
    assert all(key != "train.offload_optimizer" for values in eight for c in values for key, _ in c.values)
    for values in changes(config_of()):
        for change in values:
            load_config(RECIPE, str(change).split(" "))


def test_the_table_has_80_columns_and_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines = list(report(RECIPE, [], SHAPES["qwen3-8b"], 1, ""))
    assert max(map(len, lines)) <= 80, lines
    assert lines[0] == "Memory of one GPU, predicted, in GiB, for H200 (139.8 GiB):"
    assert "Fits H100: no; H200: yes (--gpu for another)." in lines
    for column in (slice(48, 58), slice(58, 68)):
        numbers = [float(line[column]) for line in lines[2:] if line.startswith("  ") and line[column].strip()]
        together = next(float(line[column]) for line in lines if line.startswith("  together"))
        host = [float(line[column]) for line in lines if line.startswith("  host memory")]  # moments, checkpoints
        assert len(host) == 2 and sum(numbers) == pytest.approx(2 * together + sum(host), abs=0.06)
    assert lines[-1].startswith("It fits: 3 GiB are kept")
    small = list(report(RECIPE, [], SHAPES["qwen3-8b"], 2, "h100"))
    assert small[0] == "Memory of each of 2 GPUs, predicted, in GiB, for H100 (79.1 GiB):"
    assert "do not fit H100 (79.1 GiB): set train." in small[-1]
    with pytest.raises(UserError, match=r"--gpu b100: write h100, h200, or the GPU's memory in GiB, such as 80\."):
        list(report(RECIPE, [], SHAPES["qwen3-8b"], 1, "b100"))


class Properties:
    name, total_memory = "NVIDIA Small", 90 * GIB


def test_what_cannot_fit_this_machines_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    with pytest.raises(UserError, match=r"reserve do not fit NVIDIA Small \(90\.0 GiB\): set train\..*"):
        list(report(RECIPE, [], SHAPES["qwen3-8b"], 1, ""))
    told = list(report(RECIPE, ["device=cpu"], SHAPES["qwen3-8b"], 1, ""))
    assert "H200" in told[0] and "It fits" in told[-1], "a run on a CPU needs no GPU"
    told = list(report(find_recipe("quickstart"), ["rollout.engine=e.py:E"], SHAPES["smollm2-135m"], 1, ""))
    assert any("e.py:E holds is not known" in line for line in told)
    assert list(report(find_recipe("quickstart"), [], SHAPES["smollm2-135m"], 1, ""))[-1].startswith("It fits")


def test_a_full_gpu_names_phase_and_settings() -> None:
    spec, config = SHAPES["qwen3-8b"], config_of("train.offload_optimizer=false", "train.optimizer_dtype=float32")
    told = out_of_memory(config, spec, 2, "update", H200, "CUDA out of memory.")
    assert "out of GPU memory in the phase update, of 139.8 GiB (117.5 predicted)" in told
    assert "To need less: set train.offload_optimizer=true" in told and "CUDA out of memory." in told
    assert "rollout.keep_kv_cache" not in told
    kept = config_of("rollout.keep_kv_cache=always")
    told = out_of_memory(kept, spec, 2, "update", H200, "")
    assert "stays during the update: set rollout.keep_kv_cache=never to free it. To need less: set" in told
    assert "rollout.keep_kv_cache" not in out_of_memory(kept, spec, 2, "rollout", H200, "")
    assert "stays during the update" not in out_of_memory(kept, spec, 2, "warm start", H200, "")  # no cache yet
    asked = config_of("rollout.kv_cache_tokens=2000000")
    told = out_of_memory(asked, spec, 1, "rollout", H200, "")
    assert "set rollout.kv_cache_tokens=1000000" in told


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("CUDA error: out of memory\nTried to start a context"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)` Tried to"),
])
def test_a_run_that_fills_its_gpu_ends_with_one_message(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise error

    limits: list[float] = []
    monkeypatch.setattr(loop, "update", full)
    monkeypatch.setattr(launch, "set_limit", limits.append)
    wanted = r"^out of GPU memory in the phase update, .*Something else holds.*CUDA "
    with pytest.raises(OutOfMemory, match=wanted) as told:
        tiny_run(tmp_path, {"train.collective_timeout": 77.0, "eval.eval_interval": 0})
    assert limits == [77.0] and told.value.status == 3


@pytest.mark.parametrize("error", [RuntimeError("ours"), LostContact("gather: CUDA error: out of memory elsewhere")])
def test_other_errors_stay_what_they_are(error: RuntimeError) -> None:
    with pytest.raises(type(error), match=str(error)), told_when_out_of_memory(config_of(), World()):
        raise error


def test_a_config_for_a_cpu_is_predicted_as_on_a_gpu() -> None:
    config = on_gpu(load_config(find_recipe("quickstart"), ["device=cpu"]))
    assert (config.device, config.kernels, config.rollout.page_size) == ("cuda", "hopper", 128)
