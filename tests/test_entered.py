"""How much of the package a step of a run enters: counted by `entered.py`, and not to grow unseen."""

from __future__ import annotations

import pytest
from entered import Count, counts

# (files, depth). What was counted last is in docs/LOG.md; whoever needs more raises a number here and says why there.
MOST = {"an RL step": (124, 26), "engine.step": (34, 20), "update": (49, 22)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Count]:
    return counts(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("name", MOST)
def test_steps_enter_few_files_and_are_not_deep(name: str, found: dict[str, Count]) -> None:
    count, (files, depth) = found[name], MOST[name]
    assert count.calls >= 2 and len(count.deepest) == count.depth
    assert len(count.files) <= files, sorted(count.files)
    assert count.depth <= depth, count.deepest


def test_a_part_is_within_the_whole(found: dict[str, Count]) -> None:
    whole = found["an RL step"]
    assert "train/step.py" in found["update"].files and "engine/scheduler.py" in found["engine.step"].files
    for part in (found["update"], found["engine.step"]):
        assert part.files < whole.files and part.depth < whole.depth
