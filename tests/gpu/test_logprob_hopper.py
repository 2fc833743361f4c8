"""Log-probs and their gradients through the lm_head on the GPU: chunks change no bit, gradients match autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl.kernels.dispatch import load_backend
from jetrl.kernels.logprob.ops import token_logprobs
from jetrl.kernels.update.gradient import Gradient

pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.fixture(scope="module")
def ops():
    return load_backend("hopper")


def problem(t: int, d: int, v: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(t + v)
    hidden = torch.randn(t, d, generator=g).to(torch.bfloat16)
    weight = (torch.randn(v, d, generator=g) * 0.1).to(torch.bfloat16)
    targets = torch.randint(0, v, (t,), generator=g)
    temperature = torch.full((t,), 0.7)
    return tuple(x.to(CUDA) for x in (hidden, weight, targets, temperature))


@pytest.mark.parametrize(("t", "d", "v"), [(700, 576, 49152), (300, 64, 1003)])
def test_chunks_change_no_bit(ops, monkeypatch: pytest.MonkeyPatch, t: int, d: int, v: int) -> None:
    hidden, weight, targets, temperature = problem(t, d, v)
    w = ops.prepare_bf16(weight)
    whole = ops.logprob_entropy(hidden, w, targets, temperature)
    sampled = ops.logprobs(ops.head_logits(hidden[:5], w), targets[:5], temperature[:5])
    assert torch.equal(sampled, whole[0][:5])  # the sampler's path
    monkeypatch.setattr("jetrl.kernels.logprob.chunks._LOGIT_ELEMENTS", 128 * v)
    monkeypatch.setattr("jetrl.kernels.logprob.chunks._FORWARD_ELEMENTS", 128 * v)
    parts = ops.logprob_entropy(hidden, w, targets, temperature)
    assert all(torch.equal(a, b) for a, b in zip(whole[:3], parts[:3], strict=True))
    assert whole[3] is None
    kept, in_parts = (ops.logprob_entropy(hidden, w, targets, temperature, keep=True) for _ in range(2))
    assert kept[3].shape == (t, w.weight.shape[0]) and torch.equal(kept[3], in_parts[3])
    assert all(torch.equal(a, b) for a, b in zip(whole[:3], kept[:3], strict=True))
    z = (hidden.double() @ weight.double().T) / temperature.double()[:, None]
    logp = torch.log_softmax(z, -1)
    torch.testing.assert_close(whole[0].double(), logp.gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(whole[1].double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("t", "d", "v"), [(700, 576, 49152), (300, 64, 1003)])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("kept", ["all", "some", "none"])
def test_gradients_match_autograd(
    ops, monkeypatch: pytest.MonkeyPatch, t: int, d: int, v: int, with_entropy: bool, kept: str
) -> None:
    hidden, weight, targets, temperature = problem(t, d, v)
    g = torch.Generator(CUDA).manual_seed(1)
    gl, ge = torch.randn(2, t, generator=g, device=CUDA)
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp = torch.log_softmax((h @ w.T) / temperature.double()[:, None], -1)
    loss = (logp.gather(1, targets[:, None])[:, 0] * gl).sum()
    if with_entropy:
        loss = loss - ((logp.exp() * logp).sum(-1) * ge).sum()
    want = torch.autograd.grad(loss, (h, w))
    monkeypatch.setattr("jetrl.kernels.logprob.chunks._LOGIT_ELEMENTS", 256 * v)
    monkeypatch.setattr("jetrl.kernels.logprob.chunks._FORWARD_ELEMENTS", 256 * v)

    # none of the rows kept, some of them, all
    kept_bytes = {"all": 5 << 29, "some": 2 * 150 * v, "none": 0}[kept]
    monkeypatch.setattr("jetrl.kernels.logprob.chunks.KEPT_BYTES", kept_bytes)
    *_, statistics, residual = ops.logprob_entropy(hidden, ops.prepare_bf16(weight), targets, temperature, True)
    some = 150 * v // (-(-v // 8) * 8)
    assert (0 if residual is None else len(residual)) == {"all": t, "some": some, "none": 0}[kept]

    def backward(dtype: torch.dtype, fill: float) -> tuple[Tensor, Tensor]:
        grad = torch.full(weight.shape, fill, dtype=dtype, device=CUDA)
        dh = ops.logprob_backward(
            gl, ge if with_entropy else None, hidden, weight, targets, temperature, statistics, residual, grad
        )
        return dh, grad

    got, again = backward(torch.float32, 0.0), backward(torch.float32, 0.0)
    rounded, added = backward(torch.bfloat16, 0.0)[1], backward(torch.float32, 4.0)[1] - 4.0
    assert torch.equal(rounded, got[1].to(torch.bfloat16)), "chunks add up in FP32"
    assert ((added - got[1]).norm() / got[1].norm()).item() < 1e-3, "the gradient is added to what was there"
    frozen = ops.logprob_backward(
        gl, ge if with_entropy else None, hidden, weight, targets, temperature, statistics, residual, None
    )
    assert torch.equal(frozen, got[0])
    for name, a, b, c in zip(("hidden", "weight"), got, want, again, strict=True):
        error = ((a.double() - b).norm() / b.norm()).item()
        assert error < 5e-3, f"{name}: {error}"
        assert torch.equal(a, c), f"{name} is not the same twice"


def test_the_gradient_of_a_plain_sum_is_one_number_spread_over_the_rows(ops) -> None:
    """`logprobs.sum().backward()` hands the backward pass a tensor with stride 0."""
    hidden, weight, targets, _ = problem(850, 192, 32)
    grads = []
    for reduce in (lambda x: x.sum(), lambda x: (x * torch.ones_like(x)).sum()):
        h, w = hidden.clone().requires_grad_(), weight.float().requires_grad_()
        logprobs, entropy = token_logprobs(h, Gradient(w), weight, ops.prepare_bf16(weight), targets, 0.7)
        (reduce(logprobs) + reduce(entropy)).backward()
        grads.append((h.grad, w.grad))
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*grads, strict=True))
