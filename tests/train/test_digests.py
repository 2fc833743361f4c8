"""Digests of tensors: the definition, what they see, and that parts add up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl.model.shards import Part
from jetrl.train.digests import UNSEEN, Digests, digest_of

WRAP = 1 << 64
SHAPES = [(), (1,), (7,), (5, 3), (4, 128), (3, 2048), (2, 6, 1), (130, 4099), (0, 8)]
TYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.float64]


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def slow(value: Tensor, start: int = 0) -> int:
    """The definition of the module's docstring, number by number."""
    rows = len(value) if value.ndim else 1
    data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    size = len(data) // rows if rows else 0
    word = 4 if size % 4 == 0 else 2 if size % 2 == 0 else 1
    total = 0
    for r in range(rows):
        row = data[r * size : (r + 1) * size]
        words = [int.from_bytes(row[i : i + word], "little", signed=word > 1) for i in range(0, size, word)]
        fold = 1
        while fold < 64 and len(words) % (2 * fold) == 0 and len(words) >= 2 * fold * 16:
            fold *= 2
        columns = len(words) // fold
        for c in range(columns):
            odd = ((((start + r) * columns + c) * 0x9E3779B97F4A7C15 + 1442695040888963407) | 1) % WRAP
            total += sum(words[c::columns]) * odd
    return total % WRAP


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_digest_equals_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if shape == (130, 4099) and dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        shape = (3, 4099)
    value = drawn(shape, dtype)
    assert int(digest_of(value)) % WRAP == slow(value)


def test_every_flipped_bit_is_seen() -> None:
    value = drawn((8, 96), torch.bfloat16)
    before = digest_of(value)
    words = value.view(torch.int16)
    for place in range(words.numel()):
        for bit in (0, 7, 14):
            words.view(-1)[place] ^= 1 << bit
            assert digest_of(value) != before, (place, bit)
            words.view(-1)[place] ^= 1 << bit
    assert digest_of(value) == before


def test_minus_zero_nan_and_places_count() -> None:
    a, b = torch.tensor([[0.0, 1.0]]), torch.tensor([[-0.0, 1.0]])
    assert digest_of(a) != digest_of(b)
    assert digest_of(torch.tensor([float("nan")])) == digest_of(torch.tensor([float("nan")]))
    value = drawn((6, 256), torch.float32)
    assert digest_of(value) != digest_of(value.flip(0)) and digest_of(value) != digest_of(value.flip(1))


def test_views_have_the_digest_of_their_copies() -> None:
    value = drawn((9, 40), torch.float8_e4m3fn)
    for view in (value[1:, 1:], value[2], value.t(), value[:, :33]):
        assert digest_of(view) == digest_of(view.clone())


def test_rows_of_ranks_add_up() -> None:
    value = drawn((300, 384), torch.bfloat16)
    parts = sum(int(digest_of(value[a:b], a)) for a, b in ((0, 128), (128, 256), (256, 300)))
    assert parts % WRAP == int(digest_of(value)) % WRAP


def test_large_tensors_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    value = drawn((50, 96), torch.float32)
    whole = digest_of(value)
    monkeypatch.setattr("jetrl.train.digests._SUMS", 100)
    assert digest_of(value) == whole
    monkeypatch.setattr("jetrl.train.digests._USUAL", 0)
    assert digest_of(value) == whole


def test_names_nest_and_are_taken_once() -> None:
    seen, value = Digests(), drawn((4, 4), torch.float32)
    with seen.within("update", 0):
        seen.add("loss", value)
        with seen.within("micro", 3):
            seen.add("loss", value)
        seen.add("nothing", None)
        seen.add_parts("gradient", {"w": Part(value, (4, 4), 0)})
    found = seen.take()
    assert list(found) == ["update/0/loss", "update/0/micro/3/loss", "update/0/gradient/w"]
    assert set(found.values()) == {slow(value)} and seen.take() == {}


def test_unseen_computes_nothing() -> None:
    UNSEEN.add("loss", torch.ones(3))
    UNSEEN.add_parts("w", {"w": Part(torch.ones(3), (3,), 0)})
    assert UNSEEN.take() == {}
