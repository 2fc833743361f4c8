"""Gradients of BF16 masters in BF16 or FP32: the type that arrives, and what adding up micro-batches loses."""

from __future__ import annotations

import torch
from torch import nn

from jetrl.kernels.gradient import accumulate_in, grad_dtype
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec, RopeSpec
from jetrl.types import ForwardBatch, VarlenPlan

SPEC = ModelSpec("qwen2", 60, 40, 136, 2, 4, 2, 16, 1e-6, RopeSpec(1e4), 128, False, True, False)


def gradients(master: torch.dtype, accumulate: torch.dtype, parts: int) -> dict[str, torch.Tensor]:
    """Of the mean log-prob of 16 sequences, in `parts` micro-batches."""
    model = Transformer(SPEC, Recipe("bf16", SPEC.num_layers), master_dtype=master).init_random(0)
    accumulate_in(model, accumulate)
    tokens = torch.randint(0, 60, (16, 12), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    for part, target in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
        n = len(part)
        plan = VarlenPlan(torch.arange(n + 1, dtype=torch.int32) * 12, (12,) * n)
        batch = ForwardBatch(part.flatten(), torch.arange(12).repeat(n), plan, "train")
        logprobs, _ = model.token_logprobs(model(batch), target.flatten(), 1.0)
        (logprobs.sum() / tokens.numel()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    return max(float((got[k].double() - want[k].double()).norm() / want[k].double().norm()) for k in want)


def test_fp32_gradients_of_bf16_masters_are_those_of_fp32_masters() -> None:
    for parts in (1, 16):  # the published copies are the same: random weights are rounded to BF16 either way
        want = gradients(torch.float32, torch.float32, parts)
        got = gradients(torch.bfloat16, torch.float32, parts)
        assert got.keys() == want.keys() and all(g.dtype == torch.float32 for g in got.values())
        assert all(torch.equal(got[k], want[k]) for k in want)


def test_bf16_gradients_lose_what_fp32_keeps() -> None:
    want = gradients(torch.float32, torch.float32, 1)
    fine, coarse = (gradients(torch.bfloat16, dtype, 16) for dtype in (torch.float32, torch.bfloat16))
    assert all(g.dtype == torch.bfloat16 for g in coarse.values())
    assert error(fine, want) < 5e-3
    assert error(coarse, want) > 1.5 * error(fine, want)


def test_a_plain_parameter_keeps_its_type() -> None:
    assert grad_dtype(nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))) == torch.bfloat16
