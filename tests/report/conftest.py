"""Run folders as a training run would leave them, made from a seed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jetrl.report.recorder import Recorder, failed_rows, group_rows
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory

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


class Vocabulary:
    """Gives token texts ids as they come."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def text(self, token: int) -> str:
        return self.texts[token]

    def ids(self, texts: Sequence[str]) -> tuple[int, ...]:
        self.texts += texts
        return tuple(range(len(self.texts) - len(texts), len(self.texts)))

    def policy(
        self, tokens: Sequence[str], text: str, random: np.random.Generator, doubt: float, reward: float = 0.0
    ) -> Segment:
        logprobs = tuple(-float(random.exponential(doubt)) for _ in tokens)
        return Segment("policy", self.ids(tokens), text, logprobs, reward)


def plain_rows(step: int, steps: int, random: np.random.Generator) -> list[dict[str, Any]]:
    """Three prompts with four completions each; the first completion of step 1 tries to break out of the page."""
    vocabulary = Vocabulary()
    groups = []
    for number in range(3):
        a, b = (int(value) for value in random.integers(10, 999, 2))
        trajectories, rewards = [], []
        for member in range(4):
            right = bool(random.random() < step / steps)
            text = str(a + b) if right else str(a + b + int(random.integers(1, 90)))
            if step == 1 and number == 0 and member == 0:
                text = "</script><script>document.title='broken'</script><b>&amp;"
            tokens = [*(text if len(text) < 9 else text.split(" ")), "<|end|>"]
            answer = vocabulary.policy(tokens, text, random, 0.1 if right else 0.9)
            question = Segment("environment", (1, 2), f"{a} + {b} =")
            trajectories.append(Trajectory((question, answer), "stop" if member else "length", "d"))
            rewards.append(float(right))
        problem = Problem(str(number), f"{a} + {b} =", str(a + b))
        advantages = tuple(0.8 if reward else -0.8 for reward in rewards)
        prompt = Prompt(3 * step + number, problem, (1, 2))
        groups.append(Group(prompt, tuple(trajectories), tuple(rewards), advantages))
    return group_rows(groups, vocabulary.text)


def guessing_game(
    step: int, random: np.random.Generator
) -> tuple[Group, list[tuple[Prompt, Trajectory]], Vocabulary]:
    """Four conversations about a hidden number, with a value for each token, and one that its environment broke."""
    vocabulary = Vocabulary()
    hidden = int(random.integers(1, 64))
    rules = "system\nAnswer with one number in <guess> tags.\nuser\nI think of a number from 1 to 64."
    opening = Segment("environment", (1, 2, 3), rules)
    prompt = Prompt(100 * step, Problem("guess", "", ""), ())
    trajectories: list[Trajectory] = []
    for _ in range(5):
        segments, low, high, end = [opening], 1, 64, "turns"
        for _ in range(4):
            guess = int(random.integers(low, high + 1))
            text = f"It lies between {low} and {high}, so I try the middle.\n<guess>{guess}</guess>"
            tokens = [*re.findall(r"</?guess>|\s?[^\s<]+|\s", text), "<|end|>"]
            right = guess == hidden
            segments.append(vocabulary.policy(tokens, text, random, 0.3, reward=1.0 if right else -0.05))
            if right:
                end = "stop"
                break
            low, high = (guess + 1, high) if guess < hidden else (low, guess - 1)
            hint = "higher" if guess < hidden else "lower"
            segments.append(Segment("environment", (4, 5), f"user\nMy number is {hint} than {guess}.\nTry again."))
        trajectories.append(Trajectory(tuple(segments), end, "d"))  # type: ignore[arg-type]
    *kept, last = trajectories
    broken = Trajectory(last.segments[:2], "error", "d", "ConnectionError: the server closed the line")
    rewards = tuple(math.fsum(turn.reward for turn in one.turns) for one in kept)
    advantages = tuple(tuple(random.normal(0, 1, one.num_policy_tokens).tolist()) for one in kept)
    return Group(prompt, tuple(kept), rewards, advantages), [(prompt, broken)], vocabulary


def conversation_rows(step: int, random: np.random.Generator) -> list[dict[str, Any]]:
    """The rows of one `guessing_game`."""
    group, failed, vocabulary = guessing_game(step, random)
    return group_rows([group], vocabulary.text) + failed_rows(failed, vocabulary.text)


def conversation_metrics(step: int, steps: int, random: np.random.Generator) -> dict[str, float]:
    """What a run of conversations with a critic and refill measures besides `metrics_row`."""
    skill = step / steps
    return {
        "environment/turns_mean": 3.8 - 1.6 * skill + 0.2 * random.random(),
        "environment/turns_max": 4.0,
        "environment/tokens_mean": 22.0,
        "environment/num_errors": float(random.random() < 0.3),
        "environment/num_timeouts": 0.0,
        "environment/frac_max_turns": 0.5 * (1 - skill),
        "rollout/refill_rounds": 1.0 + (skill > 0.5),
        "rollout/num_prompts_sampled": 8.0 * (1 + (skill > 0.5)),
        "critic/loss": 0.4 * (1 - skill) + 0.05 * random.random(),
        "critic/explained_variance": 0.9 * skill - 0.1,
        "critic/grad_norm": 0.7,
        "critic/lr": 1e-5,
        "policy/ref_kl": 0.02 * skill,
    }


def write_run(
    folder: Path, precision: str = "fp8", steps: int = 40, seed: int = 0, conversations: bool = False
) -> Path:
    """A finished run at `folder`, whose name it carries."""
    random = np.random.default_rng(seed)
    with Recorder(folder) as recorder:
        recorder.write_config(
            f'name = "{folder.name}"\nseed = {seed}\nprecision = "{precision}"\nkernels = "hopper"\ndevice = "cuda"\n'
            '\n[model]\npath = "models/Qwen3-0.6B"\n\n[train]\nlr = 1e-6\n'
        )
        environment = {"gpu": "NVIDIA H200", "gpu_count": 1, "git_commit": "0123456789abcdef", "git_dirty": False}
        recorder.write_environment(["jetrl", "train", "run.toml"], environment)
        recorder.write(0, {"eval/addition/avg@1": 0.0312, "time/eval": 1.4})
        for step in range(1, steps + 1):
            extra = conversation_metrics(step, steps, random) if conversations else {}
            recorder.write(step, metrics_row(step, steps, PRECISIONS[precision], random) | extra)
            if step == 1 or step % 5 == 0:
                recorder.write_samples(step, plain_rows(step, steps, random))
                if conversations:
                    recorder.write_samples(step, conversation_rows(step, random))
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run("name", precision="fp8", steps=40, seed=0, conversations=False)` writes a run folder: its path."""

    def make(name: str, **options: Any) -> Path:
        return write_run(tmp_path / "runs" / name, **options)

    return make


@pytest.fixture
def make_rows() -> Callable[[int, int], Sequence[dict[str, Any]]]:
    """`make_rows(step, steps)`: sample rows of one step."""
    return lambda step, steps: plain_rows(step, steps, np.random.default_rng(step))
