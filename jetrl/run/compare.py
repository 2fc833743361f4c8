"""`jetrl compare`: one recipe in several precision flows, one run after the other, each on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from jetrl.config import Config, switched_off
from jetrl.config.toml import split_override
from jetrl.errors import UserError
from jetrl.parallel.agreement import on_rank0
from jetrl.parallel.world import World
from jetrl.report.console import comparison
from jetrl.report.html import write_report
from jetrl.report.run import headline, load_runs
from jetrl.run import start as entry
from jetrl.run.loop import StopRequest, run
from jetrl.run.pin import pinned


def flows_of(text: str) -> list[str]:
    """The flows of `--precision`; UserError if there is none, or one twice."""
    flows = [flow.strip() for flow in text.split(",") if flow.strip()]
    if not flows or len(set(flows)) < len(flows):
        raise UserError(f"--precision {text}: name each flow once, as in bf16,fp8,fp8_rollout.")
    return flows


def said_of(flow: str, overrides: Sequence[str]) -> list[str]:
    """The overrides that mean something in a flow: quant.kv_cache=fp8, say, is for the FP8 flows."""
    off = switched_off("precision", flow)
    return [*(text for text in overrides if split_override(text)[0] not in off), f"precision={flow}"]


def run_all(
    configs: Sequence[Config], command: list[str], world: World, say: Callable[[str], object]
) -> tuple[list[Path], Path | None]:
    """Run the configs from start to end; returns the run folders and the report that lays them side by side.

    The report is None if the user stopped a run, which is then the last folder. A collective of `world`.
    """
    configs = on_rank0(world, lambda: [pinned(config)[0] for config in configs])  # a branch on the hub may move
    folders: list[Path] = []
    for given in configs:
        config = on_rank0(world, lambda: entry.placed(_named(given), say))  # noqa: B023  # called at once
        folders.append(entry.run_dir_of(config))
        with StopRequest(world) as stop:
            if not run(config, folders[-1], command, stop):
                return folders, None
    target = folders[0].parent / f"{configs[0].name}-compare.html"
    return folders, on_rank0(world, lambda: write_report(folders, target))


def tell(folders: Sequence[Path], report: Path | None, console: Console) -> None:
    """Print what came of `run_all`."""
    if report is None:
        console.print(f"Stopped in the run {folders[-1].name}. Called again, the comparison starts from the beginning.")
        return
    comparison([(loaded.precision, headline(loaded)) for loaded in load_runs(folders)], console)
    for folder in folders:
        console.print(f"  {folder / 'report.html'}", style="dim")
    console.print(f"\nSide by side (open in a browser): {report}")


def _named(config: Config) -> Config:
    return config.model_copy(update={"name": f"{config.name}-{config.precision}"})
