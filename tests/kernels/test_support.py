"""What a GPU backend needs is checked before it is imported: one message with found, needed, and what to do."""

from __future__ import annotations

import getpass
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_config

from jetrl.errors import UserError
from jetrl.kernels import dispatch, support
from jetrl.requirements import packages
from jetrl.run.prepare import prepare

GOOD = {p.name: p.needed.removeprefix("==").replace("*", "0") for p in packages("hopper")}
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this machine look like one with a GPU, these versions, and a CUDA toolkit."""

    def pretend(capability: tuple[int, int] | None = (9, 0), toolkit: str = "/cuda", **changed: str | None) -> None:
        versions = GOOD | {name.replace("_", "-"): version for name, version in changed.items()}

        def version(name: str) -> str:
            if versions.get(name) is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Something")
        monkeypatch.setenv("CUDA_HOME", toolkit)

    dispatch.load_backend.cache_clear()
    return pretend


def test_a_machine_that_has_everything(machine: Machine) -> None:
    machine()
    assert support.refusals() == ()
    support.require("hopper")
    machine(torch="2.11.1+cu130")
    assert support.refusals() == ()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"triton": "3.7.1"}, ["triton 3.7.1 (needs ==3.6.*)"]),
        ({"sgl_deep_gemm": "0.1.4"}, ["sgl-deep-gemm 0.1.4 (needs ==0.1.5)"]),
        ({"flash_attn_4": "4.0.0b35"}, ["flash-attn-4 4.0.0b35 (needs ==4.0.0b36)"]),
        ({"flash_attn_4": None}, ["flash-attn-4 is not installed (needs ==4.0.0b36)"]),
        ({"nvidia_cutlass_dsl": "4.9.0"}, ["nvidia-cutlass-dsl 4.9.0 (needs ==4.8.1)"]),
        (
            {"torch": "2.13.0+cu130", "triton": "3.7.1", "sgl_deep_gemm": None},
            ["torch 2.13.0+cu130 (needs ==2.11.*)", "triton 3.7.1", "sgl-deep-gemm is not installed"],
        ),
    ],
    ids=["triton", "DeepGEMM", "FlashAttention-4", "without FlashAttention-4", "CuTe DSL", "three at once"],
)
@pytest.mark.parametrize("backend", ["hopper", "hopper_scaled_mm"])
def test_wrong_versions_are_one_message(
    machine: Machine, backend: str, changed: dict[str, str | None], words: list[str]
) -> None:
    machine(**changed)
    with pytest.raises(UserError) as caught:
        dispatch.select(backend)
    text = str(caught.value)
    assert all(word in text for word in words) and text.count("needs ==") == len(words)
    assert 'pip install "jetrl[hopper]"' in text
    assert dispatch._serving["cuda"] == "auto" and dispatch._serving["cpu"] == "reference"


def test_other_gpus_and_machines_without_one(machine: Machine) -> None:
    machine(capability=(8, 0))
    with pytest.raises(UserError, match=r'9\.0 \(H100, H200\), and NVIDIA Something has 8\.0: set kernels = "triton"'):
        dispatch.select("hopper")
    machine(capability=(7, 5))
    with pytest.raises(UserError, match=r'9\.0 \(H100, H200\), and NVIDIA Something has 7\.5: set device = "cpu"'):
        dispatch.select("hopper")
    with pytest.raises(UserError, match=r'8\.0 or more \(A100.*\), and NVIDIA Something has 7\.5: set device = "cpu"'):
        dispatch.select("triton")
    machine(capability=None)
    with pytest.raises(UserError, match=r'no GPU: set device = "cpu"'):
        dispatch.load_backend("hopper")
    assert dispatch.load_backend("reference").fp8_gemm, "the CPU's kernels need nothing of this"
    support.require("a backend for other GPUs")
    every = {name for name, device in dispatch.DEVICE_OF.items() if device == "cuda"}
    assert {*support.BACKENDS, support.PORTABLE} == every


def test_portable_kernels_need_torch_and_triton_alone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not nvcc, nor the libraries of Hopper."""
    monkeypatch.setattr(support, "cuda_toolkit", lambda: None)
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        machine(capability=capability, sgl_deep_gemm=None, flash_attn_4=None, nvidia_cutlass_dsl=None)
        assert support.refusals("triton") == ()
    machine(capability=(8, 9), triton="3.4.0", torch="2.8.0")
    with pytest.raises(UserError, match=r"the triton kernels cannot .*torch 2\.8\.0.*triton 3\.4\.0.*jetrl\[gpu\]"):
        support.require("triton")
    machine(capability=None)
    with pytest.raises(UserError, match='torch sees no GPU: set device = "cpu"'):
        support.require("triton")


def test_fp8_where_tensor_cores_lack_it_names_w8a16(machine: Machine) -> None:
    machine(capability=(8, 6))
    for precision in ("fp8", "fp8_rollout"):
        with pytest.raises(UserError, match=r'begin with .* 8\.9 .* has 8\.6\. Set precision = "w8a16"'):
            support.require_precision("triton", precision)
    support.require_precision("triton", "w8a16")
    support.require_precision("triton", "bf16")
    machine(capability=(8, 9))
    support.require_precision("triton", "fp8")


def test_auto_takes_the_kernels_of_the_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, kernels in (((9, 0), "hopper"), ((8, 0), "triton"), ((12, 0), "triton")):
        machine(capability=capability)
        monkeypatch.setattr(dispatch, "load_backend", lambda name: name)
        monkeypatch.setattr(dispatch, "_serving", {"cpu": "reference", "cuda": "auto"})
        assert support.capability() == capability and support.extra_for(capability) == {"hopper": "hopper"}.get(
            kernels, "gpu"
        )
        like = SimpleNamespace(device=torch.device("cuda"))
        assert dispatch.backend_of(like) == kernels and dispatch.definition("hopper") == ""
    assert dispatch.definition("triton") == "triton 1 sm_120 mma keys 64"


def test_a_dry_run_on_a_gpu_finds_wrong_versions(machine: Machine, tmp_path: Path) -> None:
    """Before anything is read or built: `prepare` is what `jetrl train --dry-run` does."""
    machine(flash_attn_4="4.0.0b35")
    config = tiny_config(tmp_path, {"device": "auto", "model.tokenizer": str(tmp_path / "nowhere")})
    assert (config.device, config.kernels) == ("cuda", "hopper")
    with pytest.raises(UserError, match=r"flash-attn-4 4\.0\.0b35 \(needs ==4\.0\.0b36\)"):
        prepare(config)


def test_all_reasons_at_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(capability=(10, 0), triton="3.7.0")
    monkeypatch.setattr(support, "cuda_toolkit", lambda: None)
    assert len(support.refusals()) == 3
    with pytest.raises(UserError, match="has 10.0.*triton 3.7.0.*nvcc"):
        support.require("hopper")


def test_where_nvcc_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "cuda" / "bin"))
    without = support.cuda_toolkit()
    assert without in (None, Path("/usr/local/cuda"))
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "cuda" / "bin" / "nvcc").touch(mode=0o755)
    assert support.cuda_toolkit() == tmp_path / "cuda"
    monkeypatch.setenv("CUDA_PATH", "/second")
    assert support.cuda_toolkit() == Path("/second")
    monkeypatch.setenv("CUDA_HOME", "/first")
    assert support.cuda_toolkit() == Path("/first")


def test_a_package_in_the_right_version_that_is_broken(machine: Machine) -> None:
    machine()
    text = str(support.broken("sgl-deep-gemm", ImportError("undefined symbol: x")))
    assert "sgl-deep-gemm 0.1.5 (needs ==0.1.5)" in text and "undefined symbol: x" in text
    assert text.endswith('pip install --force-reinstall --no-deps "sgl-deep-gemm==0.1.5"')


def test_where_compilers_keep_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("TRITON_CACHE_DIR", "TRITON_HOME", "DG_JIT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    for name in (*names, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = support.caches()
    assert found["Triton"] == tmp_path / ".triton" / "cache" and found["DeepGEMM"] == tmp_path / ".deep_gemm"
    assert found["FlashAttention-4"] == tmp_path / ".cache" / "jetrl" / "flash_attention_4"
    assert found["torch.compile"].name.startswith("torchinductor_")
    for name in (*names, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(name, f"/set/{name}")
    found = support.caches()
    assert found["Triton"] == Path("/set/TRITON_CACHE_DIR") and found["DeepGEMM"] == Path("/set/DG_JIT_CACHE_DIR")
    assert support.flash_cache() == Path("/set/FLASH_ATTENTION_CUTE_DSL_CACHE_DIR") == found["FlashAttention-4"]


@pytest.mark.parametrize("variable", ["HOME", "TRITON_HOME"])
def test_triton_keeps_its_kernels_there(variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As it says itself, in a process of its own: it reads the variables when it is imported."""
    pytest.importorskip("triton")
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    command = [sys.executable, "-c", "import triton.knobs; print(triton.knobs.cache_knobs().dir)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert str(support.caches()["Triton"]) == done.stdout.strip() and str(tmp_path) in done.stdout


@pytest.mark.parametrize("named", [True, False])
def test_torch_keeps_compiled_code_there(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own file, alone: importing its package takes seconds. Users of some containers have no name."""
    if not named:
        monkeypatch.setattr(getpass, "getuser", lambda: {}["nobody"])
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    file = Path(torch.__file__).parent / "_inductor" / "runtime" / "cache_dir_utils.py"
    spec = importlib.util.spec_from_file_location("cache_dir_utils", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert str(support.caches()["torch.compile"]) == module.default_cache_dir()
