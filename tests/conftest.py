"""What all tests share: the seed, the number of threads, and the GPU marker."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from jetrl.tasks import user_code


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` or `gpu2` are skipped one by one, with the reason, where there is no GPU or only one."""
    if torch.cuda.device_count() < 2 and os.environ.get("JETRL_TEST_RANKS") != "cpu":
        skipped = pytest.mark.skip(reason="needs two CUDA GPUs; run `make test-gpu2` on a Hopper machine")
        for item in items:
            if item.get_closest_marker("gpu2") is not None:
                item.add_marker(skipped)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; run `make test-gpu` on a Hopper machine"))


@pytest.fixture(autouse=True)
def settings_of_users_code() -> Iterator[None]:
    """What a test's user code has set in torch lasts as long as the process: the next test's would run under it."""
    yield
    user_code._theirs.clear()
