"""`KVCache`: the tensors with the keys and values of all pages, and how many pages fit in memory."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from jetrl.precision.formats import BF16, Format, kv_head
from jetrl.spec import ModelSpec
from jetrl.types import LayerCache

MEMORY_SHARE = 0.8  # of the available memory, if the user sets no cache size


class KVCache:
    """Keys and values of all layers, [layers, pages, page_size, kv_heads, head_dim] each.

    `format` is the recipe's. Plain: they are stored in the model's `dtype`. `kv_head`: they are E4M3 codes with
    `scales` [layers, pages, kv_heads, page_size, 2] (of the key, of the value) in BF16.
    """

    def __init__(
        self, spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device,
        format: Format = BF16,
    ) -> None:
        assert format in (BF16, kv_head(spec.head_dim)), f"no kernels for a KV cache in {format}"
        shape = (spec.num_layers, num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        code = torch.float8_e4m3fn if format.is_quantized else dtype
        # zeros, not empty: attention may read a page's unwritten end under a mask, and NaN would pass through it
        self.keys = torch.zeros(shape, dtype=code, device=device)
        self.values = torch.zeros(shape, dtype=code, device=device)
        self.scales: Tensor | None = None
        if format.is_quantized:
            shape = (spec.num_layers, num_pages, spec.num_kv_heads, page_size, 2)
            self.scales = torch.zeros(shape, dtype=torch.bfloat16, device=device)

    @property
    def num_pages(self) -> int:
        return self.keys.shape[1]

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._tensors())

    def layer(self, index: int) -> LayerCache:
        """Views of one layer's pages."""
        scales = None if self.scales is None else self.scales[index]
        return LayerCache(self.keys[index], self.values[index], scales)

    def copy_pages(self, copies: Tensor) -> None:
        """Copy page `copies[c, 0]` to page `copies[c, 1]`, with scales; all are read before any is written."""
        source, target = copies.unbind(1)
        for cache in self._tensors():
            plain = cache.view(_words(cache))  # torch cannot index E4M3, and copies element by element
            plain[:, target] = plain[:, source]

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.keys, self.values) if self.scales is None else (self.keys, self.values, self.scales)


def _words(x: Tensor) -> torch.dtype:
    """The widest integers that the last dimension of `x` consists of."""
    row = x.shape[-1] * x.element_size()
    return next(t for t in (torch.int64, torch.int32, torch.int16, torch.uint8) if row % t.itemsize == 0)


def page_bytes(spec: ModelSpec, page_size: int, dtype: torch.dtype, format: Format) -> int:
    """Memory of one page of a `KVCache` in all layers, scales included."""
    head = spec.head_dim + torch.bfloat16.itemsize if format.is_quantized else spec.head_dim * dtype.itemsize
    return 2 * spec.num_layers * page_size * spec.num_kv_heads * head


def pages_in_memory(
    spec: ModelSpec, page_size: int, dtype: torch.dtype, device: torch.device, format: Format = BF16, held: int = 0
) -> int:
    """Pages that fit in `MEMORY_SHARE` of the memory available now and of `held` bytes, those of a cache before."""
    if device.type == "cuda":  # torch keeps freed memory, which counts as free
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = page_bytes(spec, page_size, dtype, format)
    if format.is_quantized and device.type == "cuda":  # attention there may dequantize all pages of a layer at a time
        size += page_bytes(spec, page_size, dtype, BF16) // spec.num_layers
    return int((free + held) * MEMORY_SHARE) // size
