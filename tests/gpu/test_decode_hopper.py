"""The decode kernel against FlashAttention-4, bit for bit: BF16 pages, and FP8 pages against what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
    from jetrl.kernels.backends import gluon_attention

    return gluon_attention


def quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[pages, page, G, H] -> codes, powers of two [pages, page, G], and the BF16 values that they stand for."""
    amax = x.float().abs().amax(-1).clamp_min(1e-12)
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
    codes = (x.float() / scale[..., None]).to(torch.float8_e4m3fn)
    return codes, scale.to(torch.bfloat16), (codes.float() * scale[..., None]).to(torch.bfloat16)


class Pages:
    """Random pages in random order; rows that no sequence owns are NaN for the kernel, zero for FlashAttention-4."""

    def __init__(self, g: int, h: int, page: int, fp8: bool, seed: int = 0) -> None:
        gen = torch.Generator(CUDA).manual_seed(seed + g + h + page)
        blocks = -(-max(LENGTHS) // page)
        shape = (len(LENGTHS) * blocks, page, g, h)
        # heads of very different size: a power of two of its own for each
        size = torch.exp2(torch.randint(-12, 8, (2, *shape[:3], 1), generator=gen, device=CUDA).float())
        size = size if fp8 else size.clamp(1, 1)
        k, v = torch.randn((2, *shape), generator=gen, device=CUDA).mul_(size).to(torch.bfloat16)
        k[::7, ::5, :, ::3] = 0.0
        v[3::11, 2::5] = 0.0
        self.table = torch.randperm(shape[0], generator=gen, device=CUDA).view(len(LENGTHS), blocks).to(torch.int32)
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)
        place = torch.arange(blocks * page, device=CUDA).view(1, blocks, page)
        owned = torch.zeros(shape[:2], dtype=torch.bool, device=CUDA)
        owned[self.table.long()] = place < self.lengths[:, None, None]
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
        shape = (len(LENGTHS), n, self.keys.shape[3])
        return (spread * torch.randn(shape, generator=self.generator, device=CUDA)).to(torch.bfloat16)

    def flash_attention(self, q: Tensor) -> Tensor:
        from flash_attn.cute.interface import _flash_attn_fwd

        starts = torch.arange(len(LENGTHS) + 1, dtype=torch.int32, device=CUDA)
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
        from jetrl.kernels.backends.triton_quant import quantize_act

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
