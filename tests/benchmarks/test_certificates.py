"""`benchmarks/certificates.py`: what is kept when it stops, what is measured again, and what its table says."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import certificates
import pytest
import torch
from certificates import Case, expected_seconds, load, markdown

from jetrl import cli
from jetrl.errors import UserError
from jetrl.model.transformer import Transformer
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.rows import LinkResult
from jetrl.precision.recipe import build_recipe
from jetrl.spec import ModelSpec, RopeSpec

FP8_RAGGED: Case = ("qwen3-8b", "fp8", "ragged")
FP8_LONG: Case = ("qwen3-8b", "fp8", "long")


def row(case: Case, different: int = 0, commit: str = "abc") -> dict[str, Any]:
    links = [{"link": name, "rows": 1000, "rows_different": different if name == "b" else 0} for name in "abcd"]
    shape, precision, workload = case
    return {
        "shape": shape, "precision": precision, "workload": workload, "links": links, "bit_equal": different == 0,
        "seconds": 12.3, "peak GiB": 40.2, "vocabulary": 151936, "environment": {"gpu": "G", "commit": commit},
    }


def test_the_table_tells_rows_differences_and_what_was_not_run() -> None:
    lines = markdown([row(FP8_RAGGED), row(FP8_LONG, different=1234)]).splitlines()
    assert "| qwen3-8b | fp8 | ragged | 3,000 x 151,936 | 1,000 | 0 | 12 | 40 |" in lines
    assert "| qwen3-8b | fp8 | long | 3,000 x 151,936 | 1,000 | **1,234** | 12 | 40 |" in lines
    assert sum("not run" in text for text in lines) == 6 * 2 * 2 - 2
    assert "G, commit abc." in lines


def parts_of(case: Case, links: str) -> list[dict[str, Any]]:
    """What a process tells of some links of a case."""
    shape, precision, workload = case
    return [
        {"shape": shape, "precision": precision, "workload": workload, "vocabulary": 151936, "peak GiB": 40.2 + i,
         "environment": {"gpu": "G", "commit": certificates.commit_name()},
         **asdict(LinkResult(name, "", 1000, 0, 0.0, 2.0))}
        for i, name in enumerate(links)
    ]


def test_links_are_kept_when_a_process_dies_and_only_the_missing_ones_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, asked = tmp_path / "certificates.json", []

    def answers(*parts: dict[str, Any], error: str = "") -> None:
        def process(command: list[str], say: Any) -> Iterator[dict[str, Any]]:
            asked.append(json.loads(command[command.index("--one") + 1]))
            say("model made\n")
            yield from parts
            if error:
                raise RuntimeError(error)

        monkeypatch.setattr(certificates, "ask", process)

    cases = [FP8_RAGGED, FP8_LONG]
    answers(*parts_of(FP8_RAGGED, "abcdmvs"), *parts_of(FP8_LONG, "ab"), error="out of memory")
    assert not certificates.run(["qwen3-8b"], cases, path, 1e12)
    assert asked[0] == [[list(FP8_RAGGED), list("abcdmvs")], [list(FP8_LONG), list("abcdmvs")]]
    said = capsys.readouterr().out
    assert "out of memory" in said and "model made" in said and "ragged, link d: 1,000 rows, bit-equal" in said
    (first,) = load(path)
    assert certificates.case_of(first) == FP8_RAGGED and first["bit_equal"] and first["peak GiB"] == 46.2
    assert first["seconds"] == 14.0 and [link["link"] for link in first["links"]] == list("abcdmvs")
    assert [part["link"] for part in load(path, "links")] == ["a", "b"]
    answers(*parts_of(FP8_LONG, "cdmvs"))
    assert certificates.run(["qwen3-8b"], cases, path, 1e12)
    assert asked[1] == [[list(FP8_LONG), list("cdmvs")]]
    assert [certificates.case_of(row) for row in load(path)] == cases and load(path, "links") == []
    assert [link["link"] for link in load(path)[1]["links"]] == list("abcdmvs")
    assert certificates.run(["qwen3-8b"], cases, path, 1e12) and len(asked) == 2
    answers(*parts_of(FP8_LONG, "abcdmvs"))
    assert certificates.run(["qwen3-8b"], [FP8_LONG], path, 1e12, again=True) and len(asked) == 3
    assert [certificates.case_of(row) for row in load(path)] == cases


def test_links_of_another_commit_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "certificates.json", []
    old = [part | {"environment": {"gpu": "G", "commit": "old"}} for part in parts_of(FP8_LONG, "ab")]
    certificates.write_json(path, {"rows": [], "links": old})

    def process(command: list[str], say: Any) -> Iterator[dict[str, Any]]:
        asked.append(json.loads(command[command.index("--one") + 1]))
        yield from parts_of(FP8_LONG, "abcdmvs")

    monkeypatch.setattr(certificates, "ask", process)
    assert certificates.run(["qwen3-8b"], [FP8_LONG], path, 1e12)
    assert asked == [[[list(FP8_LONG), list("abcdmvs")]]] and load(path, "links") == []


def test_nothing_is_begun_that_would_not_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "ask", lambda *_, **__: pytest.fail("a process was started"))
    assert certificates.run(["qwen3-8b"], [FP8_RAGGED], tmp_path / "c.json", 0.0)


def test_expected_seconds_grow_with_the_model_and_fit_in_a_slice_of_device_time() -> None:
    cases = [(m, p, w) for m in certificates.MODELS for p in certificates.PRECISIONS for w in certificates.WORKLOADS]
    assert all(0.5 < expected_seconds(case) < 30 for case in cases)
    assert expected_seconds(("qwen3-8b", "bf16", "long")) > expected_seconds(FP8_LONG)
    assert expected_seconds(FP8_LONG) > 2 * expected_seconds(("qwen3-1.7b", "fp8", "long"))


def test_measure_certifies_each_case_and_reports_what_the_table_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ModelSpec(
        family="qwen3", vocab_size=53, hidden_size=64, intermediate_size=128, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=64, tie_embeddings=True, qkv_bias=False,
        qk_norm=True,
    )

    def tiny(shape: str, precision: Any, device: str, kv_cache: str) -> Transformer:
        recipe = build_recipe(precision, 1, kv_cache=kv_cache or "bf16", head_dim=spec.head_dim)
        return Transformer(spec, recipe).init_random(0)

    work = Workload(4, max_prompt=12, new_tokens=4, chunk=5, page_size=4)
    monkeypatch.setattr(certificates, "WORKLOADS", {"ragged": work, "long": work})
    monkeypatch.setattr(certificates, "random_model", tiny)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    kv8 = ("qwen3-8b", "fp8 kv8", "long")
    cases = [FP8_RAGGED, ("qwen3-8b", "bf16", "long"), kv8]
    certificates.measure([(case, list(certificates.LINKS)) for case in cases], 1e12)
    said = capsys.readouterr().out.splitlines()
    parts = [json.loads(text.removeprefix("BENCH ")) for text in said if text.startswith("BENCH ")]
    rows = [certificates.whole([part for part in parts if certificates.case_of(part) == case]) for case in cases]
    certificate = certify(tiny("", "fp8", "", ""), work, "tiny", lambda text: None)
    assert [link.link for link in certificate.links] == list("abcvsw")
    assert [link["link"] for link in rows[0]["links"]] == list("abcvs")
    assert [certificates.case_of(r) for r in rows] == [FP8_RAGGED, ("qwen3-8b", "bf16", "long"), kv8]
    assert [r["kv_cache"] for r in rows] == ["bf16", "bf16", "e4m3[1x16,pow2]"]
    assert all(r["bit_equal"] and "commit" in r["environment"] for r in rows)
    assert rows[0]["precision"] == "fp8" and "bit-equal" in certificates.line(rows[0])
    assert " x 53 |" in markdown(rows) and "| fp8 kv8 |" in markdown(rows)
    assert "kv8" not in markdown(rows[:2])


def test_certificates_of_ranks_are_asked_for_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command is run here, without its ranks: `tests/test_ranks_commands.py` starts those."""

    def parity(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        words = command[3:]
        assert words[:1] == ["parity"] and command[1:3] == ["-m", "jetrl.cli"]
        for option, value in (("--nproc", "2"), ("--update", "bf16")):
            place = words.index(option)
            assert words[place + 1] == value
            del words[place : place + 2]
        said = io.StringIO()
        with redirect_stdout(said):
            try:
                cli.app(words, standalone_mode=False)
            except SystemExit as end:
                status = end.code
            except UserError:
                status = 2
        return subprocess.CompletedProcess(command, status, said.getvalue())

    monkeypatch.setattr(certificates, "subprocess", SimpleNamespace(run=parity, PIPE=subprocess.PIPE))
    path, sizes = tmp_path / "ranks.json", ["--sequences", "3", "--max-prompt", "12", "--new-tokens", "5"]
    old = {"shape": "", "flow": "fp8", "masters": "bf16"}
    certificates.write_json(path, {"rows": [old | {"ranks": 1}, old | {"ranks": 4}]})
    assert certificates.run_ranks(2, [("", "fp8", "bf16")], path, "cpu", sizes)
    rows = load(path)
    assert [row["ranks"] for row in rows] == [4, 1], "the row of the same case is replaced"
    assert rows[1]["bit_equal"] and "commit" in rows[1]["environment"] and rows[1]["seconds"] > 0
    assert "update with bf16 masters: bit-equal; rows a " in capsys.readouterr().out
    assert not certificates.run_ranks(2, [("none", "fp8", "bf16")], path, "cpu", sizes) and load(path) == rows
    assert "none fp8 bf16: FAILED with status 2" in capsys.readouterr().out


def test_a_certificate_of_ranks_says_what_differs() -> None:
    links = [{"link": "e", "rows": 1200, "rows_different": 0}, {"link": "g", "rows": 7, "rows_different": 3}]
    case = {"shape": "s", "flow": "fp8", "masters": "fp32", "ranks": 2}
    assert certificates.rank_line(case | {"seconds": 9.6, "links": links, "bit_equal": False}) == (
        "s fp8, 2 ranks, update with fp32 masters: NO CERTIFICATE; rows e 1,200, g 7 (3 DIFFERENT); 10 s"
    )
