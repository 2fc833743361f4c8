"""Log-probs and entropy: error bounds, one value from every route, gradients against float64 autograd."""

from __future__ import annotations

import pytest
import torch
from invariance import assert_rows_independent
from tolerances import assert_at_most_twice, assert_bitwise_equal
from torch import Tensor

from jetrl.kernels import reference
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.logprob import ops as logprob
from jetrl.kernels.logprob import reference as backend
from jetrl.kernels.update.gradient import Gradient

T, D, V = 23, 48, 130


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.fixture
def head() -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = normal(T, D).bfloat16(), normal(V, D, seed=1, scale=0.4).bfloat16()
    return hidden, weight, torch.randint(V, (T,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_log_softmax_is_within_one_fp32_rounding(scale: float) -> None:
    z = normal(50, 1000, scale=scale)
    exact = torch.log_softmax(z.double(), -1)
    got = logprob.log_softmax(z)
    # exp is good to 2 ulp and a weight to 2**-36, which moves the log-sum-exp by less than 3e-7
    assert float((got.double() - exact).abs().max()) <= 3e-7 + float(exact.abs().max()) * 2.0**-24


def test_all_routes_give_the_same_bits(head: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, targets = head
    operand = gemm.prepare_bf16(weight)
    logits = logprob.head_logits(hidden, operand)
    full = logprob.log_softmax(logits).gather(1, targets[:, None])[:, 0]
    assert_bitwise_equal(logprob.logprobs(logits, targets), full, "logprobs = log_softmax")
    for temperature in (1.0, 0.7):
        fused, _ = logprob.token_logprobs(hidden, Gradient(weight), weight, operand, targets, temperature)
        apart = logprob.logprobs(logits, targets, temperature)
        assert_bitwise_equal(fused, apart, f"training = sampling at temperature {temperature}")
        rows = logprob.logprobs(logits, targets, torch.full((T,), temperature))
        assert_bitwise_equal(rows, apart, "temperature as a tensor")


def test_chunks_of_rows_change_no_bit(head: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = head
    operand = gemm.prepare_bf16(weight)
    whole = logprob.token_logprobs(hidden, Gradient(weight), weight, operand, targets, 0.9)
    monkeypatch.setattr(backend, "_LOGIT_ELEMENTS", 4 * V)
    sizes, real = [], backend.head_logits
    monkeypatch.setattr(backend, "head_logits", lambda h, w: sizes.append(len(h)) or real(h, w))
    chunked = logprob.token_logprobs(hidden, Gradient(weight), weight, operand, targets, 0.9)
    assert sizes == [4] * (T // 4) + [T % 4] * (T % 4 > 0)
    assert_bitwise_equal(chunked[0], whole[0], "log-probs")
    assert_bitwise_equal(chunked[1], whole[1], "entropies")


def test_rows_and_chunks_of_the_vocabulary() -> None:
    z = normal(17, 999, scale=5)
    assert_rows_independent(logprob.log_softmax, z)
    weights, top, total = reference.exp_weights(z)
    assert bool((weights == weights.round()).all()) and float(weights.max()) == 2.0**35
    parts = sum(w.flip(-1).sum(-1) for w in weights.split(77, dim=-1))
    assert_bitwise_equal(parts, total, "the sum in chunks, backwards")
    order = torch.randperm(999, generator=torch.Generator().manual_seed(3))
    assert_bitwise_equal(logprob.log_softmax(z[:, order]), logprob.log_softmax(z)[:, order], "vocabulary reordered")


def test_extreme_logits() -> None:
    z = torch.tensor([[0.0, -1e4, 30.0], [1e30, 0.0, -1e30], [-1e30, -1e30, -1e30], [5.0, 5.0, 5.0]])
    exact = torch.log_softmax(z.double(), -1)
    assert torch.allclose(logprob.log_softmax(z).double(), exact, rtol=1e-6, atol=3e-7)
    everything = (torch.arange(1 << 18) * 0.0)[None]
    assert float(logprob.logprobs(everything, torch.tensor([5]))) == pytest.approx(-18 * 0.6931471805599453, rel=1e-7)


def test_entropy() -> None:
    z = torch.cat((normal(20, V, scale=3), torch.zeros(1, V), torch.full((1, V), -1e4)))
    z[-1, 4] = 0.0
    weights, top, total = reference.exp_weights(z)
    got = reference.entropy(z, weights, top, total)
    exact = torch.distributions.Categorical(logits=z.double()).entropy()
    assert float((got.double() - exact).abs().max()) <= 1e-6
    assert got[-1].item() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("parts", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)])
def test_gradients(
    head: tuple[Tensor, Tensor, Tensor], parts: tuple[float, float], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_LOGIT_ELEMENTS", 7 * V)
    hidden, weight, targets = head
    row_weights = normal(T, seed=5)

    def grads(dtype: torch.dtype, ours: bool) -> tuple[Tensor, ...]:
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        if ours:
            published = w.detach()
            prepared = gemm.prepare_bf16(published)
            logp, ent = logprob.token_logprobs(h, Gradient(w), published, prepared, targets, temperature)
        else:
            full = torch.log_softmax(h @ w.T / temperature, -1)
            logp, ent = full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)
        weights = row_weights.to(logp.dtype)
        loss = parts[0] * (logp * weights).sum() if parts[0] else 0.0
        loss = loss + (parts[1] * (ent * weights).sum() if parts[1] else 0.0)
        return torch.autograd.grad(loss, (h, w))

    got, baseline, exact = grads(torch.bfloat16, True), grads(torch.bfloat16, False), grads(torch.float64, False)
    for name, *triple in zip(("hidden", "weight"), got, baseline, exact, strict=True):
        assert_at_most_twice(*triple, f"gradient of {name}")


def test_the_gradient_of_the_head_goes_to_the_master_in_its_dtype(head: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, targets = head
    master = weight.float().requires_grad_()
    prepared = gemm.prepare_bf16(weight)
    logprob.token_logprobs(hidden, Gradient(master), weight, prepared, targets, 1.0)[0].sum().backward()
    assert master.grad is not None and master.grad.dtype == torch.float32 and float(master.grad.abs().sum()) > 0


def test_a_vocabulary_beyond_the_exact_range_is_refused() -> None:
    with pytest.raises(AssertionError, match="262145 is beyond"):
        reference.exp_weights(torch.zeros(1, (1 << 18) + 1))
