"""Hints: told once in full, then counted; and rewards that never move."""

from __future__ import annotations

from jetrl.report.hints import ConstantRewards, Hints, never_moved


def test_told_once_in_full_and_then_at_powers_of_ten() -> None:
    told: list[str] = []
    hints = Hints(told.append)
    for step in range(1, 121):
        hints.hint(step, "no news", "look elsewhere")
    hints.hint(121, "other news", "here")
    assert told == [
        "step 1: no news: look elsewhere", "step 10: no news, for the 10th time in this run",
        "step 100: no news, for the 100th time in this run", "step 121: other news: here",
    ]


def row(**scores: tuple[float, float]) -> dict[str, float]:
    found = {"reward/min": 0.0, "reward/max": 1.0}
    for name, (mean, std) in scores.items():
        found |= {f"reward/{name}/mean": mean, f"reward/{name}/std": std}
    return found


def test_a_function_whose_score_never_moves_is_named_once() -> None:
    told: list[tuple[int, str]] = []
    looks = ConstantRewards()
    for step in range(1, 41):
        metrics = row(right=(0.5, 0.5), anchored=(0.0, 0.0), late=(float(step > 20), 0.0), now=(float(step % 7), 0.0))
        looks.look(metrics, lambda what, detail, step=step: told.append((step, what)))
    looks.look({"step": 41}, lambda *_: told.append((41, "")))
    assert told == [(10, "constant reward anchored"), (10, "constant reward late"), (30, "constant reward late")]


def test_the_summary_says_which_rewards_never_moved() -> None:
    steps = [row(right=(0.5, 0.5), anchored=(0.25, 0.0), one=(float(i), 0.0)) for i in range(3)]
    assert never_moved([{"eval/x/avg@1": 0.0}, *steps]) == ["anchored: 0.25 in all 3 steps"]
    alone = [{"reward/min": 0.0, "reward/max": 0.0}] * 2
    assert never_moved(alone) == ["reward: 0 in all 2 steps"] and never_moved(alone[:1]) == never_moved([]) == []


def rows_of(count: int, **metrics: float) -> list[dict[str, float]]:
    return [{f"reward/{key}": value for key, value in metrics.items()} for _ in range(count)]


def told_of(rows: list[dict[str, float]], known: bool = False) -> list[tuple[str, str]]:
    told: list[tuple[str, str]] = []
    looks = ConstantRewards()
    for one in rows:
        looks.look(one, lambda what, detail: told.append((what, detail)), known)
    return told


def test_a_single_reward_that_never_moves_is_named_under_a_penalty() -> None:
    rows = rows_of(10, min=-0.5, max=1.0, before_penalty_min=1.0, before_penalty_max=1.0)
    ((what, detail),) = told_of(rows)
    assert what == "constant reward" and "gave 1 to every" in detail and "rl.overlong_buffer_len" in detail
    assert never_moved(rows) == ["reward: 1 in all 10 steps"]
    moves = rows_of(10, min=0.0, max=0.0, before_penalty_min=0.0, before_penalty_max=1.0)
    assert told_of(moves) == [] and never_moved(moves) == [], "it does move, though the penalty hides it"


def test_a_single_reward_that_never_moves_is_named_where_advantages_are_not_0() -> None:
    rows = rows_of(10, min=0.5, max=0.5)  # a critic, or a KL in the reward, gives advantages of its own
    ((what, detail),) = told_of(rows)
    assert what == "constant reward" and "overlong" not in detail
    assert told_of(rows, known=True) == [], "such steps are told as having nothing to learn from"


def test_a_function_called_reward_is_not_the_whole_reward() -> None:
    rows = [row(reward=(0.5, 0.0), right=(0.5, 0.5)) for _ in range(10)]
    assert [what for what, _ in told_of(rows, known=True)] == ["constant reward reward"]
    assert never_moved(rows) == ["reward: 0.5 in all 10 steps"]
    both = [one | {"reward/min": 1.0, "reward/max": 1.0} for one in rows]
    assert never_moved(both) == ["the whole reward: 1 in all 10 steps", "reward: 0.5 in all 10 steps"]
