"""The host's free memory, as a container's limit and its files' pages leave it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetrl.parallel import host


def test_pages_of_files_count_as_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    free, total = host.memory()
    assert 0 < free <= total
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    assert host.memory() == (100_000, 1_000_000)
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 300000\nactive_file 5\n")
    assert host.memory() == (400_000, 1_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert host.memory()[1] == total
