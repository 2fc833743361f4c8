"""Log-probs of several tokens of a row: against float64, and gradients against autograd through a whole softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.logprob import ops as logprob
from jetrl.kernels.logprob import several
from jetrl.kernels.update.gradient import Gradient

T, D, V, K, TEMPERATURE = 19, 48, 130, 5, 0.8


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.fixture
def rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, targets, and tokens among which each third row has its target."""
    hidden, weight = normal(T, D).bfloat16(), normal(V, D, seed=1, scale=0.3).bfloat16()
    draw = torch.Generator().manual_seed(2)
    targets, tokens = torch.randint(V, (T,), generator=draw), torch.randint(V, (T, K), generator=draw)
    tokens[::3, 1] = targets[::3]
    return hidden, weight, targets, tokens


def computed(
    hidden: Tensor, gradient: Gradient, weight: Tensor, targets: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    operand = gemm.prepare_bf16(weight)
    known, _ = logprob.token_logprobs(hidden, gradient, weight, operand, targets, TEMPERATURE)
    return known, several.several_logprobs(hidden, gradient, weight, targets, known, tokens, TEMPERATURE)


def exact(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.log_softmax(hidden.double() @ weight.double().T / TEMPERATURE, -1)


def test_several_logprobs_are_those_of_the_whole_softmax(rows: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, tokens = rows
    known, found = computed(hidden, Gradient(weight), weight, targets, tokens)
    assert float((found.double() - exact(hidden, weight).gather(1, tokens)).abs().max()) < 3e-6
    assert torch.equal(found[::3, 1], known[::3])  # the target itself, to the bit


def test_top_tokens_are_the_most_probable_ones_in_order(rows: tuple[Tensor, ...]) -> None:
    hidden, weight, *_ = rows
    found = several.top_tokens(hidden, gemm.prepare_bf16(weight), V, K)
    assert torch.equal(found, exact(hidden, weight).topk(K, dim=1).indices)
    assert several.top_tokens(hidden[:0], gemm.prepare_bf16(weight), V, K).shape == (0, K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_are_those_of_a_plain_softmax(
    rows: tuple[Tensor, ...], in_place: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a gradient of the target's log-prob beside it; by chunks of few rows, which change no bit of log-probs."""
    hidden, weight, targets, tokens = rows
    whole = computed(hidden, Gradient(weight), weight, targets, tokens)[1]
    monkeypatch.setattr(several, "ELEMENTS", 4 * (K + 1) * D)
    upstream, of_target = normal(T, K, seed=5), normal(T, seed=6)
    master = weight.clone().to(dtype).requires_grad_()
    gradient = Gradient(master)
    if in_place:
        gradient.accumulate_in(dtype)
    h = hidden.clone().requires_grad_()
    known, found = computed(h, gradient, weight, targets, tokens)
    assert torch.equal(found.detach(), whole)
    ((found * upstream).sum() + (known * of_target).sum()).backward()
    h64, w64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logprobs = torch.log_softmax(h64 @ w64.T / TEMPERATURE, -1)
    ((logprobs.gather(1, tokens) * upstream).sum() + (logprobs.gather(1, targets[:, None])[:, 0] * of_target).sum()
     ).backward()
    assert h64.grad is not None and w64.grad is not None and h.grad is not None and master.grad is not None
    rounding = 2.0**-6  # a few roundings to BF16 of terms that partly cancel, p - onehot among them
    assert float((h.grad.double() - h64.grad).abs().max()) < rounding * float(h64.grad.abs().max())
    assert float((master.grad.double() - w64.grad).abs().max()) < rounding * float(w64.grad.abs().max())


def test_gradients_by_themselves_are_in_fp32(rows: tuple[Tensor, ...]) -> None:
    """Given the target's log-prob as a number of its own."""
    hidden, weight, targets, tokens = rows
    known, upstream = exact(hidden, weight).gather(1, targets[:, None])[:, 0], normal(T, K, seed=5)
    master, h, leaf = weight.float().requires_grad_(), hidden.clone().requires_grad_(), known.float().requires_grad_()
    found = several.several_logprobs(h, Gradient(master), weight, targets, leaf, tokens, TEMPERATURE)
    (found * upstream).sum().backward()
    h64, w64, k64 = (one.double().detach().requires_grad_() for one in (hidden, weight, known))
    z = h64 @ w64.T / TEMPERATURE
    plain = k64[:, None] + z.gather(1, tokens) - z.gather(1, targets[:, None])
    (plain * upstream).sum().backward()
    for mine, theirs, most in ((h.grad, h64.grad, 2.0**-8), (master.grad, w64.grad, 1e-6), (leaf.grad, k64.grad, 1e-6)):
        assert mine is not None and theirs is not None
        assert float((mine.double() - theirs).abs().max()) < most * float(theirs.abs().max())
