"""Tiles of the portable kernels: within one kind of GPU all get the same instruction, and fit in its shared memory."""

from __future__ import annotations

import pytest

from jetrl.kernels import tiles

GPUS = {(8, 0): "mma", (8, 6): "mma", (8, 9): "mma", (9, 0): "wgmma", (10, 0): "tcgen05", (12, 0): "mma"}
LEAST_ROWS = {"mma": 16, "wgmma": 64, "tcgen05": 128}  # from which Triton takes the instruction
ROWS = (1, 15, 16, 17, 63, 64, 65, 128, 129, 256, 257, 512, 40_000)


@pytest.mark.parametrize(("capability", "kind"), GPUS.items(), ids=str)
def test_few_rows_have_the_instruction_of_many(capability: tuple[int, int], kind: str) -> None:
    assert tiles.kind_of(capability) == kind
    for rows in ROWS:
        for cols in (1024, 4096, 6144, 24_576, 151_936):
            coded, tile = tiles.gemm_fp8(capability, rows, cols), tiles.gemm(capability, rows, cols)
            assert 128 % coded.cols == 0 and coded.step == 128, "a tile has one scale of a block"
            for one in (tile, coded):
                assert one.rows >= LEAST_ROWS[kind] and one.warps in (4, 8)
                assert one.rows % 16 == one.cols % 16 == one.step % 16 == 0
    few, many = tiles.attention(capability)
    assert LEAST_ROWS[kind] <= few.rows <= many.rows


@pytest.mark.parametrize("capability", GPUS, ids=str)
def test_tiles_fit_in_shared_memory(capability: tuple[int, int]) -> None:
    """Of the operands, `stages` steps wait there: no more than 99 KiB, what sm_86 and sm_89 give to a program."""
    most = (99 if tiles.kind_of(capability) == "mma" else 160) * 1024
    for rows in ROWS:
        for cols in (1024, 6144, 24_576):
            for tile, size in ((tiles.gemm(capability, rows, cols), 2), (tiles.gemm_fp8(capability, rows, cols), 1)):
                assert (tile.rows + tile.cols) * tile.step * size * tile.stages <= most
    for one in tiles.attention(capability):
        for head in (64, 128, 256):
            held = one.rows * head * 2 if tiles.kind_of(capability) != "mma" else 0  # else queries are in registers
            assert held + 2 * tiles.keys_for(head) * head * 2 * one.stages <= 128 * 1024


@pytest.mark.parametrize(("capability", "kind"), GPUS.items(), ids=str)
def test_decode_steps_have_rows_enough_for_the_instruction(capability: tuple[int, int], kind: str) -> None:
    """Of keys, of a head's elements, and of the ones that sum the weights; else the other kernel serves."""
    for head in (8, 16, 32, 40, 64, 96, 128, 136, 256):
        if not tiles.few_rows(capability, head):
            continue
        tile = tiles.few(capability)
        padded = max(16, 1 << (head - 1).bit_length())
        assert min(padded, tiles.keys_for(head), tile.ones) >= LEAST_ROWS[kind]
        copies = 2 * tiles.keys_for(head) * padded * 2
        assert 3 * copies <= 99 * 1024, "of BF16, three steps at most are on their way"
    expected = {"mma": 9 - 2, "wgmma": 4, "tcgen05": 0}[kind]
    assert sum(tiles.few_rows(capability, head) > 0 for head in (8, 16, 32, 40, 64, 96, 128, 136, 256)) == expected


def test_what_the_digest_covers() -> None:
    """By hand; and every kind of GPU has a text of its own."""
    assert tiles.definition((8, 0)) == "triton 1 sm_80 mma keys 64"
    assert len({tiles.definition(capability) for capability in GPUS}) == len(GPUS)
    assert tiles.keys_for(128) == 64 and tiles.keys_for(136) == 32
