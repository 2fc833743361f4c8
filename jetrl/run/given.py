"""Given answers as trajectories, for supervised fine-tuning and distillation: token for token what a rollout would
hold.

The prompt is what the chat template writes up to the assistant's first turn, which it opens. A turn of the assistant is
its text and the token that ends it; what the template writes between two turns is read and not learned. So a template
that changes earlier turns in later renderings (many remove the thinking) teaches nothing that RL would not sample.
Without a chat template, messages are plain text, one after the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jetrl.chat.messages import TurnEncoder, encode_solution
from jetrl.chat.prompts import OverlongPrompt, encode_problem
from jetrl.config import Config, TaskConfig
from jetrl.errors import UserError
from jetrl.tasks.given_rows import LEARNED, TOOLS
from jetrl.types import Author, Problem, Segment, Trajectory, token_ids

_MOST_TOOLS = 64  # sets of tools whose encoders are kept


@dataclass(frozen=True, slots=True)
class GivenAnswers:
    """Makes trajectories of problems with their solutions, of at most `Config.longest` tokens.

    `eos_ids`: the tokens that end a turn of the policy (`engines.eos_ids`).
    """

    config: Config
    tokenizer: Any
    eos_ids: frozenset[int]
    _encoders: dict[str, TurnEncoder] = field(default_factory=dict)

    def trajectory(self, problem: Problem) -> Trajectory:
        """The conversation with what is learned as the policy's segments (`task.train_on`, and the messages' weights).

        UserError for a problem without a solution, and for one in which nothing is left to learn. OverlongPrompt where
        it is too long.
        """
        if problem.solution is None:
            raise UserError(
                f"Problem {problem.id} has no answer to learn. method = \"sft\" needs conversations, or rows or a task "
                "with worked solutions."
            )
        turns = self._turns(problem.extra.get(TOOLS))
        if isinstance(problem.prompt, str):
            prompt = tuple(encode_problem(problem, self.tokenizer, turns.config))
        else:
            prompt = turns.first(problem, problem.prompt)
        parts = [("environment", prompt), *encode_solution(problem, turns, (), self.eos_ids)]
        segments = [Segment(author, token_ids(tokens), "") for author, tokens in self._authors(problem, parts)]
        found = Trajectory(tuple(segments), "stop", "")
        if found.length > self.config.longest:
            drop = ' (task.overlong_prompts = "drop")' if self.config.supervised else ""
            raise OverlongPrompt(
                f"Problem {problem.id}: the conversation has {found.length} tokens, and {self.config.longest_in_words} "
                f"is {self.config.longest}. Raise it (and train.max_tokens_per_gpu), or leave such rows out{drop}; "
                "conversations are never cut."
            )
        return found

    def _turns(self, tools: Any) -> TurnEncoder:
        """The encoder of conversations with these tools, which the chat template gets as its keyword `tools`."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._encoders:
            if len(self._encoders) == _MOST_TOOLS:
                self._encoders.clear()
            self._encoders[key] = TurnEncoder(self.tokenizer, _task_with(self.config.task, tools))
        return self._encoders[key]

    def _authors(
        self, problem: Problem, parts: Sequence[tuple[Author, tuple[int, ...]]]
    ) -> list[tuple[Author, tuple[int, ...]]]:
        """The parts, with the policy as the author of what is learned."""
        if self.config.task.train_on == "all":  # nothing predicts the first token
            (_, prompt), *rest = parts
            whole = prompt[1:] + tuple(token for _, tokens in rest for token in tokens)
            return [("environment", prompt[:1]), ("policy", whole)]
        count = sum(author == "policy" for author, _ in parts)
        learned = list(problem.extra.get(LEARNED, (True,) * count))
        if self.config.task.train_on == "last":
            learned[:-1] = [False] * (count - 1)
        if not any(learned):
            raise UserError(
                f"Problem {problem.id}: nothing is left to learn: its last turn has weight 0, and task.train_on = "
                "\"last\". Remove the row, or set task.train_on = \"assistant\"."
            )
        keeps = iter(learned)
        return [("policy" if author == "policy" and next(keeps) else "environment", own) for author, own in parts]


def _task_with(task: TaskConfig, tools: Any) -> TaskConfig:
    """The task's settings for conversations with these tools; a whole conversation has a limit, and no prompt."""
    changes: dict[str, Any] = {"max_prompt_length": sys.maxsize}
    if tools:
        changes["chat_template_kwargs"] = {**task.chat_template_kwargs, "tools": tools}
    return task.model_copy(update=changes)
