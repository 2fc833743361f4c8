"""The certificate: exact where it must be, located where it is not, and no operator can break it unnoticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_ops import owners
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels.attention import ops as attention
from jetrl.kernels.dispatch import load_backend
from jetrl.model.transformer import Transformer
from jetrl.parity import certificate as parity
from jetrl.parity import rows as parity_rows
from jetrl.parity.certificate import Certificate, Workload, certify
from jetrl.parity.drawn import graph_link, graph_links, merged_link
from jetrl.parity.rows import Packed, random_sequences, row_hash, varlen
from jetrl.precision.recipe import build_recipe
from jetrl.spec import SHAPES, ModelSpec, RopeSpec
from jetrl.train.batches import MicroBatch
from jetrl.types import ForwardBatch

SPEC = ModelSpec(
    family="qwen3", vocab_size=53, hidden_size=72, intermediate_size=136, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=128, tie_embeddings=True, qkv_bias=False,
    qk_norm=True,
)
WORK = Workload(num_sequences=5, max_prompt=20, new_tokens=9, chunk=5, page_size=4)


def certificate(precision: str, work: Workload = WORK, **options: Any) -> Certificate:
    model = Transformer(SPEC, build_recipe(precision, SPEC.num_layers, **options)).init_random(0)
    with torch.no_grad():  # larger than at the start of training, so that attention is not nearly uniform
        for p in model.parameters():
            p.mul_(4.0 if p.ndim == 2 else 1.0)
    return certify(model.publish(), work, "test", lambda text: None)


@pytest.mark.parametrize(
    ("precision", "options"),
    [("bf16", {}), ("fp8", {}), ("fp8", {"weight_scale": "pow2", "activation_scale": "pow2"}),
     ("fp8", {"num_first_layers_in_bf16": 1}), ("fp8", {"kv_cache": "fp8", "head_dim": SPEC.head_dim}),
     ("w8a16", {"num_last_layers_in_bf16": 1}), ("w8a16", {"kv_cache": "fp8", "head_dim": SPEC.head_dim})],
)
def test_unified_flows_are_bit_equal_in_every_link(precision: str, options: dict[str, Any]) -> None:
    result = certificate(precision, **options)
    assert result.ok, result.links
    assert [link.link for link in result.links] == ["a", "b", "c", "v", "s", "w"]
    assert all(link.max_abs_diff == 0.0 and link.first_difference is None for link in result.links)
    lengths = [link.rows for link in result.links]
    assert lengths[0] == lengths[1] > 40 and min(lengths[2:4]) > 20 and lengths[4] > 45, "they have compared too little"
    assert lengths[5] == WORK.num_sequences * WORK.new_tokens
    written = json.loads(json.dumps(result.to_json()))
    assert written["bit_equal"] is True
    assert written["kv_cache"] == ("e4m3[1x16,pow2]" if "kv_cache" in options else "bf16")


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunks_of_any_size(chunk: int) -> None:
    work = Workload(num_sequences=4, max_prompt=20, new_tokens=5, chunk=chunk, page_size=7, seed=3)
    assert certificate("fp8", work).ok


@pytest.mark.parametrize("sizes", [(2, 1, 4), (2, 2, 4), (3, 1, 6), (6, 1, 4), (2, 1, 60)])
def test_the_smallest_sizes_test_every_link(sizes: tuple[int, int, int]) -> None:
    result = certificate("bf16", Workload(*sizes, chunk=7, page_size=16))
    assert result.ok and all(link.tested for link in result.links), result.links


@pytest.mark.parametrize(("sizes", "told"), [
    ({"num_sequences": 1}, r"1 sequences \(--sequences\) cannot be certified: links a and s .* at least 2\."),
    ({"new_tokens": 3}, r"3 new tokens \(--new-tokens\) cannot be certified: link c .* at least 4\."),
    ({"new_tokens": 128}, r"128 new tokens .* beyond the model's 128 positions\. Give at most 127\."),
])
def test_sizes_that_cannot_test_every_link_are_refused(sizes: dict[str, int], told: str) -> None:
    with pytest.raises(UserError, match=told):
        certificate("bf16", replace(WORK, **sizes))


def test_a_link_whose_case_did_not_arise_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = parity._decode
    monkeypatch.setattr(parity, "_decode", lambda *args: (*real(*args)[:2], 0))
    result = certificate("bf16")
    decode = result.links[2]
    assert not result.ok and not decode.tested and decode.first_difference == "no sequence was interrupted"
    assert [link.link for link in result.links if link.ok] == ["a", "b", "v", "s", "w"]


def test_fp8_rollout_differs_and_the_first_operator_is_named() -> None:
    result = certificate("fp8_rollout")
    packed, chunked, decode, drafted, shared, carried = result.links
    assert packed.ok and shared.ok, "training is BF16 in all of links a and e"
    assert not result.ok and not chunked.ok and not decode.ok and not drafted.ok and not carried.ok
    assert 1e-4 < chunked.max_abs_diff < 5 and chunked.rows_different > chunked.rows / 2
    for link in (chunked, decode):
        assert link.first_difference is not None
        assert "first operator that differs is layers.0.qkv" in link.first_difference, link.first_difference


def nudge(op: Callable[..., Tensor], when: Callable[[Tensor], bool]) -> Callable[..., Tensor]:
    """`op` with its last row off by one unit in the last place, for some calls."""

    def broken(x: Tensor, *args: Any) -> Tensor:
        y = op(x, *args)
        if when(x):
            y = y.clone()
            last = y[-1:].contiguous().view(torch.int16 if y.dtype == torch.bfloat16 else torch.int32)
            y[-1:] = (last + 1).view(y.dtype)
        return y

    return broken


@pytest.mark.parametrize(
    ("op", "names"),
    [("swiglu", "layers.0.swiglu"), ("rope", "layers.0.rope_q"), ("attend", "layers.0.attention"),
     ("rms_norm", "layers.0.attn_norm")],
)
def test_an_operator_that_depends_on_the_batch_is_named(op: str, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = WORK.max_prompt + WORK.new_tokens
    # wrong in packed batches only
    for owner in owners(op):
        monkeypatch.setattr(owner, op, nudge(getattr(owner, op), lambda x: len(x) > longest))
    packed = certificate("fp8").links[0]
    assert not packed.ok and packed.rows_different >= 1 and packed.first_difference is not None
    assert f"first operator that differs is {names}" in packed.first_difference, packed.first_difference


@pytest.mark.parametrize(("wrong", "names"), [("rows", "layers.0.attention"), ("positions", "layers.0.rope_q")])
def test_an_error_of_shared_prompts_alone_is_found_by_its_link(
    wrong: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = parity.forward_batch

    def broken(micro: MicroBatch) -> ForwardBatch:  # a sample that sees another row, or counts from a wrong place
        batch = real(micro)
        keys = batch.plan.keys
        assert keys is not None, "link s shares nothing"
        changed = {"rows": keys.rows, "positions": batch.positions}[wrong].clone()
        changed[-3] -= 1
        if wrong == "positions":
            return replace(batch, positions=changed)
        return replace(batch, plan=replace(batch.plan, keys=replace(keys, rows=changed)))

    monkeypatch.setattr(parity, "forward_batch", broken)
    *others, shared, carried = certificate("fp8").links
    assert all(link.ok for link in (*others, carried)) and not shared.ok
    assert f"first operator that differs is {names}" in str(shared.first_difference), shared.first_difference


def test_an_error_of_decoding_alone_is_found_by_the_last_link(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = load_backend("reference").swiglu, {"decode": 0}

    def broken(x: Tensor) -> Tensor:  # every 40th small batch: decode steps, not prefill or training
        calls["decode"] += len(x) <= 6
        return nudge(right, lambda x: calls["decode"] % 40 == 39 and len(x) <= 6)(x)

    for owner in owners("swiglu"):
        monkeypatch.setattr(owner, "swiglu", broken)
    assert not certificate("fp8").ok


def test_training_over_keys_and_values_that_are_not_rounded_loses_the_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An FP8 cache in the rollout alone, as other systems have it."""
    right = attention._made
    monkeypatch.setattr(attention, "_made", lambda qkv, of: right(qkv, of._replace(fp8_kv=False)))
    packed, chunked, decode, *_ = certificate("fp8", kv_cache="fp8", head_dim=SPEC.head_dim).links
    assert not packed.ok and not chunked.ok and not decode.ok
    assert min(link.max_abs_diff for link in (packed, chunked, decode)) > 1e-3


def test_a_head_that_depends_on_the_batch_is_told_from_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in owners("head_logits"):
        monkeypatch.setattr(owner, "head_logits", nudge(owner.head_logits, lambda x: len(x) == 1))
    result = certificate("bf16")
    assert not result.ok
    text = " ".join(link.first_difference or "" for link in result.links)
    assert "lm_head" in text, text


def test_row_hash_tells_any_bit_and_any_order() -> None:
    row = torch.randn(1, 100, generator=torch.Generator().manual_seed(0))
    for change in range(100):
        other = row.clone()
        other.view(torch.int32)[0, change] ^= 1
        assert row_hash(other) != row_hash(row)
    swapped = row.clone()
    swapped[0, [3, 4]] = row[0, [4, 3]]
    assert row_hash(swapped) != row_hash(row) and row_hash(row.clone()) == row_hash(row)
    assert row_hash(torch.zeros(1, 2)) != row_hash(-torch.zeros(1, 2))


def test_prompts_that_take_many_steps_come_to_their_end() -> None:
    """Each chunk is one step, and preemption comes every few steps: the longest prompt must still get through."""
    work = Workload(num_sequences=3, max_prompt=100, new_tokens=4, chunk=4, page_size=8)
    result = certificate("bf16", work)
    assert result.ok and result.links[2].rows >= 8


@pytest.mark.parametrize(("step_tokens", "widest"), [(0, range(2, 18)), (512, range(20, 24))])
def test_step_tokens_make_the_batch_of_link_c_wide(
    step_tokens: int, widest: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    observe = parity._Watched.observe

    def spied(self: Any, plan: Any) -> None:
        widths.append(len(plan.counts))
        observe(self, plan)

    monkeypatch.setattr(parity._Watched, "observe", spied)
    work = Workload(num_sequences=24, max_prompt=40, new_tokens=4, chunk=2, page_size=8, step_tokens=step_tokens)
    assert certificate("fp8", work).ok
    assert max(widths) in widest, f"sequences in each step: {widths}"


@pytest.mark.parametrize("batch", [49152, 30, 1])
def test_a_packed_forward_gives_each_sequence_its_own_rows(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_rows, "_BATCH", batch)
    model = Transformer(SPEC, build_recipe("bf16", SPEC.num_layers)).init_random(0)
    sequences = random_sequences(model, WORK)
    with torch.no_grad():
        packed = Packed(model, sequences)
        assert [len(h) for h in packed.hidden] == [len(s) for s in sequences]
        for i, tokens in enumerate(sequences):
            alone = model(varlen([tokens]))
            assert torch.equal(packed.hidden[i], alone)
            assert torch.equal(packed.tapped(i, len(tokens) - 1)["norm"], alone[-1])


def test_the_link_of_drawn_tokens_finds_a_difference() -> None:
    """Link d runs on a GPU alone, but its comparison can be tried anywhere."""
    model = Transformer(SPEC, build_recipe("fp8_rollout", SPEC.num_layers)).init_random(0)
    sequences = random_sequences(model, WORK)
    with torch.no_grad():
        broken = graph_link(model, sequences, WORK)
        model = Transformer(SPEC, build_recipe("fp8", SPEC.num_layers)).init_random(0)
        good = graph_link(model, sequences, WORK)
    assert good.ok and good.rows == 5 * WORK.new_tokens and good.max_abs_diff == 0.0 and good.first_difference is None
    assert not broken.ok and broken.max_abs_diff > 0 and "position" in str(broken.first_difference)


def test_the_packed_forward_is_the_one_that_is_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the learner's own functions, which passes without gradients do not call, spoils the certificate."""
    from jetrl.model import linear

    real = linear._FP8Linear.forward

    def off(*args: Any) -> Any:
        return real(*args) * 1.01

    monkeypatch.setattr(linear._FP8Linear, "forward", staticmethod(off))
    *others, shared, carried = certificate("fp8").links
    assert not any(link.ok for link in (*others, carried))
    assert shared.ok, "link s has the learner's functions on both sides"


def test_the_link_of_merged_prefixes_asks_for_steps_that_merge() -> None:
    """A CPU's steps merge nothing, so the link cannot hold there, though tokens and log-probs are equal."""
    model = Transformer(SPEC, build_recipe("bf16", SPEC.num_layers)).init_random(0)
    with torch.no_grad():
        found = merged_link(model, random_sequences(model, WORK), WORK)
    assert not found.ok and found.rows_different == 0 and found.first_difference == "no step merged anything"


def test_links_of_a_gpu_by_what_its_kernels_serve() -> None:
    def letters(spec: ModelSpec) -> str:
        with torch.device("meta"):
            model = Transformer(spec, build_recipe("bf16", spec.num_layers))
        return "".join((link.__doc__ or "")[0] for link in graph_links(model, WORK))

    wide = replace(SPEC, head_dim=64, max_position=512)
    assert letters(wide) == "dm" and letters(SPEC) == "d", "no kernels for heads of 16"
    assert letters(replace(wide, max_position=137)) == "d", "no position for a page that is shared"
    latent = replace(SHAPES["tiny-mla"], num_layers=1)
    assert letters(latent) == "dm" and letters(replace(latent, num_heads=33)) == "d", "two sequences' heads are rows"
