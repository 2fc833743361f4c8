"""Links of the certificate that compare drawn tokens and their log-probs: decode as it runs on a GPU, merged, drafted.

    d  decode in CUDA graphs, several steps in a row = training forward
    m  decode of groups whose shared pages are read once = decode without, and training forward
    v  decode with drafts of the next tokens = decode without them, and training forward
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.engine.sharing import TILE, Merge, served
from jetrl.engine.speculation.speculator import Speculator, build_speculator
from jetrl.model.transformer import Transformer
from jetrl.parity.rows import LinkResult, NoText, Packed, Workload, prompts_of, whole_sequences
from jetrl.types import Completion, Request, SamplingParams, WeightSet

_SAMPLES = 5  # of each prompt of link m

Link = Callable[[Transformer, list[Tensor], Workload], LinkResult]


def graph_links(model: Transformer, work: Workload) -> tuple[Link, ...]:
    """The links that need CUDA graphs: m where there are kernels for the heads, and positions for a shared page."""
    spec = model.spec
    merges = served(spec, TILE) and spec.max_position > TILE + work.new_tokens
    return (graph_link, merged_link) if merges else (graph_link,)


# ---- link d ---------------------------------------------------------------------------------------------------------


def graph_link(model: Transformer, sequences: list[Tensor], work: Workload) -> LinkResult:
    """d: decode in CUDA graphs, several steps in a row = training forward (log-probs of the drawn tokens)"""
    start, prompts = time.perf_counter(), prompts_of(sequences, work)
    (completions,) = _generated(model, prompts, work, None, 1)
    return _drawn(graph_link.__doc__ or "", model, prompts, completions, start)


def _generated(
    model: Transformer, prompts: list[list[int]], work: Workload, speculator: Speculator | None, times: int
) -> list[list[Completion]]:
    """What one engine generates from the prompts, so many times."""
    requests = _requests(prompts, work)
    engine = _engine(model, len(requests), work, speculator, "off")
    return [engine.generate(requests) for _ in range(times)]


def _requests(prompts: list[list[int]], work: Workload) -> list[Request]:
    """A sample of each; samples of one prompt draw differently."""
    sampling = SamplingParams(work.new_tokens, seed=work.seed)
    return [Request(i, tuple(p), sampling) for i, p in enumerate(prompts)]


def _engine(
    model: Transformer, number: int, work: Workload, speculator: Speculator | None, merge: Merge
) -> PagedEngine:
    settings = EngineSettings(
        page_size=work.page_size, max_num_seqs=number, max_tokens_per_step=4096, merge_prefix=merge
    )
    engine = PagedEngine(model, NoText(), "certificate", settings, speculator)
    engine.load(WeightSet(0, "certificate", {}))
    return engine


def _drawn(
    title: str, model: Transformer, prompts: list[list[int]], completions: list[Completion], start: float,
    expected: list[Completion] | None = None,
) -> LinkResult:
    """The recorded log-probs against the training forward's, and the tokens against those that are expected."""
    rows = different = 0
    worst, first = 0.0, None
    sequences = whole_sequences(model, prompts, completions)
    trained = Packed(model, sequences)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens, hidden = sequences[i], trained.hidden[i][len(prompt) - 1 : -1]
        learner = model.token_logprobs(hidden, tokens[len(prompt) :], 1.0)[0].cpu()
        sampler = torch.tensor(completion.logprobs, dtype=torch.float32)
        apart = learner != sampler
        if expected is not None:
            apart |= tokens[len(prompt) :].cpu() != torch.tensor(expected[i].tokens)
        unequal = apart.nonzero()[:, 0].tolist()
        rows, different = rows + len(sampler), different + len(unequal)
        if unequal:
            worst = max(worst, float((learner - sampler).abs().max()))
            first = first or f"sequence {i}, position {len(prompt) + unequal[0]}"
    letter, description = title.split(": ", 1)
    return LinkResult(letter, description, rows, different, worst, time.perf_counter() - start, first)


# ---- link m ---------------------------------------------------------------------------------------------------------


def merged_link(model: Transformer, sequences: list[Tensor], work: Workload) -> LinkResult:
    """m: decode that reads shared pages once = decode without (tokens), training forward (their log-probs)"""
    start, generator = time.perf_counter(), torch.Generator().manual_seed(work.seed)
    work = replace(work, page_size=TILE)
    room = model.spec.max_position - work.new_tokens  # for a prompt
    prompts = list[list[int]]()
    for length in (TILE + 1, 2 * TILE + 44, 5 * TILE, 63):  # the last shares no page
        prompt = torch.randint(model.spec.vocab_size, (min(length, room),), generator=generator).tolist()
        prompts += [prompt] * _SAMPLES
    (plain,) = _generated(model, prompts, work, None, 1)
    engine = _engine(model, len(prompts), work, None, "on")
    merged = engine.generate(_requests(prompts, work))
    found = _drawn(merged_link.__doc__ or "", model, prompts, merged, start, plain)
    return found if engine.runner.merged_calls else replace(found, rows=0, first_difference="no step merged anything")


# ---- link v ---------------------------------------------------------------------------------------------------------


def draft_link(model: Transformer, sequences: list[Tensor], work: Workload) -> LinkResult:
    """v: decode with drafts, many of which hold = decode without (tokens), training forward (their log-probs)"""
    start, prompts = time.perf_counter(), prompts_of(sequences, work)
    (plain,) = _generated(model, prompts, work, None, 1)
    speculator = build_speculator("on", work.drafts, len(prompts))
    assert speculator is not None
    _, drafted = _generated(model, prompts, work, speculator, 2)  # the second time, from the first time's answers
    found = _drawn(draft_link.__doc__ or "", model, prompts, drafted, start, plain)
    return found if speculator.counts.accepted.any() else replace(found, rows=0, first_difference="no draft held")
