"""The warm start: supervised training on a task's worked solutions (`jetrl sft`), cached by what determines it.

It runs in BF16 whatever the run's precision is, so that `jetrl compare` starts all flows from the same weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from jetrl import __version__
from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe
from jetrl.tasks.task import Task, encode_problem
from jetrl.train.optim import build_optimizer, clip_gradients_, global_grad_norm, schedule_factor, set_lr
from jetrl.train.packing import to_device
from jetrl.train.step import forward_rows
from jetrl.types import MicroBatch

_SFT_OFFSET = 1 << 40  # the warm start draws its problems far from those of RL in the task's stream


def cache_path(config: Config, model: Transformer) -> Path:
    """Where these warm-started weights are kept: a hash over initial weights, task and settings."""
    settings = {
        "version": __version__, "start": _weights_hash(model), "spec": asdict(model.spec), "seed": config.seed,
        "task": config.task.model_dump(mode="json"), "sft": config.sft.model_dump(mode="json", exclude={"cache_dir"}),
        "optimizer": [config.train.adam_betas, config.train.adam_eps, config.train.max_grad_norm,
                      config.train.weight_decay, config.train.max_tokens_per_gpu],
        "threads": torch.get_num_threads(), "device": model.head_weight.device.type,
    }  # fmt: skip
    key = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return Path(config.sft.cache_dir).expanduser() / f"{key}.safetensors"


def _weights_hash(model: Transformer) -> str:
    """Hash of the master weights: unlike a checksum of what is published, the same in every precision flow."""
    return _state_hash(model.state_dict())


def _state_hash(state: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode())
        digest.update(value.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def warm_start(
    model: Transformer, config: Config, task: Task, tokenizer: Any, progress: Callable[[int, float], None],
    tell: Callable[[str], None],
) -> Path:  # fmt: skip
    """Load the cached weights into `model`, or train them and fill the cache. Publishes. `progress(step, loss)`."""
    path = cache_path(config, model)
    if path.is_file():
        tell(f"warm start taken from {path}")
    else:
        state = train_sft(model, config, task, tokenizer, progress)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        save_file(state, temporary, metadata={"sha256": _state_hash(state)})
        temporary.replace(path)
    model.load_state_dict(_read_cache(path))
    model.publish()
    return path


def _read_cache(path: Path) -> dict[str, torch.Tensor]:
    """The cached weights, verified."""
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            expected = (file.metadata() or {}).get("sha256")
    except SafetensorError as error:
        raise UserError(f"The cached warm start {path} is damaged ({error}). Remove it: it is made anew.") from error
    if expected != _state_hash(state):
        raise UserError(f"The cached warm start {path} does not have the hash it states. Remove it: it is made anew.")
    return state


def train_sft(
    model: Transformer, config: Config, task: Task, tokenizer: Any, progress: Callable[[int, float], None]
) -> dict[str, torch.Tensor]:
    """Minimise the mean negative log-prob of solution tokens; returns the trained master weights."""
    sft = config.sft
    student = Transformer(model.spec, build_recipe("bf16", model.spec.num_layers), dtype=model.dtype)
    student.to(model.head_weight.device)
    student.load_state_dict({k: v.to(torch.float32) for k, v in model.state_dict().items()})
    student.publish()
    fp32 = {"master_dtype": "float32", "optimizer_dtype": "float32", "offload_optimizer": False}
    settings = config.train.model_copy(update={"lr": sft.lr} | fp32)
    optimizer = build_optimizer(student.named_parameters(), settings)
    for step in range(1, sft.steps + 1):
        first = (step - 1) * sft.batch_size
        index = [_SFT_OFFSET + i % (sft.num_examples or 1 << 39) for i in range(first, first + sft.batch_size)]
        micros, tokens = _batch(task, tokenizer, index, config), 0
        count = sum(int(m.loss_mask.sum()) for m in micros)
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for host in micros:
            micro = to_device(host, model.head_weight.device)
            loss = -forward_rows(student, micro, 1.0).logprobs.sum() / count
            loss.backward()
            total += float(loss.detach())
            tokens += micro.tokens.numel()
        norm = global_grad_norm(student.parameters())
        if not np.isfinite(total) or not np.isfinite(float(norm)):
            raise UserError(
                f"The warm start stops at step {step}: loss {total}, gradient norm {float(norm)}. Lower sft.lr, or set "
                "sft.warmup_steps."
            )
        clip_gradients_(student.parameters(), norm, config.train.max_grad_norm)
        factor = schedule_factor(
            step - 1, steps=sft.steps, schedule=sft.lr_schedule, warmup_steps=sft.warmup_steps
        )
        set_lr(optimizer, sft.lr * factor)
        optimizer.step()
        student.publish()
        progress(step, total)
    dtype = model.head_weight.dtype
    return {k: v.to(dtype).contiguous() for k, v in student.state_dict().items()}


def _batch(task: Task, tokenizer: Any, indices: list[int], config: Config) -> list[MicroBatch]:
    """Prompt + worked solution + end of sequence, packed in order into micro-batches."""
    sequences = []
    for i in indices:
        problem = task.problem(i)
        if problem.solution is None:
            raise UserError(
                f"The warm start needs worked solutions, and problem {problem.id} has none. Set sft.steps = 0, or give "
                "a `solution` column."
            )
        prompt = encode_problem(problem, tokenizer, config.task)
        answer = tokenizer.encode(problem.solution, add_special_tokens=False) + [tokenizer.eos_token_id]
        sequences.append((prompt, answer))
    lots: list[list[tuple[list[int], list[int]]]] = [[]]
    used = 0
    for prompt, answer in sequences:
        if lots[-1] and used + len(prompt) + len(answer) > config.train.max_tokens_per_gpu:
            lots.append([])
            used = 0
        lots[-1].append((prompt, answer))
        used += len(prompt) + len(answer)
    return [_micro(lot) for lot in lots]


def _micro(lot: list[tuple[list[int], list[int]]]) -> MicroBatch:
    lengths = tuple(len(p) + len(a) for p, a in lot)
    tokens = torch.tensor([t for p, a in lot for t in (*p, *a)])
    mask = torch.tensor([m for p, a in lot for m in [0.0] * (len(p) - 1) + [1.0] * len(a) + [0.0]])
    zeros = torch.zeros_like(mask)
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return MicroBatch(
        tokens, torch.cat([torch.arange(n) for n in lengths]), tokens.roll(-1), mask, zeros, zeros,
        torch.repeat_interleave(torch.arange(len(lot)), torch.tensor(lengths)), cu, lengths,
    )  # fmt: skip
