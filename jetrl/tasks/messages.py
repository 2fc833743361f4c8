"""Messages of an environment as tokens: the prompt, and what lies between two turns of the policy.

The policy's tokens are never encoded again. For a later turn only the difference is: what the chat template writes
after the policy's turn, from its end-of-turn token to the opening of its next turn. A template that rewrites earlier
turns (many remove the thinking) therefore changes nothing that was already said. Without a chat template, messages
are plain text, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jetrl.config import TaskConfig
from jetrl.errors import UserError
from jetrl.tasks.prompts import Message, chat_messages, encode_problem, encode_text, render, uses_chat_template
from jetrl.types import Author, Completion, Problem

_POLICY_TURN = "jetrl:the-policys-turn:"  # stands in for it, as a text that no conversation holds
_MAX_CACHED = 4096


class TurnEncoder:
    """Encodes conversations with one tokenizer, by its chat template where `task.chat_template` says so."""

    def __init__(self, tokenizer: Any, config: TaskConfig) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.chat = uses_chat_template(config.chat_template, tokenizer)
        self._cache: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def text(self, messages: Sequence[Message]) -> str:
        """The messages as text for people."""
        return ("\n" if self.chat else "").join(m["content"] for m in messages)

    def first(self, problem: Problem, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt: the environment's first messages, after `task.system_prompt`. UserError where it is too long."""
        prompt = tuple(messages) if self.chat else self.text(messages)
        return tuple(encode_problem(replace(problem, prompt=prompt), self.tokenizer, self.config))

    def later(
        self, problem: Problem, opening: Sequence[Message], messages: Sequence[Message], turn: Completion
    ) -> tuple[int, ...]:
        """What follows the policy's `turn`. `opening`: the conversation's first messages."""
        if not self.chat:
            return tuple(self._encode(self.text(messages), problem))
        tokens = self._behind_turn(problem, opening, messages)
        ended = turn.finish_reason == "stop" and turn.tokens[-1:] == tokens[:1]
        return tokens[1:] if ended else tokens  # the policy has drawn the end of its turn itself

    def _behind_turn(
        self, problem: Problem, opening: Sequence[Message], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        key = tuple(tuple(tuple(m.items()) for m in part) for part in (opening, messages))
        if key not in self._cache:
            if len(self._cache) == _MAX_CACHED:
                self._cache.clear()
            self._cache[key] = tuple(self._encode(self._template_text(problem, opening, messages), problem))
        return self._cache[key]

    def _template_text(self, problem: Problem, opening: Sequence[Message], messages: Sequence[Message]) -> str:
        said = "".join(m["content"] for m in (*opening, *messages))
        mark = _POLICY_TURN
        while mark in said:
            mark += "'"
        start = chat_messages(replace(problem, prompt=tuple(opening)), self.config)
        talk = [*start, {"role": "assistant", "content": mark}, *messages]
        text = render(talk, self.tokenizer, problem.id, self.config.chat_template_kwargs)
        before, found, behind = text.rpartition(mark)
        if not found or mark in before:
            raise UserError(
                f"Problem {problem.id}: the tokenizer's chat template writes an assistant's turn {text.count(mark)} "
                "times, so what follows it cannot be found. Use a chat template that writes it once."
            )
        return behind

    def _encode(self, text: str, problem: Problem) -> list[int]:
        return encode_text(text, self.tokenizer, f"Problem {problem.id}", "environment's reply")


def encode_solution(
    problem: Problem, encoder: TurnEncoder, stop: Sequence[str] = ()
) -> tuple[tuple[Author, tuple[int, ...]], ...]:
    """A worked solution as a rollout would hold it: tokens by author, after the prompt.

    The policy's last turn ends with the end-of-sequence token, and so does an earlier one unless it ends in a string of
    `rollout.stop`. The environment's turns are what the pool would append.
    """
    assert problem.solution is not None
    solution: Sequence[tuple[Author, str]]
    solution = (("policy", problem.solution),) if isinstance(problem.solution, str) else problem.solution
    assert solution and solution[-1][0] == "policy", f"{problem.id}: a worked solution ends with the policy's turn"
    prompt = problem.prompt
    opening: Sequence[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    tokenizer = encoder.tokenizer
    parts: list[tuple[Author, tuple[int, ...]]] = []
    turn: Completion | None = None
    for place, (author, text) in enumerate(solution, 1):
        if author == "policy":
            tokens = encode_text(text, tokenizer, f"Problem {problem.id}", "worked solution")
            if place == len(solution) or not text.endswith(tuple(stop)):
                tokens.append(tokenizer.eos_token_id)
            turn = Completion(0, tuple(tokens), (), text, "stop", 0, "")
            parts.append((author, turn.tokens))
        else:
            assert turn is not None, f"{problem.id}: a worked solution begins with the policy's turn"
            parts.append((author, encoder.later(problem, opening, [{"role": "user", "content": text}], turn)))
    return tuple(parts)
