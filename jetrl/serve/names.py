"""Request ids: a hash of what is asked, and of how many equal requests came before.

The id names the random stream of an answer. So equal requests are interchangeable: whichever of them comes first, the
set of their answers is the same, and so is each answer to a request that says a seed.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import blake2b

import numpy as np

from jetrl.types import SamplingParams

_REMEMBERED = 1_000_000  # distinct requests whose number is known; the oldest are forgotten, and count from 0 again


class Names:
    """Counts equal requests of one scope: a session, or the server."""

    def __init__(self, scope: str = "") -> None:
        self.scope = scope
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def take(self, tokens: Sequence[int], sampling: SamplingParams, n: int, seeded: bool) -> list[int]:
        """Ids of `n` answers. A request that says a seed gets the same ids each time."""
        asked = self._digest(tokens, sampling)
        first = 0
        if not seeded:
            first = self._seen.pop(asked, 0)
            self._seen[asked] = first + n
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        return [_number(asked, first + place) for place in range(n)]

    def _digest(self, tokens: Sequence[int], sampling: SamplingParams) -> bytes:
        what = json.dumps([self.scope, asdict(sampling)], sort_keys=True).encode()
        return blake2b(what + b"\0" + np.array(tokens, dtype=np.int32).tobytes(), digest_size=16).digest()


def _number(asked: bytes, place: int) -> int:
    """63 bits: positive as a signed integer of 64."""
    return int.from_bytes(blake2b(asked + place.to_bytes(8, "big"), digest_size=8).digest(), "big") >> 1
