"""`write_report`: one or several runs as a single HTML file that needs no network and no server; `write_sessions`: the
sessions of a server likewise.

The page draws itself (report.js: curves, samples.js: sample browser, traces.js: trees of conversations, page.js: the
order) from JSON that this module embeds. Text of samples reaches the page only as JSON with `<`, `>` and `&` escaped,
and is inserted as text nodes.
Flow pictures are embedded as images, so that a script in one does not run.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from jetrl.errors import UserError
from jetrl.report.metrics import metric_of, title_of
from jetrl.report.recorder import METRICS_FILE, SAMPLES_FILE
from jetrl.report.run import PARITY_KEY, ROUTING_KEY, THROUGHPUT_KEY, Headline, Run, headline, held_out_name, load_runs
from jetrl.report.samples import MAX_SAMPLES, SampleFile, finite, sample_note
from jetrl.report.sessions import has_sessions, page_of, read_sessions, tiles
from jetrl.report.text import duration, parity_note
from jetrl.untrusted import fresh, inside, text_inside

MAX_POINTS = 1500  # per curve; longer ones are binned
FLOW_FILE = "flow.svg"
EVAL_SAMPLES_FILE = "eval_samples.jsonl"
MAX_EVAL_SAMPLES = 200  # rows on the page, over all runs, beside MAX_SAMPLES of training
SCRIPTS = ("report.js", "samples.js", "traces.js", "page.js")
_LARGEST = re.compile(r"parity/.*|.*[/_]max")  # metrics whose bins keep the largest value
_HERE = Path(__file__).parent


def write_report(
    run_dirs: Sequence[Path], out: Path, flow_svgs: Mapping[str, str] | None = None,
    files: dict[Path, SampleFile] | None = None,
) -> Path:
    """Write the page of these runs to `out`, whole or not at all, and return its path.

    `flow_svgs` maps a caption to the SVG text of a precision flow; if it is empty, each run's `flow.svg` is used if it
    has one. `files` keeps what is known of files of samples for the next call. A folder with the sessions of a server
    alone has their page. Raises `UserError` if a folder holds no run.
    """
    if len(run_dirs) == 1 and has_sessions(run_dirs[0]) and not (run_dirs[0] / METRICS_FILE).exists():
        return write_sessions(run_dirs[0], out)
    runs = load_runs(run_dirs)
    flows = dict(flow_svgs or {}) or _flows_of(runs)
    known = {} if files is None else files

    def chosen(name: str, most: int) -> list[dict[str, Any]]:
        paths = [inside(run.path, name) for run in runs]
        return [known.setdefault(path, SampleFile(path)).choose(most // len(runs)) for path in paths]

    samples, held_out = chosen(SAMPLES_FILE, MAX_SAMPLES), chosen(EVAL_SAMPLES_FILE, MAX_EVAL_SAMPLES)
    return _write(
        Path(out), "template.html.j2", SCRIPTS, _payload(runs, samples, held_out),
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        runs=[_describe(run, headline(run)) for run in runs],
        comparison=_comparison(runs) if len(runs) > 1 else [],
        differences=config_differences(runs) if len(runs) > 1 else [],
        flows=[(name, _image(svg), "prefers-color-scheme" in svg) for name, svg in flows.items()],
        sample_note=sample_note(samples),
        held_out_note=sample_note(held_out, "recorded held-out samples", EVAL_SAMPLES_FILE),
        binned=any(len(run.rows) > MAX_POINTS for run in runs),
        max_points=MAX_POINTS,
    )


def write_sessions(folder: Path, out: Path) -> Path:
    """Write the page of a server's sessions to `out`, whole or not at all, and return its path. UserError if the folder
    holds none."""
    read = read_sessions(folder)
    if not read.talks:
        raise UserError(f"{folder}: no session has an answer yet. Ask again when one has.")
    parts, note = page_of(read)
    run = {"label": folder.name, "steps": 0, "samples": {"steps": parts}, "evaluations": {"steps": []}}
    return _write(
        out, "sessions.html.j2", (*SCRIPTS[:-1], "sessions.js"), {"runs": [run]}, title=folder.resolve().name,
        folder=str(folder), tiles=tiles(read), note=note,
    )


def _write(out: Path, template: str, scripts: Sequence[str], data: Any, **values: Any) -> Path:
    """Render a page and put it in its place."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    page = environment.get_template(template).render(
        css=Markup((_HERE / "report.css").read_text(encoding="utf-8")),
        js=Markup("\n".join((_HERE / name).read_text(encoding="utf-8") for name in scripts)),
        data=script_json(data), written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), **values,
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = fresh(out)  # a browser may be reading the old one
        temporary.write_text(page, encoding="utf-8", errors="replace")
        temporary.replace(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}. Choose another place for the report.") from error
    return out


def script_json(data: Any) -> Markup:
    """JSON that may stand inside a script element: no `<`, `>`, `&`, no line separators, no NaN."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _payload(
    runs: Sequence[Run], samples: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "runs": [
            {
                "label": run.label,
                "steps": max(int(row["step"]) for row in run.rows),
                "series": {key: thin(key, *run.series(key)) for key in run.keys()},
                "accuracy": run.accuracy_keys(),
                "phases": run.phases(),
                "rewards": run.reward_keys(),
                "parity": _measured(numbers := headline(run)) + parity_note(numbers.parity_missing),
                "samples": chosen,
                "evaluations": evaluated,
            }
            for run, chosen, evaluated in zip(runs, samples, held_out, strict=True)
        ],
        "metrics": _about({key for run in runs for key in run.keys()}),
        "parityKey": PARITY_KEY,
        "heldOut": held_out_name(run.held_out for run in runs),
    }


def _about(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """What the page says of each metric that is known: its title, unit, meaning and healthy values."""
    known = {key: metric for key in sorted(keys) if (metric := metric_of(key)) is not None}
    return {
        key: {"title": one.title, "unit": one.unit, "meaning": one.meaning.replace("`", ""),
              "healthy": one.healthy.replace("`", "")}
        for key, one in known.items()
    }


def thin(key: str, steps: Sequence[int], values: Sequence[float]) -> list[list[float | None]]:
    """A curve of at most `MAX_POINTS` points: bins keep the largest value for parity and maxima, else the mean."""
    if len(steps) > MAX_POINTS:
        edges = np.linspace(0, len(steps), MAX_POINTS + 1).round().astype(int)
        array = np.asarray(values)
        reduce = np.max if _LARGEST.fullmatch(key) else np.mean
        values = [float(reduce(array[a:b])) for a, b in zip(edges, edges[1:], strict=False)]
        steps = [steps[b - 1] for b in edges[1:]]
    return [list(steps), [finite(float(f"{value:.6g}")) for value in values]]


def _describe(run: Run, numbers: Headline) -> dict[str, Any]:
    """What the header says about one run, as texts."""
    accuracy = "not measured"
    if numbers.accuracy_after is not None:
        shown = percent if numbers.held_out == "accuracy" else "{:.3f}".format
        before = "" if numbers.accuracy_before is None else f"{shown(numbers.accuracy_before)} → "
        accuracy = before + shown(numbers.accuracy_after)
    exact = numbers.parity_steps > 0 and numbers.parity_nonzero_steps == 0
    parity = "not measured" if numbers.parity_max is None else "0" if exact else f"{numbers.parity_max:.3g}"
    commit = run.env.get("git_commit")
    return {
        "label": run.label,
        "folder": str(run.path),
        "model": run.model,
        "precision": run.precision,
        "engine": run.engine,
        "hardware": run.hardware,
        "throughput_name": "Tokens/s per GPU" if run.on_gpu else "Tokens/s",
        "kernels": str(run.config.get("kernels", "")),
        "steps": steps_of(run, numbers),
        "date": str(run.env.get("date", ""))[:10],
        "commit": f"{commit[:10]}{' + changes' if run.env.get('git_dirty') else ''}" if commit else "",
        "accuracy": accuracy,
        "held_out": held_out_name([numbers.held_out]),
        "accuracy_note": numbers.accuracy_key or "",
        "parity": parity,
        "parity_note": _measured(numbers) + parity_note(numbers.parity_missing),
        "parity_class": "" if numbers.parity_max is None else "good" if exact else "bad",
        "time": "not measured" if numbers.seconds is None else duration(numbers.seconds),
        "throughput": "not measured" if numbers.tokens_per_s is None else f"{numbers.tokens_per_s:,.0f}",
        "reward": "not measured" if numbers.reward_last is None else f"{numbers.reward_last:.3f}",
        "config_text": run.config_text,
        "env_text": json.dumps(run.env, indent=2) if run.env else "",
    }


def steps_of(run: Run, numbers: Headline) -> str:
    """`40 steps`, `1 step`, or `16 of 40 steps` of a run that has not reached its last one."""
    planned = run.config.get("train", {}).get("steps")
    of = f" of {planned:,}" if isinstance(planned, int) and planned > numbers.steps else ""
    return f"{numbers.steps:,}{of} step{'s' * ((planned if of else numbers.steps) != 1)}"


def _measured(numbers: Headline) -> str:
    """In how many of the steps that measured the gap it is 0 or not; empty if none did."""
    measured, nonzero = numbers.parity_steps, numbers.parity_nonzero_steps
    if not measured:
        return ""
    if nonzero:
        return f"not 0 in {nonzero:,} of {measured:,} step{'s' * (measured != 1)}"
    return f"exactly 0 in all {measured:,} steps" if measured > 1 else "exactly 0 in its only step"


def percent(value: float) -> str:
    """0.8125 -> 81.2%; a plain number if it is not a share."""
    return f"{100 * value:.1f}%" if 0 <= value <= 1 else f"{value:.3f}"


def _comparison(runs: Sequence[Run]) -> list[tuple[str, list[str], str]]:
    """Rows (what, one text per run, CSS class by run joined with spaces) of the table that compares runs."""
    described = [_describe(run, headline(run)) for run in runs]
    names = {
        "precision": "Precision",
        "model": "Model",
        "steps": "Steps",
        "accuracy": held_out_name(run.held_out for run in runs),
        "reward": "Reward, mean of last 10 steps",
        "parity": "Parity: largest log-prob gap",
        "throughput": f"{title_of(THROUGHPUT_KEY)}, median",
        "time": "Time",
        "hardware": "Hardware",
    }
    table = [(name, [one[key] for one in described], key) for key, name in names.items()]
    table[5:5] = [
        (f"{title_of(key)}, last step", [_last(run, key) for run in runs], "")
        for key in ("policy/entropy", "response_length/mean", "environment/turns_mean", ROUTING_KEY)
        if any(key in run.keys() for run in runs)
    ]
    return table


def _last(run: Run, key: str) -> str:
    values = run.series(key)[1]
    return f"{values[-1]:.3g}" if values else "not measured"


def config_differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Config keys (dotted) on which the runs disagree, with each run's value; the run's name is left out."""
    flat = [dict(_flatten(run.config)) for run in runs]
    keys = sorted({key for config in flat for key in config if key != "name"})
    table = [(key, [json.dumps(config[key], default=str) if key in config else "–" for config in flat]) for key in keys]
    return [(key, values) for key, values in table if len(set(values)) > 1]


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _flows_of(runs: Sequence[Run]) -> dict[str, str]:
    """Flow pictures of the run folders; equal pictures once."""
    flows: dict[str, list[str]] = {}
    for run in runs:
        if svg := text_inside(run.path, FLOW_FILE):
            flows.setdefault(svg, []).append(run.label)
    return {", ".join(labels): svg for svg, labels in flows.items()}


def _image(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
