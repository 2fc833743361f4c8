"""`jetrl replay` and `jetrl bisect`: parse, call, print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from jetrl.report.text import narrator

Question = Callable[[bool], Callable[[str], bool] | None]


def add_to(app: typer.Typer, out: Console, question: Question) -> None:
    """Add both commands. `question`: what asks the user of a run of one process; None where nobody can answer."""

    def end(found: Any, as_json: bool, to_json: Callable[[Any], Any], show: Callable[[Any, Console], None]) -> NoReturn:
        if as_json:
            typer.echo(json.dumps(to_json(found), indent=1))
        else:
            show(found, out)
        raise SystemExit(0 if found.same else 1)

    @app.command()
    def replay(
        run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
        step: Annotated[int | None, typer.Option(min=1, help="Which step (default: the newest that is kept).")] = None,
        what: Annotated[str, typer.Option(help="logprobs, rollout or update.")] = "logprobs",
        trusted: Annotated[bool, typer.Option(
            "--trust", help="Do not ask before running the code that the run's recipe names.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
    ) -> None:
        """Recompute a step of a run and compare it with what was recorded, bit for bit. Exits with 0 if all is
        equal."""
        from jetrl import trust
        from jetrl.run.replay import checks, show
        from jetrl.run.replay.rerun import config_of

        trust.require(run, config_of(run), [], trusted, question(True), takes_recipe=False)
        found = checks.replay(run, show.newest(run) if step is None else step, what, narrator(out, as_json))
        end(found, as_json, show.to_json, show.show)

    @app.command("bisect")
    def bisect_runs(
        a: Annotated[Path, typer.Argument(metavar="A", help="A run folder.", show_default=False)],
        b: Annotated[Path, typer.Argument(metavar="B", help="Another, such as its repetition.", show_default=False)],
        trusted: Annotated[bool, typer.Option(
            "--trust", help="Run the code that the runs' recipes name without asking.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    ) -> None:
        """Find where two runs begin to differ: the step, the first op, its index and both bit patterns. Exits with 0 if
        they do not."""
        from jetrl import trust
        from jetrl.run.replay import bisect, show
        from jetrl.run.replay.rerun import config_of

        for run in (a, b):
            trust.require(run, config_of(run), [], trusted, question(True), takes_recipe=False)
        found = bisect.bisect(a, b, narrator(out, as_json))
        end(found, as_json, show.to_json, show.show_bisected)
