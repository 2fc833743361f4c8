"""The parity certificate: links between training and rollout, compared bit for bit over the whole vocabulary.

    a  training forward of one sequence alone        = the same sequence inside a packed batch
    b  prefill in chunks through the paged cache     = training forward
    c  decode through the engine: mixed batch, shared prompts, forced preemption and re-admission = training forward

    d  (on a GPU) decode in CUDA graphs, several steps in a row = training forward, for the drawn tokens' log-probs
    m  (on a GPU) the same with pages that samples share read once = decode without, and training forward
    v  decode with drafts of the next tokens = decode without them, and their log-probs = training forward
    s  a prompt's rows shared by its samples, as `train.share_prompts` packs them = training forward
    w  sequences suspended, continued under other weights = training forward with the weights that each token names

Several ranks add three links (`ranks.py`). Links d, m and v are in `drawn.py`, w is in `carried.py`.

"Training forward" is that of packed sequences, by the functions that the learner differentiates; the sequence alone in
link a takes the shorter way of passes without gradients. Rows of all links but d, m, v and w are compared as log-probs
of all V tokens. When one of them fails, both paths run again under a tap, and the first layer and operator whose output
differs at the first differing row is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetrl.engine.engine import PagedEngine
from jetrl.engine.plan import Plan
from jetrl.engine.rows import ZEROS, rows_for
from jetrl.engine.settings import EngineSettings
from jetrl.engine.state_pool import StatePool, grid_of
from jetrl.kernels.logprob.ops import log_softmax
from jetrl.model.transformer import Transformer
from jetrl.parity.carried import carried_link
from jetrl.parity.drawn import draft_link, graph_links
from jetrl.parity.rows import (
    Comparison,
    LinkResult,
    Packed,
    check_sizes,
    learners_forward,
    prompts_of,
    random_sequences,
    row_hash,
    tapped,
    varlen,
    whole_sequences,
)
from jetrl.parity.rows import NoText as NoText
from jetrl.parity.rows import Workload as Workload
from jetrl.train.batches import MicroBatch
from jetrl.train.packing import pack, to_device
from jetrl.train.step import forward_batch
from jetrl.types import (
    Completion,
    ForwardBatch,
    Group,
    PagedPlan,
    Problem,
    Prompt,
    Request,
    SamplingParams,
    Segment,
    StateRows,
    Trajectory,
    WeightSet,
    log_probs,
    token_ids,
)


@dataclass(frozen=True, slots=True)
class Certificate:
    """All links for one model and precision."""

    precision: str
    kv_cache: str  # its format
    device: str
    model: str
    num_parameters: int
    links: tuple[LinkResult, ...]
    ranks: int = 1

    @property
    def ok(self) -> bool:
        return all(link.ok for link in self.links)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"bit_equal": self.ok}


def certify(model: Transformer, work: Workload, name: str, progress: Callable[[str], None]) -> Certificate:
    """Run the links on a published model. Prompts are random tokens; decoding samples at temperature 1."""
    check_sizes(work, model.spec.max_position)
    links = []
    sequences = random_sequences(model, work)
    graphs = graph_links(model, work) if model.head_weight.is_cuda else ()
    drafts = () if grid_of(model.spec, drafts=True) == 1 else (draft_link,)  # there, states cannot go back
    for link in (packed_link, chunked_link, decode_link, *graphs, *drafts, shared_link, carried_link):
        progress(link.__doc__ or "")
        with torch.no_grad():
            links.append(link(model, sequences, work))
    count = sum(p.numel() for p in model.parameters())
    recipe, device = model.recipe, str(model.head_weight.device)
    return Certificate(recipe.name, str(recipe.kv_cache), device, name, count, tuple(links))


# ---- link a ---------------------------------------------------------------------------------------------------------


def packed_link(model: Transformer, sequences: list[Tensor], work: Workload) -> LinkResult:
    """a: one sequence alone = inside a packed batch (training forward)"""
    compare = Comparison("a", packed_link.__doc__ or "")
    packed = Packed(model, sequences)
    for i, tokens in enumerate(sequences):
        alone = model(varlen([tokens]))
        row = compare.rows(model, i, range(len(tokens)), alone, packed.hidden[i])
        if row is not None:
            compare.locate(i, row, tapped(partial(model, varlen([tokens])), row), packed.tapped(i, row))
    return compare.result()


# ---- link b ---------------------------------------------------------------------------------------------------------


def chunked_link(model: Transformer, sequences: list[Tensor], work: Workload) -> LinkResult:
    """b: prefill in chunks through the paged cache = training forward"""
    compare = Comparison("b", chunked_link.__doc__ or "")
    trained = Packed(model, sequences)
    for i, tokens in enumerate(sequences):
        prefilled = torch.cat([model(batch) for batch in chunks(model, tokens, work)])
        row = compare.rows(model, i, range(len(tokens)), trained.hidden[i], prefilled)
        if row is not None:
            right: dict[str, Tensor] = {}
            for batch in chunks(model, tokens, work):
                at = (batch.positions == row).nonzero()
                seen = tapped(partial(model, batch), int(at[0]) if len(at) else 0)
                right = seen if len(at) else right
            compare.locate(i, row, trained.tapped(i, row), right)
    return compare.result()


def chunks(model: Transformer, tokens: Tensor, work: Workload) -> list[ForwardBatch]:
    """Forward batches that prefill one sequence in chunks of `work.chunk` tokens into scattered pages."""
    size, device = work.page_size, tokens.device
    pages = -(-len(tokens) // size)
    rows = rows_for(1) if grid_of(model.spec) else 0
    cache = StatePool(model.spec, 2 * pages + 1, size, model.dtype, device, model.recipe.kv_cache, rows)
    table = torch.arange(2 * pages, 0, -2, dtype=torch.int32, device=device)[None]  # every second page, backwards
    batches = []
    for start in range(0, len(tokens), work.chunk):
        stop = min(start + work.chunk, len(tokens))
        positions = torch.arange(start, stop, device=device)
        slots = table[0, positions // size].long() * size + positions % size
        plan = PagedPlan(
            cache, torch.tensor([0, stop - start], dtype=torch.int32, device=device), (stop - start,),
            torch.tensor([stop], dtype=torch.int32, device=device), (-(-stop // size),), table, slots,
            rows=StateRows(*torch.tensor([[2 if start else ZEROS], [2]], device=device)) if rows else None,
        )
        batches.append(ForwardBatch(tokens[start:stop], positions, plan, "rollout"))
    return batches


# ---- link c ---------------------------------------------------------------------------------------------------------


class _Watched:
    """The model as an engine sees it, which keeps, for each drawn token, the row of log-probs that it was drawn from.

    `observe` hears of each plan before. `target`: the token whose pass is tapped, by request and position.
    """

    def __init__(self, model: Transformer, target: tuple[int, int] | None = None) -> None:
        self.inner, self.target = model, target
        self.hashes: dict[tuple[int, int], int] = {}
        self.hidden: dict[tuple[int, int], Tensor] = {}
        self.seen: dict[str, Tensor] = {}
        self.plan: Plan | None = None
        self.spec, self.recipe, self.dtype = model.spec, model.recipe, model.dtype

    @property
    def head_weight(self) -> Tensor:
        return self.inner.head_weight

    def observe(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, batch: ForwardBatch) -> Tensor:
        assert self.plan is not None
        keys = list(zip(self.plan.sample_requests.tolist(), self.plan.sample_positions.tolist(), strict=True))
        if self.target in keys:
            row = int(self.plan.sample_rows[keys.index(self.target)])
            hidden: list[Tensor] = []
            self.seen = tapped(lambda tap: hidden.append(self.inner(batch, tap)), row)
            return hidden[0]
        return self.inner(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.plan is not None
        logits = self.inner.logits(hidden)
        hashes = row_hash(log_softmax(logits)).tolist()
        rows = {int(r): n for n, r in enumerate(np.unique(self.plan.sample_rows))}
        for row, request, position in zip(
            self.plan.sample_rows.tolist(), self.plan.sample_requests.tolist(),
            self.plan.sample_positions.tolist(), strict=True,
        ):
            self.hashes[request, position] = hashes[rows[row]]
            self.hidden[request, position] = hidden[rows[row]]
        return logits


def decode_link(model: Transformer, sequences: list[Tensor], work: Workload) -> LinkResult:
    """c: decode with paged cache, mixed batch, preemption and re-admission = training forward"""
    compare = Comparison("c", decode_link.__doc__ or "")
    prompts = prompts_of(sequences, work)
    prompts.append(prompts[-1])  # a second sample of one prompt: shared prefill, copy on write
    requests = [
        Request(i, tuple(p), SamplingParams(1 + (work.new_tokens + 3 * i) % work.new_tokens, seed=work.seed))
        for i, p in enumerate(prompts)
    ]
    watched, completions, preemptions = _decode(model, requests, work, None)
    if not preemptions:
        return replace(compare.result(), first_difference="no sequence was interrupted")
    trained = Packed(model, whole_sequences(model, prompts, completions))
    for i, prompt in enumerate(prompts):
        positions = range(len(prompt), len(trained.hidden[i]))  # the token at p is drawn from row p - 1
        expected = trained.hidden[i][len(prompt) - 1 : -1]
        got = torch.stack([watched.hidden[i, p] for p in positions])
        hashes = [watched.hashes[i, p] for p in positions]
        row = compare.rows(model, i, positions, expected, got, hashes)
        if row is not None:
            again, _, _ = _decode(model, requests, work, (i, positions[row]))
            compare.locate(i, positions[row], trained.tapped(i, positions[row] - 1), again.seen)
    return compare.result()


def _decode(
    model: Transformer, requests: list[Request], work: Workload, target: tuple[int, int] | None
) -> tuple[_Watched, list[Completion], int]:
    longest = max(len(r.tokens) + r.sampling.max_tokens for r in requests)
    pages = max(-(-longest // work.page_size) + 1, len(requests))
    settings = EngineSettings(
        page_size=work.page_size, max_num_seqs=max(2, len(requests) - 2),
        max_tokens_per_step=work.step_tokens or max(work.chunk + len(requests), 8),
        kv_cache_tokens=2 * pages * work.page_size,
    )
    watched = _Watched(model, target)
    engine = PagedEngine(watched, NoText(), "certificate", settings, observe=watched.observe)
    engine.load(WeightSet(0, "certificate", {}))
    most = max(r.sampling.max_tokens for r in requests)  # decode steps of a sequence
    every, left = max(3, min(work.new_tokens // 4, most // 2)), dict.fromkeys(range(len(requests)), 2)

    def preempt(step: int, running: tuple[int, ...]) -> tuple[int, ...]:
        """The youngest, but each only twice: a long prompt would not get to its end between two interruptions."""
        victims = running[-1:] if step % every == every - 1 else ()
        for request in victims:
            left[request] -= 1
        return tuple(request for request in victims if left[request] >= 0)

    completions = engine.generate(requests, force_preempt=preempt)
    assert engine.stats is not None
    return watched, completions, engine.stats.preemptions


# ---- link s ---------------------------------------------------------------------------------------------------------


def shared_link(model: Transformer, sequences: list[Tensor], work: Workload) -> LinkResult:
    """s: a prompt's rows shared by two samples = packed whole sequences (training forward)"""
    compare = Comparison("s", shared_link.__doc__ or "")
    device, groups, firsts = sequences[0].device, [], []
    for tokens, prompt in list(zip(sequences, prompts_of(sequences, work), strict=True))[-2:]:
        tail = tokens[len(prompt) :].tolist() or prompt
        groups.append(group_of(prompt, [tail, tail[len(tail) // 2 :]]))
        firsts += [0, len(prompt) - 1]  # the rows that are shared are compared once
    samples = [[*chain.from_iterable(s.tokens.tolist() for s in t.segments)] for g in groups for t in g.trajectories]
    trained = Packed(model, [torch.tensor(tokens, device=device) for tokens in samples])
    limit = max(16384, len(sequences[-1]) + work.new_tokens + 2)  # both samples of a prompt fit
    (packed,) = pack(groups, max_tokens_per_gpu=limit, flow_digest="", weight_version=0, share_prompts=True)
    for host in packed.micro_batches:
        batch = forward_batch(to_device(host, device))
        hidden = learners_forward(model, batch)
        for i, rows in rows_of(host).items():
            positions = range(firsts[i], len(rows))
            row = compare.rows(model, i, positions, trained.hidden[i][firsts[i] :], hidden[rows[firsts[i] :]])
            if row is not None:
                at = positions[row]
                compare.locate(i, at, trained.tapped(i, at), tapped(partial(model, batch), rows[at]))
    return compare.result()


def group_of(prompt: list[int], answers: list[list[int]]) -> Group:
    """Trajectories of one prompt, as a rollout gives them, with log-probs 0."""
    opening = Segment("environment", token_ids(prompt), "")
    turns = [Segment("policy", token_ids(a), "", log_probs([0.0] * len(a)), spans=((0, 0),)) for a in answers]
    trajectories = tuple(Trajectory((opening, turn), "stop", "") for turn in turns)
    return Group(Prompt(0, Problem("", "", ""), tuple(prompt)), trajectories)


def rows_of(micro: MicroBatch) -> dict[int, list[int]]:
    """The rows of each trajectory of a micro-batch, by its number: those of its stem first."""
    parts = [part.tolist() for part in torch.arange(len(micro.tokens)).split(micro.lengths)]
    stems = micro.stems or (-1,) * len(parts)
    whole = [(parts[s] if s >= 0 else []) + part for s, part in zip(stems, parts, strict=True)]
    ids = [int(micro.sequence_ids[part[0]]) for part in parts]
    return {i: rows for i, rows in zip(ids, whole, strict=True) if i >= 0}
