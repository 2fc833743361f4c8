"""The portable kernels, forced on whatever GPU there is: a row's bits in every tile, values, gradients, whole models.

Also with `JETRL_TEST_KERNELS=triton`, which runs the files of whole models and runs with them (`conftest.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import ARCH, numbers, tiny_run, weights_hash
from torch import Tensor

from jetrl.kernels import dispatch, launch, tiles
from jetrl.kernels.attention.ops import varlen_plan
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.model_under_test import subject_of
from jetrl.types import LayerCache, PagedPlan

pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    held = dict(dispatch._serving)
    dispatch.select("triton")
    yield
    dispatch._serving.update(held)


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    g = torch.Generator(CUDA).manual_seed(seed)
    return (torch.randn(*shape, generator=g, device=CUDA) * scale).bfloat16()


GEMMS = [(6144, 4096), (4096, 12288), (151936, 1024), (576, 1536), (72, 40), (3001, 896)]


@pytest.mark.parametrize(("n", "k"), GEMMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bf16_rows_do_not_depend_on_the_batch_or_the_tile(n: int, k: int, dtype: torch.dtype) -> None:
    from jetrl.kernels.gemm import operands, portable

    x, w = randn(700, k, seed=n), randn(n, k, seed=k, scale=0.05)
    held = operands.prepare_bf16(w)
    whole = portable.bf16_gemm(x, held, dtype)
    for m in (1, 2, 16, 17, 64, 65, 128, 129, 256, 257):
        assert torch.equal(portable.bf16_gemm(x[300 : 300 + m], held, dtype), whole[300 : 300 + m]), m
    want = (x[:64].double() @ w.double().T).to(torch.float32)
    torch.testing.assert_close(whole[:64].float(), want, rtol=2**-7, atol=2e-3 * k**0.5)


@pytest.mark.parametrize(("n", "k"), GEMMS, ids=str)
def test_fp8_rows_do_not_depend_on_the_batch_or_the_tile(n: int, k: int) -> None:
    if launch.CAPABILITY < tiles.FP8_FROM:
        pytest.skip("no FP8 in these tensor cores")
    from jetrl.kernels.gemm import operands, portable_fp8
    from jetrl.kernels.quantize.triton import quantize_act, quantize_weight

    x, w = randn(700, k, seed=n), randn(n, k, seed=k, scale=0.05)
    held = operands.prepare_fp8(quantize_weight(w))
    whole = portable_fp8.fp8_gemm(quantize_act(x), held, torch.bfloat16)
    for m in (1, 2, 16, 17, 64, 65, 128, 129, 256, 257):
        got = portable_fp8.fp8_gemm(quantize_act(x[300 : 300 + m]), held, torch.bfloat16)
        assert torch.equal(got, whole[300 : 300 + m]), m
    error = (whole[:64].double() - x[:64].double() @ w.double().T).norm() / whole[:64].double().norm()
    assert error < 0.06


HEADS = [(4, 2, 40), (9, 3, 64), (32, 8, 128), (6, 2, 96), (16, 8, 128), (4, 1, 256)]


class Packed:
    """Packed sequences, and their keys in pages."""

    def __init__(self, heads: tuple[int, int, int], lengths: list[int], page: int, fp8: bool) -> None:
        n, g, h = heads
        backend = dispatch.load_backend("triton")
        self.lengths, self.scale, self.backend = lengths, h**-0.5, backend
        total = sum(lengths)
        self.q, self.k, self.v = randn(total, n, h, seed=1), randn(total, g, h, seed=2), randn(total, g, h, seed=3)
        if fp8:
            self.k, self.v = backend.round_heads(self.k), backend.round_heads(self.v)
        self.starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        width = -(-max(lengths) // page)
        self.table = torch.randperm(len(lengths) * width).view(len(lengths), width).to(torch.int32)
        pages = len(lengths) * width
        cache = LayerCache(*torch.zeros(2, pages, page, g, h, dtype=torch.bfloat16, device=CUDA))
        if fp8:
            codes = torch.zeros(2, pages, page, g, h, dtype=torch.uint8, device=CUDA).view(torch.float8_e4m3fn)
            cache = LayerCache(*codes, torch.zeros(pages, g, page, 2, dtype=torch.bfloat16, device=CUDA))
        slots = torch.cat([
            row[torch.arange(n) // page].long() * page + torch.arange(n) % page
            for row, n in zip(self.table, lengths, strict=True)
        ])
        from jetrl.kernels.attention.cache import write_cache

        write_cache(self.k, self.v, slots.to(CUDA), cache)
        self.cache = cache
        plan = varlen_plan(self.starts.to(CUDA), tuple(lengths))
        self.want = backend.attend_varlen(self.q, self.k, self.v, plan, self.scale, False)[0]

    def last(self, counts: list[int]) -> tuple[Tensor, Tensor]:
        plan, rows = self.plan(counts)
        return self.backend.attend_cached(self.q[rows], plan, 0, self.scale), self.want[rows]

    def plan(self, counts: list[int]) -> tuple[PagedPlan, Tensor]:
        """A step with the last tokens of each sequence, and which these are."""
        rows = torch.cat([torch.arange(b - n, b) for b, n in zip(self.starts[1:].tolist(), counts, strict=True)])
        cu = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=CUDA)
        plan = PagedPlan(
            cache=SimpleNamespace(layer=lambda layer: self.cache), cu_seqlens=cu, query_lengths=tuple(counts),
            kv_lengths=torch.tensor(self.lengths, dtype=torch.int32, device=CUDA),
            kv_pages=tuple(self.table.shape[1] for _ in counts), block_table=self.table.to(CUDA),
            slots=torch.full((len(rows),), -1, device=CUDA),
        )
        return plan, rows.to(CUDA)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_row_of_attention_has_the_same_bits_however_it_comes(
    heads: tuple[int, int, int], page: int, fp8: bool
) -> None:
    lengths = [1, 63, 64, 65, 300, 1025, 2000]
    case = Packed(heads, lengths, page, fp8)
    for counts in ([1] * 7, [min(n, 4) for n in lengths], [1, 1, 1, 1, 7, 500, 2000], [min(n, 257) for n in lengths]):
        got, want = case.last(counts)
        assert torch.equal(got, want), counts
    start, stop = case.starts[5:7].tolist()
    alone = varlen_plan(torch.tensor([0, 1025], dtype=torch.int32, device=CUDA), (1025,))
    parts = (x[start:stop].contiguous() for x in (case.q, case.k, case.v))
    got = case.backend.attend_varlen(*parts, alone, case.scale, False)[0]
    assert torch.equal(got, case.want[start:stop])
    q, k, v = (x[start:stop].float().transpose(0, 1) for x in (case.q, case.k, case.v))
    share = q.shape[0] // k.shape[0]
    exact = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(share, 0), v.repeat_interleave(share, 0), is_causal=True, scale=case.scale
    )
    torch.testing.assert_close(got.float(), exact.transpose(0, 1), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("pow2", [False, True])
def test_codes_of_a_decode_step_come_from_the_same_kernel(fp8: bool, pow2: bool) -> None:
    from jetrl.kernels.quantize.triton import quantize_act

    case = Packed((32, 8, 128), [1, 64, 300, 1025], 128, fp8)
    for counts in ([1] * 4, [1, 3, 8, 2], [1, 60, 1, 1]):
        plan, rows = case.plan(counts)
        got = case.backend.attend_cached_quantize(case.q[rows], plan, 0, case.scale, pow2)
        want = quantize_act(case.backend.attend_cached(case.q[rows], plan, 0, case.scale).flatten(1), pow2)
        assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8)), counts
        assert torch.equal(got.scale, want.scale), counts


@pytest.mark.parametrize("name", ["codes of E4M3", "codes of E4M3 times powers of two"])
def test_codes(name: str) -> None:
    """All of them, by the instructions of this GPU."""
    import triton_portable_cases

    dict(triton_portable_cases.code_cases())[name]()


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("stems", [(), (-1, 0, 0, -1)], ids=str)
def test_gradients_of_attention(heads: tuple[int, int, int], stems: tuple[int, ...]) -> None:
    (n, g, h), lengths = heads, (130, 70, 257, 64)
    backend, total = dispatch.load_backend("triton"), sum(lengths)
    q, grad = randn(total, n, h, seed=1), randn(total, n, h, seed=4)
    k, v = randn(total, g, h, seed=2), randn(total, g, h, seed=3)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    plan = varlen_plan(starts.to(CUDA), lengths, stems)
    got = backend.attend_backward(grad, q, k, v, plan, h**-0.5)
    again = backend.attend_backward(grad, q, k, v, plan, h**-0.5)
    host = varlen_plan(starts, lengths, stems)
    want = dispatch.load_backend("reference").attend_backward(
        *(x.cpu().float() for x in (grad, q, k, v)), host, h**-0.5
    )
    for name, x, same, y in zip("qkv", got, again, want, strict=True):
        assert torch.equal(x, same), name
        assert (x.cpu().float() - y).norm() / y.norm() < 0.01, name


SHAPES = (
    "random:smollm2-135m:3", "random:qwen3-0.6b:3", "random:tiny-moe", "random:tiny-hybrid", "random:tiny-hybrid-moe",
    "random:qwen3.5-0.8b:4",
)
FLOWS = (("bf16", ""), *product(("w8a16", "fp8"), ("bf16", "fp8")))  # precision, and format of the cache
MODELS = [(shape, *flow) for shape in SHAPES for flow in FLOWS]
MODELS += [("random:mini-v3", precision, "bf16") for precision in ("bf16", "w8a16", "fp8")]


@pytest.mark.parametrize(("model", "precision", "cache"), MODELS, ids=str)
def test_certificates(model: str, precision: str, cache: str) -> None:
    """Alone = packed = chunks = decoding with preemption = graphs = drafts = shared prompts, all links."""
    if precision == "fp8" and launch.CAPABILITY < tiles.FP8_FROM:
        pytest.skip("no FP8 in these tensor cores")
    subject = subject_of(model, precision, CUDA, cache, overrides=("kernels=triton",))
    result = certify(subject.published(), Workload(6, 300, 40, 37, 128), model, lambda text: None)
    assert result.ok, [(link.link, link.first_difference) for link in result.links if not link.ok]


EXPERTS = ARCH | {
    "model_type": "qwen3_moe", "hidden_size": 72, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "norm_topk_prob": True,
}
LINEAR = {
    "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
}
GPU: dict[str, Any] = {"device": "cuda", "kernels": "triton", "model.arch": ARCH | {"hidden_size": 72, "head_dim": 32}}


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"}, {"precision": "w8a16"}, {"precision": "fp8"}, {"quant.wgrad": "row"},
        {"quant.kv_cache": "fp8"}, {"precision": "bf16", "train.share_prompts": True, "rl.kl_coef": 0.1},
        {"precision": "bf16", "rl.entropy_coef": 0.01}, {"train.master_dtype": "bfloat16"},
        {"model.arch": EXPERTS}, {"model.arch": EXPERTS, "precision": "bf16"},
        *({"model.arch": ARCH | LINEAR | {"hidden_size": 72, "head_dim": 32}, "precision": p} for p in ("bf16", "fp8")),
    ],
    ids=str,
)
def test_runs_have_parity_zero_and_repeat(tmp_path: Path, changes: dict[str, Any]) -> None:
    first, second = (tiny_run(tmp_path / name, GPU | changes) for name in ("a", "b"))
    rows = numbers(first)
    assert [row["parity/logprob_abs_diff_max"] for row in rows[1:]] == [0.0] * 4
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])
    assert rows == numbers(second) and weights_hash(first, 4) == weights_hash(second, 4)


def test_the_head_learns_as_with_float64() -> None:
    """A vocabulary that is no multiple of 8, in parts, with and without an entropy gradient."""
    backend, vocab, d, t = dispatch.load_backend("triton"), 1003, 64, 37
    h, w = randn(t, d, seed=1), randn(vocab, d, seed=2, scale=0.1)
    targets, temperature = torch.arange(t, device=CUDA) * 27, torch.full((t,), 0.8, device=CUDA)
    grads = torch.linspace(-1, 1, t, device=CUDA), torch.linspace(0.1, 0.2, t, device=CUDA)
    for entropy in (False, True):
        hd, wd = (x.double().requires_grad_() for x in (h, w))
        logp = torch.log_softmax(hd @ wd.T / 0.8, -1)
        loss = (logp[torch.arange(t), targets] * grads[0].double()).sum()
        if entropy:
            loss = loss - ((logp.exp() * logp).sum(-1) * grads[1].double()).sum()
        loss.backward()
        _, _, stats, kept = backend.logprob_entropy(h, backend.prepare_bf16(w), targets, temperature, not entropy)
        dw = torch.zeros(vocab, d, device=CUDA)
        dh = backend.logprob_backward(
            grads[0], grads[1] if entropy else None, h, w, targets, temperature, stats, kept, dw
        )
        assert (dh.double() - hd.grad).norm() / hd.grad.norm() < 0.02
        assert (dw.double() - wd.grad).norm() / wd.grad.norm() < 0.02


def test_a_flow_digest_names_the_gpu() -> None:
    text = dispatch.definition("triton")
    major, minor = torch.cuda.get_device_capability()
    assert text.startswith("triton ") and f"sm_{major}{minor}" in text
