"""The memory of one GPU by part, predicted from a config and a model's shape: arithmetic, no tensor is made.

What a rank holds always (masters, moments, published weights, rotary tables; a reference, critic or teacher), and what
only the rollout (KV cache) or only the update holds (gradients, activations, logits). The larger of the two phases is
the peak. Counted from what `model/linear.py`, `kernels/` and `engine/engine.py` keep on a GPU; `docs/MEMORY.md`
compares it with measured peaks.

Legend: `T` packed tokens, `D` model, `F` feed-forward, `V` vocabulary, `N`, `G` query and key heads, `H` head size,
`E` experts, `k` of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch

from jetrl.config import Config
from jetrl.engine.rows import rows_for
from jetrl.engine.state_pool import MEMORY_SHARE, dequantized_bytes, page_bytes, row_bytes
from jetrl.kernels.logprob.ops import FORWARD_ELEMENTS
from jetrl.kernels.logprob.several import ELEMENTS
from jetrl.model.names import adapter_table, tensor_table
from jetrl.model.shards import shard
from jetrl.parallel.world import World
from jetrl.precision.blocks.layouts import blocks_of, linears_of
from jetrl.precision.blocks.moe import expert_rows
from jetrl.precision.formats import BLOCK
from jetrl.precision.recipe import Recipe, recipe_of
from jetrl.rollout.queue import shares
from jetrl.run.fit.activations import activations, passing
from jetrl.run.teacher import teachers_of
from jetrl.spec import ModelSpec
from jetrl.train.offload import PIECE, SLOTS
from jetrl.train.optim import MOMENT_BLOCK, eight_bit

GIB = 2**30
IN_FLIGHT = 4  # whole gradients of matrices that several ranks hold while they exchange them
WORKSPACE = GIB // 4  # of GEMM libraries, graphs and what is too small to count
SPARE = 3 * GIB  # of a GPU: its context, compiled kernels, and what the allocator has reserved but cannot use
GRAPHS = GIB  # of the CUDA graphs that stay with a kept cache
MARGIN = 0.05  # of a predicted update, which must be free too where a cache is to stay: a cache is not worth a crash
_ROUTER = ".router.weight"
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [sum(sections), width]; `fp8`: whether training and rollout read it as FP8 codes; `weight_only`: codes
    are published, and next to them their values, which BF16 GEMMs read. `frozen`: nothing else is kept of it."""

    name: str
    sections: tuple[int, ...]
    width: int
    fp8: tuple[bool, bool] = (False, False)
    weight_only: bool = False
    frozen: bool = False

    @property
    def size(self) -> int:
        return sum(self.sections) * self.width


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements of a model's parameters: its matrices, each vector, and the matrices of adapters."""

    matrices: tuple[Matrix, ...]
    vectors: tuple[int, ...]
    adapters: tuple[Matrix, ...] = ()  # where there are some, nothing else is trained

    @property
    def trained(self) -> tuple[Matrix, ...]:
        """The matrices that are trained."""
        return self.adapters or tuple(m for m in self.matrices if not m.frozen)

    @property
    def total(self) -> int:
        return sum(m.size for m in self.matrices) + sum(self.vectors)

    def owned(self, ranks: int) -> list[int]:
        """Elements of each trained parameter that rank 0, which has the most, owns of `ranks`; vectors are whole."""
        return [_rows(m, ranks) * m.width for m in self.trained] + ([] if self.adapters else list(self.vectors))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one GPU. A cache of up to `keep` bytes stays during the update.

    `host` and `copy` are a rank's, in host memory.
    `sequences` of `wanted` ones have room in the cache at the same time.
    """

    masters: int
    moments: int
    published: int
    tables: int
    others: int  # reference policy, critic, teacher
    gradients: int
    in_flight: int  # whole gradients of matrices on their way to their owners
    activations: int
    passing: int  # in the update: logits and what a layer's backward pass makes
    optimizer: int  # while it steps: slots of offloaded moments
    cache: int
    keep: int
    rollout_passing: int
    host: int  # moments
    copy: int  # of what a checkpoint holds, on the host too
    tokens: int
    sequences: int
    wanted: int
    judging: int = 0  # what a teacher's pass makes and frees, before the update

    @property
    def resident(self) -> int:
        return self.masters + self.moments + self.published + self.tables + self.others

    @property
    def kept_cache(self) -> int:
        """The cache, if it stays during the update."""
        return self.cache if self.cache <= self.keep else 0

    @property
    def rollout(self) -> int:
        return self.resident + self.cache + self.rollout_passing + WORKSPACE

    @property
    def update(self) -> int:
        during = max(self.activations + self.passing, self.optimizer, self.judging)
        kept = self.kept_cache + GRAPHS if self.kept_cache else 0
        return self.resident + self.gradients + self.in_flight + during + kept + WORKSPACE

    @property
    def peak(self) -> int:
        return max(self.rollout, self.update)

    def fits(self, capacity: int) -> bool:
        """Whether a GPU of `capacity` bytes has room for the peak, and the cache for one sequence."""
        return self.peak + SPARE <= capacity and self.sequences >= 1


def predict(config: Config, spec: ModelSpec, ranks: int, capacity: int) -> Memory:
    """The memory of the rank that holds most, on a GPU of `capacity` bytes; `config` as resolved for a GPU."""
    train, recipe = config.train, recipe_of(config, spec)
    sizes = sizes_of(spec, recipe, train.freeze_router)
    master, grad = _BYTES[train.master_dtype], _BYTES[train.grad_dtype]
    owned = sizes.owned(ranks)
    moments = sum(_moments(n, config) for n in owned)
    others, other_host = _others(config, spec, recipe, ranks)
    tokens = min(train.max_tokens_per_gpu, _step_tokens(config))
    held: dict[str, int] = dict(
        masters=master * sum(owned), moments=0 if train.offload_optimizer else moments,
        published=published_on_gpu(sizes, train.master_dtype, ranks, keeps_transposed(config)),
        tables=_tables(spec), others=others,
    )
    slots = SLOTS * 2 * _BYTES.get(train.optimizer_dtype, 0) * min(PIECE, max(owned))
    cache, sequences, wanted = _cache(config, spec, recipe, ranks, capacity - sum(held.values()))
    memory = Memory(
        **held, gradients=grad * sum(owned), in_flight=_in_flight(sizes, config, ranks),
        activations=activations(config, spec, recipe, tokens),
        passing=passing(config, spec, recipe, tokens) + _several(config, spec, tokens),
        optimizer=slots if train.offload_optimizer else 0, cache=cache,
        keep=0,
        rollout_passing=_rollout_passing(config, spec, recipe, wanted),
        host=(moments if train.offload_optimizer else 0) + other_host, tokens=tokens, sequences=sequences,
        copy=checkpoint_bytes(config, spec, ranks) if copies(config) else 0, wanted=wanted,
        judging=_judging(config, tokens),
    )
    left = max(0, capacity - SPARE - GRAPHS - int((1 + MARGIN) * memory.update))
    room = {"auto": left, "always": capacity, "never": 0}
    return replace(memory, keep=room[config.rollout.keep_kv_cache])


def keeps_transposed(config: Config) -> bool:
    """Whether the FP8 codes that dgrad reads stay from one backward pass to the next."""
    return not (config.train.activation_checkpointing or config.train.lean_backward)


@lru_cache(maxsize=8)
def sizes_of(spec: ModelSpec, recipe: Recipe, freeze_router: bool = False) -> Sizes:
    """Every parameter, in the order of the model."""
    linears = {
        f"layers.{layer}.{block}.{role}.weight": (linear, layer, role)
        for layer in range(spec.num_layers) for (block, role), linear in linears_of(spec, layer).items()
    }
    matrices, vectors = [], []
    for name, pieces in tensor_table(spec).items():
        if len(pieces[0].shape) == 1:
            vectors.append(sum(prod(piece.shape) for piece in pieces))
        elif name in linears:
            linear, layer, role = linears[name]
            fp8 = (recipe.linear(layer, role, "train") is not None, recipe.linear(layer, role, "rollout") is not None)
            by_codes = recipe.weight_only(layer) is not None
            matrices.append(Matrix(name, linear.sections, linear.in_size, fp8, by_codes))
        else:
            frozen = freeze_router and name.endswith(_ROUTER)
            rows = (sum(piece.shape[0] for piece in pieces),)
            matrices.append(Matrix(name, rows, pieces[0].flat[1], frozen=frozen))
    adapters = [
        Matrix(name, (sum(piece.shape[0] for piece in pieces),), pieces[0].shape[1])
        for name, pieces in adapter_table(spec, recipe.lora).items()
    ]
    return Sizes(tuple(matrices), tuple(vectors), tuple(adapters))


def published_on_gpu(sizes: Sizes, master_dtype: str, ranks: int, transposed: bool = True) -> int:
    """What `publish` and the backward pass leave: FP8 codes with scales, the same again `transposed` where training is
    FP8, and BF16 values where a side reads them (in one process BF16 masters themselves, if they are the values)."""
    of_adapters = 0 if master_dtype == "bfloat16" and ranks == 1 else 2 * sum(m.size for m in sizes.adapters)
    alias = master_dtype == "bfloat16" and not sizes.adapters
    total = of_adapters + (0 if alias else 2 * sum(sizes.vectors))
    for m in sizes.matrices:
        if not all(m.fp8) and not (ranks == 1 and alias and not m.weight_only and not m.frozen):
            total += 2 * m.size
        if any(m.fp8) or m.weight_only:
            total += _codes(m) * (2 if m.fp8[0] and transposed else 1)
    return total


def _codes(m: Matrix) -> int:
    blocks, groups = sum(-(-rows // BLOCK) for rows in m.sections), -(-m.width // BLOCK)
    padded = BLOCK * groups * sum(m.sections)
    gaps = any(rows % BLOCK for rows in m.sections[:-1])  # then the GEMM reads a copy with whole blocks
    return padded + 4 * blocks * groups + (BLOCK * blocks * BLOCK * groups if gaps else 0)


@lru_cache(maxsize=4096)
def _rows(m: Matrix, ranks: int) -> int:
    return shard(m.sections, World(0, ranks)).rows[0]


def _tables(spec: ModelSpec) -> int:
    """cos and sin of the rotary embedding, FP32."""
    return 2 * 4 * spec.max_position * (spec.head_dim // 2)


def _moments(elements: int, config: Config) -> int:
    """Adam's two moments of a parameter."""
    if config.train.optimizer_dtype != "8bit":
        return 2 * elements * _BYTES[config.train.optimizer_dtype]
    if not eight_bit(elements):
        return 2 * elements * _BYTES[config.train.master_dtype]
    return 2 * (elements + 4 * (elements // MOMENT_BLOCK) + 4 * 256)  # codes, scales, and a table of 256 entries


def _in_flight(sizes: Sizes, config: Config, ranks: int) -> int:
    """Whole gradients next to the sum of the owned rows (`train/reduction.py`): of all matrices while a lane has
    several micro-batches, and of the largest ones, which are on their way."""
    train = config.train
    if ranks == 1 and train.reduction == "fast":
        return 0
    whole = sorted((m.size for m in sizes.trained), reverse=True)
    flying = sum(whole[:IN_FLIGHT])
    count = -(-_step_tokens(config) // (train.max_tokens_per_gpu * config.rl.updates_per_step))
    lanes = ranks if train.reduction == "fast" else train.reduction_lanes or count
    if count > lanes:  # with one lane a rank, whole gradients are given up as the owned sum grows
        flying += sum(whole) if lanes > ranks else sum(whole) - sum(_rows(m, ranks) * m.width for m in sizes.trained)
    return _BYTES[train.grad_dtype] * flying


def _others(config: Config, spec: ModelSpec, recipe: Recipe, ranks: int) -> tuple[int, int]:
    """A reference policy, a teacher, a critic of its own and the BF16 copy of a calibration: bytes on the GPU and on
    the host."""
    train, device, host = config.train, 0, 0
    sizes = sizes_of(spec, recipe, train.freeze_router)
    masters = _BYTES[train.master_dtype] * sum(sizes.owned(ranks))
    if config.rl.kl_coef > 0 and not sizes.adapters:  # else it is their base
        device += masters + published_on_gpu(sizes, train.master_dtype, ranks, False) + _tables(spec)
    for teacher in teachers_of(config).values():  # whole on every rank
        theirs = sizes_of(teacher.spec, teacher.recipe)
        device += published_on_gpu(theirs, "float32", 1, False) + _tables(teacher.spec)
    if config.rl.clip == "calibrated":  # the policy in BF16, whole on every rank
        device += 2 * (sum(m.size for m in sizes.matrices) + sum(sizes.vectors)) + _tables(spec)
    if config.rl.adv_estimator == "gae" and config.rl.critic != "shared":
        body = _critic(spec, sizes)
        owned = body.owned(ranks)
        moments = sum(_moments(n, config) for n in owned)
        device += _BYTES[train.master_dtype] * sum(owned) + _tables(spec)
        device += published_on_gpu(body, train.master_dtype, ranks, keeps_transposed(config))
        device += (0 if train.offload_optimizer else moments)
        host += moments if train.offload_optimizer else 0
    return device, host


def _critic(spec: ModelSpec, sizes: Sizes) -> Sizes:
    """The parameters of a critic of its own, from the policy's."""
    head = Matrix("head.weight", (1,), spec.hidden_size)
    body = (replace(m, frozen=False) for m in sizes.matrices if m.name != "lm_head.weight")  # a critic trains routers
    return Sizes((*body, head), sizes.vectors)


def copies(config: Config) -> bool:
    """Whether checkpoints are to be written beside the run, from a copy."""
    return config.checkpoint.save_interval > 0 and config.checkpoint.background != "off"


def checkpoint_bytes(config: Config, spec: ModelSpec, ranks: int) -> int:
    """Masters and moments of rank 0, which has the most: what a checkpoint holds of it, and a copy of that takes."""
    return sum(_BYTES[config.train.master_dtype] * n + _moments(n, config) for n in _trained(config, spec, ranks))


def host_moments(config: Config, spec: ModelSpec, ranks: int) -> int:
    """Bytes of moments that rank 0 keeps in host memory."""
    return sum(_moments(n, config) for n in _trained(config, spec, ranks)) if config.train.offload_optimizer else 0


def _trained(config: Config, spec: ModelSpec, ranks: int) -> list[int]:
    """Elements of each parameter of the policy, and of a critic of its own, that rank 0 owns."""
    sizes = sizes_of(spec, recipe_of(config, spec), config.train.freeze_router)
    own_critic = config.rl.adv_estimator == "gae" and config.rl.critic != "shared"
    return sizes.owned(ranks) + (_critic(spec, sizes).owned(ranks) if own_critic else [])


def _step_tokens(config: Config) -> int:
    """The most tokens that a step can train on."""
    r = config.rollout
    if config.supervised:
        return config.train.batch_size * config.longest
    return r.prompts_per_step * r.group_size * (config.task.max_prompt_length + r.max_response_length)


def _cache(config: Config, spec: ModelSpec, recipe: Recipe, ranks: int, free: int) -> tuple[int, int, int]:
    """Bytes of the KV cache, how many sequences it has room for, and how many are to run at the same time."""
    if config.supervised:
        return 0, 1, 1  # nothing is sampled
    if config.rollout.engine != "jetrl":
        return 0, 1, 1  # not known
    page = config.rollout.page_size
    assert page is not None, "resolve() has set it"
    asked = list(_asked(config, ranks))
    each = max(-(-tokens // page) for _, tokens in asked)
    wanted = max(count for count, _ in asked)
    need = max(count * -(-tokens // page) + count // page + 1 for count, tokens in asked)
    size = page_bytes(spec, page, torch.bfloat16, recipe.kv_cache)
    drafts = config.rollout.speculate != "off"
    rows = rows_for(config.rollout.max_num_seqs) * row_bytes(spec, torch.bfloat16, drafts)
    if config.rollout.kv_cache_tokens is not None:
        pages = -(-config.rollout.kv_cache_tokens // page)
    else:
        asked_of = size + (dequantized_bytes(spec, page, torch.bfloat16) if recipe.kv_cache.is_quantized else 0)
        pages = min(need, max(0, int(MEMORY_SHARE * max(0, free - SPARE)) - rows) // max(1, asked_of))
    return pages * size + rows, min(wanted, pages // each), wanted


def _asked(config: Config, ranks: int) -> Iterator[tuple[int, int]]:
    """For rollouts and evaluations: sequences that one rank runs at the same time, and the tokens of the longest."""
    r, prompt = config.rollout, config.task.max_prompt_length
    whole = [((r.prompts_per_step + r.num_carried) * r.group_size, r.group_size, r.max_response_length)]
    if config.eval.eval_interval:
        samples, longest = config.eval.num_samples, config.eval.max_response_length or r.max_response_length
        whole.append((config.task.num_eval * samples, samples, longest))
    for number, group, response in whole:
        count = min(number, r.max_num_seqs)
        if ranks > 1 and number <= r.max_num_seqs * ranks:
            count = max(map(len, shares([1.0] * number, group, r.max_num_seqs, ranks)[0]))
        if config.environment.name is not None:  # the engine expects more conversations than have begun
            count = r.max_num_seqs
        yield count, prompt + response


def _rollout_passing(config: Config, spec: ModelSpec, recipe: Recipe, sequences: int) -> int:
    """The most that an engine step makes and frees: a layer over its tokens, and logits of all that draw."""
    r = config.rollout
    if config.supervised:
        return 0
    assert r.max_tokens_per_step is not None, "resolve() has set it"
    tokens = min(r.max_tokens_per_step, r.prompts_per_step * config.task.max_prompt_length + sequences)
    if r.num_carried:  # what goes on is computed again, as long as it has become
        tokens = r.max_tokens_per_step
    return _forward_passing(spec, recipe, tokens) + 2 * 4 * sequences * spec.vocab_size


def _judging(config: Config, tokens: int) -> int:
    """The most that a teacher's pass over a micro-batch makes and frees: a layer, or a chunk of logits."""
    most = 0
    for teacher in teachers_of(config).values():  # one after the other
        v = teacher.spec.vocab_size
        logits = 4 * v * min(tokens, max(128, FORWARD_ELEMENTS // v // 128 * 128))
        of_tokens = _several(config, teacher.spec, tokens)
        most = max(most, _forward_passing(teacher.spec, teacher.recipe, tokens), logits, of_tokens)
    return most


def _several(config: Config, spec: ModelSpec, tokens: int) -> int:
    """What the KL over several tokens of the teacher makes and frees: a chunk of rows of the head in BF16 and in FP32,
    and their products."""
    top = config.teacher.top_k
    return (2 + 4 + 4) * min(ELEMENTS, tokens * (top + 1) * spec.hidden_size) if top else 0


def _forward_passing(spec: ModelSpec, recipe: Recipe, tokens: int) -> int:
    """The most that a layer makes and frees without gradients."""
    d, f = spec.hidden_size, spec.intermediate_size
    fp8 = recipe.quantizes_activations
    layer = 4 * d + 4 * f + ((d + f) * 33 // 32 if fp8 else 2 * (d + f))
    rows = 0
    if spec.experts is not None:
        f = spec.experts.intermediate_size
        rows = expert_rows(spec, tokens) * (2 * d + 4 * f + ((d + f) * 33 // 32 if fp8 else 2 * (d + f)))
    layer += max(block.adding_bytes(spec, recipe) for block in blocks_of(spec, 0))
    scratch = 4 * spec.num_kv_heads * spec.head_dim if recipe.kv_cache.is_quantized else 0
    return max(tokens * layer, rows + 4 * tokens * d) + tokens * scratch
