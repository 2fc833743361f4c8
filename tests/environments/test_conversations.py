"""The pool: replies of well-behaved environments in any order, and those of environments that are none."""

import asyncio
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jetrl.chat.tokenizer import VOCABULARY, arithmetic_tokenizer
from jetrl.config import TaskConfig
from jetrl.environments.conversations import build_pool
from jetrl.environments.environment import Factory
from jetrl.errors import Notice, UserError
from jetrl.types import Completion, Problem, Reply, Segment
from jetrl.user_code.calls import Background, Call

EOS = 1
TOKENIZER = arithmetic_tokenizer()


def ids(text):
    return tuple(VOCABULARY[c] for c in text)


def said(text):
    return Completion(0, (*ids(text), EOS), (), text, "stop", 0, "")


def spoken(key, text, reward=None, tokens=None, done=False):
    """The reply of an environment that says one text: a message of the user."""
    tokens = ids(text) if tokens is None else tokens
    return Reply(key, tokens, text, reward, done, messages=({"role": "user", "content": text},))


def problem(seed=0, **extra):
    return Problem(f"p{seed}", "", "", extra={"seed": seed, "index": seed, **extra})


@pytest.fixture
def pool():
    pools = []

    def make(kind, timeout=20.0, max_concurrent=64, params=None, **task):
        config = TaskConfig(name="addition", **task)
        factory = Factory(kind, params or {})
        pools.append(build_pool(factory, TOKENIZER, config, timeout=timeout, max_concurrent=max_concurrent))
        return pools[-1]

    yield make
    for one in pools:
        one.shutdown()


def one(pool):
    (reply,) = pool.poll(True)
    return reply


def test_replies_carry_the_messages_with_the_roles_that_the_environment_gave(pool):
    class Roles:
        def reset(self, problem):
            return [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]

        def step(self, action):
            self.said = [{"role": "tool", "content": "3"}, {"role": "user", "content": "+"}]
            return self.said, 0.0, False

    talks = pool(Roles)
    talks.start(1, problem())
    assert one(talks).messages == ({"role": "system", "content": "1"}, {"role": "user", "content": "2"})
    talks.act(1, said("4"))
    reply = one(talks)
    assert reply.messages == ({"role": "tool", "content": "3"}, {"role": "user", "content": "+"})
    assert reply.text == "3+" and reply.tokens == ids("3+")


def several(pool, count):
    """So many replies, by key."""
    replies = []
    while len(replies) < count:
        new = pool.poll(True)
        assert new
        replies += new
    assert len(replies) == count
    return sorted(replies, key=lambda r: r.key)


class Count:
    """Adds up what it is told; over at 10. Its opening comes from the seed."""

    def __init__(self, start=0):
        self.total = start

    def reset(self, problem):
        self.total += problem["seed"]
        return f"{self.total}+"

    def step(self, action):
        self.total += int(action)
        return f"={self.total}+", 0.5, self.total >= 10


class AsyncCount(Count):
    async def reset(self, problem):
        await asyncio.sleep(0)
        return super().reset(problem)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)


@pytest.mark.parametrize("kind", [Count, AsyncCount])
def test_one_conversation(pool, kind):
    talks = pool(kind, params={"start": 1})
    assert talks.poll(True) == talks.poll(False) == []  # nobody owes a reply
    talks.start(5, problem(3))
    assert one(talks) == spoken(5, "4+")
    assert talks.poll(True) == []
    talks.act(5, said("2"))
    assert one(talks) == spoken(5, "=6+", 0.5)
    talks.act(5, said("7"))
    assert one(talks) == spoken(5, "=13+", 0.5, tokens=(), done=True)
    talks.act(5, said("1"))  # it is over: nothing comes of this
    assert talks.poll(True) == []
    talks.close(5)
    talks.start(5, problem(0))  # the key is free again
    assert one(talks) == spoken(5, "1+")


def test_polling_without_waiting_returns_at_once(pool):
    gate = threading.Event()

    class Waits(Count):
        def reset(self, problem):
            gate.wait()
            return "1"

    talks = pool(Waits)
    talks.start(0, problem())
    start = time.monotonic()
    assert talks.poll(False) == [] and time.monotonic() - start < 1
    gate.set()
    assert one(talks).text == "1"


class Delayed(Count):
    """Answers after random delays, and remembers how many calls ran at the same time."""

    now, most, lock = 0, 0, threading.Lock()

    def pause(self):
        with self.lock:
            Delayed.now += 1
            Delayed.most = max(Delayed.most, Delayed.now)
        time.sleep(random.random() * 0.01)
        with self.lock:
            Delayed.now -= 1

    def reset(self, problem):
        self.pause()
        return super().reset(problem)

    def step(self, action):
        self.pause()
        return super().step(action)


class AsyncDelayed(Count):
    async def reset(self, problem):
        await asyncio.sleep(random.random() * 0.01)
        return super().reset(problem)

    async def step(self, action):
        await asyncio.sleep(random.random() * 0.01)
        return super().step(action)


def play(talks, keys):
    """All conversations to their end, each with its own answers; what every one of them was told."""
    told = {key: [] for key in keys}
    for key in keys:
        talks.start(key, problem(key % 7))
    open_keys = set(keys)
    while open_keys:
        replies = talks.poll(True)
        assert replies
        for reply in replies:
            told[reply.key].append((reply.tokens, reply.text, reply.reward, reply.done))
            assert not reply.failure
            if reply.done:
                talks.close(reply.key)
                open_keys.remove(reply.key)
            else:
                talks.act(reply.key, said(str(1 + reply.key % 3)))
    return told


@pytest.mark.parametrize("kind", [Delayed, AsyncDelayed])
def test_many_conversations_at_once_say_what_each_says_alone(pool, kind):
    together = play(pool(kind), range(64))
    again = play(pool(kind, max_concurrent=5), range(63, -1, -1))
    alone = {key: play(pool(Count), [key])[key] for key in (0, 13, 63)}
    assert together == again and {key: together[key] for key in alone} == alone
    # Key 13 begins at 13 % 7 = 6 and adds 1 + 13 % 3 = 2 a turn.
    assert [text for _, text, _, _ in together[13]] == ["6+", "=8+", "=10+"]


def test_no_more_calls_at_the_same_time_than_allowed(pool):
    Delayed.most = 0
    play(pool(Delayed, max_concurrent=3), range(20))
    assert Delayed.most == 3


class Raises(Count):
    def __init__(self, where):
        super().__init__()
        self.where = where
        if where == "__init__":
            raise RuntimeError("no server")

    def reset(self, problem):
        if self.where == "reset":
            raise KeyError("gone")
        return "1"

    def step(self, action):
        if self.where == "exit":
            sys.exit(3)
        if self.where == "step" and action == "2":
            raise ValueError("only 1")
        return "1", 0.0, False


class AsyncRaises(Raises):
    async def reset(self, problem):
        return super().reset(problem)

    async def step(self, action):
        return super().step(action)


@pytest.mark.parametrize("kind", [Raises, AsyncRaises])
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("__init__", r"{}\(\) raised RuntimeError: no server"),
        ("reset", r"{}.reset raised KeyError: 'gone'"),
        ("step", r"{}.step raised ValueError: only 1"),
        ("exit", r"{}.step raised SystemExit: 3"),
    ],
)
def test_an_environment_that_raises_fails_its_conversation_alone(pool, kind, where, message):
    talks = pool(kind, params={"where": where})
    talks.start(0, problem())
    if where in ("step", "exit"):
        talks.start(1, problem())
        several(talks, 2)
        talks.act(0, said("2"))
    reply = one(talks)
    assert (reply.key, reply.failure, reply.tokens, reply.done) == (0, "error", (), False)
    assert re.search(message.format(kind.__name__) + r" \(.*test_conversations.py, line \d+\)$", reply.error)
    talks.act(0, said("1"))
    assert talks.poll(True) == []
    if where == "step":
        talks.act(1, said("1"))
        assert one(talks) == spoken(1, "1", 0.0)


class Wrong:
    def __init__(self, opening="1", result=None):
        self.opening, self.result = opening, result

    def reset(self, problem):
        return self.opening

    def step(self, action):
        return self.result


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"opening": 5}, "Wrong.reset must return messages"),
        ({"opening": ""}, "Wrong.reset must return at least one message"),
        ({"result": "5"}, "Wrong.step must return three values: messages, reward, done; got '5' (str)"),
        ({"result": ("5", "1", False)}, "Wrong.step: the reward (the second value)"),
    ],
)
def test_values_of_the_wrong_form_are_errors_of_the_conversation(pool, params, message):
    talks = pool(Wrong, params=params)
    talks.start(0, problem())
    if "result" in params:
        one(talks)
        talks.act(0, said("1"))
    reply = one(talks)
    assert reply.failure == "error" and reply.error.startswith(message)


def test_a_method_that_returns_a_coroutine_without_being_async_is_told_so(pool):
    async def later():
        return "1"

    class Hides(Wrong):
        def reset(self, problem):
            made.append(later())
            return made[0]

    made = []
    talks = pool(Hides)
    talks.start(0, problem())
    assert "Hides.reset must return messages" in one(talks).error
    made[0].close()


class Hangs(Count):
    gate = threading.Event()

    def step(self, action):
        if action == "9":
            self.gate.wait()
        return "1", 0.0, False


class AsyncHangs(Count):
    async def step(self, action):
        if action == "9":
            await asyncio.Event().wait()
        return "1", 0.0, False


class Blocks(Count):
    """A coroutine that does not give way: it blocks its event loop."""

    gate = threading.Event()

    async def step(self, action):
        if action == "9":
            self.gate.wait()
        return "1", 0.0, False


@pytest.mark.parametrize("kind", [Hangs, AsyncHangs])
def test_a_call_that_hangs_is_given_up_and_holds_nobody_back(pool, kind):
    # One call at a time: if the one that hangs kept its place, the other conversation would never get on.
    talks = pool(kind, timeout=0.3, max_concurrent=1)
    talks.start(0, problem())
    talks.start(1, problem())
    several(talks, 2)
    start = time.monotonic()
    talks.act(0, said("9"))
    talks.act(1, said("1"))
    replies = several(talks, 2)
    assert time.monotonic() - start < 5
    name = kind.__name__
    late = f"{name}.step took longer than environment.timeout = 0.3 seconds"
    assert replies == [Reply(0, failure="timeout", error=late), spoken(1, "1", 0.0)]
    Hangs.gate.set()  # the late answer comes
    time.sleep(0.1)
    assert talks.poll(True) == []
    Hangs.gate.clear()


def test_a_coroutine_that_blocks_its_loop_does_not_stop_new_conversations(pool):
    talks = pool(Blocks, timeout=0.3)
    talks.start(0, problem())
    one(talks)
    talks.act(0, said("9"))
    assert one(talks).failure == "timeout"
    talks.start(1, problem())
    one(talks)
    talks.act(1, said("1"))
    assert one(talks) == spoken(1, "1", 0.0)
    Blocks.gate.set()
    time.sleep(0.1)
    Blocks.gate.clear()


def test_a_coroutine_that_blocks_its_loop_does_not_stop_the_others(pool):
    """Those that began on that loop too: their calls cannot even begin there."""
    talks = pool(Blocks, timeout=0.3)
    for key in range(4):
        talks.start(key, problem())
    several(talks, 4)
    for key, text in enumerate(["9", "9", "1", "1"]):
        talks.act(key, said(text))
    start = time.monotonic()
    replies = several(talks, 4)
    assert time.monotonic() - start < 10
    assert [r.failure for r in replies] == ["timeout", "timeout", "", ""]
    told = r"Blocks.step took longer .*0.3 seconds and blocked the event loop.*one after the other: .*or write def"
    assert re.search(told, replies[0].error)
    talks.act(2, said("1"))  # its own loop is the blocked one still
    assert one(talks) == spoken(2, "1", 0.0)
    Blocks.gate.set()
    time.sleep(0.1)
    assert talks.poll(False) == [], "what waited on the blocked loop did not run there as well"
    Blocks.gate.clear()


def test_a_call_that_ended_too_late_is_late_whenever_one_looks(pool):
    class Slow(Count):
        def reset(self, problem):
            time.sleep(0.3)
            return "1"

    talks = pool(Slow, timeout=0.1)
    talks.start(0, problem())
    time.sleep(0.6)
    assert one(talks).failure == "timeout"


def test_a_program_ends_although_a_call_hangs():
    code = """
import asyncio, threading
from jetrl.config import TaskConfig
from jetrl.environments.conversations import build_pool
from jetrl.environments.environment import Factory
from jetrl.chat.tokenizer import arithmetic_tokenizer
from jetrl.types import Problem

class Hangs:
    def reset(self, problem): threading.Event().wait()
    def step(self, action): ...

class AsyncHangs:
    async def reset(self, problem): await asyncio.Event().wait()
    async def step(self, action): ...

for kind in (Hangs, AsyncHangs):
    pool = build_pool(Factory(kind), arithmetic_tokenizer(), TaskConfig(name="addition"), timeout=0.2)
    pool.start(0, Problem("x", "", ""))
    print(pool.poll(True)[0].failure)
    pool.start(1, Problem("x", "", ""))
    given_up = build_pool(Factory(kind), arithmetic_tokenizer(), TaskConfig(name="addition"))
    given_up.start(0, Problem("x", "", ""))
    given_up.shutdown(0.2)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "timeout\ntimeout\n", "")


class Closes(Count):
    closed: list[int] = []
    broken = False

    def close(self):
        if self.broken:
            raise OSError("still open")
        self.closed.append(self.total)


class AsyncCloses(Closes):
    async def close(self):
        await asyncio.sleep(0)
        super().close()


@pytest.mark.parametrize("kind", [Closes, AsyncCloses])
def test_environments_are_closed(pool, kind):
    Closes.closed.clear()
    talks = pool(kind)
    talks.start(0, problem(4))
    talks.start(1, problem(5))
    talks.close(1)  # while it is still at work
    assert one(talks).key == 0  # and nothing comes of the other
    talks.close(0)
    talks.shutdown()
    assert sorted(Closes.closed) == [4, 5]


def test_an_error_while_closing_is_a_warning(pool):
    class Broken(Closes):
        broken = True

    talks = pool(Broken)
    talks.start(0, problem())
    one(talks)
    talks.close(0)
    with pytest.warns(UserWarning, match=r"Environment Broken: .*close raised OSError: still open \(.*line \d+\)"):
        talks.shutdown()


def test_errors_while_closing_are_counted_and_told_in_a_few_lines(pool):
    class Broken(Closes):
        broken = True

    talks = pool(Broken)
    for key in range(12):
        talks.start(key, problem())
    several(talks, 12)
    for key in range(12):
        talks.close(key)
    with pytest.warns(UserWarning) as found:
        talks.shutdown()
    texts = [str(w.message) for w in found if w.category is Notice]  # others may come from what is collected meanwhile
    assert talks.close_failures == 12 and len(texts) == 3
    assert texts[1:] == [
        "Environment Broken: 10 calls of Broken.close have failed.",
        "Environment Broken: 12 calls of Broken.close have failed in all.",
    ]


def test_what_has_no_tokens_stops_the_run(pool):
    talks = pool(Wrong, params={"result": ("abc", 0.0, False)}, max_prompt_length=3)
    talks.start(0, problem())
    one(talks)
    talks.act(0, said("1"))
    with pytest.raises(UserError, match="Problem p0: the tokenizer cannot encode the environment's reply 'abc'"):
        talks.poll(True)
    long = pool(Wrong, params={"opening": "1234"}, max_prompt_length=3)
    long.start(0, problem())
    with pytest.raises(UserError, match="Problem p0: the prompt has 4 tokens, task.max_prompt_length is 3"):
        long.poll(True)


def test_messages_that_change_later_stay_as_they_were_said(pool):
    class Appends:
        def reset(self, problem):
            self.messages = [{"role": "user", "content": "1"}]
            return self.messages

        def step(self, action):
            self.messages.append({"role": "user", "content": action})
            self.messages[0]["content"] = "9"
            return self.messages, 0.0, False

    talks = pool(Appends)
    talks.start(0, problem())
    first = one(talks)
    talks.act(0, said("2"))
    assert (first.text, one(talks).text) == ("1", "92")


def test_calls_wait_in_order_while_there_is_no_room():
    background, order, gate = Background(1), [], threading.Event()
    calls = [Call(gate.wait, 20.0), *(Call(lambda i=i: order.append(i), 20.0) for i in range(5))]
    for call in calls:
        background.submit(call)
    assert background.collect() == []
    gate.set()
    ended = []
    while len(ended) < len(calls):
        background.wait(1.0)
        ended += background.collect()
    assert ended == calls and order == [0, 1, 2, 3, 4]
    background.stop()


class Fragile:
    """Works once for a problem; made again, it fails at its first turn."""

    made: list[int] = []

    def reset(self, problem):
        self.again = problem["seed"] in self.made
        self.made.append(problem["seed"])
        return "1+"

    def step(self, action):
        if self.again:
            raise RuntimeError("only once")
        return "2=", 0.5, False


def test_a_conversation_is_held_and_gives_its_reply_again(pool):
    class Echo:
        def reset(self, problem):
            return "1+"

        def step(self, action):
            return action + "=", 0.5, False

    talks = pool(Echo)
    talks.start(1, problem())
    first = one(talks)
    talks.hold(1)
    talks.act(1, said("3"))
    time.sleep(0.2)
    assert talks.poll(False) == [] and talks.poll(True) == [], "what is held is neither given nor waited for"
    segments = (
        Segment("environment", first.tokens, first.text, messages=first.messages),
        Segment("policy", said("3").tokens, "3", spans=((0, 0),)),
    )
    for _ in range(2):  # it was given once, and is due once more
        talks.bring(1, problem(), segments, True)
        talks.go_on(1)
        assert one(talks) == spoken(1, "3=", 0.5)
    talks.bring(1, problem(), segments[:1], False)  # it has heard more than that
    talks.go_on(1)
    talks.act(1, said("4"))
    assert one(talks) == spoken(1, "4=", 0.5)
    talks.hold(1)
    talks.keep_only(())
    assert not talks._talks


@pytest.mark.parametrize("due", [True, False])
def test_an_environment_that_fails_when_it_is_begun_again_fails_its_conversation(pool, due):
    Fragile.made = [0]
    talks, policy = pool(Fragile), said("3")
    turn = Segment("policy", policy.tokens, "3", reward=None if due else 0.5, spans=((0, 0),))
    segments = [Segment("environment", ids("1+"), "1+"), turn]
    segments += [] if due else [Segment("environment", ids("2="), "2=")]
    talks.bring(1, problem(), segments, due)
    talks.go_on(1)
    if not due:
        assert talks.poll(True) == [], "nothing is due"
        talks.act(1, said("4"))
    reply = one(talks)
    assert reply.failure == "error" and "Fragile.step raised RuntimeError: only once" in reply.error


def test_what_is_said_otherwise_the_second_time_is_told(pool):
    Fragile.made = []
    talks = pool(Fragile)
    segments = [Segment("environment", ids("9+"), "9+")]
    talks.bring(1, problem(), segments, False)
    talks.go_on(1)
    with pytest.raises(UserError, match=r"after 0 of them it said '1\+', and '9\+' before. With rollout.overcommit"):
        talks.poll(True)
