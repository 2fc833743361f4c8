"""`StatePool`: the tensors with what sequences keep of all layers between two passes, and how many pages fit in memory.

What there is, the blocks declare (`precision.blocks.states`). Rows of tokens are in pages; the keys and values of
attention are their first case. States of sequences are in rows of their own (`engine.rows`).
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from jetrl.precision.blocks.attention import KEYS, VALUES
from jetrl.precision.blocks.latent import LATENT
from jetrl.precision.blocks.layouts import states_of
from jetrl.precision.blocks.states import PerSequence, PerToken
from jetrl.precision.formats import BF16, FP32, Format, kv_head
from jetrl.spec import ModelSpec
from jetrl.types import LayerCache

MEMORY_SHARE = 0.8  # of the available memory, if the user sets no cache size


class StatePool:
    """Of each state that is declared one tensor for all layers that have it: [layers, pages, page_size, *shape] for
    tokens, [layers, rows, *shape] for sequences.

    `format` is the recipe's for keys and values. Plain: they are stored in the model's `dtype`. `kv_head`: they are
    E4M3 codes with `scales` [layers, pages, kv_heads, page_size, 2] (of the key, of the value) in BF16.
    """

    def __init__(
        self, spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device,
        format: Format = BF16, num_rows: int = 0, drafts: bool = False,
    ) -> None:
        assert format in (BF16, kv_head(spec.head_dim)), f"no kernels for a KV cache in {format}"
        self.num_pages, self.page_size, self.num_rows, self.device = num_pages, page_size, num_rows, device
        self._tensors: dict[tuple[str, PerToken | PerSequence], Tensor] = {}
        self._places: dict[tuple[int, str], tuple[Tensor, int]] = {}  # tensor of the state, and where the layer is
        self.scales: Tensor | None = None
        for (name, state), layers in _by_state(spec, format, drafts).items():
            space = (num_pages, page_size) if isinstance(state, PerToken) else (num_rows,)
            # zeros, not empty: attention may read a page's unwritten end under a mask, and NaN would pass through it
            tensor = torch.zeros((len(layers), *space, *state.shape), dtype=_dtype(state.format, dtype), device=device)
            self._tensors[name, state] = tensor
            self._places |= {(layer, name): (tensor, place) for place, layer in enumerate(layers)}
            if name == KEYS and state.format.is_quantized:
                shape = (len(layers), num_pages, state.shape[0], page_size, 2)
                self.scales = torch.zeros(shape, dtype=torch.bfloat16, device=device)

    @property
    def num_bytes(self) -> int:
        tensors = [*self._tensors.values(), *([] if self.scales is None else [self.scales])]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def key_bytes(self) -> int:
        """What attention of a layer reads of a token: its key and value, or its latent; without scales."""
        read = {
            name: math.prod(state.shape) * tensor.element_size() for (name, state), tensor in self._tensors.items()
            if name in (KEYS, VALUES, LATENT)
        }
        return sum(read.values())

    @property
    def keys(self) -> Tensor:
        """Of all layers with attention."""
        return next(tensor for (name, _), tensor in self._tensors.items() if name == KEYS)

    @property
    def values(self) -> Tensor:
        """Of all layers with attention."""
        return next(tensor for (name, _), tensor in self._tensors.items() if name == VALUES)

    def layer(self, index: int) -> LayerCache:
        """Views of the keys and values of a layer with attention."""
        place = self._places[index, KEYS][1]
        scales = None if self.scales is None else self.scales[place]
        return LayerCache(self.state(index, KEYS), self.state(index, VALUES), scales)

    def state(self, layer: int, name: str) -> Tensor:
        """A view of what a block of the layer declares by this name."""
        tensor, place = self._places[layer, name]
        return tensor[place]

    def copy_pages(self, copies: Tensor) -> None:
        """Copy page `copies[c, 0]` to page `copies[c, 1]`, with scales; all are read before any is written."""
        source, target = copies.unbind(1)
        paged = [tensor for (_, state), tensor in self._tensors.items() if isinstance(state, PerToken)]
        for tensor in (*paged, *(() if self.scales is None else (self.scales,))):
            plain = tensor.view(_words(tensor))  # torch cannot index E4M3, and copies element by element
            plain[:, target] = plain[:, source]


def _by_state(spec: ModelSpec, format: Format, drafts: bool) -> dict[tuple[str, PerToken | PerSequence], list[int]]:
    """The layers that keep each state."""
    found: dict[tuple[str, PerToken | PerSequence], list[int]] = {}
    for (layer, name), state in states_of(spec, format, drafts).items():
        found.setdefault((name, state), []).append(layer)
    return found


def _dtype(format: Format, dtype: torch.dtype) -> torch.dtype:
    """How a state is stored; `dtype` is the model's."""
    if format.is_quantized:
        return torch.float8_e4m3fn
    return torch.float32 if format == FP32 else dtype


def _words(x: Tensor) -> torch.dtype:
    """The widest integers that the last dimension of `x` consists of."""
    row = x.shape[-1] * x.element_size()
    return next(t for t in (torch.int64, torch.int32, torch.int16, torch.uint8) if row % t.itemsize == 0)


def page_bytes(spec: ModelSpec, page_size: int, dtype: torch.dtype, format: Format) -> int:
    """Memory of one page of a `StatePool` in all layers, scales included."""
    states = [s for s in states_of(spec, format).values() if isinstance(s, PerToken)]
    return page_size * sum(_state_bytes(state, dtype) for state in states)


def row_bytes(spec: ModelSpec, dtype: torch.dtype, drafts: bool = False) -> int:
    """Memory of one row of a `StatePool` in all layers: the states of a sequence. 0: no layer has any."""
    states = states_of(spec, drafts=drafts).values()
    return sum(_state_bytes(s, dtype) for s in states if isinstance(s, PerSequence))


def _state_bytes(state: PerToken | PerSequence, dtype: torch.dtype) -> int:
    scale = torch.bfloat16.itemsize if state.format.is_quantized else 0  # of each head
    return math.prod(state.shape) * _dtype(state.format, dtype).itemsize + math.prod(state.shape[:-1]) * scale


def dequantized_bytes(spec: ModelSpec, page_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one page in one layer, as attention may dequantize them."""
    return 2 * page_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def grid_of(spec: ModelSpec, drafts: bool = False) -> int:
    """The points to which the states of a sequence can all go back (`PerSequence.grid`), in an engine that makes drafts
    or none; 0: no layer has any."""
    return math.gcd(*(s.grid for s in states_of(spec, drafts=drafts).values() if isinstance(s, PerSequence)))


def pages_in_memory(
    spec: ModelSpec, page_size: int, dtype: torch.dtype, device: torch.device, format: Format = BF16, held: int = 0,
    num_rows: int = 0, drafts: bool = False,
) -> int:
    """Pages that fit in `MEMORY_SHARE` of the memory available now and of `held` bytes, those of a pool before,
    beside `num_rows` rows of an engine that makes drafts or none."""
    if device.type == "cuda":  # torch keeps freed memory, which counts as free
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = page_bytes(spec, page_size, dtype, format)
    if format.is_quantized and device.type == "cuda":  # attention there may dequantize all pages of a layer at a time
        size += dequantized_bytes(spec, page_size, dtype)
    return max(0, int((free + held) * MEMORY_SHARE) - num_rows * row_bytes(spec, dtype, drafts)) // max(1, size)
