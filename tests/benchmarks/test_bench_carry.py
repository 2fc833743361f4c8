"""The benchmark of carried answers: its streams, its tools and its table, without a GPU."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
from bench_carry import GROUP, Stream, Tools, shown_digests, shown_ragged

from jetrl.types import Completion, Problem, Segment, Unfinished

TURN = Completion(9, (1,), (-1.0,), "", "stop", 0, "")


def test_the_nth_group_is_the_same_in_every_stream() -> None:
    args = Namespace(scale=0.05, prompt=4, groups=4)
    whole, parts = (Stream(name, 0.0, args, 100) for name in ("whole", "parts"))
    one, other = whole.groups(5), [*parts.groups(2), *parts.groups(3)]
    assert one == other
    assert len({a.request.id for g in one for a in g.answers if isinstance(a, Unfinished)}) == 5 * GROUP
    lengths = [a.request.sampling.max_tokens for g in one for a in g.answers if isinstance(a, Unfinished)]
    assert len(set(lengths)) > 10 and max(lengths) <= 0.05 * 16384


def test_tools_answer_by_the_clock_and_say_the_same_again() -> None:
    tools, problem = Tools(0.05, 100, 5, 3), Problem("p", "", "")
    tools.start(9, problem)
    (prompt,) = tools.poll(True)
    tools.act(9, TURN)
    assert len(prompt.tokens) == 5 and tools.poll(False) == []
    tools.hold(9)
    assert tools.poll(True) == [], "what is held is not waited for"
    tools.go_on(9)
    (first,) = tools.poll(True)
    said = Segment("environment", prompt.tokens, ""), Segment("policy", (1,), "", (-1.0,), spans=((0, 0),))
    tools.bring(9, problem, said, True)
    assert tools.poll(True) == [] and tools.begun_again == 0
    tools.go_on(9)
    assert tools.poll(True) == [first], "the reply that is due is given again"
    tools.bring(9, problem, said[:1], False)
    assert tools.begun_again == 1 and tools.said[9] == 0
    tools.keep_only(())
    assert not tools.said and not tools.ready


def test_the_tables() -> None:
    rows = [
        {"variant": name, "counts": counts, "tokens": tokens, "seconds": 2.0, "tokens/s": tokens / 2, "horizon": 5}
        for name, counts, tokens in (("synchronous", False, 1), ("synchronous", True, 100), ("overcommit 1", True, 150))
    ]
    assert "1.5" in shown_ragged(rows).splitlines()[-1].split()
    step = {"step_s": 4.0, "time/rollout": 1.0, "time/update": 2.0, "counts": True}
    timed = {"digests_s": 0.04, "digests": 3, "GB": 1.5}
    text = shown_digests([step | {"variant": name} | timed for name in ("off", "on", "timed")])
    assert "40.0 ms for 3 tensors of 1.5 GB, 1.00% of a step" in text
    assert np.isclose(float(text.splitlines()[1].split()[2]), 4.0)
