"""The spine: one RL run from start to end. It holds only calls; every feature lives in the room that a call names.

`run` is the command's; `jetrl.Trainer` steps through the same `opened` run from Python.

One batch travels in one direction: gather (sample, roll out, score, select) -> pack -> estimate -> update -> publish ->
engine.load -> recorder.write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from jetrl import trust
from jetrl.config import Config, to_toml
from jetrl.errors import UserError
from jetrl.model.flips import Flips
from jetrl.parallel import host, launch
from jetrl.parallel.agreement import common, on_rank0, together
from jetrl.parallel.measures import WAITS, rank_metrics
from jetrl.parallel.progress import PROGRESS
from jetrl.parallel.world import World
from jetrl.precision.picture.draw import flow_svg
from jetrl.report.channel import Channel
from jetrl.report.console import Display
from jetrl.report.files import write_whole
from jetrl.report.live import LiveReport
from jetrl.report.recorder import (
    ENV_FILE,
    NoRecorder,
    Recorder,
    eval_rows,
    failed_rows,
    group_rows,
    sample_lines,
    unscored_rows,
    write_samples,
)
from jetrl.report.track import TrackSettings, check_trackers, open_trackers
from jetrl.rl.selection import recorded
from jetrl.run.checkpoint import state
from jetrl.run.checkpoint.base import stays
from jetrl.run.compiling.display import Compiling
from jetrl.run.fit.advice import told_when_out_of_memory
from jetrl.run.gather import Gathered, evaluate, gather
from jetrl.run.mixed import with_given
from jetrl.run.no_signal import hints
from jetrl.run.pin import Pin, pinned, pins_of, record
from jetrl.run.prepare import epochs_told
from jetrl.run.replay import keeping
from jetrl.run.setup import Session, begin, build, build_model
from jetrl.run.sft import warm_start
from jetrl.run.stopping import GivenUp, StopRequest
from jetrl.run.supervised import learn_given, pack_given
from jetrl.tasks.gold import check_gold
from jetrl.tasks.task import rows_of_epoch
from jetrl.train.batches import PackedBatch
from jetrl.train.calibration import Calibration
from jetrl.train.digests import Digests
from jetrl.train.noise import noise_metrics
from jetrl.train.packing import pack, rows_saved
from jetrl.train.passes import estimate
from jetrl.train.publish import FLIPPED, publish
from jetrl.train.reduction import own_numbers
from jetrl.train.step import Tell, update
from jetrl.train.trainer import Midway, NonFiniteError
from jetrl.types import Group, StepReport
from jetrl.user_code.from_python import NOTHING, FromPython
from jetrl.user_code.guard import no_silent_exit


class Clock:
    """Seconds by phase of the current step, shown on the display while they pass."""

    def __init__(self, display: Display, stop: StopRequest | None = None) -> None:
        self.display, self.stop = display, stop or StopRequest()
        self.stop.shown, display.notice = display.live, lambda: self.stop.said
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str, total: int | None = None) -> Iterator[None]:
        self.display.phase(phase, total)
        launch.phase(phase)
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def progress(self) -> Callable[[StepReport], None]:
        """Shows how many sequences the engine has finished; ends a rollout that is given up."""
        done = 0

        def on_step(report: StepReport) -> None:
            nonlocal done
            self.stop.check()
            if report.finished > done:
                self.display.advance(report.finished - done)
                done = report.finished

        return on_step

    def message(self, text: str) -> None:
        """A line for the user, above the display."""
        self.display.message(text)

    def take(self) -> dict[str, float]:
        """The times as metrics; starts again from zero."""
        seconds, self.seconds = self.seconds, {}
        return {f"time/{k}": v for k, v in seconds.items()} | {"time/step": sum(seconds.values())}


def run(config: Config, run_dir: Path, command: list[str], stop: StopRequest) -> bool:
    """Train from a resolved config, resuming if `checkpoint.resume` says so. True if it reached its last step.

    Every rank of `stop.world` calls this; the first one writes the run folder and shows the run. When `stop` is
    requested, the step under way is finished or given up (`run/stopping.py`), and the run is saved.
    """
    with guarded(), opened(config, run_dir, command, stop) as running:
        running.begin()
        while running.goes_on():
            running.step()
    return running.finished


@contextmanager
def guarded() -> Iterator[None]:
    """Around our code that calls the user's: `os._exit` is refused, and the current folder, which such code may change,
    is put back afterwards."""
    with no_silent_exit(), chdir("."):
        yield


class Run:
    """A run that is open, from what comes before step 1 to its last step. `opened` makes it.

    Call `begin` once, then `step` while `goes_on`. An error of either must leave the context of `opened`, which saves
    what is to be saved.
    """

    def __init__(
        self, session: Session, recorder: Recorder, clock: Clock, run_dir: Path, stop: StopRequest, found: Path | None,
        page: LiveReport,
    ) -> None:
        self.session, self.recorder, self.clock, self.run_dir, self.stop = session, recorder, clock, run_dir, stop
        self._found, self._page = found, page

    def begin(self) -> dict[str, float]:
        """What comes before the next step: a new run's `start`, or what a resumed one still owes. The metrics of an
        evaluation, if one was due. Collective."""
        session, found = self.session, self._found
        if session.model.head_weight.device.type == "cpu" and session.world.first and (busy := host.load()):
            self.clock.message(
                f"Other programs keep the cores busy (load {busy[0]:.0f} on {busy[1]} cores), which may slow this run "
                "down several times. End them, or set num_threads = 1."
            )
        if session.config.checkpoint.resume != "never":  # even without a checkpoint: a run may stop before its first
            self.recorder.drop_after(session.progress.step if found is not None else -1, session.progress.first_row)
            if session.world.first:
                keeping.drop_after(self.run_dir, session.progress.step)
        if found is None:
            metrics = start(session, self.recorder, self.clock, self.run_dir, self.stop)
        else:
            self.stop.phase = "step"
            state.move_in(session, found, self.run_dir)
            metrics = make_up_evaluation(session, self.recorder, self.clock, self.stop)
        self._show()
        return metrics

    @property
    def at_end(self) -> bool:
        """Whether the last step is done."""
        return self.session.progress.step >= self.session.config.train.steps

    @property
    def finished(self) -> bool:
        """Whether the last step is done and nothing is owed."""
        return self.at_end and not self.session.pending.owes_evaluation

    def goes_on(self) -> bool:
        """Whether there is a next step, and no rank was asked to stop. Collective."""
        return not self.at_end and not self.stop.anywhere()

    def step(self) -> Step:
        """The next step. Collective."""
        done = train_step(self.session, self.recorder, self.clock, self.run_dir, self.stop)
        self._show()
        return done

    def _show(self) -> None:
        """The report of a run that goes on, now and then; that of one that has ended is written behind it."""
        if not self.at_end and self._page.due:
            with self.clock("report"):
                self._page.update()


@contextmanager
def opened(
    config: Config, run_dir: Path, command: list[str], stop: StopRequest, *, own: FromPython = NOTHING,
    console: Console | None = None,
) -> Iterator[Run]:
    """A run of a resolved config, built and, if `checkpoint.resume` says so, restored. It writes the report: now and
    then, and at its end.

    Inside it a step that is given up (GivenUp) is saved and ends the context; so does any other error, which goes on.
    `own`: what a program gave as objects; `console`: where the display goes. Collective.
    """
    run_dir, world = run_dir.absolute(), stop.world
    stop.phase, stop.saves = "start", config.checkpoint.save_interval > 0
    found = on_rank0(world, lambda: state.find(config, run_dir))

    def bound() -> tuple[Config, list[Pin]]:
        before = pins_of((found.parent.parent if found is not None else run_dir) / ENV_FILE)
        return pinned(config, before if config.checkpoint.resume != "never" else [])

    if world.first:
        trust.remember(config)
    config, pins = on_rank0(world, bound)
    on_rank0(world, lambda: check_trackers(TrackSettings(**config.track.model_dump())))
    launch.set_limit(config.train.collective_timeout)
    with told_when_out_of_memory(config, world):
        session = build(config, weights=found is None or stays(config), world=world, displays=Compiling, own=own)
        try:
            ranks = {} if world.alone else {"ranks": world.size}
            with _recorded(session, run_dir, command, stop, found, record(pins) | ranks, console) as running:
                yield running
        except Exception as error:
            session.check_settings(error)
            raise
        finally:
            session.close()


@contextmanager
def _recorded(
    session: Session, run_dir: Path, command: list[str], stop: StopRequest, found: Path | None, origin: dict[str, Any],
    console: Console | None,
) -> Iterator[Run]:
    """The run with its folder and its display."""
    config, world = session.config, session.world
    session.progress.data = on_rank0(world, lambda: state.digests_of(session))
    if found is not None:
        state.restore(session, found, run_dir)
    about = "; ".join(filter(None, [session.task.describe(), epochs_told(config, session.task)]))
    display = Display(config.train.steps, config.name, about=about, start_step=session.progress.step, console=console)
    with together(world):
        recorder = Recorder(run_dir, config.checkpoint.resume != "never") if world.first else NoRecorder()
    with recorder, display, LiveReport(run_dir, recorder, display.message) as page:
        clock = Clock(display, stop)
        if told := session.engine.about:
            clock.message(told)
        if found is not None:
            clock.message(f"continues after step {session.progress.step} of {config.train.steps}, from {found}")
        with together(world):
            if world.first:
                recorder.write_config(to_toml(session.given))
                recorder.write_environment(command, origin)
                recorder.trackers += trackers(session, run_dir, clock.message, found is not None)
                recorder.tracked_samples = config.track.num_samples
                sampler = "" if session.engine.keeps_bits else config.rollout.engine
                write_whole(run_dir / "flow.svg", flow_svg(session.model.spec, session.model.recipe, sampler))
        in_turns = session.conversations is not None
        on_rank0(world, lambda: check_gold(session.task, session.reward, session.tokenizer, conversations=in_turns))
        try:
            yield Run(session, recorder, clock, run_dir, stop, found, page)
        except GivenUp:  # a rollout, or rewards: nothing in the session has changed
            stop.phase = "checkpoint"
            save_once(session, run_dir)
        except FloatingPointError as error:  # the sampler met NaN or infinite logits
            raise state.stop_non_finite(session, [], session.progress.step + 1, run_dir, error) from error
        except Exception as error:
            if world.alone or (isinstance(error, UserError) and PROGRESS.common):  # all ranks are here
                finish_after(session, clock)
            raise
        stop.phase = "checkpoint"
        finish(session, recorder, clock)
    stop.phase = "report"
    page.finish()


def trackers(session: Session, run_dir: Path, tell: Callable[[str], None], goes_on: bool) -> list[Channel]:
    """Open those that the recipe names."""
    given, settings = session.given.model_dump(mode="json"), TrackSettings(**session.config.track.model_dump())
    return open_trackers(settings, run_dir, given, first=session.progress.step + 1 if goes_on else 0, tell=tell)


def start(
    session: Session, recorder: Recorder, clock: Clock, run_dir: Path, stop: StopRequest
) -> dict[str, float]:
    """What comes before step 1: warm start, reference policy, first publish and evaluation, checkpoint 0. The metrics
    of the evaluation."""
    config, warm = session.config, None
    if config.sft.steps:
        with clock("warm start", config.sft.steps):
            stop.phase = "warm start"
            warm = warm_start(
                session.model, config, session.task, session.tokenizer, lambda *_: clock.display.advance(),
                clock.display.message, session.world, session.own.digests,
            )
    stop.phase = "step"
    state.begin(session, run_dir, warm)
    weights = publish(session.model, 0, session.flow_digest)
    with together(session.world):
        session.engine.load(weights)
        started = session.engine_metrics()
    metrics = evaluated(session, clock, stop) if config.eval.eval_interval else {}
    with together(session.world):
        recorder.write(0, metrics | clock.take() | started | epochs_read(session))
        record_evaluation(session, recorder, 0)
    clock.display.step({"step": 0} | metrics)
    if config.checkpoint.save_interval:
        with clock("checkpoint"):
            state.save(session, run_dir)
    return metrics


@dataclass(frozen=True, slots=True)
class Step:
    """A finished step: its row of metrics, all groups that were scored, and those that were learnt from."""

    number: int
    metrics: dict[str, float]
    gathered: Gathered
    learnt: Sequence[Group]


def train_step(session: Session, recorder: Recorder, clock: Clock, run_dir: Path, stop: StopRequest) -> Step:
    """One RL step: sample and roll out, score and select, pack, estimate, update, publish, load, record."""
    config, progress = session.config, session.progress
    step = progress.step + 1
    with saved_on_mistake(session, run_dir), stop.during("rollout"):
        gathered = gather(session, clock, step)
    with clock("pack"):
        batches = packed(session, gathered.learnt)
    if session.pending.beside.writes:
        with clock("checkpoint"):
            session.pending.beside.release()
    WAITS.start()
    with clock("update", len(batches)):
        try:
            with saved_on_mistake(session, run_dir):
                learnt, batches, advantage_stats = estimated(session, gathered.learnt, batches, gathered.given)
                tell, seen = partial(clock.display.hint, step), keeping.digests_for(config)
                clip, stats = updated(session, batches, step, seen, tell, noise=True)
        except NonFiniteError as error:
            raise state.stop_non_finite(session, batches, step, run_dir, error) from error
    with clock("publish"):
        weights = publish(session.model, progress.weight_version + 1, session.flow_digest, flips := Flips())
    progress.after(step, weights.version, gathered.next_prompt, clip.bounds, gathered.under_way)
    metrics = gathered.stats | advantage_stats | stats | rows_saved(batches) | rank_metrics(session.world)
    metrics |= epochs_read(session) | ({FLIPPED: flips.share} if flips.share is not None else {})
    with saved_on_mistake(session, run_dir):
        try:
            with together(session.world):
                session.engine.load(weights)
                metrics |= session.engine_metrics()  # before an evaluation, whose own are told apart
            if due(config.eval.eval_interval, step, config):
                metrics |= evaluated(session, clock, stop)
        finally:  # the step is done, whatever happens to its evaluation
            metrics |= clock.take() | session.pending.beside.take_metrics()
            record_step(session, recorder, step, metrics, gathered, learnt, seen)
    clock.display.step({"step": step} | metrics)
    for what, detail in hints(metrics, clip.config, gathered.groups, learnt):
        clock.display.hint(step, what, detail)
    if due(config.checkpoint.save_interval, step, config) or stop.anywhere():
        with clock("checkpoint"):  # after the row: a kill in between repeats the step instead of losing its row
            save_once(session, run_dir)
    session.pending.beside.look()
    with saved_on_mistake(session, run_dir):
        check_parity(session, clock.display, metrics, run_dir)
    return Step(step, metrics, gathered, learnt)


# A replay (`run/replay/rerun.py`) makes a step's updates with these three, too.

def packed(session: Session, groups: Sequence[Group]) -> list[PackedBatch]:
    """The micro-batches of a step that this rank holds."""
    train, rl, supervised = session.config.train, session.config.rl, session.config.supervised
    return pack_given(session, groups) if supervised else pack(
        groups, max_tokens_per_gpu=train.max_tokens_per_gpu, flow_digest=session.flow_digest,
        weight_version=session.progress.weight_version, mask_truncated=rl.mask_truncated,
        updates_per_step=rl.updates_per_step, share_prompts=train.share_prompts,
        own=own_numbers(session.world.replicas, train.reduction, train.reduction_lanes),
        max_off_policy_steps=session.config.most_behind,
    )


def estimated(
    session: Session, groups: Sequence[Group], batches: Sequence[PackedBatch], beside: Sequence[Group] = (),
    given: bool = False,
) -> tuple[list[Group], list[PackedBatch], dict[str, float]]:
    """`passes.estimate` with the session's models, and given answers `beside`; nothing where all are given."""
    config = session.config
    if config.supervised:
        return list(groups), list(batches), {}
    models = session.learner, session.progress.reference, config, session.unified, given, session.teacher
    learnt, made, stats = estimate(groups, batches, *models)
    return learnt, with_given(session, beside, made), stats


def updated(
    session: Session, batches: list[PackedBatch], step: int, seen: Digests, tell: Tell | None = None,
    noise: bool = False,
) -> tuple[Calibration, dict[str, float]]:
    """The updates of a step, up to the last publishing: the clip's calibration, and metrics (with `noise`, its too)."""
    clip = Calibration(session.learner, session.config, session.progress.clip_bounds)
    if session.config.supervised:
        return clip, learn_given(session, batches, step)
    stats = noise_metrics(session.learner, batches, clip.config, step) if noise else {}
    stats |= clip.begin(batches, step)
    seen.add_batches(batches)
    stats |= update(session.learner, batches, clip.config, step, tell, clip.measure, seen)
    return clip, stats | clip.metrics()


def epochs_read(session: Session) -> dict[str, float]:
    """`data/epoch`: the prompts that were taken, over the rows of an epoch; none where problems have no end."""
    rows = rows_of_epoch(session.task)
    return {} if rows is None else {"data/epoch": session.progress.num_prompts / rows}


def record_step(
    session: Session, recorder: Recorder, step: int, metrics: dict[str, float], gathered: Gathered,
    learnt: Sequence[Group], seen: Digests,
) -> None:
    """Write a step's metrics and samples, of which each rank makes the lines of its part of the groups, and what
    replays it."""
    world, text = session.world, session.token_text
    rows = group_rows(world.part(recorded(gathered.groups, learnt)), text, session.decode)
    lines = world.collect(sample_lines(step, rows))
    with together(world):
        recorder.write(step, metrics)
        record_evaluation(session, recorder, step)
        if world.first:
            left = unscored_rows(
                gathered.unscored, text, session.decode, conversations=session.conversations is not None
            )
            failed = sample_lines(step, [*failed_rows(gathered.failed, text, session.decode), *left])
            recorder.append_samples([*chain.from_iterable(lines), *failed])
    keeping.keep(session, recorder.run_dir, seen, gathered, learnt)


def record_evaluation(session: Session, recorder: Recorder, step: int) -> None:
    """Write what the evaluation of this step left, if there was one: each problem's rewards, and some completions."""
    if (found := session.take_held_out()) is None:
        return
    recorder.write_held_out(step, found.row())
    if session.world.first:
        kept = found.kept(session.config.eval.num_samples_kept)
        recorder.write_eval_samples(step, eval_rows(*kept, session.token_text, session.decode))


def check_parity(session: Session, display: Display, metrics: dict[str, float], run_dir: Path) -> None:
    """Where rollout and training promise the same bits, report a gap: UserError if it is the user's engine's.

    The step itself is sound, and saved: its ratios are those to the policy that sampled.
    """
    gap, engine = metrics.get("parity/logprob_abs_diff_max"), session.config.rollout.engine
    if not session.unified or gap is None or gap == 0.0:  # None: the step made no update, so nothing was compared
        return
    share = metrics["parity/frac_tokens_different"]
    found = f"{share:.0%} of its tokens have a different log-prob in training than in the rollout, by up to {gap:.3g}"
    if engine != "jetrl":
        raise common(UserError(
            f"rollout.engine = {engine} sets keeps_bits = True, but in step {session.progress.step} {found}. Set "
            "keeps_bits = False (the learner then computes what it needs itself), or fix the engine; then continue "
            "with --resume."
        ))
    display.hint(
        session.progress.step, "PARITY IS NOT ZERO",
        f"{found}, and in this flow there should be none. Training continues, but this is a bug in jetrl: please "
        f"report it, with {run_dir}/env.json and config.toml. `jetrl parity {run_dir}` shows where it comes from.",
    )


@contextmanager
def saved_on_mistake(session: Session, run_dir: Path) -> Iterator[None]:
    """A user's mistake that stops the run in the middle of a step loses no finished step: the last one is saved."""
    try:
        yield
    except Midway:
        raise
    except UserError:
        save_once(session, run_dir)
        raise


def save_once(session: Session, run_dir: Path) -> None:
    """The checkpoint of the last finished step, unless it has begun before or the run writes none."""
    if session.config.checkpoint.save_interval and session.pending.saved_step != session.progress.step:
        state.save(session, run_dir)


def finish(session: Session, recorder: Recorder, clock: Clock) -> None:
    """The end of a run: the checkpoint that is being written is waited for. What the row of the last step could not
    know yet, the time of its checkpoint, is added there. Collective."""
    if not session.config.checkpoint.save_interval:
        return
    wait_for_checkpoint(session, clock)
    if recorder.last_step == session.progress.step:
        recorder.amend(clock.take() | session.pending.beside.take_metrics(), tracked=False)


def wait_for_checkpoint(session: Session, clock: Clock) -> None:
    """Returns once no checkpoint is being written; the display counts its MiB meanwhile. Collective."""
    shown, size = 0, session.pending.beside.size // 2**20

    def show(written: int) -> None:
        nonlocal shown
        now = min(written // 2**20, size)  # headers of files are in no sum
        clock.display.advance(max(0, now - shown))
        shown = max(shown, now)

    with clock("checkpoint", size or None):
        session.pending.beside.finish(show)


def finish_after(session: Session, clock: Clock) -> None:
    """After an error that ends the run: the checkpoint that is being written is waited for, and what keeps it from the
    disk is told next to that error. The phase stays that of the error. Collective."""
    try:
        session.pending.beside.finish()
    except UserError as other:
        clock.message(str(other))


def evaluated(session: Session, clock: Clock, stop: StopRequest) -> dict[str, float]:
    """Held-out metrics, and the engine's own of the evaluation. None if a signal ended it: the run then owes it, and
    makes it when resumed."""
    session.pending.owes_evaluation = True
    try:
        with stop.during("evaluation"):
            metrics = evaluate(session, clock)
    except GivenUp:
        return {}
    with together(session.world):
        of_engine = session.engine_metrics(of_evaluation=True)
    session.pending.owes_evaluation = False
    if session.progress.step == 0 and not session.config.supervised:
        session.progress.initial_accuracy = next(iter(metrics.values()), None)
    return metrics | of_engine


def make_up_evaluation(session: Session, recorder: Recorder, clock: Clock, stop: StopRequest) -> dict[str, float]:
    """On resume: the evaluation of the checkpoint's step, if it is due and missing from that step's row."""
    row = session.world.share(recorder.last_row())
    if row.get("step") != session.progress.step or any(key.startswith("eval/") for key in row):
        return {}
    if not due(session.config.eval.eval_interval, session.progress.step, session.config):
        return {}
    if metrics := evaluated(session, clock, stop):
        record_evaluation(session, recorder, session.progress.step)
        recorder.amend(metrics | clock.take())
        clock.display.step({"step": session.progress.step} | metrics)
    return metrics


def due(interval: int, step: int, config: Config) -> bool:
    """Whether something done every `interval` steps (0: never) and after the last is due."""
    return interval > 0 and (step % interval == 0 or step == config.train.steps)


def run_sft(config: Config) -> Path:
    """Only the warm start, without an engine; returns the folder that `run` will find."""
    if not config.sft.steps:
        raise UserError("sft.steps = 0: this recipe has no warm start. Set sft.steps.")
    launch.phase("warm start")
    trust.remember(config)
    with no_silent_exit(), told_when_out_of_memory(config, World()):
        config, plan, _ = begin(pinned(config)[0], samples=False, displays=Compiling)
        model = build_model(config, plan.spec, replace(plan.recipe, lora=None))
        with Display(config.sft.steps, f"{config.name} warm start", step_interval=10.0) as display:
            return warm_start(
                model, config, plan.task, plan.tokenizer,
                lambda step, loss: display.step({"step": step, "policy/loss": loss}), display.message,
            )


def evaluate_once(
    session: Session, console: Console | None = None, samples: Path | None = None
) -> dict[str, float]:
    """Held-out accuracy of a built session, outside a run; the display goes to `console`, some completions to the file
    `samples`. A collective."""
    try:
        with no_silent_exit(), Display(0, f"{session.config.name} eval", console=console) as display:
            metrics = evaluate(session, Clock(display))
            found = session.take_held_out()
            with together(session.world):
                if samples is not None and found is not None and session.world.first:
                    kept = found.kept(session.config.eval.num_samples_kept)
                    write_samples(samples, eval_rows(*kept, session.token_text, session.decode))
            return metrics
    finally:
        session.close()
