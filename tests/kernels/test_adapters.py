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


@pytest.mark.parametrize(("split", "tokens", "rows"), [(True, 16, 16), (False, 64, 64), (False, 64, 16)])
def test_a_chain_is_by_one_instruction_and_its_sum_is_added_outside_of_it(split: bool, tokens: int, rows: int) -> None:
    """`mma.sync` in the natural order of K; the compiler has not made the sum of chains the next chain's begin."""
    pytest.importorskip("triton")
    from jetrl.kernels.adapters import triton as kernels

    pointers = {"x": "*bf16", "a": "*bf16", "out": "*fp32" if split else "*bf16", "codes": "*u8", "scale": "*fp32"}
    code = compiled(
        kernels._shrink_kernel, pointers, 2, T=tokens, R=rows, STEP=kernels._STEP,
        STEPS=kernels.CHAIN // kernels._STEP, SPLIT=split, QUANT=split, FLOOR=0x2B8CBCCC, POW2=True, STAGES=3, PDL=True,
    )
    assert code.count("tt.dot ") == 1 and "warp_group_dot" not in code
    assert set(re.findall(r"kWidth = (\d+)", code)) == {"2"}
    assert code.count("arith.addf") == (0 if split else 1)


@pytest.mark.parametrize(("chains", "tokens", "columns", "warps"), [(0, 32, 256, 4), (24, 16, 128, 2), (8, 32, 128, 4)])
@pytest.mark.parametrize("rank", [8, 32, 192])
def test_expand_is_one_chain_and_the_product_with_the_scale_is_rounded(
    chains: int, tokens: int, columns: int, warps: int, rank: int
) -> None:
    pytest.importorskip("triton")
    from jetrl.kernels.adapters import triton as kernels

    pointers = {"y": "*bf16", "u": "*fp32" if chains else "*bf16", "b": "*bf16", "out": "*bf16", "scale": "fp32"}
    block = min(128, max(16, 1 << (rank - 1).bit_length()))
    code = compiled(
        kernels._expand_kernel, pointers, warps, T=tokens, N=columns, R=block, RANK=rank, CHAINS=chains, PDL=True
    )
    assert code.count("tt.dot ") == -(-rank // block) and "warp_group_dot" not in code
    assert set(re.findall(r"kWidth = (\d+)", code)) == {"2"} and "math.fma" not in code
    assert code.count("arith.mulf") == 1
