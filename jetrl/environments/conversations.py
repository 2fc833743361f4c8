"""The environment's side of many conversations at once: `EnvironmentPool` implements `types.Conversations`.

Environments work in the background (`user_code.calls`); messages become tokens in `poll`, in the caller's thread. What
a conversation says depends on its own turns alone, whatever runs next to it and in whatever order replies arrive.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jetrl.chat.fields import Message
from jetrl.chat.messages import TurnEncoder
from jetrl.config import TaskConfig
from jetrl.environments.asked import Asked, Said
from jetrl.environments.environment import BadReply, Factory, opening_of, problem_mapping, step_of
from jetrl.errors import Notice, UserError, shown
from jetrl.types import Completion, FinishReason, Problem, Reply, Segment
from jetrl.user_code.calls import Background, Call, Loop
from jetrl.user_code.guard import check_unchanged, process_settings, put_back


@dataclass(frozen=True, slots=True)
class _Heard:
    """What an environment said before it was begun again; None: nothing, which has no tokens."""

    said: Segment | None
    reward: float | None

    def unlike(self, reply: Reply) -> str:
        """How a reply differs; "" where it does not."""
        text = "" if self.said is None else self.said.text
        if reply.done:
            return "it ended the conversation, and did not before"
        if reply.text != text:
            return f"it said {shown(reply.text)}, and {shown(text)} before"
        return "" if reply.reward == self.reward else f"it gave a reward of {reply.reward}, and {self.reward} before"


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """A turn of the policy, the conversation that it belongs to, and all tokens up to its end."""

    completion: Completion
    opening: Sequence[Message]
    variables: Mapping[str, Any]
    tokens: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Conversation:
    """One conversation and what its environment is doing. `owes`: a reply is due; `over`: no more will come."""

    key: int
    problem: Problem
    loop: Loop | None  # where its coroutines run
    environment: Any = None
    opening: Sequence[Message] = ()  # of what the policy's last turn belongs to
    variables: Mapping[str, Any] = field(default_factory=dict)  # its keywords for the chat template
    turn: Completion | None = None  # the policy's last
    prompt: tuple[int, ...] = ()  # all tokens before the policy's next turn; these two only where `takes_turns`
    turns: list[_Taken] = field(default_factory=list)
    method: str = ""  # what runs or ran last, for messages
    busy: bool = False  # a call is under way
    owes: bool = False
    over: bool = False
    closed: bool = False
    closing: bool = False  # the environment's `close` is under way
    stuck: bool = False  # a call was abandoned: the environment is out of our hands
    said: list[str] = field(default_factory=list)  # the policy's turns
    last: Reply | None = None  # to the last of them
    held: bool = False  # `last` waits until it is asked for
    due: bool = True  # `last` is given when it goes on, even if it was given before
    ahead: deque[Completion] = field(default_factory=deque)  # turns that the environment is yet to hear
    known: deque[_Heard] = field(default_factory=deque)  # what it has to say to the next ones, which nobody waits for
    broken: Reply | None = None  # how it failed while it heard them
    begun_again: bool = False


@dataclass(slots=True)
class EnvironmentPool:
    """`timeout`: seconds for one call of an environment; `max_concurrent`: maximum number of calls at the same time.

    An environment that raises, hangs or returns something of the wrong form fails only its own conversation, with a
    `Reply` that says how. Replies that have no tokens (a text that the tokenizer or its chat template refuses, a prompt
    longer than `task.max_prompt_length`) make `poll` raise UserError.
    """

    factory: Factory
    encoder: TurnEncoder
    timeout: float = 60.0
    max_concurrent: int = 64
    close_failures: int = 0  # calls of `close` that raised or were late
    _talks: dict[int, _Conversation] = field(default_factory=dict)
    _calls: dict[Call, _Conversation] = field(default_factory=dict)
    _ended: deque[Call] = field(default_factory=deque)  # calls that have ended and were not looked at yet
    _again: list[_Conversation] = field(default_factory=list)  # those whose last reply is to be given now
    _background: Background = field(init=False)
    _settings: dict[str, Any] = field(default_factory=process_settings)

    def __post_init__(self) -> None:
        self._background = Background(self.max_concurrent)

    def start(self, key: int, problem: Problem) -> None:
        """Begin conversation `key`; its first `Reply` is the prompt."""
        assert key not in self._talks, f"conversation {key} is open already"
        any_async = any(map(self.factory.is_async, self._methods()))
        talk = _Conversation(key, problem, self._background.loop() if any_async else None)
        self._talks[key] = talk
        talk.owes = True
        given = problem_mapping(problem)

        def make() -> Any:
            talk.method = f"{self.factory.name}()"
            talk.environment = self.factory()
            talk.method = f"{self.factory.name}.reset"
            return talk.environment.reset(given)

        self._submit(talk, "reset", make, lambda value: opening_of(value, f"{self.factory.name}.reset"))

    def act(self, key: int, completion: Completion) -> None:
        """The policy's turn; ignored if the conversation is over."""
        talk = self._talks[key]
        talk.said.append(completion.text)
        talk.last = None
        if talk.broken is not None:
            talk.last = talk.broken
            self._again.append(talk)
        elif talk.owes and talk.begun_again:
            talk.ahead.append(completion)
        elif not talk.over:
            assert not talk.owes, f"conversation {key}: it is the environment's turn"
            self._step(talk, completion)

    def _step(self, talk: _Conversation, completion: Completion) -> None:
        talk.turn, talk.owes = completion, True
        said: Any = completion.text
        if self.factory.takes_turns:
            said = Said(talk.prompt, completion)
            tokens = talk.prompt + tuple(completion.tokens.tolist())
            talk.turns.append(_Taken(completion, talk.opening, talk.variables, tokens))
        talk.method = where = f"{self.factory.name}.step"
        self._submit(talk, "step", lambda: talk.environment.step(said), lambda value: step_of(value, where))

    def poll(self, wait: bool) -> list[Reply]:
        """The replies that are ready; with `wait`, at least one (if any conversation owes one)."""
        while True:
            replies = self._ready()
            self.check_settings()
            if replies or not wait or not any(talk.owes and not talk.held for talk in self._talks.values()):
                return replies
            self._background.wait(self.timeout)

    def _ready(self) -> list[Reply]:
        """The replies from the calls that are over."""
        self._ended += self._background.collect()
        while self._ended:
            call = self._ended.popleft()
            talk = self._calls.pop(call)
            if (reply := self._reply(talk, call)) is not None:
                self._take(talk, reply)
        again, self._again = self._again, []
        return [talk.last for talk in again if talk.last is not None and not talk.held and not talk.closed]

    def _take(self, talk: _Conversation, reply: Reply) -> None:
        """Give a reply, or keep it while the conversation is held. What an environment says that was begun again, and
        has said before, is compared."""
        if talk.known and not reply.failure:
            if unlike := talk.known.popleft().unlike(reply):
                raise UserError(self._not_the_same(talk, unlike))
        elif talk.known:
            talk.broken, due = reply, len(talk.ahead) + 1 > len(talk.known)
            talk.known.clear()
            talk.ahead.clear()
            if due:
                self._give(talk, reply)
            return
        else:
            self._give(talk, reply)
        if talk.ahead and not talk.over:
            self._step(talk, talk.ahead.popleft())

    def _give(self, talk: _Conversation, reply: Reply) -> None:
        talk.last = reply
        if not talk.held:
            self._again.append(talk)

    def _not_the_same(self, talk: _Conversation, unlike: str) -> str:
        return (
            f"Environment {self.factory.name}, problem {talk.problem.id}: it was begun again to hear the same turns as "
            f"before, and after {len(talk.said) - len(talk.ahead)} of them {unlike}. With rollout.overcommit, an "
            "environment is called again with the same turns where a step is cut and where a run is resumed: what it "
            'says must depend on these and on problem["seed"] alone. Make it so, or set rollout.overcommit = 0.'
        )

    def hold(self, key: int) -> None:
        """`carry_turns.CarriedConversations.hold`; unknown ones are ignored."""
        if key in self._talks:
            self._talks[key].held = True

    def go_on(self, key: int) -> None:
        """The end of `hold`: a reply that has arrived since is given by the next `poll`."""
        talk = self._talks[key]
        talk.held = False
        if talk.due and talk.last is not None:
            self._again.append(talk)

    def bring(
        self, key: int, problem: Problem, segments: Sequence[Segment], due: bool, finish: FinishReason = "stop"
    ) -> None:
        """`carry_turns.CarriedConversations.bring`. The environment hears the turns again in the background."""
        turns = [segment for segment in segments if segment.author == "policy"]
        talk = self._talks.get(key)
        there = talk is not None and talk.said == [turn.text for turn in turns] and (due or not talk.over)
        if not there:
            if talk is not None:
                self.close(key)
            self.start(key, problem)
            talk = self._talks[key]
            talk.begun_again, talk.said = True, [turn.text for turn in turns]
            talk.ahead.extend(_completion(key, turn, finish) for turn in turns)
            talk.known.extend(_heard(segments, due))
        assert talk is not None
        talk.held, talk.due = True, due

    def keep_only(self, keys: Collection[int]) -> None:
        """Close the conversations that are held, other than these."""
        for key in [key for key, talk in self._talks.items() if talk.held and key not in keys]:
            self.close(key)

    def check_settings(self) -> None:
        """Raises UserError where an environment has changed settings that it shares with training."""
        check_unchanged(self._settings, f"Environment {self.factory.name}")

    def close(self, key: int) -> None:
        """The conversation is over, whoever ended it. The environment's `close` runs in the background."""
        talk = self._talks.pop(key, None)
        if talk is None:  # a signal came between the driver's note and `start`
            return
        talk.over = talk.closed = True
        if not talk.busy:
            self._close(talk)

    def shutdown(self, patience: float = 5.0) -> None:
        """Close all conversations, give environments that are still running a few seconds, and end the threads."""
        deadline = time.monotonic() + patience
        for key in list(self._talks):
            self.close(key)
        self._ready()
        while self._calls and time.monotonic() < deadline:
            self._background.wait(deadline - time.monotonic())
            self._ready()
        self._background.stop()
        put_back(self._settings)  # a run that such a change stopped may not be the only one of the process
        if self.close_failures > 1:
            self._tell_close(f"{self.close_failures} calls of {self.factory.name}.close have failed in all")

    def _methods(self) -> list[str]:
        return ["reset", "step", *(["close"] if self.factory.can_close else [])]

    def _submit(
        self, talk: _Conversation, method: Literal["reset", "step", "close"], run: Callable[[], Any],
        check: Callable[[Any], Any],
    ) -> None:
        """`run` gives what the environment returns, or its coroutine. `check` reads it right after the user's code, so
        that lists are copied before the environment changes them again."""
        is_async = self.factory.is_async(method)

        async def coroutine() -> Any:
            return check(await run())

        call = Call(coroutine if is_async else lambda: check(run()), self.timeout, talk.loop if is_async else None)
        self._calls[call] = talk
        talk.busy, talk.closing = True, method == "close"
        self._background.submit(call)

    def _reply(self, talk: _Conversation, call: Call) -> Reply | None:
        """The reply from a call that is over; None where nothing waits for it any more."""
        talk.busy = False
        talk.stuck |= call.written_off
        if talk.closed:
            if talk.closing:
                self._warn(talk, call)
            else:
                self._close(talk)
            return None
        talk.owes = False
        if call.late:
            talk.over = True
            return Reply(talk.key, failure="timeout", error=self._too_long(talk, call))
        if call.error is not None:
            if isinstance(call.error, UserError):  # ours: a task's reward that cannot be used, and the like
                raise call.error
            talk.over = True
            said = isinstance(call.error, BadReply)
            error = str(call.error) if said else self._raised(talk, call)
            return Reply(talk.key, failure="error", error=error)
        return self._spoken(talk, call.value)

    def _spoken(self, talk: _Conversation, value: Any) -> Reply:
        """The reply that `reset` or `step` gave, as tokens."""
        if talk.turn is None:
            return self._prompt(talk, value)
        messages, reward, talk.over = value
        text = self.encoder.text(messages)
        if talk.over:
            return Reply(talk.key, (), text, reward, done=True, messages=tuple(messages))
        if isinstance(messages, Asked):
            return replace(self._behind(talk, messages), reward=reward)
        tokens = self.encoder.later(talk.problem, talk.opening, messages, talk.turn)
        return Reply(talk.key, tokens, text, reward, messages=tuple(messages))

    def _behind(self, talk: _Conversation, messages: Asked) -> Reply:
        """What follows any turn, or begins anew."""
        if messages.after < 0:
            return replace(self._prompt(talk, messages, limited=False), after=-1)
        taken = talk.turns[messages.after]
        talk.opening, talk.variables = taken.opening, taken.variables
        encoder = self.encoder.given(taken.variables)
        tokens = encoder.later(talk.problem, taken.opening, messages, taken.completion)
        talk.prompt = taken.tokens + tokens
        return Reply(talk.key, tokens, encoder.text(messages), messages=tuple(messages), after=messages.after)

    def _prompt(self, talk: _Conversation, messages: Sequence[Message], limited: bool = True) -> Reply:
        """The first messages as tokens, or those of a history that begins anew."""
        talk.opening, talk.variables = messages, getattr(messages, "variables", {})
        encoder = self.encoder.given(talk.variables)
        first, opened = encoder.first(talk.problem, messages, limited), encoder.opened(talk.problem, messages)
        talk.prompt = first if self.factory.takes_turns else ()
        return Reply(talk.key, first, encoder.text(messages), messages=tuple(messages), opened=opened)

    def _close(self, talk: _Conversation) -> None:
        """Call the environment's `close`, if there is one and its last call has come back."""
        if self.factory.can_close and talk.environment is not None and not talk.stuck:
            talk.method = f"{self.factory.name}.close"
            self._submit(talk, "close", lambda: talk.environment.close(), lambda value: None)

    def _warn(self, talk: _Conversation, call: Call) -> None:
        """The conversation's result stands, but what `close` should have released may not be."""
        if not call.late and call.error is None:
            return
        if isinstance(call.error, UserError):  # os._exit
            raise call.error
        self.close_failures += 1
        if self.close_failures == 1:
            what = self._too_long(talk, call) if call.late else self._raised(talk, call)
            self._tell_close(f"{what}. What it holds may stay open. Further failures are counted")
        elif str(self.close_failures).strip("0") == "1":
            self._tell_close(f"{self.close_failures} calls of {talk.method} have failed")

    def _raised(self, talk: _Conversation, call: Call) -> str:
        called = getattr(self.factory.kind, talk.method.rpartition(".")[2], self.factory.kind)
        return f"{talk.method} raised {call.describe_error(called)}"

    def _tell_close(self, text: str) -> None:
        warnings.warn(f"Environment {self.factory.name}: {text}.", Notice, stacklevel=3)

    def _too_long(self, talk: _Conversation, call: Call) -> str:
        text = f"{talk.method} took longer than environment.timeout = {self.timeout:g} seconds"
        blocks = (
            " and blocked the event loop, which all conversations share, so that each such call costs its whole time "
            "limit, one after the other: use await where it waits, or write def instead of async def"
        )
        return text + (blocks if call.blocking else "")


def _completion(key: int, turn: Segment, finish: FinishReason) -> Completion:
    """A turn of the policy as its environment got it."""
    return Completion(key, turn.tokens, turn.logprobs, turn.text, finish, turn.spans[-1][1], "", turn.spans)


def _heard(segments: Sequence[Segment], due: bool) -> list[_Heard]:
    """What the environment said first and then to each turn, without the reply that is due."""
    found = list[_Heard]()
    for segment in segments:
        if segment.author == "policy":
            found.append(_Heard(None, segment.reward))
        elif found:
            found[-1] = replace(found[-1], said=segment)
        else:
            found.append(_Heard(segment, None))
    return found[:-1] if due else found


def build_pool(
    factory: Factory, tokenizer: Any, config: TaskConfig, *, timeout: float = 60.0, max_concurrent: int = 64
) -> EnvironmentPool:
    """The pool of a run, from its tokenizer and `task` section."""
    encoder = TurnEncoder(tokenizer, factory.task(config), factory.adds)
    return EnvironmentPool(factory, encoder, timeout, max_concurrent)
