"""The one builder: a resolved config becomes a `Session` with everything that a run needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl.chat.prompts import decoded
from jetrl.config import Config
from jetrl.config.paths import absolute_paths
from jetrl.environments.conversations import EnvironmentPool, build_pool
from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.huggingface.adapter import Adapters
from jetrl.huggingface.fp8 import Again
from jetrl.kernels.dispatch import DEVICE_OF, definition, select
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.support import PORTABLE, capability
from jetrl.model.adapter import BaseHash, first_values, is_adapter, without_adapters
from jetrl.model.critic import Critic
from jetrl.model.master import accumulate_in, masters_of, own_rows, values_for
from jetrl.model.moe import routers_of
from jetrl.model.sharding import fill, shard_like, shard_model
from jetrl.model.transformer import Transformer
from jetrl.model.weights import coded_weights
from jetrl.parallel.agreement import on_every_rank, together
from jetrl.parallel.world import ALONE, World
from jetrl.precision.flow import flow_digest
from jetrl.precision.recipe import Recipe
from jetrl.rl.calibration import Bounds
from jetrl.rollout.carry import UnderWay
from jetrl.rollout.queue import Queues
from jetrl.run.checkpoint.beside import Beside, beside
from jetrl.run.compiling.ahead import Displays, compile_ahead
from jetrl.run.engines import build_engine, check_engine, check_truncation, keep_cache, why_not_exact
from jetrl.run.evaluation import Evaluation
from jetrl.run.given import GivenAnswers
from jetrl.run.no_engine import NoEngine
from jetrl.run.prepare import Prepared, adapters_in, check_experts, check_sizes, in_steps, model_source, prepare
from jetrl.run.teacher import build_teachers
from jetrl.spec import ModelSpec
from jetrl.tasks.task import RewardFunction, Task
from jetrl.train.optim import build_optimizer
from jetrl.train.step import Learner
from jetrl.train.teachers import Teachers
from jetrl.types import Engine
from jetrl.user_code.from_python import NOTHING, FromPython


@dataclass(slots=True)
class Progress:
    """How far a run is: what its checkpoints hold besides weights and moments."""

    step: int = 0
    weight_version: int = 0
    num_prompts: int = 0  # taken from the task's training stream so far
    initial_accuracy: float | None = None
    clip_bounds: Bounds | None = None  # of a calibrated clip, once they have been found
    first_row: int = 0  # the step of the first row of the run folder's metrics: later if another run began it
    data: dict[str, str] = field(default_factory=dict)  # SHA-256 of local data files and given rows, by key
    under_way: tuple[UnderWay, ...] = ()  # groups that go on in the next step
    reference: Transformer | None = None  # the policy as it was after the warm start, for a KL penalty
    base: str | None = None  # digest of the frozen base of adapters

    def after(
        self, step: int, weight_version: int, num_prompts: int, clip_bounds: Bounds | None,
        under_way: tuple[UnderWay, ...],
    ) -> None:
        """Step `step` is done."""
        self.step, self.weight_version, self.num_prompts = step, weight_version, num_prompts
        self.clip_bounds, self.under_way = clip_bounds, under_way


@dataclass(slots=True)
class Pending:
    """What a run has under way, owes or has made once: a checkpoint knows nothing of it."""

    beside: Beside = field(default_factory=Beside)  # the checkpoint that is being written
    saved_step: int = -1  # of the newest checkpoint in the run's own folder, if it is known
    model_files: dict[str, bytes] | None = None  # of a saved model, without the tensors; made with the first checkpoint
    texts: dict[int, str] = field(default_factory=dict)  # of tokens, as far as they were asked for
    owes_evaluation: bool = False  # a signal ended this step's evaluation
    held_out: Evaluation | None = None  # the last evaluation problem by problem, until it is recorded
    before: dict[str, float] = field(default_factory=dict)  # metrics of the start, for the first row that is written


@dataclass(frozen=True, slots=True)
class Session:
    """What a run works with, as it was built; how far it is; and what is pending."""

    config: Config  # every path in it is absolute
    tokenizer: Any
    task: Task
    reward: RewardFunction | None  # None: the environment gives the rewards
    learner: Learner
    engine: Engine
    flow_digest: str
    unified: bool
    base_config: dict[str, Any] | None  # the model's own config.json, kept in what we save
    generation_config: dict[str, Any] | None  # likewise
    given: Config  # as the user wrote it, hub names with their commits
    conversations: EnvironmentPool | None = None  # None: single answers
    queues: Queues | None = None  # of the ranks' rollouts; None: one process
    own: FromPython = NOTHING  # what a program gave as objects
    given_answers: GivenAnswers | None = None  # of method = "sft", and of a distillation that has some
    teacher: Teachers | None = None  # of a distillation
    adapters: Adapters | None = None  # those that the run goes on from
    progress: Progress = field(default_factory=Progress)
    pending: Pending = field(default_factory=Pending)

    @property
    def model(self) -> Transformer:
        return self.learner.model

    @property
    def world(self) -> World:
        return self.learner.world

    def close(self) -> None:
        """End what runs in the background: environments are closed, and the engine. A checkpoint that
        is being written, which only an error or a signal leaves here, is given up."""
        self.pending.beside.abandon()
        if self.conversations is not None:
            self.conversations.shutdown()
        self.engine.close()

    def engine_metrics(self, *, of_evaluation: bool = False) -> dict[str, float]:
        """What the engine tells about itself since the last call; first, of the start.

        Those of an evaluation have names of their own: it asks the same problems every time, and often greedily.
        """
        taken = self.engine.take_metrics()
        if of_evaluation:
            return {f"in_eval/{key}": value for key, value in taken.items()}
        before, self.pending.before = self.pending.before, {}
        return before | taken

    def check_settings(self, error: Exception) -> None:
        """Reports an error caused by an environment that changed torch's settings as such."""
        if self.conversations is not None and not isinstance(error, UserError):
            try:
                self.conversations.check_settings()
            except UserError as cause:
                raise cause from error

    def take_held_out(self) -> Evaluation | None:
        """The last evaluation problem by problem, once."""
        taken, self.pending.held_out = self.pending.held_out, None
        return taken

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens as the policy read it, special ones included."""
        return decoded(self.tokenizer, tokens)

    def token_text(self, token: int) -> str:
        """The text of one token, for the sample browser."""
        text = self.pending.texts.get(token)
        if text is None:  # a tokenizer takes some microseconds
            text = self.pending.texts[token] = self.tokenizer.decode([token])
        return text


def build(
    config: Config, *, weights: bool = True, evaluates: bool = False, world: World = ALONE,
    displays: Displays | None = None, own: FromPython = NOTHING,
) -> Session:
    """Build model, optimizer, engine, task and reward from a resolved config. A collective of the run's `world`.

    Without `weights` the model's weights are not read (nor downloaded): a checkpoint's follow. `evaluates`: the model
    is only sampled from, and `model.path` is a folder on every rank's disk; there are no masters and no optimizer then,
    and each rank reads all weights: it needs them whole. `displays`: shows how kernels are compiled ahead of need.
    `own`: what a program gave as objects.
    """
    given = config
    config, plan, before = begin(config, trains=not evaluates, world=world, displays=displays, own=own)
    if not evaluates:
        model = build_model(config, plan.spec, plan.recipe, weights=weights, world=world)
        learner = build_learner(config, model, world)
    else:
        with together(world):
            model = build_published(config, plan.spec, plan.recipe)
        learner = Learner(model, None, world=world)
    with together(world):
        teacher = None if evaluates else build_teachers(config)  # before the engine takes what memory is left
        engine: Engine = NoEngine()
        if not config.supervised:
            engine = build_engine(config, model, plan.tokenizer, plan.base_config, model_source(config))
        if not evaluates:
            check_truncation(config, engine.keeps_bits)
        if not (evaluates or config.supervised) and config.device != "cpu":
            gpu = torch.cuda.get_device_properties(model.head_weight.device)
            keep_cache(engine, config, world.size, gpu.total_memory)
    source = model_source(config)
    return Session(
        config=config, tokenizer=plan.tokenizer, task=plan.task, reward=plan.reward,
        learner=learner, engine=engine, flow_digest=flow_digest(plan.spec, plan.recipe, definition(config.kernels)),
        unified=keeps_bits(config, engine), base_config=plan.base_config,
        generation_config=hf.read_generation_config(source) if source is not None else None,
        conversations=build_conversations(config, plan), given=given, own=own, teacher=teacher,
        adapters=plan.adapters, given_answers=plan.given_answers or plan.mixed_answers,
        queues=None if world.alone else Queues(world, config.rollout.max_num_seqs),
        pending=Pending(Beside() if evaluates else beside(config, plan.spec, world), before=before),
    )


def begin(
    config: Config, *, trains: bool = True, samples: bool = True, world: World = ALONE,
    displays: Displays | None = None, own: FromPython = NOTHING,
) -> tuple[Config, Prepared, dict[str, float]]:
    """What comes before a model: checks, the settings of the process, and kernels that are compiled ahead of need.

    The config that is returned has absolute paths only; the numbers are metrics of the compilation. A collective.
    """
    if trains:
        check_lanes(config, world)
    check_engine(config, world)
    config = absolute_paths(config)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    torch.use_deterministic_algorithms(True)
    # the setting above also fills every new tensor with NaN, an extra pass over memory; our ops write all they return
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    plan = on_every_rank(world, lambda: prepare(config, trains=trains, samples=samples, own=own))
    check_gpus(config, world)
    if trains:
        config = in_steps(config, plan.task)
    # before the model: workers need memory of the GPU
    return config, plan, compile_ahead(config, plan.spec, world, displays, trains=trains)


def check_gpus(config: Config, world: World) -> None:
    """Refuse ranks with GPUs of different kinds where the order of sums belongs to the kind. A collective."""
    if config.device == "cpu" or world.alone:
        return
    kinds = world.gather((config.kernels, list(capability() or ())))
    if len({str(kind) for kind in kinds}) > 1 and any(kernels == PORTABLE for kernels, _ in kinds):
        found = ", ".join(f"rank {rank} has {'.'.join(map(str, kind))}" for rank, (_, kind) in enumerate(kinds))
        raise UserError(
            f"The GPUs of this run are of different kinds: by compute capability, {found}. Bits depend on the kind: "
            "choose GPUs of one kind with CUDA_VISIBLE_DEVICES, and start again."
        )


def check_lanes(config: Config, world: World) -> None:
    """Refuse fewer lanes of gradients than ranks: some would have no work in any update."""
    lanes = config.train.reduction_lanes
    size = world.replicas.size
    if lanes is not None and lanes < size:
        raise UserError(
            f"train.reduction_lanes = {lanes} gives work to {lanes} ranks, and this run has {size}. Set it to at "
            f"least {size}, best to a multiple of every number of ranks that should give these bits."
        )


def build_conversations(config: Config, plan: Prepared) -> EnvironmentPool | None:
    """The environments of a run; None for single answers."""
    if plan.environment is None:
        return None
    e = config.environment
    return build_pool(plan.environment, plan.tokenizer, config.task, timeout=e.timeout, max_concurrent=e.max_concurrent)


def build_learner(config: Config, model: Transformer, world: World = ALONE) -> Learner:
    """Optimizer and, for PPO, the critic: with an optimizer of its own, or a value head in the policy's.

    The model is cut for `world` already (`build_model`); a critic is cut as its policy is.
    """
    if config.rl.adv_estimator != "gae":
        return Learner(model, build_optimizer(masters_of(model), config.train), world=world)
    shared = config.rl.critic == "shared"
    critic = Critic(model, shared)
    accumulate_in(critic, getattr(torch, config.train.grad_dtype))
    of_critic = {f"critic.{name}": master for name, master in masters_of(critic).items()}
    if shared:
        optimizer = build_optimizer(masters_of(model) | of_critic, config.train)
        return Learner(model, optimizer, critic, world=world)
    settings = config.train.model_copy(update={"lr": config.rl.critic_lr})
    policy_optimizer = build_optimizer(masters_of(model), config.train)
    return Learner(model, policy_optimizer, critic, build_optimizer(of_critic, settings), world)


def keeps_bits(config: Config, engine: Engine) -> bool:
    """Whether the learner's log-probs are the sampler's, bit for bit: the engine must promise it, and so must the flow
    (not across two precisions, nor with cuBLASLt)."""
    return why_not_exact(config, engine.keeps_bits) is None


def build_model(
    config: Config, spec: ModelSpec, recipe: Recipe, *, weights: bool = True, world: World = ALONE
) -> Transformer:
    """The policy with its initial weights, published. Without `weights` they are zeros: the caller loads others.

    Each rank makes its own rows, on the device, one parameter after the other. A collective.
    """
    device = torch.device(config.device)
    assert DEVICE_OF[config.kernels] == device.type, "resolve() pairs devices with kernels"
    select(config.kernels)
    with torch.device("meta"):
        model = Transformer(
            spec, recipe, master_dtype=getattr(torch, config.train.master_dtype),
            activation_checkpointing=config.train.activation_checkpointing,
            lean_backward=config.train.lean_backward,
        )
    if config.train.freeze_router:
        model.freeze(routers_of(model))
    shard_model(model, world)
    source = on_every_rank(world, lambda: model_source(config, weights=True)) if weights else None
    with together(world):
        if source is not None:
            fill(model, _begun(model, config, stored_values(source, model, own_rows(model))), device)
        elif weights:
            fill(model, _begun(model, config, model.random_values(config.model.init_seed)), device)
        else:
            fill(model, ((name, torch.zeros(p.shape, device=device)) for name, p in model.named_parameters()), device)
    model.to(device).publish()
    accumulate_in(model, getattr(torch, config.train.grad_dtype))
    return model


def build_published(config: Config, spec: ModelSpec, recipe: Recipe) -> Transformer:
    """Only the policy's published weights, with the bits of `build_model`: for uses that train nothing. (Of a folder in
    FP8 codes are the same, and scales those of the folder: see `huggingface.fp8`.)

    Weights are read, published and dropped one by one; what stays is FP8 codes with scales and the parts in BF16.
    """
    assert DEVICE_OF[config.kernels] == torch.device(config.device).type, "resolve() pairs devices with kernels"
    select(config.kernels)
    check_experts(config, spec)
    check_sizes(config, spec, recipe)
    source = model_source(config, weights=True)
    # checked before a model that may be far larger than its weights is built
    values: Iterable[tuple[str, Tensor | QTensor]] | None = None
    if source is not None:
        coded = hf.stored_parameters(source, spec, coded=coded_weights(spec, recipe))
        values = Again(recipe.pow2_weights, masters=False).through(coded, source)
    model = Transformer(spec, recipe, master_dtype=None).to(config.device)
    if values is None:
        values = model.random_values(config.model.init_seed)
    return model.publish_values(_begun(model, config, values))


def stored_values(
    folder: Path, model: Transformer, rows: dict[str, tuple[int, int]]
) -> Iterator[tuple[str, Tensor | QTensor]]:
    """What a model that is trained begins with: codes where the folder has them, for frozen weights and for masters. A
    notice says how many of the masters' blocks are not given back by `publish`."""
    recipe = model.recipe
    coded = hf.stored_parameters(folder, model.spec, rows, coded_weights(model.spec, recipe))
    return Again(recipe.pow2_weights, masters=recipe.lora is None).through(coded, folder)


def load_weights(model: Transformer, folder: str | Path, device: torch.device | None = None) -> None:
    """Fill the master weights from a Hugging Face folder, of which a rank reads its own rows, one parameter at a time.

    `device`: of parameters that are on the meta device until now.
    """
    fill(model, hf.parameters_of(folder, model.spec, own_rows(model)), device)


def _begun(
    model: Transformer, config: Config, base: Iterable[tuple[str, Tensor | QTensor]]
) -> Iterator[tuple[str, Tensor | QTensor]]:
    """The values of a model; with adapters those of its base, and then theirs: what `model.path` holds, or drawn ones.

    UserError, when the base has passed by, if it is another one than that of the adapters in `model.path`.
    """
    if model.recipe.lora is None:
        yield from base
        return
    hashes, found = BaseHash(), adapters_in(config)
    yield from hashes.through((name, value) for name, value in base if not is_adapter(name))
    model.base_digest = hashes.digest()
    if found is None:
        yield from first_values(model, config.seed)
        return
    found.check_base(model.base_digest)
    rows = own_rows(model)
    yield from ((name, value[slice(*rows[name])]) for name, value in found.values(model.spec))


def reference_of(model: Transformer) -> Transformer:
    """A frozen copy of the policy as it is now, in the same precision flow (for kl_coef > 0); with adapters, the base
    itself, which takes no memory: they begin as nothing."""
    if model.recipe.lora is not None:
        return without_adapters(model)
    device = model.head_weight.device
    with torch.device("meta"):
        copy = Transformer(model.spec, model.recipe, master_dtype=model.master_dtype).freeze(model.frozen())
    shard_like(copy, model)
    fill(copy, values_for(copy, model), device)
    return copy.to(device).requires_grad_(False).publish()
