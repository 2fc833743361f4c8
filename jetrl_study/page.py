"""`study.html`: one self-contained page with the figures, the table and the rules of a study."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from markupsafe import Markup

from jetrl.report import html as report
from jetrl.report.files import write_whole
from jetrl.report.text import counted, duration
from jetrl_study.figures import GAP, figures, interval
from jetrl_study.state import is_done
from jetrl_study.timing import SHARE, seconds_to_goal

_HERE = Path(__file__).parent


def write_page(data: Mapping[str, Any], path: Path) -> Path:
    """Write the page of a study's results (`collect`) to `path` and return it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    style = (Path(report.__file__).parent / "report.css").read_text(encoding="utf-8")
    added = data.get("added", [])
    machines = dict.fromkeys(_hardware(one["environment"]) for one in (data, *added))
    page = environment.get_template("study.html.j2").render(
        data=data, study=data["study"], hardware=", ".join(machines),
        done=sum(map(is_done, data["runs"])),
        figures=[(title, note, Markup(svg), wide) for title, note, svg, wide in figures(data)],
        rows=table(data), share=f"{100 * SHARE:.0f}%", failures=failure_rows(data),
        arm_styles=Markup(arm_styles(len(data["study"]["arms"]))),
        css=Markup(style + (_HERE / "study.css").read_text(encoding="utf-8")),
        js=Markup((_HERE / "study.js").read_text(encoding="utf-8")),
        settings=json.dumps({k: data["study"][k] for k in ("recipe", "overrides", "arms")}, indent=1),
        environment=json.dumps(data["environment"], indent=1), added=[added_line(one) for one in added],
        origins=json.dumps(added, indent=1),
    )
    return write_whole(path, page.encode(errors="replace").decode())  # paths may hold lone surrogates


def arm_styles(count: int) -> str:
    """One colour and dash for each arm: six colours, solid, then dashed, then dotted."""
    rules = []
    for number in range(count):
        dash = ("none", "7 4", "2 3")[number // 6 % 3]
        kind = ("solid", "dashed", "dotted")[number // 6 % 3]
        colour = f"var(--s{number % 6})"
        rules.append(f".a{number} {{ --c: {colour}; --d: {dash}; --k: {kind}; }}")
        rules.append(f"main.off{number} svg .a{number} {{ display: none; }}")
    return "\n".join(rules)


def table(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each arm, as texts: of its runs that are done, or of all while none is."""
    rows, goals = [], seconds_to_goal(data["runs"])
    for number, arm in enumerate(data["study"]["arms"]):
        begun = [run for run in data["runs"] if run["arm"] == arm["name"] and run["held_out"]["steps"]]
        done = [run for run in begun if is_done(run)]
        runs = done or begun
        rows.append({
            "number": number, "label": arm["label"],
            "seeds": f"{len(done)} of {len(begun)}" if len(done) < len(begun) else str(len(done)),
            "before": _spread([run["held_out"]["mean"][0] for run in runs], 100, "%"),
            "after": _spread([run["held_out"]["mean"][-1] for run in runs], 100, "%"),
            "best": _spread([max(run["held_out"]["mean"]) for run in runs], 100, "%"),
            "gap": _gap([_mean(run, GAP) for run in runs]),
            "seconds": _time([run["seconds"]["values"][-1] for run in runs]),
            "goal": _times(goals.get(arm["name"], [])),
            "failed": sum(bool(run["failures"]) for run in runs),
            "against": [_differences(data, arm["name"], other) for other in data["study"]["against"]],
        })
    return rows


def _differences(data: Mapping[str, Any], arm: str, other: str) -> list[str]:
    """An arm's differences from another one, a text for each outcome."""
    found = [d for d in data["differences"] if (d["arm"], d["against"]) == (arm, other)]
    return [f"{d['outcome']} {interval(d)}" for d in found] or ["–"]


def failure_rows(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(run, what happened) for every rule that a run broke."""
    labels = {arm["name"]: arm["label"] for arm in data["study"]["arms"]}
    return [
        (f"{labels[run['arm']]}, seed {run['seed']}",
         f"step {one['step']}: {one['rule']}: {one['text']}{' (recovered)' if one['recovered'] else ''}")
        for run in data["runs"] for one in run["failures"]
    ]


def added_line(origin: Mapping[str, Any]) -> str:
    """Where added runs come from, in a line."""
    count = counted(len(origin["runs"]), "run")
    return f"{count} added from {origin['file']} ({_hardware(origin['environment'])}, {origin['written']})"


def _hardware(environment: Mapping[str, Any]) -> str:
    return str(environment.get("gpu") or environment.get("cpu") or "not recorded")


def _mean(run: Mapping[str, Any], key: str) -> float | None:
    values = [v for v in run["series"].get(key, {"values": []})["values"] if v is not None]
    return fmean(values) if values else None


def _spread(values: Sequence[float], factor: float, unit: str) -> str:
    """Mean, and the smallest and largest of several."""
    if not values:
        return "–"
    text = f"{factor * fmean(values):.1f}{unit}"
    return f"{text} ({factor * min(values):.1f} to {factor * max(values):.1f})" if len(values) > 1 else text


def _gap(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return "exactly 0" if not any(known) else f"{fmean(known):.2e}"


def _time(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return duration(fmean(known)) if known else "–"


def _times(values: Sequence[float]) -> str:
    """Mean, and the shortest and longest of several."""
    text = _time(values)
    return f"{text} ({duration(min(values))} to {duration(max(values))})" if len(values) > 1 else text
