"""Hashes of values and of files, the same in every process, on every machine."""

from __future__ import annotations

import hashlib
from pathlib import Path


def stable_hash(*key: object) -> int:
    """A 64-bit number from the key's text, the same in every process, on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def sha256_of_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, read in pieces, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
