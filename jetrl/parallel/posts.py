"""What ranks tell each other through the run's store, without a collective: a thread beside the run may use it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from jetrl.parallel.progress import LostContact
from jetrl.parallel.world import World, connect
from jetrl.untrusted import json_value

_PAUSE = 0.05  # seconds between two looks


class Abandoned(Exception):
    """Another rank has given up the work that these posts are about; its own error says why."""


class Posts:
    """Values of each rank by key, about one piece of work. The ranks make these objects in the same order.

    A call that finds the store gone raises LostContact.
    """

    _made = itertools.count()

    def __init__(self, world: World) -> None:
        self._world, self._name = world, f"posts/{next(Posts._made)}"
        self._own: dict[str, Any] = {}
        self._store: dist.Store | None = None  # a connection of the thread that works

    def put(self, key: str, value: Any) -> None:
        """Tell this rank's value of `key`, which JSON can hold."""
        self._own[key] = value
        if not self._world.alone:
            self._asked(lambda store: store.set(f"{self._name}/{key}/{self._world.rank}", json.dumps(value)))

    def all(self, key: str, check: Callable[[], None]) -> list[Any]:
        """The values of all ranks in their order, once they are there. `check()`, called while this waits, may raise.

        Raises Abandoned if a rank has failed meanwhile.
        """
        if self._world.alone:
            return [self._own[key]]
        found = []
        for rank in range(self._world.size):
            name = f"{self._name}/{key}/{rank}"
            while not self._asked(partial(_has, name)):
                if self._asked(partial(_has, f"{self._name}/failed")):
                    raise Abandoned
                check()
                time.sleep(_PAUSE)
            found.append(json_value(self._asked(partial(_value, name))))
        return found

    def fail(self) -> None:
        """The others need not wait for this rank."""
        if not self._world.alone:
            with suppress(LostContact):  # then nobody waits
                self._asked(lambda store: store.set(f"{self._name}/failed", ""))

    def _asked(self, call: Callable[[Any], Any]) -> Any:
        try:
            if self._store is None:
                self._store = connect()
            return call(self._store)
        except RuntimeError as error:
            raise LostContact(f"the store of the run: {error}") from error


def _has(name: str, store: dist.Store) -> bool:
    return store.check([name])


def _value(name: str, store: dist.Store) -> bytes:
    return store.get(name)
