"""Mixtures of experts on a GPU: grouped GEMMs with the dense kernels' bits, and what holds for padding and graphs.

The Triton kernels run against their definitions in `test_triton.py` (`tests/kernels/triton_experts_cases.py`).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.dispatch import load_backend, require_experts
from jetrl.kernels.experts import ops as moe
from jetrl.kernels.experts import reference as rm
from jetrl.kernels.experts.few_tokens import group_quantize
from jetrl.kernels.experts.route import PaddedGroups, split_fp32_into_bf16
from jetrl.kernels.experts.route import group as grouped
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.update.gradient import Gradient

pytestmark = pytest.mark.gpu
CUDA = "cuda"
BLOCKS = (16, 32, 64, 128)  # rows of a tile; each is a kernel of its own
# experts, of a token, model, feed-forward: Qwen3-30B-A3B's; sizes that are no multiples of 128; tiny-moe's
SHAPES = [(128, 8, 2048, 768), (6, 3, 136, 72), (16, 4, 192, 96)]


@pytest.fixture(scope="module")
def ops():
    return require_experts("hopper")


def matrix(rows: int, cols: int, seed: int, device: str = CUDA) -> Tensor:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return x.to(torch.bfloat16).to(device)


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    return ((got - want).norm() / want.norm()).item()


def chosen_of(tokens: int, experts: int, k: int, seed: int = 0) -> Tensor:
    """Distinct experts; few tokens at the last ones, none at the last of all."""
    g = torch.Generator().manual_seed(seed)
    load = torch.linspace(1.5, 0, experts)
    load[-1] = -9
    return (torch.rand(tokens, experts, generator=g) + load).argsort(1, descending=True)[:, :k].contiguous().to(CUDA)


def rows_of(x: Tensor, groups: PaddedGroups, fill: float = float("nan")) -> Tensor:
    """`x` [T * k, C], a token's rows next to each other, at their places; `fill` in all other rows."""
    out = torch.full((len(groups.tokens), x.shape[1]), fill, dtype=x.dtype, device=x.device)
    out[groups.rows.flatten()] = x
    return out


# ---- GEMMs ----------------------------------------------------------------------------------------------------------


TILES = [(s, b) for s in SHAPES for b in BLOCKS if s is SHAPES[0] or b in (16, 128)]


@pytest.mark.parametrize(("shape", "block"), TILES)
def test_rows_have_the_dense_kernels_bits(ops, shape: tuple[int, int, int, int], block: int) -> None:
    """FP8 and BF16, gate_up and down, next to NaN in the padding."""
    experts, k, d, f = shape
    tokens = 5 * block
    chosen = chosen_of(tokens, experts, k)
    groups = grouped(chosen, experts, block)
    x, y = matrix(tokens * k, d, 1), matrix(tokens * k, f, 2)
    for values, sections, seed in ((x, (f, f), 3), (y, (d,), 4)):
        w = matrix(experts * sum(sections), values.shape[1], seed)
        q = ops.quantize_weight(w, False, sections * experts)
        padded = rows_of(values, groups)
        a, b = ops.quantize_act(padded), ops.prepare_experts_fp8(q, experts)
        got = ops.grouped_fp8_gemm(a, b, groups, torch.bfloat16)
        plain = ops.grouped_bf16_gemm(padded, ops.prepare_experts_bf16(w, experts), groups, torch.bfloat16)
        flat = chosen.flatten()
        for e in flat.unique().tolist()[:: max(1, experts // 16)]:
            at, mine = flat == e, w[e * sum(sections) : (e + 1) * sum(sections)]
            alone = ops.prepare_fp8(ops.quantize_weight(mine, False, sections))
            want = ops.fp8_gemm(ops.quantize_act(values), alone, torch.bfloat16)[at]
            assert torch.equal(got[groups.rows.flatten()][at], want), f"FP8, expert {e}, {int(at.sum())} rows"
            want = ops.bf16_gemm(values, ops.prepare_bf16(mine), torch.bfloat16)[at]
            assert torch.equal(plain[groups.rows.flatten()][at], want), f"BF16, expert {e}, {int(at.sum())} rows"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pow2", [False, True])
def test_dgrad_is_the_dense_kernels(ops, shape: tuple[int, int, int, int], pow2: bool) -> None:
    experts, k, d, f = shape
    chosen = chosen_of(300, experts, k)
    groups = grouped(chosen, experts, 128)
    flat, at_rows = chosen.flatten(), groups.rows.flatten()
    for sections, cols, seed in (((f, f), d, 3), ((d,), f, 4)):
        dy, w = matrix(300 * k, sum(sections), 5), matrix(experts * sum(sections), cols, seed)
        q = ops.quantize_weight(w, pow2, sections * experts)
        padded = rows_of(dy, groups, 0.0)
        dy_q = ops.quantize_act(padded, pow2, sections)
        got = ops.grouped_fp8_gemm(dy_q, ops.prepare_experts_fp8_t(q, experts), groups, torch.bfloat16)[at_rows]
        plain = ops.grouped_bf16_dgrad(padded, w, groups)[at_rows]
        for e in flat.unique().tolist()[:: max(1, experts // 16)]:
            at, mine = flat == e, w[e * sum(sections) : (e + 1) * sum(sections)]
            alone = ops.prepare_fp8_t(ops.quantize_weight(mine, pow2, sections))
            want = ops.fp8_gemm(ops.quantize_act(dy, pow2, sections), alone, torch.bfloat16)
            assert torch.equal(got[at], want[at]), f"FP8, expert {e}"
            assert relative_error(plain[at], dy[at].double() @ mine.double()) < 3e-3, f"BF16, expert {e}"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients(ops, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """FP8: the dense kernel's bits. BF16: its value. Experts without rows keep what they have; twice the same bits."""
    experts, k, d, f = shape
    tokens = 700
    chosen = chosen_of(tokens, experts, k)
    groups = grouped(chosen, experts, 128)
    flat = chosen.flatten()
    x, dy = matrix(tokens * k, d, 1), matrix(tokens * k, 2 * f, 2)
    held = (matrix(experts * 2 * f, d, 3) * 30).to(dtype)
    results = []
    for _ in range(2):
        fp8, bf16 = held.clone(), held.clone()
        pairs = [ops.quantize_rows_t(rows_of(v, groups), groups, False) for v in (dy, x)]
        ops.grouped_wgrad_into(*pairs, groups, fp8)
        ops.grouped_bf16_wgrad_into(rows_of(dy, groups, 0.0), rows_of(x, groups, 0.0), groups, bf16)
        results.append((fp8, bf16))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "another result the second time"
    fp8, bf16 = results[0]
    for e in range(0, experts, max(1, experts // 16)):
        at, mine = flat == e, slice(e * 2 * f, (e + 1) * 2 * f)
        if not at.any():
            assert torch.equal(fp8[mine], held[mine]) and torch.equal(bf16[mine], held[mine]), f"expert {e} has no rows"
            continue
        want = held[mine].clone()
        ops.wgrad_into(ops.quantize_act_t(dy[at]), ops.quantize_act_t(x[at]), want)
        assert torch.equal(fp8[mine], want), f"FP8, expert {e}, {int(at.sum())} rows"
        exact = held[mine].double() + dy[at].double().T @ x[at].double()
        assert relative_error(bf16[mine], exact) < (1e-6 if dtype == torch.float32 else 3e-3), f"BF16, expert {e}"
    assert not (flat == experts - 1).any() and torch.equal(fp8[-2 * f :], held[-2 * f :])


@pytest.mark.parametrize("tokens", [1, 90, 6000])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pow2", [False, True])
def test_codes_for_gradients_are_those_of_separate_kernels(
    ops, shape: tuple[int, int, int, int], pow2: bool, tokens: int
) -> None:
    """In sizes of a real model too: rows, columns up to the end of the last group, and gradients of weights."""
    experts, k, d, f = shape
    groups = grouped(chosen_of(tokens, experts, k), experts, 128)
    at, total = groups.rows.flatten(), int(groups.total)

    def same(got: Tensor, want: Tensor, name: str) -> None:
        bits = torch.uint8 if got.dtype == torch.float8_e4m3fn else got.dtype
        assert torch.equal(got.view(bits), want.view(bits)), name

    def same_rows(got: QTensor, rows: Tensor, sections: tuple[int, ...], name: str) -> None:
        want = ops.quantize_act(rows, pow2, sections)
        assert got.col_sections == want.col_sections
        same(got.codes.view(torch.uint8)[at], want.codes.view(torch.uint8)[at], name)
        same(got.scale[at], want.scale[at], name)

    def same_columns(got: tuple[Tensor, Tensor], rows: Tensor, name: str) -> None:
        want = ops.quantize_rows_t(rows, groups, pow2)
        held = total * rows.shape[1]
        same(got[0].view(-1)[:held], want[0].view(-1)[:held], name)
        same(got[1][:, : total // 128], want[1][:, : total // 128], name)

    x, dy = matrix(tokens, d, 1), matrix(tokens, d, 2)
    same_columns(ops.dispatch_quantize_t(x, groups, pow2), ops.dispatch(x, groups), "tokens")
    y, weights = rows_of(matrix(tokens * k, d, 3), groups), torch.rand(tokens, k, device=CUDA)
    rows, d_weights = ops.combine_backward(dy, y, weights, groups)
    q, columns, got = ops.combine_backward_quantize(dy, y, weights, groups, pow2, pow2)
    same(got, d_weights, "weights")
    same_rows(q, rows, (d,), "rows of combine")
    same_columns(columns, rows, "columns of combine")
    hidden, grad = rows_of(matrix(tokens * k, 2 * f, 4), groups), rows_of(matrix(tokens * k, f, 5), groups)
    q, columns, act_t = ops.swiglu_rows_backward_quantize(grad, hidden, groups, pow2, pow2)
    rows = ops.swiglu_rows_backward(grad, hidden, groups)
    same_rows(q, rows, (f, f), "rows of SwiGLU")
    same_columns(columns, rows, "columns of SwiGLU")
    same_columns(act_t, ops.swiglu_rows(hidden, groups), "output of SwiGLU")


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_grouped_gemms_match_the_definition(ops, shape: tuple[int, int, int, int]) -> None:
    """Against the CPU: values, not bits."""
    experts, k, d, f = shape
    chosen = chosen_of(50, experts, k)
    groups, plain = grouped(chosen, experts), rm.group(chosen.cpu(), experts)
    x, w = matrix(50 * k, d, 1, "cpu"), matrix(experts * 2 * f, d, 2, "cpu")
    sections = (f, f) * experts
    x_cpu = torch.empty_like(x)
    x_cpu[plain.rows.flatten()] = x
    want = rm.grouped_fp8_gemm(
        ref.quantize_1x128(x_cpu), rm.prepare_experts_fp8(ref.quantize_128x128(w, False, sections), experts), plain,
        torch.bfloat16,
    )
    q = ops.quantize_weight(w.to(CUDA), False, sections)
    a = ops.quantize_act(rows_of(x.to(CUDA), groups))
    got = ops.grouped_fp8_gemm(a, ops.prepare_experts_fp8(q, experts), groups, torch.bfloat16)
    assert relative_error(got[groups.rows.flatten()], want[plain.rows.flatten()]) < 3e-3


def test_operands_keep_their_memory(ops) -> None:
    """Captured graphs hold them: a publish writes the new values to the same addresses."""
    for experts, _, d, f in SHAPES:
        first, second = matrix(experts * 2 * f, d, 1), matrix(experts * 2 * f, d, 2)
        sections = (f, f) * experts
        q, other = ops.quantize_weight(first, False, sections), ops.quantize_weight(second, False, sections)
        for prepare in (ops.prepare_experts_fp8, ops.prepare_experts_fp8_t):
            held = prepare(q, experts)
            at = held.codes.data_ptr(), held.scale.data_ptr()
            renewed, fresh = prepare(other, experts, held), prepare(other, experts)
            assert (renewed.codes.data_ptr(), renewed.scale.data_ptr()) == at
            assert torch.equal(renewed.codes.view(torch.uint8), fresh.codes.view(torch.uint8))
            assert torch.equal(renewed.scale, fresh.scale)
            q = ops.quantize_weight(first, False, sections)  # `held` may have been its own memory
        held = ops.prepare_experts_bf16(first.clone(), experts)
        at = held.weight.data_ptr()
        renewed = ops.prepare_experts_bf16(second, experts, held)
        assert renewed.weight.data_ptr() == at
        assert torch.equal(renewed.weight, ops.prepare_experts_bf16(second, experts).weight)


def test_what_the_kernels_cannot_do_is_refused(ops) -> None:
    groups = grouped(chosen_of(4, 6, 3), 6)
    x = matrix(len(groups.tokens), 128, 1)
    with pytest.raises(ValueError, match="writes BF16"):
        ops.grouped_bf16_gemm(x, ops.prepare_experts_bf16(matrix(6 * 64, 128, 2), 6), groups, torch.float32)
    with pytest.raises(ValueError, match="multiples of 8, got 100"):
        ops.prepare_experts_bf16(matrix(6 * 64, 100, 2), 6)
    with pytest.raises(ValueError, match="multiples of 8, got 100"):
        ops.prepare_experts_fp8(ops.quantize_weight(matrix(6 * 64, 100, 2), False, (64,) * 6), 6)
    assert not any(hasattr(load_backend("hopper_scaled_mm"), op) for op in ("route", "grouped_fp8_gemm"))


# ---- a whole layer's path -------------------------------------------------------------------------------------------


class Experts:
    """Router, gate_up and down with random weights; `infer` as `model.moe.MoE.infer` computes."""

    def __init__(self, ops, shape: tuple[int, int, int, int], fp8: bool) -> None:
        self.ops, self.fp8, (self.count, self.k, d, f) = ops, fp8, shape
        self.router = matrix(self.count, d, 5) * 0.1
        self.operand = ops.prepare_bf16(self.router)
        up, down = matrix(self.count * 2 * f, d, 6) / d**0.5, matrix(self.count * d, f, 7) / f**0.5
        if fp8:
            self.up = ops.prepare_experts_fp8(ops.quantize_weight(up, False, (f, f) * self.count), self.count)
            self.down = ops.prepare_experts_fp8(ops.quantize_weight(down, False, (d,) * self.count), self.count)
        else:
            self.up, self.down = (ops.prepare_experts_bf16(w, self.count) for w in (up, down))

    @torch.no_grad()
    def infer(self, x: Tensor, block: int | None = None, at_once: bool = True) -> Tensor:
        """`at_once`: group, dispatch and quantize by one kernel, where it takes so few tokens."""
        logits = moe.router_logits(x, Gradient(self.router), self.router, self.operand)
        chosen, weights = moe.route(logits, self.k, True)
        if self.fp8 and at_once:
            groups, rows = group_quantize(chosen, x, self.count, False, block)
        else:
            groups = grouped(chosen, self.count, block)
        if self.fp8:
            rows = rows if at_once else moe.dispatch_quantize(x, groups, False)
            rows = moe.grouped_fp8_gemm(rows, self.up, groups, torch.bfloat16)
            rows = moe.swiglu_quantize(rows, groups, False)
            rows = moe.grouped_fp8_gemm(rows, self.down, groups, torch.bfloat16)
        else:
            rows = moe.grouped_bf16_gemm(moe.dispatch(x, groups), self.up, groups, torch.bfloat16)
            rows = moe.grouped_bf16_gemm(moe.swiglu(rows, groups), self.down, groups, torch.bfloat16)
        return moe.combine(rows, weights, groups)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fp8", [True, False])
def test_a_token_depends_on_nothing_else(ops, shape: tuple[int, int, int, int], fp8: bool) -> None:
    """Other tokens, their order, the tile of the GEMM: with 1 to 3,000 tokens, that is with every tile."""
    layer = Experts(ops, shape, fp8)
    x = matrix(3000, shape[2], 8)
    whole = layer.infer(x)
    assert whole.isfinite().all() and whole.std() > 0
    for m in (1, 2, 7, 16, 33, 64, 129, 256, 700):
        assert torch.equal(layer.infer(x[:m]), whole[:m]), f"the first {m}"
        assert torch.equal(layer.infer(x[-m:].flip(0)).flip(0), whole[-m:]), f"the last {m}, backwards"
    for block in BLOCKS:
        for m in (3, 64, 256, 300):
            for at_once in (True, False):
                assert torch.equal(layer.infer(x[:m], block, at_once), whole[:m]), f"tiles of {block}, {m} tokens"
    other = torch.cat([x[:32] * 1e4, x[32:64], torch.full_like(x[:32], float("nan"))])
    assert torch.equal(layer.infer(other)[32:64], whole[32:64]), "next to huge ones and NaN"
    assert layer.infer(x[:0]).shape == (0, shape[2])


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("tokens", [1, 8, 64, 256])
def test_in_a_cuda_graph(ops, fp8: bool, tokens: int) -> None:
    """The host waits for nothing, so it can be captured; replayed for tokens with other experts."""
    layer = Experts(ops, SHAPES[0], fp8)
    static = matrix(tokens, SHAPES[0][2], 9)
    layer.infer(static)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.infer(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.infer(static)
    for seed in (10, 11, 12):
        fresh = matrix(tokens, SHAPES[0][2], seed)
        static.copy_(fresh)
        graph.replay()
        assert torch.equal(out, layer.infer(fresh)), f"seed {seed}"


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_the_router(ops, shape: tuple[int, int, int, int]) -> None:
    experts, k, d, _ = shape
    logits, up = torch.randn(400, experts, device=CUDA), torch.randn(400, k, device=CUDA)
    for normalized in (True, False):
        chosen, weights = ops.route(logits, k, normalized)
        got = ops.route_backward(up, logits, chosen, weights, normalized)
        exact = logits.double().requires_grad_()
        kept = exact.softmax(-1).gather(-1, chosen)
        ((kept / kept.sum(-1, keepdim=True) if normalized else kept) * up.double()).sum().backward()
        assert (got - exact.grad).abs().max() < 1e-6
        assert torch.equal(got, ops.route_backward(up, logits, chosen, weights, normalized))
    x, w, dz = matrix(400, d, 1), matrix(experts, d, 2), torch.randn(400, experts, device=CUDA)
    dx, dw = ops.router_backward(dz, x, w)
    assert relative_error(dx, dz.double() @ w.double()) < 3e-3 and dw.dtype == torch.float32
    assert relative_error(dw, dz.double().T @ x.double()) < 1e-5, "not in full FP32"
    assert torch.equal(dw, ops.router_backward(dz, x, w)[1])
    far = torch.cat([dz, dz * 2.0**-80, dz * 2.0**100])
    assert torch.equal(sum(t.double() for t in split_fp32_into_bf16(far)), far.double()), "the parts are not exact"
