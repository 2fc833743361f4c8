"""The warm start: supervised training on a task's worked solutions (`jetrl sft`), cached by what determines it.

It runs in BF16 whatever the run's precision is, so that `jetrl compare` starts all flows from the same weights. All
ranks train it, each with its rows of masters and moments. Gradients are added in one order for any number of ranks
(`train/reduction.py`, fixed), and so the weights do not depend on that number.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from jetrl import __version__
from jetrl.chat.messages import TurnEncoder, encode_solution
from jetrl.chat.tokenizer import content_of
from jetrl.config import Config
from jetrl.config.keys import key_of
from jetrl.config.load import by_full_key
from jetrl.config.markers import FirstWeights, WarmStart
from jetrl.environments.tools import with_tools
from jetrl.errors import UserError
from jetrl.hashing import sha256_of_file
from jetrl.model.adapter import publish_base
from jetrl.model.master import masters_of, parts_of, values_for
from jetrl.model.sharding import digest, fill, shard_model, whole_value
from jetrl.model.transformer import Transformer
from jetrl.parallel.agreement import common, on_rank0, together
from jetrl.parallel.world import ALONE, World
from jetrl.precision.recipe import build_recipe
from jetrl.run.checkpoint import store
from jetrl.run.engines import eos_ids
from jetrl.run.prepare import model_source
from jetrl.run.setup import build_model
from jetrl.spec import stated
from jetrl.tasks.files import FileTask
from jetrl.tasks.task import Task, encode_problem, holds_out, num_eval_shapes_training
from jetrl.train.batches import PackedBatch
from jetrl.train.likelihood import likelihood
from jetrl.train.optim import build_optimizer, schedule_factor
from jetrl.train.packing import denominators, pack_in_order
from jetrl.train.reduction import own_numbers
from jetrl.train.routing import LOSSES, Routing
from jetrl.train.trainer import NonFiniteError, not_by_an_update, optimizer_step
from jetrl.types import Problem, Segment, Trajectory, token_ids

_SFT_OFFSET = 1 << 40  # the warm start draws its problems far away from RL's in the task's stream


def cache_path(
    config: Config, model: Transformer, task: Task, tokenizer: Any, world: World = ALONE,
    given: Mapping[str, str] | None = None,
) -> Path:
    """The folder for these warm-started weights, named by a hash over the initial weights (those of `model`), the task,
    what the tokenizer makes of it, and the settings. The initial weights are the masters: the same in every precision
    flow. `given`: digests of rows that a program gave, by key. Collective."""
    files = {key: (given or {}).get(f"task.{key}") for key in ("train_file", "eval_file")}
    with together(world):
        content = _content(config, task, tokenizer, model.spec.vocab_size)
    settings = made_of(config) | content | {
        "version": __version__, "start": digest(model, world),
        "spec": stated(model.spec),
        "data": files["train_file"] or _file_hash(config.task.train_file),
        "held out": files["eval_file"] or _file_hash(config.task.eval_file),  # its prompts are not trained on
        "threads": torch.get_num_threads(), "device": model.head_weight.device.type,
        "turns end": "as the chat template ends them",  # once: with the tokenizer's end of sequence
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return Path(config.sft.cache_dir).expanduser() / key


def _content(config: Config, task: Task, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """What the names in the settings stand for: folders and files keep their names when their content changes.

    The first batch holds what else makes tokens of a solution, such as the libraries' versions.
    """
    solved = SolutionEncoder.of(config, tokenizer, vocab_size)
    first = [solved.trajectory(task.problem(i)) for i in _indices(config, 1)]
    return {
        "tokenizer": content_of(tokenizer), "ends": [tokenizer.eos_token_id, *sorted(solved.eos_ids)],
        "first batch": [[(part.author, part.tokens.tolist()) for part in each.segments] for each in first],
        "rows": _rows_hash(task.training_problems()) if isinstance(task, FileTask) else None,
    }


def _rows_hash(problems: Sequence[Problem]) -> str:
    """Of what is trained on: a `task.dataset` may be a folder, whose files the config does not name."""
    total = hashlib.sha256()
    for problem in problems:
        total.update(json.dumps([problem.prompt, problem.solution], sort_keys=True).encode() + b"\n")
    return total.hexdigest()


def made_of(config: Config) -> dict[str, Any]:
    """The settings that a warm start reads, by full key: `cache_path` has their values."""
    unread = set() if num_eval_shapes_training(config) else {"task.num_eval"}
    kept = {key: value for key, value in _marked_settings(config, WarmStart).items() if key not in unread}
    # where nothing is held out, it may train on every row
    return kept | {"eval.eval_interval > 0 (holds problems out)": holds_out(config)}


def starts_from(config: Config) -> dict[str, Any]:
    """The settings behind what `cache_path` has as found: the first weights, the device and the number of threads."""
    return _marked_settings(config, FirstWeights)


def _marked_settings(config: Config, kind: type[WarmStart] | type[FirstWeights]) -> dict[str, Any]:
    """The settings whose key has the marker, those inside of a key's table too."""
    kept = {}
    for name, value in by_full_key(config).items():
        key = key_of(name)
        mark = key.get(kind) if key is not None else None
        if isinstance(mark, FirstWeights) or (isinstance(mark, WarmStart) and mark.reads):
            kept[name] = value
    return kept


def warm_start(
    model: Transformer, config: Config, task: Task, tokenizer: Any, progress: Callable[[int, float], None],
    tell: Callable[[str], None], world: World = ALONE, given: Mapping[str, str] | None = None,
) -> Path:
    """Load the cached weights into `model`, or train them and fill the cache. Publishes. `progress(step, loss)`;
    `given` as in `cache_path`.

    The model is cut for `world`; each rank trains, writes and reads its rows. A collective. With adapters, their base
    is warm-started: whole, before it is rounded and frozen, by the same steps and from the same cache as without.
    """
    if model.recipe.lora is not None:
        whole = build_model(config, model.spec, replace(model.recipe, lora=None), world=world)
        path = warm_start(whole, config, task, tokenizer, progress, tell, world, given)
        masters = masters_of(whole)
        with torch.no_grad():
            publish_base(model, ((name, whole_value(masters[name], whole.dtype)) for name in model.frozen()))
        return path
    with together(world):
        config = with_tools(config)
    path = world.share(cache_path(config, model, task, tokenizer, world, given))
    if on_rank0(world, path.is_dir):
        if world.first:
            tell(f"warm start loaded from {path}")
        with together(world):
            if not path.is_dir():
                raise UserError(
                    f"The warm start {path} is not on this machine. Set sft.cache_dir to a folder that all share."
                )
        store.unseal(path, lambda _: parts_of(model), f"Remove the cached warm start {path}; it is remade.", world)
    else:
        if world.first:
            known = "this model, tokenizer, task, seed and [sft]"
            tell(f"no warm start in the cache for {known} in {path.parent}: training one now")
        with together(world):
            require_writable(path.parent)
        student = train_sft(model, config, task, tokenizer, progress, world)
        with torch.no_grad():
            for name, part in parts_of(student).items():
                model.get_parameter(name).copy_(part.value)
        store.seal(path, parts_of(model), world, mark=f"_{world.share(os.getpid())}")
    model.publish()
    return path


def require_writable(folder: Path) -> None:
    """Make the folder of warm starts and a folder in it, as its end will. UserError before the work, not behind it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        Path(mkdtemp(prefix=".writable-", dir=folder)).rmdir()
    except OSError as error:
        raise UserError(
            f"The warm start cannot be saved in sft.cache_dir = {folder}: {error.strerror or error}. Set sft.cache_dir "
            "to a folder that can be written to."
        ) from error


def _file_hash(file: str | None) -> str | None:
    """What the solutions are read from, as far as the config names a file; data of the hub are bound to a commit."""
    return sha256_of_file(Path(file)) if file is not None else None


def train_sft(
    model: Transformer, config: Config, task: Task, tokenizer: Any, progress: Callable[[int, float], None],
    world: World = ALONE,
) -> Transformer:
    """Minimise the mean negative log-prob of the solutions' policy tokens, from the masters of `model`; returns a model
    with the trained masters, FP32, cut as that one. Collective."""
    sft, device = config.sft, model.head_weight.device
    with torch.device("meta"):
        student = Transformer(model.spec, build_recipe("bf16", model.spec.num_layers), dtype=model.dtype)
    shard_model(student.freeze(model.frozen()), world)
    fill(student, values_for(student, model), device)
    student.to(device).publish()
    fp32 = {"master_dtype": "float32", "optimizer_dtype": "float32", "offload_optimizer": False}
    settings = config.train.model_copy(update={"lr": sft.lr} | fp32)
    solved = SolutionEncoder.of(config, tokenizer, model.spec.vocab_size)
    masters = masters_of(student)
    optimizer = build_optimizer(masters, settings)
    for step in range(1, sft.steps + 1):
        with together(world):
            batch = _batch(step, config, task, solved, world)
        factor = schedule_factor(step - 1, steps=sft.steps, schedule=sft.lr_schedule, warmup_steps=sft.warmup_steps)

        shares = denominators(batch, config.rollout.max_response_length)
        routing = Routing(student, config.train, shares)
        try:
            stats = optimizer_step(
                list(masters.values()), optimizer, batch, likelihood(student, routing), lr=sft.lr * factor,
                max_grad_norm=config.train.max_grad_norm, world=world.replicas, reduction="fixed",
            )
        except NonFiniteError as error:
            advice = "Lower sft.lr, or set sft.warmup_steps."
            if step == 1:
                advice = not_by_an_update(config, False, [f"train.{key}" for key in LOSSES])
            raise common(UserError(f"The warm start stops at step {step}: {error}. {advice}")) from error
        student.publish()
        progress(step, stats["loss"])
    return student


def _batch(step: int, config: Config, task: Task, solved: SolutionEncoder, world: World) -> PackedBatch:
    """The solutions of one step, of which each rank packs its micro-batches."""
    return pack_in_order([solved.trajectory(task.problem(i)) for i in _indices(config, step)],
                         config.train.max_tokens_per_gpu, own_numbers(world.replicas, "fixed"))


def _indices(config: Config, step: int) -> list[int]:
    """The places of a step's problems in the task's stream."""
    sft, first = config.sft, (step - 1) * config.sft.batch_size
    return [_SFT_OFFSET + i % (sft.num_examples or 1 << 39) for i in range(first, first + sft.batch_size)]


@dataclass(frozen=True, slots=True)
class SolutionEncoder:
    """Makes trajectories of worked solutions, with the tokens that end a turn of this run."""

    config: Config
    turns: TurnEncoder
    eos_ids: frozenset[int]

    @classmethod
    def of(cls, config: Config, tokenizer: Any, vocab_size: int) -> SolutionEncoder:
        """That of a run. UserError for token ids that the model does not have."""
        ends = eos_ids(tokenizer, model_source(config), vocab_size)
        return cls(config, TurnEncoder(tokenizer, config.task), ends)

    def trajectory(self, problem: Problem) -> Trajectory:
        """Prompt and worked solution as a trajectory, token for token what a rollout would hold."""
        if problem.solution is None:
            raise UserError(
                f"The warm start needs worked solutions, and problem {problem.id} has none. Set sft.steps = 0, or give "
                "a `solution` column."
            )
        tokens = encode_problem(problem, self.turns.tokenizer, self.config.task)
        parts = encode_solution(problem, self.turns, self.config.rollout.stop, self.eos_ids)
        segments = [Segment(author, token_ids(own), "") for author, own in (("environment", tokens), *parts)]
        return Trajectory(tuple(segments), "stop", "")
