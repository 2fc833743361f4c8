"""What a run saves and restores: masters, optimizer state, counters; all else follows from the step and the seed.

Every rank writes and reads its own rows (`run/checkpoint/store.py`): a run may go on with another number of ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.huggingface.adapter import write_adapters
from jetrl.model.master import frozen_parts, frozen_values, masters_of, parts_of
from jetrl.model.shards import Part
from jetrl.model.transformer import Transformer
from jetrl.parallel.agreement import common, on_rank0, together
from jetrl.parallel.world import World
from jetrl.rl.calibration import Bounds
from jetrl.run.checkpoint import base, checkpoint, resume, store, suspended
from jetrl.run.checkpoint.optim_state import load_optimizer_state, optimizer_parts, prefixed, with_prefix
from jetrl.run.setup import Session, reference_of
from jetrl.train.batches import PackedBatch
from jetrl.train.packing import joined
from jetrl.train.publish import publish
from jetrl.train.routing import LOSSES
from jetrl.train.trainer import NonFiniteError, not_by_an_update

_REFERENCE = "reference"
_TERMS = ("rl.kl_coef", "rl.entropy_coef", *(f"train.{key}" for key in LOSSES))  # of the loss, by their weights


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


def digests_of(session: Session) -> dict[str, str]:
    """`resume.data_digests` of a session."""
    teacher = None if session.teacher is None else session.teacher.digest
    return resume.data_digests(session.config, session.tokenizer, session.own, teacher)


def begin(session: Session, run_dir: Path, warm: Path | None = None) -> None:
    """After the warm start, whose folder is `warm`: the critic takes the policy's weights; the reference policy, if
    there is a KL penalty, is frozen and kept for resume, and so is the base of adapters that the run has made."""
    if session.learner.critic is not None:
        session.learner.critic.start_from(session.model)
    if session.config.lora.rank is not None:
        session.progress.base = session.model.base_digest
    if base.made_here(session.config):
        small = _small_files(session)
        base.keep(session.model, session.config, small, run_dir / "checkpoints", warm, session.world)
    if session.config.rl.kl_coef > 0:
        session.progress.reference = reference_of(session.model)
        _keep_reference(session, run_dir)


def parts_of_run(session: Session) -> dict[str, Part]:
    """What this rank has of the tensors in a checkpoint, by their names there."""
    learner = session.learner
    states = [
        prefixed(name, optimizer_parts(optimizer, masters.values()))
        for name, optimizer, masters in learner.optimizers()
    ]
    parts = prefixed("model", parts_of(learner.model)) | prefixed("frozen", _frozen(session)) | states[0]
    if learner.critic is not None:
        parts |= prefixed("critic", parts_of(learner.critic))
    for state in states[1:]:
        parts |= state
    return parts


def _frozen(session: Session) -> dict[str, Part]:
    """What no update changes and yet belongs to a checkpoint: a bias or routers; not the base of adapters."""
    return {} if session.config.lora.rank is not None else frozen_parts(session.model)


def save(session: Session, run_dir: Path) -> None:
    """Begin the checkpoint of the current step, after the one before has ended. Beside the run it goes on from here
    (`Pending.beside` ends it); else it is on the disk. Collective."""
    progress, pending = session.progress, session.pending
    pending.beside.finish()
    parts, world = parts_of_run(session), session.world
    carries = session.config.rollout.overcommit > 0
    table, content = suspended.packed(progress.under_way) if carries else (None, None)
    meta = checkpoint.Meta(
        progress.step, progress.weight_version, session.flow_digest, resume.settings(session.given),
        resume.paths(session.config), progress.initial_accuracy, progress.num_prompts,
        progress.first_row, progress.data,
        clip_bounds=None if progress.clip_bounds is None else [*progress.clip_bounds], base=progress.base,
        under_way=table,
    )
    small, folder = _small_files(session), run_dir / "checkpoints"
    writes = partial(_write_model, session.model, small, world)
    if session.config.lora.rank is not None:
        names = base.named(session.config, folder, session.adapters), progress.base
        writes = partial(_write_adapters, session.model, small, world, *names)
    if content is not None and world.first:
        writes = partial(suspended.write_beside, writes, content)
    writing = checkpoint.begin(
        folder, meta, parts, writes, session.config.checkpoint.keep, world, pending.beside.copy_of(parts)
    )
    if pending.beside.copies:
        alone = session.config.lora.rank is not None  # adapters are saved, not the base
        masters = masters_of(session.model).values()
        model = sum(prod(master.whole_shape()) for master in masters if not (alone and master.frozen))
        whole = sum(prod(part.size) * part.value.element_size() for part in parts.values())
        # the model once more in BF16, its tokenizer
        pending.beside.start(writing, whole + 2 * model + sum(map(len, small.values())))
    else:
        writing.finish()
    pending.saved_step = progress.step


def _small_files(session: Session) -> dict[str, bytes]:
    """Of the policy's folder, on the first rank; made once, not in a thread: a tokenizer is one caller's at a time."""
    pending = session.pending
    if session.world.first and pending.model_files is None:
        pending.model_files = hf.small_files(
            session.model.spec, tokenizer=session.tokenizer, base_config=session.base_config,
            generation_config=session.generation_config, trained_with=session.model.recipe,
        )
    return pending.model_files or {}


def _write_adapters(
    model: Transformer, small: Mapping[str, bytes], world: World, named: tuple[str, str | None], digest: str | None,
    folder: Path, state: Path, parts: Mapping[str, Part], check: Callable[[], None],
) -> list[Path]:
    """The policy's adapters as a PEFT folder, by the first rank. Not collective, as `_write_model`."""
    if not world.first:
        return []
    check()
    reader = None if world.alone else store.Reader(state)

    def whole(name: str) -> Tensor:
        key = f"model.{name}"
        return parts[key].value if reader is None else reader.whole(key)

    return write_adapters(folder, model.spec, model.recipe, whole, small, named, digest)


def _write_model(
    model: Transformer, small: Mapping[str, bytes], world: World,
    folder: Path, state: Path, parts: Mapping[str, Part], check: Callable[[], None],
) -> list[Path]:
    """This rank's files of the policy in BF16 as a Hugging Face folder, tokenizer included. Not collective: with
    several ranks, whole weights are read from the `state` that all have written. What is frozen does not change while
    this is written."""
    frozen = frozen_values(model)
    reader = None if world.alone else store.Reader(state)

    def whole(name: str) -> Tensor:
        if name in frozen:
            return frozen[name]()
        key = f"model.{name}"
        return parts[key].value if reader is None else reader.whole(key)

    return hf.write_shards(folder, model.spec, whole, small, world.rank, world.size, check=check)


def restore(session: Session, path: Path, run_dir: Path) -> None:
    """Bring `session` to the state of a checkpoint, to the bit. Collective; every rank reads its rows."""
    learner, world, progress = session.learner, session.world, session.progress
    meta = checkpoint.load(path, world)
    with together(world):
        resume.check(path, meta, session.given, session.config, session.flow_digest)
        resume.check_data(path, meta, session.config, progress.data)
    if base.made_here(session.config):
        base.read_back(learner.model, path.parent, world)
    if session.config.lora.rank is not None:
        with together(world):
            base.check(learner.model, meta.base, path, session.config)
        progress.base = meta.base
    _read(session, path)
    learner.model.publish()
    if learner.critic is not None:
        learner.critic.publish()
    progress.step, progress.weight_version, progress.num_prompts = meta.step, meta.weight_version, meta.num_prompts
    progress.initial_accuracy = meta.initial_accuracy
    progress.clip_bounds = None if meta.clip_bounds is None else Bounds(*meta.clip_bounds)
    with together(world):
        if meta.under_way is not None:
            progress.under_way = suspended.unpacked(path, meta.under_way, meta.files or {}, session)
    # rows before are the other folder's
    progress.first_row = meta.first_row if _is_of(path, run_dir) else meta.step + 1
    if session.config.rl.kl_coef > 0:
        reference, kept = reference_of(session.model), path.parent / _REFERENCE
        if session.config.lora.rank is None:
            with together(world):
                if not kept.is_dir():
                    raise UserError(f"{kept} is missing: the KL penalty needs the initial policy. Start a new run.")
            store.unseal(kept, lambda _: parts_of(reference), "Start a new run.", world)
        progress.reference = reference.publish()
    weights = publish(session.model, progress.weight_version, session.flow_digest)
    with together(world):
        session.engine.load(weights)

    def is_newest() -> bool:
        newest = checkpoint.newest(run_dir / "checkpoints")
        return newest is not None and newest.samefile(path)

    session.pending.saved_step = progress.step if on_rank0(world, is_newest) else -1


def move_in(session: Session, path: Path, run_dir: Path) -> None:
    """After `restore`, once no other process writes `run_dir`: what a run that goes on from another folder's checkpoint
    needs in its own, so that it resumes from there whenever it ends. Collective."""
    if _is_of(path, run_dir):
        return
    if base.made_here(session.config):
        base.copy(path.parent, run_dir / "checkpoints", session.world)
    if session.progress.reference is not None:
        _keep_reference(session, run_dir)
    if session.config.checkpoint.save_interval:
        save(session, run_dir)
        session.pending.beside.finish()  # before anything of the other folder may go


def _is_of(path: Path, run_dir: Path) -> bool:
    """Whether a checkpoint is one of this run folder."""
    return path.parent.resolve() == (run_dir / "checkpoints").resolve()


def _read(session: Session, path: Path) -> None:
    """Masters, frozen values and optimizer states of this rank from a checkpoint. Collective."""
    learner, takes = session.learner, []
    frozen = {name: part._replace(value=torch.empty_like(part.value)) for name, part in _frozen(session).items()}

    def places(stored: store.Stored) -> dict[str, Part]:
        parts = prefixed("model", parts_of(learner.model)) | prefixed("frozen", frozen)
        if learner.critic is not None:
            parts |= prefixed("critic", parts_of(learner.critic))
        for name, optimizer, masters in learner.optimizers():
            own, take = load_optimizer_state(optimizer, masters.values(), with_prefix(stored, name))
            parts |= prefixed(name, own)
            takes.append(take)
        return parts

    checkpoint.read(path, places, session.world)
    for take in takes:
        take()
    learner.model.publish_frozen((name, part.value) for name, part in frozen.items())
    if learner.critic is not None and learner.critic.body is not None and session.config.lora.rank is None:
        body = learner.critic.body  # its bias is the policy's
        body.publish_frozen((name, frozen[name].value) for name in body.frozen())


def stop_non_finite(
    session: Session, batches: list[PackedBatch], step: int, run_dir: Path,
    error: NonFiniteError | FloatingPointError,
) -> UserError:
    """Save the step's data and weights for replay; returns the error that ends the run. Collective.

    `failed/step_NNNNNN/` holds batches.pt, and the masters in weights/ (`store.whole` reads them).
    """
    session.pending.beside.finish()
    folder = run_dir / "failed" / f"step_{step:06d}"
    parts = session.world.replicas.collect(batches)  # each rank holds its own micro-batches

    def write() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        whole = [joined(of_update) for of_update in zip(*parts, strict=True)]
        torch.save({"step": step, "batches": whole}, folder / "batches.pt")

    on_rank0(session.world, write)
    store.seal(folder / "weights", parts_of(session.model), session.world)
    learner, config = session.learner, session.config
    updated = any(
        slots for of in (learner.policy_optimizer, learner.critic_optimizer) if of is not None
        for slots in of.state.values()
    )
    if updated:
        advice = "Start a new run under another name with a lower train.lr or train.max_grad_norm."
    else:
        advice = not_by_an_update(config, config.sft.steps > 0, _TERMS)
    return common(UserError(
        f"Step {step} stops the run: {error}. The step's batches and weights are in {folder} for replay. "
        f"{checkpoint.left(run_dir / 'checkpoints')} {advice}"
    ))


def _keep_reference(session: Session, run_dir: Path) -> None:
    """Write the reference policy where a resumed run finds it; with adapters it is their base. Collective."""
    assert session.progress.reference is not None
    if session.config.lora.rank is not None:
        return
    folder = run_dir / "checkpoints"
    on_rank0(session.world, lambda: folder.mkdir(parents=True, exist_ok=True))
    store.seal(folder / _REFERENCE, parts_of(session.progress.reference), session.world)
