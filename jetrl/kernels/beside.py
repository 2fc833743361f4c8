"""Work of a captured step on a second stream, beside what does not need it. No bit depends on it.

Outside of a capture all is on one stream: a launch costs the host more there than a short kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@contextmanager
def beside(device: torch.device, work: Callable[[], T]) -> Iterator[T]:
    """What `work` returns, to be used once the context has ended: the stream waits there for the second one, after an
    error too, as a capture cannot end with a stream that nothing waits for.

    `work` reads what is there when the context begins; that must stay in place until it ends.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield work()
        return
    main, second = torch.cuda.current_stream(), _second_stream(device)
    second.wait_stream(main)
    try:
        with torch.cuda.stream(second):
            done = work()
        yield done
    finally:
        main.wait_stream(second)


@cache
def _second_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
