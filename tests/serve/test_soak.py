"""A few seconds of `benchmarks/soak_serve.py`: clients that leave, time out, try again and send garbage."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from serving import served, small_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from soak_serve import Client, Failed, memory_mib, soak  # noqa: E402

pytest.importorskip("httptools", reason="needs the extra serve")
pytestmark = pytest.mark.timeout(300)


def test_a_server_outlives_its_clients(tmp_path: Path) -> None:
    """All kinds of clients at once; then nothing is left in the engine (`served` looks at its pages)."""
    with served(small_model(tmp_path / "model"), slow=0.002) as server:
        found = soak(server.url, 5, 4, server.process.pid, 64)
        assert sum(found["done"].values()) > 10 and found["grown_mib"] < 64
        clients = Client(server.url, {}, 1)
        for kind in clients.kinds:
            kind()
        body = next(iter(clients.known))
        clients.known[body] = ([], [])  # as if it had been another answer
        clients.random.seed(1)
        with pytest.raises(Failed, match="and before"):
            for _ in range(200):
                clients.asks()
        assert memory_mib(server.process.pid) > 10
