"""`jetrl parity --depth`: measure, draw, and say what was found."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import typer
from rich.console import Console

from jetrl.errors import UserError
from jetrl.parity.depth import DepthWork, depths_of
from jetrl.parity.depth_picture import depth_lines, depth_svg
from jetrl.parity.model_under_test import subject_of, told_if_not_finite
from jetrl.report.files import write_whole
from jetrl.report.text import narrator, wrapped

_PICTURE = Path("parity-depth.svg")


def measured(
    named: tuple[str, str, str, str, str | None, tuple[str, ...]], depth: int, turns: int, svg: Path | None,
    beside: str, as_json: bool, out: Console,
) -> int:
    """The status: 0 if jetrl's engine has the learner's bits at every depth. `named`: model, precision, device, format
    of the cache, revision and settings of [lora]. Picture and JSON are written next to each other; with `as_json` only
    where `svg` says so.
    """
    picture = svg or _PICTURE
    if picture.suffix != ".svg":
        raise UserError(f"--svg {picture}: give a name that ends in .svg; the numbers go to a .json beside it.")
    if not picture.absolute().parent.is_dir():
        raise UserError(f"--svg {picture}: there is no folder {picture.absolute().parent}.")
    torch.use_deterministic_algorithms(True)  # as runs do
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    subject = subject_of(*named)
    quiet = narrator(out, as_json)
    with told_if_not_finite(subject.name):
        results = depths_of(subject, DepthWork(depth, turns), beside, quiet)
    held = [result.to_json() for result in results]
    if as_json:
        typer.echo(json.dumps(held, indent=1))
    else:
        out.print(f"\n{wrapped(subject.formats)}", style="dim")
        for result in results:
            out.print("\n".join(depth_lines(result)), highlight=False)
    if svg is not None or not as_json:
        write_whole(picture, depth_svg(results))
        write_whole(picture.with_suffix(".json"), json.dumps(held, indent=1) + "\n")
    if not as_json:
        out.print(f"\nDrawn: {picture}, with its numbers in {picture.with_suffix('.json')}", highlight=False)
    return 0 if results[0].bit_equal else 1
