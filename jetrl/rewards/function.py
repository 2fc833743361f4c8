"""What a reward function is, and the text of what it scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

RewardFunction = Callable[..., Sequence[float | None]]
"""`f(prompts, completions, **columns)`: one number per completion, None where it could not be scored."""


def completion_text(completion: str | Sequence[Mapping[str, str]]) -> str:
    """The text of a completion in either of TRL's forms; for a conversation, that of the policy's last turn."""
    if isinstance(completion, str):
        return completion
    return next((m["content"] for m in reversed(completion) if m["role"] == "assistant"), "")
