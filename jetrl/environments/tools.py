"""The built-in environment `tools`: the policy calls Python functions in the form that its chat template teaches.

The task gives problems and the reward. The template shows the tools' schemas (`tools=`). A turn with calls is answered
with a message of the role `tool` for each; a turn without any ends the conversation. Whatever goes wrong with a call is
its result, as a text for the model: `Error: there is no tool 'serch'. Did you mean 'search'?`
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, get_args

from jetrl.chat.fields import Message
from jetrl.chat.prompts import chat_messages, uses_chat_template
from jetrl.chat.template import Schemas, Template
from jetrl.chat.tool_calls import CallFormat, ToolCall, format_of, read_calls
from jetrl.config import Config, EnvironmentConfig, TaskConfig
from jetrl.environments.environment import BadReply, Factory
from jetrl.environments.tool_schemas import KEY, Tool, load_tools
from jetrl.errors import UserError
from jetrl.types import Group, Problem
from jetrl.user_code.calls import Call, Loop
from jetrl.user_code.guard import OUR_THREADS
from jetrl.values import value_of

FORMATS = get_args(CallFormat)
FAILED = "Error: "  # how the result of a call that failed begins
_CHECK = "(a check of environment.tools)"  # in place of a problem's id
_RESULT = "jetrl:result-of-a-tool"  # stands in for one, as a text that a template does not have


@dataclass(frozen=True, slots=True)
class Kit:
    """What all conversations share. `tool_timeout` and `time_limit`: seconds for one call; after the first the model is
    informed, the second is that of the whole turn (`environment.timeout`)."""

    tools: Mapping[str, Tool]
    form: CallFormat
    max_output_chars: int
    tool_timeout: float | None
    time_limit: float


class Tools:
    """One conversation: the tools' objects, if they have state, live as long."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.objects: dict[type, Any] = {}
        self.busy: set[type] = set()  # classes whose object is still in a call that was given up

    def reset(self, problem: dict[str, Any]) -> Any:
        """The task's prompt."""
        for tool in self.kit.tools.values():
            if tool.owner is not None and tool.owner not in self.objects:
                takes = "problem" in inspect.signature(tool.owner).parameters
                self.objects[tool.owner] = tool.owner(problem=problem) if takes else tool.owner()
        return problem["prompt"]

    def step(self, action: str) -> tuple[list[Message], None, bool]:
        """A message for each call, in their order; without a call the conversation is over."""
        calls = read_calls(action, self.kit.form)
        return [self._answer(call) for call in calls], None, not calls

    def close(self) -> None:
        """Close what has a `close`."""
        for kind, one in self.objects.items():
            close = getattr(one, "close", None)
            if callable(close) and kind not in self.busy:
                _within(close, inspect.iscoroutinefunction(close), None, self.kit.time_limit)

    def _answer(self, call: ToolCall) -> Message:
        content = self._result(call).encode("utf-8", "replace").decode()  # lone surrogates have no tokens
        most = self.kit.max_output_chars
        if len(content) > most:
            content = f"{content[:most]}\n[cut: the first {most} of {len(content)} characters]"
        named = {"name": call.name} if call.name else {}
        return {"role": "tool", **named, "content": content}

    def _result(self, call: ToolCall) -> str:
        """What the model reads."""
        tool = self.kit.tools.get(call.name)
        if tool is None and call.name:
            near = difflib.get_close_matches(call.name, self.kit.tools, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            return f"{FAILED}there is no tool {call.name!r}.{hint} Tools: {', '.join(self.kit.tools)}."
        if tool is None or call.error:
            return f"{FAILED}{call.error}."
        arguments, wrong = tool.read(call.arguments, call.plain)
        if wrong:
            return f"{FAILED}{call.name} was not called: {'; '.join(wrong)}."
        if tool.owner in self.busy:
            return f"{FAILED}{call.name} was not called: an earlier call has not come back."
        return self._run(tool, arguments)

    def _run(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        function = tool.function if tool.owner is None else getattr(self.objects[tool.owner], tool.function.__name__)
        run = functools.partial(function, **arguments)
        done = _within(run, tool.is_async, self.kit.tool_timeout, self.kit.time_limit)
        if done is None:
            if tool.owner is not None and not tool.is_async:
                self.busy.add(tool.owner)
            return f"{FAILED}{tool.name} took longer than {self.kit.tool_timeout or self.kit.time_limit:g} seconds."
        if done.error is None:
            return _text_of(done.value, tool.name)
        if isinstance(done.error, UserError) or not isinstance(done.error, Exception):  # a forbidden call; sys.exit
            raise done.error
        text = str(done.error)
        return f"{FAILED}{tool.name} raised {type(done.error).__name__}{f': {text}' if text else ''}"


def _text_of(value: Any, name: str) -> str:
    """A result as the model reads it: a text as it is, anything else as JSON."""
    value = value_of(value)
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadReply(
            f"The tool {name} returned a {type(value).__name__} that is neither a string nor JSON: {error}"
        ) from error


def _within(run: Callable[[], Any], is_async: bool, limit: float | None, longest: float) -> Call | None:
    """The call of a tool: its value or what it raised; None: it took longer than `limit`, and is left alone.

    Coroutines run on one event loop, and are cancelled after `limit`, or `longest` where none is set.
    """
    call = Call(run, longest)
    if is_async:
        future = asyncio.run_coroutine_threadsafe(_awaited(call), _loop().events)
        try:
            future.result(longest if limit is None else limit)
        except FutureTimeout:
            future.cancel()
            return None
        return call
    if limit is None:
        _call(call)
        return call
    thread = threading.Thread(target=_call, args=(call,), name=OUR_THREADS, daemon=True)
    thread.start()
    thread.join(limit)
    return None if thread.is_alive() else call


def _call(call: Call) -> None:
    with call:
        call.value = call.run()


async def _awaited(call: Call) -> None:
    with call:
        call.value = await call.run()


@functools.cache
def _loop() -> Loop:
    return Loop()


def tool_stats(groups: Sequence[Group]) -> dict[str, float]:
    """Calls of a conversation whose results the policy read, and the share of them that failed, where there are any."""
    talks = [t for group in groups for t in group.trajectories]
    results = [m["content"] for t in talks for s in t.segments[1:] for m in s.messages if m["role"] == "tool"]
    if not talks:
        return {}
    stats = {"tools/calls_mean": len(results) / len(talks)}
    if results:
        stats["tools/frac_failed_calls"] = sum(text.startswith(FAILED) for text in results) / len(results)
    return stats


# ---- from the config ------------------------------------------------------------------------------------------------


def tools_factory(config: Config, tokenizer: Any | None) -> Factory:
    """The environment `tools` of a run. UserError where a tool has no schema, or the tokenizer's chat template does not
    show tools, does not show their results, or asks for calls in a form that is not known. Without a tokenizer, to try
    tools alone, nothing is shown, and calls are in the form `hermes` unless `call_format` is set."""
    environment = config.environment
    tools = load_tools(environment.tools or ())
    schemas = [dict(tool.schema) for tool in tools]
    if tokenizer is not None:
        _check_template(config.task, tokenizer, schemas)
    form, most, limit = _params(environment, tokenizer, schemas)
    kit = Kit({tool.name: tool for tool in tools}, form, most, limit, environment.timeout)
    variables = {"tools": Schemas(schemas)} if tokenizer is not None else {}
    return Factory(Tools, {"kit": kit}, variables, adds=frozenset({"name"}), makes_prompts=False)


def with_tools(config: Config) -> Config:
    """The config for prompts that are encoded without an environment, as those of the warm start: with the schemas that
    the chat template shows in a rollout."""
    if config.environment.tools is None:
        return config
    schemas = Schemas(dict(tool.schema) for tool in load_tools(config.environment.tools))
    variables = {**config.task.chat_template_kwargs, "tools": schemas}
    return config.model_copy(update={"task": config.task.model_copy(update={"chat_template_kwargs": variables})})


def _params(
    environment: EnvironmentConfig, tokenizer: Any | None, schemas: list[dict[str, Any]]
) -> tuple[CallFormat, int, float | None]:
    """`environment.params`, checked."""
    given: dict[str, Any] = {"call_format": "auto", "max_output_chars": 4000, "tool_timeout": None}
    given |= environment.params
    for key in given:
        if key not in ("call_format", "max_output_chars", "tool_timeout"):
            raise UserError(
                f"environment.params.{key}: the environment tools has no such parameter; known: call_format, "
                "max_output_chars, tool_timeout."
            )
    form, most, limit = given["call_format"], given["max_output_chars"], given["tool_timeout"]
    if form not in ("auto", *FORMATS):
        raise UserError(f"environment.params.call_format: must be auto, {', '.join(FORMATS)}, got {form!r}.")
    if type(most) is not int or most < 1:
        raise UserError(f"environment.params.max_output_chars: must be an integer of at least 1, got {most!r}.")
    if limit is not None and (type(limit) not in (int, float) or not 0 < limit <= environment.timeout):
        raise UserError(
            "environment.params.tool_timeout: must be seconds above 0 and at most environment.timeout = "
            f"{environment.timeout:g}, got {limit!r}."
        )
    if form == "auto":
        form = "hermes" if tokenizer is None else format_of(tokenizer.get_chat_template(tools=schemas))
    if form is None:
        raise UserError(
            "environment.params.call_format: the tokenizer's chat template asks for calls in a form that is not known. "
            f"Set the form in which the model writes them: {', '.join(FORMATS)}."
        )
    return form, most, limit


def _check_template(task: TaskConfig, tokenizer: Any, schemas: list[dict[str, Any]]) -> None:
    """UserError if the policy would not read which tools there are, or what they return."""
    if "tools" in task.chat_template_kwargs:
        raise UserError(f"task.chat_template_kwargs.tools: {KEY} writes this itself. Remove one of the two.")
    if not uses_chat_template(task.chat_template, tokenizer):
        raise UserError(
            'environment.name = "tools" shows the tools through a chat template, and none is in use. Use the tokenizer '
            "of a chat model (and task.chat_template not false)."
        )
    talk = chat_messages(Problem(_CHECK, "?", ""), task)
    try:
        without = Template(tokenizer, task.chat_template_kwargs).render(talk, _CHECK)
    except UserError:
        without = ""  # a template that is for tools only
    variables = {**task.chat_template_kwargs, "tools": schemas}
    shown = Template(tokenizer, variables).render(talk, _CHECK)
    names = [schema["function"]["name"] for schema in schemas]
    missing = [name for name in names if name not in (task.system_prompt or "" if shown == without else shown)]
    if missing:
        raise UserError(
            f"{KEY}: the tokenizer's chat template does not show the tool {missing[0]!r} to the model: it does not "
            "read `tools`. Use a model whose template does (Qwen2.5, Qwen3, Llama 3.1 and later), or describe every "
            "tool, by name, in task.system_prompt and set environment.params.call_format."
        )
    talk += [{"role": "assistant", "content": "!"}, {"role": "tool", "name": names[0], "content": _RESULT}]
    if _RESULT not in Template(tokenizer, variables).render(talk, _CHECK):
        raise UserError(
            f"{KEY}: the tokenizer's chat template does not write messages of the role `tool`, so the model would not "
            "read what a tool returns. Use a model whose template does (Qwen2.5, Qwen3, Llama 3.1 and later)."
        )
