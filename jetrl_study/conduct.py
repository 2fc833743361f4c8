"""`jetrl study`: conduct a study from wherever it stands, then write study.json and study.html."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from jetrl.config import Config, resolve, to_toml
from jetrl.errors import UserError
from jetrl.report.console import Output
from jetrl.report.files import disk_errors, lock
from jetrl.report.recorder import METRICS_FILE
from jetrl.report.text import counted, duration
from jetrl_study.added import RESULTS, Added, added_seeds, has_added, read_added
from jetrl_study.collect import collect, write_json
from jetrl_study.jobs import Ended, Halt, Job, environments, newest_step, run_jobs, share_of_cores, tail, visible_gpus
from jetrl_study.pace import Pace
from jetrl_study.page import write_page
from jetrl_study.plan import WARM_START, Planned, Study, all_planned
from jetrl_study.state import (
    begun_seeds,
    drop_checkpoints,
    kept_threads,
    non_finite_step,
    read_state,
    require_version,
    run_folder,
    step_of,
    write_state,
    write_version,
)

_LINE_EVERY = 30.0  # seconds between lines of progress


@dataclass(slots=True)
class Conduct:
    """A study under way, `jobs` runs at a time. `crashed`: names of runs and warm starts with an error of the program,
    with what they said. `write` writes the results so far, of which those of `written` runs are on the disk."""

    study: Study
    out: Path
    runs: dict[str, Planned]
    console: Console
    halt: Halt
    write: Callable[[], object]
    jobs: int = 1
    crashed: dict[str, str] = field(default_factory=dict)
    done: int = 0
    written: int = 0
    last_line: float = field(default_factory=time.monotonic)
    pace: Pace = field(default_factory=Pace)

    def ended(self, end: Ended) -> None:
        """Note how a job ended, and tell it."""
        run, name = self.runs.get(end.job.name), end.job.name
        if end.again:
            self.pace.seen.pop(name, None)  # its wait is no part of a step
            text = f"  {name}: out of GPU memory next to others; runs again at the end, alone (fewer --jobs avoid this)"
            self.console.print(text, markup=False)
            return
        if end.status is None:
            if not end.asked:
                self.crashed[name] = f"it did not start, because {', '.join(end.job.after)} failed"
            return
        if run is None:  # a warm start
            if end.status and end.asked:
                text = f"  {name}: given up, and made from its beginning next time"
                if not self.halt.signals:
                    text += f"; it had {duration(end.seconds)}, so give --stop-after more"
                self.console.print(text, style="dim", markup=False)
            elif end.status:
                self._crash(end)
            return
        folder = run_folder(self.out, run)
        step, broken = step_of(folder), non_finite_step(folder)
        if end.status == 0 and step >= run.config.train.steps:
            write_state(self.out, run, "finished", step)
        elif end.status and broken is not None:
            write_state(self.out, run, "non-finite", broken)
        elif end.asked:
            self.console.print(f"  {name}: stopped after step {max(step, 0)}", style="dim", markup=False)
            return
        else:
            self._crash(end)
            return
        if not self.study.keep_checkpoints:
            drop_checkpoints(folder)
        self.done += 1
        how = "finished" if broken is None else f"ended by NaN or infinity at step {broken}"
        text = f"  {name}: {how} in {duration(end.seconds)} ({self.done} of {len(self.runs)})"
        self.console.print(text, markup=False)

    def _crash(self, end: Ended) -> None:
        self.crashed[end.job.name] = tail(end.job.log)
        self.console.print(f"  {end.job.name}: FAILED with status {end.status}, see {end.job.log}", markup=False)

    def polled(self, running: Sequence[str], waiting: Sequence[str]) -> None:
        """A line of progress from time to time; results as runs end, as this machine may be lost before the last."""
        if running and self.done > self.written:
            self.written = self.done
            self._write_so_far()
        now = time.monotonic()
        due = now - self.last_line >= _LINE_EVERY and bool(running)
        for name in running:
            if name in self.runs and (due or name not in self.pace.seen):
                self.pace.note(name, self._step(name), now)
        if not due:
            return
        self.last_line = now
        self.console.print(
            f"  {duration(now - self.halt.began)}: {self.done} of {len(self.runs)} runs done"
            f"{self._left(running, waiting, now)}; {', '.join(map(self._place, running))}", style="dim", markup=False,
        )

    def _write_so_far(self) -> None:
        """Write the results. Whatever goes wrong ends no run: it is reported, and met again when the study ends."""
        try:
            self.write()
        except Exception as error:
            text = f"  the results so far are not written ({error!r}); tried again when the next run ends"
            self.console.print(text, markup=False, style="red")

    def _place(self, name: str) -> str:
        """A run or warm start, and its newest step."""
        if name in self.runs:
            return f"{name} {self.pace.seen[name][-1][0]}/{self.runs[name].config.train.steps}"
        return f"{name} {newest_step(_log(self.out, name))}".rstrip()

    def _step(self, name: str) -> int:
        return max(step_of(run_folder(self.out, self.runs[name])), 0)

    def _left(self, running: Sequence[str], waiting: Sequence[str], now: float) -> str:
        """In words: the time that is left by the pace so far, and that until `--stop-after`, if it comes first."""
        if self.halt.asked:
            return ", stopping"
        mine = {name: self.runs[name].config.train.steps for name in running if name in self.runs}
        later = [self.runs[name].config.train.steps - self._step(name) for name in waiting if name in self.runs]
        seconds = self.pace.left(mine, self.jobs - len(mine), later, now)
        if seconds is None:
            return ""
        until = float("inf") if self.halt.deadline is None else self.halt.deadline - now
        return f", about {duration(seconds)} left{f', stopped in {duration(until)}' if until < seconds else ''}"


def conduct(
    whole: Study, study: Study, out: Path, jobs: int, threads: int | None, stop_after: float | None, console: Console,
    add: Sequence[Path] = (),
) -> int:
    """Run what is left of `study`, which is a part of `whole` or all of it, and write the results of all arms and seeds
    that have some, here or in the files `add`. Status: 0; 1 if a run crashed; 130 after a signal."""
    out = out.absolute()
    require_version(out)
    plan = all_planned(study, out)
    every = _every(whole, study, out)
    kept = [out / RESULTS] if has_added(out / RESULTS) else []  # what earlier calls have added stays
    added = read_added([*add, *kept], whole, every, out, console)
    _require_machine(_left(plan, out, added), plan)
    with _locked(out) as held:
        require_version(out)
        write_version(out)
        left = _left(plan, out, added)  # again: another command may have held the folder until now
        deadline = None if stop_after is None else time.monotonic() + 60 * stop_after
        runs = {run.name: run for run in plan}
        done = len(plan) - len(left)

        def write() -> object:
            return _results(whole, every, out, added, Output(quiet=True))

        going = Conduct(study, out, runs, console, Halt(deadline), write, jobs, done=done, written=done)
        console.print(
            f"Study {study.name}: {counted(len(study.arms), 'arm')}, {counted(len(study.seeds), 'seed')}, "
            f"{counted(len(plan), 'run')}, {going.done} done; {jobs} side by side, in {out}", markup=False,
        )
        gpus = visible_gpus() if any(resolved(run.config).device == "cuda" for run in left) else []
        try:
            with going.halt.caught():
                slots = environments(jobs, kept_threads(out, threads, share_of_cores(jobs)), gpus)
                run_jobs(_jobs(left, out), slots, going.halt, going.ended, going.polled, held)
        finally:
            _tell_runs(going)  # in any case: with a full disk, say, nothing below works
        written = _results(whole, every, out, added, console)
        if written is not None:
            so_far = " so far" if going.done < len(plan) else ""
            console.print(f"\nResults{so_far}: {written[1]} (open in a browser), {written[0]}", markup=False)
        if going.halt.signals:
            return 130
        return 1 if going.crashed else 0


def _left(plan: Sequence[Planned], out: Path, added: Mapping[str, Added]) -> list[Planned]:
    """The runs that are done neither in `out` nor elsewhere."""
    return [run for run in plan if not read_state(out, run).done and run.name not in added]


def _every(whole: Study, study: Study, out: Path) -> list[Planned]:
    """The runs of all arms and seeds: the study's, those that are chosen, and those that the folder has by earlier
    calls. UserError if one of them was made with other settings: results show them together."""
    more = {*study.seeds, *begun_seeds(out), *added_seeds(out / RESULTS, whole)} - {*whole.seeds}
    every = all_planned(replace(whole, seeds=(*whole.seeds, *sorted(more))), out)
    for run in every:
        read_state(out, run)
    return every


@contextmanager
def _locked(out: Path) -> Iterator[list[int]]:
    """One command at a time works in a study's folder: another would take its runs for crashed ones. Gives the lock's
    descriptor, for the runs: where the study is killed, they hold the folder until they have ended."""
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    held = lock(out, "Wait until that study has ended, or give another --out.")
    try:
        yield [held] if held >= 0 else []
    finally:
        if held >= 0:
            os.close(held)


def resolved(config: Config) -> Config:
    """The config on this machine."""
    import torch

    from jetrl.kernels.support import capability

    return resolve(config, cuda_available=torch.cuda.is_available(), capability=capability())


def _require_machine(left: Sequence[Planned], plan: Sequence[Planned]) -> None:
    """Refuse a study with arms that are left to run and that this machine cannot run, before the first one."""
    import torch

    from jetrl.run.prepare import prepare

    for run in {run.arm.name: run for run in left}.values():
        if run.config.device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                f"arm {run.arm.name}: this study needs a GPU, and none is visible here (`jetrl doctor` says why). "
                "`jetrl study quick` runs on a CPU."
            )
        try:
            prepare(resolved(run.config))
        except UserError as error:
            others = [name for name in dict.fromkeys(r.arm.name for r in plan) if name != run.arm.name]
            hint = f" To leave the arm out: --arms {','.join(others)}" if others else ""
            raise UserError(f"arm {run.arm.name}: {error}{hint}") from error


def _jobs(left: Sequence[Planned], out: Path) -> list[Job]:
    """What is to be run: for each seed its warm start, then its arms, which share it."""
    jobs: list[Job] = []
    for run in left:
        path = out / "configs" / f"{run.name}.toml"
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(to_toml(run.config), encoding="utf-8")
        after: tuple[str, ...] = ()
        begun = (run_folder(out, run) / "checkpoints").is_dir()
        if run.config.sft.steps and not begun:
            warm = f"{WARM_START}-s{run.seed}"
            after = (warm,)
            if warm not in {job.name for job in jobs}:
                jobs.append(Job(warm, ("sft", str(path)), _log(out, warm)))
        write_state(out, run, "started")
        jobs.append(Job(run.name, ("train", str(path)), _log(out, run.name), after))
    return sorted(jobs, key=lambda job: job.arguments[0] != "sft") if len(jobs) > 1 else jobs


def _log(out: Path, name: str) -> Path:
    return out / "logs" / f"{name}.log"


def _results(
    whole: Study, every: Sequence[Planned], out: Path, added: Mapping[str, Added], console: Console
) -> tuple[Path, Path] | None:
    """study.json and study.html of what there is; None before the first evaluation. Tells their notes."""
    begun = [
        r for r in every
        if read_state(out, r).done or r.name in added or (run_folder(out, r) / METRICS_FILE).exists()
    ]
    if not begun:
        return None
    names = {run.arm.name for run in begun}
    shown = replace(
        whole, arms=tuple(arm for arm in whole.arms if arm.name in names),
        seeds=tuple(dict.fromkeys(run.seed for run in begun)),
    )
    data = collect(shown, out, begun, added)
    if not any(run["held_out"]["steps"] for run in data["runs"]):
        return None
    for note in data.get("notes", []):
        console.print(f"\n{note}", markup=False)
    return write_json(data, out / RESULTS), write_page(data, out / "study.html")


def _tell_runs(going: Conduct) -> None:
    say, undone = going.console.print, len(going.runs) - going.done
    if undone and not going.crashed:
        say(f"Not finished: {undone} of {counted(len(going.runs), 'run')}. The same command continues from here.")
    for name, text in going.crashed.items():
        say(f"\n{name} crashed; its output ends with\n{text}", markup=False, style="red")
    if going.crashed:
        say(f"\n{len(going.crashed)} crashed: {', '.join(going.crashed)}. The same command tries them again.")
