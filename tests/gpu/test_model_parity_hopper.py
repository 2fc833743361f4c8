"""The model on a GPU: one sequence alone = packed = paged prefill in chunks = paged decode, log-probs bit for bit.

Also a decode step in a CUDA graph, and gradients that repeat and agree with BF16.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from jetrl.engine.state_pool import StatePool
from jetrl.model.master import accumulate_in
from jetrl.model.transformer import Transformer
from jetrl.precision.formats import kv_head
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec, RopeSpec
from jetrl.types import ForwardBatch, PagedPlan, Side, VarlenPlan

pytestmark = pytest.mark.gpu
CUDA = "cuda"
SPECS = {
    # SmolLM2-135M's sizes, none of which is a multiple of 128 but the feed-forward
    "smollm2": dict(hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, qk_norm=False,
                    qkv_bias=False, family="llama", tie_embeddings=True, vocab_size=49152),
    "qwen3": dict(hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8, head_dim=128, qk_norm=True,
                  qkv_bias=False, family="qwen3", tie_embeddings=False, vocab_size=8000),
    "qwen2": dict(hidden_size=896, intermediate_size=4864, num_heads=14, num_kv_heads=2, head_dim=64, qk_norm=False,
                  qkv_bias=True, family="qwen2", tie_embeddings=True, vocab_size=3001),
}
PRECISIONS = ["bf16", "fp8"]
FLOWS = [*PRECISIONS, "fp8 kv", "w8a16", "w8a16 kv"]  # and with an FP8 cache


def build(name: str, precision: str, layers: int = 3) -> Transformer:
    spec = ModelSpec(
        **SPECS[name], num_layers=layers, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e4), max_position=4096
    )
    recipe = Recipe(precision.removesuffix(" kv"), layers)
    if precision.endswith(" kv"):
        recipe = replace(recipe, kv_cache=kv_head(spec.head_dim))
    model = Transformer(spec, recipe).init_random(3).to(CUDA)
    with torch.no_grad():
        for p_name, p in model.named_parameters():
            if p.ndim == 1:  # norms and biases that do something
                noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p_name))).to(CUDA)
                p.add_(noise * 0.1)
    return model.publish()


def varlen_batch(sequences: list[Tensor], side: Side = "train") -> ForwardBatch:
    lengths = tuple(len(s) for s in sequences)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=CUDA)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(CUDA)
    return ForwardBatch(torch.cat(sequences).to(CUDA), positions, VarlenPlan(cu, lengths), side)


def paged_batch(
    cache: StatePool, table: Tensor, sequences: list[Tensor], members: list[int], starts: list[int], counts: list[int]
) -> ForwardBatch:
    page = cache.keys.shape[2]
    spans = list(zip(members, starts, counts, strict=True))
    positions = torch.cat([torch.arange(s, s + c) for _, s, c in spans])
    owners = torch.cat([torch.full((c,), b) for b, _, c in spans])
    slots = table[owners, positions // page].long() * page + positions % page
    kv = [s + c for s, c in zip(starts, counts, strict=True)]
    cu = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=CUDA)
    plan = PagedPlan(
        cache=cache, cu_seqlens=cu, query_lengths=tuple(counts), slots=slots.to(CUDA),
        kv_pages=tuple(-(-n // page) for n in kv),
        kv_lengths=torch.tensor(kv, dtype=torch.int32, device=CUDA),
        block_table=table[members].to(torch.int32).to(CUDA),
    )
    tokens = torch.cat([sequences[b][s : s + c] for b, s, c in spans])
    return ForwardBatch(tokens.to(CUDA), positions.to(CUDA), plan, "rollout")


def make_sequences(vocab: int, lengths: list[int]) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab, (n,), generator=g) for n in lengths]


def logprobs(model: Transformer, hidden: Tensor, targets: Tensor) -> Tensor:
    return model.token_logprobs(hidden, targets.to(CUDA), 0.8)[0]


@pytest.mark.parametrize("precision", FLOWS)
@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("page", [16, 128])  # decoding takes another kernel from 128 on
def test_alone_packed_chunked_and_decoded_give_the_same_logprobs(name: str, precision: str, page: int) -> None:
    model = build(name, precision)
    sequences = make_sequences(model.spec.vocab_size, [90, 3, 200, 41])
    targets = [s.roll(-1) for s in sequences]
    with torch.no_grad():
        hidden = model(varlen_batch(sequences)).split([len(s) for s in sequences])
        packed = [logprobs(model, h, t) for h, t in zip(hidden, targets, strict=True)]
        assert all(p.isfinite().all() for p in packed) and packed[0].std() > 0
        for b, s in enumerate(sequences):
            alone = logprobs(model, model(varlen_batch([s], "rollout")), targets[b])
            assert torch.equal(alone, packed[b]), f"sequence {b} alone"
        blocks = -(-200 // page)
        format = model.recipe.kv_cache
        cache = StatePool(model.spec, len(sequences) * blocks, page, torch.bfloat16, torch.device(CUDA), format)
        order = torch.randperm(len(sequences) * blocks, generator=torch.Generator().manual_seed(2))
        table, done, step = order.view(len(sequences), blocks), [0] * 4, 0
        while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
            members = [b for b in range(4) if done[b] < len(sequences[b])]
            size = [40, 1, 7, 64][step % 4] if step < 4 else 1
            counts = [min(size if b % 2 else 1, len(sequences[b]) - done[b]) for b in members]
            batch = paged_batch(cache, table, sequences, members, [done[b] for b in members], counts)
            at = 0
            out = model(batch)
            for b, c in zip(members, counts, strict=True):
                span = slice(done[b], done[b] + c)
                got = logprobs(model, out[at : at + c], targets[b][span])
                assert torch.equal(got, packed[b][span]), f"sequence {b}, positions {span}, step {step}"
                done[b], at = done[b] + c, at + c
            step += 1


@pytest.mark.parametrize("name", list(SPECS))
def test_gradients_repeat_and_agree_with_bf16(name: str) -> None:
    results: dict[str, list[dict[str, Tensor]]] = {}
    for precision in PRECISIONS:
        model = build(name, precision)
        sequences = make_sequences(model.spec.vocab_size, [150, 77, 220])
        targets = torch.cat([s.roll(-1) for s in sequences])
        results[precision] = []
        for _ in range(2):
            model.zero_grad()
            logp, entropy = model.token_logprobs(model(varlen_batch(sequences)), targets.to(CUDA), 1.0)
            (-logp.mean() - 0.01 * entropy.mean()).backward()
            results[precision].append({n: p.grad.clone() for n, p in model.named_parameters()})
        first, second = results[precision]
        for p_name in first:
            assert first[p_name].isfinite().all() and first[p_name].abs().max() > 0, p_name
            assert torch.equal(first[p_name], second[p_name]), f"{precision} {p_name} is not the same twice"
    for p_name, want in results["bf16"][0].items():
        got = results["fp8"][0][p_name]
        cosine = torch.nn.functional.cosine_similarity(got.flatten().double(), want.flatten().double(), dim=0)
        assert cosine > 0.95, f"{p_name}: cosine {cosine.item()}"


@pytest.mark.parametrize("precision", FLOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_place_and_through_fused_kernels_are_those_of_the_ops(precision: str, dtype: torch.dtype) -> None:
    """Against autograd's accumulation and, with a tap, a backward pass op by op."""
    sequences = make_sequences(8000, [150, 77, 220])
    targets = torch.cat([s.roll(-1) for s in sequences]).to(CUDA)
    results: list[dict[str, Tensor]] = []
    for placed in (False, True):
        model = build("qwen3", precision)
        for p in model.parameters():  # not `model.to`, which would round the rotary tables
            p.data = p.data.to(dtype)
        model.publish()
        if placed:
            accumulate_in(model, dtype)
        for _ in range(2):
            hidden = model(varlen_batch(sequences), tap=None if placed else lambda name, value: None)
            (-model.token_logprobs(hidden, targets, 1.0)[0].mean()).backward()
        results.append({n: p.grad for n, p in model.named_parameters()})
    want, got = results
    for name, grad in got.items():
        assert grad.dtype == dtype
        error = ((grad.double() - want[name].double()).norm() / want[name].double().norm()).item()
        assert error < 0.03, f"{name}: {error}"
    if dtype == torch.float32 and precision.startswith("fp8"):  # before the first fused kernel on the way back
        last = f"layers.{len(model.layers) - 1}."
        names = ("mlp.down.weight", "mlp.gate_up.weight", "attn.o.weight")
        assert all(torch.equal(got[last + n], want[last + n]) for n in names)


@pytest.mark.parametrize("precision", FLOWS)
@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("pages", [64, 100])  # FP8 pages in place, and side by side
def test_decode_in_a_cuda_graph_gives_the_same_bits(precision: str, page: int, pages: int) -> None:
    model = build("qwen3", precision)
    sequences = make_sequences(model.spec.vocab_size, [70] * 8)
    cache = StatePool(model.spec, pages, page, torch.bfloat16, torch.device(CUDA), model.recipe.kv_cache)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(2))[:64].view(8, 8)
    with torch.no_grad():
        model(paged_batch(cache, table, sequences, list(range(8)), [0] * 8, [60] * 8))
        static = paged_batch(cache, table, sequences, list(range(8)), [60] * 8, [1] * 8)
        bound = (64,) * len(static.plan.kv_pages)  # holds for all replays
        static = replace(static, plan=replace(static.plan, kv_pages=bound))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model.logits(model(static))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model.logits(model(static))
        for position in range(60, 66):
            batch = paged_batch(cache, table, sequences, list(range(8)), [position] * 8, [1] * 8)
            for target, source in (
                (static.tokens, batch.tokens), (static.positions, batch.positions),
                (static.plan.slots, batch.plan.slots), (static.plan.kv_lengths, batch.plan.kv_lengths),
            ):
                target.copy_(source)
            graph.replay()
            replayed = logits.clone()
            assert torch.equal(model.logits(model(batch)), replayed), f"position {position}"


@pytest.mark.parametrize("fp8_kv", [False, True])
def test_fused_kernels_equal_the_layers_of_ops(fp8_kv: bool) -> None:
    """The forms for rollout without gradients against the op by op forms, on the model's own activations."""
    from jetrl.kernels.attention.cache import write_cache
    from jetrl.kernels.dispatch import load_backend

    ops, model = load_backend("hopper"), build("qwen3", "fp8 kv" if fp8_kv else "fp8", layers=1)
    taps: dict[str, Tensor] = {}
    sequences = make_sequences(8000, [100, 28])
    batch = varlen_batch(sequences)
    with torch.no_grad():
        model(batch, tap=lambda name, value: taps.__setitem__(name, value.clone()))
    layer, spec = model.layers[0], model.spec
    x = SimpleNamespace(**{k.rsplit(".", 1)[-1]: v for k, v in taps.items()})
    want = ops.quantize_act(x.attn_norm)
    got, _ = ops.add_rms_norm_quantize(x.embed, None, layer.attn.norm.published, spec.rms_norm_eps, False)
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8)) and torch.equal(got.scale, want.scale)
    norms = (layer.attn.q_norm.published, layer.attn.k_norm.published)
    shared = (x.qkv, (16, 8), 128, norms, spec.rms_norm_eps, (model.cos, model.sin), batch.positions)
    q, k, v = ops.qkv_norm_rope(*shared, None, fp8_kv)
    plain_v = x.qkv.view(-1, 32, 128)[:, 24:]
    assert torch.equal(q, x.rope_q) and torch.equal(k, ops.round_heads(x.rope_k) if fp8_kv else x.rope_k)
    assert torch.equal(v, ops.round_heads(plain_v) if fp8_kv else plain_v)
    fused, apart = (StatePool(spec, 9, 16, torch.bfloat16, torch.device(CUDA), model.recipe.kv_cache) for _ in range(2))
    slots = torch.arange(128, device=CUDA).flip(0) + 16
    slots[5] = -1
    q, _, _ = ops.qkv_norm_rope(*shared, (fused.layer(0), slots), fp8_kv)
    write_cache(x.rope_k, plain_v.contiguous(), slots, apart.layer(0))
    assert torch.equal(q, x.rope_q)
    for a, b in ((fused.keys, apart.keys), (fused.values, apart.values), (fused.scales, apart.scales)):
        assert (a is None and b is None) or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    want, got = ops.quantize_act(x.swiglu), ops.swiglu_quantize(x.gate_up, False)
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8)) and torch.equal(got.scale, want.scale)
