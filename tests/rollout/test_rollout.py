"""`roll_out` with engines and environments of all tempers: what each trajectory is must not depend on either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hash_model import HashModel, Letters, learners_logprobs, make_engine, real_model, straight

from jetrl.branches import rows_of
from jetrl.errors import UserError
from jetrl.rollout.requests import STEP_STRIDE, RolloutRequest, eval_asked, train_asked
from jetrl.rollout.rollout import Rollout, roll_out, rollout_stats
from jetrl.rollout.talk import Talk
from jetrl.types import (
    Completion,
    Group,
    Problem,
    Prompt,
    Reply,
    Request,
    SamplingParams,
    Segment,
    StepReport,
    Trajectory,
    log_probs,
    token_ids,
)

POLICY = SamplingParams(40, ignore_eos=True)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, Problem(f"p{i}", f"text {i}", ""), tuple(range(1, 3 + i))) for i in range(count)]


@dataclass
class Script:
    """An environment whose answers are a function of conversation and turn, after `delay(key, turn)` polls."""

    reply: Callable[[int, int], Reply]  # (key, turn; 0 is the prompt)
    delay: Callable[[int, int], int] = lambda key, turn: 0
    owed: dict[int, list[int]] = field(default_factory=dict)  # key -> [polls left, turn]
    acts: dict[int, list[Completion]] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)
    waits: int = 0

    def start(self, key: int, problem: Problem) -> None:
        assert key not in self.acts
        self.acts[key], self.problems[key] = [], problem.id
        self.owed[key] = [self.delay(key, 0), 0]

    def act(self, key: int, completion: Completion) -> None:
        assert key not in self.owed and key not in self.closed
        self.acts[key].append(completion)
        self.owed[key] = [self.delay(key, len(self.acts[key])), len(self.acts[key])]

    def poll(self, wait: bool) -> list[Reply]:
        self.waits += wait
        while True:
            ready = [k for k, (left, _) in self.owed.items() if left <= 0]
            for state in self.owed.values():
                state[0] -= 1
            if ready or not wait or not self.owed:
                return [replace(self.reply(k, self.owed.pop(k)[1]), key=k) for k in ready]

    def close(self, key: int) -> None:
        assert key in self.acts and key not in self.closed
        self.closed.append(key)
        self.owed.pop(key, None)


def game(key: int, turn: int) -> Reply:
    """Prompts of two or three tokens, replies of one or two, an end for every third conversation after two turns."""
    if turn == 0:
        return Reply(key, (1 + key % 3, 2, 3)[: 2 + key % 2], f"begin {key}")
    if key % 3 == 0 and turn == 2:
        return Reply(key, reward=key + 0.5, done=True)
    return Reply(key, (20 + turn, 30)[: 1 + key % 2], f"turn {turn}", reward=float(10 * key + turn))


def ways() -> list[tuple[dict, Callable[[int, int], int]]]:
    """Engines and environments by which no trajectory may change."""
    return [
        ({}, lambda key, turn: 0), ({"page_size": 2, "max_num_seqs": 2, "max_tokens_per_step": 3}, lambda key, turn: 0),
        ({"page_size": 3}, lambda key, turn: key % 4), ({}, lambda key, turn: 7 * (key % 3) * (turn % 2)),
        ({"page_size": 4, "kv_cache_tokens": 52, "max_num_seqs": 3}, lambda key, turn: (key + turn) % 3),
    ]


def by_hand(key: int, asked: RolloutRequest) -> Trajectory:
    """One conversation with `game`, turn by turn, by the model without cache or batch."""
    first = game(key, 0)
    segments = [Segment("environment", first.tokens, first.text)]
    left, turn = asked.sampling.max_tokens, 0
    while True:
        known = tuple(t for s in segments for t in s.tokens.tolist())
        limit = min(left, asked.max_turn_tokens or left)
        tokens, logprobs = straight(HashModel(), Request(key, known, replace(asked.sampling, max_tokens=limit)))
        stopped = tokens[-1] in (0, *asked.sampling.stop_token_ids)
        text = Letters().decode(tokens[:-1] if stopped else tokens)
        left, turn = left - len(tokens), turn + 1
        segments.append(Segment("policy", tokens, text, logprobs, spans=((0, 3),)))
        if left == 0 and not stopped:
            return Trajectory(tuple(segments), "length", "flow")
        reply = game(key, turn)
        segments[-1] = replace(segments[-1], reward=reply.reward)
        end = "stop" if reply.done else "turns" if turn == asked.max_turns else ""
        end = end or ("length" if left <= len(reply.tokens) else "")
        if end:
            return Trajectory(tuple(segments), end, "flow")  # type: ignore[arg-type]
        segments.append(Segment("environment", reply.tokens, reply.text))
        left -= len(reply.tokens)


@pytest.mark.parametrize("way", range(5))
@pytest.mark.parametrize(
    ("limits", "stops", "ends"),
    [((40, 3, 5), 0, {"stop", "turns"}), ((14, 9, 4), 5, {"stop", "length"}),
     ((9, 2, None), 10, {"length", "stop", "turns"}), ((5, 9, 3), 0, {"length"})],
)
def test_conversations_are_what_they_are_by_hand(way: int, limits: tuple, stops: int, ends: set[str]) -> None:
    tokens, turns, turn_tokens = limits
    sampling = SamplingParams(tokens, stop_token_ids=tuple(range(1, stops)), seed=5)
    asked = RolloutRequest(sampling, 4, 100, turns, turn_tokens)
    sizes, delay = ways()[way]
    engine, script = make_engine(**sizes), Script(game, delay)
    reports: list[StepReport] = []
    rollout = roll_out(engine, prompts(3), asked, script, reports.append)
    assert not rollout.failed and [g.prompt.index for g in rollout.groups] == [0, 1, 2]
    trajectories = [t for g in rollout.groups for t in g.trajectories]
    assert trajectories == [by_hand(key, asked) for key in range(100, 112)]
    assert {t.end for t in trajectories} == ends and all(t.response_length <= tokens for t in trajectories)
    assert sorted(script.closed) == list(range(100, 112)) and not engine.has_work
    assert [script.problems[k] for k in range(100, 112)] == ["p0"] * 4 + ["p1"] * 4 + ["p2"] * 4
    assert engine.stats is not None, "every conversation was forgotten"
    finished = [r.finished for r in reports]
    assert finished == sorted(finished) and finished[-1] == 12, "trajectories, not turns"
    drawn = [r.generated_tokens for r in reports]
    assert drawn == sorted(drawn) and drawn[-1] == sum(t.num_policy_tokens for t in trajectories)


@pytest.mark.parametrize("talking", [False, True])
def test_a_group_is_told_of_when_its_last_trajectory_has_ended(talking: bool) -> None:
    """Once each, while others are under way; without those that failed, and not at all if all of them have."""
    asked = RolloutRequest(SamplingParams(12, stop_token_ids=(1, 2, 3), seed=5), 3, 100, *((4, 5) if talking else ()))

    def some_fail(key: int, turn: int) -> Reply:
        fails = key in (100, 106, 107, 108)
        return Reply(key, failure="error", error="broken") if fails and turn == 1 else game(key, turn)

    told: dict[int, Group] = {}
    under_way = []

    def on_group(place: int, group: Group) -> None:
        assert place not in told
        told[place] = group
        under_way.append(engine.has_work)

    engine, script = make_engine(max_num_seqs=4), Script(some_fail) if talking else None
    rollout = roll_out(engine, prompts(6), asked, script, on_group=on_group)
    assert [told[place] for place in rollout.places] == rollout.groups and len(told) == len(rollout.groups)
    assert sorted(told) == ([0, 1, 3, 4, 5] if talking else list(range(6))) and any(under_way[:-1])
    if talking:
        assert len(told[0].trajectories) == 2 and len(rollout.failed) == 4


def test_plain_answers_are_those_of_generate() -> None:
    asked = RolloutRequest(SamplingParams(9, top_k=12, stop_token_ids=(1, 2, 3, 4)), 3, 500)
    chat = Problem("chat", ({"role": "system", "content": "be kind"}, {"role": "user", "content": "a + b?"}), "")
    asked_of = [*prompts(3), Prompt(3, chat, (7, 8), "<think>")]
    engine, reports, plain = make_engine(max_num_seqs=4), [], []
    rollout = roll_out(engine, asked_of, asked, on_step=reports.append)
    requests = [Request(500 + i, asked_of[i // 3].tokens, asked.sampling) for i in range(12)]
    other = make_engine(max_num_seqs=4)
    completions = other.generate(requests, on_step=plain.append)
    assert reports == plain
    assert engine.stats is not None and other.stats is not None
    for figure in ("computed_tokens", "num_pages", "peak_pages", "steps", "preemptions"):
        assert getattr(engine.stats, figure) == getattr(other.stats, figure)
    assert [len(g.trajectories) for g in rollout.groups] == [3] * 4 and rollout.failed == []
    texts = ["text 0", "text 1", "text 2", "system: be kind\nuser: a + b?"]
    for i, (t, c) in enumerate(zip([t for g in rollout.groups for t in g.trajectories], completions, strict=True)):
        asked_now = asked_of[i // 3]
        prompt = Segment("environment", asked_now.tokens, texts[i // 3], opened="<think>" if i >= 9 else "")
        answer = Segment("policy", c.tokens, c.text, c.logprobs, spans=((0, 3),))
        assert t == Trajectory((prompt, answer), c.finish_reason, "flow")
    assert {t.end for g in rollout.groups for t in g.trajectories} == {"stop", "length"}
    assert rollout.groups[3].prompt.tokens == (7, 8) and chat.prompt_text == texts[3]
    assert roll_out(engine, [], asked) == Rollout([], [])


class Lossy(Letters):
    """A tokenizer whose texts do not come back as the tokens that were drawn: two tokens have one letter."""

    def decode(self, token_ids: list[int]) -> str:
        return super().decode(token_ids).upper().replace("#", "")


def test_tokens_stay_as_they_were_drawn() -> None:
    """Texts lose case and stop tokens; the next turn's request holds the very tokens, and so does the trajectory."""
    engine, script = make_engine(), Script(game)
    engine.tokenizer = Lossy()
    asked_tokens: list[tuple[int, ...]] = []
    add = engine.add

    def watch(requests: Sequence[Request]) -> None:
        asked_tokens.extend(r.tokens for r in requests)
        add(requests)

    engine.add = watch  # type: ignore[method-assign]
    asked = RolloutRequest(SamplingParams(60, stop_token_ids=(13,)), 1, 1, 6, 12)
    (group,) = roll_out(engine, prompts(1), asked, script).groups
    (t,) = group.trajectories
    assert len(t.turns) == 6 and t.end in ("length", "turns")
    known: tuple[int, ...] = ()
    for i, segment in enumerate(t.segments):
        known += tuple(segment.tokens.tolist())
        if i % 2 == 0:
            assert asked_tokens[i // 2] == known
            assert {type(t) for t in asked_tokens[i // 2]} == {int}, "engines of users get Python's integers"
    assert any(s.tokens[-1] == 13 and len(s.text) == len(s.tokens) - 1 for s in t.turns), "stop tokens are kept"
    assert [s.text for s in t.turns] == [c.text for c in script.acts[1]]
    want = by_hand(1, asked)
    assert [(s.author, s.tokens.tolist(), s.logprobs.tolist()) for s in t.segments] == [
        (s.author, s.tokens.tolist(), s.logprobs.tolist()) for s in want.segments
    ]


@pytest.mark.parametrize(("precision", "cache"), [("fp8", "fp8"), ("bf16", "bf16")])
def test_a_trajectory_has_the_learners_logprobs(precision: str, cache: str) -> None:
    model = real_model(precision, cache)
    script = Script(game, lambda key, turn: key % 3)
    engine = make_engine(model, page_size=4, kv_cache_tokens=64, max_tokens_per_step=9)
    rollout = roll_out(engine, prompts(2), RolloutRequest(POLICY, 3, 10, 4, 6), script)
    for t in [t for g in rollout.groups for t in g.trajectories]:
        tokens = [x for s in t.segments for x in s.tokens]
        learner, at, turns = learners_logprobs(model, tokens), 0, 0
        for s in t.segments:
            if s.author == "policy":
                assert list(s.logprobs) == learner[at - 1 : at - 1 + len(s.tokens)]
                turns += 1
            at += len(s.tokens)
        assert turns >= 2


def test_failures_end_a_trajectory_and_stay_out_of_its_group() -> None:
    def reply(key: int, turn: int) -> Reply:
        if key in (12, 13):
            return Reply(key, failure="timeout", error="no answer in 3 s")
        if key == 11 and turn == 2:
            return Reply(key, failure="error", error="KeyError: 'x'", reward=2.0)
        if key == 14 and turn == 0:
            return Reply(key, (1,), done=True)
        return game(key, turn)

    engine, script = make_engine(), Script(reply)
    rollout = roll_out(engine, prompts(3), RolloutRequest(POLICY, 2, 10, 3, 4), script)
    assert [(g.prompt.index, len(g.trajectories)) for g in rollout.groups] == [(0, 1), (2, 1)]
    broken, *late, over = rollout.failed
    assert broken[0].index == 0 and (broken[1].end, broken[1].error) == ("error", "KeyError: 'x'")
    assert len(broken[1].turns) == 2 and broken[1].turns[-1].reward == 2.0 and broken[1].weight_version == 3
    wanted = (1, "timeout", "no answer in 3 s", 0)
    assert [(p.index, t.end, t.error, t.num_policy_tokens) for p, t in late] == [wanted] * 2
    assert late[0][1].segments == (Segment("environment", (), ""),)
    assert over[1].end == "error" and over[1].error == "it was over before the first turn"
    assert sorted(script.closed) == list(range(10, 16)) and not engine.has_work and engine.stats is not None
    stats = rollout_stats(rollout, 2.0)
    assert (stats["environment/num_errors"], stats["environment/num_timeouts"]) == (2.0, 2.0)
    drawn = 4 * 2 + 3 * 4 + 2 * 4  # 11 failed after two turns, 10 has three turns, 15 ended after two
    assert stats["perf/tokens_per_s_per_gpu"] == drawn / 2 and stats["environment/turns_mean"] == 2.5


def test_segments_of_the_environment_keep_its_messages() -> None:
    said = tuple({"role": role, "content": "x"} for role in ("tool", "user"))
    script = Script(lambda key, turn: replace(game(key, turn), messages=said[: turn + 1]))
    (group,) = roll_out(make_engine(), prompts(1), RolloutRequest(POLICY, 1, 0, 3, 4), script).groups
    roles = [[m["role"] for m in s.messages] for s in group.trajectories[0].segments]
    assert roles[:4] == [["tool"], [], ["tool", "user"], []]


def test_no_conversation_waits_for_the_slowest() -> None:
    """While one environment sleeps, the others' conversations go through all of their turns."""
    script = Script(game, lambda key, turn: 10**6 if key == 1 and turn == 1 else 0)
    reports: list[StepReport] = []
    order: list[int] = []
    script.close = order.append  # type: ignore[method-assign]
    roll_out(make_engine(), prompts(1), RolloutRequest(POLICY, 4, 0, 4, 3), script, reports.append)
    assert order[-1] == 1 and set(order[:3]) == {0, 2, 3}
    assert script.waits < len(reports) / 2, "the driver waits only where the engine has no work"


@pytest.mark.parametrize("talking", [False, True])
def test_an_error_leaves_engine_and_environment_without_work(talking: bool) -> None:
    engine, asked = make_engine(page_size=2), RolloutRequest(POLICY, 3, 10, 4, 5)
    script = Script(game) if talking else None

    def broken(report: StepReport) -> None:
        if report.step >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        roll_out(engine, prompts(2), asked, script, broken)
    assert not engine.has_work and engine.collect() == []
    if script is not None:
        assert sorted(script.closed) == list(range(10, 16))
    want = roll_out(make_engine(), prompts(2), asked, Script(game) if talking else None)
    assert roll_out(engine, prompts(2), asked, Script(game) if talking else None) == want


def test_refusals_name_the_problem() -> None:
    engine = make_engine()
    plain = [*prompts(1), Prompt(1, Problem("long", "x", ""), (1,) * 100)]
    with pytest.raises(UserError, match="Problem long: request 3: .* = 140, beyond the model's 128 positions"):
        roll_out(engine, plain, RolloutRequest(POLICY, 2, 1))
    script = Script(lambda key, turn: Reply(key, (1,) * (100 if key == 2 else 2)))
    with pytest.raises(UserError, match="Problem p1: request 2: a conversation that begins with 100 .* 128 positions"):
        roll_out(engine, prompts(2), RolloutRequest(POLICY, 1, 1, 2, 3), script)
    script = Script(lambda key, turn: Reply(key, (1,) if turn == 0 else (99,)))
    with pytest.raises(UserError, match="Problem p0: request 1 has tokens .*knows 0 to 39"):
        roll_out(engine, prompts(1), RolloutRequest(POLICY, 1, 1, 2, 3), script)
    script = Script(lambda key, turn: Reply(key, (), "hm") if key == 2 else game(key, turn))
    with pytest.raises(UserError, match="Problem p1: the prompt 'hm' has no tokens"):
        roll_out(engine, prompts(2), RolloutRequest(POLICY, 1, 1, 2, 3), script)
    assert not engine.has_work and sorted(script.closed) == [1, 2]


def test_an_action_that_ends_at_the_last_token_is_still_judged() -> None:
    """Cut off at the limit: the environment is not asked. Complete at the limit: its reward counts."""
    (free,) = make_engine().generate([Request(1, (1, 2), SamplingParams(8, ignore_eos=True))])
    for stop, acts, reward in ((free.tokens[7], 1, 5.0), (None, 0, None)):
        assert free.tokens.tolist().index(free.tokens[7]) == 7
        script = Script(lambda key, turn: Reply(key, (1, 2), "") if turn == 0 else Reply(key, (3,), reward=5.0))
        sampling = SamplingParams(8, ignore_eos=True, stop_token_ids=() if stop is None else (stop,))
        (group,) = roll_out(make_engine(), prompts(1), RolloutRequest(sampling, 1, 1, 4), script).groups
        (t,) = group.trajectories
        assert t.end == "length" and t.turns[0].tokens.tolist() == free.tokens.tolist() and len(t.segments) == 2
        assert len(script.acts[1]) == acts and t.turns[0].reward == reward


def test_stats_by_hand() -> None:
    def trajectory(end: str, *lengths: int) -> Trajectory:
        """A prompt of two tokens, then turns and replies of these lengths."""
        parts = [Segment("environment", (1, 1), "")]
        for i, n in enumerate(lengths):
            parts.append(Segment("environment" if i % 2 else "policy", (5,) * n, "", () if i % 2 else (-1.0,) * n))
        return Trajectory(tuple(parts), end, "f")  # type: ignore[arg-type]

    (prompt,) = prompts(1)
    plain = Rollout([Group(prompt, (trajectory("stop", 4), trajectory("length", 10)))], [])
    assert rollout_stats(plain, 7.0) == {
        "response_length/mean": 7.0, "response_length/max": 10.0, "response_length/frac_truncated": 0.5,
        "perf/tokens_per_s_per_gpu": 2.0,
    }
    good = (trajectory("turns", 4, 3, 2), trajectory("stop", 1), trajectory("length", 5, 2, 2), trajectory("stop", 2))
    talks = Rollout([Group(prompt, good)], [(prompt, trajectory("error", 3)), (prompt, trajectory("timeout"))], True)
    assert rollout_stats(talks, 0.5) == {
        "response_length/mean": 4.0, "response_length/max": 7.0, "response_length/frac_truncated": 0.5,
        "perf/tokens_per_s_per_gpu": 38.0, "environment/turns_mean": 1.5, "environment/turns_max": 2.0,
        "environment/tokens_mean": 1.25, "environment/frac_max_turns": 0.25, "environment/num_errors": 1.0,
        "environment/num_timeouts": 1.0,
    }
    assert rollout_stats(Rollout([], talks.failed, True), 1.0) == {
        "perf/tokens_per_s_per_gpu": 3.0, "environment/num_errors": 1.0, "environment/num_timeouts": 1.0,
    }


def config(environment: str | None) -> Any:
    return SimpleNamespace(
        seed=9, environment=SimpleNamespace(name=environment, max_turns=6, max_turn_tokens=32),
        rollout=SimpleNamespace(
            max_response_length=64, temperature=0.9, top_p=0.8, top_k=7, min_p=0.1, stop=["x"], group_size=8,
            logprobs="sampled",
        ),
        eval=SimpleNamespace(max_response_length=None, temperature=0.0, num_samples=2),
    )


def test_what_a_config_asks() -> None:
    drawn = SamplingParams(64, 0.9, 0.8, 7, 0.1, ("x",), seed=9, logprobs="sampled")
    assert train_asked(config(None), 3) == RolloutRequest(drawn, 8, 3 * STEP_STRIDE)
    assert train_asked(config("maze"), 1, first_number=40) == RolloutRequest(drawn, 8, STEP_STRIDE + 40, 6, 32)
    assert eval_asked(config(None)) == RolloutRequest(SamplingParams(64, 0.0, stop=("x",), seed=9), 2, 0)
    held_out = config("maze")
    held_out.eval.max_response_length = 12
    assert eval_asked(held_out) == RolloutRequest(SamplingParams(12, 0.0, stop=("x",), seed=9), 2, 0, 6, 32)
    with pytest.raises(AssertionError, match="more trajectories in a step than request ids"):
        roll_out(make_engine(), prompts(1), replace(eval_asked(config(None)), first_id=STEP_STRIDE - 1))


def tree(key: int, turn: int) -> Reply:
    """Replies to any turn before, and prompts anew."""
    if turn == 0:
        return game(key, 0)
    after = (7 * key + 5 * turn * turn) % (turn + 1) - 1
    tokens = (1 + key % 3, 30 + turn) if after < 0 else (20 + turn, 30)[: 1 + key % 2]
    return Reply(key, tokens, f"turn {turn}", after=None if after == turn - 1 and key % 2 else after)


@pytest.mark.parametrize("tokens", [120, 40])
def test_branches_are_drawn_from_all_before_them_with_ids_of_their_own(tokens: int) -> None:
    """Whatever the engine and the environment do next to it; and a tree keeps within the limit of length."""
    asked = RolloutRequest(SamplingParams(tokens, stop_token_ids=(1, 2, 3), seed=5), 4, 100, 6, 4)
    found = []
    for sizes, delay in ways():
        sizes = {key: value * 3 if key == "kv_cache_tokens" else value for key, value in sizes.items()}
        engine, script = make_engine(**sizes), Script(tree, delay)
        rollout = roll_out(engine, prompts(3), asked, script)
        found.append([t for g in rollout.groups for t in g.trajectories])
        assert not rollout.failed and not engine.has_work and engine.stats is not None, "all were forgotten"
    assert all(one == found[0] for one in found[1:])
    assert all(t.response_length <= tokens for t in found[0]) and any(t.end == "turns" for t in found[0])
    streams: list[int] = []
    for t in found[0]:
        for row in rows_of(t.segments):
            assert t.request_id is not None
            streams.append(t.request_id if row.stream is None else row.stream)
            known: tuple[int, ...] = ()
            for place, segment in enumerate(row.segments):
                if segment.author == "policy" and place >= row.own:
                    limit = replace(asked.sampling, max_tokens=len(segment.tokens))
                    drawn, logprobs = straight(HashModel(), Request(streams[-1], known, limit))
                    assert segment.tokens.tolist() == list(drawn) and segment.logprobs.tolist() == list(logprobs)
                known += tuple(segment.tokens.tolist())
    assert len(streams) == len(set(streams)) > 2 * len(found[0])


def test_a_conversation_in_one_line_has_no_branch() -> None:
    asked = RolloutRequest(SamplingParams(100), 1, 0, 9)
    for forks in (True, False):
        one = Talk(3, prompts(1)[0], asked, forks=forks)
        for turn in range(3):
            assert one.heard(Reply(3, (turn + 1,), "", after=turn - 1 if turn else None)) is None
            assert one.turn().id == 3 and not one.begins_branch
            one.said(Completion(3, token_ids([turn]), log_probs([-1.0]), "", "stop", 0, "flow"))
        assert one.in_order() == tuple(one.segments) and one.length == len(one.tokens) == 6 and one.num_turns == 3
    with pytest.raises(UserError, match="rollout.overcommit = 0"):
        one.heard(Reply(3, (1,), "", after=0))
