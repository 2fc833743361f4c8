"""Run folders as a training run would leave them, made from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jetrl.report.recorder import Recorder

PRECISIONS = {"fp8": 0.0, "bf16": 0.0, "fp8_rollout": 0.03}  # the size of the log-prob gap


def metrics_row(step: int, steps: int, gap: float, random: np.random.Generator) -> dict[str, float]:
    """One training step of a run that learns along a logistic curve."""
    skill = 1 / (1 + math.exp(-8 * (step / steps - 0.35)))
    worst = gap * float(random.lognormal(0, 0.5)) * (1 + 3 * step / steps)
    update, rollout = 0.35 + 0.05 * random.random(), 0.9 + 0.2 * random.random()
    row = {
        "reward/mean": float(np.clip(0.05 + 0.9 * skill + random.normal(0, 0.04), 0, 1)),
        "reward/std": 0.3 * (1 - skill),
        "reward/frac_zero_std": 0.2 + 0.6 * skill,
        "parity/logprob_abs_diff_max": worst,
        "parity/logprob_abs_diff_mean": worst / 12,
        "parity/frac_tokens_different": 0.97 if gap else 0.0,
        "parity/k3_kl": worst**2 / 8,
        "policy/entropy": 1.1 * (1 - skill) + 0.08 + 0.02 * random.random(),
        "policy/grad_norm": float(random.lognormal(-1, 0.3)),
        "policy/clip_frac_low": 0.0,
        "policy/kl": 0.0,
        "response_length/mean": 5.2 + 1.5 * (1 - skill) + 0.2 * random.random(),
        "response_length/max": 12.0,
        "response_length/frac_truncated": 0.08 * (1 - skill),
        "time/rollout": rollout,
        "time/reward": 0.02,
        "time/pack": 0.01,
        "time/update": update,
        "time/publish": 0.03,
        "perf/tokens_per_s_per_gpu": 700 / (rollout + update),
    }
    if step % 10 == 0:
        row["eval/addition/avg@1"] = round(0.02 + 0.93 * skill, 4)
        row["time/eval"] = 1.4
    return row


def sample_rows(step: int, steps: int, random: np.random.Generator) -> list[dict[str, Any]]:
    """Three prompts with four completions each; the first completion of step 1 tries to break out of the page."""
    rows = []
    for group in range(3):
        a, b = (int(value) for value in random.integers(10, 999, 2))
        for member in range(4):
            right = random.random() < step / steps
            answer = str(a + b) if right else str(a + b + int(random.integers(1, 90)))
            text = answer
            if step == 1 and group == 0 and member == 0:
                text = "</script><script>document.title='broken'</script><b>&amp;"
            tokens = [*(text if len(text) < 9 else text.split(" ")), "<|end|>"]
            logprobs = [-float(random.exponential(0.1 if right else 0.9)) for _ in tokens]
            rows.append(
                {
                    "group": 3 * step + group, "prompt": f"{a} + {b} =", "answer": str(a + b), "completion": text,
                    "tokens": tokens, "logprobs": logprobs, "reward": float(right),
                    "advantage": 0.8 if right else -0.8, "finish_reason": "stop" if member else "length",
                }
            )  # fmt: skip
    return rows


def write_run(folder: Path, precision: str = "fp8", steps: int = 40, seed: int = 0) -> Path:
    """A finished run at `folder`, whose name it carries."""
    random = np.random.default_rng(seed)
    with Recorder(folder) as recorder:
        recorder.write_config(
            f'name = "{folder.name}"\nseed = {seed}\nprecision = "{precision}"\nkernels = "hopper"\ndevice = "cuda"\n\n'
            '[model]\npath = "models/Qwen3-0.6B"\n\n[train]\nlr = 1e-6\n'
        )
        environment = {"gpu": "NVIDIA H200", "gpu_count": 1, "git_commit": "0123456789abcdef", "git_dirty": False}
        recorder.write_environment(["jetrl", "train", "run.toml"], environment)
        recorder.write(0, {"eval/addition/avg@1": 0.0312, "time/eval": 1.4})
        for step in range(1, steps + 1):
            recorder.write(step, metrics_row(step, steps, PRECISIONS[precision], random))
            if step == 1 or step % 5 == 0:
                recorder.write_samples(step, sample_rows(step, steps, random))
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run("name", precision="fp8", steps=40, seed=0)` writes a run folder and returns its path."""

    def make(name: str, **options: Any) -> Path:
        return write_run(tmp_path / "runs" / name, **options)

    return make


@pytest.fixture
def make_rows() -> Callable[[int, int], Sequence[dict[str, Any]]]:
    """`make_rows(step, steps)`: sample rows of one step."""
    return lambda step, steps: sample_rows(step, steps, np.random.default_rng(step))
