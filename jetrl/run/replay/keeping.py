"""What the loop calls so that its steps can be replayed: digests while a step computes, and its record at the end."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from jetrl import __version__
from jetrl.config import Config
from jetrl.errors import Notice
from jetrl.model.shards import Part
from jetrl.model.transformer import Transformer
from jetrl.model.weights import published
from jetrl.run.checkpoint.state import parts_of_run
from jetrl.run.gather import Gathered
from jetrl.run.replay.record import StepRecord, path_of, steps_of, write
from jetrl.run.setup import Session
from jetrl.spec import ModelSpec
from jetrl.train.digests import UNSEEN, Digests
from jetrl.types import Group


def digests_for(config: Config) -> Digests:
    """What takes the digests of a step; where no steps are kept, as with method = "sft", it takes none."""
    return Digests() if config.checkpoint.replay_steps and not config.supervised else UNSEEN


def add_weights(seen: Digests, session: Session) -> None:
    """After the step's last publishing: what was published, masters and moments. Moments that live in host memory while
    the model is on a GPU are left out, as reading them would take longer than the update."""
    parts = _parts(session)
    for kind, moments in (("masters", False), ("moments", True)):
        seen.add_parts(kind, {k: v for k, v in parts.items() if _is_moment(k) is moments}, session.world)
    seen.add_parts("published", codes_of(session.model), session.world)


def codes_of(model: Transformer) -> dict[str, Part]:
    """What is published of a model, by name: numbers or codes, and their scales."""
    codes = {}
    for name, tensor in published(model).items():
        codes[name] = Part(tensor.values, tuple(tensor.values.shape), 0)
        if tensor.scales is not None:
            codes[f"{name} (scales)"] = Part(tensor.scales, tuple(tensor.scales.shape), 0)
    return codes


def _parts(session: Session) -> dict[str, Part]:
    device = session.model.head_weight.device.type
    return {name: part for name, part in parts_of_run(session).items() if part.value.device.type == device}


def _is_moment(name: str) -> bool:
    return name.startswith(("optimizer.", "critic_optimizer."))


def keep(session: Session, run_dir: Path, seen: Digests, gathered: Gathered, learnt: Sequence[Group]) -> None:
    """After a step: its record is written, and older ones than `checkpoint.replay_steps` are removed. A disk that takes
    no record is told of, and the run goes on. Collective."""
    if seen is UNSEEN:
        return
    add_weights(seen, session)
    digests = seen.take(session.world)
    if not session.world.first:
        return
    progress, of_step = session.progress, {group.prompt.index for group in learnt}
    left = [(prompt.index, one) for prompt, one in gathered.failed]
    left += [(group.prompt.index, one) for group in gathered.unscored for one in group.trajectories]
    record = StepRecord(
        progress.step, progress.weight_version - 1, session.flow_digest, gathered.first_prompt, gathered.next_prompt,
        session.world.size, tuple(learnt), tuple(g for g in gathered.groups if g.prompt.index not in of_step),
        tuple(left), digests, made_with(session.model.head_weight.device),
    )
    try:
        write(run_dir, record)
        for step in steps_of(run_dir):
            if step <= progress.step - session.config.checkpoint.replay_steps:
                path_of(run_dir, step).unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"{run_dir}: this step is not kept for `jetrl replay`: {error.strerror or error}. Training goes on. Free "
            "some space, or lower checkpoint.replay_steps.", Notice, stacklevel=2,
        )


def drop_after(run_dir: Path, step: int) -> None:
    """Remove the records of steps past `step`, which a resumed run makes again."""
    for later in (one for one in steps_of(run_dir) if one > step):
        with suppress(OSError):
            path_of(run_dir, later).unlink()


def made_with(device: torch.device) -> dict[str, str]:
    """What decides about bits besides the config: versions, and the device."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {"jetrl": __version__, "torch": torch.__version__, "device": kind}


def bytes_of_step(config: Config, spec: ModelSpec) -> int:
    """The most that a step's record takes: every response at its limit, prompts once for a group."""
    width = 2 if spec.vocab_size <= 1 << 16 else 4
    rollout = config.rollout
    prompts = rollout.prompts_per_step * config.task.max_prompt_length * width
    responses = rollout.prompts_per_step * rollout.group_size * rollout.max_response_length * (width + 4)
    return prompts + responses


def told(config: Config, spec: ModelSpec) -> str:
    """The line of a dry run."""
    kept = config.checkpoint.replay_steps
    if not kept:
        return "Replay: no steps are kept (checkpoint.replay_steps = 0)."
    size = bytes_of_step(config, spec)
    return (
        f"Replay: tokens, log-probs and digests of the newest {kept} steps are kept, at most {size / 2**20:.1f} MiB a "
        f"step and {kept * size / 2**20:.0f} MiB in all (checkpoint.replay_steps)."
    )
