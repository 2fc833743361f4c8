"""A server over a small model with a byte tokenizer, for tests: the engine in a thread, the front in its process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from byte_tokenizer import byte_tokenizer
from tiny import ARCH

from jetrl.api import Policy, load_model, served_model
from jetrl.engine.engine import PagedEngine
from jetrl.huggingface import read as hf
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe
from jetrl.serve.address import FrontSettings, listen
from jetrl.serve.engine_side import serve_engine
from jetrl.serve.service import About

POSITIONS = 768


def small_model(folder: Path, **shape: int) -> Path:
    """A folder with a random model that prefers some bytes, so that answers end now and then."""
    tokenizer = byte_tokenizer()
    spec = hf.spec_from_hf(ARCH | {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS} | shape)
    model = Transformer(spec, build_recipe("bf16", spec.num_layers)).init_random(4)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6.0 if p.ndim == 2 else 1.0)
    hf.save_model(folder, spec, model.state_dict(), tokenizer=tokenizer)
    return folder


@dataclass
class Served:
    """What a test needs of a running server."""

    url: str
    folder: Path
    about: About
    engine: PagedEngine
    process: Any
    thread: threading.Thread

    @cached_property
    def policy(self) -> Policy:
        """The same model on a CPU, with an engine of its own."""
        return load_model(self.folder, "fp8", "cpu")


@contextmanager
def served(
    folder: Path, settings: FrontSettings | None = None, slow: float = 0.0, device: str = "cpu", **changes: Any
) -> Iterator[Served]:
    """A server; `slow`: seconds that each step takes longer. At its end no page may be lost."""
    from jetrl.serve.server import running_front  # needs the extra serve

    engine, about, _ = served_model(str(folder), "tiny", "fp8", device, "", None, 0, 8, None)
    about = replace(about, **changes)
    if slow:
        draw = engine.step

        def step() -> Any:
            threading.Event().wait(slow)
            return draw()

        engine.step = step  # type: ignore[method-assign]
    stop, listener = threading.Event(), listen("127.0.0.1", 0)
    with running_front(listener, about, settings or FrontSettings()) as front:
        thread = threading.Thread(
            target=serve_engine, args=(engine, front.connection, stop.is_set, 0.05), daemon=True
        )
        thread.start()
        try:
            yield Served(front.url, folder, about, engine, front.process, thread)
        finally:
            stop.set()
            thread.join(20)
            assert not thread.is_alive()
    assert not engine.has_work
    engine.collect()
    assert engine._scheduler.allocator.num_used == 0
