"""A run that is opened again to compute parts of it once more: its config, and the weights of any version.

Weights of version V are those of the newest checkpoint at or before step V, after which the updates of the steps up to
V are made again: from their records, or where a step has none by rolling it out again. Without such a checkpoint the
run begins anew, at the weights of its recipe. Nothing is written into the run's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from jetrl.config import Config, load_config, resolve
from jetrl.config.load import quiet
from jetrl.errors import UserError
from jetrl.kernels.support import capability
from jetrl.report.recorder import CONFIG_FILE
from jetrl.rl.own import is_own
from jetrl.run import loop
from jetrl.run.checkpoint import checkpoint, state
from jetrl.run.checkpoint.base import stays
from jetrl.run.gather import gather
from jetrl.run.replay import keeping, record
from jetrl.run.replay.record import StepRecord
from jetrl.run.setup import Session, build, reference_of
from jetrl.train.digests import UNSEEN, Digests
from jetrl.train.publish import publish
from jetrl.types import Group, StepReport
from jetrl.untrusted import inside

_WEIGHTS, _NOT_AGAIN = "published/", "the weights made again for"
Say = Callable[[str], object]
"""Hears what is being computed."""


class _Quiet:
    """The clock of a step that is rolled out again."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str, total: int | None = None) -> Iterator[None]:
        self.seconds[phase] = 0.0
        yield

    def progress(self) -> Callable[[StepReport], None]:
        return lambda report: None

    def message(self, text: str) -> None:
        pass


def config_of(run_dir: Path) -> Config:
    """The config of a run folder, resolved for this machine. UserError where it is no run, or one that samples nothing.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: there is no such folder. Give a run folder, such as runs/<name>.")
    if not (run_dir / CONFIG_FILE).is_file():
        raise UserError(f"{run_dir} has no {CONFIG_FILE}, so it is not a run folder. Give one, such as runs/<name>.")
    config = load_config(inside(run_dir, CONFIG_FILE), (), quiet)
    if config.supervised:
        raise UserError(
            f'{run_dir} learned given answers (method = "sft"): nothing was sampled, so there is nothing to replay or '
            "bisect, and no step was kept. To make its steps again, copy the folder, remove the checkpoints after the "
            "one to begin with, and continue the copy with --resume: metrics.jsonl and checkpoints get the same bits."
        )
    # the data may be gone: what is replayed stands in the records
    kept = config.checkpoint.model_copy(update={"allow_changed_data": True, "resume": "never", "background": "auto"})
    place = {"output_dir": str(run_dir.absolute().parent), "checkpoint": kept}
    return resolve(config.model_copy(update=place), cuda_available=torch.cuda.is_available(), capability=capability())


@contextmanager
def opened(run_dir: Path, version: int, say: Say = lambda text: None) -> Iterator[Rerun]:
    """The run in `run_dir`, brought to the weights of `version`."""
    run_dir = run_dir.absolute()
    config, found = config_of(run_dir), _checkpoint_for(run_dir, version)
    if found is None and config.sft.steps:
        raise UserError(_gone(run_dir, version))
    session = build(config, weights=found is None or stays(config))
    try:
        rerun = Rerun(session, run_dir, say)
        rerun.begin(found)
        rerun.to(version)
        yield rerun
    finally:
        session.close()


def _checkpoint_for(run_dir: Path, version: int) -> Path | None:
    """The newest checkpoint that is not after `version`."""
    fitting = [path for path in checkpoint.complete(run_dir / "checkpoints") if _step(path) <= version]
    return fitting[-1] if fitting else None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _gone(run_dir: Path, version: int) -> str:
    kept = [_step(path) for path in checkpoint.complete(run_dir / "checkpoints")]
    there = f"its checkpoints are of steps {record.ranges(kept)}" if kept else "it has no checkpoints"
    return (
        f"{run_dir}: the weights of version {version}, with which step {version + 1} began, are gone: {there}, and "
        "what comes before the first step (a warm start) is not made again. Take a later step, or keep more "
        "checkpoints in the next run (checkpoint.keep)."
    )


class Rerun:
    """An opened run. `notes`: what may explain a difference, in sentences."""

    def __init__(self, session: Session, run_dir: Path, say: Say) -> None:
        self.session, self.run_dir, self.say = session, run_dir, say
        self.notes = differences(run_dir, session)
        self._changed_data: list[str] = []
        self._knows_under_way = True

    @property
    def version(self) -> int:
        return self.session.progress.weight_version

    def begin(self, found: Path | None) -> None:
        """Take the state of a checkpoint; None: that before the first step."""
        session = self.session
        if found is not None:
            session.progress.data = state.digests_of(session)
            there = checkpoint.load(found).data
            self._changed_data = [key for key, digest in there.items() if session.progress.data.get(key) != digest]
            state.restore(session, found, self.run_dir)
        else:
            if session.learner.critic is not None:
                session.learner.critic.start_from(session.model)
            if session.config.rl.kl_coef > 0:
                session.progress.reference = reference_of(session.model)
        self.load()

    def load(self) -> None:
        """Give the engine the weights as they are."""
        session = self.session
        session.engine.load(publish(session.model, self.version, session.flow_digest))

    def to(self, version: int) -> None:
        """Make the updates of the steps up to `version` again. UserError where one cannot be."""
        assert version >= self.version, "weights do not go back"
        kept = set(record.steps_of(self.run_dir))
        while self.version < version:
            step = self.version + 1
            self.say(f"step {step} again, {'from its record' if step in kept else 'rolled out anew'}")
            if step in kept:
                self._repeat_to_go_on(record.read(self.run_dir, step))
            else:
                self._roll_out(step)
            self.load()

    def repeat(self, one: StepRecord, seen: Digests | None = None) -> tuple[dict[str, int], list[Group]]:
        """Make a recorded step's update: its digests, by names as those of the record, and its groups with their
        advantages."""
        self._require_alike(one)
        seen = Digests() if seen is None else seen
        learnt = learn(self.session, one.learnt, one.step, one.next_prompt, seen)
        keeping.add_weights(seen, self.session)
        return seen.take(), learnt

    def _repeat_to_go_on(self, one: StepRecord) -> None:
        """The update of a step on the way to a later version; a note if its weights are not those of the run."""
        found = self.repeat(one)[0]
        self._knows_under_way = not self.session.config.rollout.overcommit
        wrong = [name for name, value in one.digests.items() if name.startswith(_WEIGHTS) and found[name] != value]
        if wrong and not any(note.startswith(_NOT_AGAIN) for note in self.notes):
            self.notes.append(
                f"{_NOT_AGAIN} version {one.step} are not those of the run ({wrong[0].removeprefix(_WEIGHTS)} is the "
                f"first that differs): replay the update of step {one.step}"
            )

    def require_tokens(self, one: StepRecord) -> None:
        """UserError for a record with tokens that the model does not have: it is not of this run."""
        vocabulary = self.session.model.spec.vocab_size
        for _, trajectory in one.trajectories():
            for segment in trajectory.segments:
                wrong = segment.tokens[(segment.tokens < 0) | (segment.tokens >= vocabulary)]
                if len(wrong):
                    raise UserError(
                        f"The record of step {one.step} of {self.run_dir} has the token {wrong[0]}, and the model "
                        f"knows 0 to {vocabulary - 1}: it was changed, or is of another run. Restore it."
                    )

    def _require_alike(self, one: StepRecord) -> None:
        session = self.session
        self.require_tokens(one)
        if one.flow_digest != session.flow_digest:
            raise UserError(
                f"Step {one.step} of {self.run_dir} was computed in the flow {one.flow_digest}, and here it is "
                f"{session.flow_digest}: the model's config.json, or jetrl, is another one. Take those of the run."
            )
        if one.ranks > 1 and session.config.train.reduction == "fast":
            raise UserError(
                f"Step {one.step} of {self.run_dir} was computed by {one.ranks} ranks with train.reduction = "
                '"fast", whose sums depend on their number, and a replay runs in one process. Replay log-probs or '
                'rollout of the step after a checkpoint, or set train.reduction = "fixed" in the next run.'
            )

    def _roll_out(self, step: int) -> None:
        if self._changed_data:
            raise UserError(
                f"{self.run_dir} has no record of step {step}, and cannot roll it out again: "
                f"{', '.join(self._changed_data)} changed since. Put the data back, or take another step."
            )
        if not self._knows_under_way:
            raise UserError(
                f"{self.run_dir} has no record of step {step}, and cannot roll it out again: of the answers that were "
                "carried over into it there is nothing in the record of the step before. Take an earlier step, or one "
                "after the next checkpoint."
            )
        done = gather(self.session, _Quiet(), step)
        learn(self.session, done.learnt, step, done.next_prompt, UNSEEN, recorded=False, beside=done.given)
        self.session.progress.under_way = done.under_way


def learn(
    session: Session, groups: Sequence[Group], step: int, next_prompt: int, seen: Digests, recorded: bool = True,
    beside: Sequence[Group] = (),
) -> list[Group]:
    """What `loop.train_step` does between a rollout and the next: the same updates, to the bit, and no more. Returns
    the groups with their advantages. `recorded`: they have them, and neither a function of the user's nor a server
    is asked again."""
    progress, config = session.progress, session.config
    given = recorded and (is_own(config.rl.adv_estimator) or bool(config.teacher.servers))
    if recorded and config.num_given:
        raise UserError(
            f"Step {step}: its update cannot be made again: with teacher.given_fraction = "
            f"{config.teacher.given_fraction:g} a step has given answers, which its record does not. Replay logprobs "
            "or rollout of the step after a checkpoint."
        )
    if recorded and config.teacher.servers and config.teacher.top_k:
        raise UserError(
            f"Step {step}: its update cannot be made again: teacher.top_k = {config.teacher.top_k}, and what "
            f"{config.teacher.servers[0]} said of other tokens than the drawn ones was not kept. Replay logprobs or "
            "rollout of the step after a checkpoint."
        )
    learnt, batches, _ = loop.estimated(session, groups, loop.packed(session, groups), beside, given)
    clip, _ = loop.updated(session, batches, step, seen)
    weights = publish(session.model, progress.weight_version + 1, session.flow_digest)
    progress.after(step, weights.version, next_prompt, clip.bounds, progress.under_way)
    return learnt


def differences(run_dir: Path, session: Session) -> list[str]:
    """In which versions, and on which device, the run was computed, where that is not so here."""
    steps = record.steps_of(run_dir)
    there = record.read(run_dir, steps[-1]).made_with if steps else {}
    here = keeping.made_with(session.model.head_weight.device)
    return [f"{what}: {text}" for what, text in unlike(there, here).items()]


def unlike(
    there: Mapping[str, str], here: Mapping[str, str], names: tuple[str, str] = ("the run", "this process")
) -> dict[str, str]:
    """By what differs, both values in words."""
    return {
        key: f"{there[key]} in {names[0]}, {here[key]} in {names[1]}"
        for key in here if there.get(key, here[key]) != here[key]
    }
