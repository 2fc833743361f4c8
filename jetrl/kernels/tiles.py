"""Tiles of the portable kernels (`kernels = "triton"`), by the kind of tensor core that a GPU has.

A row's bits may not depend on how many rows there are. An output is one chain over K (and over the keys, 64 at a time
from the first), and within one kind of instruction a chain's bits do not depend on the tile, so few rows may have
another tile than many. They may not have another *kind* of instruction, which Triton chooses by the tile: `wgmma` on
Hopper needs 64 rows, `tcgen05` on Blackwell 128, and the older `mma` takes 16. So the least rows of a tile belong to
the definition, as do the keys of a step; `definition` names all of it, and the flow's digest covers that text.

Shared memory of a tile of `mma` stays below 99 KB, what a processor of sm_86 and sm_89 gives to a program.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["mma", "wgmma", "tcgen05"]
KEYS = 64  # of a step of attention; 32 for heads beyond 128 (`keys_for`)
LEAST: tuple[int, int] = (8, 0)  # the oldest compute capability: BF16 in tensor cores, asynchronous copies
FP8_FROM: tuple[int, int] = (8, 9)  # E4M3 in tensor cores
VERSION = 1  # of the definitions; another one is another flow


class Gemm(NamedTuple):
    """Rows of tokens and of the weight for a program, elements of K in a step, steps on their way, warps."""

    rows: int
    cols: int
    step: int
    stages: int
    warps: int


class Attention(NamedTuple):
    """Rows (a token's query heads of one key head are several) for a program, steps on their way, warps; `split`: keys
    that all rows see have a loop of their own, without a mask."""

    rows: int
    stages: int
    warps: int
    split: bool = False


class Few(NamedTuple):
    """Decode steps and drafts (`attention/portable_few.py`): rows that it takes at most, the least head size as a power
    of two, steps on their way (each waits for its page first), warps, and rows of the product that sums the weights."""

    rows: int
    least_head: int
    stages: int
    warps: int
    ones: int


class Tiles(NamedTuple):
    """For at most so many rows of tokens: tiles for weights of few rows, which would not cover the processors else, of
    more, and of so many that several programs share a processor. Tokens are read once for each tile of the weight, so
    wide tiles are better; programs that are alone on their processor need more steps on their way."""

    most: int | None
    few: Gemm
    more: Gemm
    many: Gemm


_GEMMS: dict[Kind, tuple[Tiles, ...]] = {
    "mma": (
        Tiles(16, Gemm(16, 32, 128, 4, 4), Gemm(16, 64, 128, 4, 4), Gemm(16, 64, 128, 4, 4)),
        Tiles(64, Gemm(64, 32, 128, 4, 4), Gemm(64, 64, 64, 4, 4), Gemm(64, 64, 64, 4, 4)),
        Tiles(None, Gemm(128, 128, 32, 4, 8), Gemm(128, 128, 32, 4, 8), Gemm(128, 128, 32, 4, 8)),
    ),
    "wgmma": (
        Tiles(64, Gemm(64, 32, 128, 6, 4), Gemm(64, 64, 128, 5, 4), Gemm(64, 64, 128, 3, 4)),
        Tiles(512, Gemm(64, 64, 128, 3, 4), Gemm(64, 128, 64, 4, 4), Gemm(64, 128, 64, 4, 4)),
        Tiles(None, Gemm(128, 128, 64, 3, 8), Gemm(128, 256, 64, 3, 8), Gemm(128, 256, 64, 3, 8)),
    ),
    "tcgen05": (
        Tiles(128, Gemm(128, 32, 64, 3, 4), Gemm(128, 64, 64, 4, 4), Gemm(128, 64, 64, 4, 4)),
        Tiles(None, Gemm(128, 128, 64, 3, 8), Gemm(128, 128, 64, 3, 8), Gemm(128, 128, 64, 3, 8)),
    ),
}
# FP8, in steps of 128
_GEMMS_FP8: dict[Kind, tuple[Tiles, ...]] = {
    "mma": (
        Tiles(16, Gemm(16, 32, 128, 6, 4), Gemm(16, 64, 128, 4, 4), Gemm(16, 64, 128, 4, 4)),
        Tiles(64, Gemm(64, 32, 128, 6, 4), Gemm(64, 64, 128, 3, 4), Gemm(64, 64, 128, 3, 4)),
        Tiles(None, Gemm(64, 64, 128, 3, 4), Gemm(64, 128, 128, 3, 4), Gemm(64, 128, 128, 3, 4)),
    ),
    "wgmma": (
        Tiles(64, Gemm(64, 32, 128, 8, 4), Gemm(64, 64, 128, 8, 4), Gemm(64, 64, 128, 4, 4)),
        Tiles(512, Gemm(64, 64, 128, 4, 4), Gemm(64, 128, 128, 3, 4), Gemm(64, 128, 128, 3, 4)),
        Tiles(None, Gemm(128, 128, 128, 3, 8), Gemm(128, 128, 128, 3, 8), Gemm(128, 128, 128, 3, 8)),
    ),
    "tcgen05": (
        Tiles(128, Gemm(128, 32, 128, 3, 4), Gemm(128, 64, 128, 3, 4), Gemm(128, 64, 128, 3, 4)),
        Tiles(None, Gemm(128, 128, 128, 3, 8), Gemm(128, 128, 128, 3, 8), Gemm(128, 128, 128, 3, 8)),
    ),
}
_MORE_FROM, _MANY_FROM = 5760, 10240  # rows of a weight: 90 and 160 tiles of 64
_ATTENTION: dict[Kind, tuple[Attention, Attention]] = {  # of few rows (decode, drafts), of many
    "mma": (Attention(16, 2, 4), Attention(64, 2, 8)),
    "wgmma": (Attention(64, 2, 4), Attention(128, 2, 8, True)),
    "tcgen05": (Attention(128, 2, 4), Attention(128, 2, 4)),
}
_FEW: dict[Kind, Few] = {"mma": Few(32, 16, 5, 4, 16), "wgmma": Few(32, 64, 5, 4, 64)}  # not yet for `tcgen05`


def kind_of(capability: tuple[int, int]) -> Kind:
    """The instruction that multiplies there. Consumer Blackwell (12.0) has no `tcgen05`."""
    if capability[0] in (10, 11):
        return "tcgen05"
    return "wgmma" if capability[0] == 9 else "mma"


def gemm(capability: tuple[int, int], rows: int, cols: int) -> Gemm:
    """The tile for so many rows of tokens, and of the weight. Their number changes no bit."""
    return _chosen(_GEMMS[kind_of(capability)], rows, cols)


def gemm_fp8(capability: tuple[int, int], rows: int, cols: int) -> Gemm:
    """The same for codes."""
    return _chosen(_GEMMS_FP8[kind_of(capability)], rows, cols)


def _chosen(table: tuple[Tiles, ...], rows: int, cols: int) -> Gemm:
    found = next(tiles for tiles in table if tiles.most is None or rows <= tiles.most)
    return found.few if cols < _MORE_FROM else found.more if cols < _MANY_FROM else found.many


def attention(capability: tuple[int, int]) -> tuple[Attention, Attention]:
    """The tiles for few rows and for many."""
    return _ATTENTION[kind_of(capability)]


def few(capability: tuple[int, int]) -> Few:
    """The tile of decode steps, where `few_rows` is not 0."""
    return _FEW[kind_of(capability)]


def few_rows(capability: tuple[int, int], head_dim: int) -> int:
    """Rows up to which a sequence's attention has exchanged places; 0: not on such a GPU, or for such heads. The keys
    of a step and the elements of a head become rows of a product, and must be as many as its instruction takes."""
    tile, padded = _FEW.get(kind_of(capability)), max(16, 1 << (head_dim - 1).bit_length())
    return tile.rows if tile is not None and keys_for(head_dim) == KEYS and padded >= tile.least_head else 0


def keys_for(head_dim: int) -> int:
    """Keys of a step, in the order of the keys."""
    return KEYS if head_dim <= 128 else KEYS // 2


def definition(capability: tuple[int, int]) -> str:
    """What the bits of these kernels depend on besides their inputs."""
    major, minor = capability
    return f"triton {VERSION} sm_{major}{minor} {kind_of(capability)} keys {KEYS}"
