"""A hash of values that is the same in every process, on every machine."""

from __future__ import annotations

import hashlib


def stable_hash(*key: object) -> int:
    """A 64-bit number from the key's text, the same in every process, on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
