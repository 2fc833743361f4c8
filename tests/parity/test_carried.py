"""The certificate's link of carried sequences: it holds, finds planted faults, and gives the weights back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.engine.engine import PagedEngine, spans_with
from jetrl.model.published import Norm
from jetrl.model.transformer import Transformer
from jetrl.parity import carried
from jetrl.parity.carried import carried_link, other_weights
from jetrl.parity.rows import LinkResult, Workload, random_sequences
from jetrl.precision.recipe import build_recipe
from jetrl.spec import SHAPES, ModelSpec, RopeSpec
from jetrl.types import Completion, WeightSet

SPEC = ModelSpec(
    family="qwen3", vocab_size=53, hidden_size=72, intermediate_size=136, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=128, tie_embeddings=True, qkv_bias=False,
    qk_norm=True,
)
WORK = Workload(num_sequences=5, max_prompt=20, new_tokens=9, chunk=5, page_size=4)


def model_of(precision: str) -> Transformer:
    model = Transformer(SPEC, build_recipe(precision, SPEC.num_layers)).init_random(0)
    with torch.no_grad():  # larger than at the start of training, so that attention is not nearly uniform
        for p in model.parameters():
            p.mul_(4.0 if p.ndim == 2 else 1.0)
    return model.publish()


@torch.no_grad()
def link(precision: str = "fp8", model: Transformer | None = None) -> LinkResult:
    model = model_of(precision) if model is None else model
    return carried_link(model, random_sequences(model, WORK), WORK)


def test_every_token_has_the_log_prob_of_its_version() -> None:
    found = link()
    assert found.ok and found.link == "w" and found.max_abs_diff == 0.0 and found.first_difference is None
    assert found.rows == WORK.num_sequences * WORK.new_tokens


def test_other_engines_flows_differ() -> None:
    found = link("fp8_rollout")
    assert not found.ok and found.max_abs_diff and "drawn by version" in str(found.first_difference)


def test_keys_and_values_that_are_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: what is under way just goes on, as other systems have it."""

    def load(self: PagedEngine, weights: WeightSet) -> None:
        for seq in (*self._scheduler.running, *self._scheduler.waiting):
            length = int(self._scheduler.slots.length[seq.slot]) if seq.slot >= 0 else len(seq.tokens)
            drawn = length - seq.prefix.length
            seq.before = spans_with(seq.before, seq.num_before, drawn, weights.version - 1)
            seq.num_before = drawn
        self.weights = weights

    asked = PagedEngine.resume
    monkeypatch.setattr(PagedEngine, "load", load)
    monkeypatch.setattr(PagedEngine, "suspend", lambda self: [])
    monkeypatch.setattr(PagedEngine, "resume", lambda self, some: asked(self, some) if some else None)
    found = link()
    assert found.tested and found.rows_different > WORK.new_tokens
    assert "drawn by version 2" in str(found.first_difference)


def test_spans_that_are_moved_by_one_token_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(ended: Completion) -> Any:
        return tuple((start + (start > 0), version) for start, version in ended.spans)

    monkeypatch.setattr(carried, "_spans", moved)
    found = link()
    assert found.tested and WORK.num_sequences < found.rows_different <= 2 * WORK.num_sequences


def test_weights_that_do_not_change_are_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "__imul__", lambda self, factor: self)
    found = link()
    assert not found.tested and not found.ok and "no sequence was carried" in str(found.first_difference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # of masters; BF16 ones share the memory
def test_the_models_own_weights_are_there_afterwards(dtype: torch.dtype) -> None:
    model = Transformer(SPEC, build_recipe("fp8", SPEC.num_layers), master_dtype=dtype).init_random(0).publish()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    norm = model.layers[0].attn_norm.published if hasattr(model.layers[0], "attn_norm") else model.norm.published
    own = norm.clone()
    with pytest.raises(KeyError), other_weights(model) as weights_of:
        seen = []
        for version in range(carried.VERSIONS):
            weights_of(version)
            seen.append(norm.clone())
        assert torch.equal(seen[0], own) and not torch.equal(seen[1], own) and not torch.equal(seen[1], seen[2])
        raise KeyError("whatever happens")
    assert torch.equal(norm, own)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    with torch.enable_grad():  # a forward pass of training asks whether masters have moved since publish()
        assert link(model=model).ok


def test_norms_with_an_offset_change_too_and_come_back() -> None:
    """They read a copy of what they have published."""
    spec = SHAPES["tiny-hybrid"]
    model = Transformer(spec, build_recipe("bf16", spec.num_layers)).init_random(0).publish()
    norms = [module for module in model.modules() if isinstance(module, Norm) and module.offset]
    assert norms
    with other_weights(model) as weights_of:
        weights_of(0)
        own = [norm.factor.clone() for norm in norms]
        weights_of(1)
        assert not any(torch.equal(norm.factor, before) for norm, before in zip(norms, own, strict=True))
    assert all(torch.equal(norm.factor, before) for norm, before in zip(norms, own, strict=True))


def test_it_needs_no_more_tokens_than_the_other_links() -> None:
    work = replace(WORK, new_tokens=4)
    model = model_of("bf16")
    with torch.no_grad():
        assert carried_link(model, random_sequences(model, work), work).rows == 4 * work.num_sequences


def test_sequences_may_all_end_under_the_first_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose decode steps come several in a row: what is drawn beyond the edge is dropped there, too."""
    step = PagedEngine.step

    def to_the_end(self: PagedEngine) -> None:
        while self.has_work:
            step(self)

    monkeypatch.setattr(PagedEngine, "step", to_the_end)
    found = link()
    assert found.ok and found.rows == WORK.num_sequences * WORK.new_tokens
