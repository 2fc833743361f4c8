"""Work beside a captured step: on a CPU, and outside of captures, it is done at once."""

from __future__ import annotations

import torch

from jetrl.kernels.beside import beside


def test_work_is_done_at_once_where_nothing_is_captured() -> None:
    x = torch.ones(3)
    with beside(x.device, lambda: x + 1) as done:
        assert torch.equal(done, x * 2)
