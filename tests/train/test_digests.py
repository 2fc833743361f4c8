"""The digests of a step, by name."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.update.digest import digest_of
from jetrl.model.shards import Part
from jetrl.train.digests import UNSEEN, Digests, Named

WRAP = 1 << 64


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_names_nest_and_are_taken_once() -> None:
    seen, value = Digests(), drawn(4, 4)
    with seen.within("update", 0):
        seen.add("loss", value)
        with seen.within("micro", 3):
            seen.add("loss", value)
        seen.add("nothing", None)
        seen.add_parts("gradient", {"w": Part(value, (4, 4), 0)})
    found = seen.take()
    assert list(found) == ["update/0/loss", "update/0/micro/3/loss", "update/0/gradient/w"]
    assert set(found.values()) == {int(digest_of(value)) % WRAP} and seen.take() == {}


def test_unseen_computes_nothing() -> None:
    UNSEEN.add("loss", torch.ones(3))
    UNSEEN.add_parts("w", {"w": Part(torch.ones(3), (3,), 0)})
    UNSEEN.add_all([Named("w", torch.ones(3))])
    assert UNSEEN.take() == {}


def test_tensors_of_one_call_keep_their_names_order_and_rows() -> None:
    seen, value, other = Digests(), drawn(6, 32), drawn(3, 5)
    seen.add("first", other)
    with seen.within("masters"):
        seen.add_all([Named("b", value[4:], 4), Named("a", value[:4])])
    seen.add_all([])
    found = seen.take()
    assert list(found) == ["first", "masters/b", "masters/a"]
    assert (found["masters/a"] + found["masters/b"]) % WRAP == int(digest_of(value)) % WRAP
    assert found["first"] == int(digest_of(other)) % WRAP


def test_the_first_rank_counts_what_is_whole_on_all() -> None:
    class Second:
        first = False

    seen, value = Digests(), drawn(6, 32)
    seen.add_parts("w", {"whole": Part(value, (6, 32), 0), "rows": Part(value[4:], (6, 32), 4)}, Second())  # type: ignore[arg-type]
    assert list(seen.take()) == ["w/rows"]
