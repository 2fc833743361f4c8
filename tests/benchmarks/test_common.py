"""`benchmarks/common.py`: processes that report rows, text between markers, files written whole."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import common
import pytest
from bench_step import repeated
from bench_update import shown

TEXT = "head\n<!-- table:begin -->\nold\n<!-- table:end -->\ntail\n"


def test_rows_come_as_they_are_printed_and_a_failure_tells_the_end_of_the_output() -> None:
    code = "import sys; print('noise'); print('BENCH {\"a\": 1}'); print('why', file=sys.stderr); sys.exit(3)"
    rows = common.ask([sys.executable, "-c", code])
    assert next(rows) == {"a": 1}
    with pytest.raises(RuntimeError, match="status 3 after 1 rows\nnoise\nwhy"):
        next(rows)


def test_a_process_without_a_row_is_a_failure() -> None:
    with pytest.raises(RuntimeError, match="status 0 after 0 rows"):
        list(common.ask("echo nothing"))


def test_other_marks() -> None:
    assert list(common.ask("echo 'VBENCH {\"a\": 2}'; echo 'BENCH {\"a\": 1}'", "VBENCH ")) == [{"a": 2}]


def test_who_stops_asking_stops_the_process() -> None:
    code = "import os, time; print('BENCH ' + str(os.getpid()), flush=True); time.sleep(60)"
    rows = common.ask([sys.executable, "-c", code])
    pid = next(rows)
    rows.close()  # type: ignore[attr-defined]
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_and_its_children_end_at_the_limit() -> None:
    command = "echo 'BENCH {\"pid\": '$$'}'; sleep 60; echo never"
    rows = common.ask(command, limit=0.5)
    pid = next(rows)["pid"]
    with pytest.raises(RuntimeError, match="status -9 after 1 rows \\(its limit is 0.5 s\\)"):
        next(rows)
    assert not Path(f"/proc/{pid}").exists()


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    new = common.between_markers(TEXT, "table", "| new |\n")
    assert new == "head\n<!-- table:begin -->\n| new |\n<!-- table:end -->\ntail\n"
    assert common.between_markers(new, "table", "| new |") == new


@pytest.mark.parametrize("text", [TEXT.replace("<!-- table:end -->", ""), TEXT + TEXT, "nothing"])
def test_markers_that_are_not_there_once_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="table:begin"):
        common.between_markers(text, "table", "new")


def test_the_commit_says_whether_the_checkout_has_changes(tmp_path: Path) -> None:
    def git(*args: str) -> None:
        who = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", *who, "-C", str(tmp_path), *args], check=True, capture_output=True)

    package = tmp_path / "package"
    package.mkdir()
    assert common.commit_name(package) == "unknown"
    git("init", "-q")
    (package / "a").write_text("1")
    git("add", "-A")
    git("commit", "-qm", "first")
    clean = common.commit_name(package)
    assert len(clean) == 10 and clean.isalnum()
    (package / "a").write_text("2")
    assert common.commit_name(package) == f"{clean}+changes"


def test_json_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    common.write_json(path, {"a": [1.5]})
    with pytest.raises(TypeError):
        common.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": [1.5]}


@pytest.mark.parametrize(
    ("variant", "parts"),
    [("fp8", ("fp8", "", "")), ("fp8 kv8", ("fp8", "fp8", "")), ("bf16 nonexact", ("bf16", "", "nonexact")),
     ("fp8 kv8 nondet", ("fp8", "fp8", "nondet")), ("fp8 nondet kv8", ("fp8", "", "nondet kv8"))],
)
def test_parts_of_a_variant(variant: str, parts: tuple[str, str, str]) -> None:
    assert common.split_variant(variant) == parts


def test_a_call_is_timed_and_variables_reach_the_process() -> None:
    milliseconds, peak = common.timed(lambda: time.sleep(0.02))
    assert 20 <= milliseconds < 2000 and peak == 0.0
    command = "echo 'BENCH {\"v\": \"'$JETRL_TEST_VARIABLE'\"}'"
    assert list(common.ask(command, env={"JETRL_TEST_VARIABLE": "here"})) == [{"v": "here"}]


def test_repeated_calls_leave_out_the_first() -> None:
    seconds = iter((0.2, 0.0, 0.01, 0.0))
    milliseconds, peak = repeated(lambda: time.sleep(next(seconds)), 3)
    assert milliseconds < 100 and peak == 0.0 and next(seconds, None) is None


def test_medians_of_updates_and_what_did_not_fit() -> None:
    rows = [{"variant": "new", "update_ms": x, "TFLOP/s": 1e6 / x, "peak GiB": 9.0} for x in (100.0, 110.0, 102.0)]
    rows += [{"variant": "old", "error": "no memory"}]
    rows += [{"variant": "reference pass", "logprob_ms": 7.0, "peak GiB": 1.0}]
    args = argparse.Namespace(variants=["new", "old"], state="bf16", precision="fp8")
    new, old, reference = shown(rows, args)
    assert new["update_ms"] == 102.0 and new["spread %"] == pytest.approx(10.0) and not new["error"]
    assert old["error"] == "no memory" and "update_ms" not in old and reference["logprob_ms"] == 7.0
