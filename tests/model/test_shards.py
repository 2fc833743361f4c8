"""Cuts of matrices: a row has one owner, blocks stay whole, and quantized rows have the bits of the whole matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetrl.kernels.qtensor import blocks_of
from jetrl.kernels.quantize.ops import quantize_weight
from jetrl.model.shards import Shard, shard
from jetrl.parallel.world import World


def cut_for(sections: tuple[int, ...], size: int, rank: int = 0) -> Shard:
    return shard(sections, World(rank, size, rank))


def test_a_cut_by_hand() -> None:
    # blocks: 128 + 72 | 128 + 128 + 44 | 5; ranks of ceil(6 / 4) = 2 blocks
    cut = cut_for((200, 300, 5), 4)
    assert cut.rows == (200, 256, 49, 0) and cut.blocks == (2, 2, 2, 0) and cut.num_rows == 505
    assert [cut.parts(r) for r in range(4)] == [(200,), (256,), (44, 5), ()]
    # ranks of one block: the second begins within the first section
    assert [cut_for((130, 3), 3).parts(r) for r in range(3)] == [(128,), (2,), (3,)]
    assert cut_for((130, 3), 1).parts(0) == (130, 3) and not cut_for((130, 3), 1).split


@given(sections=st.lists(st.integers(1, 700), min_size=1, max_size=5).map(tuple), size=st.integers(1, 9))
def test_every_row_has_one_owner_and_no_block_straddles(sections: tuple[int, ...], size: int) -> None:
    cut, whole = cut_for(sections, size), blocks_of(sections)
    assert sum(cut.rows) == cut.num_rows == sum(sections) and sum(cut.blocks) == len(whole)
    found, start = [], 0
    for rank, rows in enumerate(cut.rows):
        parts = cut.parts(rank)
        assert sum(parts) == rows and len(blocks_of(parts)) == cut.blocks[rank]
        found += [(start + a, start + b) for a, b in blocks_of(parts)]
        own = cut_for(sections, size, rank).own(torch.arange(sum(sections)))
        assert own.tolist() == list(range(start, start + rows))
        start += rows
    assert found == whole
    counts = [len(c) for c in torch.arange(len(whole)).chunk(size)]
    assert list(cut.blocks) == counts + [0] * (size - len(counts))


@pytest.mark.parametrize("sections", [(300, 20, 130), (128, 256), (7,)])
@pytest.mark.parametrize("pow2", [False, True])
def test_rows_quantized_by_their_owners_are_those_of_the_whole_matrix(sections: tuple[int, ...], pow2: bool) -> None:
    weight = torch.randn(sum(sections), 200, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    want = quantize_weight(weight, sections, pow2)
    for size in (2, 3, 8):
        codes, scales = [], []
        for rank in range(size):
            cut = cut_for(sections, size, rank)
            if cut.rows[rank]:
                q = quantize_weight(cut.own(weight), cut.parts(rank), pow2)
                codes.append(q.codes.view(torch.uint8))
                scales.append(q.scale)
        assert torch.equal(torch.cat(codes), want.codes.view(torch.uint8))
        assert torch.equal(torch.cat(scales), want.scale)
