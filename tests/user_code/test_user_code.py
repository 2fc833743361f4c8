"""The guard around the user's code: settings of torch on each side, signal handlers, and `os._exit`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl.errors import UserError
from jetrl.user_code import guard as module
from jetrl.user_code.guard import SETTINGS, check_unchanged, no_silent_exit, process_settings, user_code
from jetrl.user_code.importing import import_attribute

OTHER = {
    "torch.set_grad_enabled": False, "torch.set_default_dtype": torch.float64, "torch.set_num_threads": 3,
    "torch.set_default_device": torch.device("meta"), "torch.use_deterministic_algorithms": 1,
    "torch.utils.deterministic.fill_uninitialized_memory": False, "torch.set_float32_matmul_precision": "high",
}


OURS = {
    "torch.set_grad_enabled": True, "torch.set_default_dtype": torch.float32, "torch.set_num_threads": 1,
    "torch.set_default_device": None, "torch.use_deterministic_algorithms": 0,
    "torch.utils.deterministic.fill_uninitialized_memory": True, "torch.set_float32_matmul_precision": "highest",
}


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    before = {key: get() for key, (get, _) in SETTINGS.items()}
    for key, value in OURS.items():
        SETTINGS[key][1](value)
    yield
    module._theirs.clear()
    for key, value in before.items():
        SETTINGS[key][1](value)


def test_the_table_names_what_torch_has() -> None:
    assert OTHER.keys() == SETTINGS.keys()
    for name in SETTINGS:
        found: Any = torch
        for part in name.split(".")[1:]:
            found = getattr(found, part)


@pytest.mark.parametrize("key", OTHER)
def test_what_the_users_code_sets_holds_in_the_users_code_alone(key: str) -> None:
    get, put = SETTINGS[key]
    ours = get()
    assert ours != OTHER[key]
    with user_code("theirs"):
        put(OTHER[key])
    assert get() == ours
    with user_code("theirs, again"):
        assert get() == OTHER[key], "what it has set is gone in its next call"
    assert get() == ours
    with user_code("theirs"):
        put(ours)
    with user_code("theirs, as ours"):
        assert get() == ours


def test_settings_are_put_back_behind_an_exception_and_a_call_within_a_call() -> None:
    with pytest.raises(KeyError), user_code("outer"):
        torch.set_default_dtype(torch.float64)
        with user_code("inner"):
            torch.set_grad_enabled(False)
        raise KeyError
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    with user_code("next"):
        assert torch.get_default_dtype() == torch.float64


def test_inference_mode_that_is_left_on_is_refused() -> None:
    mode = torch.inference_mode()
    try:
        with pytest.raises(UserError, match=r"my reward leaves torch.inference_mode on.*with torch.inference_mode"):
            with user_code("my reward"):
                mode.__enter__()
    finally:
        mode.__exit__(None, None, None)


def test_what_environments_share_with_training_is_refused(tmp_path: Path) -> None:
    before = process_settings()
    check_unchanged(before, "Environment X")
    torch.set_default_dtype(torch.float64)
    with pytest.raises(UserError, match=r"Environment X changes .*torch.set_default_dtype\(torch.float64\).*thread"):
        check_unchanged(before, "Environment X")
    assert torch.get_default_dtype() == torch.float32
    file = tmp_path / "env.py"
    file.write_text("import torch\ntorch.set_num_threads(3)\ntorch.set_grad_enabled(False)\nclass X: pass\n")
    with pytest.raises(UserError, match=r"environment.name = .*env.py:X changes .*torch.set_num_threads\(3\)"):
        import_attribute(f"{file}:X", "environment.name", "class")
    assert import_attribute(f"{file}:X", "rollout.engine", "class").__name__ == "X"
    assert torch.is_grad_enabled() and process_settings() == before
    other = tmp_path / "other.py"
    other.write_text("import torch\nassert torch.get_num_threads() != 3\nclass X: pass\n")
    assert import_attribute(f"{other}:X", "environment.name", "class"), "what the engine has set is not its own"


def test_handlers_of_the_signals_that_stop_a_run_stay_ours() -> None:
    ours = signal.getsignal(signal.SIGTERM)
    with pytest.warns(UserWarning, match="my reward set its own handler for SIGTERM"), user_code("my reward"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == ours


def test_a_silent_exit_is_an_error_that_names_the_caller() -> None:
    real = os._exit
    with pytest.raises(UserError, match=r"os._exit\(0\) was called \(.*test_user_code.py, line \d+\)"):
        with user_code("my reward"):
            os._exit(0)
    assert os._exit is real
    found = []

    def call() -> None:
        try:
            os._exit(0)
        except UserError as error:
            found.append(str(error))

    with no_silent_exit():
        thread = threading.Thread(target=call, name=f"{module.OUR_THREADS}-1")
        thread.start()
        thread.join()
    assert len(found) == 1 and "os._exit(0) was called" in found[0] and os._exit is real


@pytest.mark.parametrize(("status", "expected"), [(0, 1), (7, 7)])
def test_a_thread_of_the_users_own_ends_the_program_with_a_word(status: int, expected: int) -> None:
    code = (
        "import os, threading\nfrom jetrl.user_code.guard import no_silent_exit\nwith no_silent_exit():\n"
        f"    t = threading.Thread(target=lambda: os._exit({status}), name='watchdog'); t.start(); t.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == expected and "in the thread watchdog" in done.stderr, done


def test_processes_that_are_forked_end_as_they_like() -> None:
    code = (
        "import os\nfrom jetrl.user_code.guard import no_silent_exit\nwith no_silent_exit():\n"
        "    pid = os.fork()\n    if not pid: os._exit(5)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "5", done


def test_the_guard_works_in_other_threads() -> None:
    def work() -> bool:
        with user_code("theirs"):
            torch.set_grad_enabled(False)
        return torch.is_grad_enabled()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result()
