"""The sampler: exact draws, filters checked against plain Python, rows independent of their batch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl.engine import sampler
from jetrl.engine.sampler import SamplingTable, sample, uniforms
from jetrl.errors import UserError
from jetrl.kernels import reference
from jetrl.kernels.logprob.ops import logprobs
from jetrl.types import SamplingParams


def params(**kwargs: object) -> SamplingParams:
    return SamplingParams(max_tokens=4, **kwargs)  # type: ignore[arg-type]


def random_logits(rows: int, columns: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * spread


def kept_by_hand(weights: list[int], p: SamplingParams) -> set[int]:
    """The tokens that top-k, then top-p, then min-p leave, from integer weights and exact fractions."""
    ranked = sorted(range(len(weights)), key=lambda v: (-weights[v], v))
    if p.top_k:
        ranked = ranked[: p.top_k]
    if p.top_p < 1:
        mass, goal, kept = 0, Fraction(p.top_p) * sum(weights[v] for v in ranked), []
        for v in ranked:
            if mass >= goal:
                break
            kept.append(v)
            mass += weights[v]
        ranked = kept
    return {v for v in ranked if weights[v] >= Fraction(p.min_p) * max(weights)}


def draw_by_hand(logits: torch.Tensor, p: SamplingParams, number: int, position: int) -> int:
    """Inverse of the cumulative distribution in Python's integers."""
    weights = [int(w) for w in reference.exp_weights((logits / p.temperature)[None])[0][0]]
    kept = kept_by_hand(weights, p)
    u = int(uniforms(SamplingTable.build([p], [number]).key, np.array([position]))[0])
    threshold = u * sum(weights[v] for v in kept) >> 53
    for v in sorted(kept):
        threshold -= weights[v]
        if threshold < 0:
            return v
    raise AssertionError("the draw lies beyond the last token")


filters = st.builds(
    params,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 11, 500]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(-(2**70), 2**70),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(filters, st.integers(0, 2**40), st.integers(0, 10**6)), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_draws_equal_those_by_hand(rows: list[tuple[SamplingParams, int, int]], seed: int) -> None:
    logits = random_logits(len(rows), 37, seed)
    logits[:, 20:] = logits[:, 20:].round()  # ties
    tokens, _ = sample(logits, [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows])
    assert tokens.tolist() == [draw_by_hand(row, *r) for row, r in zip(logits, rows, strict=True)]


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_a_row_does_not_depend_on_its_batch(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "MAX_ELEMENTS", chunk * 64)
    sizes, real = [], sampler._sample_chunk
    monkeypatch.setattr(sampler, "_sample_chunk", lambda z, *rest: sizes.append(len(z)) or real(z, *rest))
    logits = random_logits(12, 64)
    kinds = [params(temperature=t, top_p=q, top_k=k) for t in (0.0, 0.8, 1.0) for q in (1.0, 0.7) for k in (0, 5)]
    ids, positions = list(range(100, 112)), list(range(7, 19))
    tokens, lps = sample(logits, kinds, ids, positions)
    assert sizes == ([12] if chunk > 12 else [chunk] * (12 // chunk))
    for i in range(12):
        token, lp = sample(logits[i : i + 1], kinds[i : i + 1], ids[i : i + 1], positions[i : i + 1])
        assert token.item() == tokens[i].item() and lp.item() == lps[i].item()
    back = list(range(11, -1, -1))
    flipped, _ = sample(logits[back], [kinds[i] for i in back], [ids[i] for i in back], [positions[i] for i in back])
    assert flipped.tolist() == tokens[back].tolist()


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    n = 40_000
    tokens, _ = sample(logits.expand(n, -1), [params(temperature=0.7, seed=3)] * n, [5] * n, range(n))
    expected = torch.softmax(logits[0].double() / 0.7, 0)
    seen = torch.bincount(tokens, minlength=5).double()
    chi2 = float(((seen - n * expected) ** 2 / (n * expected)).sum())
    assert chi2 < 23.5, f"chi-square with 4 degrees of freedom is {chi2}, beyond 1e-4"


def test_streams_differ_by_seed_id_and_position_and_repeat_otherwise() -> None:
    n = 64
    logits = torch.zeros(n, 1000)

    def draw(seed: int = 0, first_id: int = 0, position: int = 9) -> list[int]:
        ids = range(first_id, first_id + n)
        return sample(logits, [params(seed=seed)] * n, ids, [position] * n)[0].tolist()

    assert draw() == draw()
    for other in (draw(seed=1), draw(first_id=n), draw(position=10)):
        same = sum(a == b for a, b in zip(draw(), other, strict=True))
        assert same <= 3
    assert max(Counter(draw()).values()) <= 4


def test_uniforms_are_uniform() -> None:
    keys = SamplingTable.build([params(seed=s) for s in range(50)], list(range(50))).key
    u = np.concatenate([uniforms(keys, np.full(50, position)) for position in range(400)]) / 2.0**53
    assert len(np.unique(u)) == len(u) and 0 <= u.min() and u.max() < 1
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    chi2 = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi2 < 52.4, f"chi-square with 19 degrees of freedom is {chi2}, beyond 5e-5"
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03


@given(st.integers(0, 2**53 - 1), st.integers(1, 2**53))
def test_times_fraction_is_exact(u: int, total: int) -> None:
    got = sampler._times_fraction(torch.tensor([total]), torch.tensor([u])).item()
    assert got == u * total >> 53


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -3.0, 9.0]])
    tokens, lps = sample(logits, [params(temperature=0.0, top_k=2, top_p=0.1)] * 3, [0, 1, 2], [1, 1, 1])
    assert tokens.tolist() == [1, 0, 3]
    assert torch.equal(lps, logprobs(logits, tokens)), "at temperature 1"


def test_logprobs_are_of_the_full_distribution_at_the_temperature() -> None:
    logits = random_logits(8, 50)
    kinds = [params(temperature=0.6, top_k=3, seed=i) for i in range(8)]
    tokens, lps = sample(logits, kinds, list(range(8)), [4] * 8)
    assert torch.equal(lps, logprobs(logits, tokens, 0.6))
    exact = torch.log_softmax(logits.double() / 0.6, -1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(lps.double(), exact, atol=1e-5)
    assert lps.dtype == torch.float32 and tokens.dtype == torch.int64


def test_sampled_logprobs_are_of_what_the_filters_leave() -> None:
    """By hand from integer weights, next to rows with the log-probs of the full distribution, which keep their bits."""
    logits = random_logits(12, 50)
    kinds = [params(temperature=0.6, top_k=7, top_p=0.8, seed=i) for i in range(12)]
    some = [replace(p, logprobs="sampled") if i % 3 else p for i, p in enumerate(kinds)]
    tokens, full = sample(logits, kinds, list(range(12)), [4] * 12)
    same, lps = sample(logits, some, list(range(12)), [4] * 12)
    assert same.tolist() == tokens.tolist()
    for i, p in enumerate(some):
        weights = [int(w) for w in reference.exp_weights((logits[i] / 0.6)[None])[0][0]]
        left = sum(weights[v] for v in kept_by_hand(weights, p)) if i % 3 else sum(weights)
        assert lps[i].item() == pytest.approx(math.log(weights[int(tokens[i])] / left), abs=1e-6)
        assert (lps[i] > full[i]) if i % 3 else (lps[i] == full[i])
        alone = sample(logits[i : i + 1], [p], [i], [4])
        assert alone[1][0] == lps[i], "a row does not depend on its batch"
    untruncated = [params(logprobs="sampled"), params(logprobs="sampled", temperature=0.0, top_p=0.5)]
    tokens, lps = sample(logits[:2], untruncated, [0, 1], [1, 1])
    assert torch.equal(lps, logprobs(logits[:2], tokens)), "nothing is cut: the full distribution is the sampled one"


def test_rows_without_filters_are_not_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_rows, real = [], sampler.kept

    def spy(weights: torch.Tensor, filters: object) -> torch.Tensor:
        sorted_rows.append(len(weights))
        return real(weights, filters)

    monkeypatch.setattr(sampler, "kept", spy)
    logits = random_logits(4, 20)
    off = [params(), params(top_k=20), params(temperature=0.0, top_p=0.5), params()]
    sample(logits, off, [0, 1, 2, 3], [0] * 4)
    assert sorted_rows == []
    sample(logits, [*off[:3], params(min_p=0.1)], [0, 1, 2, 3], [0] * 4)
    assert sorted_rows == [1]


def test_extremes() -> None:
    logits = torch.full((2, 5), -math.inf)
    logits[:, 2] = -300.0
    tokens, lps = sample(logits, [params(), params(top_p=1e-9)], [1, 2], [0, 0])
    assert tokens.tolist() == [2, 2] and lps.tolist() == [0.0, 0.0]
    logits[1, 4] = math.nan
    with pytest.raises(FloatingPointError, match=r"rows \[1\] of 2"):
        sample(logits, [params()] * 2, [1, 2], [0, 0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_p": 1.1},
        {"top_k": -1}, {"min_p": -0.5}, {"min_p": 2.0}, {"stop": ("a", "")},
    ],
)
def test_senseless_parameters_are_refused(wrong: dict) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(UserError, match=f"sampling: {name} = "):
        sample(torch.zeros(1, 4), [params(**wrong)], [0], [0])
    with pytest.raises(UserError, match="max_tokens = 0"):
        sample(torch.zeros(1, 4), [SamplingParams(max_tokens=0)], [0], [0])
