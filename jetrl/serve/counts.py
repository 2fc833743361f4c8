"""Counters and gauges of a server, and their text in Prometheus' exposition format 0.0.4."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """What has happened since the start."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by endpoint and status
    prompt_tokens: int = 0
    drawn_tokens: int = 0
    left: int = 0  # clients that went before their answer was whole

    def text(self, running: int, waiting: int, in_flight: int, version: int) -> str:
        """The page `/metrics`."""
        lines = ["# HELP jetrl_requests_total Requests by endpoint and HTTP status.",
                 "# TYPE jetrl_requests_total counter"]
        lines += [
            f'jetrl_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}'
            for (endpoint, status), count in sorted(self.requests.items())
        ]
        for name, kind, value, about in (
            ("jetrl_prompt_tokens_total", "counter", self.prompt_tokens, "Tokens of prompts that were answered."),
            ("jetrl_generated_tokens_total", "counter", self.drawn_tokens, "Tokens of answers."),
            ("jetrl_disconnects_total", "counter", self.left, "Clients that left before their answer was whole."),
            ("jetrl_requests_in_flight", "gauge", in_flight, "Answers that the engine owes."),
            ("jetrl_sequences_running", "gauge", running, "Sequences that the engine computes."),
            ("jetrl_sequences_waiting", "gauge", waiting, "Sequences that wait for a place in the engine."),
            ("jetrl_weight_version", "gauge", version, "Version of the weights."),
        ):
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}", f"{name} {value}"]
        return "\n".join(lines) + "\n"
