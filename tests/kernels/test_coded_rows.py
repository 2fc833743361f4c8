"""Which BF16 GEMMs read a weight's codes, without a GPU; `test_triton_interpret.py` runs the kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from jetrl.kernels.gemm import choice, coded_rows
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.ops import quantize_weight


def test_rows_of_a_program_divide_the_weight() -> None:
    assert coded_rows.rows_for(4096, 4096, 64) == 64 and coded_rows.rows_for(4096, 4096, 32) == 32
    assert coded_rows.rows_for(96, 128, 64) == 32 and coded_rows.rows_for(4112, 384, 64) == 16
    assert coded_rows.rows_for(4100, 4096, 64) is None and coded_rows.rows_for(4096, 4100, 64) is None


def test_without_a_measurement_no_codes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.coded(24576, 4096, 16) == 64 and choice.coded(24576, 4096, 17) is None, "measured on an H200"
    assert choice.coded(4096, 4096, 1) is None
    rules = ((8, 16), (64, 64))
    monkeypatch.setattr(choice, "CODED", {(4096, 4096): rules, (4096, 4100): rules})
    assert [choice.coded(4096, 4096, m) for m in (1, 8, 9, 64, 65)] == [16, 16, 64, 64, None]
    assert choice.coded(128, 128, 1) is None, "not measured"
    assert choice.coded(4096, 4100, 1) is None


@pytest.mark.parametrize(
    ("sections", "width", "tokens", "read"),
    [((256, 128), 256, 4, True), ((200, 184), 256, 4, False), ((384,), 200, 4, False), ((384,), 256, 65, False)],
    ids=["chosen", "gaps", "part of a block", "many tokens"],
)
def test_sizes_without_a_kernel_are_left_to_deepgemm(
    sections: tuple[int, ...], width: int, tokens: int, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, ...]] = []
    monkeypatch.setattr(choice, "CODED", {(sum(sections), width): ((64, 64),)})
    monkeypatch.setattr(coded_rows, "matmul", lambda *given: seen.append(given) or torch.ones(1))
    weight: QTensor = quantize_weight(torch.randn(sum(sections), width).bfloat16(), sections, True)
    got = choice.multiply_coded(torch.zeros(tokens, width, dtype=torch.bfloat16), weight)
    assert (got is not None) == read == len(seen)
    if read:
        assert seen[0][1] is weight.codes and seen[0][2] is weight.scale and seen[0][3] == 64
