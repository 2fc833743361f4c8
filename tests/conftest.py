"""What all tests share: the number of threads, the order of files, and the GPU marker."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

# before torch reads it: where more threads wait than there are cores, those that spin keep the others from working
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402

from jetrl.user_code import guard as user_code  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        alone = "PYTEST_XDIST_WORKER" not in os.environ
        torch.set_num_threads(min(2 if alone else 1, torch.get_num_threads()))
    # jobs of a shell ignore SIGINT, those of nohup SIGHUP; programs that tests start would inherit that
    for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) == signal.SIG_IGN:
            signal.signal(getattr(signal, name), handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that two processes that share the files end together. Tests marked
    `gpu`, `gpu2` or `gpu4` are skipped one by one, with the reason, where there are fewer GPUs."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)
    for marker, wanted in (("gpu2", 2), ("gpu4", 4)):
        if torch.cuda.device_count() >= wanted or os.environ.get("JETRL_TEST_RANKS") == "cpu":
            continue
        skipped = pytest.mark.skip(reason=f"needs {wanted} CUDA GPUs; run `make test-{marker}` on a Hopper machine")
        for item in items:
            if item.get_closest_marker(marker) is not None:
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
