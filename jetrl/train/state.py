"""What a run saves and restores: masters, optimizer state, counters; all else follows from the step and the seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.model import hf
from jetrl.train import checkpoint, resume
from jetrl.train.publish import publish
from jetrl.train.setup import Session, reference_of
from jetrl.train.trainer import NonFiniteError
from jetrl.types import PackedBatch

_REFERENCE = "reference.safetensors"


def find(config: Config, run_dir: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` names; None to start from the beginning."""
    asked = config.checkpoint.resume
    if asked == "never":
        return None
    if asked == "auto":
        return checkpoint.newest(run_dir / "checkpoints")
    if not Path(asked).is_dir():
        raise UserError(f"checkpoint.resume = {asked}: there is no such folder. Give a checkpoint folder, or auto.")
    if (Path(asked) / "checkpoints").is_dir():  # a run folder: its newest
        return checkpoint.newest(Path(asked) / "checkpoints")
    return Path(asked)


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
        session.step, session.weight_version, session.flow_digest, resume.settings(session.given),
        resume.paths(session.config), session.initial_accuracy, session.num_prompts,
    )
    path = checkpoint.save(
        run_dir / "checkpoints", meta, tensors, lambda folder: save_hf(session, folder),
        session.config.checkpoint.keep,
    )
    session.saved_step = session.step
    return path


def save_hf(session: Session, folder: Path) -> None:
    """The policy as a Hugging Face folder in BF16, tokenizer included."""
    state = {k: v.detach().cpu() for k, v in session.model.state_dict().items()}
    hf.save_model(
        folder, session.model.spec, state, tokenizer=session.tokenizer, base_config=session.base_config,
        generation_config=session.generation_config, trained_with=session.model.recipe,
    )


def restore(session: Session, path: Path, run_dir: Path) -> None:
    """Bring `session` to the state of a checkpoint, to the bit."""
    meta, tensors = checkpoint.load(path)
    resume.check(path, meta, session.given, session.config, session.flow_digest)
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
            raise UserError(f"{kept} is missing: the KL penalty needs the initial policy. Start a new run.")
        session.reference.load_state_dict(load_file(kept))
        session.reference.publish()
        if path.parent.absolute() != (run_dir / "checkpoints").absolute():  # resumed into another output folder
            (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
            save_file(_weights(session.reference), run_dir / "checkpoints" / _REFERENCE)
    session.engine.load(publish(session.model, session.weight_version, session.flow_digest))
    newest = checkpoint.newest(run_dir / "checkpoints")
    session.saved_step = session.step if newest is not None and newest.samefile(path) else -1


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
        f"Step {step} stops the run: {error}. The step's batches and weights are in {file} for replay. "
        f"{checkpoint.left(run_dir / 'checkpoints')} Start a new run under another name with a lower train.lr or "
        "train.max_grad_norm."
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
