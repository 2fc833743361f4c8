"""math-verify in workers: right scores, and hung, failing and dying items that cost only themselves."""

import os
import signal
import time

import pytest

from jetrl.errors import UserError
from jetrl.rewards import mathematics as module
from jetrl.rewards.mathematics import Pool, math_reward, score_math


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        ("42", "so 41, but \\boxed{42}. Not 43", 1.0), ("42", "The answer is 42", 1.0), ("42", "\\boxed{41}", 0.0),
        ("\\frac{1}{2}", "0.5", 1.0), ("$x+1$", "$1+x$", 1.0), ("x+1", "\\boxed{1+x}", 1.0), ("x+1", "$x-1$", 0.0),
        ("42", "no idea", 0.0), ("1,234", "1234", 1.0),
    ],
)
def test_equality(gold, text, score):
    pytest.importorskip("math_verify")
    assert score_math(gold, text) == score


def test_alarms_stay_off():
    pytest.importorskip("math_verify")
    before = signal.getsignal(signal.SIGALRM)
    signal.alarm(100)
    assert score_math("1", "1") == 1.0
    assert 0 < signal.alarm(0) <= 100  # math-verify's own limit would have replaced the alarm by 5 seconds, then 0
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_gold_answer_without_content_is_an_error():
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="cannot parse the gold answer"):
        score_math("$ $", "1")


def odd_scorer(gold, text):
    """What can go wrong in a worker, told by the text."""
    if text == "hang":
        while True:
            time.sleep(1)
    if text == "die":
        os._exit(3)
    if text == "raise":
        raise ZeroDivisionError
    return float(gold == text)


def test_bad_items_cost_only_themselves():
    pool = Pool(odd_scorer, num_workers=2, time_limit=0.5)
    try:
        items = [("1", "1"), ("1", "hang"), ("1", "2"), ("1", "die"), ("1", "raise"), ("3", "3"), ("1", "1")]
        assert pool.map(items) == [1.0, None, 0.0, None, None, 1.0, 1.0]
        processes = [w.process.pid for w in pool.workers]
        assert pool.map([("4", "4")] * 3 + [("4", "5")]) == [1.0, 1.0, 1.0, 0.0]
        assert [w.process.pid for w in pool.workers] == processes  # healthy workers are kept
    finally:
        pool.close()


def dead_on_arrival(gold, text):
    os._exit(1)


def test_a_worker_that_cannot_start_stops_with_a_message():
    with pytest.raises(UserError, match="could not start"):
        Pool(dead_on_arrival, num_workers=1).map([("1", "1")])


def test_a_real_power_tower_is_cut_off():
    pytest.importorskip("math_verify")
    pool = Pool(score_math, num_workers=1, time_limit=1.5)
    try:
        assert pool.map([("3", "10^{10^{10^{10}}}"), ("7", "\\boxed{7}")])[1] == 1.0
        start = time.monotonic()
        assert pool.map([("10^{10}", "10^10^10^10"), ("7", "8")]) == [None, 0.0]
        assert time.monotonic() - start < 15
    finally:
        pool.close()


def test_missing_library_names_the_extra(monkeypatch):
    module._shared_pool.cache_clear()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "jetrl\[math\]"'):
        math_reward(completions=["1"], answer=["1"])
