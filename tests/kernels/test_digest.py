"""Digests of tensors: the definition, what they see, and that parts add up. The kernel: `triton_cases.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from jetrl.kernels.dispatch import served_by, untapped_backend_of
from jetrl.kernels.update.digest import Words, digest_of, digests

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
def test_a_digest_equals_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
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
    monkeypatch.setattr("jetrl.kernels.update.reference._SUMS", 100)
    assert digest_of(value) == whole
    monkeypatch.setattr("jetrl.kernels.update.reference._USUAL", 0)
    assert digest_of(value) == whole


def test_digests_of_one_call_are_those_of_single_ones() -> None:
    values = [drawn(shape, dtype) for shape in SHAPES[:-2] for dtype in TYPES]
    found = digests(values, list(range(len(values))))
    assert found.dtype == torch.int64 and found.shape == (len(values),)
    assert found.tolist() == [int(digest_of(value, start)) for start, value in enumerate(values)]


def test_whoever_replaces_the_kernels_does_not_replace_digests() -> None:
    value = drawn((4, 128), torch.float32)
    with served_by(torch.device("cpu"), object()):
        assert int(digest_of(value)) % WRAP == slow(value)


def test_tensors_that_are_copied_first_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their copies would take the memory of a whole model."""
    value = drawn((8, 96), torch.bfloat16)
    backend, calls = untapped_backend_of(value), list[int]()

    def counted(words: Sequence[Words], true: Callable[[Sequence[Words]], Tensor] = backend.digests) -> Tensor:
        calls.append(len(words))
        return true(words)

    monkeypatch.setattr(backend, "digests", counted)
    values = [value.t(), value, value, value[:, 1:], value.t(), value]
    found = digests(values, [0] * 6)
    assert calls == [1, 2, 1, 1, 1]
    assert [one % WRAP for one in found.tolist()] == [slow(one) for one in values]
