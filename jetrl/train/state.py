"""What a run saves and restores: masters, optimizer state, counters; all else follows from the step and the seed.

Of several ranks the first one writes, whole tensors as one process does, and all read: a run may go on with another
number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.model import hf
from jetrl.model.sharding import full_state, load_rows
from jetrl.parallel.together import by_first, common, together
from jetrl.train import checkpoint, resume
from jetrl.train.optim_state import full_optimizer_state, load_optimizer_state
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
        _keep_reference(session, run_dir)


def save(session: Session, run_dir: Path) -> Path:
    """Write the checkpoint of the current step. Collective."""
    learner, world = session.learner, session.world
    weights = full_state(learner.model)
    tensors = _prefixed("model", weights) | _prefixed("optimizer", full_optimizer_state(learner.optimizer, world))
    if learner.critic is not None:
        tensors |= _prefixed("critic", full_state(learner.critic))
    if learner.critic_optimizer is not None:
        tensors |= _prefixed("critic_optimizer", full_optimizer_state(learner.critic_optimizer, world))
    meta = checkpoint.Meta(
        session.step, session.weight_version, session.flow_digest, resume.settings(session.given),
        resume.paths(session.config), session.initial_accuracy, session.num_prompts,
    )
    path = by_first(world, lambda: checkpoint.save(
        run_dir / "checkpoints", meta, tensors, lambda folder: save_hf(session, folder, weights),
        session.config.checkpoint.keep,
    ))
    session.saved_step = session.step
    return path


def save_hf(session: Session, folder: Path, state: Mapping[str, Tensor]) -> None:
    """The policy, whose whole weights are `state`, as a Hugging Face folder in BF16, tokenizer included."""
    hf.save_model(
        folder, session.model.spec, dict(state), tokenizer=session.tokenizer, base_config=session.base_config,
        generation_config=session.generation_config, trained_with=session.model.recipe,
    )


def restore(session: Session, path: Path, run_dir: Path) -> None:
    """Bring `session` to the state of a checkpoint, to the bit. Collective; every rank reads the file."""
    learner, world = session.learner, session.world
    with together(world):
        meta, tensors = checkpoint.load(path)
        resume.check(path, meta, session.given, session.config, session.flow_digest)
    load_rows(learner.model, _with_prefix(tensors, "model"))
    learner.model.publish()
    load_optimizer_state(learner.optimizer, _with_prefix(tensors, "optimizer"))
    if learner.critic is not None:
        load_rows(learner.critic, _with_prefix(tensors, "critic"))
        learner.critic.publish()
    if learner.critic_optimizer is not None:
        load_optimizer_state(learner.critic_optimizer, _with_prefix(tensors, "critic_optimizer"))
    session.step, session.weight_version, session.num_prompts = meta.step, meta.weight_version, meta.num_prompts
    session.initial_accuracy = meta.initial_accuracy
    if session.config.rl.kl_coef > 0:
        session.reference = reference_of(session.model)
        kept = path.parent / _REFERENCE
        with together(world):
            if not kept.is_file():
                raise UserError(f"{kept} is missing: the KL penalty needs the initial policy. Start a new run.")
            load_rows(session.reference, load_file(kept))
        session.reference.publish()
        if path.parent.absolute() != (run_dir / "checkpoints").absolute():  # resumed into another output folder
            _keep_reference(session, run_dir)
    weights = publish(session.model, session.weight_version, session.flow_digest)
    with together(world):
        session.engine.load(weights)

    def is_newest() -> bool:
        newest = checkpoint.newest(run_dir / "checkpoints")
        return newest is not None and newest.samefile(path)

    session.saved_step = session.step if by_first(world, is_newest) else -1


def stop_non_finite(
    session: Session, batches: list[PackedBatch], step: int, run_dir: Path,
    error: NonFiniteError | FloatingPointError,
) -> UserError:
    """Save the step's data and weights for replay; returns the error that ends the run. Collective."""
    file, weights = run_dir / "failed" / f"step_{step:06d}.pt", full_state(session.model)

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"step": step, "batches": batches, "model": weights}, file)

    by_first(session.world, write)
    return common(UserError(
        f"Step {step} stops the run: {error}. The step's batches and weights are in {file} for replay. "
        f"{checkpoint.left(run_dir / 'checkpoints')} Start a new run under another name with a lower train.lr or "
        "train.max_grad_norm."
    ))


def _keep_reference(session: Session, run_dir: Path) -> None:
    """Write the reference policy where a resumed run finds it. Collective."""
    assert session.reference is not None
    weights, folder = full_state(session.reference), run_dir / "checkpoints"

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / _REFERENCE)

    by_first(session.world, write)


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{k}": v for k, v in tensors.items()}


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors named `prefix.*`, without the prefix."""
    return {k[len(prefix) + 1 :]: v for k, v in tensors.items() if k.startswith(f"{prefix}.")}
