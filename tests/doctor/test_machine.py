"""Cores, memory and disk as far as this process may use them; packages and imports."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl.doctor import libraries, machine
from jetrl.doctor.finding import attempted, size
from jetrl.parallel import host
from jetrl.requirements import packages


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    return tmp_path


def test_cores_by_affinity_and_quota(monkeypatch: pytest.MonkeyPatch, cgroup: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert machine.cores() == 8
    for quota, expected in (("max 100000", 8), ("350000 100000", 4), ("50000 100000", 1), ("9900000 100000", 8)):
        (cgroup / "cpu.max").write_text(f"{quota}\n")
        assert machine.cores() == expected, quota


def test_threads_next_to_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 4)
    for name in machine._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    good = machine.threads(4)
    assert (good.level, good.found, good.cure) == ("ok", "4 for 4 cores", None)
    assert machine.threads(2).level == "ok", "torch takes one thread a physical core"
    assert machine.threads(64).level == "note" and "num_threads = 4" in (machine.threads(64).cure or "")
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 0.0, 0.0))
    busy = machine.threads(4)
    assert busy.level == "note" and "load 9.0 on 4" in busy.found and "OMP_WAIT_POLICY=passive" in (busy.cure or "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    few = machine.threads(1)
    assert few.level == "note" and "OMP_NUM_THREADS=1" in few.found and "unset OMP_NUM_THREADS" in (few.cure or "")


def test_memory_of_a_container(cgroup: Path) -> None:
    whole = machine.memory()
    assert whole.found.count("GiB") == 2 or whole.found.count("MiB") >= 1
    (cgroup / "memory.max").write_text(str(3 * 2**29))
    (cgroup / "memory.current").write_text(str(2**30))
    small = machine.memory()
    assert small.found == "512 MiB free of 1.5 GiB" and small.level == "bad" and "1.0 GiB" in (small.cure or "")
    (cgroup / "memory.max").write_text("max")
    assert machine.memory().found.split(" of ")[1] == whole.found.split(" of ")[1]


def test_the_output_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert machine.output_folder(Path("runs")).level == "ok" and not (tmp_path / "runs").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20 if path == tmp_path else 2**40))
    full = machine.output_folder(Path("runs"))
    assert full.level == "bad" and "1 MiB free" in full.found and "output_dir" in (full.cure or "")
    assert machine.output_folder(Path("/dev")).level == "ok"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    closed = machine.output_folder(Path("runs/deep/down"))
    assert closed.level == "bad" and f"{tmp_path} cannot be written to" in closed.found


def test_what_caches_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cache" / "deep").mkdir(parents=True)
    (tmp_path / "cache" / "one").write_bytes(bytes(2**20))
    (tmp_path / "cache" / "deep" / "two").write_bytes(bytes(2**21))
    (tmp_path / "cache" / "link").symlink_to("nowhere")
    found = list(machine.kept({"a": Path("~/cache"), "b": tmp_path / "none"}))
    assert [f.what for f in found] == ["a"] and found[0].found.startswith("~/cache: 3 MiB, ")
    monkeypatch.setattr(machine, "_MOST_FILES", 2)
    assert "more than" in next(machine.kept({"a": tmp_path / "cache"})).found
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    (full,) = machine.kept({"a": tmp_path / "cache"})
    assert full.level == "note" and "can be removed" in (full.cure or "")


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.python().level == "ok" and machine.cpu().found
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.10.9")
    old = machine.python()
    assert old.level == "bad" and old.found == "3.10.9 (needs >=3.11)" and old.cure == "install Python >=3.11"


def test_sizes() -> None:
    assert [size(n) for n in (0, 2**20, 2**30 - 2**20, 2**30, 3 * 2**29)] == [
        "0 MiB", "1 MiB", "1023 MiB", "1.0 GiB", "1.5 GiB"]


# ---- packages -------------------------------------------------------------------------------------------------------


def test_attempted_tells_what_was_raised() -> None:
    assert attempted(lambda: 3) == 3
    assert attempted(lambda: {}["x"]) == "KeyError: 'x'"

    def broken() -> None:
        raise OSError("libcuda.so.1:\n  cannot open")

    def bare() -> None:
        raise AssertionError

    assert attempted(broken) == "OSError: libcuda.so.1: cannot open" and attempted(bare) == "AssertionError"


def test_needed_packages_of_this_environment() -> None:
    found = libraries.needed()
    assert [f.what for f in found] == [p.name for p in packages()] and {f.level for f in found} == {"ok"}
    torch = next(f for f in found if f.what == "torch")
    assert torch.found == f"{importlib.metadata.version('torch')} (needs >=2.11)"


def test_a_wrong_version_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "safetensors":
            raise importlib.metadata.PackageNotFoundError(name)
        return "4.57.1" if name == "transformers" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {f.what: f for f in libraries.needed()}
    wrong, missing = found["transformers"], found["safetensors"]
    assert wrong.level == "bad" and wrong.found == "4.57.1 (needs <6,>=5.0)"
    assert wrong.cure == 'pip install "transformers<6,>=5.0"'
    assert missing.level == "bad" and missing.found == "is not installed (needs >=0.5)"
    assert missing.cure == 'pip install "safetensors>=0.5"'
    assert [f.what for f in found.values() if f.level != "ok"] == ["transformers", "safetensors"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart.so.13: cannot open"),
        ("assert False", "AssertionError"),
        ("import a_module_that_is_not_there", "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("def broken(:", "SyntaxError: "),
    ],
)
def test_a_package_whose_import_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, said: str
) -> None:
    needed = {p.name: p.needed for p in packages("hopper")}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: needed[name][2:].replace("*", "0"))
    for name in ("deep_gemm", "cutlass"):
        (tmp_path / f"{name}.py").write_text(text if name == "deep_gemm" else "")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {f.what: f for f in libraries.of_gpu("GPU", "hopper")}
    broken = found["sgl-deep-gemm"]
    assert broken.level == "bad" and broken.found.startswith(f"0.1.5, but its import fails: {said}")
    assert broken.cure == 'pip install --force-reinstall --no-deps "sgl-deep-gemm==0.1.5"'
    assert found["nvidia-cutlass-dsl"].level == "ok"
    for name in ("deep_gemm", "cutlass"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_extras_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"math-verify": "0.9.0", "torchao": "0.17.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {f.what: f for f in libraries.optional()}
    assert not {"hopper", "dev"} & set(found) and {"math", "gym", "data", "optim8", "track"} <= set(found)
    assert found["math"].level == "ok" and found["math"].found.startswith("math-verify 0.9.0")
    assert found["optim8"].level == "note" and "torchao 0.17.0 (needs <1,>=0.18)" in found["optim8"].found
    assert found["gym"].cure == 'pip install "jetrl[gym]"' and "is not installed" in found["gym"].found
