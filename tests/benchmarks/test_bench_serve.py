"""`benchmarks/bench_serve.py` and its clients: what they send, count and time, against the real server."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import agents_load
import pytest
from agents_load import Load, times_of

pytest.importorskip("starlette", reason="needs the extra serve")

import bench_serve  # noqa: E402
import http_load  # noqa: E402

from jetrl.serve.service import About  # noqa: E402

pytestmark = pytest.mark.timeout(200)
LOAD = Load(agents=3, turns=2, prompt=5, new=4, vocab=900)


def test_prompts_depend_on_seed_agent_and_turn_alone() -> None:
    said = {LOAD.said(*at) == replace(LOAD, agents=9, turns=7).said(*at) for at in ((0, 0), (2, 1))}
    assert said == {True} and len(LOAD.said(0, 0)) == 5 and min(LOAD.said(0, 0)) >= 300
    assert LOAD.said(0, 0) != LOAD.said(0, 1) != LOAD.said(1, 0) != replace(LOAD, seed=1).said(1, 0)
    assert LOAD.tokens == 24 and LOAD.longest == 18


def test_figures_of_turns() -> None:
    row = times_of([(10.0, 10.5, 12.0), (11.0, 11.1, 13.0), (10.5, 11.5, 14.0)]).row(LOAD)
    assert row["seconds"] == 4.0 and row["tokens/s"] == 6.0
    assert (row["first p50 ms"], row["first p95 ms"]) == (pytest.approx(500), pytest.approx(1000))
    assert row["turn p95 s"] == 3.5


@pytest.fixture(scope="module")
def about(tmp_path_factory: pytest.TempPathFactory) -> About:
    tokenizer = bench_serve.words_tokenizer(tmp_path_factory.mktemp("words"), 1000)
    assert len(tokenizer) == 1000 and all(tokenizer.decode([id]) for id in range(300, 1000))
    return About(bench_serve.MODEL, tokenizer, 1000, 64, "digest", 0)


def test_agents_get_all_tokens_and_a_short_answer_is_an_error(about: About) -> None:
    with bench_serve.over_http(bench_serve.Instant(about, 4), about) as front:
        times = agents_load.run(front.url, bench_serve.MODEL, LOAD, processes=2)
        assert len(times.first) == len(times.whole) == 6
        assert all(0 < first <= whole for first, whole in zip(times.first, times.whole, strict=True))
        assert agents_load.run(front.url, bench_serve.MODEL, replace(LOAD, logprobs=True), 1).seconds > 0
        with pytest.raises(RuntimeError, match="status 1"):
            agents_load.run(front.url, bench_serve.MODEL, replace(LOAD, new=5), processes=1)


def test_requests_are_counted_and_their_answers_checked(about: About, tmp_path: Path) -> None:
    with bench_serve.over_http(bench_serve.Instant(about, 4), about) as front:
        for kind in ("completions", "generate"):
            path, bodies = bench_serve.http_bodies(kind, about.tokenizer, 6, 4, count=3)
            (tmp_path / kind).write_text("\n".join(map(json.dumps, bodies)))
            command = [sys.executable, http_load.__file__, front.url, str(tmp_path / kind), "--path", path,
                       "--seconds=0.3", "--connections=2"]
            row = json.loads(subprocess.check_output([*command, "--expect=4"], text=True))
            assert row["requests"] >= 2 and row["requests/s"] == pytest.approx(row["requests"] / row["seconds"])
        wrong = subprocess.run([*command, "--expect=5"], stderr=subprocess.PIPE, text=True)
        assert wrong.returncode and "4 tokens instead of 5" in wrong.stderr


def test_both_ways_are_compared_by_medians() -> None:
    rows = [
        {"server": server, "agents": 8, "tokens/s": speed, "first p95 ms": 1.0}
        for server, speeds in (("a", (1.0, 9.0, 5.0)), ("b", (10.0, 4.0, 20.0))) for speed in speeds
    ]
    assert "8 agents: a 5 tokens/s, b 10: 0.500 (a: 1 to 9, b: 4 to 20)" in bench_serve.summary(rows, "a", "b")
    assert bench_serve.summary(rows, "a", "c") == ""
