"""A teacher's part of the advantages, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jetrl.errors import UserError
from jetrl.rl.distill import reverse_kl, with_teacher
from tests.rl.test_advantage import make_group, trajectory


def test_the_parts_of_an_advantage():
    """By hand: log-probs -1, -2 of the policy and -1.5, -0.5 of the teacher: k = 0.5, -1.5, so -0.25, 0.75 at 0.5."""
    kl = reverse_kl({0: np.float32([-1, -2])}, {0: np.float32([-1.5, -0.5])})
    assert kl[0].tolist() == [0.5, -1.5] and kl[0].dtype == np.float64
    two, one = trajectory((2, 0.0)), trajectory((1, 0.0))
    alone = replace(make_group(0, [1, 0, 0], [two, one, one]), advantages=((0.0, 0.0), None, (0.0,)))
    filled, stats = with_teacher([alone], [kl[0], None, np.array([4.0])], 0.5)
    assert filled[0].advantages == ((-0.25, 0.75), None, (-2.0,))
    assert stats == {"policy/teacher_kl": 1.0}  # (0.5 - 1.5 + 4) / 3
    beside = replace(make_group(0, [1], [two]), advantages=(2.0,))
    assert with_teacher([beside], [kl[0]], 0.5)[0][0].advantages == ((1.75, 2.75),)
    masked = replace(make_group(0, [1], [two]), advantages=(None,))
    assert with_teacher([masked], [None], 0.5) == ([masked], {}), "a mean of nothing is absent"
    with pytest.raises(UserError, match="Lower teacher.weight = 1e\\+06"):
        with_teacher([beside], [np.array([1e33, 0.0])], 1e6)
