"""FlashAttention-4 adapter: values against the definition; alone = packed = prefill chunks = decode, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from jetrl.kernels.attention import reference as ref
from jetrl.kernels.attention.cache import write_cache
from jetrl.kernels.attention.ops import varlen_plan
from jetrl.kernels.dispatch import load_backend
from jetrl.types import LayerCache, PagedPlan, VarlenPlan

pytestmark = pytest.mark.gpu
CUDA = "cuda"
HEADS = [(9, 3, 64), (32, 8, 128), (16, 8, 128), (4, 4, 64), (14, 2, 64), (8, 1, 32)]


@pytest.fixture(scope="module")
def ops():
    return load_backend("hopper")


class Cache:
    def __init__(self, pages: int, page: int, g: int, h: int, fp8: bool = False) -> None:
        # stale pages hold large finite numbers: a mask must hide them
        self.keys = torch.full((pages, page, g, h), 1e4, dtype=torch.bfloat16, device=CUDA)
        self.values = torch.full((pages, page, g, h), -1e4, dtype=torch.bfloat16, device=CUDA)
        self.scales: Tensor | None = None
        if fp8:
            self.keys, self.values = (x.clamp(-448, 448).to(torch.float8_e4m3fn) for x in (self.keys, self.values))
            self.scales = torch.full((pages, g, page, 2), 2.0**5, dtype=torch.bfloat16, device=CUDA)

    def layer(self, index: int) -> LayerCache:
        return LayerCache(self.keys, self.values, self.scales)


def varlen(lengths: tuple[int, ...], device: str = CUDA) -> VarlenPlan:
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return VarlenPlan(cu, lengths)


def paged(cache: Cache, tables: Tensor, starts: list[int], counts: list[int]) -> PagedPlan:
    """New tokens `starts[b] .. starts[b] + counts[b]` of each sequence; `tables` [B, M] on the CPU."""
    page = cache.keys.shape[1]
    slots = [
        int(tables[b, p // page]) * page + p % page
        for b, (s, c) in enumerate(zip(starts, counts, strict=True))
        for p in range(s, s + c)
    ]
    kv = [s + c for s, c in zip(starts, counts, strict=True)]
    cu = [0, *torch.tensor(counts).cumsum(0).tolist()]
    return PagedPlan(
        cache=cache, cu_seqlens=torch.tensor(cu, dtype=torch.int32, device=CUDA), query_lengths=tuple(counts),
        kv_lengths=torch.tensor(kv, dtype=torch.int32, device=CUDA),
        kv_pages=tuple(-(-n // page) for n in kv), block_table=tables.to(torch.int32).to(CUDA),
        slots=torch.tensor(slots, dtype=torch.int64, device=CUDA),
    )


def make(lengths: tuple[int, ...], n: int, g: int, h: int) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(sum(lengths))
    t = sum(lengths)
    return tuple(torch.randn(t, heads, h, generator=gen).to(torch.bfloat16) for heads in (n, g, g))


@pytest.mark.parametrize(("n", "g", "h"), HEADS)
def test_values_match_the_definition(ops, n: int, g: int, h: int) -> None:
    lengths = (1, 70, 200, 129)
    q, k, v = make(lengths, n, g, h)
    want = ref.attend(q, k, v, varlen(lengths, "cpu"), 0, h**-0.5).double()
    got = ops.attend(*(x.to(CUDA) for x in (q, k, v)), varlen(lengths), 0, h**-0.5).cpu().double()
    assert ((got - want).norm() / want.norm()).item() < 4e-3


@pytest.mark.parametrize(("n", "g", "h"), HEADS)
@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_alone_packed_chunked_and_decoded_are_the_same_bits(
    ops, n: int, g: int, h: int, page: int, fp8: bool
) -> None:
    lengths = (1, 333, 130, 700, 17)
    q, k, v = (x.to(CUDA) for x in make(lengths, n, g, h))
    scale = h**-0.5
    written = (k, v)  # to the cache, which rounds them where it is FP8
    k, v = (ops.round_heads(x) for x in written) if fp8 else written
    packed = ops.attend(q, k, v, varlen(lengths), 0, scale)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for b, length in enumerate(lengths):
        part = slice(starts[b], starts[b] + length)
        alone = ops.attend(q[part], k[part], v[part], varlen((length,)), 0, scale)
        assert torch.equal(alone, packed[part]), f"sequence {b} alone"
    blocks = -(-max(lengths) // page)
    order = torch.randperm(len(lengths) * blocks, generator=torch.Generator().manual_seed(0))
    tables, cache = order.view(len(lengths), blocks), Cache(len(lengths) * blocks, page, g, h, fp8)
    done = [0] * len(lengths)
    chunk_sizes = [64, 1, 1, 1, 127, 5, 256, 1000]
    step = 0
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        # sequences of different progress share each call; those at their end stay out
        members = [b for b in range(len(lengths)) if done[b] < lengths[b]]
        counts = [min(chunk_sizes[(step + b) % len(chunk_sizes)], lengths[b] - done[b]) for b in members]
        begins = [done[b] for b in members]
        rows = torch.cat([
            torch.arange(starts[b] + s, starts[b] + s + c) for b, s, c in zip(members, begins, counts, strict=True)
        ]).to(CUDA)
        plan = paged(cache, tables[members], begins, counts)
        out = ops.attend(q[rows], written[0][rows], written[1][rows], plan, 0, scale)
        different = torch.nonzero((out != packed[rows]).flatten(1).any(1)).flatten().tolist()
        assert not different, f"step {step}: rows {rows[different].tolist()[:5]}, sequences {members}, counts {counts}"
        for b, c in zip(members, counts, strict=True):
            done[b] += c
        step += 1


@pytest.mark.parametrize(("n", "g", "h"), [(9, 3, 64), (32, 8, 128)])
@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_decode_at_every_position_equals_prefill(ops, n: int, g: int, h: int, page: int, fp8: bool) -> None:
    """All positions of one sequence decoded in one batch: entry p is the sequence's first p + 1 tokens.

    All share their pages, and together they name more pages than the cache has: FP8 pages go to their own places.
    """
    length = 600
    q, k, v = (x.to(CUDA) for x in make((length,), n, g, h))
    rounded = (ops.round_heads(k), ops.round_heads(v)) if fp8 else (k, v)
    whole = ops.attend(q, *rounded, varlen((length,)), 0, h**-0.5)
    blocks = -(-length // page)
    table, cache = torch.arange(blocks)[None], Cache(blocks, page, g, h, fp8)
    ops.attend(q, k, v, paged(cache, table, [0], [length]), 0, h**-0.5)
    plan = paged(cache, table.expand(length, -1).contiguous(), list(range(length)), [1] * length)
    assert torch.equal(ops.attend(q, k, v, plan, 0, h**-0.5), whole)


@pytest.mark.parametrize(("n", "g", "h"), [(9, 3, 64), (32, 8, 128), (8, 1, 32)])
@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("spare", [0, 50], ids=["pages in place", "pages side by side"])
def test_an_fp8_cache_is_a_bf16_cache_of_rounded_heads(ops, n: int, g: int, h: int, page: int, spare: int) -> None:
    """FlashAttention-4 over dequantized pages: chunks of queries at the ends of sequences of several lengths."""
    lengths, counts = (129, 1, 300, 40), (70, 1, 5, 40)
    q, k, v = (x.to(CUDA) for x in make(lengths, n, g, h))
    rounded_k, rounded_v = ops.round_heads(k), ops.round_heads(v)
    want = ops.attend(q, rounded_k, rounded_v, varlen(lengths), 0, h**-0.5)
    blocks = -(-max(lengths) // page)
    tables = torch.randperm(4 * blocks + spare, generator=torch.Generator().manual_seed(0))[: 4 * blocks].view(4, -1)
    outs = []
    for fp8 in (False, True):
        cache = Cache(4 * blocks + spare, page, g, h, fp8)
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        whole = paged(cache, tables, [0] * 4, list(lengths))
        if fp8:
            write_cache(k, v, whole.slots, cache.layer(0))
        else:
            write_cache(rounded_k, rounded_v, whole.slots, cache.layer(0))
        rows = torch.cat([torch.arange(starts[b + 1] - counts[b], starts[b + 1]) for b in range(4)]).to(CUDA)
        plan = paged(cache, tables, [m - c for m, c in zip(lengths, counts, strict=True)], list(counts))
        if spare == 0:
            plan = replace(plan, kv_pages=(blocks,) * 4)
        outs.append(ops.attend_cached(q[rows], plan, 0, h**-0.5))
        assert torch.equal(outs[-1], want[rows]), "FP8" if fp8 else "BF16"
        for pow2 in (False, True):
            got = ops.attend_cached_quantize(q[rows], plan, 0, h**-0.5, pow2)
            wanted = ops.quantize_act(want[rows].flatten(1), pow2)
            assert torch.equal(got.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
            assert torch.equal(got.scale, wanted.scale)


@pytest.mark.parametrize("spare", [0, 50], ids=["pages in place", "pages side by side"])
def test_nan_behind_the_keys_of_fp8_pages_reaches_nobody(ops, spare: int) -> None:
    """Stale NaN in whole pages; side by side, in the ends of pages too (in place that is as in a BF16 cache)."""
    n, g, h, page = 9, 3, 64, 16
    lengths = (33, 7, 20, 64)
    q, k, v = (x.to(CUDA) for x in make(lengths, n, g, h))
    tables = torch.arange(16 + spare).flip(0)[:16].view(4, 4)
    caches = [Cache(16 + spare, page, g, h, True) for _ in range(2)]
    assert caches[1].scales is not None
    if spare:
        caches[1].scales.fill_(float("nan"))
    else:
        for b, length in enumerate(lengths):
            caches[1].scales[tables[b, -(-length // page) :].to(CUDA)] = float("nan")
    outs = []
    for cache in caches:
        plan = paged(cache, tables, [0] * 4, list(lengths))
        plan = plan if spare else replace(plan, kv_pages=(16,) * len(plan.kv_pages))
        outs.append(ops.attend(q, k, v, plan, 0, h**-0.5))
    assert outs[0].isfinite().all() and torch.equal(outs[0], outs[1])


def test_a_padding_row_writes_nothing(ops) -> None:
    q, k, v = (x.to(CUDA) for x in make((3,), 4, 2, 64))
    cache = Cache(4, 16, 2, 64)
    plan = paged(cache, torch.tensor([[0], [1], [2]]), [0, 0, 0], [1, 1, 1])
    before = cache.keys.clone()
    plan.slots[1] = -1
    ops.attend(q, k, v, plan, 0, 0.125)
    changed = torch.nonzero((cache.keys != before).flatten(2).any(2)).tolist()
    assert changed == [[0, 0], [2, 0]]


@pytest.mark.parametrize(("n", "g", "h"), [(9, 3, 64), (32, 8, 128), (4, 4, 64)])
def test_gradients_match_and_repeat(ops, n: int, g: int, h: int) -> None:
    lengths = (5, 200, 131)
    q, k, v = make(lengths, n, g, h)
    grad = make(lengths, n, g, h)[0].flip(0)
    want = ref.attend_backward(grad, q, k, v, varlen(lengths, "cpu"), h**-0.5)
    on = [x.to(CUDA) for x in (grad, q, k, v)]
    got = ops.attend_backward(*on, varlen(lengths), h**-0.5)
    for name, a, b in zip("qkv", got, want, strict=True):
        error = ((a.cpu().double() - b.double()).norm() / b.double().norm()).item()
        assert error < 1e-2, f"d{name}: {error}"
    out, lse = ops.attend_varlen(*on[1:], varlen(lengths), h**-0.5, True)
    assert torch.equal(out, ops.attend(*on[1:], varlen(lengths), 0, h**-0.5)), "asking for the log-sum-exp changes bits"
    again = ops.attend_backward(*on, varlen(lengths), h**-0.5, out, lse)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


# (stem, its samples' own rows) of each family; without a stem, a whole sequence
SHORT = ((64, (20, 130, 1)), (129, (257, 64)), (0, (77,)))
FAMILIES = [SHORT, ((511, (300, 1025, 7, 64)), (0, (1,)), (1000, (778, 5)))]


def shared(families: tuple, device: str = CUDA) -> tuple[VarlenPlan, Tensor, VarlenPlan]:
    """The plan with shared prompts; which of its rows make the packed whole sequences; the plan of these."""
    lengths, stems, rows, whole, start = [], [], [], [], 0
    for stem, samples in families:
        place, prompt = len(lengths), list(range(start, start + stem))
        if stem:
            lengths.append(stem), stems.append(-1)
        start += stem
        for own in samples:
            lengths.append(own), stems.append(place if stem else -1), whole.append(stem + own)
            rows += prompt + list(range(start, start + own))
            start += own
    cu = varlen(tuple(lengths), device).cu_seqlens
    plan = varlen_plan(cu, tuple(lengths), tuple(stems))
    return plan, torch.tensor(rows, device=device), varlen(tuple(whole), device)


@pytest.mark.parametrize(("n", "g", "h"), HEADS)
@pytest.mark.parametrize("families", FAMILIES, ids=["short", "long"])
def test_shared_prompts_equal_packed_whole_sequences(ops, n: int, g: int, h: int, families: tuple) -> None:
    plan, rows, packed = shared(families)
    assert plan.keys is not None and plan.keys.rows.is_cuda
    q, k, v = (x.to(CUDA) for x in make(plan.lengths, n, g, h))
    want, lse = ops.attend_varlen(q[rows], k[rows], v[rows], packed, h**-0.5, True)
    got, own_lse = ops.attend_varlen(q, k, v, plan, h**-0.5, True)
    assert torch.equal(got[rows], want) and torch.equal(own_lse[:, rows], lse)
    assert torch.equal(ops.attend(q, k, v, plan, 0, h**-0.5), got), "asking for the log-sum-exp changes bits"


@pytest.mark.parametrize(("n", "g", "h"), [(9, 3, 64), (32, 8, 128), (4, 4, 64)])
@pytest.mark.parametrize("families", FAMILIES, ids=["short", "long"])
def test_gradients_of_shared_prompts(ops, n: int, g: int, h: int, families: tuple) -> None:
    """By the definition, the same bits again, and dq with the bits of packed whole sequences."""
    (plan, rows, packed), host = shared(families), shared(families, "cpu")[0]
    q, k, v = make(plan.lengths, n, g, h)
    grad = make(plan.lengths, n, g, h)[0].flip(0)
    want = ref.attend_backward(grad, q, k, v, host, h**-0.5)
    on = [x.to(CUDA) for x in (grad, q, k, v)]
    got = ops.attend_backward(*on, plan, h**-0.5)
    for name, a, b in zip("qkv", got, want, strict=True):
        error = ((a.cpu().double() - b.double()).norm() / b.double().norm()).item()
        assert a.dtype == b.dtype and error < 1e-2, f"d{name}: {error}"
    again = ops.attend_backward(*on, plan, h**-0.5, *ops.attend_varlen(*on[1:], plan, h**-0.5, True))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    whole = ops.attend_backward(*(x[rows].contiguous() for x in on), packed, h**-0.5)
    assert torch.equal(got[0][rows], whole[0])


def test_a_broken_sequence_leaves_its_neighbours_alone(ops) -> None:
    """NaN among the values of one sequence: the same bits for all others, NaN for itself."""
    n, g, h, page = 32, 8, 128, 128
    q, k, v = (x.to(CUDA) for x in make((6,), n, g, h))
    cache = Cache(6, page, g, h)
    tables = torch.arange(6)[:, None]
    plan = paged(cache, tables, [40] * 6, [1] * 6)
    cache.keys.normal_(), cache.values.normal_()
    clean = ops.attend(q, k, v, plan, 0, h**-0.5)
    cache.values[2] = float("nan")
    broken = ops.attend(q, k, v, plan, 0, h**-0.5)
    assert broken[2].isnan().any()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(broken[rest], clean[rest])


def test_nothing_behind_the_last_key_is_read(ops) -> None:
    n, g, h, page = 32, 8, 128, 128
    q, k, v = (x.to(CUDA) for x in make((5,), n, g, h))
    cache = Cache(10, page, g, h)
    tables, starts = torch.randperm(10, generator=torch.Generator().manual_seed(1)).view(5, 2), [0, 40, 127, 128, 200]
    cache.keys.normal_(), cache.values.normal_()
    clean = ops.attend(q, k, v, paged(cache, tables, starts, [1] * 5), 0, h**-0.5)
    for b, start in enumerate(starts):
        for block in range(2):
            behind = max(0, start + 1 - block * page)
            cache.keys[tables[b, block], behind:] = float("nan")
            cache.values[tables[b, block], behind:] = float("nan")
    assert torch.equal(ops.attend(q, k, v, paged(cache, tables, starts, [1] * 5), 0, h**-0.5), clean)
