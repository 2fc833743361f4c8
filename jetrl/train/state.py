"""What a run saves and restores: masters, optimizer state, counters; all else follows from the step and the seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetrl.config import Config, digest
from jetrl.errors import UserError
from jetrl.model import hf
from jetrl.train import checkpoint
from jetrl.train.publish import publish
from jetrl.train.setup import Session, reference_of
from jetrl.train.trainer import NonFiniteError
from jetrl.types import PackedBatch

_REFERENCE = "reference.safetensors"


def find(config: Config, run_dir: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` asks for; None to start from the beginning."""
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    if resume == "auto":
        return checkpoint.newest(run_dir / "checkpoints")
    if not Path(resume).is_dir():
        raise UserError(f"checkpoint.resume = {resume}: there is no such folder. Give a checkpoint folder, or auto.")
    if (Path(resume) / "checkpoints").is_dir():  # a run: its newest
        return checkpoint.newest(Path(resume) / "checkpoints")
    return Path(resume)


def begin(session: Session, run_dir: Path) -> None:
    """After the warm start: the critic takes the policy's weights; the reference policy, if there is a KL penalty, is
    frozen and kept for resume."""
    if session.learner.critic is not None:
        session.learner.critic.start_from(session.model)
    if session.config.rl.kl_coef > 0:
        session.reference = reference_of(session.model)
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        save_file(_weights(session.reference), run_dir / "checkpoints" / _REFERENCE)


def save(session: Session, run_dir: Path) -> Path:
    """Write the checkpoint of the current step."""
    learner = session.learner
    tensors = {f"model.{k}": v for k, v in _weights(learner.model).items()}
    tensors |= _optimizer_tensors("optimizer", learner.optimizer)
    if learner.critic is not None:
        tensors |= {f"critic.{k}": v for k, v in _weights(learner.critic).items()}
    if learner.critic_optimizer is not None:
        tensors |= _optimizer_tensors("critic_optimizer", learner.critic_optimizer)
    meta = checkpoint.Meta(
        session.step, session.weight_version, session.flow_digest, resume_digest(session.config),
        session.initial_accuracy, session.num_prompts,
    )
    return checkpoint.save(
        run_dir / "checkpoints", meta, tensors, lambda folder: save_hf(session, folder),
        session.config.checkpoint.keep,
    )


def save_hf(session: Session, folder: Path) -> None:
    """The policy as a Hugging Face folder in BF16, tokenizer included."""
    state = {k: v.detach().cpu() for k, v in session.model.state_dict().items()}
    source = session.config.model.path
    hf.save_model(
        folder, session.model.spec, state, tokenizer=session.tokenizer, base_config=session.base_config,
        generation_config=hf.read_generation_config(source) if source is not None else None,
        trained_with=session.model.recipe,
    )


def restore(session: Session, path: Path, run_dir: Path) -> None:
    """Bring `session` to the state of a checkpoint, to the bit."""
    meta, tensors = checkpoint.load(path)
    if meta.flow_digest != session.flow_digest or meta.config_digest != resume_digest(session.config):
        raise UserError(
            f"{path} was written by a run with other settings (precision, model, data, sampling, objective or "
            "optimizer; its name and num_threads count too). Resume with the run's own config.toml, or start a run "
            "under a new name. Only train.steps, the sections eval, checkpoint and track, output_dir, "
            "environment.timeout and max_concurrent and, with BF16 masters or moments, train.offload_optimizer may "
            "change."
        )
    learner = session.learner
    learner.model.load_state_dict(_with_prefix(tensors, "model"))
    learner.model.publish()
    _load_optimizer(learner.optimizer, _with_prefix(tensors, "optimizer"))
    if learner.critic is not None:
        learner.critic.load_state_dict(_with_prefix(tensors, "critic"))
        learner.critic.publish()
    if learner.critic_optimizer is not None:
        _load_optimizer(learner.critic_optimizer, _with_prefix(tensors, "critic_optimizer"))
    session.step, session.weight_version, session.num_prompts = meta.step, meta.weight_version, meta.num_prompts
    session.initial_accuracy = meta.initial_accuracy
    if session.config.rl.kl_coef > 0:
        session.reference = reference_of(session.model)
        kept = path.parent / _REFERENCE
        if not kept.is_file():
            raise UserError(f"{kept} is missing: the KL penalty needs the policy of the beginning. Start a new run.")
        session.reference.load_state_dict(load_file(kept))
        session.reference.publish()
        if path.parent.absolute() != (run_dir / "checkpoints").absolute():  # resumed into another output folder
            (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
            save_file(_weights(session.reference), run_dir / "checkpoints" / _REFERENCE)
    session.engine.load(publish(session.model, session.weight_version, session.flow_digest))


def resume_digest(config: Config) -> str:
    """Digest of the settings that must not change between a run and its resumption."""
    free: dict[str, Any] = {"steps": 1, "warmup_steps": 0} if config.train.lr_schedule == "constant" else {}
    if "bfloat16" in (config.train.master_dtype, config.train.optimizer_dtype):
        free["offload_optimizer"] = False  # one optimizer and the same bits, on or off; all in FP32 it is another
    waiting = {"timeout": 60.0, "max_concurrent": 64}  # they decide which conversations fail, never what one says
    fixed = config.model_copy(
        update={
            "environment": config.environment.model_copy(update=waiting),
            "checkpoint": type(config.checkpoint)(), "track": type(config.track)(), "eval": type(config.eval)(),
            "output_dir": "runs", "train": config.train.model_copy(update=free),
        }
    )
    return digest(fixed)


def stop_non_finite(
    session: Session, batches: list[PackedBatch], step: int, run_dir: Path,
    error: NonFiniteError | FloatingPointError,
) -> UserError:
    """Save the step's data and weights for replay; returns the error that ends the run."""
    folder = run_dir / "failed"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step_{step:06d}.pt"
    torch.save({"step": step, "batches": batches, "model": _weights(session.model)}, file)
    return UserError(
        f"Step {step} stops the run: {error}. The step's batches and weights are in {file} for replay; the checkpoints "
        "are intact. Start a new run under another name with a lower train.lr or train.max_grad_norm."
    )


def _weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors named `prefix.*`, without the prefix."""
    return {k[len(prefix) + 1 :]: v for k, v in tensors.items() if k.startswith(f"{prefix}.")}


def _optimizer_tensors(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{name}.{i}.{k}": torch.as_tensor(v).detach().cpu().contiguous()
        for i, slots in state.items() for k, v in slots.items()
    }


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    full = optimizer.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": full["param_groups"]})
