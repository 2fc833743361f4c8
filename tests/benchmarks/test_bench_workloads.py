"""`benchmarks/bench_workloads.py`: one table of lengths, who shares a prompt, and switches that change no bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import bench_workloads
import pytest
import torch
from bench_rollout import DecodeClock, floor_ms
from bench_workloads import WORKS, Work, lengths_of, make_engine, measure, measured_works, ragged_lengths, requests_of

from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe
from jetrl.spec import ModelSpec, RopeSpec


@pytest.fixture(scope="module")
def model() -> Transformer:
    spec = ModelSpec(
        family="qwen3", vocab_size=97, hidden_size=64, intermediate_size=128, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=512, tie_embeddings=True, qkv_bias=False,
        qk_norm=True,
    )
    return Transformer(spec, build_recipe("bf16", 1)).init_random(0).publish()


def test_the_table_of_lengths_is_that_of_the_recorded_runs() -> None:
    lengths = ragged_lengths(512)
    assert (len(lengths), sum(lengths), max(lengths), min(lengths) >= 16) == (512, 902_958, 11_318, True)
    assert ragged_lengths(100) == lengths[:100] and max(ragged_lengths(512, cap=100)) == 100


def test_groups_share_prompts_and_others_are_known_by_their_first_token() -> None:
    group = requests_of(Work(6, 6, 10, 4, group=3), 50)
    assert [r.tokens for r in group[:3]] == [group[0].tokens] * 3 and group[3].tokens != group[0].tokens
    assert [r.id for r in group] == list(range(6))
    alone = requests_of(replace(WORKS["ragged"], prompt=8), 1000)
    assert [r.tokens[0] for r in alone] == [i + 1 for i in range(512)] and all(len(r.tokens) == 8 for r in alone)
    assert [r.sampling.max_tokens for r in alone] == lengths_of(WORKS["ragged"]) == ragged_lengths(512)


def test_the_warm_up_of_ragged_lengths_has_every_batch_size_and_ends_with_few_long_sequences() -> None:
    warm = bench_workloads.warm_requests(WORKS["ragged"])
    ends = sorted(r.sampling.max_tokens for r in warm)
    assert len(warm) == 256 == len(set(ends)), "they end one after the other"
    longest = sorted(warm, key=lambda r: r.sampling.max_tokens)[-4:]
    assert [len(r.tokens) for r in longest] == [1500, 3000, 6000, 10000]
    short = bench_workloads.warm_requests(WORKS["unique 64"])
    assert {r.sampling.max_tokens for r in short} == {24} and len(short) == 64


def test_switches_change_no_bit_and_rows_tell_what_they_did(model: Transformer) -> None:
    work = Work(5, 3, 9, 12, switches=("plain", "drafts", "never"), rounds=2)
    rows = list(measure(model, work, "bf16", page_size=16))
    assert [(r["work"], r["round"]) for r in rows] == [(s, i) for i in range(2) for s in work.switches]
    assert all(r["different"] == 0 and r["compared"] == 5 and r["tokens"] == 60 for r in rows)
    assert all(r["tokens/s"] == pytest.approx(60 / r["seconds"]) and r["warm_s"] > 0 for r in rows)
    assert "tokens_per_decode_step" in rows[1] and "tokens_per_decode_step" not in rows[0]


def test_forced_drafts_hold_as_often_as_asked(model: Transformer) -> None:
    work = Work(4, 4, 9, 200, switches=("plain", "drafts"))
    plain, row = measure(model, work, "bf16", page_size=16)
    assert (plain["different"], row["different"]) == (0, 0)
    # with 7 drafts of which each holds with 0.6 after those before it, 1.46 of 7; with 3, 1.18 of 3; with 1, 0.6
    assert 0.18 < row["draft_acceptance"] < 0.65 and 1.4 < row["tokens_per_decode_step"] < 2.8


def test_merged_prefixes_are_asked_for_and_groups_compared(model: Transformer) -> None:
    work = Work(4, 4, 33, 6, group=2, switches=("plain", "merged"))
    assert make_engine(model, work, "merged").settings.merge_prefix == "on"
    assert make_engine(model, work, "plain").settings.merge_prefix == "off"
    assert [(r["work"], r["different"]) for r in measure(model, work, "bf16", 16)] == [("plain", 0), ("merged", 0)]


def test_kernels_are_compiled_ahead_for_all_works_together() -> None:
    config = bench_workloads.config_of(list(WORKS.values()), "fp8 kv8")
    r = config.rollout
    assert (r.max_num_seqs, r.group_size, r.page_size, r.max_tokens_per_step) == (256, 16, 128, 8192)
    assert (r.merge_prefix, r.speculate, r.max_draft_tokens, config.quant.kv_cache) == ("on", "auto", 7, "fp8")
    assert config.task.max_prompt_length + r.max_response_length >= 32640 + 256
    few = bench_workloads.config_of([WORKS["unique 256"]], "bf16")
    assert (few.precision, few.rollout.merge_prefix, few.rollout.speculate) == ("bf16", "off", "off")


def test_other_bits_are_counted(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    true, calls = bench_workloads.rollout, []

    def spoilt(engine: Any, asked: Any, clock: Any) -> Any:
        done, seconds, peak = true(engine, asked, clock)
        calls.append(len(asked))
        if len(calls) == 4:  # two warm-ups, plain, then never
            done[1] = replace(done[1], logprobs=[*done[1].logprobs[:-1].tolist(), -0.5])
        return done, seconds, peak

    monkeypatch.setattr(bench_workloads, "rollout", spoilt)
    rows = list(measure(model, Work(3, 3, 5, 4, switches=("plain", "never")), "bf16", 16))
    assert [r["different"] for r in rows] == [0, 1]


def test_a_work_that_fails_is_told_and_the_others_go_on(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Work(3, 3, 5, 4, switches=("plain", "never"))
    monkeypatch.setattr(bench_workloads, "WORKS", {"too long": replace(small, new=5000), "good": small})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    rows = list(measured_works(model, ["too long", "good"], "bf16"))
    assert [r["piece"] for r in rows] == ["too long", "good", "good", "good"]
    assert "error" in rows[0] and "done" not in rows[0]
    assert (rows[-1]["done"], rows[-1]["work"], rows[-1]["different"], rows[-1]["compared"]) == (True, "bits", 0, 3)


def test_the_floor_is_of_the_read_rate_and_only_where_nothing_is_shared(model: Transformer) -> None:
    clock = DecodeClock(2, 10)
    for generated, milliseconds in ((2, 9.0), (4, 3.0), (6, 3.0)):
        clock.look(generated, milliseconds)
    work = Work(2, 2, 10, 3)
    found = bench_workloads.decode_figures(model, work, "fp8 kv8", clock)
    assert found["step_ms"] == 3.0 and found["context"] == pytest.approx(11.5)
    want = floor_ms("fp8", 2, 11.5, 1, "fp8") * 4.29 / 4.47
    assert found["floor_ms"] == pytest.approx(want) and found["share of floor"] == pytest.approx(want / 3.0)
    assert bench_workloads.decode_figures(model, replace(work, group=2), "fp8 kv8", clock) == {}
