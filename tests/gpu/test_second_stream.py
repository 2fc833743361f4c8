"""Work beside a captured step: the graph has both streams' kernels, and their results are those of one stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl.engine.graphs.capture import Capture
from jetrl.kernels.beside import beside

pytestmark = pytest.mark.gpu


def test_a_graph_waits_for_what_is_beside() -> None:
    x, w = torch.randn(64, 512, device="cuda"), torch.randn(512, 512, device="cuda") / 23

    def step() -> Tensor:
        y = x
        for _ in range(8):  # layers: memory of both streams is used again
            with beside(y.device, lambda y=y: torch.tanh(y @ w @ w @ w)) as aside:
                own = torch.sin(y @ w)
            y = own + aside
        return y

    want = step()
    _, out = graph = Capture(x.device)(step)
    for seed in range(3):
        x.copy_(torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)))
        want = step()
        graph[0].replay()
        assert torch.equal(out, want)


def test_an_error_beside_it_is_the_one_that_is_raised() -> None:
    """The second stream has ended in the first one by then, so the capture ends as well."""
    x = torch.randn(8, 8, device="cuda")

    def step() -> Tensor:
        with beside(x.device, lambda: x @ x):
            raise MemoryError("of the first stream")

    (x @ x).sum()
    with pytest.raises(MemoryError, match="of the first stream"):
        Capture(x.device)(step)
