"""What passes between the pool and an environment that others speak through (`command`, `verifiers`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jetrl.chat.fields import Message
from jetrl.types import Completion


class Asked(list[Message]):
    """Messages of an environment. `variables`: keywords of the chat template, its `tools` among them. `after`: the turn
    of the policy that they follow, -1: none, they are a prompt anew."""

    def __init__(self, messages: Sequence[Message], variables: Mapping[str, Any], after: int) -> None:
        super().__init__(messages)
        self.variables, self.after = variables, after


@dataclass(frozen=True, slots=True)
class Said:
    """A turn of the policy, and all tokens before it."""

    prompt: tuple[int, ...]
    turn: Completion
