"""Everything of a run that needs no weights: what is wrong in a config, or missing on this machine, shows up here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from shlex import quote
from typing import Any, get_args

from jetrl.chat.messages import TurnEncoder, check_turn_end
from jetrl.chat.tokenizer import load_tokenizer
from jetrl.config import Config
from jetrl.config.toml import toml_literal
from jetrl.environments.environment import TOOLS, Factory, for_tokenizer, load_environment
from jetrl.environments.tools import tools_factory
from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.huggingface.adapter import Adapters, is_adapters, read_adapters
from jetrl.huggingface.hub import model_folder
from jetrl.kernels.attention.latent import STEPS, require_sizes
from jetrl.kernels.delta.parts import KERNEL_SIZES, KERNEL_WIDTH
from jetrl.kernels.dispatch import require_experts, require_latent
from jetrl.kernels.support import require, require_precision
from jetrl.model.latent_attention import sizes_of
from jetrl.model.names import adapted_projections
from jetrl.phrases import some
from jetrl.precision.blocks.layouts import linears_of
from jetrl.precision.flow import require_unified
from jetrl.precision.lora import GROUPS, MLP, Lora, expanded
from jetrl.precision.recipe import Recipe, lora_of, recipe_of
from jetrl.rewards.calls import names_of
from jetrl.rewards.loading import import_reward, needs_answer
from jetrl.run.engines import check_truncation, engine_class, eos_ids, require_engine
from jetrl.run.given import GivenAnswers
from jetrl.run.mixed import check_mixed
from jetrl.run.own_parts import load_own_parts
from jetrl.run.teacher import check_rows, check_teacher, key_of, paths_of, teachers_of
from jetrl.spec import DeltaSpec, ModelSpec
from jetrl.tasks.files import FileTask
from jetrl.tasks.gold import required_reward
from jetrl.tasks.task import RewardFunction, Task, build_task, eval_prompts, holds_out, rows_of_epoch, sample
from jetrl.train.routing import check_routing
from jetrl.types import Side
from jetrl.user_code.from_python import NOTHING, FromPython

BF16_MULTIPLE = 8  # values of a row: TMA reads 16 bytes


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything of a run except its weights."""

    tokenizer: Any
    spec: ModelSpec
    base_config: dict[str, Any] | None
    recipe: Recipe
    task: Task
    reward: RewardFunction | None
    environment: Factory | None
    eos_ids: frozenset[int]  # the tokens that end a completion
    given_answers: GivenAnswers | None = None  # of method = "sft": makes trajectories of them
    mixed_answers: GivenAnswers | None = None  # of teacher.given_fraction
    adapters: Adapters | None = None  # those that `model.path` names


def prepare(
    config: Config, *, trains: bool = True, samples: bool = True, own: FromPython = NOTHING
) -> Prepared:
    """Everything of `build` that needs no weights: what is wrong in a config or missing here shows up now.

    Without `samples` no engine will be built, so that none has to be installed or to take the model. `own`:
    what a program gave as objects.
    """
    require(config.kernels)
    require_precision(config.kernels, config.precision)
    tokenizer, spec, base = load_spec(config)
    check_lengths(config, spec)
    check_experts(config, spec)
    ends = eos_ids(tokenizer, model_source(config), spec.vocab_size)
    recipe = recipe_of(config, spec)
    check_sizes(config, spec, recipe)
    check_lora(config, spec)
    if trains:  # a recipe may evaluate models of other kinds than it trains
        check_routing(config.train, spec)
        check_saved(config, spec)
        load_own_parts(config)
        check_teacher(config, tokenizer, spec)
        check_kernels_of_teacher(config)
    samples = samples and not config.supervised
    if samples:
        require_engine(config, spec, recipe)
    if samples and trains:
        check_truncation(config, getattr(engine_class(config.rollout.engine), "keeps_bits", True) is not False)
    if recipe.name != "fp8_rollout":
        require_unified(spec, recipe)
    named = import_reward(config.task, own)
    given = GivenAnswers(config, tokenizer, ends) if config.supervised else None
    task = build_task(
        config.task, config.seed, tokenizer, config.environment.name, needs_answer=needs_answer(named),
        hold_out=holds_out(config), own=own, given=None if given is None else given.trajectory,
    )
    reward, environment = (None, None) if given is not None else scoring(config, task, named, tokenizer, own)
    shown = config.task if environment is None else environment.task(config.task)
    teaches = trains and (config.sft.steps > 0 or config.supervised)
    check_turn_end(TurnEncoder(tokenizer, shown), ends, config.rollout.stop, teaches=teaches)
    if trains and isinstance(task, FileTask):
        check_rows(config, task.training_problems())
    if trains and given is not None:
        check_given(config, task, given)
    elif trains:
        check_prompts(config, task, tokenizer, conversations=environment is not None)
    mixed = GivenAnswers(config, tokenizer, ends) if trains and config.num_given else None
    if mixed is not None:
        check_mixed(config, task, sample(task, tokenizer, 0, config.rollout.prompts_per_step, config), mixed)
    adapters = adapters_in(config)
    return Prepared(tokenizer, spec, base, recipe, task, reward, environment, ends, given, mixed, adapters)


def in_steps(config: Config, task: Task) -> Config:
    """The config with the steps that `train.epochs` means for the rows of `task`; without epochs as it is.

    Steps have `rollout.prompts_per_step` prompts or `train.batch_size` given answers: the last one may go beyond the
    last epoch. UserError where warm-ups are longer.
    """
    epochs, (per_step, _), rows = config.train.epochs, config.per_step, rows_of_epoch(task)
    if epochs is None:
        return config
    assert rows is not None, "the config allows epochs of data only"
    steps = max(1, math.ceil(Fraction(str(epochs)) * rows / per_step))
    stated = f"train.epochs = {epochs:g} of {rows} rows are {steps} steps of {per_step} {_taken(config)}"
    if config.train.warmup_steps > steps:
        raise UserError(f"{stated}, but train.warmup_steps = {config.train.warmup_steps}. Lower it.")
    if config.rl.critic_warmup_steps >= steps:
        raise UserError(
            f"{stated}, but rl.critic_warmup_steps = {config.rl.critic_warmup_steps}, so the policy would never learn. "
            "Lower it, or raise train.epochs."
        )
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def epochs_told(config: Config, task: Task) -> str:
    """One line on the steps of `train.epochs`, for a config that `in_steps` has made; empty without epochs."""
    if config.train.epochs is None:
        return ""
    rows, steps, (per_step, _) = rows_of_epoch(task), config.train.steps, config.per_step
    more = " (more where dynamic sampling refills)" if config.rl.dynamic_sampling == "refill" else ""
    return f"train.epochs = {config.train.epochs:g} of {rows} rows: {steps} steps of {per_step} {_taken(config)}{more}"


def _taken(config: Config) -> str:
    """What a step takes of the data, in words."""
    return "answers" if config.supervised else "prompts"


def check_prompts(config: Config, task: Task, tokenizer: Any, conversations: bool) -> None:
    """UserError, before a warm start, if there are too few held-out problems, or if a prompt of step 1 or of the
    evaluations cannot be encoded or is too long. An environment makes its prompts itself."""
    sample(task, tokenizer, 0, config.rollout.prompts_per_step, config, conversations)
    if config.eval.eval_interval:
        eval_prompts(task, tokenizer, config, conversations)


def check_given(config: Config, task: Task, given: GivenAnswers) -> None:
    """UserError if a given answer of step 1 or of the evaluations is missing, cannot be encoded or is too long."""
    problems = [task.problem(place) for place in range(config.train.batch_size)]
    for problem in [*problems, *(task.eval_problems(config.task.num_eval) if config.eval.eval_interval else ())]:
        given.trajectory(problem)


def check_experts(config: Config, spec: ModelSpec) -> None:
    """UserError if the model has experts, latent attention or Gated DeltaNet, and the config's kernels cannot compute
    that."""
    if spec.experts is not None:
        require_experts(config.kernels)
    if spec.latent is not None:
        require_latent(config.kernels)
    check_gpu_sizes(config, spec)


def check_gpu_sizes(config: Config, spec: ModelSpec) -> None:
    """UserError for sizes of latent attention or Gated DeltaNet that the config's kernels do not have, if they are a
    GPU's. No GPU is needed for that."""
    if config.kernels == "reference":
        return
    if spec.latent is not None:
        require_sizes(sizes_of(spec), STEPS[config.kernels])
    if spec.delta is not None:
        _check_delta(config, spec.delta)


def _check_delta(config: Config, delta: DeltaSpec) -> None:
    """UserError for sizes of Gated DeltaNet that the kernels of a GPU do not have."""
    heads = {"linear_key_head_dim": delta.key_dim, "linear_value_head_dim": delta.value_dim}
    wrong = [f"{key} = {size}" for key, size in heads.items() if size not in KERNEL_SIZES]
    wrong += [f"linear_conv_kernel_dim = {delta.conv_width}"] if delta.conv_width > KERNEL_WIDTH else []
    if wrong:
        raise UserError(
            f"{some(wrong)}: the kernels of a GPU have heads of {', '.join(map(str, KERNEL_SIZES))} and convolutions "
            f'over up to {KERNEL_WIDTH} tokens. Set device = "cpu", or use another model.'
        )


def check_sizes(config: Config, spec: ModelSpec, recipe: Recipe) -> None:
    """UserError for a matrix that the kernels of a GPU cannot multiply in BF16: its rows must be whole 16 bytes there.

    BF16 are all linears of bf16 and w8a16, layers that are kept in BF16, and the lm_head. FP8 pads its operands.
    """
    if config.kernels == "reference":
        return
    rows = {"lm_head": spec.hidden_size} | {
        f"layers.{layer}.{block}.{role}": linear.in_size
        for layer in range(spec.num_layers) for (block, role), linear in linears_of(spec, layer).items()
        if not all(recipe.linear(layer, role, side) for side in get_args(Side))
    }
    if wrong := next((name for name, size in rows.items() if size % BF16_MULTIPLE), None):
        raise UserError(
            f'precision = "{recipe.name}" computes {wrong} in BF16, over rows of {rows[wrong]} values; the kernels of '
            f'a GPU need a multiple of {BF16_MULTIPLE}. Set device = "cpu", or use another model.'
        )


def check_kernels_of_teacher(config: Config) -> None:
    """UserError for a teacher that the config's kernels cannot compute."""
    for name, teacher in teachers_of(config).items():
        try:
            check_experts(config, teacher.spec)
            check_sizes(config, teacher.spec, teacher.recipe)
        except UserError as error:
            raise UserError(f"{key_of(name)} = {paths_of(config)[name]}: {error}") from None


def check_lora(config: Config, spec: ModelSpec) -> None:
    """UserError for adapters that this model cannot have: of projections that it lacks, or of a rank beyond a
    matrix's."""
    lora, found = lora_of(config.lora), adapters_in(config)
    if found is not None:
        _check_found(config, spec, lora, found)
    if config.model.base_revision is not None and (found is None or found.local_base() is not None):
        what = "no adapters" if found is None else f"adapters, whose base is the folder {found.local_base()}"
        raise UserError(
            f"model.base_revision = {config.model.base_revision!r} has no effect: model.path = {config.model.path} "
            f"holds {what}. Leave it out."
        )
    if lora is None:
        return
    _check_expert_rank(config, spec)
    ranks: dict[str, int] = {}  # by projection: the smallest side of its matrices
    for layer in range(spec.num_layers):
        for linear in linears_of(spec, layer).values():
            for name, rows in zip(linear.projections, linear.sections, strict=False) if not linear.experts else ():
                ranks[name] = min(ranks.get(name, rows), rows, linear.in_size)
    in_experts = MLP if lora.expert_rank is not None else ()
    chosen = [name for name in lora.targets if name in ranks]
    missing: list[str] = [
        name for name in config.lora.targets if name not in GROUPS and name not in ranks and name not in in_experts
    ]
    if missing or not chosen:
        inside = "" if spec.experts is None else (
            " outside of its experts, which have adapters with lora.expert_rank alone, and beside others"
        )
        raise UserError(
            f"lora.targets: this {spec.family} model has no {some(missing or [*lora.targets])}{inside}. It has "
            f"{', '.join(ranks)}."
        )
    worst = min(chosen, key=lambda name: ranks[name])
    if lora.rank > ranks[worst]:
        raise UserError(
            f"lora.rank = {lora.rank} is beyond the rank of {worst}, which is {ranks[worst]} at most. Lower it, or "
            f"leave {worst} out of lora.targets."
        )
    if config.kernels != "reference" and lora.rank % BF16_MULTIPLE:
        raise UserError(
            f"lora.rank = {lora.rank}: the kernels of a GPU need a multiple of {BF16_MULTIPLE}. Take "
            f"{-(-lora.rank // BF16_MULTIPLE) * BF16_MULTIPLE}, or set device = \"cpu\"."
        )


def _check_expert_rank(config: Config, spec: ModelSpec) -> None:
    """UserError for a rank of experts' adapters that this model cannot have."""
    rank, experts = config.lora.expert_rank, spec.experts
    if rank is None:
        return
    if experts is None:
        raise UserError(f"lora.expert_rank = {rank}: this {spec.family} model has no experts. Leave the key out.")
    if not set(expanded(config.lora.targets)) & set(MLP):
        raise UserError(
            f"lora.expert_rank = {rank} has no effect: lora.targets names none of {', '.join(MLP)}. Name one, or leave "
            "the key out."
        )
    most = min(experts.intermediate_size, spec.hidden_size)
    if rank > most:
        raise UserError(f"lora.expert_rank = {rank} is beyond the rank of an expert's matrices, {most}. Lower it.")
    if config.kernels != "reference" and rank % BF16_MULTIPLE:
        raise UserError(
            f"lora.expert_rank = {rank}: the kernels of a GPU need a multiple of {BF16_MULTIPLE}. Take "
            f"{-(-rank // BF16_MULTIPLE) * BF16_MULTIPLE}, or set device = \"cpu\"."
        )


def _check_found(config: Config, spec: ModelSpec, lora: Lora | None, found: Adapters) -> None:
    """UserError for adapters in `model.path` that are not what the config says."""
    named = None if lora is None else replace(lora, targets=tuple(adapted_projections(spec, lora)))
    if named != found.lora:
        wanted = " ".join(quote(f"lora.{key}={toml_literal(value)}") for key, value in found.settings().items())
        raise UserError(
            f"model.path = {config.model.path} holds adapters, which a run goes on with as they are. Give their "
            f"settings: {wanted}"
        )
    if config.sft.steps:
        raise UserError(
            f"sft.steps = {config.sft.steps}: a warm start trains the base, and the adapters in model.path = "
            f"{config.model.path} belong to theirs as it is. Set sft.steps = 0."
        )


def check_saved(config: Config, spec: ModelSpec) -> None:
    """Refuse `quant.saved_gate_up = "fp8"` for a model in which no layer has a dense MLP in FP8."""
    q = config.quant
    in_fp8 = range(q.num_first_layers_in_bf16, spec.num_layers - q.num_last_layers_in_bf16)
    if q.saved_gate_up == "fp8" and set(in_fp8) <= set(spec.expert_layers):
        raise UserError(
            f'quant.saved_gate_up = "fp8" has no effect: no layer of this {spec.family} model has a dense MLP in FP8. '
            "Remove it."
        )


def scoring(
    config: Config, task: Task, named: RewardFunction | None, tokenizer: Any, given: FromPython = NOTHING
) -> tuple[RewardFunction | None, Factory | None]:
    """The reward function and the environment. An environment's own rewards count unless `task.reward` is set; tools
    give none."""
    if config.environment.name is None:
        return with_signal(required_reward(task, named), config), None
    if config.environment.name == TOOLS:
        return with_signal(required_reward(task, named), config), tools_factory(config, tokenizer)
    with_signal(named, config)
    own = named if named is not None else task.reward
    found = load_environment(config.environment.name, config.environment.params, own, given)
    return named, for_tokenizer(found, tokenizer, config.task)


def with_signal(reward: RewardFunction | None, config: Config) -> RewardFunction | None:
    """The reward, if it has the function that `rl.signal` names; UserError otherwise."""
    signal, names = config.rl.signal, () if reward is None else names_of(reward)
    if signal != "reward" and signal not in names:
        known = ", ".join(map(repr, names)) or "none (only an environment gives rewards)"
        raise UserError(
            f'rl.signal = {signal!r}: no reward function has this name. Their names are: {known}. Or "reward", the '
            "weighted sum."
        )
    return reward


def load_spec(config: Config) -> tuple[Any, ModelSpec, dict[str, Any] | None]:
    """Tokenizer, model shape and (for a model folder) its config.json; checked against each other."""
    m, folder = config.model, model_source(config)
    base = hf.read_config(folder) if folder is not None else None
    if m.tokenizer is not None:
        tokenizer = load_tokenizer(m.tokenizer, m.tokenizer_revision)
    else:
        assert folder is not None, "the config requires a tokenizer with model.arch"
        found = adapters_in(config)
        tokenizer = hf.load_tokenizer_from(folder if found is None or hf.has_tokenizer(folder) else found.folder)
    if folder is not None:
        spec = hf.spec_from_folder(folder, base)
    else:
        spec = hf.spec_from_hf({"vocab_size": len(tokenizer)} | (m.arch or {}))
    hf.check_vocab(tokenizer, spec)
    return tokenizer, spec, base


def spec_of(config: Config) -> ModelSpec:
    """The model's shape alone; of a model folder it reads config.json, and no tokenizer."""
    folder = model_source(config)
    return hf.spec_from_folder(folder) if folder is not None else load_spec(config)[1]


def model_source(config: Config, *, weights: bool = False) -> Path | None:
    """The folder of `model.path`, from the hub where it is a name (without its weights unless asked); None: random. Of
    adapters it is that of their base."""
    m = config.model
    if m.path is None:
        return None
    folder = model_folder(m.path, m.revision, weights=weights)
    found = _adapters_at(config, folder)
    return folder if found is None else found.base_folder(weights)


def adapters_in(config: Config) -> Adapters | None:
    """The adapters that `model.path` names, a folder or a name on the hub; None where it is a model."""
    m = config.model
    return None if m.path is None else _adapters_at(config, model_folder(m.path, m.revision, weights=False))


def _adapters_at(config: Config, folder: Path) -> Adapters | None:
    """The adapters in `folder`, which is that of `model.path`; None where it is a model. Their tensors are fetched:
    they say which projections have adapters."""
    m = config.model
    if m.path is None or not is_adapters(folder):
        return None
    found = read_adapters(model_folder(m.path, m.revision))
    return found if m.base_revision is None else replace(found, revision=m.base_revision)


def check_lengths(config: Config, spec: ModelSpec) -> None:
    """Refuse prompts and responses that the model has no positions for."""
    if config.longest > spec.max_position:
        lower = "it" if config.supervised else "one of the two"
        raise UserError(
            f"{config.longest_in_words} = {config.longest}, but the model has positions for {spec.max_position} tokens "
            f"(max_position_embeddings). Lower {lower}."
        )
