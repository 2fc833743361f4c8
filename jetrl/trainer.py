"""Training from Python: `Trainer`, a run that a program steps through, and `train`, which runs it to its end.

Both go through `loop.opened`, as the command does: the same recipe, data and seed give the same bits.
"""

from __future__ import annotations

import io
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import raise_signal
from types import TracebackType
from typing import Any, Never, TypeVar

from jetrl import callbacks as calls
from jetrl.api import Policy
from jetrl.config import Config
from jetrl.engine.engine import PagedEngine
from jetrl.errors import UserError, of_system
from jetrl.huggingface.export import HF_SUBFOLDER
from jetrl.parallel.agreement import on_rank0, together
from jetrl.parallel.launch import world_of_program
from jetrl.phrases import for_python
from jetrl.program import Program, placed, program, refuse_others
from jetrl.report.console import Output
from jetrl.report.recorder import group_rows, read_metrics
from jetrl.rl.selection import recorded
from jetrl.run import loop
from jetrl.run.checkpoint import state
from jetrl.run.checkpoint.checkpoint import newest
from jetrl.run.start import require_alike
from jetrl.run.stopping import StopRequest
from jetrl.user_code.guard import our_code

T = TypeVar("T")
_OPEN: weakref.WeakSet[Trainer] = weakref.WeakSet()  # the trainer of this process that has a run open


@dataclass(frozen=True, slots=True)
class Result:
    """What a run left: its folder, its last step and that step's metrics.

    `finished`: whether that was the recipe's last step. `model`: the Hugging Face folder of the newest checkpoint, for
    `jetrl.load_model` or transformers; None where the run wrote none.
    """

    run_dir: Path
    step: int
    finished: bool
    metrics: dict[str, float]
    model: Path | None

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of all steps, as in metrics.jsonl."""
        return read_metrics(self.run_dir)


@dataclass(frozen=True, slots=True)
class StepResult:
    """A finished step and its row of metrics."""

    step: int
    metrics: dict[str, float]


class Trainer:
    """A run that your program steps through; with the bits of `jetrl train`. docs/PYTHON.md has examples.

        with jetrl.Trainer("quickstart", overrides={"train.steps": 20}) as trainer:
            for done in trainer:
                print(done.step, done.metrics["reward/mean"])

    `recipe`: the name of a recipe, a TOML file, a run folder, a dict of tables, or a Config. `reward`: a function
    `f(completions, answer, **columns)` or a list of them. `dataset`, `eval_dataset`: lists of dicts, or
    `datasets.Dataset`s. `environment`: a class. `overrides`: a dict of full keys, such as {"train.lr": 1e-5}.
    `callbacks`: see `jetrl.Callback`. `run_dir`: the run folder (default: as the recipe says). `resume`: True, "auto",
    or a checkpoint's folder. `verbose=False`: no display.

    The constructor loads the model, makes the warm start and the first evaluation. One Trainer at a time may be open in
    a process. Every mistake is a UserError. Ctrl-C finishes and saves the step, then raises KeyboardInterrupt.
    """

    @for_python()
    def __init__(
        self, recipe: str | Path | dict[str, Any] | Config | None = None, *unnamed: Never,
        reward: Any = None, dataset: Any = None,
        eval_dataset: Any = None, environment: type | str | None = None, callbacks: Sequence[Any] = (),
        overrides: Any = None, run_dir: str | Path | None = None, resume: bool | str | Path = False,
        verbose: bool = True, **unknown: Never,
    ) -> None:
        refuse_others(unnamed, unknown)
        self.run_dir = Path()
        self._run: loop.Run | None = None
        self._stack, self._settings, self._ended = ExitStack(), dict[str, Any](), ""
        self._last: loop.Step | None = None
        self._standing: tuple[int, bool, dict[str, float]] = (0, False, {})
        self._callbacks = calls.checked(callbacks)
        if others := list(_OPEN):
            raise UserError(
                f"The Trainer of the run {others[0].run_dir} is still open, and a process can have one. Call its "
                "close() first."
            )
        self._world = world_of_program()
        self._stop = StopRequest(self._world)
        with _as_messages(), together(self._world):
            found = program(
                recipe, reward=reward, dataset=dataset, eval_dataset=eval_dataset, environment=environment,
                overrides=overrides, run_dir=run_dir, resume=resume,
            )
        require_alike(self._world, found.config, **{f"the rows of {k}": v for k, v in found.own.digests.items()})
        self._console = None if verbose else Output(file=io.StringIO(), quiet=True)
        say: Callable[[str], object] = print if verbose else str
        with _as_messages():
            config = on_rank0(self._world, lambda: placed(found, run_dir is not None, resume is True, say).config)
        found = Program(config, found.own, Path(config.output_dir) / config.name)
        self.run_dir = found.run_dir.absolute()
        self._open(found)

    def _open(self, found: Program) -> None:
        def begin() -> dict[str, float]:
            self._run = self._stack.enter_context(loop.opened(
                found.config, self.run_dir, ["<python>", *sys.argv], self._stop, own=found.own, console=self._console
            ))
            _OPEN.add(self)
            return self._run.begin()

        metrics = self._within(begin)
        with self._closed_on_error():
            self._deliver()
            self._tell("on_start")
            self._tell_evaluation(self.steps_done, metrics or {})

    # ---- the run ----

    def step(self) -> StepResult:
        """The next step, recorded and, where it is due, evaluated and saved. UserError after the last one."""
        run = self._opened()
        if self._stop.asked:
            raise UserError("stop() was called, so there is no next step. Call close(); resume=True continues.")
        if run.at_end:
            raise UserError(
                f"The run has done its {run.session.config.train.steps} steps (train.steps). Call close(); to "
                "continue, use resume=True with more steps."
            )
        if (done := self._within(run.step)) is None:  # given up: saved, and closed
            self._deliver()
            raise UserError(f"A signal ended the step; the steps before it are saved. {self._how_to_go_on()}")
        self._last = done
        self._deliver()
        self._tell_evaluation(done.number, done.metrics)
        self._tell("on_step", done.number, dict(done.metrics))
        return StepResult(done.number, dict(done.metrics))

    def __iter__(self) -> Iterator[StepResult]:
        """The steps that are left, one by one. The run stays open behind the last."""
        while self._opened().goes_on():
            yield self.step()

    def train(self) -> Result:
        """All steps that are left; then closes the run."""
        with self._closed_on_error():
            for _ in self:
                pass
        return self.close()

    def stop(self) -> None:
        """End the run after the step under way, for callbacks: it is saved, and can be resumed."""
        self._opened()
        self._stop.asked = True

    def close(self) -> Result:
        """Save the last finished step, write report.html, and free the run. May be called again: it changes nothing."""
        if self._run is not None:
            with self._closed_on_error():
                if self._run.at_end or self._stop.asked:
                    self._tell("on_end")
            self._close()
        return self.result

    # ---- what one may look at between steps ----

    @property
    def steps_done(self) -> int:
        """The number of finished steps, those before a resume included."""
        return self._opened().session.progress.step

    @property
    def config(self) -> Config:
        """The resolved config; paths are absolute."""
        return self._opened().session.config

    @property
    def policy(self) -> Policy:
        """The policy, over the run's own weights: it is always the current one. For `generate` and `logprobs`."""
        session = self._opened().session
        if not isinstance(session.engine, PagedEngine):
            raise UserError(
                f"rollout.engine = {session.config.rollout.engine}: trainer.policy samples with jetrl's engine only. "
                "Load a saved checkpoint instead: jetrl.load_model(trainer.save())."
            )
        cache = session.config.quant.kv_cache
        formats = f"precision {session.config.precision}, KV cache {cache} (the run {self.run_dir})"
        return Policy(session.model, session.tokenizer, session.engine, formats)

    def samples(self) -> list[dict[str, Any]]:
        """The completions of the last step, as in samples.jsonl, without the failed ones. Empty before the first."""
        if self._last is None:
            return []
        groups = recorded(self._last.gathered.groups, self._last.learnt)
        return group_rows(groups, self._opened().session.token_text)

    def evaluate(self) -> dict[str, float]:
        """The held-out metrics of the current policy, as in the run's own evaluations. They are not recorded, and the
        steps that follow keep their bits. Collective."""
        run = self._opened()
        session = run.session

        def measured() -> dict[str, float]:
            progress, pending = session.progress, session.pending
            owes, first, held_out = pending.owes_evaluation, progress.initial_accuracy, pending.held_out
            seconds = run.clock.seconds
            run.clock.seconds = {}
            try:
                return loop.evaluated(session, run.clock, self._stop)
            finally:
                pending.owes_evaluation, progress.initial_accuracy, pending.held_out = owes, first, held_out
                run.clock.seconds = seconds

        metrics = self._within(measured) or {}
        self._deliver()
        return metrics

    def save(self) -> Path:
        """Write the checkpoint of the last finished step; its Hugging Face folder, for `jetrl.load_model`. Of the run's
        checkpoints, `checkpoint.keep` are kept. Collective."""
        run = self._opened()

        def write() -> Path | None:
            session, folder = run.session, self.run_dir / "checkpoints"
            session.pending.beside.finish()
            if session.pending.saved_step != session.progress.step or newest(folder) is None:
                state.save(session, self.run_dir)
                session.pending.beside.finish()
            return newest(folder)

        written = self._within(write)
        assert written is not None
        self._deliver()
        return written / HF_SUBFOLDER

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._close()

    # ---- how our code runs inside the program ----

    def _opened(self) -> loop.Run:
        if self._run is None:
            raise UserError(f"This Trainer is closed: {self._ended}. {self._how_to_go_on()}")
        return self._run

    def _how_to_go_on(self) -> str:
        return f"Go on with jetrl.Trainer({str(self.run_dir)!r}, resume=True) and the same objects."

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """Our settings of the process and our handlers of signals, while our code runs; the program's afterwards."""
        with ExitStack() as stack:
            stack.enter_context(our_code(self._settings))
            stack.enter_context(loop.guarded())
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(self._stop)
            yield

    @for_python()
    def _within(self, work: Callable[[], T]) -> T | None:
        """`work`, part of the run. An error ends and closes the run as it does the command's, which saves what is to be
        saved; None if a signal made it give up."""
        with _as_messages(), self._ours():
            try:
                return work()
            except BaseException as error:
                self._forget(f"a step failed ({type(error).__name__})")
                if not self._stack.__exit__(type(error), error, error.__traceback__):
                    raise
                return None

    @for_python()
    def _deliver(self) -> None:
        """A signal that our code answered by saving goes on to the program: Ctrl-C is a KeyboardInterrupt."""
        if (number := self._stop.take()) is not None:
            if self._run is not None and self._run.session.config.checkpoint.save_interval:
                with self._ours():
                    loop.save_once(self._run.session, self.run_dir)
                    self._run.session.pending.beside.finish()
            raise_signal(number)

    def _tell_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        if found := {key: value for key, value in metrics.items() if key.startswith("eval/")}:
            self._tell("on_evaluation", step, found)

    def _tell(self, method: str, *arguments: Any) -> None:
        """Callbacks are the program's code: they run with its settings. The last step is saved if one fails."""
        try:
            with together(self._world):
                calls.tell(self._callbacks, method, self, *arguments)
        except UserError:
            self._save_last()
            raise

    @for_python()
    def _save_last(self) -> None:
        if (run := self._run) is not None:
            with self._ours():
                loop.save_once(run.session, self.run_dir)
                run.session.pending.beside.finish()

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._close()
            raise

    @for_python()
    def _close(self) -> None:
        if (run := self._run) is None:
            return
        with self._ours():
            try:
                loop.save_once(run.session, self.run_dir)
            finally:
                self._forget("close() was called")
                self._stack.close()

    def _forget(self, why: str) -> None:
        """From now on the Trainer is closed."""
        self._stand()
        self._run, self._ended = None, why
        _OPEN.discard(self)

    def _stand(self) -> None:
        if (run := self._run) is not None:
            metrics = dict(self._last.metrics) if self._last is not None else {}
            self._standing = run.session.progress.step, run.finished, metrics

    @property
    def result(self) -> Result:
        """Where the run stands, or how it ended."""
        self._stand()
        kept = newest(self.run_dir / "checkpoints")
        return Result(self.run_dir, *self._standing, kept / HF_SUBFOLDER if kept is not None else None)


def train(
    recipe: str | Path | dict[str, Any] | Config | None = None, *unnamed: Never, **arguments: Any
) -> Result:
    """Train to the last step: `Trainer(recipe, **arguments).train()`. Arguments, errors and signals as there."""
    return Trainer(recipe, *unnamed, **arguments).train()


@contextmanager
def _as_messages() -> Iterator[None]:
    """A disk or folder that fails becomes the UserError that the command line would tell."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (text := of_system(error)) is None:
            raise
        raise UserError(text) from error
