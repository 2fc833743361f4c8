"""Optimizer, schedule and gradient norm against hand-worked numbers; state survives a round trip to the bit."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from jetrl.errors import UserError
from jetrl.model.master import Master
from jetrl.train.optim import (
    MixedAdamW,
    build_optimizer,
    clip_factor,
    clip_gradients_,
    clipped_step,
    global_grad_norm,
    lr_at,
    schedule_factor,
    set_lr,
)


def config(**changes) -> SimpleNamespace:
    base = dict(
        lr=0.1, weight_decay=0.5, adam_betas=[0.9, 0.95], adam_eps=1e-8, master_dtype="float32",
        optimizer_dtype="float32", offload_optimizer=False, steps=10, lr_schedule="constant", warmup_steps=0,
        min_lr_ratio=0.0,
    )
    return SimpleNamespace(**(base | changes))


def named(dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    g = torch.Generator().manual_seed(0)
    shapes = {
        "embed.weight": (6, 4), "layers.0.attn.norm.weight": (4,), "layers.0.attn.qkv.weight": (8, 4),
        "layers.0.attn.qkv.bias": (8,), "norm.weight": (4,), "lm_head.weight": (6, 4),
    }
    return [(name, nn.Parameter(torch.randn(shape, generator=g).to(dtype))) for name, shape in shapes.items()]


def optimizer_of(params: list[tuple[str, nn.Parameter]], settings: SimpleNamespace) -> torch.optim.Optimizer:
    return build_optimizer({name: Master(param) for name, param in params}, settings)


def give_gradients(params: list[tuple[str, nn.Parameter]], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for _, param in params:
        param.grad = torch.randn(param.shape, generator=g).to(param.dtype)


def with_grads(*grads: torch.Tensor) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_step_by_hand(dtype: str):
    # first step: m / (1 - b1) = g, sqrt(v / (1 - b2)) = |g|, so u = sign(g).
    # matrix: p (1 - lr wd) - lr u = 1 * 0.95 - 0.1 = 0.85; vector, not decayed: 1 - 0.1 = 0.9; g < 0: 1.05 and 1.1
    # nearest BF16 values: 0.85 * 256 = 217.6 -> 218; 0.9 * 256 = 230.4 -> 230; 1.05 * 128 = 134.4 -> 134;
    # 1.1 * 128 = 140.8 -> 141
    params = [("w", nn.Parameter(torch.ones(1, 2, dtype=getattr(torch, dtype)))),
              ("b", nn.Parameter(torch.ones(2, dtype=getattr(torch, dtype))))]
    optimizer = optimizer_of(params, config(master_dtype=dtype))
    for _, param in params:
        param.grad = torch.tensor([2.0, -0.5], dtype=param.dtype).view_as(param)
    optimizer.step()
    values = [x for _, param in params for x in param.flatten().tolist()]
    exact = [0.85, 1.05, 0.9, 1.1] if dtype == "float32" else [218 / 256, 134 / 128, 230 / 256, 141 / 128]
    assert values == pytest.approx(exact, abs=1e-6 if dtype == "float32" else 0)


def test_second_step_by_hand():
    # gradients 1 then 0; b1 = 0.9, b2 = 0.95: m = 0.1, 0.09; v = 0.05, 0.0475
    # step 1: u = 1. step 2: m^ = 0.09 / 0.19 = 0.473684; v^ = 0.0475 / 0.0975 = 0.487179; u = 0.473684 / 0.697982
    # = 0.678648. p = -0.1 - 0.0678648 = -0.1678648
    for optimizer_type in (MixedAdamW, torch.optim.AdamW):
        param = nn.Parameter(torch.zeros(1))
        optimizer = optimizer_type([param], lr=0.1, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
        for grad in (1.0, 0.0):
            param.grad = torch.tensor([grad])
            optimizer.step()
        assert param.item() == pytest.approx(-0.1678648, abs=1e-7)


def test_decay_only_on_matrices_but_not_the_embedding():
    params = named()
    optimizer = optimizer_of(params, config())
    names = {id(param): name for name, param in params}
    by_decay = {group["weight_decay"]: [names[id(p)] for p in group["params"]] for group in optimizer.param_groups}
    assert by_decay == {
        0.5: ["layers.0.attn.qkv.weight", "lm_head.weight"],
        0.0: ["embed.weight", "layers.0.attn.norm.weight", "layers.0.attn.qkv.bias", "norm.weight"],
    }


def test_frozen_parameters_are_left_out_and_wrong_dtypes_refused():
    params = named()
    params[0][1].requires_grad_(False)
    optimizer = optimizer_of(params, config())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(params) - 1
    with pytest.raises(UserError, match="embed.weight is torch.float32, but train.master_dtype asks"):
        optimizer_of(named(), config(master_dtype="bfloat16"))
    with pytest.raises(UserError, match="float16"):
        optimizer_of(named(), config(master_dtype="float16"))


def test_bf16_master_equals_the_formula_over_many_steps():
    """Against the docstring's formula in float64, rounded once a step; states stay FP32 and near the float64 ones."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(64, 8).to(torch.bfloat16))
    optimizer = optimizer_of([("w", param)], config(lr=0.01, master_dtype="bfloat16"))
    assert isinstance(optimizer, MixedAdamW)
    m = v = torch.zeros(64, 8, dtype=torch.float64)
    agreeing = 0
    for t in range(1, 21):
        param.grad = torch.randn(64, 8).to(torch.bfloat16)
        grad, before = param.grad.double(), param.detach().double()
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad * grad
        update = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        optimizer.step()
        expected = (before * (1 - 0.01 * 0.5) - 0.01 * update).to(torch.bfloat16)
        agreeing += (param.detach() == expected).sum().item()
    state = optimizer.state[param]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    torch.testing.assert_close(state["exp_avg_sq"].double(), v, rtol=1e-5, atol=1e-8)
    assert agreeing / (20 * 64 * 8) > 0.998  # the rest are ties and near-ties of the one rounding


def test_small_updates_vanish_in_bf16_but_not_in_fp32():
    """The documented limit: at 1.0 the spacing below is 2^-8, so a step of 1e-3 (under 2^-9) leaves the value alone."""
    for dtype, moved in (("bfloat16", False), ("float32", True)):
        param = nn.Parameter(torch.ones(4, dtype=getattr(torch, dtype)))
        optimizer = optimizer_of([("norm.weight", param)], config(lr=1e-3, master_dtype=dtype))
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert bool((param != 1).all()) is moved and bool((param != 1).any()) is moved


def test_fp32_gradients_of_bf16_parameters_are_used_unrounded():
    param = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    param.grad = torch.tensor([1.0 + 2**-20])
    optimizer = optimizer_of([("w", param)], config(master_dtype="bfloat16"))
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].item() == pytest.approx(0.1 * (1 + 2**-20), rel=1e-7)
    assert optimizer.state[param]["exp_avg"].item() != pytest.approx(0.1, rel=5e-7)


@pytest.mark.parametrize(("dtype", "moments"), [
    ("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"),
])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_resume_is_exact(dtype: str, moments: str, as_tensors: bool):
    """Two steps, save, load into a new optimizer, two more: bit-equal to four steps without a break.

    `as_tensors`: a checkpoint may hand the integer step back as a tensor.
    """
    settings = config(master_dtype=dtype, optimizer_dtype=moments, lr=0.01)
    straight = named(getattr(torch, dtype))
    optimizer = optimizer_of(straight, settings)
    for seed in (1, 2):
        give_gradients(straight, seed)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    if as_tensors:
        saved["state"] = {i: {k: torch.as_tensor(v) for k, v in s.items()} for i, s in saved["state"].items()}
    resumed = [(name, nn.Parameter(param.detach().clone())) for name, param in straight]
    again = optimizer_of(resumed, settings)
    again.load_state_dict(saved)
    after = again.state_dict()["state"]
    for number, state in optimizer.state_dict()["state"].items():
        assert type(after[number]["step"]) is type(state["step"]), "a float32 step would change the bias correction"
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(after[number][key]), torch.as_tensor(value)), (number, key)
            if key != "step":
                assert after[number][key].dtype == getattr(torch, moments)
    for seed in (3, 4):
        for params, opt in ((straight, optimizer), (resumed, again)):
            give_gradients(params, seed)
            opt.step()
    for (name, one), (_, two) in zip(straight, resumed, strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # W = 2, steps = 6: steps 0, 1 warm up with 1/3, 2/3; then x = 0, 1/4, 1/2, 3/4, and the end at step 6; m = 0.1
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.775, 0.55, 0.325, 0.1, 0.1]),
        # m + (1 - m) (1 + cos(pi x)) / 2 = 0.1 + 0.45 (1 + {1, 0.70710678, 0, -0.70710678, -1})
        ("cosine", [1 / 3, 2 / 3, 1, 0.868198, 0.55, 0.231802, 0.1, 0.1]),
    ],
)
def test_schedules_by_hand(schedule: str, expected: list[float]):
    settings = config(lr=2.0, lr_schedule=schedule, warmup_steps=2, steps=6, min_lr_ratio=0.1)
    assert [lr_at(step, settings) / 2 for step in range(8)] == pytest.approx(expected, abs=1e-6)


def test_schedule_without_warmup_starts_at_peak_and_set_lr_reaches_all_groups():
    assert lr_at(0, config(lr_schedule="cosine")) == 0.1
    assert schedule_factor(5, steps=3, schedule="linear", warmup_steps=3) == 0.0
    optimizer = optimizer_of(named(), config())
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_bad_schedules_are_refused():
    with pytest.raises(UserError, match="wsd"):
        lr_at(0, config(lr_schedule="wsd"))
    with pytest.raises(ValueError, match="min_lr_ratio = 1.5"):
        lr_at(0, config(min_lr_ratio=1.5))


def test_norm_and_clipping_by_hand():
    # 3^2 + 4^2 + 12^2 = 169: norm 13; clipped to 6.5 every gradient is halved
    params = [*with_grads(torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])), nn.Parameter(torch.ones(3))]
    assert global_grad_norm(params) == 13.0
    assert clip_gradients_(params, 13.0, 13.0) == 1.0 and params[0].grad.tolist() == [3.0, 4.0]
    assert clip_gradients_(params, 13.0, 6.5) == 0.5
    assert params[0].grad.tolist() == [1.5, 2.0] and params[1].grad.tolist() == [[6.0]] and params[2].grad is None


STATES = [  # masters, moments, offload
    ("float32", "float32", False), ("float32", "bfloat16", False), ("bfloat16", "float32", False),
    ("bfloat16", "bfloat16", True), ("float32", "float32", True), ("float32", "8bit", False),
    ("bfloat16", "8bit", False),
]


@pytest.mark.parametrize(("masters", "moments", "offload"), STATES)
@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16])
def test_a_clipped_step_is_clipping_and_then_a_step(masters: str, moments: str, offload: bool, grads: torch.dtype):
    """Three steps: not clipped, and by two factors that are no FP32 numbers. One matrix has 8-bit moments."""
    if moments == "8bit":
        pytest.importorskip("torchao")
    if (masters, moments, offload) == ("float32", "float32", False):
        grads = torch.float32  # torch's AdamW takes no others
    settings = config(lr=0.01, master_dtype=masters, optimizer_dtype=moments, offload_optimizer=offload)
    made = []
    for _ in range(2):
        large = torch.randn(64, 128, generator=torch.Generator().manual_seed(7)).to(getattr(torch, masters))
        params = [*named(getattr(torch, masters)), ("layers.1.large.weight", nn.Parameter(large))]
        for _, param in params:
            param.grad_dtype = grads
        made.append((params, optimizer_of(params, settings)))
    for seed, norm in ((1, 0.9), (2, 1.7), (3, 2.3)):
        for i, (params, optimizer) in enumerate(made):
            g = torch.Generator().manual_seed(seed)
            for _, param in params:
                param.grad = torch.randn(param.shape, generator=g).to(grads)
            if i:
                clipped_step(optimizer, norm, 1.0)
            else:
                factor = clip_gradients_([param for _, param in params], norm, 1.0)
                assert factor == min(1.0, 1.0 / norm)
                optimizer.step()
    (want, one), (got, two) = made
    for (name, a), (_, b) in zip(want, got, strict=True):
        assert torch.equal(a, b), name
    held = [optimizer.state_dict()["state"] for optimizer in (one, two)]
    for number, slots in held[0].items():
        for key, value in slots.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(held[1][number][key])), (number, key)


def test_mixed_adamw_leaves_a_clipped_gradient_as_it_is():
    params = with_grads(torch.tensor([3.0, 4.0]))
    clipped_step(optimizer := MixedAdamW(params, lr=0.0), 5.0, 2.5)
    assert params[0].grad.tolist() == [3.0, 4.0]
    assert optimizer.state[params[0]]["exp_avg"].tolist() == pytest.approx([0.15, 0.2], rel=1e-6)  # 0.1 * grad / 2


def test_norm_is_accurate():
    """Sizes around the row length and beyond one chunk; against math.fsum."""
    g = torch.Generator().manual_seed(0)
    grads = [torch.randn(size, generator=g) * 10.0**k for k, size in enumerate([1, 4095, 4096, 4097, 200_001])]
    grads.append(torch.randn(4096 * 1024 + 5, generator=g).to(torch.bfloat16))
    exact = math.sqrt(math.fsum(math.fsum(grad.double().square().tolist()) for grad in grads[:-1])
                      + grads[-1].double().square().sum().item())
    assert global_grad_norm(with_grads(*grads)) == pytest.approx(exact, rel=1e-14)


def test_norm_does_not_depend_on_threads():
    """torch's own sum of such a vector differs in the last bit between thread counts for about half of the seeds."""
    params = [with_grads(torch.randn(300_000, generator=torch.Generator().manual_seed(seed))) for seed in range(8)]
    before = torch.get_num_threads()
    norms = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            norms.append([global_grad_norm(one) for one in params])
    finally:
        torch.set_num_threads(before)
    assert norms[0] == norms[1] == norms[2]


def test_norm_of_tiny_and_huge_gradients_does_not_leave_the_range():
    assert global_grad_norm(with_grads(torch.full((4,), 1e30))) == pytest.approx(2e30, rel=1e-6)
    assert global_grad_norm(with_grads(torch.full((4,), 1e-30))) == pytest.approx(2e-30, rel=1e-6)


def test_bad_norms_are_refused():
    params = with_grads(torch.tensor([math.nan]))
    assert math.isnan(global_grad_norm(params))
    for norm in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"gradient norm is {norm}"):
            clip_factor(norm, 1.0)
    with pytest.raises(UserError, match="max_grad_norm = 0"):
        clip_factor(1.0, 0.0)
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        global_grad_norm([nn.Parameter(torch.ones(1))])
