"""The codes that a publish changes are counted, next to a count by hand; counting changes no bit."""

from __future__ import annotations

import pytest
import torch

from jetrl.model.flips import Flips
from jetrl.model.linear import FlowLinear
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe
from jetrl.spec import SHAPES


def codes(model: Transformer) -> list[torch.Tensor]:
    held = [m.quantized for m in model.published_modules() if isinstance(m, FlowLinear)]
    return [q.codes.view(torch.uint8).clone() for q in held if q is not None]


@pytest.mark.parametrize("precision", ["fp8", "w8a16", "bf16"])
def test_flips_are_those_counted_by_hand(precision: str) -> None:
    spec = SHAPES["tiny-moe"]
    model = Transformer(spec, build_recipe(precision, spec.num_layers)).init_random(0)
    before = codes(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p += 0.002 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
    model.publish(flips := Flips())
    after = codes(model)
    if precision == "bf16":
        assert before == [] and flips.share is None
        return
    changed = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    total = sum(a.numel() for a in before)
    assert flips.share == changed / total and 0.05 < flips.share < 1.0
    model.publish(again := Flips())
    assert again.share == 0.0 and all(torch.equal(a, b) for a, b in zip(after, codes(model), strict=True))


def test_codes_of_frozen_weights_do_not_count() -> None:
    spec = SHAPES["tiny-moe"]
    model = Transformer(spec, build_recipe("fp8", spec.num_layers)).init_random(0).publish()
    trained = [n for n, m in model.named_modules() if isinstance(m, FlowLinear) and m.quantized is not None][0]
    model.freeze(lambda name: name != f"{trained}.weight")
    linear = model.get_submodule(trained)
    assert isinstance(linear, FlowLinear) and linear.quantized is not None
    before = linear.quantized.codes.view(torch.uint8).clone()
    with torch.no_grad():
        linear.weight += 0.002 * torch.randn(linear.weight.shape, generator=torch.Generator().manual_seed(1))
    model.publish(flips := Flips())
    changed = int((before != linear.quantized.codes.view(torch.uint8)).sum())
    assert flips.share == changed / before.numel() and changed
    model.freeze([f"{trained}.weight"])
    model.publish(none := Flips())
    assert none.share is None
