"""The FP8 GEMM for few tokens, without a GPU: how work is cut, and what is compiled for Hopper."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")
from jetrl.kernels.gemm import choice
from jetrl.kernels.gemm import few_rows as few

SIZES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (16, 128), (4112, 384), (151936, 2560), (49152, 640)]


def test_every_variant_fits_and_reaches_every_row_and_column() -> None:
    found = 0
    for (n, k), tokens, name in product(SIZES, (1, 8, 9, 33, 64), choice.VARIANTS):
        shape = choice.shape_of(n, k, tokens, name)
        if shape is None:
            continue
        found += 1
        assert shape.rows % 16 == 0 and shape.columns >= tokens and shape.box in (16, 32, 64)
        assert shape.rows % shape.box == 0 and 64 % shape.box == 0
        assert k // 128 % shape.groups == 0, "groups of K are whole"
        assert shape.shared() <= (227 << 10) and 1 <= shape.stages <= 12
        assert shape.groups * shape.units * 4 >= 128, "a copy of scales is at least 128 bytes"
        assert shape.products * shape.columns <= 192, "sums stay in registers"
    assert found > 150


def test_weights_of_qwen3_8b_occupy_the_device_in_one_round() -> None:
    rows = {}
    for n, k in SIZES[:4]:
        shape = choice.shape_of(n, k, 1, "one")
        assert shape is not None
        rows[n] = shape.rows
        assert 128 <= -(-n // shape.rows) <= choice.PROCESSORS
        assert shape.stages * shape.groups * shape.rows * 128 >= 64 << 10, "bytes in flight"
    assert rows == {4096: 32, 6144: 48, 24576: 192}


def test_two_or_three_programs_share_a_multiprocessor() -> None:
    for n, k in SIZES[:4]:
        for name, share in (("half", 2), ("two", 2)):
            shape = choice.shape_of(n, k, 4, name)
            assert shape is not None and share * (shape.shared() + 1024) <= 228 << 10
    shape = choice.shape_of(24576, 4096, 4, "64")
    assert shape is not None and 3 * (shape.shared() + 1024) <= 228 << 10


def test_sizes_it_cannot_take_are_left_to_deepgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.shape_of(4096, 4096, 65, "one") is None
    assert choice.shape_of(4096, 4100, 1, "one") is None
    assert choice.shape_of(4100, 4096, 1, "one") is None
    monkeypatch.setattr(choice, "CHOSEN", {(4096, 4096): ((2, choice.DEEPGEMM), (8, "one"))})
    monkeypatch.setattr(choice, "OTHERS", ((1, "half"),))
    assert choice.chosen(4096, 4096, 8) == choice.shape_of(4096, 4096, 8, "one")
    assert choice.chosen(4096, 4096, 9) is None and choice.chosen(4096, 4096, 2) is None
    assert choice.chosen(8192, 4096, 1) == choice.shape_of(8192, 4096, 1, "half")
    assert choice.chosen(128, 128, 1) is None, "too small to gain"


def compiled(shape: few.Shape) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    each = shape.groups if shape.boxes == 1 else 1
    codes, units = few._CODES_3D.value, few._UNITS.value
    kinds = {
        "weight": f"tensordesc<fp8e4nv[{each},{shape.box},128],{codes}>",
        "tokens": f"tensordesc<fp8e4nv[{shape.groups},{shape.columns},128],{codes}>",
        "token_scales": f"tensordesc<fp32[{shape.groups},{shape.units}],{units}>",
        "scales": "*fp32", "out": "*bf16",
    }
    constants = {
        "BOX": shape.box, "BOXES": shape.boxes, "STAGES": shape.stages, "COLS": shape.columns,
        "GROUPS": shape.groups, "PDL": True,
    }
    names = few._few_rows_kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in ("scales", "out", "n")}
    source = GluonASTSource(fn=few._few_rows_kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 4, "launch_pdl": True, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


CASES = [((4096, 4096), 1, "one"), ((6144, 4096), 16, "one"), ((24576, 4096), 64, "one"), ((24576, 4096), 4, "two")]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tokens", "name"), CASES)
def test_the_tensor_core_is_asked_for_the_sums_of_the_definition(size: tuple[int, int], tokens: int, name: str) -> None:
    shape = choice.shape_of(*size, tokens, name)
    assert shape is not None
    kernel = compiled(shape)
    ptx, sass = kernel.asm["ptx"], kernel.asm["sass"]
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+) \{.*\}, %rd\d+, %rd\d+, (\S+), 1, 1;", ptx)
    count = shape.groups * shape.products
    assert len(found) == ptx.count("wgmma.mma_async") == 4 * count
    assert {kind for kind, _ in found} == {f"m64n{shape.columns}k32.f32.e4m3.e4m3"}
    assert all((begin == "0") == (i % 4 == 0) for i, (_, begin) in enumerate(found)), "a group begins anew"
    elements = 64 * shape.columns // 128  # of a product in a thread
    assert len(re.findall(r"fma\.rn\.f32", ptx)) == count * elements and "fma.rn.ftz" not in ptx
    assert "add.rn.f32" not in ptx and "add.f32" not in ptx and "mul.rn.ftz" not in ptx
    assert sass.count("WARPGROUP.DEPBAR") <= 2, "the compiler lets products overlap"
    assert "STL" not in sass and "LDL" not in sass, "nothing is spilt"
    assert kernel.metadata.shared == shape.shared()
    early, late = ptx.split("griddepcontrol.wait")
    assert "cp.async.bulk.tensor.3d" in early and "cp.async.bulk.tensor.2d" not in early
    assert "cp.async.bulk.tensor.2d" in late and "ld.global" not in early
