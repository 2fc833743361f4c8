"""What the ops of a rollout on Hopper require of their inputs, asserted around the CPU's ops.

Kernels there take an address and one or two strides. What they are handed must be contiguous, of one dtype, and within
the tensors that it indexes; the CPU's ops take any view, and count negative indices from the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jetrl.engine.sampler import SamplingTable, sample_rows
from jetrl.kernels.dispatch import load_backend
from jetrl.kernels.logprob import ops as logprob
from jetrl.model.transformer import Transformer
from jetrl.types import LayerCache, PagedPlan


def flat(x: Tensor, dtype: torch.dtype, size: int, least: int, most: int) -> None:
    """One number a row, indexed from the first address."""
    assert x.dtype == dtype and x.shape == (size,) and x.is_contiguous(), (x.dtype, x.shape, x.stride())
    assert not size or (least <= int(x.min()) and int(x.max()) <= most), (x.tolist(), least, most)


def check_cache(cache: LayerCache) -> None:
    assert all(x is None or x.is_contiguous() for x in (cache.keys, cache.values, cache.scales))


def check_plan(q: Tensor, plan: PagedPlan, layer: int) -> None:
    """Attention over pages: `flash.attend_cached`, `decode.py` and `decode_drafts.py` of `kernels/attention/`."""
    cache, (batch, width) = plan.cache.layer(layer), plan.block_table.shape
    check_cache(cache)
    pages, page = cache.keys.shape[:2]
    assert q.is_contiguous() and q.shape[0] == sum(plan.query_lengths)
    assert plan.block_table.dtype == torch.int32 and plan.block_table.stride(1) == 1
    flat(plan.kv_lengths, torch.int32, batch, 1, width * page)
    flat(plan.cu_seqlens, torch.int32, batch + 1, 0, q.shape[0])
    lengths = plan.kv_lengths.tolist()
    assert all(n >= j for n, j in zip(lengths, plan.query_lengths, strict=True)), "fewer keys than queries"
    for row, length in zip(plan.block_table, lengths, strict=True):
        read = row[: -(-length // page)]
        assert 0 <= int(read.min()) and int(read.max()) < pages


def check_qkv(
    qkv: Tensor, heads: tuple[int, int], head_dim: int, norms: Any, eps: float, tables: tuple[Tensor, Tensor],
    positions: Tensor, cache: tuple[LayerCache, Tensor] | None, fp8_kv: bool,
) -> None:
    """`kernels.attention.heads.qkv_norm_rope`: it reads positions and slots by row number."""
    assert qkv.stride(-1) == 1 and all(x.is_contiguous() for x in tables)
    flat(positions, torch.int64, len(qkv), 0, len(tables[0]) - 1)
    if cache is not None:
        layer, slots = cache
        check_cache(layer)
        flat(slots, torch.int64, len(qkv), -1, layer.keys.shape[0] * layer.keys.shape[1] - 1)
        written = slots[slots >= 0]
        assert len(written) == len(written.unique()), "two rows write one slot"


def draw(logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.logprob.triton.sample` by the host's sampler."""
    rows = len(logits)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert temperature.dtype == torch.float32 and temperature.shape == (rows,) and temperature.is_contiguous()
    flat(keys, torch.int64, rows, -(1 << 63), (1 << 63) - 1)
    flat(positions, torch.int64, rows, 1, (1 << 63) - 1)
    ones, zeros = np.ones(rows), np.zeros(rows)
    table = SamplingTable(temperature.numpy(), ones, zeros.astype(int), zeros, zeros > 0, keys.numpy().view(np.uint64))
    return *sample_rows(logits, table, positions.numpy()), logits.amax(-1)


def require(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """From now on the ops of rollouts, look-up of tokens and draw check their inputs; returns how often each ran."""
    backend, calls = load_backend("reference"), Counter[str]()

    def wrap(owner: Any, name: str, check: Callable[..., None]) -> None:
        op = getattr(owner, name)

        def checked(*args: Any) -> Any:
            calls[name] += 1
            check(*args)
            return op(*args)

        monkeypatch.setattr(owner, name, checked)

    def check_tokens(model: Transformer, batch: Any) -> None:
        flat(batch.tokens, torch.int64, len(batch.tokens), 0, model.spec.vocab_size - 1)

    wrap(Transformer, "forward", check_tokens)
    wrap(backend, "qkv_norm_rope", check_qkv)
    wrap(backend, "attend_cached", lambda q, plan, layer, scale: check_plan(q, plan, layer))
    wrap(backend, "attend_cached_quantize", lambda q, plan, layer, scale, pow2: check_plan(q, plan, layer))

    def drawn(*args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        calls["draw"] += 1
        return draw(*args)

    monkeypatch.setattr(backend, "sample", drawn, raising=False)  # the CPU draws with `sample_rows`
    assert logprob.backend_of(torch.zeros(1)) is backend
    return calls
