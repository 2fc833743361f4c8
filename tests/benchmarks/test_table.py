"""`benchmarks/table.py` with made-up measurements: ratios, verdicts, what is missing, resuming, the document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import table
import table_run
from rich.console import Console
from table_pieces import GOALS as PIECES
from table_pieces import HERE, Piece
from table_rows import GOALS as ROWS
from table_rows import At, Raw, Row, look, pieces_of, read
from table_run import Runner, load, measure, run
from table_show import SHEETS, markdown, notes, show

ENV = {"gpu": "G", "torch": "2.11", "commit": "abc", "date": "2026-01-02T03:04:05+00:00"}


def piece(*rows: dict[str, Any], complete: bool = True) -> dict[str, Any]:
    return {"complete": complete, "seconds": 1.0, "rows": [{"environment": ENV} | row for row in rows]}


def rollout(rates: dict[int, float], floor: float) -> dict[str, Any]:
    keys = ("tokens/s", "share of floor", "peak GiB")
    return piece(*({"batch": b, **dict(zip(keys, (rate, floor, 36.4), strict=True))} for b, rate in rates.items()))


def step(update: float, logprob: float, publish: float, mfu: float) -> dict[str, Any]:
    peaks = {f"{name} peak GiB": 100.0 for name in ("update", "logprob", "publish")}
    return piece({"update_ms": update, "logprob_ms": logprob, "publish_ms": publish, "MFU": mfu, **peaks})


def whole(seconds: float) -> dict[str, Any]:
    return piece({"whole_s": seconds, "whole peak GiB": 127.0})


@pytest.fixture
def raw() -> Raw:
    peer = rollout({64: 7000.0, 256: 11000.0}, 0.6)
    peer["rows"] = [{"engine": "peer bf16", "peer": "vllm-0.24.0"} | row for row in peer["rows"]]
    return {
        "rollout fp8": rollout({64: 10500.0, 256: 11000.0}, 0.8), "peer rollout bf16": peer,
        "rollout bf16": rollout({64: 7700.0, 256: 11001.0}, 0.7),
        "update fp8": step(2000.0, 600.0, 8.25, 0.9), "update bf16": step(3000.0, 1000.0, 2.0, 0.49),
        "whole fp8": whole(70.0), "whole bf16": whole(91.0), "whole fp8 nonexact": whole(69.0),
        "update fp8 nonexact": step(1900.0, 1.0, 1.0, 1.0),
    }


def reading(raw: Raw, what: str) -> tuple[str, bool | None]:
    (row,) = [row for row in ROWS if row.what == what]
    found = read(raw, row)
    return found.cells()[3], found.met


@pytest.mark.parametrize(
    ("what", "result", "met"),
    [
        ("rollout, batch 64, FP8", "1.50x", True),  # a goal that is just reached is met
        ("rollout, batch 256, FP8", "1.00x", False),
        ("rollout, batch 64, BF16", "1.10x", True),
        ("rollout, batch 256, BF16", "1.00x", False),
        ("rollout, batch 64, prompt 8192 + 512", "not run", None),
        ("actor update, FP8", "1.50x", True),
        ("BF16 update, share of 785 TFLOP/s", "49%", False),
        ("reference log-probs, FP8", "1.67x", False),
        ("whole RL step, 4K new tokens, FP8", "1.30x", False),
        ("cost of exactness, whole step, FP8", "+1.4%", True),
        ("cost of exactness, update, FP8", "+5.3%", False),
        ("cost of exactness, update, BF16", "not run", None),  # only its half is there
        ("publishing after an update, FP8", "8.2 ms", True),
        ("decode step of the floor, batch 64, FP8", "80%", True),
        ("decode step of the floor, batch 64, BF16", "70%", False),
    ],
)
def test_results_and_verdicts(raw: Raw, what: str, result: str, met: bool | None) -> None:
    assert reading(raw, what) == (result, met)


def test_goals_are_those_of_the_project() -> None:
    goals = {row.what: row.goal for row in ROWS}
    with_fp8_cache = {what: goals.pop(what) for what in list(goals) if "FP8 cache" in what}
    assert list(with_fp8_cache.values()) == [1.5, 1.35, 1.1, 1.4]
    assert list(goals.values()) == [1.5, 1.35, 1.1, 1.1, 1.1, 1.5, 0.5, 1.7, 1.4, 0.02, 0.02, 0.02, 30, 0.75, 0.75]
    assert len(goals) + len(with_fp8_cache) == len(ROWS)


def test_nothing_measured_gives_no_value_anywhere() -> None:
    text = markdown({})
    assert f"0 met, 0 missed, {len(ROWS)} not run." in text
    for line in text.splitlines()[2 : 2 + len(ROWS)]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1] == cells[3] == "not run" and cells[5] == cells[6] == "", line


def test_the_markdown_holds_figures_verdicts_and_where_they_come_from(raw: Raw) -> None:
    text = markdown(raw)
    assert (
        "| rollout, batch 64, FP8 | 10,500 tok/s | 7,000 tok/s (vLLM BF16) | **1.50x** | ≥ 1.5x | met | 36 |"
    ) in text
    assert "| actor update, FP8 | 2,000 ms | 3,000 ms (our BF16) | **1.50x** | ≥ 1.5x | met | 100 |" in text
    assert "| decode step of the floor, batch 64, FP8 | 80% |  | **80%** | ≥ 75% | met | 36 |" in text
    assert "6 met, 7 missed, 6 not run." in text
    assert "G, torch 2.11; compared with: vllm-0.24.0." in text
    assert "Commit abc." in text and "Not one state" not in text


def test_pieces_of_different_commits_are_told(raw: Raw) -> None:
    raw["whole fp8"]["rows"][0]["environment"] = ENV | {"commit": "def"}
    assert "Commit abc, def. **Not one state of the code.**" in notes(raw)


def test_a_missing_batch_size_is_not_another_one(raw: Raw) -> None:
    raw["rollout fp8"]["rows"] = raw["rollout fp8"]["rows"][1:]  # 64 is gone
    assert reading(raw, "rollout, batch 64, FP8") == ("not run", None)
    assert reading(raw, "rollout, batch 256, FP8") == ("1.00x", False)


def test_a_figure_that_our_own_row_lacks_is_a_mistake_but_a_peers_is_not(raw: Raw) -> None:
    with pytest.raises(KeyError):
        look(raw, At("rollout fp8", "tokens", 64))
    assert look(raw, At("peer rollout bf16", "tokens", 64)) is None


@pytest.mark.parametrize("name", SHEETS)
def test_the_tables_name_only_pieces_that_exist(name: str) -> None:
    sheet = SHEETS[name]
    names = {p.name for p in sheet.pieces}
    assert len(names) == len(sheet.pieces)
    elsewhere = {p.name for p in SHEETS["updates"].pieces} if name == "rollouts" else set()  # by --add
    for row in [*sheet.rows, *sheet.extra]:
        assert pieces_of(row) <= names | elsewhere, row.what


def test_the_console_table_fits_80_columns(raw: Raw) -> None:
    out = StringIO()
    show(raw, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("│missed" in line for line in lines) == 7 and any("1.50x" in line for line in lines)


# ---- running --------------------------------------------------------------------------------------------------------


def test_commands_of_ours_and_of_the_peer() -> None:
    by = {p.name: p for p in PIECES}
    assert by["rollout fp8"].command("")[1:] == [  # type: ignore[index]
        str(HERE / "bench_rollout.py"), "--one", "fp8", "--batch", "64", "256", "--prompt=512", "--new=1024",
    ]
    assert by["whole fp8 nonexact"].command("")[2:] == ["--one", "fp8 nonexact", "--only=whole"]
    assert by["update bf16"].command("")[2:] == ["--one", "bf16", "--only=update"]
    filled = by["peer long fp8"].command("vb --dtype {dtype} --batch {batch} --prompt {prompt} --out {new}")
    assert filled == "vb --dtype fp8 --batch 64 --prompt 8192 --out 512"


class Asked:
    """Stands for `ask`: two rows a piece, and a failure after the first row of the pieces in `dies`."""

    def __init__(self, dies: set[str]) -> None:
        self.dies, self.names = dies, []

    def __call__(
        self, command: list[str] | str, mark: str, env: dict[str, str], say: Any = None
    ) -> Iterator[dict[str, Any]]:
        name = command if isinstance(command, str) else command[3]
        self.names.append(name)
        yield {"batch": 64, "out_tok_s": 5.0, "engine": "e-1"}
        if name in self.dies:
            raise RuntimeError("status 9")
        yield {"batch": 256, "out_tok_s": 6.0, "engine": "e-1"}


def test_a_failure_keeps_rows_and_a_second_call_measures_what_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    pieces = [Piece("one", 1, "x.py", "one"), Piece("two", 1, "x.py", "two"), Piece("p", 1, "peer", "bf16")]
    monkeypatch.setattr(table_run, "ask", asked := Asked({"two"}))
    assert not run(pieces, Runner(path, peer="peer {dtype}"), 1e9)
    assert asked.names == ["one", "two", "peer bf16"], "one failure does not stop the others"
    held = load(path)
    assert {name: (h["complete"], len(h["rows"])) for name, h in held.items()} == {
        "one": (True, 2), "two": (False, 1), "p": (True, 2)
    }
    assert held["p"]["rows"][0]["peer"] == "e-1" and held["p"]["rows"][0]["tokens/s"] == 5.0
    assert "two: FAILED\nstatus 9" in capsys.readouterr().out
    monkeypatch.setattr(table_run, "ask", asked := Asked(set()))
    assert run(pieces, Runner(path, held, "peer {dtype}"), 1e9)
    assert asked.names == ["two"] and len(load(path)["two"]["rows"]) == 2


def test_rows_are_in_the_file_while_the_piece_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"

    def ask(command: Any, mark: str, env: dict[str, str], say: Any = None) -> Iterator[dict[str, Any]]:
        yield {"batch": 64}
        assert [row["batch"] for row in json.loads(path.read_text())["pieces"]["one"]["rows"]] == [64]
        yield {"batch": 256}

    monkeypatch.setattr(table_run, "ask", ask)
    assert measure(Piece("one", 1, "x.py", "one"), Runner(path))


def test_the_budget_and_a_missing_peer_leave_pieces_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [Piece("long", 100, "x.py", "long"), Piece("short", 10, "x.py", "short"), Piece("p", 1, "peer", "bf16")]
    monkeypatch.setattr(table_run, "ask", asked := Asked(set()))
    assert run(pieces, Runner(tmp_path / "t.json"), 50)
    assert asked.names == ["short"]


def test_only_the_table_of_the_document_is_replaced(
    raw: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document, results = tmp_path / "P.md", tmp_path / "t.json"
    document.write_text("above\n<!-- table:begin -->\nold\n<!-- table:end -->\nbelow\n")
    results.write_text(json.dumps({"pieces": raw}))
    monkeypatch.setattr(table, "DOCUMENT", document)
    monkeypatch.setattr("sys.argv", ["table.py", "--write", "--out", str(results)])
    with pytest.raises(SystemExit) as end:
        table.main()
    assert end.value.code == 0 and "missed" in capsys.readouterr().out
    text = document.read_text()
    assert text.startswith("above\n<!-- table:begin -->\n|") and text.endswith("<!-- table:end -->\nbelow\n")
    assert "old" not in text and markdown(raw) in text


def test_a_row_of_each_kind_reads_its_own_figures() -> None:
    raw = {"a": piece({"x": 10.0, "peak": 1.0}), "b": piece({"x": 8.0})}
    results = {}
    for how in ("rate", "time", "cost", "share", "below", "above"):
        results[how] = read(raw, Row("w", At("a", "x"), At("b", "x"), "b", how, 1.0, "s", "peak")).result
    assert results == {"rate": 1.25, "time": 0.8, "cost": 0.25, "share": 10.0, "below": 10.0, "above": 10.0}
