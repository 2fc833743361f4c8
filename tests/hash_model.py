"""A model whose hidden states betray any error of the KV cache, and what tests of the engine share.

`HashModel` keeps a token's value in its keys and its position in its values, reads the whole past back through the
block table, and makes the hidden state from a hash of it. A wrong page, slot, copy, chunk or position changes it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from jetrl.engine.engine import PagedEngine
from jetrl.engine.plan import Plan
from jetrl.engine.runner import ModelRunner
from jetrl.engine.sampler import SamplingTable, sample
from jetrl.engine.settings import EngineSettings
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import Recipe, build_recipe
from jetrl.spec import ModelSpec, RopeSpec
from jetrl.types import Completion, ForwardBatch, PagedPlan, Request, VarlenPlan, WeightSet

VOCAB, HIDDEN = 40, 16
SPEC = ModelSpec(
    family="qwen3", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=32, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6, rope=RopeSpec(10_000.0), max_position=128, tie_embeddings=True,
    qkv_bias=False, qk_norm=True,
)


class HashModel:
    def __init__(self) -> None:
        self.spec, self.dtype, self.recipe = SPEC, torch.bfloat16, Recipe("bf16", SPEC.num_layers)
        self.head_weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7)) * 1.5
        self.rows: list[int] = []  # of each forward pass

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        seed = 0
        for position, token in enumerate(tokens):
            seed = (seed * 6364136223846793005 + token * 64 + position + 1) % 2**63
        return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([(self.head_weight * row).sum(-1) for row in hidden])

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        plan = batch.plan
        assert isinstance(plan, PagedPlan) and batch.side == "rollout" and not torch.is_grad_enabled()
        self.rows.append(len(batch.tokens))
        size, last = plan.cache.keys.shape[2], SPEC.num_layers - 1
        for layer in range(SPEC.num_layers):
            cache = plan.cache.layer(layer)
            keys, values = cache.keys, cache.values
            keys.flatten(0, 1)[plan.slots] = batch.tokens.to(keys.dtype)[:, None, None] + layer
            values.flatten(0, 1)[plan.slots] = batch.positions.to(values.dtype)[:, None, None] + layer
        out = []
        for b, (first, end) in enumerate(zip(plan.cu_seqlens[:-1].tolist(), plan.cu_seqlens[1:].tolist(), strict=True)):
            length = int(plan.kv_lengths[b])
            assert end - first == plan.query_lengths[b] and length <= plan.kv_pages[b] * size
            pages = plan.block_table[b, : -(-length // size)].long()
            past = (keys[pages].flatten(0, 1)[:length, -1, -1] - last).long().tolist()
            where = (values[pages].flatten(0, 1)[:length, 0, 0] - last).long().tolist()
            assert where == list(range(length)), "the cache of another position"
            assert batch.positions[first:end].tolist() == list(range(length - (end - first), length))
            out.extend(self.hidden(past[: length - (end - first) + 1 + i]) for i in range(end - first))
        return torch.stack(out)


class Letters:
    """Token t is the t-th letter; 0 ends a sequence."""

    eos_token_id: int | None = 0

    def decode(self, token_ids: list[int]) -> str:
        return "".join("#abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLM"[t] for t in token_ids)


def make_engine(model: object = None, **sizes: int | None) -> PagedEngine:
    engine = PagedEngine(model or HashModel(), Letters(), "flow", EngineSettings(**sizes))  # type: ignore[arg-type]
    engine.load(WeightSet(3, "flow", {}))
    return engine


def straight(model: HashModel, request: Request, eos: frozenset[int] = frozenset({0})) -> tuple[list[int], list[float]]:
    """The completion by recomputing everything for each token, without cache or batch."""
    p = request.sampling
    known, lps = list(request.tokens), []
    while len(lps) < p.max_tokens:
        logits = model.logits(model.hidden(known)[None])
        token, lp = sample(logits, [p], [request.id], [len(known)])
        known.append(int(token))
        lps.append(float(lp))
        if known[-1] in p.stop_token_ids or (known[-1] in eos and not p.ignore_eos):
            break
    return known[len(request.tokens) :], lps


class BurstRunner(ModelRunner):
    """What a GPU does in a burst, as plain steps: each step's tokens are the next one's inputs."""

    bursts = 0

    def burst(self, plan: Plan, table: SamplingTable) -> int:
        return 5 if len(plan.sample_rows) == len(plan.tokens) == len(plan.counts) else 0

    def run(self, plan: Plan, table: SamplingTable, steps: int = 1) -> tuple[np.ndarray, np.ndarray]:
        drawn = [super().run(plan, table)]
        self.bursts += steps > 1
        for step in range(1, steps):
            later = dataclasses.replace(
                plan, starts=plan.starts + step, tokens=drawn[-1][0][0], positions=plan.positions + step,
                copies=plan.copies[:0], sample_positions=plan.sample_positions + step, row_reads=plan.row_writes,
            )
            drawn.append(super().run(later, table))
        tokens, logprobs = (np.concatenate(column) for column in zip(*drawn, strict=True))
        return tokens, logprobs


def real_model(precision: str, cache: str) -> Transformer:
    """A small transformer with attention that is not nearly uniform."""
    recipe = build_recipe(precision, SPEC.num_layers, kv_cache=cache, head_dim=SPEC.head_dim)
    model = Transformer(SPEC, recipe).init_random(0)
    with torch.no_grad():
        model.embed.weight.mul_(20)
    model.publish()
    return model


def learners_logprobs(model: Transformer, tokens: list[int]) -> list[float]:
    """Log-probs of tokens[1:] by the forward that the trainer differentiates."""
    n = len(tokens)
    whole = torch.tensor(tokens)
    plan = VarlenPlan(torch.tensor([0, n], dtype=torch.int32), (n,))
    hidden = model(ForwardBatch(whole, torch.arange(n), plan, "train"))
    expected, _ = model.token_logprobs(hidden[:-1], whole[1:], 1.0)
    assert expected.requires_grad
    return expected.tolist()


def suspended_every(steps: int, engine: PagedEngine, requests: list[Request]) -> list[Completion]:
    """The completions of requests that are suspended and resumed after each so many steps."""
    done: list[Completion] = []
    engine.add(requests)
    while engine.has_work:
        for _ in range(steps):
            if engine.has_work:
                engine.step()
        held = engine.suspend()
        done += engine.collect()
        engine.resume(held)
    return done + engine.collect()
