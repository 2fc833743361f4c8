"""The gap by depth: zero in unified flows, and a fault of long contexts shows from its depth on; picture and files."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from cpu_ops import owners
from test_cli import Cli, jetrl  # noqa: F401 (a fixture)

from jetrl.errors import UserError
from jetrl.kernels.dispatch import load_backend
from jetrl.parity import depth, depth_command
from jetrl.parity.depth import DepthResult, DepthWork, Gaps, _message, depths_of, measure_depth, own_engine
from jetrl.parity.depth_picture import depth_lines, depth_svg
from jetrl.parity.model_under_test import Subject, subject_of


def quiet(text: str) -> None:
    return


def subject(precision: str = "fp8", kv_cache: str = "") -> Subject:
    return subject_of("", precision, "cpu", kv_cache)


@pytest.mark.parametrize(
    ("size", "turns", "expected"),
    [(32768, 4, [8, 128, 2048, 32768]), (24, 3, [8, 14, 24]), (40, 9, [8, 12, 16, 20, 24, 28, 32, 36, 40])],
)
def test_turns_grow_by_a_factor(size: int, turns: int, expected: list[int]) -> None:
    assert DepthWork(size, turns).ends() == expected
    ends = DepthWork(32768, 20).ends()
    assert len(ends) == 20 and ends[-1] == 32768 and all(4 <= b - a for a, b in zip(ends, ends[1:], strict=False))


def test_messages_end_in_a_passage_from_before() -> None:
    g, history = np.random.default_rng(0), list(range(1000, 1050))
    said, back = _message(history, 40, 1, 64, g)
    assert len(said) == 40 and said[-16:] == history[:16] and back == 50 + 40 - 16, "odd turns look at the beginning"
    for turn in (2, 4, 6):
        said, back = _message(history, 20, turn, 64, g)
        assert back is not None
        place = 50 + 20 - back - 10
        assert said[-10:] == history[place : place + 10] and all(token < 64 for token in said[:-10])
    assert _message([], 4, 0, 64, g)[1] is None


@pytest.mark.parametrize(("precision", "kv_cache"), [("fp8", "fp8"), ("bf16", "bf16")])
def test_the_gap_is_zero_at_every_depth(precision: str, kv_cache: str) -> None:
    work = DepthWork(200, 8)
    (found,) = depths_of(subject(precision, kv_cache), work, "", quiet)
    assert found.bit_equal and [gaps.turn for gaps in found.turns] == list(range(1, 9))
    grown = np.diff([0, *work.ends()])
    assert [gaps.tokens for gaps in found.turns] == [2 * min(64, g // 2) for g in grown.tolist()]
    assert sum(gaps.tokens for gaps in found.positions) == sum(gaps.tokens for gaps in found.turns)
    assert found.positions[-1].end == 256 and all(gaps.largest == gaps.mean == 0.0 for gaps in found.turns)
    assert found.turns[0].looks_back is None and found.turns[7].looks_back is not None
    assert found.turns[7].looks_back > 130


def test_a_fault_of_long_contexts_shows_from_its_depth_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of more than 100 tokens read another page in place of their first."""
    right = load_backend("reference").attend_cached

    def lost(q: Any, plan: Any, layer: int, scale: float) -> Any:
        table = plan.block_table.clone()
        for row, length in enumerate(plan.kv_lengths.tolist()):
            table[row, 0] = table[row, 1] if length > 100 else table[row, 0]
        return right(q, replace(plan, block_table=table), layer, scale)

    for owner in owners("attend_cached"):
        monkeypatch.setattr(owner, "attend_cached", lost)
    (found,) = depths_of(subject("bf16"), DepthWork(256, 10), "", quiet)
    ends = DepthWork(256, 10).ends()
    wrong = [gaps.different > 0 for gaps in found.turns]
    assert wrong == [end > 102 for end in ends] and any(wrong) and not all(wrong) and not found.bit_equal
    assert [gaps.different > 0 for gaps in found.positions] == [gaps.end > 102 for gaps in found.positions]
    assert found.turns[-1].mean > 1e-4


def test_another_flow_has_a_gap_at_every_depth_and_any_engine_is_measured() -> None:
    one = subject("fp8_rollout")
    model, work = one.published(), DepthWork(64, 5)
    found = measure_depth(model, own_engine(model, work, "mine"), work, one.name, "another", "mine", quiet)
    assert found.engine == "another" and found.precision == "fp8_rollout" and not found.bit_equal
    assert all(gaps.different == gaps.tokens and 0 < gaps.mean <= gaps.largest < 1 for gaps in found.turns)


def result(engine: str, gap: float) -> DepthResult:
    gaps = [Gaps(2**n, 2 ** (n + 1), 10, 10 * (gap > 0), gap, 2 * gap) for n in range(3, 15)]
    turns = [Gaps(n, n + 1, 4, 4 * (gap > 0), gap, 2 * gap, n, None if n == 1 else 7 * n) for n in range(1, 21)]
    return DepthResult(engine, "a < b", "fp8", "bf16", "cpu", 32768, 2, tuple(gaps), tuple(turns))


def test_the_picture_has_a_point_for_each_span_and_its_numbers_at_hand() -> None:
    tree = ElementTree.fromstring(depth_svg([result("jetrl", 0.0), result("vLLM", 0.013)]))
    texts = [e.text for e in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert "jetrl: 0 everywhere" in texts and "vLLM: largest 0.026" in texts and "32,768" in texts and "20" in texts
    assert any("a < b" in (text or "") for text in texts)
    dots = [e for e in tree.iter("{http://www.w3.org/2000/svg}circle") if e.find("*") is not None]
    assert len(dots) == 32 + 2 * 32, "of the engine with a gap the largest ones, too"
    foot = {float(e.get("cy", "nan")) for e in dots if e.get("fill") == "#0063a6"}
    assert len(foot) == 2, "an exact zero lies at the foot of each panel"
    assert all(float(e.get("cy", "nan")) not in foot for e in dots if e.get("stroke") == "#b05a00")
    lines = list(depth_lines(result("vLLM", 0.013)))
    assert lines[0] == "vLLM: NOT ZERO" and "8 to 15" in lines[2] and "0.013" in lines[2] and len(lines) == 3 + 12 + 20


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--depth", 40, "--turns", 20), "--depth 40 with --turns 20: give at least 2 turns, and from 84 tokens"),
        (("--depth", 4096), "to the model's 512 positions"), (("--depth", 64, "--turns", 1), "at least 2 turns"),
        (("--turns", 4), "are for --depth"), (("--svg", "a.svg"), "are for --depth"),
        (("--depth", 64, "--nproc", 2), "without --nproc"), (("--depth", 64, "--svg", "a.png"), "ends in .svg"),
        (("--depth", 64, "--svg", "no/a.svg"), "there is no folder"),
        (("--depth", 64, "--turns", 4, "--beside", "sglang"), "--beside sglang: only vllm"),
        (("--depth", 64, "--turns", 4, "--beside", "vllm", "--kv-cache", "fp8"), "Give --kv-cache bf16"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(jetrl: Cli, arguments: tuple[Any, ...], expected: str) -> None:  # noqa: F811
    status, _, err = jetrl("parity", *arguments)
    assert status == 2 and expected in " ".join(err.split()), err


def test_vllm_that_is_not_there_is_said_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(Subject, "published", lambda self: pytest.fail("built"))
    with pytest.raises(UserError, match="vLLM is not installed"):
        depths_of(subject("bf16"), DepthWork(64, 4), "vllm", quiet)


def test_an_engine_beside_is_measured_on_the_same_model_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for vLLM: our engine with log-probs that are off, built from the config that vLLM would get."""
    closed: list[bool] = []
    work = DepthWork(64, 4)

    def build(config: Any, model: Any, tokenizer: Any, base: Any, *rest: Any) -> Any:
        assert config.rollout.engine == "vllm" and config.longest == 64
        engine = own_engine(model, work, found_digest())
        collect = engine.collect
        engine.collect = lambda: [  # type: ignore[method-assign]
            replace(c, logprobs=c.logprobs - np.float32(0.25)) for c in collect()
        ]
        engine.close = lambda: closed.append(True)  # type: ignore[attr-defined]
        return engine

    one = subject()
    found_digest = lambda: depth.flow_digest(one.spec, one.recipe)  # noqa: E731
    monkeypatch.setattr(depth, "require_engine", lambda *args: None)
    monkeypatch.setattr(depth, "build_engine", build)
    own, other = depths_of(one, work, "vllm", quiet)
    assert own.bit_equal and (own.engine, other.engine) == ("jetrl", "vLLM") and closed == [True]
    assert all(gaps.mean == pytest.approx(0.25, abs=1e-6) for gaps in other.turns)


def test_the_command_draws_and_its_status_is_the_verdict(jetrl: Cli, tmp_path: Path) -> None:  # noqa: F811
    sizes = ("--depth", 48, "--turns", 4)
    status, out, err = jetrl("parity", *sizes)
    assert status == 0 and "zero at every depth" in out, err
    (held,) = json.loads((tmp_path / "parity-depth.json").read_text())
    assert held["bit_equal"] and held["depth"] == 48 and len(held["turns"]) == 4
    assert ElementTree.parse(tmp_path / "parity-depth.svg").getroot().tag.endswith("svg")
    status, out, _ = jetrl("parity", *sizes, "--precision", "fp8_rollout", "--json", "--svg", "b.svg")
    (printed,) = json.loads(out)
    assert status == 1 and not printed["bit_equal"] and json.loads((tmp_path / "b.json").read_text()) == [printed]
    assert depth_command._PICTURE == Path("parity-depth.svg")
