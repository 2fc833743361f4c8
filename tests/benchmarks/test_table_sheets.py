"""`benchmarks/table.py --table rollouts` and `updates`: rows of hand-made pieces, shared processes, stand-in peers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import table
import table_run
from bench_step import flops
from bench_workloads import WORKS, ragged_lengths
from rich.console import Console
from table import chosen
from table_pieces import BEFORE, COMPILING, HERE, START, Piece
from table_rows import At, Computed, Raw, Row, foreign_seconds, goal_text, look, read, result_text
from table_run import Runner, load, measure, run
from table_show import SHEETS, markdown, notes, show

ENV = {"gpu": "G", "torch": "2.11", "commit": "abc", "date": "2026-01-02T03:04:05+00:00"}
ROLLOUTS, UPDATES = SHEETS["rollouts"], SHEETS["updates"]
GROUPS = "groups of 16, prompt 4096"


def piece(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"complete": True, "seconds": 1.0, "rows": [{"environment": ENV} | row for row in rows]}


def work(name: str, different: int = 0, **rates: list[float]) -> dict[str, Any]:
    """Rounds of each switch, and the row that says that it is done."""
    rows = [
        {"piece": name, "work": switch, "tokens/s": rate, "seconds": 1e4 / rate, "peak GiB": 50.0, "compiled": 0,
         "share of floor": 0.61, "engine": "jetrl fp8 kv8"}
        for switch, of in rates.items() for rate in of
    ]
    end = {"piece": name, "work": "bits", "done": True, "different": different, "compared": 100, "seconds": 3.0}
    return {"complete": True, "seconds": 3.0, "rows": [{"environment": ENV} | row for row in [*rows, end]]}


def peer(*rates: tuple[int, float]) -> dict[str, Any]:
    return piece(*(
        {"engine": "peer fp8 kv8", "peer": "vllm-0.24.0", "batch": batch, "tokens/s": rate, "seconds": 40.0}
        for batch, rate in rates
    ))


@pytest.fixture
def rollouts() -> Raw:
    return {
        "unique 64": work("unique 64", plain=[15000.0, 14900.0, 15100.0], never=[14800.0, 14000.0, 14790.0]),
        GROUPS: work(GROUPS, plain=[9000.0], merged=[17500.0]),
        "ragged": work("ragged", plain=[11000.0], drafts=[15000.0]),
        "alone 10000": work("alone 10000", plain=[190.0] * 3, never=[180.0] * 3),
        "peer unique bf16": peer((64, 7400.0), (64, 7500.0), (64, 7600.0), (256, 11500.0)),
        "peer unique fp8 kv8": peer((64, 9000.0), (64, 9100.0), (64, 8900.0)),
        f"peer {GROUPS}": peer((256, 7000.0)),
        "peer ragged": peer((512, 5500.0)),
        "compilation": piece({"what": "phase before the run", "first s": 33.0}, {"work": "sum", "seconds": 38.5}),
    }


def update_rows(ms: dict[str, list[float]], peak: float) -> dict[str, Any]:
    rows = [
        {"work": name, "update_ms": x, "TFLOP/s": 1.725e6 / x, "peak GiB": peak} for name, of in ms.items() for x in of
    ]
    return piece(*rows, *({"work": "reference pass", "logprob_ms": x, "peak GiB": 60.0} for x in (640.0, 620.0, 600.0)))


@pytest.fixture
def updates() -> Raw:
    foreign = [("liger sdpa", 4000.0), ("liger fa4", 3900.0), ("liger sdpa", 4200.0), ("liger fa4", 4000.0)]
    return {
        "update": update_rows({"lean": [2100.0, 2000.0, 2050.0], "lean nonexact": [2030.0] * 3}, 112.0),
        "foreign liger": piece(
            *({"work": name, "update_ms": x, "logprob_ms": x / 3, "TFLOP/s": 1.725e6 / x} for name, x in foreign),
            {"work": "liger cudnn", "error": "no engine"},
            {"note": "versions", "transformers": "5.1", "liger-kernel": "0.7"},
        ),
        "whole fp8 kv8": piece({"whole_s": 40.0, "whole peak GiB": 111.0}),
        "whole bf16 before": piece({"whole_s": 66.0, "environment": ENV | {"commit": "107d9e3"}}),
        "peer whole bf16": peer((64, 6000.0)),
        "shared prompts": piece({
            "work": "2048+1024x8", "shared update ms": 900.0, "packed update ms": 1800.0,
            "shared update peak GiB": 90.0,
        }),
    }


def said(raw: Raw, sheet: Any) -> dict[str, list[str]]:
    found = {}
    for row in sheet.rows:
        reading = read(raw, row)
        found[row.what] = [*reading.cells()[1:], reading.rounds]
    return found


def test_rows_of_rollouts(rollouts: Raw) -> None:
    rows = said(rollouts, ROLLOUTS)
    best = "vLLM FP8, FP8 KV"
    assert rows["unique prompts, 64 x (512 + 1024)"] == [
        "15,000 tok/s", "7,500 tok/s (vLLM BF16)", "2.00x", "≥ 1.9x", "met", "50", "3, 1.3% / 3, 2.7%"
    ]
    assert rows["unique prompts, 256 x (512 + 1024)"][:3] == ["not run", "11,500 tok/s (vLLM BF16)", "not run"]
    assert rows["the same, 64"][1:5] == [f"9,000 tok/s ({best})", "1.67x", "≥ 1.55x", "met"]
    name = "groups of 16, 4096 + 1024, batch 256"
    assert rows[f"{name}, not merged"][2:5] == ["1.29x", "", ""]  # told for comparison
    assert rows[f"{name}, merged"][2:] == ["2.50x", "≥ 2.5x", "met", "50", "1 / 1"]
    assert rows["ragged, 512 answers over 256 slots, no drafts"][2:5] == ["2.00x", "≥ 2x", "met"]
    assert rows["the same, drafts forced to hold at 0.6"][2:5] == ["2.73x", "≥ 2.5x", "met"]
    assert rows["compilation in the first rollout of a fresh machine"][:5] == ["38.5 s", "", "38.5 s", "≤ 40 s", "met"]
    assert rows["one sequence of 10,000 keys: decode step of its floor (4.47 TB/s)"][2:5] == ["61%", "≥ 60%", "met"]
    assert rows["cost of drafts that never hold, batch 64"][2:5] == ["+1.4%", "≤ 2%", "met"]
    assert rows["cost of drafts that never hold, one sequence"][2:5] == ["+5.6%", "≤ 2%", "missed"]
    bits = "answers with other bits than plain ones: merged, drafts"
    assert rows[bits][:5] == ["0", "400 (compared)", "0", "≤ 0", "met"]
    rollouts["ragged"]["rows"][-1]["different"] = 3
    assert said(rollouts, ROLLOUTS)[bits][2:5] == ["3", "≤ 0", "missed"]
    del rollouts["ragged"]
    assert said(rollouts, ROLLOUTS)[bits][2] == "not run"


def test_rows_of_updates(updates: Raw) -> None:
    rows = said(updates, UPDATES)
    state, other = "BF16 masters and moments", "FP32 masters, 8-bit moments"
    assert rows[f"update, 32K tokens of 8K, {state}"] == [
        "841 TFLOP/s", "", "841 TFLOP/s", "≥ 820 TFLOP/s", "met", "112", "3, 5.0%"
    ]
    # the median of an attention's rounds; the best attention
    against = rows[f"update against the best foreign trainer, {state}"]
    assert against[1].startswith("437 TFLOP/s (BF16, ") and against[2:5] == ["1.93x", "≥ 2x", "missed"]
    assert rows["reference log-probs, 32K tokens"][:5] == [
        "620 ms", "1,317 ms (foreign BF16)", "620 ms", "≤ 630 ms", "met"
    ]
    assert rows["update, 2048 + 1024, 8 samples share the prompt, 18 layers"][2:5] == ["2.00x", "≥ 1.9x", "met"]
    assert rows["update, 8192 + 1024, 8 samples share the prompt, 18 layers"][2] == "not run"
    whole = rows["whole RL step, 64 x 4K, FP8, FP8 cache"]
    assert whole[1:5] == ["66 s (our BF16 of 107d9e3)", "1.65x", "≥ 1.6x", "met"]
    assert rows[f"peak memory of the update, {state}"][2:5] == ["112 GiB", "≤ 110 GiB", "missed"]
    assert rows["cost of exactness, update"][2:5] == ["+1.0%", "≤ 2%", "met"]
    assert [rows[f"the same, {other}"][2], rows["cost of exactness, whole step"][2]] == ["not run", "not run"]


def test_the_step_of_others_is_computed_of_its_parts_and_says_so(updates: Raw) -> None:
    (row,) = [row for row in UPDATES.rows if "*computed*" in row.what]
    speed = look(updates, At("foreign liger", "TFLOP/s"))
    assert speed == pytest.approx(1.725e6 * (1 / 3900 + 1 / 4000) / 2)
    want = 40.0 + flops(36, [4608] * 64, 3) / (speed * 1e12)
    assert foreign_seconds(40.0, speed) == pytest.approx(want)
    reading = read(updates, row)
    assert reading.base == pytest.approx(want) and reading.result == pytest.approx(want / 40.0)
    assert "computed of parts" in reading.cells()[2]
    del updates["peer whole bf16"]
    assert read(updates, row).cells()[3] == "not run"


def test_a_figure_of_several_things_is_the_best_of_their_medians() -> None:
    raw = {
        "a": piece({"work": "x", "update_ms": 5.0, "r": 1.0}, {"work": "x", "update_ms": 9.0, "r": 9.0},
                   {"work": "x", "update_ms": 6.0, "r": 2.0}, {"work": "y", "update_ms": 8.0, "r": 3.0}),
        "b": piece({"update_ms": 7.0, "r": 2.5}),
    }
    assert (look(raw, At(("a", "b"), "update_ms")), look(raw, At(("a", "b"), "r"))) == (6.0, 3.0)
    assert look(raw, At("a", "r", work="x")) == 2.0 and look(raw, At("a", "r", work="z")) is None
    assert look(raw, Computed((At("b", "r"), At("a", "r", work="y")), lambda p, q: p + q, "")) == 5.5


@pytest.mark.parametrize(
    ("how", "goal", "unit", "value", "texts"),
    [
        ("rate", 1.9, "tok/s", 1.896, ("≥ 1.9x", "1.896x")), ("time", 1.55, "s", 1.55, ("≥ 1.55x", "1.55x")),
        ("cost", 0.02, "s", 0.003, ("≤ 2%", "+0.3%")), ("share", 0.6, "share", 0.38, ("≥ 60%", "38%")),
        ("below", 30, "ms", 8.25, ("≤ 30 ms", "8.2 ms")), ("below", 630, "ms", 650.4, ("≤ 630 ms", "650 ms")),
        ("above", 820, "TFLOP/s", 762.3, ("≥ 820 TFLOP/s", "762 TFLOP/s")), ("below", 0, "", 0, ("≤ 0", "0")),
    ],
)
def test_goals_and_results_in_words(how: str, goal: float, unit: str, value: float, texts: tuple[str, str]) -> None:
    row = Row("w", At("a", "x"), None, "", how, goal, unit, "")
    assert (goal_text(row), result_text(row, value)) == texts


def test_markdown_of_a_sheet(rollouts: Raw, updates: Raw) -> None:
    text = markdown(rollouts, ROLLOUTS)
    assert "| 3, 1.3% / 3, 2.7% |" in text and "compared with: vllm-0.24.0." in text and "Not one state" not in text
    rollouts["ragged"]["rows"][1]["compiled"] = 7
    assert "**Kernels were compiled within:** ragged, drafts (7)." in notes(rollouts, ROLLOUTS)
    text = markdown(updates, UPDATES)
    assert "transformers 5.1, Liger 0.7" in text and "Commit abc." in text, "the older commit is a baseline's"
    out = StringIO()
    show(updates, Console(file=out, width=100), UPDATES)
    assert max(map(len, out.getvalue().splitlines())) <= 100 and "missed" in out.getvalue()


@pytest.mark.parametrize("sheet", [ROLLOUTS, UPDATES])
def test_nothing_measured_says_not_run_everywhere(sheet: Any) -> None:
    text = markdown({}, sheet)
    assert f"0 met, 0 missed, {len(sheet.rows)} not run." in text and text.count("| not run |") >= len(sheet.rows)


def test_other_groups_are_shown_once_they_are_measured(rollouts: Raw) -> None:
    assert "groups of 8" not in markdown(rollouts, ROLLOUTS)
    name = "groups of 8, prompt 512"
    rollouts |= {name: work(name, plain=[1.0], merged=[2.0])}
    assert "| groups of 8, 512 + 1024, batch 256, merged | 2 tok/s | not run" in markdown(rollouts, ROLLOUTS)


def test_goals_are_those_of_the_project() -> None:
    assert [row.goal for row in ROLLOUTS.rows] == [
        1.9, 1.8, 1.55, 1.5, 2.5, None, 2.0, 2.5, 40, 0.6, 0.6, 1.55, 0.02, 0.02, 0
    ]
    assert [row.goal for row in UPDATES.rows] == [820, 820, 2, 2, 630, 1.9, 3.5, 1.6, 2, 110, 110, 0.02, 0.02]


# ---- commands -------------------------------------------------------------------------------------------------------

TEMPLATE = "vb --dtype {dtype} --kv {kv} --batch {batch} --prompt {prompt} --out {new} --group {group} " \
    "--max-num-seqs {slots} --ragged '{ragged}'"


def test_peers_are_asked_for_the_same_work() -> None:
    by = {p.name: p.command(TEMPLATE) for p in [*ROLLOUTS.pieces, *UPDATES.pieces] if p.script == "peer"}
    assert by["peer ragged"] == (
        "vb --dtype fp8 --kv fp8 --batch 512 --prompt 512 --out 1024 --group 1 --max-num-seqs 256 "
        "--ragged '0.8,2048,16384'"
    )
    assert by[f"peer {GROUPS}"] == (
        "vb --dtype fp8 --kv fp8 --batch 256 --prompt 4096 --out 1024 --group 16 --max-num-seqs 0 --ragged ''"
    )
    assert "--batch 64,64,64,256 --prompt 512 --out 1024 --group 1" in by["peer unique bf16"]
    assert "--batch 64 --prompt 512 --out 4096 --group 8" in by["peer whole bf16"]
    plain = "vb {dtype} {kv} {batch} {prompt} {new}"
    for piece_ in ROLLOUTS.pieces:
        if piece_.name in ("peer ragged", f"peer {GROUPS}"):
            with pytest.raises(SystemExit, match="slots|group"):
                piece_.command(plain)


def test_our_commands_and_their_environment(tmp_path: Path) -> None:
    by = {p.name: p for p in [*ROLLOUTS.pieces, *UPDATES.pieces]}
    assert by[COMPILING].command("")[1:] == [
        str(HERE / "bench_first_run.py"), "--way", "ahead", "--layers=12", "--parts", "rollout"
    ]
    assert by["update that trains"].command("")[2:] == [
        "--one", "--precision=fp8", "--state=fp32-8bit", "--variants", "lean"
    ]
    assert by["foreign compile"].command("")[2:5] == ["--one", "compile", "--rounds=2"]
    old = by["whole bf16 before"]
    assert old.script == BEFORE and old.command("", tmp_path)[1:] == [
        str(tmp_path / "benchmarks" / "bench_step.py"), "--one", "bf16", "--only=whole"
    ]
    assert old.environment(tmp_path, None) == {"PYTHONPATH": str(tmp_path)}
    kernels = by["update"].environment(None, tmp_path)
    assert kernels["TRITON_CACHE_DIR"] == str(tmp_path / "triton") and "PYTHONPATH" not in kernels
    for name in ("unique 64", "ragged", GROUPS):
        assert name in WORKS and by[name].process == "works"


def test_what_is_chosen() -> None:
    every = chosen(ROLLOUTS, None, True, "")
    usual = chosen(ROLLOUTS, None, False, "")
    assert len(every) == len(ROLLOUTS.pieces) > len(usual) and not any(p.optional for p in usual)
    ours, others = (chosen(UPDATES, None, False, side) for side in ("ours", "others"))
    assert {p.name for p in others} == {"foreign liger", "foreign compile", "whole bf16 before", "peer whole bf16"}
    assert len(ours) + len(others) == len(chosen(UPDATES, None, False, ""))
    assert [p.name for p in chosen(ROLLOUTS, ["ragged", "peer unique fp8"], False, "others")] == ["peer unique fp8"]


# ---- running --------------------------------------------------------------------------------------------------------


def works_of(*names: str, seconds: float = 10) -> list[Piece]:
    return [Piece(name, seconds, "bench_workloads.py", "fp8 kv8", process="works") for name in names]


class Works:
    """Stands for `ask` of `bench_workloads.py`: a row and an end for each work; `dies` within one, `fails` in one."""

    def __init__(self, dies: str = "", fails: str = "") -> None:
        self.dies, self.fails = dies, fails
        self.asked: list[list[str]] = []

    def __call__(self, command: list[str], mark: str, env: dict[str, str], say: Any = None) -> Iterator[dict[str, Any]]:
        names = command[command.index("--works") + 1 :]
        self.asked.append(names)
        for name in names:
            yield {"piece": name, "work": "plain", "tokens/s": 1.0}
            if name == self.dies:
                raise RuntimeError("status 9")
            if name == self.fails:
                yield {"piece": name, "error": "OutOfMemoryError", "seconds": 1.0}
            else:
                yield {"piece": name, "work": "bits", "done": True, "seconds": 2.0, "different": 0}


def test_works_share_a_process_and_those_that_are_done_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, pieces = tmp_path / "t.json", works_of("a", "b", "c")
    monkeypatch.setattr(table_run, "ask", asked := Works(dies="b"))
    assert not run(pieces, Runner(path), 1e9)
    assert asked.asked == [["a", "b", "c"]]
    assert {name: held["complete"] for name, held in load(path).items()} == {"a": True, "b": False}
    assert "b; c: FAILED\nstatus 9" in capsys.readouterr().out
    monkeypatch.setattr(table_run, "ask", asked := Works(fails="b"))
    runner = Runner(path, load(path))
    assert not run(pieces, runner, 1e9), "one work failed"
    assert asked.asked == [["b", "c"]] and runner.raw["c"]["complete"] and not runner.raw["b"]["complete"]
    assert "b: FAILED\nOutOfMemoryError" in capsys.readouterr().out
    monkeypatch.setattr(table_run, "ask", asked := Works())
    assert run(pieces, runner, 1e9) and asked.asked == [["b"]] and len(load(path)["b"]["rows"]) == 2


def test_a_process_gets_as_many_works_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_run, "ask", asked := Works())
    pieces = [*works_of("a", "b"), *works_of("c", seconds=10 * START), *works_of("d")]
    assert run(pieces, Runner(tmp_path / "t.json"), START + 25)
    assert asked.asked == [["a", "b"], ["d"]], "a process runs works that follow one another"
    monkeypatch.setattr(table_run, "ask", asked := Works())
    assert run(works_of("e", "f", "g"), Runner(tmp_path / "t.json"), START + 5) and not asked.asked


def fake_peer(tmp_path: Path, tokens: int) -> str:
    """A command that prints what vLLM's benchmark prints."""
    script = tmp_path / "fake_peer.py"
    script.write_text(
        "import json, sys\nprint('loading')\n"
        f"for batch in sys.argv[1].split(','):\n"
        "    print('VBENCH ' + json.dumps({'engine': 'fake-1', 'batch': int(batch), 'prompt': int(sys.argv[2]),"
        f" 'out_tok_s': 100.0 * int(batch), 'seconds': 2.0, 'out_tokens': {tokens}, 'peak_gib': 9.0}}))\n"
    )
    return f"{sys.executable} {script} {{batch}} {{prompt}} {{dtype}} {{kv}} {{group}} {{slots}} '{{ragged}}'"


def test_a_peer_that_prints_rows_is_read_to_the_end(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "t.json", peer=fake_peer(tmp_path, sum(ragged_lengths(512))))
    assert run([p for p in ROLLOUTS.pieces if p.name in ("peer unique bf16", "peer ragged")], runner, 1e9)
    raw = load(runner.path)
    assert [row["batch"] for row in raw["peer unique bf16"]["rows"]] == [64, 64, 64, 256]
    assert look(raw, At("peer unique bf16", "tokens/s", 64)) == 6400.0
    assert look(raw, At("peer ragged", "seconds")) == 2.0


def test_a_peer_with_other_lengths_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (ragged,) = [p for p in ROLLOUTS.pieces if p.name == "peer ragged"]
    assert not measure(ragged, Runner(tmp_path / "t.json", peer=fake_peer(tmp_path, 900_000)))
    assert "the peer drew 900000 tokens; the table of lengths has 902958" in capsys.readouterr().out


def test_compilation_begins_with_an_empty_folder_that_the_others_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, seen = tmp_path / "kernels", []

    def ask(command: Any, mark: str, env: dict[str, str], say: Any = None) -> Iterator[dict[str, Any]]:
        seen.append((env["TRITON_CACHE_DIR"], kernels.exists()))
        kernels.mkdir(exist_ok=True)
        yield {"work": "sum", "seconds": 30.0}

    monkeypatch.setattr(table_run, "ask", ask)
    kernels.mkdir()
    (kernels / "old").touch()
    compiling = Piece(COMPILING, 1, "bench_first_run.py", "ahead", flag="--way")
    assert run([compiling, Piece("x", 1, "x.py", "fp8")], Runner(tmp_path / "t.json", kernels=kernels), 1e9)
    assert seen == [(str(kernels / "triton"), False), (str(kernels / "triton"), True)] and not list(kernels.iterdir())


def test_what_a_piece_needs_and_was_not_given_leaves_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table_run, "ask", lambda *a, **k: pytest.fail("a process was started"))
    pieces = [p for p in UPDATES.pieces if p.name in ("whole bf16 before", "peer whole bf16")]
    assert run(pieces, Runner(tmp_path / "t.json"), 1e9)
    assert "whole bf16 before: no --before, left out\npeer whole bf16: no --peer" in capsys.readouterr().out


def test_results_of_another_file_count_and_the_document_gets_its_table(
    rollouts: Raw, updates: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document, first, second = tmp_path / "P.md", tmp_path / "a.json", tmp_path / "b.json"
    document.write_text("<!-- rollouts:begin -->\nold\n<!-- rollouts:end -->\n")
    first.write_text(json.dumps({"pieces": rollouts}))
    second.write_text(json.dumps({"pieces": updates}))
    monkeypatch.setattr(table, "DOCUMENT", document)
    command = ["table.py", "--table", "rollouts", "--write", "--out", str(first), "--add", str(second)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as end:
        table.main()
    assert end.value.code == 0
    row = "| whole RL step, 64 x 4K, FP8, FP8 cache | 40 s | 66 s (our BF16 of 107d9e3) | **1.65x** |"
    assert row in document.read_text()
    assert set(load(first)) == {*rollouts, "whole fp8 kv8", "whole bf16 before"}, "one file holds what is shown"


def test_an_unknown_piece_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["table.py", "--table", "updates", "--pieces", "ragged"])
    with pytest.raises(SystemExit):
        table.main()
    assert "no pieces ['ragged'] in updates" in capsys.readouterr().err
