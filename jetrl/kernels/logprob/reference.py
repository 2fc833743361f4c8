"""Log-probs and their gradient on a CPU, by chunks of rows, so that few logits are held at once."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.logprob.truncation import Support
from jetrl.kernels.reference import PreparedBF16

_LOGIT_ELEMENTS = 1 << 22  # logits held at once


def head_logits(hidden: Tensor, w: PreparedBF16) -> Tensor:
    return ref.bf16_gemm(hidden, w)


def logprobs(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    z = logits / temperature[:, None]
    _, top, total = ref.exp_weights(z)
    return ref.logprob(z, targets, top, total)


def logprob_entropy(
    hidden: Tensor, w: PreparedBF16, targets: Tensor, temperature: Tensor, keep: bool = False,
    support: Support | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-prob of each target and entropy, FP32 [T], by chunks of rows; `temperature` FP32 [T] divides the logits.
    `support` leaves tokens out of the rows' distributions.

    The others are for `logprob_backward`: statistics of the rows and, with `keep`, what it would make again. Both None
    here, where that computes plain FP32 logits and their own sums.
    """
    logprobs, entropies = [], []
    rows = max(1, _LOGIT_ELEMENTS // w.values.shape[0])
    for start in range(0, max(1, len(hidden)), rows):  # without rows once, of no rows
        part = slice(start, start + rows)
        t, temp, z = targets[part], temperature[part], head_logits(hidden[part], w)
        if support is not None:
            support.restrict_(z, part, temp)
        z.div_(temp[:, None])
        weights, top, total = ref.exp_weights(z)
        logprobs.append(ref.logprob(z, t, top, total))
        entropies.append(ref.entropy(z, weights, top, total))
    return torch.cat(logprobs), torch.cat(entropies), None, None


def logprob_backward(
    grad_logprob: Tensor, grad_entropy: Tensor | None, hidden: Tensor, weight: Tensor, targets: Tensor,
    temperature: Tensor, statistics: Tensor | None, residual: Tensor | None, d_weight: Tensor | None,
    support: Support | None = None,
) -> Tensor:
    """The gradient for hidden (rounded); the head weight's is added to `d_weight`. Logits are recomputed in chunks.

    Without an entropy gradient, `r = rounded(p - onehot)` is free of the gradient, which is a factor for each row:

        f = -grad_logprob / temperature          dh = rounded(f * (r @ W))          dW = r.T @ rounded(f * h)

    With one, `dz = (grad_logprob * (onehot - p) - grad_entropy * p * (log p + H)) / temperature`, rounded;
    `dh = rounded(dz @ W)`, `dW = dz.T @ h`. "Rounded" is to the dtype of `hidden`, all else FP32.
    """
    w = weight.to(torch.float32)
    d_hidden, total = torch.empty_like(hidden), torch.zeros_like(w)
    rows = max(1, _LOGIT_ELEMENTS // w.shape[0])
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        h, temp = hidden[part].to(torch.float32), temperature[part, None]
        z = h @ w.T
        if support is not None:
            support.restrict_(z, part, temperature[part])
        logp = torch.log_softmax(z.div_(temp), -1)
        p = logp.exp()
        if grad_entropy is None:
            factor = -grad_logprob[part, None] / temp
            p.scatter_add_(1, targets[part, None], torch.full_like(factor, -1.0))
            p = p.to(hidden.dtype).to(torch.float32)
            d_hidden[part] = ((p @ w) * factor).to(hidden.dtype)
            if d_weight is not None:
                total.addmm_(p.T, (h * factor).to(hidden.dtype).to(torch.float32))
            continue
        dz = p * -grad_logprob[part, None]
        dz.scatter_add_(1, targets[part, None], grad_logprob[part, None])
        ent = -(p * logp).sum(-1, keepdim=True)
        dz.sub_(p * (logp + ent) * grad_entropy[part, None])
        dz = dz.div_(temp).to(hidden.dtype).to(torch.float32)
        d_hidden[part] = (dz @ w).to(hidden.dtype)
        if d_weight is not None:
            total.addmm_(dz.T, h)
    if d_weight is not None:
        d_weight.add_(total)
    return d_hidden
