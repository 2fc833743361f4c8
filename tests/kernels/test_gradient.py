"""Gradients added up in place: the same as autograd's, in FP32 or BF16, and what adding up micro-batches loses."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from tolerances import assert_bitwise_equal
from torch import nn

from jetrl.kernels.update.gradient import (
    Gradient,
    first_waits,
    grad_dtype,
    rows_in_use,
    sent_to,
)
from jetrl.model.master import accumulate_in, masters_of
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe
from jetrl.spec import ModelSpec, RopeSpec
from jetrl.types import ForwardBatch, VarlenPlan

SPEC = ModelSpec(
    family="qwen2", vocab_size=60, hidden_size=40, intermediate_size=136, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=128, tie_embeddings=False, qkv_bias=True,
    qk_norm=False,
)

UNUSED = (40,)  # of the vocabulary, the tokens that `run` does not look up


def model_of(
    precision: str, master: torch.dtype, tied: bool = False, checkpointing: bool = False, wgrad: str = "row"
) -> Transformer:
    spec = replace(SPEC, tie_embeddings=tied)
    recipe = build_recipe(precision, spec.num_layers, wgrad=wgrad)
    return Transformer(spec, recipe, master_dtype=master, activation_checkpointing=checkpointing).init_random(0)


def gradients(master: torch.dtype, accumulate: torch.dtype, parts: int) -> dict[str, torch.Tensor]:
    model = model_of("bf16", master)
    accumulate_in(model, accumulate)
    return run(model, parts)


def run(model: Transformer, parts: int) -> dict[str, torch.Tensor]:
    """Gradients of the mean log-prob of 16 sequences, in `parts` micro-batches."""
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_one_micro_batch_in_place_has_the_bits_of_autograd(
    precision: str, master: torch.dtype, checkpointing: bool, tied: bool
) -> None:
    plain, placed = (model_of(precision, master, tied, checkpointing) for _ in range(2))
    accumulate_in(placed, master)
    want, got = run(plain, 1), run(placed, 1)
    assert got.keys() == want.keys()
    for name in want.keys() - ({"embed.weight"} if tied and master == torch.bfloat16 else set()):
        assert_bitwise_equal(got[name] + 0.0, want[name] + 0.0, name)  # + 0.0: a sum from zero on has no -0
    # the tied table has two contributions: autograd rounds each to BF16 and then the sum, here the sum alone is rounded
    assert error(got, want) < 2**-7


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_several_micro_batches_in_fp32_add_up_as_autograd_adds(precision: str) -> None:
    plain, placed = (model_of(precision, torch.float32) for _ in range(2))
    accumulate_in(placed, torch.float32)
    want, got = run(plain, 4), run(placed, 4)
    for name in want:
        assert_bitwise_equal(got[name] + 0.0, want[name] + 0.0, name)


def test_gradients_stay_where_they_are_and_autograd_never_sees_those_of_matrices() -> None:
    model, seen = model_of("fp8", torch.float32), []
    accumulate_in(model, torch.float32)
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, name=name: seen.append(name) if grad is not None else None)
    first = {name: grad.data_ptr() for name, grad in run(model, 1).items()}
    assert all(p.grad is not None and p.grad.data_ptr() == first[n] for n, p in model.named_parameters())
    again = run(model, 1)
    assert {name: grad.data_ptr() for name, grad in again.items()} == first
    matrices = {name for name, p in model.named_parameters() if p.ndim == 2}
    assert len(matrices) == 2 * 4 + 2 and not matrices & set(seen) and set(seen) == first.keys() - matrices


def test_zero_grad_and_frozen_parameters() -> None:
    model = model_of("fp8", torch.float32)
    accumulate_in(model, torch.float32)
    want = {name: grad.clone() for name, grad in run(model, 2).items()}
    model.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    frozen = ("embed.weight", "lm_head.weight", "layers.0.attn.qkv.weight", "layers.1.mlp.down.weight")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    got = run(model, 2)
    assert got.keys() == want.keys() - set(frozen)
    assert all(torch.equal(got[name], want[name]) for name in got)
    model.zero_grad(set_to_none=False)
    assert not any(grad.any() for grad in got.values())


def test_a_plain_parameter_keeps_its_type() -> None:
    assert grad_dtype(nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))) == torch.bfloat16


class Notes:
    """A sink that keeps one buffer for each matrix and notes when a gradient is complete."""

    def __init__(self) -> None:
        self.buffers: dict[Gradient, torch.Tensor] = {}
        self.calls: list[Gradient] = []

    def buffer(self, gradient: Gradient) -> torch.Tensor:
        return self.buffers.setdefault(gradient, torch.zeros(gradient.param.shape, dtype=gradient.dtype))

    def done(self, gradient: Gradient) -> None:
        self.calls.append(gradient)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_sink_gets_every_matrix_once_a_source_and_last_parameters_first(
    precision: str, checkpointing: bool, tied: bool
) -> None:
    model, other = (model_of(precision, torch.float32, tied, checkpointing) for _ in range(2))
    accumulate_in(other, torch.float32)
    want, sink = run(other, 2), Notes()
    matrices = {name: m.gradient for name, m in masters_of(model).items() if m.param.ndim == 2}
    with sent_to(sink, matrices.values()):
        run(model, 2)
    assert not any(gradient.sink for gradient in matrices.values())
    for name, one in matrices.items():
        assert one.param.grad is None and torch.equal(sink.buffers[one], want[name])
        assert sum(call is one for call in sink.calls) == 2 * one.sources == (4 if tied and "embed" in name else 2)
    half = sink.calls[: len(sink.calls) // 2]
    last = {id(one): i for i, one in enumerate(half)}  # where each became complete
    assert [id(one) for one in reversed(matrices.values())] == sorted(last, key=lambda one: last[one])


@pytest.mark.parametrize("accumulate", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_first_gradient_that_waits_in_bf16_gives_the_same_sum(parts: int, accumulate: torch.dtype) -> None:
    results = []
    for waits in (False, True):
        model = model_of("fp8", torch.float32, wgrad="tile")
        accumulate_in(model, accumulate)
        gradients = [master.gradient for master in masters_of(model).values()]
        down = masters_of(model)["layers.1.mlp.down.weight"].gradient
        if waits:
            down._first = torch.full_like(down.param, torch.nan)  # of an update that failed
            with first_waits(gradients):
                run(model, parts)
                held = down._first
                assert (held is None) == (parts > 1 or accumulate == torch.bfloat16)
                assert held is None or (held.dtype == torch.bfloat16 and down.param.grad is None)
        else:
            run(model, parts)
        assert not any(one._first is not None or one._waits for one in gradients)
        results.append({name: p.grad for name, p in model.named_parameters()})
    for name, want in results[0].items():
        got = results[1][name]
        assert got is not None and want is not None and got.dtype == accumulate
        assert_bitwise_equal(got, want, name)


@pytest.mark.parametrize("accumulate", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 4])
def test_rows_in_use_alone_give_the_same_gradient(parts: int, accumulate: torch.dtype) -> None:
    results = []
    for rows in (None, torch.tensor([i for i in range(60) if i not in UNUSED])):
        model = model_of("bf16", torch.float32)
        accumulate_in(model, accumulate)
        gradient, table = model.embed.masters["weight"].gradient, model.embed.weight
        with rows_in_use(gradient, rows) if rows is not None else nullcontext():
            run(model, parts)
            assert (table.grad is None) == (rows is not None)
            held = gradient._row_sum
            assert rows is None or held.shape == (len(rows), 40) and held.dtype == accumulate
        assert gradient._rows is None and gradient._row_sum is None
        assert table.grad.dtype == accumulate and not table.grad[list(UNUSED)].any()
        results.append(table.grad)
    assert results[0].any()
    assert_bitwise_equal(results[1], results[0], "embed.weight")


def test_a_row_that_is_not_in_use_is_refused() -> None:
    for rows in (torch.arange(59), torch.arange(1, 60)):
        model = model_of("bf16", torch.float32)
        accumulate_in(model, torch.float32)
        gradient = model.embed.masters["weight"].gradient
        with pytest.raises(RuntimeError, match="not in use"), rows_in_use(gradient, rows):
            run(model, 1)


def test_a_first_gradient_waits_for_one_of_another_kind() -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    gradient = Gradient(weight, in_place=True)
    with first_waits([gradient]):
        gradient._first = torch.full((3, 2), 2.0, dtype=torch.bfloat16)
        held = gradient.place()
        assert held is not None and held is weight.grad and held.dtype == torch.float32
        held.add_(1)
    assert weight.grad is not None and weight.grad.tolist() == [[3.0, 3.0]] * 3
