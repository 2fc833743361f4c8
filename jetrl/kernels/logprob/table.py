"""The ops of log-probs, and the draw of tokens: which module computes each, by backend."""

from __future__ import annotations

from jetrl.kernels.registry import Op

OPS = (
    Op("head_logits", reference="logprob.reference", hopper="logprob.chunks"),
    Op("logprob_entropy", reference="logprob.reference", hopper="logprob.chunks"),
    Op("logprob_backward", reference="logprob.reference", hopper="logprob.chunks"),
    Op("exp_weights", reference="reference", hopper="logprob.triton"),
    Op("logprobs", reference="logprob.reference", hopper="logprob.triton"),
    Op("sample", reference=None, hopper="logprob.triton"),  # a CPU draws with `engine.sampler`
)
