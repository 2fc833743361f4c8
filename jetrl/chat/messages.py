"""Messages of an environment as tokens: the prompt, and what lies between two turns of the policy.

The policy's tokens are never encoded again. For a later turn only the difference is: what the chat template writes
after the policy's turn, from its end-of-turn token to the opening of its next turn. A template that rewrites earlier
turns (many remove the thinking) therefore changes nothing that was already said. Without a chat template, messages
are plain text, one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jetrl.chat.fields import Message
from jetrl.chat.prompts import chat_messages, decoded, encode_problem, encode_text, opened_text, uses_chat_template
from jetrl.chat.template import Schemas, Template, source_of, tell
from jetrl.config import TaskConfig
from jetrl.errors import UserError
from jetrl.types import Author, Completion, Problem, log_probs, token_ids

_MAX_CACHED, _MAX_GIVEN = 4096, 256
_NO_LIMIT = 1 << 31  # tokens; what a conversation may have in all is the rollout's to check


class TurnEncoder:
    """Encodes conversations with one tokenizer, by its chat template where `task.chat_template` says so. `adds`: keys
    of the environment's messages that the template need not write (`environment.Factory`)."""

    def __init__(self, tokenizer: Any, config: TaskConfig, adds: frozenset[str] = frozenset()) -> None:
        self.tokenizer, self.config, self.adds = tokenizer, config, adds
        self.chat = uses_chat_template(config.chat_template, tokenizer)
        self.template = Template(tokenizer, config.chat_template_kwargs)
        self._cache: dict[str, tuple[int, ...]] = {}
        self._given: dict[str, TurnEncoder] = {}

    def text(self, messages: Sequence[Message]) -> str:
        """The messages as text for people."""
        return ("\n" if self.chat else "").join(m["content"] for m in messages)

    def given(self, variables: Mapping[str, Any]) -> TurnEncoder:
        """The encoder of a conversation that has these keywords of its own for the template."""
        if not variables or not self.chat:
            return self
        key = json.dumps(variables, sort_keys=True)
        if key not in self._given:
            if len(self._given) == _MAX_GIVEN:
                self._given.clear()
            tools = {"tools": Schemas(variables["tools"])} if "tools" in variables else {}
            own = {"chat_template_kwargs": {**self.config.chat_template_kwargs, **variables, **tools}}
            self._given[key] = TurnEncoder(self.tokenizer, self.config.model_copy(update=own), self.adds)
        return self._given[key]

    def first(self, problem: Problem, messages: Sequence[Message], limited: bool = True) -> tuple[int, ...]:
        """The prompt: the environment's first messages, after `task.system_prompt`. UserError where it is too long; if
        not `limited`: whatever its length."""
        prompt = tuple(messages) if self.chat else self.text(messages)
        config = self.config if limited else self.config.model_copy(update={"max_prompt_length": _NO_LIMIT})
        return tuple(encode_problem(replace(problem, prompt=prompt), self.tokenizer, config))

    def later(
        self, problem: Problem, opening: Sequence[Message], messages: Sequence[Message], turn: Completion
    ) -> tuple[int, ...]:
        """What follows the policy's `turn`. `opening`: the conversation's first messages."""
        if not self.chat:
            return tuple(self._encode(self.text(messages), problem))
        tokens = self._behind_turn(problem, opening, messages)
        ended = turn.finish_reason == "stop" and turn.tokens[-1:].tolist() == list(tokens[:1])
        return tokens[1:] if ended else tokens  # the policy has drawn the end of its turn itself

    def opened(self, problem: Problem, messages: Sequence[Message]) -> str | None:
        """What the template has written of the policy's first turn (`prompts.opened_text`)."""
        return opened_text(replace(problem, prompt=tuple(messages)), self.tokenizer, self.config) if self.chat else ""

    def _behind_turn(
        self, problem: Problem, opening: Sequence[Message], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        key = json.dumps([list(map(dict, part)) for part in (opening, messages)], sort_keys=True)
        if key not in self._cache:
            if len(self._cache) == _MAX_CACHED:
                self._cache.clear()
            text = self.template.reply(self.start(problem, opening), messages, problem.id, self.adds)
            self._cache[key] = tuple(self._encode(text, problem))
        return self._cache[key]

    def start(self, problem: Problem, opening: Sequence[Message]) -> list[Message]:
        """The conversation's first messages, after `task.system_prompt`."""
        return chat_messages(replace(problem, prompt=tuple(opening)), self.config)

    def turn_end(self, problem: Problem, opening: Sequence[Message]) -> int | None:
        """The first token that the template writes behind the policy's turn; None without one, or for plain text."""
        if not self.chat:
            return None
        text = self.template.ending(self.start(problem, opening), problem.id)
        return next(iter(self._encode(text, problem)), None)

    def unstopped_end(self, ends: Collection[int], stop: Sequence[str]) -> int | None:
        """The special token that the template writes behind a turn, if a run does not stop there that stops at the
        tokens `ends` and the strings `stop`; None where it does, or where there is no such token."""
        text = self.template.usual_ending() if self.chat else None
        tokens = encode_text(text, self.tokenizer, "The chat template's end of a turn", "text") if text else []
        if not tokens or tokens[0] in ends or decoded(self.tokenizer, tokens[:1]).endswith(tuple(stop) or "\0"):
            return None
        first = next(filter(_special_ids(self.tokenizer).__contains__, tokens), None)
        return None if first in ends else first

    def _encode(self, text: str, problem: Problem) -> list[int]:
        return encode_text(text, self.tokenizer, f"Problem {problem.id}", "environment's reply")


def _special_ids(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*getattr(tokenizer, "all_special_ids", ()), *(i for i, token in added.items() if token.special)}


def check_turn_end(encoder: TurnEncoder, ends: Collection[int], stop: Sequence[str], teaches: bool) -> None:
    """Warn, once, where a run does not stop at the token with which its chat template ends a turn: the policy writes on
    behind its answer. UserError for one that `teaches` turns, by a warm start: they would end as no template's do."""
    if (token := encoder.unstopped_end(ends, stop)) is None:
        return
    tokenizer = encoder.tokenizer
    shown = ", ".join(f"{decoded(tokenizer, [i])!r} ({i})" for i in sorted(ends)) or "no token"
    name = decoded(tokenizer, [token])
    text = (
        f"{source_of(tokenizer)} ends a turn with {name!r} ({token}), and the run does not stop there, but at {shown}"
    )
    text = text[0].upper() + text[1:]
    cure = (
        f"Add {token} to eos_token_id in the model's generation_config.json, make {name!r} the eos_token of the "
        f"tokenizer (model.tokenizer), or set rollout.stop = [{name!r}]."
    )
    if teaches:
        raise UserError(f"{text}: the warm start would teach an end of turn that the template does not write. {cure}")
    tell(tokenizer, f"{text}: a policy that ends its answer the way the template does keeps writing after it. {cure}")


def encode_solution(
    problem: Problem, encoder: TurnEncoder, stop: Sequence[str] = (), eos_ids: Collection[int] | None = None
) -> tuple[tuple[Author, tuple[int, ...]], ...]:
    """A worked solution as a rollout would hold it: tokens by author, after the prompt.

    The policy's last turn ends with the token that `turn_end` says, and so does an earlier one unless it ends in a
    string of `rollout.stop`. The environment's turns are what the pool would append. `eos_ids`: the tokens that end a
    turn of the run (None: the tokenizer's).
    """
    assert problem.solution is not None
    tokenizer, prompt = encoder.tokenizer, problem.prompt
    opening: Sequence[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    end = _turn_end(problem, encoder, opening, stop, eos_ids)
    parts: list[tuple[Author, tuple[int, ...]]] = []
    turn: Completion | None = None
    turns = solution_turns(problem)
    said: list[Message] = []
    for place, own in enumerate(turns, 1):
        if own[0]["role"] == "assistant":
            text = _policy_text(problem, encoder, [*opening, *said], own[0])
            tokens = encode_text(text, tokenizer, f"Problem {problem.id}", "worked solution")
            if place == len(turns) or not text.endswith(tuple(stop)):
                tokens.append(end)
            turn = Completion(0, token_ids(tokens), log_probs(()), text, "stop", 0, "")
            parts.append(("policy", tuple(tokens)))
        else:
            assert turn is not None, f"{problem.id}: a worked solution begins with the policy's turn"
            parts.append(("environment", encoder.later(problem, opening, own, turn)))
        said += own
    return tuple(parts)


def solution_turns(problem: Problem) -> list[list[Message]]:
    """A worked solution as turns: one message of the assistant, or the messages that the environment answers with."""
    solution = problem.solution
    assert solution is not None
    messages: list[Message] = []
    for each in ((("policy", solution),) if isinstance(solution, str) else solution):
        if isinstance(each, Mapping):
            messages.append(each)
        else:
            messages.append({"role": "assistant" if each[0] == "policy" else "user", "content": each[1]})
    assert messages and messages[-1]["role"] == "assistant", f"{problem.id}: a worked solution ends with the policy"
    turns: list[list[Message]] = []
    for message in messages:
        if turns and message["role"] != "assistant" and turns[-1][0]["role"] != "assistant":
            turns[-1].append(message)
        else:
            turns.append([message])
    return turns


def _policy_text(problem: Problem, encoder: TurnEncoder, before: Sequence[Message], message: Message) -> str:
    """What the policy writes for this message: its content, or, with thinking or calls, what the template makes."""
    if not message.keys() - {"role", "content"}:
        return str(message["content"])
    if not encoder.chat:
        keys = ", ".join(sorted(message.keys() - {"role", "content"}))
        raise UserError(
            f"Problem {problem.id}: the worked solution has {keys}, and no chat template is in use that could write "
            "it. Write what the policy should say as the message's content."
        )
    return encoder.template.turn(encoder.start(problem, before), message, problem.id)


def _turn_end(
    problem: Problem, encoder: TurnEncoder, opening: Sequence[Message], stop: Sequence[str],
    eos_ids: Collection[int] | None,
) -> int:
    """The token that ends the policy's turn: what the chat template writes there, if the run stops at it; else the
    tokenizer's end of sequence, else the only token at which the run stops. UserError where the template writes a
    special token at which the run does not stop."""
    own: int | None = encoder.tokenizer.eos_token_id
    ends = set(eos_ids if eos_ids is not None else () if own is None else (own,))
    written = encoder.turn_end(problem, opening)
    if written is not None and (
        written in ends or decoded(encoder.tokenizer, [written]).endswith(tuple(stop) or "\0")
    ):
        return written
    if ends:
        check_turn_end(encoder, ends, stop, teaches=True)
    if own is not None:
        return own
    if len(ends) == 1:
        return next(iter(ends))
    found = f"there are several ({', '.join(map(str, sorted(ends)))})" if ends else "there is none"
    raise UserError(
        f"Problem {problem.id}: the warm start needs the token that ends the policy's turn, and {found}: the tokenizer "
        "has no eos_token, and the chat template ends a turn with no end-of-sequence token. Set eos_token in "
        "tokenizer_config.json, or eos_token_id in generation_config.json."
    )
