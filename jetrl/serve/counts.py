"""Counters and gauges of a server, and their text in Prometheus' exposition format 0.0.4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """What has happened since the start."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by endpoint and status
    prompt_tokens: Counter[int] = field(default_factory=Counter)  # by worker
    drawn_tokens: Counter[int] = field(default_factory=Counter)
    left: int = 0  # clients that went before their answer was whole

    def answered(self, worker: int, prompt: int, drawn: int) -> None:
        """An answer of so many tokens to a prompt of so many is whole."""
        self.prompt_tokens[worker] += prompt
        self.drawn_tokens[worker] += drawn

    def text(self, workers: Sequence[tuple[bool, Mapping[str, int], int]], version: int) -> str:
        """The page `/metrics`. `workers`: of each engine whether it lives, its last report (`running`, `waiting`) and
        its open requests. Of several there are the sums and, under names of their own, the values of each."""
        lines = ["# HELP jetrl_requests_total Requests by endpoint and HTTP status.",
                 "# TYPE jetrl_requests_total counter"]
        lines += [
            f'jetrl_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}'
            for (endpoint, status), count in sorted(self.requests.items())
        ]
        for name, kind, values, about in (
            ("prompt_tokens_total", "counter", self.prompt_tokens, "Tokens of prompts that were answered."),
            ("generated_tokens_total", "counter", self.drawn_tokens, "Tokens of answers."),
            ("requests_in_flight", "gauge", [count for *_, count in workers], "Answers that the engine owes."),
            ("sequences_running", "gauge", [state["running"] for _, state, _ in workers],
             "Sequences that the engine computes."),
            ("sequences_waiting", "gauge", [state["waiting"] for _, state, _ in workers],
             "Sequences that wait for a place in the engine."),
        ):
            each = [values[number] for number in range(len(workers))]
            lines += _metric(f"jetrl_{name}", kind, about, {"": sum(each)})
            if len(workers) > 1:
                lines += _metric(f"jetrl_worker_{name}", kind, f"By worker: {about}", _by_worker(each))
        if len(workers) > 1:
            alive = _by_worker([int(alive) for alive, *_ in workers])
            lines += _metric("jetrl_worker_up", "gauge", "Whether the worker lives.", alive)
        lines += _metric(
            "jetrl_disconnects_total", "counter", "Clients that left before their answer was whole.", {"": self.left}
        )
        lines += _metric("jetrl_weight_version", "gauge", "Version of the weights.", {"": version})
        return "\n".join(lines) + "\n"


def _by_worker(values: Sequence[int]) -> dict[str, int]:
    return {f'{{worker="{number}"}}': value for number, value in enumerate(values)}


def _metric(name: str, kind: str, about: str, values: Mapping[str, int]) -> list[str]:
    """A metric with its value, or one for each of its labels."""
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *(f"{name}{at} {value}" for at, value in values.items())]
