"""Work of a captured step on a second stream, beside what does not need it. No bit depends on it.

Outside of a capture all is on one stream: a launch costs the host more there than a short kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def beside(device: torch.device, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """What `work` returns, and what is to be called before that is used: the stream waits there for the second one.

    `work` reads what is there when this is called; that must stay in place until then.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return work(), _nothing
    main, second = torch.cuda.current_stream(), _second_stream(device)
    second.wait_stream(main)
    with torch.cuda.stream(second):
        done = work()
    return done, partial(main.wait_stream, second)


def _nothing() -> None:
    """Nothing runs beside."""


@cache
def _second_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
