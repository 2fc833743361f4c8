"""Formats: the short names that people read, and that an inconsistent format cannot be made."""

from __future__ import annotations

import ast
import dataclasses
import math
import pathlib

import pytest
import torch

import jetrl.precision
from jetrl.kernels import reference
from jetrl.precision.formats import (
    AMAX_FLOOR,
    BF16,
    E4M3_MAX,
    FP32,
    Format,
    act_1x128,
    kv_head,
    weight_128x128,
    wgrad_128x1,
)


@pytest.mark.parametrize(
    ("format", "text", "block"),
    [
        (BF16, "bf16", None),
        (FP32, "fp32", None),
        (act_1x128("fp32"), "e4m3[1x128,fp32]", (1, 128)),
        (act_1x128("pow2"), "e4m3[1x128,pow2]", (1, 128)),
        (weight_128x128("fp32"), "e4m3[128x128,fp32]", (128, 128)),
        (wgrad_128x1("pow2"), "e4m3[128x1,pow2]", (128, 1)),
        (kv_head(64), "e4m3[1x64,pow2]", (1, 64)),
    ],
)
def test_short_form_and_block(format: Format, text: str, block: tuple[int, int] | None) -> None:
    assert str(format) == text
    assert format.block == block
    assert format.is_quantized == (block is not None)
    assert format.pow2 == text.endswith("pow2]")


def test_formats_are_values() -> None:
    assert act_1x128("fp32") == act_1x128("fp32") != act_1x128("pow2")
    assert len({act_1x128("fp32"), act_1x128("fp32"), wgrad_128x1("fp32")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        BF16.dtype = "float32"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("dtype", "block", "scale"),
    [("float8_e4m3fn", None, "fp32"), ("float8_e4m3fn", (1, 128), None), ("bfloat16", (1, 128), "fp32")],
)
def test_inconsistent_format_is_refused(dtype: str, block: tuple[int, int] | None, scale: str | None) -> None:
    with pytest.raises(AssertionError, match="inconsistent format"):
        Format("x", dtype, block, scale, 0.0, "r")  # type: ignore[arg-type]


def test_reference_quantizer_follows_the_rule_as_written() -> None:
    x = torch.tensor([[3.0, -0.7, 1e-3] + [0.0] * 125, [0.0] * 128], dtype=torch.float32)
    for scale in ("fp32", "pow2"):
        q = reference.quantize_1x128(x, pow2=act_1x128(scale).pow2)  # type: ignore[arg-type]
        for row, amax in enumerate((3.0, AMAX_FLOOR)):
            expected = torch.tensor(amax) / torch.tensor(E4M3_MAX)
            if scale == "pow2":
                expected = torch.tensor(2.0 ** math.ceil(math.log2(expected.item())))
            assert q.scale[row, 0].item() == expected.item()
            codes = (x[row] / expected).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            assert torch.equal(codes.view(torch.uint8), q.codes[row].view(torch.uint8))


def test_no_module_here_imports_torch() -> None:
    for path in pathlib.Path(jetrl.precision.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                allowed = not name.startswith("jetrl") or name.startswith(("jetrl.precision", "jetrl.types"))
                assert allowed or name in ("jetrl.spec", "jetrl.errors", "jetrl.choices"), f"{path.name} imports {name}"
                assert name.split(".")[0] not in ("torch", "numpy"), f"{path.name} imports {name}"
