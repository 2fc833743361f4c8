"""The benchmark of LoRA: rows that replace others, medians and ratios, a smaller GPU, and a tiny model on the CPU."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import bench_lora
import pytest
import torch
from bench_lora import LORA, WHOLE, limit_memory, summary, with_row


def test_a_new_row_replaces_an_old_one_of_the_same_case() -> None:
    rows = [{"part": "decode", "batch": 64, "round": 0, "step_ms": 4.0}, {"part": "decode", "batch": 64, "round": 1}]
    again = {"part": "decode", "batch": 64, "round": 0, "step_ms": 5.0}
    assert with_row(rows, again) == [rows[1], again]
    other = again | {"precision": "bf16"}
    assert with_row(rows, other) == [*rows, other]


def test_medians_and_ratios() -> None:
    def row(part: str, variant: str, value: float, **more: float) -> dict[str, object]:
        sizes = {"batch": 64} if part == "decode" else {"tokens": 256}
        key = "step_ms" if part == "decode" else "update_ms"
        return {"part": part, "precision": "fp8", "variant": variant, key: value} | sizes | more

    rows = [row("decode", WHOLE, x) for x in (4.0, 5.0, 8.0)] + [row("decode", LORA, x) for x in (5.5, 5.0, 6.0)]
    rows += [row("update", LORA, 80.0, **{"peak GiB": 50.0}), {"part": "save", "publish_ms": 1.0}]
    decode, update = summary(rows)
    assert decode == {
        "part": "decode", "precision": "fp8", "batch/tokens": 64, f"{WHOLE} ms": 5.0, f"{LORA} ms": 5.5,
        f"{WHOLE} spread %": 100.0, f"{LORA} spread %": pytest.approx(20.0), "ratio": pytest.approx(1.1),
    }
    assert update["batch/tokens"] == 256 and update[f"{LORA} GiB"] == 50.0 and "ratio" not in update


def test_a_smaller_gpu_is_told_to_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    gib, share = 2**30, []
    true = SimpleNamespace(total_memory=140 * gib, name="G")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *a: true)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *a: (100 * gib, 140 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *a: 40 * gib)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", share.append)
    assert limit_memory(150 * gib) == 140 * gib and not share
    assert limit_memory(80 * gib) == 80 * gib and share == [79 / 140]
    assert torch.cuda.get_device_properties(0).total_memory == 80 * gib
    assert torch.cuda.get_device_properties(0).name == "G"
    assert torch.cuda.mem_get_info(0) == (39 * gib, 80 * gib)


@pytest.mark.slow
def test_a_tiny_model_runs_on_the_cpu() -> None:
    command = [sys.executable, bench_lora.__file__, "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    found = [" ".join(line.split()[:3]) for line in lines[-3:]]
    assert found == ["decode fp8 2", "decode fp8 3", "update fp8 256"]
    (fit,) = (line.split() for line in lines if line.startswith("gsm8k_qwen3_32b_lora "))
    assert fit[1] == "2" and fit[3] == "0"  # layers, parity
