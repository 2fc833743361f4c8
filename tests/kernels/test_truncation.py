"""Kept sets against plain Python, and in few words; log-probs, entropies and gradients of truncated distributions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_at_most_twice, assert_bitwise_equal
from torch import Tensor

from jetrl.kernels import reference
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.logprob import ops as logprob
from jetrl.kernels.logprob import reference as backend
from jetrl.kernels.logprob import truncation
from jetrl.kernels.logprob.truncation import LEFT_OUT, Filters, Support, Truncation, compact, joined, kept, members
from jetrl.kernels.update.gradient import Gradient

T, D, V = 23, 48, 130


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def by_hand(weights: list[int], t: Truncation) -> list[bool]:
    """From integer weights and exact fractions."""
    ranked = sorted((v for v in range(len(weights)) if weights[v]), key=lambda v: (-weights[v], v))
    ranked = ranked[: t.top_k] if t.top_k else ranked
    mass, goal, left = 0, Fraction(t.top_p) * sum(weights[v] for v in ranked), set()
    for v in ranked:
        if mass >= goal and t.top_p < 1:
            break
        left.add(v)
        mass += weights[v]
    least = Fraction(t.min_p) * max(weights)
    return [v in left and weights[v] >= least for v in range(len(weights))]


truncations = st.builds(
    Truncation, top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.95]), top_k=st.sampled_from([0, 0, 1, 3, 11, 500]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 0.99]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(truncations, min_size=1, max_size=6), st.integers(0, 99), st.sampled_from([0.0, 1.0, 3.0, 30.0]),
    st.sampled_from([1, 3, 8, 1024]),
)
def test_sets_equal_those_by_hand(rows: list[Truncation], seed: int, spread: float, window: int) -> None:
    """Rows whose set ends within the window, and rows that are sorted whole; with ties, and with weights of 0."""
    z = normal(len(rows), 37, seed=seed, scale=spread)
    z[:, 20:] = z[:, 20:].round()
    weights = reference.exp_weights(z)[0]
    each = [t.filters(1, z.device) for t in rows]
    filters = Filters(*(torch.cat(columns) for columns in zip(*each, strict=True)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "_WINDOW", window)
        got = kept(weights, filters)
    assert got.tolist() == [by_hand([int(w) for w in row], t) for row, t in zip(weights, rows, strict=True)]


def test_few_rows_are_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those whose set does not end in the window."""
    sorted_rows, sort = [], Tensor.sort
    monkeypatch.setattr(Tensor, "sort", lambda x, *rest, **more: sorted_rows.append(len(x)) or sort(x, *rest, **more))
    monkeypatch.setattr(truncation, "_WINDOW", 16)
    z = normal(5, 200, scale=4)
    z[3] = 0.0
    weights = reference.exp_weights(z)[0]
    got = kept(weights, Truncation(top_p=0.5).filters(5, z.device))
    assert sorted_rows == [1] and int(got[3].sum()) == 100


@pytest.mark.parametrize("vocab", [5, 32, 130])
def test_sets_are_held_in_as_few_words_as_ids_or_bits_take(vocab: int) -> None:
    g = torch.Generator().manual_seed(1)
    chosen = torch.rand(40, vocab, generator=g) < torch.rand(40, 1, generator=g) ** 3
    chosen[0], chosen[1] = True, False
    sets = compact(chosen)
    most = -(-vocab // 32)
    assert sets.starts.diff().tolist() == [min(most, n) for n in chosen.sum(-1).tolist()]
    assert torch.equal(members(sets, slice(0, 40)), chosen)
    assert torch.equal(members(sets, slice(7, 19)), chosen[7:19])
    assert members(sets, slice(7, 7)).shape == (0, vocab)
    again = joined([compact(chosen[:9]), compact(chosen[9:9]), compact(chosen[9:])])
    assert torch.equal(again.words, sets.words) and torch.equal(again.starts, sets.starts)


@pytest.fixture
def head() -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = normal(T, D).bfloat16(), normal(V, D, seed=1, scale=0.4).bfloat16()
    return hidden, weight, (hidden.float() @ weight.float().T).argmax(-1)


SOME = Truncation(top_p=0.8, top_k=40, min_p=0.01)


def chosen_by(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = logprob.head_logits(hidden, gemm.prepare_bf16(weight))
    weights = reference.exp_weights(logprob.scaled(logits, temperature))[0]
    return kept(weights, SOME.filters(T, hidden.device))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_truncated_log_probs_and_entropies(
    head: tuple[Tensor, Tensor, Tensor], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the definition in float64; in any chunks the same bits, found or given."""
    hidden, weight, targets = head
    operand, chosen = gemm.prepare_bf16(weight), chosen_by(hidden, weight, temperature)
    z = logprob.head_logits(hidden, operand).double() / temperature
    exact = torch.log_softmax(z.masked_fill(~chosen, -math.inf), -1)
    support = Support(SOME, targets)
    got = logprob.token_logprobs(hidden, Gradient(weight), weight, operand, targets, temperature, support=support)
    assert torch.equal(members(support.sets, slice(0, T)), chosen)
    assert 1 <= int(chosen.sum(-1).min()) < 4 < int(chosen.sum(-1).max()) < 40
    assert torch.allclose(got[0].double(), exact.gather(1, targets[:, None])[:, 0], atol=1e-6)
    assert torch.allclose(got[1].double(), -(exact.exp() * exact.masked_fill(~chosen, 0.0)).sum(-1), atol=1e-6)
    plain = logprob.token_logprobs(hidden, Gradient(weight), weight, operand, targets, temperature)
    assert bool((got[0] > plain[0]).all()) and bool((got[1] < plain[1]).all())
    monkeypatch.setattr(backend, "_LOGIT_ELEMENTS", 7 * V)
    monkeypatch.setattr(truncation, "MAX_ELEMENTS", 3 * V)
    for again in (Support(SOME, targets), Support(SOME, targets, support.sets)):
        other = logprob.token_logprobs(hidden, Gradient(weight), weight, operand, targets, temperature, support=again)
        assert_bitwise_equal(other[0], got[0], "log-probs")
        assert_bitwise_equal(other[1], got[1], "entropies")
        assert torch.equal(again.sets.words, support.sets.words)


@pytest.mark.parametrize("parts", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)])
def test_gradients_are_those_of_the_truncated_distribution(
    head: tuple[Tensor, Tensor, Tensor], parts: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_LOGIT_ELEMENTS", 7 * V)
    hidden, weight, targets = head
    row_weights, chosen = normal(T, seed=5), chosen_by(hidden, weight, 0.6)

    def grads(dtype: torch.dtype, ours: bool) -> tuple[Tensor, ...]:
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        if ours:
            logp, ent = logprob.token_logprobs(
                h, Gradient(w), w.detach(), gemm.prepare_bf16(w.detach()), targets, 0.6, support=Support(SOME, targets)
            )
        else:
            full = torch.log_softmax((h @ w.T / 0.6).masked_fill(~chosen, LEFT_OUT), -1)
            logp, ent = full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)
        weights = row_weights.to(logp.dtype)
        loss = parts[0] * (logp * weights).sum() if parts[0] else 0.0
        loss = loss + (parts[1] * (ent * weights).sum() if parts[1] else 0.0)
        return torch.autograd.grad(loss, (h, w))

    got, baseline, exact = grads(torch.bfloat16, True), grads(torch.bfloat16, False), grads(torch.float64, False)
    for name, *triple in zip(("hidden", "weight"), got, baseline, exact, strict=True):
        assert_at_most_twice(*triple, f"gradient of {name}")


def test_the_drawn_token_is_always_in_the_set(head: tuple[Tensor, Tensor, Tensor]) -> None:
    """Of other weights than sampled it the set might lack it; its log-prob must be finite all the same."""
    hidden, weight, _ = head
    unlikely = (hidden.float() @ weight.float().T).argmin(-1)
    support = Support(Truncation(top_k=1), unlikely)
    got, _ = logprob.token_logprobs(
        hidden, Gradient(weight), weight, gemm.prepare_bf16(weight), unlikely, 1.0, support=support
    )
    assert bool(got.isfinite().all()) and support.sets.starts.diff().tolist() == [2] * T


def test_a_micro_batch_without_loss_rows_has_no_sets(head: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, targets = head
    support = Support(SOME, targets[:0])
    master = weight.float().requires_grad_()
    for again in (support, Support(SOME, targets[:0], support.sets)):
        got, entropy = logprob.token_logprobs(
            hidden[:0], Gradient(master), weight, gemm.prepare_bf16(weight), targets[:0], 1.0, support=again
        )
        (got.sum() + entropy.sum()).backward()
        assert got.shape == entropy.shape == (0,) and again.sets.starts.tolist() == [0] and not len(again.sets.words)
    assert not float(master.grad.abs().sum())  # type: ignore[union-attr]


def test_logits_that_are_not_finite_stay_to_be_seen(head: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, targets = head
    hidden = hidden.clone()
    hidden[4] = math.nan
    for sets in (None, compact(torch.ones(T, V, dtype=torch.bool))):
        support = Support(Truncation(top_k=3), targets, sets)
        got, _ = logprob.token_logprobs(
            hidden, Gradient(weight), weight, gemm.prepare_bf16(weight), targets, 1.0, support=support
        )
        assert got.isnan().nonzero()[:, 0].tolist() == [4]
