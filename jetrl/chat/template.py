"""What a chat template writes for messages, and what it does not write.

A template is a program by the model's authors. One may know no role `tool`, write only the first system message, or
ignore a key, and says nothing. So each kind of conversation is rendered once more with markers for its texts, and with
each further value changed once: what does not come out is refused (a whole message) or told by a warning (a key, or a
text that comes out twice, elsewhere, or changed). Findings are kept by the roles of the conversation.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

from jetrl.chat.fields import Message
from jetrl.chat.template_trial import rendered
from jetrl.errors import UserError, shorten

Fate = Literal["written", "missing", "repeated", "reordered", "rewritten"]
Path = tuple[str | int, ...]  # of a value in a message or a keyword: keys and places

_POLICY_TURN = "jetrl:the-policys-turn:"  # stands in for it, as a text that no conversation holds
_MAX_KEPT = 4096
_CURE = "or use a tokenizer with another chat template (model.tokenizer)"


@dataclass(slots=True)
class _Memory:
    """What is known of one tokenizer's template: findings by kind of conversation, and what was told."""

    kept: dict[Any, Any] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)


_MEMORIES: WeakKeyDictionary[Any, _Memory] = WeakKeyDictionary()


def _memory_of(tokenizer: Any) -> _Memory:
    try:
        return _MEMORIES.setdefault(tokenizer, _Memory())
    except TypeError:  # an object that has no hash, or no weak references: nothing is kept
        return _Memory()


def source_of(tokenizer: Any) -> str:
    """Whose template it is, in words."""
    name = getattr(tokenizer, "name_or_path", "")
    return f"the chat template of {name}" if name else "the tokenizer's chat template"


def tell(tokenizer: Any, text: str, key: str | None = None) -> None:
    """A warning, once per tokenizer and `key` (None: the text)."""
    told, full = _memory_of(tokenizer).told, f"{getattr(tokenizer, 'chat_template', None)!r} {key or text}"
    if full not in told:
        told.add(full)
        warnings.warn(text, stacklevel=3)


@dataclass(frozen=True, slots=True)
class Template:
    """A tokenizer's chat template with the keywords of `task.chat_template_kwargs`."""

    tokenizer: Any
    variables: Mapping[str, Any]

    def prompt(self, messages: Sequence[Message], problem_id: str, system_prompt: bool = False) -> str:
        """The messages with the assistant's turn opened. `system_prompt`: the first is `task.system_prompt`.

        UserError where a message is not written at all; warnings, once each, for the rest.
        """
        text = self.render(messages, problem_id)
        self._check_variables(messages)
        where = f"Problem {problem_id}"
        for i, fate in self._fates(messages, None).items():
            if fate == "missing" and i == 0 and system_prompt:
                raise UserError(
                    f"task.system_prompt has no effect: {self.source} does not write messages of role 'system'. Remove "
                    f"it, put its text into the prompts (task.prompt_template), {_CURE}."
                )
            self._tell_fate(where, messages[i], fate, "Give it another role, such as user,")
        self._check_keys(where, messages, None)
        self._check_texts(where, messages, text, None)
        return text

    def reply(self, start: Sequence[Message], messages: Sequence[Message], problem_id: str) -> str:
        """What follows the policy's turn: its end, the environment's `messages`, and the next turn's opening.

        `start`: the conversation's first messages. Checked as a prompt is: what stands elsewhere is not read.
        """
        talk, place, mark = _with_turn(start, messages)
        behind = self._behind(self.render(talk, problem_id), mark, problem_id)
        where = f"Problem {problem_id}, the environment's reply"
        for i, fate in self._fates(talk, place).items():
            self._tell_fate(where, talk[i], fate, "Return it with another role, such as user,")
        self._check_keys(where, talk, place)
        self._check_texts(where, talk, behind, place)
        return behind

    def ending(self, start: Sequence[Message], problem_id: str) -> str:
        """What the template writes behind the policy's turn where nothing follows: "" where it writes nothing."""
        talk, _, mark = _with_turn(start, ())
        return self._behind(self.render(talk, problem_id, opened=False), mark, problem_id)

    def turn(self, messages: Sequence[Message], message: Message, problem_id: str) -> str:
        """The text of an assistant's message with thinking or calls, as the policy would write it after `messages`."""
        prompt = self.render(messages, problem_id)
        whole, end = self.render([*messages, message], problem_id, opened=False), self.ending(messages, problem_id)
        if not whole.startswith(prompt) or not whole.endswith(end):
            raise UserError(
                f"Problem {problem_id}: {self.source} does not write the assistant's message {shorten(repr(message))} "
                "as a continuation of the prompt, so what the policy should say is unknown. Write all of it as the "
                "message's content."
            )
        return whole[len(prompt) : len(whole) - len(end)]

    def opened(self, messages: Sequence[Message]) -> str | None:
        """What the template has already written of the policy's turn, such as `<think>`; None where that is unknown.

        That is what the opening has beyond the one of an earlier assistant's turn.
        """
        return self._kept("opened", _shape(messages), lambda: self._opened(_marked(messages)[0]))

    @property
    def source(self) -> str:
        return source_of(self.tokenizer)

    def render(self, messages: Sequence[Message], problem_id: str, *, opened: bool = True) -> str:
        """What the template writes for the messages, with the assistant's next turn `opened` or not."""
        try:
            return self._written(messages, opened=opened)
        except UserError as error:
            raise UserError(f"Problem {problem_id}: {error}") from error
        except Exception as error:  # jinja's errors: templates raise their own for roles that they do not know
            roles = [m["role"] for m in messages]
            raise UserError(
                f"Problem {problem_id}: the tokenizer's chat template fails on messages with roles {roles}: {error}"
            ) from error

    def _written(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None, *, opened: bool = True
    ) -> str:
        given = self.variables if variables is None else variables
        return rendered(self.tokenizer, messages, given, opened)

    def _attempt(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str | None:
        """What it writes; None where it fails on texts that are none of the data's."""
        with suppress(Exception):  # a template may insist on anything; what it made of the data is known
            return self._written(messages, variables)
        return None

    def _behind(self, text: str, mark: str, problem_id: str) -> str:
        before, found, behind = text.rpartition(mark)
        if not found or mark in before:
            raise UserError(
                f"Problem {problem_id}: {self.source} writes an assistant's turn {text.count(mark)} "
                "times, so what follows it cannot be found. Use a chat template that writes it once."
            )
        return behind

    # ---- what becomes of a message's text ---------------------------------------------------------------------------

    def _fates(self, messages: Sequence[Message], policy: int | None) -> dict[int, Fate]:
        """What becomes of each text, by the message's place; `policy`: the place of the policy's turn, behind which
        the policy reads on. Only of texts that are not simply written."""
        return self._kept("fates", (_shape(messages), policy), lambda: self._find_fates(messages, policy))

    def _find_fates(self, messages: Sequence[Message], policy: int | None) -> dict[int, Fate]:
        marked, marks = _marked(messages)
        read = self._read(marked, policy)
        found: dict[int, Fate] = {}
        if read is None:  # it insists on something; the texts themselves are looked for all the same
            return found
        last = -1
        for i, mark in marks.items():
            count, at = read.count(mark), read.find(mark)
            if policy is not None and i <= policy:
                if count and i < policy:
                    found[i] = "repeated"
                continue
            if not count:
                other = [m if k != i else {**m, "content": f"Other words {i}"} for k, m in enumerate(marked)]
                found[i] = "missing" if self._read(other, policy) == read else "rewritten"
            elif count > 1:
                found[i] = "repeated"
            elif at < last:
                found[i] = "reordered"
            last = max(last, at)
        return found

    def _read(self, messages: Sequence[Message], policy: int | None) -> str | None:
        """What the policy reads of this rendering: all of it, or what stands behind its turn."""
        text = self._attempt(messages)
        if text is None or policy is None:
            return text
        return text.rpartition(messages[policy]["content"])[2]

    def _tell_fate(self, where: str, message: Message, fate: Fate, cure: str) -> None:
        role, text = message["role"], shorten(message["content"])
        if fate == "missing":
            raise UserError(
                f"{where}: {self.source} does not write the content of this message of role {role!r}, so the policy "
                f"would never read {text!r}. {cure} {_CURE}."
            )
        how = {
            "repeated": "more than once", "reordered": "in another order than the messages'",
            "rewritten": "in other words", "written": "",
        }[fate]
        key = f"{fate} content {role} {self.variables}"
        tell(self.tokenizer, f"{where}: {self.source} writes the content of a message of role {role!r} {how}, such as "
             f"{text!r}: that is what the policy reads (prompt_rendered in samples.jsonl). To change it, use another "
             "chat template (model.tokenizer).", key)

    def _check_texts(self, where: str, messages: Sequence[Message], read: str, policy: int | None) -> None:
        """Warn of texts that are not in what the policy reads as they are."""
        at, moved = 0, self._fates(messages, policy)
        for i, message in enumerate(messages):
            text, role = message["content"], message["role"]
            bare = text.strip()
            if (policy is not None and i <= policy) or not bare or i in moved:
                continue
            if (found := read.find(text, at)) >= 0:
                at = found + len(text)
                continue
            if bare in read:
                tell(self.tokenizer, f"{where}: {self.source} takes white space off the ends of messages of role "
                     f"{role!r}: the policy does not read it. Nothing to do unless it matters.", f"trims {role}")
            else:
                self._tell_fate(where, message, "rewritten", "")

    # ---- further keys of messages, and keywords ---------------------------------------------------------------------

    def _check_keys(self, where: str, messages: Sequence[Message], policy: int | None) -> None:
        """Warn of values of further keys that are not written; UserError where nothing of a message is."""
        first = 0 if policy is None else policy + 1
        for i, message in enumerate(messages):
            if i < first or message.keys() <= {"role", "content"}:
                continue
            # the type of a call is always "function"
            leaves = [path for path in _leaves(message) if path[0] not in ("role", "content") and path[-1] != "type"]
            unread = [path for path in leaves if not self._reads(messages, i, path, policy)]
            role = message["role"]
            if unread and len(unread) == len(leaves) and not message["content"].strip():
                raise UserError(
                    f"{where}: {self.source} writes nothing of this message of role {role!r}: neither "
                    f"{' nor '.join(dict.fromkeys(map(_general, unread)))}. Write it as the message's content, {_CURE}."
                )
            for name in dict.fromkeys(map(_general, unread)):
                tell(self.tokenizer, f"{where}: {self.source} does not write {name} of this message of role {role!r}, "
                     f"so the policy never reads it. Put it into the content, leave it out, {_CURE}.",
                     f"unread {role} {name}")

    def _reads(self, messages: Sequence[Message], i: int, path: Path, policy: int | None) -> bool:
        """Whether what the policy reads depends on this value of message i."""

        def look() -> bool:
            plain = self._read(messages, policy)
            changed = [m if k != i else _changed(m, path) for k, m in enumerate(messages)]
            return self._read(changed, policy) != plain

        roles = tuple(m["role"] for m in messages)
        return self._kept("key", (roles, i, _general(path), policy), look)

    def _check_variables(self, messages: Sequence[Message]) -> None:
        """Warn, once, of keywords that change nothing."""
        if self.variables:
            self._kept("variables", (), lambda: self._find_unread_variables(messages))

    def _find_unread_variables(self, messages: Sequence[Message]) -> None:
        user, assistant = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}
        talks = [messages, [user], [{"role": "system", "content": "0"}, user], [user, assistant, user],
                 [user, assistant, {"role": "tool", "content": "3"}]]
        plain = [self._attempt(talk) for talk in talks]

        def matters(variables: Mapping[str, Any]) -> bool:
            return any(p != self._attempt(t, variables) for t, p in zip(talks, plain, strict=True) if p is not None)

        for name in self.variables:
            paths = [path for path in _leaves(self.variables) if path[0] == name]
            unread = [path for path in paths if not matters(_changed(self.variables, path))]
            whole = not matters({k: v for k, v in self.variables.items() if k != name})
            shown = [(name,)] if whole and len(unread) == len(paths) else unread
            for key in dict.fromkeys(map(_general, shown)):
                tell(self.tokenizer, f"task.chat_template_kwargs.{key} changes nothing: {self.source} does not read "
                     f"it. Remove it, {_CURE}.")

    # ---- the opening of the policy's turn ---------------------------------------------------------------------------

    def _opened(self, messages: Sequence[Message]) -> str | None:
        text, (talk, place, mark) = self._attempt(messages), _with_turn(messages, [{"role": "user", "content": "1"}])
        earlier = self._attempt(talk)
        last = self._attempt_closed(talk[: place + 1])
        if text is None:
            return None
        openings = [t.partition(mark)[0].rstrip() for t in (earlier, last) if t is not None and mark in t]
        known = [opening for opening in openings if text.startswith(opening)]
        if any(opening.startswith(text.rstrip()) for opening in openings):
            return ""
        if not known:
            return None
        opened = text[len(min(known, key=len)) :]
        return opened.lstrip() if opened.strip() else ""

    def _attempt_closed(self, messages: Sequence[Message]) -> str | None:
        with suppress(Exception):
            return self._written(messages, opened=False)
        return None

    def _kept(self, kind: str, key: Any, make: Callable[[], Any]) -> Any:
        kept = _memory_of(self.tokenizer).kept
        full = (kind, repr(self.tokenizer.chat_template), json.dumps(self.variables, sort_keys=True, default=repr), key)
        if full not in kept:
            if len(kept) >= _MAX_KEPT:
                kept.clear()
            kept[full] = make()
        return kept[full]


def _with_turn(start: Sequence[Message], messages: Sequence[Message]) -> tuple[list[Message], int, str]:
    """The conversation with a stand-in for the policy's turn, its place, and its text."""
    said, mark = json.dumps([*start, *messages], ensure_ascii=False, default=repr), _POLICY_TURN
    while mark in said:
        mark += "'"
    return [*start, {"role": "assistant", "content": mark}, *messages], len(start), mark


def _shape(messages: Sequence[Message]) -> tuple[Any, ...]:
    """What findings about texts depend on: roles, keys, and which texts are empty."""
    return tuple((m["role"], bool(m["content"].strip()), *sorted(m.keys() - {"role", "content"})) for m in messages)


def _marked(messages: Sequence[Message]) -> tuple[list[Message], dict[int, str]]:
    """The messages with a marker for each text that is not empty, and the markers by place."""
    marks = {i: f"jetrl:text-{i}:" for i, m in enumerate(messages) if m["content"].strip()}
    return [{**m, "content": marks[i]} if i in marks else m for i, m in enumerate(messages)], marks


def _leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths to all texts, numbers and empty containers."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(each, (*path, key))
    elif isinstance(value, list | tuple) and value:
        for i, each in enumerate(value):
            yield from _leaves(each, (*path, i))
    else:
        yield path


def _changed(value: Any, path: Path) -> Any:
    """The value with another leaf at `path`."""
    if not path:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int | float):
            return value + 1
        return f"{value}-jetrl" if isinstance(value, str) else "jetrl"
    key, *rest = path
    if isinstance(value, Mapping):
        return {k: _changed(v, tuple(rest)) if k == key else v for k, v in value.items()}
    return [_changed(v, tuple(rest)) if i == key else v for i, v in enumerate(value)]


def _general(path: Path) -> str:
    """A path in words: places in lists are all alike, and so are the arguments of a call."""
    text, parts = "", list(path)
    if "arguments" in parts:
        parts = parts[: parts.index("arguments") + 1]
    for part in parts:
        text += "[]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
