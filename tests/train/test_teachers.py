"""Which teacher judges which row."""

from __future__ import annotations

from typing import Any

from jetrl.train.teachers import REST, Teachers
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory, token_ids


def test_rows_without_a_value_have_the_teacher_of_all_others():
    models: dict[str, Any] = {REST: None, "a": None}
    answer = Trajectory((Segment("environment", token_ids([1]), ""),), "stop", "")
    groups = [
        Group(Prompt(i, Problem("", "", "", extra=extra), ()), (answer,) * 2)
        for i, extra in enumerate(({"kind": "a"}, {"kind": "z"}, {}))
    ]
    assert Teachers(models, "kind").names(groups) == ["a", "a", REST, REST, REST, REST]
