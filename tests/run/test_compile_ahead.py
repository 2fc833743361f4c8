"""The phase that compiles ahead: when it runs, what it remembers, what it tells. The GPU is a stand-in here."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling_jobs import job
from tiny import tiny_config, tiny_run

from jetrl.config import Config
from jetrl.kernels.compiling.pool import Outcome, compile_all
from jetrl.parallel.world import ALONE
from jetrl.report.recorder import read_metrics
from jetrl.run import setup
from jetrl.run.compiling import ahead
from jetrl.run.compiling.display import Compiling
from jetrl.spec import SHAPES, ModelSpec

SPEC = SHAPES["smollm2-135m"]


class Shown:
    """A display that remembers."""

    made: list[Shown] = []

    def __init__(self, workers: int) -> None:
        self.workers, self.messages, self.last = workers, [], (0, 0)
        Shown.made.append(self)

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None: ...

    def progress(self, done: int, found: int, now: Sequence[str]) -> None:
        self.last = done, found

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU whose compilers are stand-ins, and caches in a folder."""
    Shown.made = []
    for name in ("TRITON", "DG_JIT", "FLASH_ATTENTION_CUTE_DSL", "TORCHINDUCTOR"):
        name += "_CACHE_DIR"
        monkeypatch.setenv(name, str(tmp_path / "caches" / name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Stand-in")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 << 30, 64 << 30))
    return tmp_path


def on_gpu(folder: Path, changes: dict[str, Any] | None = None) -> Config:
    return tiny_config(folder, changes).model_copy(update={"device": "cuda", "kernels": "hopper"})


def compiles(monkeypatch: pytest.MonkeyPatch, folder: Path, how: str = "well") -> list[Any]:
    """`compile_all` with the stand-in's jobs, whose files land in Triton's cache; the calls that it gets."""
    calls: list[Any] = []
    cache = folder / "caches" / "TRITON_CACHE_DIR"

    def stand_in(find: str, arguments: tuple[Any, ...], **options: Any) -> Outcome:
        calls.append((find, arguments, options["workers"]))
        cache.mkdir(parents=True, exist_ok=True)
        jobs = [job(cache, "k0"), job(cache, "k1", how=how)]
        return compile_all(
            "compiling_jobs:search", (jobs, False), workers=2, watcher=options["watcher"],
            prepare=("compiling_jobs:prepare", (str(folder), False)),
        )

    monkeypatch.setattr(ahead, "compile_all", stand_in)
    return calls


def test_compiled_once_and_never_again(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = compiles(monkeypatch, machine)
    config = on_gpu(machine)
    first = ahead.compile_ahead(config, SPEC, ALONE, Shown)
    assert first["perf/compile_s"] > 0 and Shown.made[0].last == (2, 2) and not Shown.made[0].messages
    start = time.monotonic()
    assert ahead.compile_ahead(config, SPEC, ALONE, Shown)["perf/compile_s"] < 1
    assert time.monotonic() - start < 1 and len(calls) == 1 and len(Shown.made) == 1
    find, arguments, workers = calls[0]
    assert find == "jetrl.run.compiling.needed:find" and arguments == (config, SPEC, 0, True)
    assert workers == Shown.made[0].workers
    (marker,) = (machine / "caches" / "compiled").glob("*.json")
    assert json.loads(marker.read_text())["kernels"] == 2


def test_compiled_again_when_a_cache_is_empty(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = compiles(monkeypatch, machine)
    ahead.compile_ahead(on_gpu(machine), SPEC, ALONE, Shown)
    for path in (machine / "caches" / "TRITON_CACHE_DIR").iterdir():
        path.unlink()
    ahead.compile_ahead(on_gpu(machine), SPEC, ALONE, Shown)
    assert len(calls) == 2


def test_a_failure_is_told_and_leaves_no_marker(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = compiles(monkeypatch, machine, "raises")
    for _ in range(2):
        ahead.compile_ahead(on_gpu(machine), SPEC, ALONE, Shown)
    assert len(calls) == 2
    for shown in Shown.made:
        assert shown.messages[0] == "Not compiled ahead: Stand-in k1 (ValueError: no kernel for k1)."
        assert shown.messages[1].startswith("They are compiled when needed")


def test_nothing_happens_on_a_cpu_when_off_or_unseen(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = compiles(monkeypatch, machine)
    assert ahead.compile_ahead(tiny_config(machine), SPEC, ALONE, Shown) == {}
    assert ahead.compile_ahead(on_gpu(machine, {"train.compile_ahead": False}), SPEC, ALONE, Shown) == {}
    assert ahead.compile_ahead(on_gpu(machine), SPEC, ALONE, None) == {}
    assert not calls and not Shown.made


def marker(config: Config, spec: ModelSpec = SPEC, gpu: str = "H200", trains: bool = True) -> Path:
    return ahead.marker_path(ahead.needs(config, spec, gpu, trains))


def test_the_marker_is_for_these_kernels(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_gpu(machine)
    first = marker(config)
    same = on_gpu(machine, {"train.lr": 1e-5, "train.steps": 9, "rollout.prompts_per_step": 2, "name": "other"})
    assert first == marker(same), "what decides no kernel must not compile again"
    others = [
        marker(config, SHAPES["qwen3-0.6b"]), marker(config, gpu="H100"), marker(config, trains=False),
        marker(on_gpu(machine, {"precision": "bf16"})), marker(on_gpu(machine, {"quant.kv_cache": "fp8"})),
        marker(on_gpu(machine, {"rollout.max_num_seqs": 8})), marker(on_gpu(machine, {"rl.kl_coef": 0.1})),
        marker(on_gpu(machine, {"train.master_dtype": "bfloat16"})),
    ]
    monkeypatch.setattr(ahead, "sources", lambda: "another version of the code")
    others.append(marker(config))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(machine / "elsewhere"))
    others.append(marker(config))
    assert len({*others}) == len(others) and first not in others


def test_workers_fit_the_cores_and_the_memory() -> None:
    dense, mixture = SHAPES["qwen3-8b"], SHAPES["qwen3-30b-a3b"]
    assert ahead.num_workers(16, 139 << 30, dense) == 16
    assert ahead.num_workers(64, 139 << 30, dense) == 24
    assert ahead.num_workers(16, 20 << 30, dense) == 6
    assert ahead.num_workers(16, 1 << 30, dense) == 1
    assert ahead.num_workers(64, 70 << 30, mixture) == 12, "1.5 GiB of gradients each"


def test_what_was_left_is_told() -> None:
    lines = ahead.lines_of(Outcome(found=9, done=5, left=4, failures=[("the search", "x"), ("a", "y")]))
    assert lines[0] == "Not compiled ahead: the search (x), and 1 more." and lines[1].startswith("4 kernels were left")
    assert ahead.lines_of(Outcome(found=9, done=9)) == []


def test_its_seconds_stand_in_the_first_row_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def stand_in(config: Config, spec: ModelSpec, world: Any, displays: Any, *, trains: bool) -> dict[str, float]:
        given.append((spec.num_layers, displays, trains))
        return {"perf/compile_s": 1.5}

    monkeypatch.setattr(setup, "compile_ahead", stand_in)
    rows = read_metrics(tiny_run(tmp_path, {"train.steps": 2}))
    assert given == [(2, Compiling, True)]
    assert [row.get("perf/compile_s") for row in rows] == [1.5, None, None]
