"""Adapters on a Hopper GPU: rows alone have the bits of rows in a batch, the definition, gradients, certificates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from jetrl.kernels.adapters import heads as joined
from jetrl.kernels.adapters import triton as kernels
from jetrl.kernels.adapters.ops import Heads
from jetrl.kernels.adapters.triton import CHAIN, FEW
from jetrl.kernels.pointwise.ops import add_rms_norm, add_rms_norm_coded, qkv_norm_rope, swiglu
from jetrl.kernels.qtensor import Coded, QTensor, Reads
from jetrl.kernels.quantize.ops import quantize_act
from jetrl.model import adapter as adapters
from jetrl.model.adapter import Adapter, draw_adapters, without_adapters
from jetrl.model.master import accumulate_in
from jetrl.model.sharding import fill
from jetrl.model.transformer import Transformer
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.rows import varlen
from jetrl.precision.lora import GROUPS, Lora
from jetrl.precision.recipe import build_recipe
from jetrl.spec import SHAPES
from jetrl.types import LayerCache

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SIZES = [  # input size, sections, which have an adapter: qkv, o, gate_up and down of Qwen3-0.6B, and odd sizes
    (1024, (2048, 1024, 1024), (0, 1, 2)), (2048, (1024,), (0,)), (1024, (3072, 3072), (0, 1)), (3072, (1024,), (0,)),
    (200, (72, 40, 40), (0, 2)),
]


def adapter_of(rank: int, size: tuple[int, tuple[int, ...], tuple[int, ...]]) -> Adapter:
    inputs, sections, chosen = size
    names = tuple(GROUPS["all"][i] for i in chosen)
    made = Adapter(Lora(rank, 24.0, names), inputs, sections, chosen, torch.float32, torch.bfloat16).to(CUDA)
    generator = torch.Generator(CUDA).manual_seed(rank)
    for part in (made.a, made.b):
        part.weight.data.normal_(0, 0.1, generator=generator)
        part.publish()
    return made


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).bfloat16()


@pytest.mark.parametrize("rank", [8, 16, 32, 64, 192])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_do_not_depend_on_the_batch(rank: int, size: tuple[int, tuple[int, ...], tuple[int, ...]]) -> None:
    adapter, rows = adapter_of(rank, size), 513
    x, y = drawn(rows, size[0]), drawn(rows, sum(size[1]), seed=1)
    with torch.no_grad():
        whole = adapter(x, y.clone())  # it takes the place of y
        assert rows > FEW and not torch.equal(whole, y)
        for m in (1, 2, 7, 16, 17, 64, 65, 128, 129, 256, 257, 512):  # up to FEW, each chain has a program of its own
            for start in (0, rows - m):
                part = slice(start, start + m)
                assert torch.equal(adapter(x[part], y[part].clone()), whole[part]), f"{m} rows from {start} on"
                if m == 17:
                    codes, want = adapter.begin(x[part], True).codes, quantize_act(x[part], True)
                    assert codes is not None and torch.equal(codes.scale, want.scale)
                    assert torch.equal(codes.codes.view(torch.uint8), want.codes.view(torch.uint8))
    with torch.enable_grad():
        assert torch.equal(adapter(x, y), whole)


@pytest.mark.parametrize("chosen", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize(("rank", "width"), [(8, 3072), (32, 12288), (40, 200), (192, 3072)])
def test_swiglu_s_kernel_has_the_bits_of_one_op_after_the_other(
    rank: int, width: int, chosen: tuple[int, ...]
) -> None:
    adapter, rows = adapter_of(rank, (1024, (width, width), chosen)), 513
    x, y = drawn(rows, 1024), drawn(rows, 2 * width, seed=1)
    with torch.no_grad():
        whole = swiglu(adapter(x, y.clone()))
        assert bool(whole.isfinite().all()) and not torch.equal(whole, swiglu(y))
        for m in (1, 7, 16, 17, 64, 65, 129, 256, 257, 513):  # up to FEW from sums of chains, else from u
            part = slice(rows - m, rows)

            def fused(reads: Reads, part: slice = part) -> Tensor | QTensor | Coded:
                return adapter.finish_swiglu(y[part].clone(), adapter.begin(x[part]), reads)

            assert torch.equal(fused(Reads(True, None)), whole[part]), m
            for pow2 in (False, True):
                both, codes, want = fused(Reads(True, pow2)), fused(Reads(False, pow2)), quantize_act(whole[part], pow2)
                assert isinstance(both, Coded) and isinstance(codes, QTensor) and torch.equal(both.values, whole[part])
                for made in (both.codes, codes):
                    assert torch.equal(made.scale, want.scale), m
                    assert torch.equal(made.codes.view(torch.uint8), want.codes.view(torch.uint8)), m


@pytest.mark.parametrize("fp8", [False, True], ids=["BF16 pages", "FP8 pages"])
@pytest.mark.parametrize("chosen", [(0, 1, 2), (0, 2), (1,)], ids=str)
@pytest.mark.parametrize(("rank", "heads", "size"), [(8, (16, 8), 128), (32, (32, 8), 128), (40, (14, 2), 64)], ids=str)
def test_the_kernel_of_heads_has_the_bits_of_one_op_after_the_other(
    rank: int, heads: tuple[int, int], size: int, chosen: tuple[int, ...], fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "JOINED", True)
    g, sections = heads[1], (heads[0] * size, heads[1] * size, heads[1] * size)
    adapter, rows = adapter_of(rank, (1024, sections, chosen)), 300
    x, y = drawn(rows, 1024), drawn(rows, sum(sections), seed=1)
    norms, angles = (drawn(size, seed=2), drawn(size, seed=3)), torch.rand(rows, size // 2, device=CUDA) * 6

    def pages() -> LayerCache:
        keys = torch.zeros(2, 5, 64, g, size, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16, device=CUDA)
        scales = torch.zeros(5, g, 64, 2, dtype=torch.bfloat16, device=CUDA) if fp8 else None
        return LayerCache(keys[0], keys[1], scales)

    with torch.no_grad():
        whole = adapter(x, y.clone())
        for m in (1, 7, 16, 17, 64, 65, 256, 257):
            positions, slots = torch.arange(m, device=CUDA).flip(0), torch.randperm(320, device=CUDA)[:m]
            slots[m // 2 :: 5] = -1
            for paged in (False, True):
                ours, theirs = pages(), pages()
                of = [
                    Heads(heads, size, norms, 1e-6, (angles.cos(), angles.sin()), positions,
                          (cache, slots) if paged else None, fp8)
                    for cache in (ours, theirs)
                ]
                got = adapter.finish_heads(y[:m].clone(), adapter.begin(x[:m]), of[0])
                want = qkv_norm_rope(whole[:m], *of[1])
                for one, two in zip(got, want, strict=True):
                    assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), (m, paged)
                if ours.scales is not None and theirs.scales is not None:
                    assert torch.equal(ours.scales, theirs.scales), m


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients_against_float64(size: tuple[int, tuple[int, ...], tuple[int, ...]]) -> None:
    adapter = adapter_of(16, size)
    x, y = drawn(300, size[0]).requires_grad_(), drawn(300, sum(size[1]), seed=1).requires_grad_()
    dy = drawn(300, sum(size[1]), seed=2)
    got = adapter(x, y)
    grads = torch.autograd.grad(got, [x, y, adapter.a.weight, adapter.b.weight], dy)
    leaves = [t.detach().double().requires_grad_() for t in (x, y, adapter.a.published, adapter.b.published)]
    wx, wy, a, b = leaves
    parts = [wy[:, start:stop] for start, stop in _edges(size[1])]
    for i, ((start, stop), (first, last)) in enumerate(adapter.places):
        at = next(n for n, edge in enumerate(_edges(size[1])) if edge == (start, stop))
        parts[at] = parts[at] + adapter.scale * (wx @ a[i * 16 : (i + 1) * 16].T @ b[first:last].T)
    want = torch.cat(parts, 1)
    true = torch.autograd.grad(want, leaves, dy.double())
    for ours, exact in zip((got, *grads), (want, *true), strict=True):
        assert float((ours.double() - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bits_are_those_of_chains_added_in_order(size: tuple[int, tuple[int, ...], tuple[int, ...]]) -> None:
    """A product of one chain alone, by the same kernel, is what the tensor core makes of it; their sum is the text of
    `kernels/adapters/triton.py`. And each element is near the exact sum."""
    adapter, x = adapter_of(16, size), drawn(40, size[0])
    a, total = adapter.a.published, torch.zeros(40, 16 * len(size[2]), device=CUDA)
    for start in range(0, size[0], CHAIN):
        part = slice(start, start + CHAIN)
        total = total + kernels._shrink(x[:, part].contiguous(), a[:, part].contiguous(), True)[0]
    assert torch.equal(adapter.shrink(x), total.bfloat16())
    exact = x.double() @ a.double().T
    assert float((total.double() - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("rows", [1, 64, 300])
@pytest.mark.parametrize("width", [1024, 4096, 5120])
def test_a_norm_that_writes_both_has_the_bits_of_each(rows: int, width: int) -> None:
    x, residual, weight = drawn(rows, width), drawn(rows, width, seed=1), drawn(width, seed=2)
    with torch.no_grad():
        for pow2 in (False, True):
            both, total = add_rms_norm_coded(x, residual, weight, 1e-6, pow2)
            normed, stream = add_rms_norm(x, residual, weight, weight, 1e-6)
            want = quantize_act(normed, pow2)
            assert torch.equal(both.values, normed) and torch.equal(total, stream)
            assert torch.equal(both.codes.scale, want.scale)
            assert torch.equal(both.codes.codes.view(torch.uint8), want.codes.view(torch.uint8))


def _edges(sections: tuple[int, ...]) -> list[tuple[int, int]]:
    ends = torch.tensor(sections).cumsum(0).tolist()
    return list(zip([0, *ends], ends, strict=False))


@pytest.mark.parametrize("switched", [False, True], ids=["", "FORK and JOINED"])
@pytest.mark.parametrize("precision", ["fp8", "w8a16", "bf16"])
@pytest.mark.parametrize("shape", ["qwen3-0.6b", "tiny-moe"])
def test_a_certificate_with_drawn_adapters(
    precision: str, shape: str, switched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed, chunked, decoded in graphs, with pages that samples share, with drafts; and the adapters are seen."""
    monkeypatch.setattr(adapters, "FORK", switched)
    monkeypatch.setattr(joined, "JOINED", switched)
    spec = replace(SHAPES[shape], num_layers=2)
    with torch.device("meta"):
        model = Transformer(spec, build_recipe(precision, 2, lora=Lora(16, 32.0, GROUPS["all"], expert_rank=8)))
    fill(model, model.random_values(0), CUDA)
    model.to(CUDA)
    draw_adapters(model, 1)
    model.publish()
    found = certify(model, Workload(24, 300, 32), "drawn", lambda text: None)
    assert found.ok, [link for link in found.links if not link.ok]
    batch = varlen([torch.arange(100, device=CUDA), torch.arange(7, device=CUDA)])
    with torch.no_grad():
        assert not torch.equal(model(batch), without_adapters(model)(batch))


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_gradients_of_experts_adapters_are_those_of_a_cpu(precision: str) -> None:
    """Within what BF16 gradients and other sums move."""
    spec = replace(SHAPES["tiny-moe"], num_layers=1)
    found = []
    for device in ("cpu", "cuda"):
        with torch.device("meta"):
            model = Transformer(spec, build_recipe(precision, 1, lora=Lora(16, 32.0, GROUPS["all"], expert_rank=8)))
        fill(model, model.random_values(0), torch.device(device))
        model.to(device)
        draw_adapters(model, 1)
        model.publish()
        accumulate_in(model, torch.float32)
        tokens = torch.arange(300, device=device) % spec.vocab_size
        batch = varlen([tokens[:173], tokens[173:]])
        model.token_logprobs(model(batch), batch.tokens.roll(-1), 1.0)[0].mean().backward()
        found.append({n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None})
    cpu, gpu = found
    assert cpu.keys() == gpu.keys() and any("mlp.down.lora.b" in name for name in cpu)
    for name, want in cpu.items():
        assert float((gpu[name] - want).norm() / want.norm()) < 0.15, name


@pytest.mark.parametrize("fork", [False, True], ids=["one stream", "two"])
@pytest.mark.parametrize("precision", ["fp8", "w8a16", "bf16"])
def test_graphs_read_adapters_that_were_published_again(
    precision: str, fork: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publishing changes no address, so captured steps see the new values: also where A x has a branch of its own."""
    monkeypatch.setattr(adapters, "FORK", fork)
    spec = replace(SHAPES["qwen3-0.6b"], num_layers=1)
    with torch.device("meta"):
        model = Transformer(spec, build_recipe(precision, 1, lora=Lora(16, 32.0, GROUPS["all"])))
    fill(model, model.random_values(0), CUDA)
    model.to(CUDA).publish()
    accumulate_in(model, torch.float32)
    before = model.addresses()
    draw_adapters(model, 1)
    model.publish()
    assert model.addresses() == before
    assert certify(model, Workload(8, 100, 16), "published again", lambda text: None).ok
