"""The guard around the user's code: reward functions, data files, engines, environments.

Each side keeps its own settings of the process. What the user's code sets (`torch.set_grad_enabled(False)`, a default
dtype, a number of threads) applies in the user's code, in this call and in the next ones; when a call returns, ours are
back. Undoing it silently could change what a reward computes, and refusing it would forbid what is not a mistake.

Environments run in threads next to training, and so may reward functions (`task.reward_calls = "group"`). There a
setting of the whole process cannot be theirs alone: it is an error. So is `os._exit`, which would end a run silently
and with status 0.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from jetrl.errors import Notice, UserError
from jetrl.untrusted import printable

OUR_THREADS = "jetrl-environment"  # prefix of the names of the threads in which environments run

_real_exit = os._exit
_theirs: dict[str, Any] = {}  # what the user's code has set, where it differs from ours


def _default_device() -> torch.device | None:
    device = torch.empty(0).device  # torch.get_default_device takes ten times as long
    return None if device.type == "cpu" else device


def _fills() -> bool:
    return torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined, no-any-return]


def _fill(value: bool) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = value  # type: ignore[attr-defined]


# by the function that users call: how to read it, and how to set it
OF_THREAD: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.set_default_device": (_default_device, torch.set_default_device),
}
OF_PROCESS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "torch.use_deterministic_algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "torch.utils.deterministic.fill_uninitialized_memory": (_fills, _fill),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
}
SETTINGS = {**OF_THREAD, **OF_PROCESS}


IN_THREAD = {**OF_THREAD, "torch.set_num_threads": OF_PROCESS["torch.set_num_threads"]}  # what a thread has of its own


@contextmanager
def code_in_thread(name: str) -> Iterator[None]:
    """Runs the user's code `name` in a thread next to ours: what is the thread's own is put back.

    UserError where it changes its number of threads, or leaves `torch.inference_mode` on. What all threads share, it
    must leave alone; only the main thread, which may be switching it for an engine, can tell: `check_unchanged`.
    """
    ours, inference = _read(IN_THREAD), torch.is_inference_mode_enabled()
    try:
        yield
    finally:
        left = _read(IN_THREAD)
        _write(ours, left)
    _require_inference(name, inference)
    if left["torch.set_num_threads"] != ours["torch.set_num_threads"]:
        _refuse({"torch.set_num_threads": left["torch.set_num_threads"]}, name)


def _require_inference(name: str, before: bool) -> None:
    if torch.is_inference_mode_enabled() != before:
        raise UserError(f"{name} leaves torch.inference_mode on. Write `with torch.inference_mode():` around its body.")


@contextmanager
def user_code(name: str, in_threads: bool = False) -> Iterator[None]:
    """Runs the user's code `name`, in the main thread, with the settings that it left last time, and restores ours.
    Costs some 30 us.

    UserError where it leaves `torch.inference_mode` on, which cannot be put back, or calls `os._exit`; and where code
    that will run `in_threads` changes what these share with us.
    """
    ours, handlers, inference = _read(SETTINGS), _handlers(), torch.is_inference_mode_enabled()
    changed: dict[str, Any] = {}
    _write(ours if in_threads else {**ours, **_theirs}, ours)
    try:
        with no_silent_exit():
            yield
    finally:
        left = _read(SETTINGS)
        changed = {key: value for key, value in left.items() if value != ours[key]}
        _write(ours, left)
        if not in_threads:
            _theirs.clear()
            _theirs.update(changed)
        _put_back(handlers, name)
    _require_inference(name, inference)
    if in_threads and changed.keys() & OF_PROCESS:
        _refuse({key: value for key, value in changed.items() if key in OF_PROCESS}, name)


_FRESH = {  # what a program finds as it starts; the others are set by a run, or are the machine's
    "torch.set_grad_enabled": True, "torch.set_default_device": None, "torch.set_default_dtype": torch.float32,
    "torch.set_float32_matmul_precision": "highest",
}


@contextmanager
def our_code(kept: dict[str, Any]) -> Iterator[None]:
    """Runs our code inside a program that has settings of its own, and puts those back: the reverse of `user_code`.

    `kept` takes our settings from one call to the next; while it is empty, they are those of a new program. UserError
    in `torch.inference_mode`, which cannot be put aside.
    """
    if torch.is_inference_mode_enabled():
        raise UserError("Training does not work inside torch.inference_mode. Leave it before calling jetrl.")
    theirs = _read(SETTINGS)
    if not kept:
        _theirs.clear()
    _write(kept or {**theirs, **_FRESH}, theirs)
    try:
        yield
    finally:
        kept.update(_read(SETTINGS))
        _write(theirs, kept)


def process_settings() -> dict[str, Any]:
    """The settings that every thread shares, by the function that sets them."""
    return _read(OF_PROCESS)


def check_unchanged(before: Mapping[str, Any], name: str) -> None:
    """UserError, with the settings restored, if the environment `name` has changed one that every thread shares."""
    if changed := put_back(before):
        _refuse(changed, name)


def put_back(before: Mapping[str, Any]) -> dict[str, Any]:
    """Restore what every thread shares; returns what it had been changed to."""
    now = process_settings()
    _write(before, now)
    return {key: value for key, value in now.items() if value != before[key]}


def _refuse(changed: Mapping[str, Any], name: str) -> NoReturn:
    calls = ", ".join(f"{key}({value})" for key, value in changed.items())
    raise UserError(
        f"{name} changes a setting of the whole process: {calls}. It runs in a thread next to training, so it cannot "
        "have its own. Remove it; give dtype and device where tensors are made."
    )


def _read(settings: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]]) -> dict[str, Any]:
    return {key: get() for key, (get, _) in settings.items()}


def _write(wanted: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Set what differs from the wanted values."""
    for key, value in wanted.items():
        if value != now[key]:
            SETTINGS[key][1](value)


_HANGUP = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()


def _handlers() -> dict[signal.Signals, Any]:
    """The handlers of the signals that stop a run. Only the main thread may set them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, *_HANGUP)}


def _put_back(handlers: Mapping[signal.Signals, Any], name: str) -> None:
    for number, ours in handlers.items():
        if signal.getsignal(number) != ours and ours is not None:
            signal.signal(number, ours)
            warnings.warn(
                f"{name} set its own handler for {number.name}. It is removed again: this signal stops the run "
                "with a checkpoint.", Notice, stacklevel=4,
            )


@contextmanager
def no_silent_exit() -> Iterator[None]:
    """Inside it, `os._exit` in this process is an error that names the caller, in every thread."""
    before, pid = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != pid:  # a forked process may end as it likes
            _real_exit(status)
        frame = sys._getframe(1)
        what = f"os._exit({status}) was called ({frame.f_code.co_filename}, line {frame.f_lineno})"
        thread = threading.current_thread()
        if thread is threading.main_thread() or thread.name.startswith(OUR_THREADS):
            raise UserError(f"{what}: it would end the run without a checkpoint. Remove it, or raise an exception.")
        lost = "the program ends here, and steps after the last checkpoint are lost"
        print(printable(f"jetrl: {what} in the thread {thread.name}: {lost}."), file=sys.stderr, flush=True)
        _real_exit(status or 1)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = before

