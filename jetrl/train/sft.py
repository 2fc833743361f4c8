"""The warm start: supervised training on a task's worked solutions (`jetrl sft`), cached by what determines it.

It runs in BF16 whatever the run's precision is, so that `jetrl compare` starts all flows from the same weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetrl import __version__
from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.model.sharding import full_state, load_rows
from jetrl.model.transformer import Transformer
from jetrl.parallel.together import by_first, together
from jetrl.parallel.world import ALONE, World
from jetrl.precision.recipe import build_recipe
from jetrl.rl.losses import Stats
from jetrl.tasks.messages import TurnEncoder, encode_solution
from jetrl.tasks.task import Task, encode_problem, holds_out
from jetrl.train.optim import build_optimizer, schedule_factor
from jetrl.train.packing import denominators, pack_in_order
from jetrl.train.routing import Routing
from jetrl.train.step import forward_rows
from jetrl.train.trainer import NonFiniteError, optimizer_step
from jetrl.types import MicroBatch, Problem, Segment, Trajectory

_SFT_OFFSET = 1 << 40  # the warm start draws its problems far away from RL's in the task's stream


def cache_path(config: Config, model: Transformer, start: Mapping[str, Tensor] | None = None) -> Path:
    """Where these warm-started weights are kept: a hash over initial weights (`start`; None: the model's own), task and
    settings. The initial weights are the masters: the same in every precision flow."""
    settings = {
        "version": __version__, "start": _state_hash(model.state_dict() if start is None else start),
        "spec": {k: v for k, v in asdict(model.spec).items() if k != "experts" or v}, "seed": config.seed,
        "task": config.task.model_dump(mode="json"), "sft": config.sft.model_dump(mode="json", exclude={"cache_dir"}),
        "optimizer": [config.train.adam_betas, config.train.adam_eps, config.train.max_grad_norm,
                      config.train.weight_decay, config.train.max_tokens_per_gpu],
        "stop": config.rollout.stop, "threads": torch.get_num_threads(), "device": model.head_weight.device.type,
    }
    if model.spec.experts is not None:
        settings["routers"] = [config.train.router_aux_loss_coef, config.train.router_z_loss_coef]
    if not holds_out(config):
        settings["holds_out"] = False  # then it may train on every row
    key = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return Path(config.sft.cache_dir).expanduser() / f"{key}.safetensors"


def _state_hash(state: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode())
        digest.update(value.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def warm_start(
    model: Transformer, config: Config, task: Task, tokenizer: Any, progress: Callable[[int, float], None],
    tell: Callable[[str], None], world: World = ALONE,
) -> Path:
    """Load the cached weights into `model`, or train them and fill the cache. Publishes. `progress(step, loss)`.

    Of several ranks the first one trains, as one process does, to the same bits; all read the file. A collective.
    """
    start = full_state(model)

    def made() -> Path:
        path = cache_path(config, model, start)
        if path.is_file():
            tell(f"warm start loaded from {path}")
            return path
        state = train_sft(model, config, task, tokenizer, progress, start)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        save_file(state, temporary, metadata={"sha256": _state_hash(state)})
        temporary.replace(path)
        return path

    path = by_first(world, made)
    with together(world):
        load_rows(model, _read_cache(path))
    model.publish()
    return path


def _read_cache(path: Path) -> dict[str, Tensor]:
    """The cached weights, verified."""
    if not path.is_file():
        raise UserError(f"The warm start {path} is not on this machine. Set sft.cache_dir to a folder that all share.")
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            expected = (file.metadata() or {}).get("sha256")
    except SafetensorError as error:
        raise UserError(f"The cached warm start {path} is damaged ({error}). Remove it; it is remade.") from error
    if expected != _state_hash(state):
        raise UserError(f"The cached warm start {path} does not have the hash it states. Remove it; it is remade.")
    return state


def train_sft(
    model: Transformer, config: Config, task: Task, tokenizer: Any, progress: Callable[[int, float], None],
    start: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Minimise the mean negative log-prob of the solutions' policy tokens, from the masters `start` of a model like
    this; returns the trained master weights."""
    sft = config.sft
    student = Transformer(model.spec, build_recipe("bf16", model.spec.num_layers), dtype=model.dtype)
    student.to(model.head_weight.device)
    student.load_state_dict({k: v.to(torch.float32) for k, v in start.items()})
    student.publish()
    fp32 = {"master_dtype": "float32", "optimizer_dtype": "float32", "offload_optimizer": False}
    settings = config.train.model_copy(update={"lr": sft.lr} | fp32)
    optimizer = build_optimizer(student.named_parameters(), settings)
    for step in range(1, sft.steps + 1):
        first = (step - 1) * sft.batch_size
        index = [_SFT_OFFSET + i % (sft.num_examples or 1 << 39) for i in range(first, first + sft.batch_size)]
        solved = [solved_trajectory(task.problem(i), tokenizer, config) for i in index]
        batch = pack_in_order(solved, config.train.max_tokens_per_gpu)
        factor = schedule_factor(step - 1, steps=sft.steps, schedule=sft.lr_schedule, warmup_steps=sft.warmup_steps)

        shares = denominators(batch, config.rollout.max_response_length)
        routing = Routing(student, config.train, shares)

        def loss_of(micro: MicroBatch, routing: Routing = routing) -> tuple[Tensor, Stats]:
            rows = forward_rows(student, micro, 1.0, routes := routing.routes())
            loss = -rows.logprobs.sum() / routing.shares.num_loss_tokens
            return routing.add_to(loss, {}, routes, rows.index, micro.sequence_ids)

        try:
            stats = optimizer_step(
                list(student.parameters()), optimizer, batch.micro_batches, loss_of, lr=sft.lr * factor,
                max_grad_norm=config.train.max_grad_norm,
            )
        except NonFiniteError as error:
            raise UserError(
                f"The warm start stops at step {step}: {error}. Lower sft.lr, or set sft.warmup_steps."
            ) from error
        student.publish()
        progress(step, stats["loss"])
    dtype = model.head_weight.dtype
    return {k: v.to(dtype).contiguous() for k, v in student.state_dict().items()}


def solved_trajectory(problem: Problem, tokenizer: Any, config: Config) -> Trajectory:
    """Prompt and worked solution as a trajectory, token for token what a rollout would hold."""
    if problem.solution is None:
        raise UserError(
            f"The warm start needs worked solutions, and problem {problem.id} has none. Set sft.steps = 0, or give "
            "a `solution` column."
        )
    opening = Segment("environment", tuple(encode_problem(problem, tokenizer, config.task)), "")
    parts = encode_solution(problem, TurnEncoder(tokenizer, config.task), config.rollout.stop)
    return Trajectory((opening, *(Segment(author, tokens, "") for author, tokens in parts)), "stop", 0, "")
