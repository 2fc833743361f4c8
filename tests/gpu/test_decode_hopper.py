"""The decode kernels against FlashAttention-4, bit for bit: BF16 pages, and FP8 pages against what they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from jetrl.engine.sharing import chunk_size, find_sharing
from jetrl.kernels.attention.state import SharedPages
from jetrl.types import LayerCache

pytestmark = pytest.mark.gpu
CUDA = "cuda"
LENGTHS = [1, 2, 7, 64, 127, 128, 129, 255, 256, 257, 400, 513, 640, 900, 1024, 1025, 1500, 2047, 3000, 4097]
BF16_HEADS = [(32, 8, 128), (16, 8, 128), (9, 3, 64), (14, 2, 64), (64, 4, 128), (48, 4, 64), (8, 8, 64)]
FP8_HEADS = [(32, 8, 128), (16, 8, 128), (28, 4, 128), (64, 4, 128), (9, 3, 64), (14, 2, 64), (64, 4, 64)]
NOTHING = 2.0**-100  # below it, outputs over FP8 pages may differ
CASES = [(*heads, False) for heads in BF16_HEADS] + [(*heads, True) for heads in FP8_HEADS]


@pytest.fixture(scope="module")
def kernel():
    from jetrl.kernels.attention import decode as walk

    return walk


def quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[pages, page, G, H] -> codes, powers of two [pages, page, G], and the BF16 values that they stand for."""
    amax = x.float().abs().amax(-1).clamp_min(1e-12)
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
    codes = (x.float() / scale[..., None]).to(torch.float8_e4m3fn)
    return codes, scale.to(torch.bfloat16), (codes.float() * scale[..., None]).to(torch.bfloat16)


class Pages:
    """Random pages in random order; rows that no sequence owns are NaN for the kernel, zero for FlashAttention-4."""

    def __init__(
        self, g: int, h: int, page: int, fp8: bool, seed: int = 0, lengths: list[int] = LENGTHS,
        groups: list[tuple[list[int], int]] | None = None,
    ) -> None:
        """`groups`: (members, how many of their first pages are the same)."""
        gen = torch.Generator(CUDA).manual_seed(seed + g + h + page)
        blocks = -(-max(lengths) // page)
        shape = (len(lengths) * blocks, page, g, h)
        # heads of very different size: a power of two of its own for each
        size = torch.exp2(torch.randint(-12, 8, (2, *shape[:3], 1), generator=gen, device=CUDA).float())
        size = size if fp8 else size.clamp(1, 1)
        k, v = torch.randn((2, *shape), generator=gen, device=CUDA).mul_(size).to(torch.bfloat16)
        k[::7, ::5, :, ::3] = 0.0
        v[3::11, 2::5] = 0.0
        self.table = torch.randperm(shape[0], generator=gen, device=CUDA).view(len(lengths), blocks).to(torch.int32)
        for members, count in groups or []:
            self.table[members, :count] = self.table[members[0], :count].clone()
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=CUDA)
        place = torch.arange(blocks * page, device=CUDA).view(1, blocks, page)
        owned = torch.zeros(shape[:2], dtype=torch.bool, device=CUDA)
        for row, length in zip(self.table.long(), lengths, strict=True):  # shared pages have several owners
            owned[row] |= place[0] < length
        stale = ~owned[..., None, None].expand(shape)
        nan = float("nan")
        if fp8:
            (kc, ks, k), (vc, vs, v) = quantize(k), quantize(v)
            for codes in (kc, vc):
                codes.view(torch.uint8).masked_fill_(stale, 0x7F)
            scales = torch.stack((ks, vs), -1).masked_fill_(stale[..., :1], nan).transpose(1, 2).contiguous()
            self.cache = LayerCache(kc, vc, scales)
        else:
            self.cache = LayerCache(k.masked_fill(stale, nan), v.masked_fill(stale, nan))
        self.keys, self.values = k.masked_fill(stale, 0.0), v.masked_fill(stale, 0.0)
        self.generator = gen

    def queries(self, n: int, spread: float) -> Tensor:
        shape = (len(self.lengths), n, self.keys.shape[3])
        return (spread * torch.randn(shape, generator=self.generator, device=CUDA)).to(torch.bfloat16)

    def flash_attention(self, q: Tensor) -> Tensor:
        from flash_attn.cute.interface import _flash_attn_fwd

        starts = torch.arange(len(self.lengths) + 1, dtype=torch.int32, device=CUDA)
        return _flash_attn_fwd(
            q, self.keys, self.values, cu_seqlens_q=starts, seqused_k=self.lengths, max_seqlen_q=1,
            page_table=self.table, softmax_scale=q.shape[2] ** -0.5, causal=True, num_splits=1,
        )[0]


@pytest.mark.parametrize(("n", "g", "h", "fp8"), CASES)
@pytest.mark.parametrize("page", [128, 256])
@pytest.mark.parametrize("spread", [0.02, 1.0, 6.0])
def test_the_bits_are_flash_attentions(kernel, n: int, g: int, h: int, fp8: bool, page: int, spread: float) -> None:
    """Small, usual and large scores: nearly equal weights, and weights that underflow."""
    pages = Pages(g, h, page, fp8)
    q = pages.queries(n, spread)
    want = pages.flash_attention(q)
    assert kernel.serves(pages.cache, n)
    got = kernel.decode(q, pages.cache, pages.table, pages.lengths, h**-0.5)
    # where all keys of any weight have a value of zero: codes times weights below FP32's normal numbers
    different = (got != want) & ((want.abs() >= NOTHING) | (not fp8) | (got.abs() >= NOTHING))
    different = torch.nonzero(different.flatten(1).any(1)).flatten().tolist()
    assert not different, f"lengths {[LENGTHS[i] for i in different]}"
    if h == 128:
        from jetrl.kernels.quantize.triton import quantize_act

        for pow2 in (False, True):
            one = kernel.decode_quantize(q, pages.cache, pages.table, pages.lengths, h**-0.5, pow2)
            two = quantize_act(got.flatten(1), pow2)
            assert torch.equal(one.codes.view(torch.uint8), two.codes.view(torch.uint8))
            assert torch.equal(one.scale, two.scale)
            assert (one.row_sections, one.col_sections) == (two.row_sections, two.col_sections)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_sequence_does_not_depend_on_its_batch(kernel, fp8: bool) -> None:
    pages = Pages(8, 128, 128, fp8)
    q = pages.queries(32, 1.0)
    together = kernel.decode(q, pages.cache, pages.table, pages.lengths, 128**-0.5)
    for i in (0, 6, 19):
        one = slice(i, i + 1)
        alone = kernel.decode(q[one], pages.cache, pages.table[one], pages.lengths[one], 128**-0.5)
        assert torch.equal(alone, together[one]), f"length {LENGTHS[i]}"


def test_what_is_not_served_is_said(kernel) -> None:
    def cache(page: int, g: int, h: int, fp8: bool) -> LayerCache:
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        keys, values = torch.empty(2, 1, page, g, h, device=CUDA).to(dtype)
        scales = torch.empty(1, g, page, 2, dtype=torch.bfloat16, device=CUDA) if fp8 else None
        return LayerCache(keys, values, scales)

    assert kernel.serves(cache(128, 2, 64, False), 32)
    assert not kernel.serves(cache(128, 1, 64, False), 32)  # too many queries a key head
    assert not kernel.serves(cache(64, 2, 64, False), 4)
    assert not kernel.serves(cache(128, 2, 32, False), 4)
    assert kernel.serves(cache(128, 2, 64, True), 4)
    assert not kernel.serves(cache(128, 2, 96, True), 4)


# ---- keys in parallel -----------------------------------------------------------------------------------------------

SHAPES = [(16, 5), (32, 5), (32, 3), (64, 2)]


@pytest.fixture(scope="module")
def split():
    from jetrl.kernels.attention import decode_split

    return decode_split


@pytest.mark.parametrize(("n", "g", "h", "fp8"), CASES)
@pytest.mark.parametrize("spread", [0.02, 1.0, 6.0])
def test_split_keys_give_the_bits_of_the_walk(kernel, split, n: int, g: int, h: int, fp8: bool, spread: float) -> None:
    for page in (128, 256) if spread == 1.0 else (128,):
        pages = Pages(g, h, page, fp8)
        arguments = (pages.queries(n, spread), pages.cache, pages.table, pages.lengths, h**-0.5)
        want = kernel.decode(*arguments)
        for shape in SHAPES:
            got = split.decode(*arguments, shape=split.Shape(*shape))
            different = torch.nonzero((got != want).flatten(1).any(1)).flatten().tolist()
            assert not different, f"{shape}, lengths {[LENGTHS[i] for i in different]}"
        if h == 128:
            one, two = split.decode_quantize(*arguments, True), kernel.decode_quantize(*arguments, True)
            assert torch.equal(one.codes.view(torch.uint8), two.codes.view(torch.uint8))
            assert torch.equal(one.scale, two.scale)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_split_keys_at_ten_and_thirty_two_thousand(kernel, split, fp8: bool, seed: int) -> None:
    pages = Pages(8, 128, 128, fp8, seed, [10_000 + seed, 32_768 - seed])
    q = pages.queries(32, (0.02, 1.0, 4.0)[seed])
    arguments = (q, pages.cache, pages.table, pages.lengths, 128**-0.5)
    want = kernel.decode(*arguments)
    for shape in SHAPES:
        assert torch.equal(split.decode(*arguments, shape=split.Shape(*shape)), want), shape
    theirs = pages.flash_attention(q)
    same = (want == theirs) | ((want.abs() < NOTHING) & (theirs.abs() < NOTHING) & fp8)
    assert bool(same.all()), f"{int((~same).sum())} of {want.numel()} differ from FlashAttention-4"


@pytest.mark.parametrize("fp8", [False, True])
def test_a_graph_serves_lengths_that_grow(kernel, split, fp8: bool) -> None:
    pages = Pages(8, 128, 128, fp8, 0, [3000, 1100, 2048])
    q, lengths = pages.queries(32, 1.0), pages.lengths.clone()
    lengths[:] = torch.tensor([130, 1, 1900], device=CUDA)
    split.decode(q, pages.cache, pages.table, lengths, 128**-0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [split.decode(q, pages.cache, pages.table, lengths, 128**-0.5) for _ in range(3)]
    for now in ([130, 1, 1900], [128, 1024, 2048], [3000, 1100, 1], [2999, 129, 257]):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        want = kernel.decode(q, pages.cache, pages.table, lengths, 128**-0.5)
        for _ in range(3):
            graph.replay()
            assert all(torch.equal(x, want) for x in got), f"lengths {now}"


# ---- shared pages ---------------------------------------------------------------------------------------------------

SHARED = [
    ([1500, 1281, 1290, 2000, 400, 3000, 129, 1400, 700], [([0, 1, 2, 3, 7], 10), ([4, 8], 2)]),
    ([520 + 13 * i for i in range(20)], [(list(range(20)), 4)]),
    ([257 + i for i in range(40)], [(list(range(0, 40, 2)), 2), (list(range(1, 40, 2)), 1)]),
    ([4097 + 100 * i for i in range(8)], [(list(range(8)), 32)]),
]


@pytest.mark.parametrize(("n", "g", "h", "fp8"), CASES)
@pytest.mark.parametrize("which", range(len(SHARED)))
def test_shared_pages_are_read_once_and_change_no_bit(kernel, n: int, g: int, h: int, fp8: bool, which: int) -> None:
    from jetrl.kernels.attention import choice
    from jetrl.kernels.quantize.triton import quantize_act

    lengths, groups = SHARED[which]
    pages = Pages(g, h, 128, fp8, which, lengths, groups)
    found = find_sharing(pages.table.cpu().numpy(), np.array(lengths) - 1, 128, chunk_size(n // g))
    assert found.saved
    for rows in (len(lengths), len(lengths) + 5):  # chunks behind the last are padding
        shared = SharedPages(*(torch.from_numpy(x).to(CUDA) for x in found.padded(rows, rows // 2)))
        shared = SharedPages(shared.first[: len(lengths)], shared.members, shared.tiles)
        for spread in (0.02, 1.0, 6.0):
            q = pages.queries(n, spread)
            want = kernel.decode(q, pages.cache, pages.table, pages.lengths, h**-0.5)
            arguments = (q, pages.cache, pages.table, pages.lengths, shared, h**-0.5)
            got = torch.full_like(q, float("nan"))
            choice.merged(*arguments, got, None, False)
            different = torch.nonzero((got != want).flatten(1).any(1)).flatten().tolist()
            assert not different, f"sequences {different} of {len(lengths)}, spread {spread}"
            if h == 128:
                quantized = quantize_act(want.flatten(1), True)
                blank = quantize_act(torch.zeros_like(want).flatten(1), True)
                choice.merged(*arguments, q, blank, True)
                assert torch.equal(blank.codes.view(torch.uint8), quantized.codes.view(torch.uint8))
                assert torch.equal(blank.scale, quantized.scale)
