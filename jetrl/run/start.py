"""How a command enters a run: as one process or as a rank of several, and into which folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.parallel import launch

if TYPE_CHECKING:
    from rich.console import Console

    from jetrl.parallel.world import World
    from jetrl.precision.recipe import Recipe
    from jetrl.spec import ModelSpec

SEVERAL = ("train", "sft", "eval", "compare", "parity")  # the commands that several ranks may run together


def as_rank(app: Callable[[], object], message_of: Callable[[Exception], str | None], debug: bool) -> NoReturn:
    """Run a command as one of several ranks; UserError for one that knows no ranks."""

    def run() -> None:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        if int(os.environ["WORLD_SIZE"]) > 1 and command not in SEVERAL:
            raise UserError(
                f"jetrl {command} runs in one process; {', '.join(SEVERAL[:-1])} and {SEVERAL[-1]} can run in several. "
                "Start it without torchrun."
            )
        app()

    launch.as_rank(run, message_of, debug)


def start_ranks(nproc: int, config: Config | None = None) -> NoReturn:
    """Run this command line again in `nproc` ranks on this machine, and end with their status.

    Each has the config's `num_threads` CPU threads, or its part of the cores.
    """
    from jetrl.parallel.spawn import spawn

    debug = ["--debug"] if "--debug" in sys.orig_argv else []  # `cli.main` has taken it out
    threads = None if config is None else config.num_threads
    raise SystemExit(spawn(nproc, [*without_nproc(sys.argv[1:]), *debug], num_threads=threads))


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """A command line without `--nproc N` or `--nproc=N`."""
    kept, skip = [], False
    for word in arguments:
        if not skip and not word.startswith("--nproc="):
            skip = word == "--nproc"
            kept += [] if skip else [word]
        else:
            skip = False
    return kept


def require_alike(world: World, config: Config, **more: object) -> None:
    """UserError if the ranks have other versions, another config, or differ in `more`. Collective."""
    import torch

    from jetrl import __version__
    from jetrl.config.load import digest
    from jetrl.parallel.agreement import same_everywhere

    same_everywhere(
        world, **{"jetrl's version": __version__, "the config's digest": digest(config), "torch": torch.__version__},
        **more,
    )


def dry_run(recipe: str, overrides: list[str], ranks: int, gpu: str, echo: Callable[..., None]) -> None:
    """`jetrl train --dry-run`: check all that needs no weights; the config to standard output, the rest to the other.

    With `gpu`, a recipe for a GPU is also checked on a machine without one: all of it but the kernels.
    """
    import torch

    from jetrl.config import load_config, resolve, to_toml
    from jetrl.config.shipped import find_recipe
    from jetrl.kernels.support import capability
    from jetrl.report.track import TrackSettings, check_trackers
    from jetrl.run.fit.advice import gpu_named, on_gpu, report
    from jetrl.run.pin import pinned, weights_to_come
    from jetrl.run.prepare import check_gpu_sizes, check_sizes, in_steps, prepare
    from jetrl.run.preview import preview

    if gpu:
        gpu_named(gpu)
    path, here = find_recipe(recipe), torch.cuda.is_available()
    given = load_config(path, overrides)
    elsewhere = bool(gpu) and not here and given.device == "cuda"
    config = pinned(on_gpu(given) if elsewhere else resolve(given, cuda_available=here, capability=capability()))[0]
    check_trackers(TrackSettings(**config.track.model_dump()))
    on_cpu = {"device": "cpu", "kernels": "reference"}
    plan = prepare(config.model_copy(update=on_cpu) if elsewhere else config)
    if elsewhere:
        check_gpu_sizes(config, plan.spec)
        check_sizes(config, plan.spec, plan.recipe)
    echo(to_toml(config))
    for line in preview(in_steps(config, plan.task), plan):
        echo(line, err=True)
    if text := weights_to_come(config):
        echo(text, err=True)
    if elsewhere:
        echo("There is no GPU here, so the kernels were not tried.", err=True)
    for line in report(path, overrides, plan.spec, ranks, gpu):
        echo(line, err=True)


def shown_flow(recipe: str, overrides: list[str]) -> tuple[Config, ModelSpec, Recipe]:
    """What `jetrl flow` shows of a recipe. It computes nothing, so a recipe for a GPU is welcome anywhere."""
    import torch

    from jetrl.config import load_config, resolve
    from jetrl.config.shipped import find_recipe
    from jetrl.precision.recipe import recipe_of
    from jetrl.run.prepare import spec_of

    given = load_config(find_recipe(recipe), overrides)
    for_gpu = given.device == "cuda" or given.kernels not in ("auto", "reference")
    config = resolve(given, cuda_available=for_gpu or torch.cuda.is_available())
    path = config.model.path
    try:
        spec = spec_of(config)
    except UserError as error:
        if path is None or Path(path).expanduser().exists():
            raise
        raise UserError(f"jetrl flow reads the model's config.json, which must come from the hub. {error}") from None
    return config, spec, recipe_of(config, spec)


def run_dir_of(config: Config) -> Path:
    return Path(config.output_dir) / config.name


def placed(config: Config, say: Callable[[str], object]) -> Config:
    """The config under a name whose folder is free: a run there is never overwritten, a new one gets -2, -3, ..."""
    from jetrl.report.recorder import METRICS_FILE

    base, resume = run_dir_of(config), config.checkpoint.resume
    if resume == "auto":
        return config
    folder, number = base, 1
    while (folder / METRICS_FILE).exists() and (folder / METRICS_FILE).stat().st_size:
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    if number == 1:
        return config
    if resume != "never":
        if Path(resume).resolve().is_relative_to(base.resolve()):
            return config  # back to an earlier step of this very run
        raise UserError(f"{base} already holds a run. To continue from {resume} there, give another output_dir.")
    say(f"{base} already holds a run; this one goes to {folder}.")
    return config.model_copy(update={"name": folder.name})


def require_resumable(run_dir: Path) -> None:
    """Refuse to start a new run where the user meant to resume one."""
    from jetrl.report.recorder import METRICS_FILE, read_metrics
    from jetrl.run.checkpoint.checkpoint import newest

    if not run_dir.is_dir():
        raise UserError(f"--resume: there is no run folder {run_dir}. Check the name, or leave out --resume to start.")
    rows = len(read_metrics(run_dir)) if (run_dir / METRICS_FILE).exists() else 0
    if rows > 1 and newest(run_dir / "checkpoints") is None:
        raise UserError(
            f"{run_dir} has {rows} rows of metrics but no checkpoint to continue from. Use another name."
        )


def summarize(run_dir: Path, console: Console) -> None:
    """Print how a run went and what can be done with it."""
    from shlex import quote

    from jetrl.report.console import summary
    from jetrl.report.hints import never_moved
    from jetrl.report.run import headline, load_runs
    from jetrl.report.text import held_out_loss_of
    from jetrl.run.checkpoint.checkpoint import newest

    run = load_runs([run_dir])[0]
    numbers = headline(run)
    next_commands = [("look at curves, precision flow and samples (open in a browser)", str(run_dir / "report.html"))]
    losses = [loss for row in run.rows if (loss := held_out_loss_of(row)) is not None]
    if (last := newest(run_dir / "checkpoints")) is not None:
        whose = "" if run.engine == "jetrl" else " (with jetrl's engine)"
        next_commands += [
            (f"certify the trained model, bit for bit{whose}", f"jetrl parity {quote(str(run_dir))}"),
            ("write it as a Hugging Face folder", f"jetrl export {quote(str(run_dir))} my-model"),
        ]
        if losses:
            next_commands.append(("go on with rewards", f"jetrl train RECIPE model.path={quote(str(last / 'model'))}"))
    summary(
        run_dir=run_dir, steps=numbers.steps, seconds=numbers.seconds or 0.0, accuracy_before=numbers.accuracy_before,
        accuracy_after=numbers.accuracy_after, parity_max=numbers.parity_max, parity_missing=numbers.parity_missing,
        warm_start_seconds=numbers.warm_start_seconds, held_out=numbers.held_out, console=console,
        constant=never_moved(run.rows), next_commands=next_commands,
        losses=losses,
    )
