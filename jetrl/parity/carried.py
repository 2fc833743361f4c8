"""The certificate's link of answers that are carried over updates (`rollout.overcommit`).

    w  sequences suspended twice, continued under other weights by prefill = training forward with each token's version

Other weights are the same ones with half of every norm's elements times 1.25, and then with the other half: keys and
values of every layer change, and the link takes no second model. What is changed is put back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.model.published import Norm, Published
from jetrl.model.transformer import Transformer
from jetrl.parity.rows import LinkResult, NoText, Packed, Workload, prompts_of, whole_sequences
from jetrl.types import Completion, Request, SamplingParams, Spans, Unfinished, WeightSet

VERSIONS = 3


def carried_link(model: Transformer, sequences: list[Tensor], work: Workload) -> LinkResult:
    """w: suspended and continued under other weights = training forward, each token under the version that it names"""
    start, prompts = time.perf_counter(), prompts_of(sequences, work)
    sampling = SamplingParams(work.new_tokens, seed=work.seed)
    requests = [Request(i, tuple(prompt), sampling) for i, prompt in enumerate(prompts)]
    letter, description = (carried_link.__doc__ or "").split(": ", 1)
    with other_weights(model) as weights_of:
        completions = _carried(model, requests, work, weights_of)
        found = _compared(model, prompts, completions, weights_of)
    told = LinkResult(
        letter, description, found.rows, found.different, found.worst, time.perf_counter() - start, found.first
    )
    if found.carried < len(requests) or not found.unlike:
        return replace(told, rows=0, first_difference="no sequence was carried over to weights that draw otherwise")
    return told


@contextmanager
def other_weights(model: Transformer) -> Iterator[Callable[[int], None]]:
    """Gives a function that puts the weights of a version, 0 (the model's own) to 2, into the memory that a forward
    pass reads, as an update does. Afterwards they are the model's own."""
    # Not through the tensor itself: it may be a master's too, and its model would ask for publish().
    vectors = [m for m in model.modules() if isinstance(m, Published) and m.published.ndim == 1]
    held = [m.published.data for m in vectors]
    own, norms = [one.clone() for one in held], [m for m in vectors if isinstance(m, Norm)]
    behind = [m.offset if isinstance(m, Norm) else False for m in vectors]  # what multiplies is 1 more

    def load(version: int) -> None:
        for one, before, offset in zip(held, own, behind, strict=True):
            one.copy_(before)
            if version:
                one[version - 1 :: 2] *= 1.25
                one[version - 1 :: 2] += 0.25 * offset
        for norm in norms:
            norm.refresh()  # some read a copy of what they have published

    try:
        yield load
    finally:
        load(0)


def _carried(
    model: Transformer, requests: list[Request], work: Workload, weights_of: Callable[[int], None]
) -> list[Completion]:
    """Each request's completion, a third of whose tokens each version has drawn."""
    settings = EngineSettings(page_size=work.page_size, max_num_seqs=len(requests), max_tokens_per_step=4096)
    engine = PagedEngine(model, NoText(), "certificate", settings)
    under_way = [Unfinished(request) for request in requests]
    for version in range(VERSIONS):
        weights_of(version)
        engine.load(WeightSet(version, "certificate", {}))
        engine.resume(under_way)
        edge = (version + 1) * work.new_tokens // VERSIONS
        while engine.has_work and (version == VERSIONS - 1 or min(engine.drawn().values(), default=0) < edge):
            engine.step()
        held, ended = engine.suspend(), engine.collect()
        # Decode steps in a row may draw beyond the edge: that is dropped, as a rollout does.
        if version < VERSIONS - 1:
            under_way = [one.first(edge) for one in held]
            under_way += [_first(requests[one.request_id], one, edge, version) for one in ended]
    return sorted(ended, key=lambda one: one.request_id)


def _first(request: Request, ended: Completion, count: int, version: int) -> Unfinished:
    """What ended, as it was with `count` tokens."""
    spans = tuple(span for span in _spans(ended) if span[0] < count)
    return Unfinished(request, ended.tokens[:count], ended.logprobs[:count], spans)


def _spans(ended: Completion) -> Spans:
    return ended.spans or ((0, ended.weight_version),)


@dataclass(slots=True)
class _Found:
    """`carried`: sequences that all versions drew from; `unlike`: log-probs that the last weights would not give."""

    rows: int = 0
    different: int = 0
    worst: float = 0.0
    first: str | None = None
    carried: int = 0
    unlike: int = 0


def _compared(
    model: Transformer, prompts: list[list[int]], completions: list[Completion], weights_of: Callable[[int], None]
) -> _Found:
    found = _Found()
    tokens = whole_sequences(model, prompts, completions)
    for version in reversed(range(VERSIONS)):
        weights_of(version)
        trained = Packed(model, tokens)
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            hidden = trained.hidden[i][len(prompt) - 1 : -1]
            learner = model.token_logprobs(hidden, tokens[i][len(prompt) :], 1.0)[0].cpu()
            sampler, by = torch.tensor(completion.logprobs, dtype=torch.float32), _versions(completion)
            if version == VERSIONS - 1:
                found.carried += len(_spans(completion)) == VERSIONS
                found.unlike += int(((learner != sampler) & (by != version)).sum())
            apart = ((learner != sampler) & (by == version)).nonzero()[:, 0]
            found.rows, found.different = found.rows + int((by == version).sum()), found.different + len(apart)
            if len(apart):
                found.worst = max(found.worst, float((learner - sampler)[apart].abs().max()))
                place = len(prompt) + int(apart[0])
                found.first = found.first or f"sequence {i}, position {place}, drawn by version {version}"
    return found


def _versions(completion: Completion) -> Tensor:
    """The version that drew each token [n]."""
    by = torch.empty(len(completion.tokens), dtype=torch.int64)
    for start, version in _spans(completion):
        by[start:] = version
    return by
