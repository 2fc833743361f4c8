"""What a chat template writes for messages, and what it does not write.

A template is a program by the model's authors. One may know no role `tool`, write only the first system message or the
first call of a message, leave out short texts, or ignore a key, and says nothing. So each conversation's rendering is
compared with one of markers in the same places (`template_values.py`): what does not come out is refused (a whole
message) or reported by a warning, once for each kind (a key, or a text that comes out twice, elsewhere, or changed).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

from jetrl.chat.fields import Message
from jetrl.chat.template_trial import rendered
from jetrl.chat.template_values import SURE, Difference, Path, Skeleton, at_path, changed, leaves, marked
from jetrl.errors import Notice, UserError, reason, shorten

Fate = Literal["written", "missing", "dropped", "repeated", "reordered", "rewritten", "trimmed"]
_HOW = {
    "repeated": "more than once", "reordered": "in another order than the messages'", "rewritten": "in other words",
}
_POLICY_TURN = "jetrl:the-policys-turn:"  # stands in for it, as a text that no conversation holds
_MAX_KEPT = 4096
_CURE = "or use a tokenizer with another chat template (model.tokenizer)"


@dataclass(slots=True)
class _Memory:
    """What is known of one tokenizer's template: findings by kind of conversation, and which warnings were given."""

    kept: dict[Any, Any] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)


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
    if not was_told(tokenizer, key or text):
        _memory_of(tokenizer).warned.add(_warning_key(tokenizer, key or text))
        warnings.warn(text, Notice, stacklevel=3)


def was_told(tokenizer: Any, key: str) -> bool:
    """Whether there was such a warning."""
    return _warning_key(tokenizer, key) in _memory_of(tokenizer).warned


def _warning_key(tokenizer: Any, key: str) -> str:
    return f"{getattr(tokenizer, 'chat_template', None)!r} {key}"


class Schemas(list[dict[str, Any]]):
    """The keyword `tools` of a template, made from `environment.tools`: nobody wrote it as a keyword."""


@dataclass(frozen=True, slots=True)
class Template:
    """A tokenizer's chat template with the keywords of `task.chat_template_kwargs`."""

    tokenizer: Any
    variables: Mapping[str, Any]

    def prompt(
        self, messages: Sequence[Message], problem_id: str, system_prompt: bool = False,
        ours: frozenset[str] = frozenset(),
    ) -> str:
        """The messages with the assistant's turn opened. `system_prompt`: the first is `task.system_prompt`. `ours`: as
        in `reply`.

        UserError where a message is not written at all; warnings, once each, for the rest.
        """
        text = self.render(messages, problem_id)
        self._check_variables(messages)
        fate = self._fates(messages, None).get(0, "written") if system_prompt else "written"
        if fate == "missing" and _Look(self, messages, None, text).fate(0)[0] == "missing":
            raise UserError(
                f"task.system_prompt has no effect: {self.source} does not write messages of role 'system'. Remove "
                f"it, put its text into the prompts (task.prompt_template), {_CURE}."
            )
        self._check(f"Problem {problem_id}", messages, text, None, "Give it another role, such as user,", ours)
        return text

    def reply(
        self, start: Sequence[Message], messages: Sequence[Message], problem_id: str,
        ours: frozenset[str] = frozenset(),
    ) -> str:
        """What follows the policy's turn: its end, the environment's `messages`, and the next turn's opening.

        `start`: the conversation's first messages. Checked as a prompt is: what stands elsewhere is not read. `ours`:
        keys of messages that jetrl has added, and that a template need not write, such as `tool_calls[].id`.
        """
        talk, place, mark = _with_turn(start, messages)
        behind = self._behind(self.render(talk, problem_id), mark, problem_id)
        where = f"Problem {problem_id}, the environment's reply"
        self._check(where, talk, behind, place, "Return it with another role, such as user,", ours)
        return behind

    def ending(self, start: Sequence[Message], problem_id: str) -> str:
        """What the template writes behind the policy's turn where nothing follows: "" where it writes nothing."""
        talk, _, mark = _with_turn(start, ())
        return self._behind(self.render(talk, problem_id, opened=False), mark, problem_id)

    def usual_ending(self) -> str | None:
        """The same for a question and an answer; None where the template fails on them."""
        talk, _, mark = _with_turn([{"role": "user", "content": "1"}], ())
        text = self._attempt(talk, opened=False)
        return None if text is None or mark not in text else text.rpartition(mark)[2]

    def turn(self, messages: Sequence[Message], message: Message, problem_id: str) -> str:
        """The text of an assistant's message with thinking or calls, as the policy would write it after `messages`.
        Checked as a prompt is: what the template does not write would not be taught."""
        prompt = self.render(messages, problem_id)
        whole, end = self.render([*messages, message], problem_id, opened=False), self.ending(messages, problem_id)
        if not whole.startswith(prompt) or not whole.endswith(end):
            raise UserError(
                f"Problem {problem_id}: {self.source} does not write the assistant's message {shorten(repr(message))} "
                "as a continuation of the prompt, so what the policy should say is unknown. Write all of it as the "
                "message's content."
            )
        where, talk, last = f"Problem {problem_id}, the worked solution", [*messages, message], len(messages)
        look = _Look(self, talk, None, whole, opened=False)
        usual: Fate = "written" if look.whole else "rewritten"
        fate = look.true_fate(last, self._fates(talk, None).get(last, usual))
        if fate != "written" and message["content"].strip():
            self._tell_fate(where, message, fate, "Write the whole turn as its content,")
        self._check_keys(where, look, last, frozenset())
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
                f"Problem {problem_id}: the tokenizer's chat template fails on messages with roles {roles}: "
                f"{reason(error)}"
            ) from error

    def _written(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None, *, opened: bool = True
    ) -> str:
        given = self.variables if variables is None else variables
        return rendered(self.tokenizer, messages, given, opened)

    def _attempt(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None, *, opened: bool = True
    ) -> str | None:
        """What it writes; None where it fails on texts that are none of the data's. UserError where it needs too much:
        each such attempt would take as long."""
        try:
            return self._written(messages, variables, opened=opened)
        except UserError:
            raise
        except Exception:  # a template may insist on anything; what it made of the data is known
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

    def _check(
        self, where: str, messages: Sequence[Message], read: str, policy: int | None, cure: str,
        ours: frozenset[str] = frozenset(),
    ) -> None:
        """Tell or refuse what is lost of messages in `read`, which is what the policy reads of them. `policy`: the
        place of its turn, behind which it reads on. `ours`: keys that jetrl itself has added."""
        look = _Look(self, messages, policy, read)
        for i, usual in self._fates(messages, policy).items():
            fate = look.true_fate(i, usual)
            if fate != "written":
                self._tell_fate(where, messages[i], fate, cure)
        for i in range(0 if policy is None else policy + 1, len(messages)):
            self._check_keys(where, look, i, ours)
        if not look.whole:
            self._check_texts(where, look)
        elif look.trimmed:
            known = self._fates(messages, policy)
            for i in range(0 if policy is None else policy + 1, len(messages)):
                text = messages[i]["content"]
                if i not in known and text.strip() and text not in read:
                    self._tell_fate(where, messages[i], "trimmed", cure)

    def _fates(self, messages: Sequence[Message], policy: int | None) -> dict[int, Fate]:
        """What becomes of each text, by the message's place, whatever it says. Only of texts that are not simply
        written."""
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

    def _read(self, messages: Sequence[Message], policy: int | None, *, opened: bool = True) -> str | None:
        """What the policy reads of this rendering: all of it, or what stands behind its turn."""
        text = self._attempt(messages, opened=opened)
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
        if fate == "trimmed":
            warning = (f"{where}: {self.source} strips white space from messages of role {role!r}: the policy "
                       "does not read it. Nothing to do unless it matters.")
        elif fate == "dropped":
            warning = (f"{where}: {self.source} does not write the content of a message of role {role!r} that says "
                       f"{text!r}, though it writes others: the policy never reads it. Nothing to do if it only holds "
                       "what the template leaves out on purpose, such as earlier thinking; else change the text, "
                       f"{_CURE}.")
        else:
            warning = (f"{where}: {self.source} writes the content of a message of role {role!r} {_HOW[fate]}, such as "
                       f"{text!r}: that is what the policy reads (prompt_rendered in samples.jsonl). To change it, use "
                       "another chat template (model.tokenizer).")
        tell(self.tokenizer, warning, self._fate_key(fate, role))

    def _fate_key(self, fate: Fate, role: str) -> str:
        return f"{fate} content {role} {self.variables}"

    def _check_texts(self, where: str, look: _Look) -> None:
        """Tell or refuse texts that this conversation's rendering does not hold as they are."""
        at, moved, messages = 0, self._fates(look.messages, look.policy), look.messages
        for i, message in enumerate(messages):
            text, role = message["content"], message["role"]
            if (look.policy is not None and i <= look.policy) or not text.strip() or i in moved:
                continue
            if (end := look.end_of(i, at)) >= 0:
                at = end
                continue
            if look.read.find(text, at) < 0 and role == "assistant" and self._knows_losses(role):
                continue  # thinking is taken out of many turns: nothing more to tell
            fate, place = look.fate(i)
            if fate == "missing" and role == "assistant":  # its thinking, say
                fate = "dropped"
            if fate != "written":
                self._tell_fate(where, message, fate, "It writes others of this role: change the text,")
            at = place if place >= 0 else at

    def _knows_losses(self, role: str) -> bool:
        return all(was_told(self.tokenizer, self._fate_key(fate, role)) for fate in ("dropped", "rewritten"))

    # ---- further keys of messages, and keywords ---------------------------------------------------------------------

    def _check_keys(self, where: str, look: _Look, i: int, ours: frozenset[str]) -> None:
        """Warn of values of further keys that are not written; UserError where nothing of a message is."""
        message = look.messages[i]
        if message.keys() <= {"role", "content"}:
            return
        # the type of a call is always "function"
        all_leaves = [path for path in leaves(message) if path[0] not in ("role", "content") and path[-1] != "type"]
        unread = [path for path in all_leaves if not self._writes(look, i, path)]
        role = message["role"]
        if len(unread) == len(all_leaves) and unread and not message["content"].strip() and not any(
            look.reads(i, path) for path in unread
        ):
            raise UserError(
                f"{where}: {self.source} writes nothing of this message of role {role!r}: neither "
                f"{' nor '.join(dict.fromkeys(map(_general, unread)))}. Write it as the message's content, {_CURE}."
            )
        for path in unread:
            if path[0] in ours or _general(path) in ours:
                continue
            name, value = _general(path), shorten(json.dumps(at_path(message, path), ensure_ascii=False), 60)
            tell(self.tokenizer, f"{where}: {self.source} does not write {name} of this message of role {role!r}, such "
                 f"as {_spelled(path)} = {value}, so the policy never reads it. Put it into the content, leave it out, "
                 f"{_CURE}.", f"unread {role} {name}")

    def _writes(self, look: _Look, i: int, path: Path) -> bool:
        """Whether what the policy reads holds, or depends on, this value of message i."""
        skeleton = look.skeleton
        if skeleton is not None and (i, *path) in skeleton.written:
            value = at_path(look.messages[i], path)
            return look.whole or skeleton.shows(look.read, (i, *path), value) or look.reads(i, path)
        unread = self._kept("unread", (look.kind, look.policy, look.opened), set)
        if (i, path) in unread:  # reported
            return False
        if look.reads(i, path):
            return True
        unread.add((i, path))
        return False

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

        for name, value in self.variables.items():
            paths = [path for path in leaves(self.variables) if path[0] == name]
            unread = [path for path in paths if not matters(changed(self.variables, path))]
            whole = not matters({k: v for k, v in self.variables.items() if k != name})
            if isinstance(value, Schemas):  # where none is read, task.system_prompt describes them (tools.py)
                self._tell_schemas([] if whole else unread)
                continue
            shown = [(name,)] if whole and len(unread) == len(paths) else unread
            for key in dict.fromkeys(map(_general, shown)):
                tell(self.tokenizer, f"task.chat_template_kwargs.{key} changes nothing: {self.source} does not read "
                     f"it. Remove it, {_CURE}.")

    def _tell_schemas(self, unread: Sequence[Path]) -> None:
        """What the policy does not learn of its tools, in one warning. The type of a tool is always "function"."""
        parts = dict.fromkeys(_general(path[2:]) for path in unread if path[2:] not in ((), ("type",)))
        if parts:
            tell(self.tokenizer, f"environment.tools: {self.source} does not show all of the tools' schemas, so the "
                 f"policy never reads {', '.join(parts)}. Nothing to do if it can call them without; else use a "
                 "tokenizer with another chat template (model.tokenizer).")

    # ---- the opening of the policy's turn ---------------------------------------------------------------------------

    def _opened(self, messages: Sequence[Message]) -> str | None:
        text, (talk, place, mark) = self._attempt(messages), _with_turn(messages, [{"role": "user", "content": "1"}])
        earlier = self._attempt(talk)
        last = self._attempt(talk[: place + 1], opened=False)
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

    def _kept(self, kind: str, key: Any, make: Callable[[], Any]) -> Any:
        kept = _memory_of(self.tokenizer).kept
        full = (kind, repr(self.tokenizer.chat_template), json.dumps(self.variables, sort_keys=True, default=repr), key)
        if full not in kept:
            if len(kept) >= _MAX_KEPT:
                kept.clear()
            kept[full] = make()
        return kept[full]


class _Look:
    """What the policy reads of one conversation, and what the template writes for others of its kind."""

    def __init__(
        self, template: Template, messages: Sequence[Message], policy: int | None, read: str, opened: bool = True
    ) -> None:
        self.template, self.messages, self.policy, self.read, self.opened = template, messages, policy, read, opened
        shown = marked(messages, policy)
        self.kind = json.dumps(shown.messages, ensure_ascii=False, default=repr)

        def look() -> Skeleton | None:
            text = template._read(shown.messages, policy, opened=opened)
            return None if text is None else Skeleton.of(text, shown.places)

        self.skeleton: Skeleton | None = template._kept("skeleton", (self.kind, policy, opened), look)
        # everything that the template writes for its kind is there, or all but white space at ends
        self.trimmed = self.skeleton is not None and not self.skeleton.fits(read, messages, trims=False)
        self.whole = self.skeleton is not None and (
            not self.trimmed or self.skeleton.fits(read, messages, trims=True)
        )

    def reads(self, i: int, path: Path) -> bool:
        """Whether what the policy reads depends on this value of message i."""
        other = self._with(i, changed(self.messages[i], path))
        if other is None or isinstance(at_path(self.messages[i], path), bool):
            return other != self.read
        return not Difference.of(self.read, other).empty

    def end_of(self, i: int, begin: int) -> int:
        """The place behind the text of message i, which stands behind `begin`; -1 where that is not sure."""
        text, place = self.messages[i]["content"], (i, "content")
        skeleton = self.skeleton
        before, after = skeleton.sides(place) if skeleton is not None and place in skeleton.written else ("", "")
        framed = before + text + after
        found = self.read.find(framed, max(0, begin - len(before)))
        return found + len(before) + len(text) if found >= 0 and len(framed) >= SURE else -1

    def fate(self, i: int) -> tuple[Fate, int]:
        """What has become of the text of message i, and the place behind it (-1: it has none)."""
        text = self.messages[i]["content"]
        other = self._with(i, changed(self.messages[i], ("content",)))
        if other is None:  # the template insists on what the text says
            found = self.read.find(text)
        elif (difference := Difference.of(self.read, other)).empty:
            return "missing", -1
        else:
            found = difference.find(text)
            if found < 0 and difference.find(text.strip()) >= 0:
                return "trimmed", -1
        return ("written", found + len(text)) if found >= 0 else ("rewritten", -1)

    def true_fate(self, i: int, usual: Fate) -> Fate:
        """That of the text of message i, where a marker in its place has the fate `usual`. What does not come out for a
        marker may for a shorter text."""
        if usual not in ("missing", "rewritten"):
            return usual
        fate = self.fate(i)[0]
        return "dropped" if fate == "missing" and usual == "rewritten" and self._own(i) else fate

    def _own(self, i: int) -> bool:
        return bool(self.messages[i]["role"] == "assistant")

    def _with(self, i: int, message: Message) -> str | None:
        talk = [m if k != i else message for k, m in enumerate(self.messages)]
        return self.template._read(talk, self.policy, opened=self.opened)


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


def _spelled(path: Path) -> str:
    """A path as it is written in Python."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _general(path: Path) -> str:
    """A path in words: places in lists are all alike, and so are the arguments of a call."""
    text, parts = "", list(path)
    if "arguments" in parts:
        parts = parts[: parts.index("arguments") + 1]
    for part in parts:
        text += "[]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
