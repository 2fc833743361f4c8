"""Adapters: the definition in slow words, rows alone, and the kernels as they are compiled for Hopper (no GPU needed).
`test_triton_interpret.py` runs the kernels."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.kernels.adapters import ops
from jetrl.kernels.experts import ops as moe
from jetrl.kernels.quantize.ops import quantize_act

PLACES = (((0, 40), (0, 40)), ((56, 80), (40, 64)))
SCALE = 32 / 24**0.5


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_expand_is_a_product_and_a_sum_in_fp32_rounded_once() -> None:
    """Never a product that is rounded to BF16, nor a fused one; columns without an adapter stay."""
    y, u, b = normal(30, 80), normal(30, 16, seed=1), normal(64, 8, seed=2)
    got = ops.expand(y, u, b, SCALE, PLACES, y.clone())
    assert_bitwise_equal(got[:, 40:56], y[:, 40:56])
    rounded = y.clone()
    for i, ((start, stop), (first, last)) in enumerate(PLACES):
        t = (u[:, 8 * i : 8 * i + 8].double() @ b[first:last].double().T).float()  # exact: few bits, of like size
        product = (t.double() * float(torch.tensor(SCALE))).float()
        want = (y[:, start:stop].double() + product.double()).float().bfloat16()
        assert_bitwise_equal(got[:, start:stop], want)
        rounded[:, start:stop] += (t * SCALE).bfloat16()
    assert not torch.equal(got, rounded)


def test_rows_do_not_depend_on_the_batch_and_y_may_be_replaced() -> None:
    x, y, a, b = normal(30, 96, seed=3), normal(30, 80), normal(16, 96, seed=1), normal(64, 8, seed=2)
    u = ops.shrink(x, a)
    assert_bitwise_equal(u, (x.double() @ a.double().T).float().bfloat16())
    want = ops.expand(y, u, b, SCALE, PLACES, y.clone())
    for part in (slice(0, 30), slice(4, 5), slice(29, 30), slice(3, 20)):
        mine = y[part].clone()
        begun = ops.begin(x[part], a)
        assert begun.codes is None
        got = ops.finish(mine, begun, b, SCALE, PLACES)
        assert_bitwise_equal(got, want[part])
        assert got is mine
    codes, expected = ops.begin(x, a, True).codes, quantize_act(x, True)
    assert codes is not None
    assert_bitwise_equal(codes.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert_bitwise_equal(codes.scale, expected.scale)


def test_rows_of_experts_have_the_bits_of_each_expert_s_adapters() -> None:
    chosen = torch.tensor([[0, 2], [2, 4], [0, 4], [2, 0]])  # no token has expert 1 or 3
    groups = moe.group(chosen, 5)
    x, y, dy = normal(8, 96, seed=3), normal(8, 80), normal(8, 80, seed=5)
    a, b = normal(5 * 16, 96, seed=1), normal(5 * 64, 8, seed=2)
    u = ops.shrink_rows(x, a, groups)
    got = ops.expand_rows(y, u, b, SCALE, PLACES, groups, y.clone())
    du = ops.expand_rows_backward(dy, b, SCALE, PLACES, groups)
    seen = 0
    for expert, count in enumerate(groups.counts.tolist()):
        at = slice(int(groups.starts[expert]), int(groups.starts[expert]) + count)
        own_a, own_b = a[16 * expert : 16 * expert + 16], b[64 * expert : 64 * expert + 64]
        assert_bitwise_equal(u[at], ops.shrink(x[at], own_a))
        assert_bitwise_equal(got[at], ops.expand(y[at], u[at], own_b, SCALE, PLACES, y[at].clone()))
        assert_bitwise_equal(du[at], ops.expand_backward(dy[at], own_b, SCALE, PLACES))
        seen += count
    assert seen == 8


def compiled(kernel: Any, pointers: dict[str, str], warps: int, **constants: Any) -> str:
    """The kernel in Triton's GPU dialect."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = dict.fromkeys(constants, "constexpr") | pointers
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names)
               if signature[n] != "constexpr" and n not in ("m", "scale")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False, "launch_pdl": True}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"])


@pytest.mark.parametrize(
    ("split", "tokens", "rows", "experts"),
    [(True, 16, 16, 0), (False, 64, 64, 0), (False, 64, 16, 0), (False, 16, 16, 5)],
)
def test_a_chain_is_by_one_instruction_and_its_sum_is_added_outside_of_it(
    split: bool, tokens: int, rows: int, experts: int
) -> None:
    """`mma.sync` in the natural order of K; the compiler has not made the sum of chains the next chain's begin."""
    pytest.importorskip("triton")
    from jetrl.kernels.adapters import triton as kernels

    pointers = {"x": "*bf16", "a": "*bf16", "out": "*fp32" if split else "*bf16", "codes": "*u8", "scale": "*fp32"}
    pointers["starts"] = "*i32"
    code = compiled(
        kernels._shrink_kernel, pointers, 2, T=tokens, R=rows, STEP=kernels._STEP,
        STEPS=kernels.CHAIN // kernels._STEP, SPLIT=split, QUANT=split, FLOOR=0x2B8CBCCC, POW2=True, EXPERTS=experts,
        EB=8, STAGES=5 if split else 3, PDL=True,
    )
    assert code.count("tt.dot ") == 1 and "warp_group_dot" not in code
    assert set(re.findall(r"kWidth = (\d+)", code)) == {"2"}
    assert code.count("arith.addf") == (0 if split else 1)


@pytest.mark.parametrize(
    ("chains", "tokens", "columns", "warps", "experts"),
    [(0, 32, 256, 8, 0), (24, 16, 128, 4, 0), (8, 32, 256, 8, 0), (0, 16, 128, 2, 5)],
)
@pytest.mark.parametrize("rank", [8, 32, 192])
def test_expand_is_one_chain_and_the_product_with_the_scale_is_rounded(
    chains: int, tokens: int, columns: int, warps: int, experts: int, rank: int
) -> None:
    pytest.importorskip("triton")
    from jetrl.kernels.adapters import triton as kernels

    pointers = {"y": "*bf16", "u": "*fp32" if chains else "*bf16", "b": "*bf16", "out": "*bf16", "scale": "fp32"}
    pointers["starts"] = "*i32"
    block = min(128, max(16, 1 << (rank - 1).bit_length()))
    code = compiled(
        kernels._expand_kernel, pointers, warps, T=tokens, N=columns, R=block, RANK=rank, CHAINS=chains,
        UNROLL=kernels.unrolled(chains, 24 if tokens == 16 else 12), EXPERTS=experts, EB=8, PDL=True,
    )
    assert code.count("tt.dot ") == -(-rank // block) and "warp_group_dot" not in code
    assert set(re.findall(r"kWidth = (\d+)", code)) == {"2"} and "math.fma" not in code
    assert code.count("arith.mulf") == 1
    _asked_for_at_once(code, chains)


def _asked_for_at_once(code: str, chains: int) -> None:
    """Only u and B go through shared memory, once for each product. A chain's sum that went there would wait for the
    one before, at a barrier."""
    if chains:
        assert code.count("ttg.local_alloc") == code.count("ttg.local_load") == 2 * code.count("tt.dot ")
        assert not re.search(r"local_alloc [^\n]*xf32", code)


@pytest.mark.parametrize(("chains", "tokens", "columns", "warps"), [(0, 32, 256, 8), (8, 16, 128, 4), (8, 32, 256, 8)])
@pytest.mark.parametrize("rank", [8, 32, 192])
def test_swiglu_after_adapters_has_the_same_instructions(
    chains: int, tokens: int, columns: int, warps: int, rank: int
) -> None:
    """Two chains over the rank, two products with the scale, nothing fused; B is asked for before the chains' sums."""
    pytest.importorskip("triton")
    from jetrl.kernels.adapters import swiglu, triton

    pointers = {"y": "*bf16", "u": "*fp32" if chains else "*bf16", "b": "*bf16", "out": "*bf16", "codes": "*u8"}
    pointers |= {"units": "*fp32", "scale": "fp32"}
    block = min(128, max(16, 1 << (rank - 1).bit_length()))
    code = compiled(
        swiglu._finish_swiglu_kernel, pointers, warps, F=12288, T=tokens, N=columns, R=block, RANK=rank, CHAINS=chains,
        UNROLL=triton.unrolled(chains, 24 if tokens == 16 else 12), GATE=True, UP=True, KEEP=True, QUANT=True,
        FLOOR=0x2B8CBCCC, POW2=True, PDL=True,
    )
    assert code.count("tt.dot ") == 2 * -(-rank // block) and "warp_group_dot" not in code
    assert set(re.findall(r"kWidth = (\d+)", code)) == {"2"}
    before, after = code.split("griddepcontrol.wait", 1)
    assert ("prefetch.global.L2" in before) == bool(chains) and "tt.load" not in before
    assert "prefetch" not in after and after.count("tt.load") > 4
    _asked_for_at_once(code, chains)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rank", [8, 32, 192])
def test_heads_after_adapters_have_the_same_instructions(rank: int, fp8: bool) -> None:
    """A chain over the rank for each half of a head, of q, of k and of v by one code."""
    pytest.importorskip("triton")
    from jetrl.kernels.adapters import heads

    home = "*u8" if fp8 else "*bf16"
    pointers = dict.fromkeys(("qkv", "b", "q_weight", "k_weight", "q_out", "scales"), "*bf16")
    pointers |= {"k_out": home, "v_out": home, "cos": "*fp32", "sin": "*fp32", "u": "*fp32", "scale": "fp32"}
    pointers |= {"positions": "*i64", "slots": "*i64"}
    block = min(128, max(16, 1 << (rank - 1).bit_length()))
    code = compiled(
        heads._finish_heads_kernel, pointers, 4, T=16, R=block, RANK=rank, CHAINS=8, UNROLL=8, OF_Q=0, OF_K=-1, OF_V=1,
        ROW_Q=0, ROW_K=0, ROW_V=4096, N=32, G=8, H=128, HB=64, EPS=1e-6, NORM=True, PAGED=True, PAGE=128, FP8=fp8,
        FLOOR=0x2B8CBCCC, PDL=True,
    )
    assert code.count("tt.dot ") == 2 * -(-rank // block) and "warp_group_dot" not in code
    assert set(re.findall(r"kWidth = (\d+)", code)) == {"2"} and "math.fma" not in code.split("tt.dot ")[0]
    assert not re.search(r"local_alloc [^\n]*xf32", code)
    before, after = code.split("griddepcontrol.wait", 1)
    assert "prefetch.global.L2" in before and "tt.load" not in before and "prefetch" not in after


def test_sums_of_chains_are_asked_for_in_equal_parts() -> None:
    pytest.importorskip("triton")
    from jetrl.kernels.adapters.triton import unrolled

    assert [unrolled(n, 24) for n in (0, 1, 2, 8, 19, 24, 28, 56)] == [1, 1, 2, 8, 19, 24, 14, 14]
    assert [unrolled(n, 12) for n in (2, 8, 19, 24, 28, 56)] == [2, 8, 8, 12, 7, 8]
