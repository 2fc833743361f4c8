"""Environments: what one is, how the config names it, and checks of what it returns.

An environment is a class with `reset` and `step`; one instance holds one conversation. In a file of yours:

    class GuessNumber:
        def __init__(self, low=1, high=100):       # environment.params
            self.low, self.high = low, high

        def reset(self, problem):                  # a dict: seed, index, id, prompt, answer and further columns
            self.secret = random.Random(problem["seed"]).randint(self.low, self.high)
            return "Guess my number."              # a text, a chat message, or a list of messages

        def step(self, action):                    # the policy's text of this turn
            return "higher", 0.0, False            # messages, reward, done

Both may be `async def`. An optional `close()` is called when the conversation is over. What an environment draws must
come from `problem["seed"]`, so that a run can be repeated.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from jetrl.chat.fields import Message, message_of
from jetrl.chat.prompts import uses_chat_template
from jetrl.config import TaskConfig
from jetrl.environments.asked import Asked
from jetrl.environments.calculator import Calculator
from jetrl.environments.command import Command
from jetrl.environments.retry import Retry
from jetrl.environments.spoken import Spoken
from jetrl.environments.verifiers import Verifiers, require_verifiers
from jetrl.errors import UserError, defined_at, shown
from jetrl.hashing import stable_hash
from jetrl.rewards.function import RewardFunction
from jetrl.serve.calls import form_of
from jetrl.types import Problem
from jetrl.user_code.from_python import NOTHING, FromPython, is_given
from jetrl.user_code.importing import import_attribute
from jetrl.values import value_of

BUILTIN: Mapping[str, type] = {"calculator": Calculator, "command": Command, "retry": Retry, "verifiers": Verifiers}
TOOLS = "tools"  # built in as well, and made of `environment.tools` by `environments/tools.py`

Messages = str | Message | Sequence[Message]
StepResult = tuple[Messages | None, float | None, bool]

_MAX_REWARD = 1e30


class Environment(Protocol):
    """One conversation. It may also have `close()`."""

    def reset(self, problem: dict[str, Any]) -> Messages | Awaitable[Messages]:
        """Begin: the messages that the policy answers first."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """The policy's turn: the messages that follow (none if it is over), its reward, and whether it is over."""
        ...


class BadReply(Exception):
    """An environment returned something of the wrong form."""


@dataclass(frozen=True, slots=True)
class Factory:
    """Makes the environments of a run, one for each conversation. The chat template sees `variables` besides those of
    `task.chat_template_kwargs`. `adds`: keys of its messages that a template need not write. `makes_prompts`: whether
    `reset` may begin otherwise than with the task's prompt. `attributes`: what a new one is told of the run."""

    kind: type
    params: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    adds: frozenset[str] = frozenset()
    makes_prompts: bool = True
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def takes_turns(self) -> bool:
        """Whether `step` gets the policy's turn as `Said`, and may go on from any turn (`Asked`)."""
        return issubclass(self.kind, Spoken)

    def __call__(self) -> Any:
        made = self.kind(**self.params)
        for name, value in self.attributes.items():
            setattr(made, name, value)
        return made

    @property
    def name(self) -> str:
        return self.kind.__name__

    def is_async(self, method: str) -> bool:
        """Whether the method is an `async def`."""
        return inspect.iscoroutinefunction(getattr(self.kind, method))

    def task(self, config: TaskConfig) -> TaskConfig:
        """The `task` section by which prompts of its conversations are encoded."""
        if not self.variables:
            return config
        return config.model_copy(update={"chat_template_kwargs": {**config.chat_template_kwargs, **self.variables}})

    @property
    def can_close(self) -> bool:
        return callable(getattr(self.kind, "close", None))


def load_environment(
    name: str, params: Mapping[str, Any], reward: RewardFunction | None = None, own: FromPython = NOTHING
) -> Factory:
    """The environment that `environment.name` names: a built-in one, `module:Class` or `path/to/file.py:Class`.

    A constructor with a parameter `reward` gets the task's reward function there.
    """
    if ":" in name or is_given(name):
        kind = import_attribute(name, "environment.name", "class", own=own)
    elif name in BUILTIN:
        kind = BUILTIN[name]
        if kind is Verifiers:
            require_verifiers()
    else:
        near = difflib.get_close_matches(name, (*BUILTIN, TOOLS), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Built in: {', '.join((*BUILTIN, TOOLS))}."
        raise UserError(
            f"environment.name = {name!r}: there is no such environment. {hint} Name your own as module:Class or "
            "path/to/file.py:Class."
        )
    if not inspect.isclass(kind):
        raise UserError(f"environment.name: {name} is of type {type(kind).__name__}, not a class.")
    for method, argument in (("reset", "problem"), ("step", "action")):
        _check_method(kind, method, argument)
    factory = Factory(kind, _constructor_params(kind, params, reward))
    if kind in BUILTIN.values():
        factory()  # ours check their parameters and cost nothing; yours may need servers, and are made when used
    return factory


def for_tokenizer(factory: Factory, tokenizer: Any, config: TaskConfig) -> Factory:
    """The factory of a run with this tokenizer: an environment that others speak through learns how the policy writes
    calls of tools."""
    if not factory.takes_turns:
        return factory
    chat = uses_chat_template(config.chat_template, tokenizer)
    known = {"chat": chat, "form": form_of(tokenizer) if chat else None}
    return replace(factory, attributes=known, adds=frozenset({"tool_call_id", "name"}))


def _check_method(kind: type, method: str, argument: str) -> None:
    function = getattr(kind, method, None)
    if not callable(function):
        raise UserError(f"environment.name: {kind.__name__} has no method {method}(self, {argument}).")
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"environment.name: write {kind.__name__}.{method}(self, {argument}){defined_at(function)}: {error}."
        ) from error


def _constructor_params(kind: type, params: Mapping[str, Any], reward: RewardFunction | None) -> dict[str, Any]:
    """What the constructor is called with: `params` and perhaps the reward function; raises where they do not fit."""
    parameters = inspect.signature(kind).parameters
    named = {k: p for k, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in params:
        if key not in named and not takes_any:
            near = difflib.get_close_matches(key, named, n=1)
            known = ", ".join(k for k in named if k != "reward") or "none"
            hint = f"did you mean {near[0]!r}?" if near else f"known: {known}."
            raise UserError(
                f"environment.params.{key}: {kind.__name__}{defined_at(kind)} has no such parameter; {hint}"
            )
    given = dict(params)
    wants = "reward" in named and "reward" not in given and named["reward"].default in (None, inspect.Parameter.empty)
    if wants and reward is not None:
        given["reward"] = reward
    elif wants and named["reward"].default is inspect.Parameter.empty:
        raise UserError(
            f"environment.name: {kind.__name__} scores answers with the task's reward, and this task has none. Set "
            "task.reward, or use a task that has one."
        )
    missing = [k for k, p in named.items() if p.default is p.empty and k not in given]
    if missing:
        named_so = f"{kind.__name__}{defined_at(kind)}"
        raise UserError(f"environment.params.{missing[0]}: {named_so} needs this parameter; set it.")
    return given


def problem_mapping(problem: Problem) -> dict[str, Any]:
    """What `reset` gets. `tasks.task.sample` gives problems a seed; others have one derived from their id."""
    prompt = problem.prompt if isinstance(problem.prompt, str) else [dict(m) for m in problem.prompt]
    seed = stable_hash("environment", problem.id) % 2**31
    return {"seed": seed, **problem.extra, "id": problem.id, "prompt": prompt, "answer": problem.answer}


def messages_of(value: Any, where: str) -> list[Message]:
    """Checked messages: a text is a user message; None and an empty text are no message."""
    if value is None or (isinstance(value, str) and not value):
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Mapping):
        return [_message(value, where)]
    if isinstance(value, Asked):
        return value  # checked where they came in
    if isinstance(value, (list, tuple)):
        return [_message(message, where) for message in value]
    raise BadReply(
        f"{where} must return messages as a string, a message with 'role' and 'content', or a list of messages, got "
        f"{_shown(value)}"
    )


def opening_of(value: Any, where: str) -> list[Message]:
    """What `reset` returned, checked."""
    messages = messages_of(value, where)
    if not messages:
        raise BadReply(f"{where} must return at least one message: it is the policy's prompt; got {_shown(value)}")
    return messages


def step_of(value: Any, where: str) -> tuple[list[Message], float | None, bool]:
    """What `step` returned, checked: messages, reward (None, or another missing value: none is given for this turn),
    done."""
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise BadReply(f"{where} must return three values: messages, reward, done; got {_shown(value)}")
    said, reward, done = value[0], value_of(value[1]), value_of(value[2])
    if not isinstance(done, bool):
        raise BadReply(f"{where}: done (the third value) must be True or False, got {_shown(value[2])}")
    if reward is not None and not isinstance(reward, (int, float)):
        raise BadReply(f"{where}: the reward (the second value) must be a number or None, got {_shown(reward)}")
    if reward is not None and not -_MAX_REWARD <= reward <= _MAX_REWARD:  # NaN as well
        raise BadReply(
            f"{where}: the reward (the second value) must be a finite number, got "
            f"{shown(reward)}"
        )
    messages = messages_of(said, where)
    if not messages and not done:
        raise BadReply(f"{where} returned no message, but done = False: the policy needs something to answer")
    return messages, None if reward is None else float(reward), done


def _message(value: Any, where: str) -> Message:
    try:
        return message_of(value)
    except ValueError as error:
        raise BadReply(f"{where}: {error}; got {_shown(value)}") from error


def _shown(value: Any) -> str:
    return f"{shown(value)} ({type(value).__name__})"
