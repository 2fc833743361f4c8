"""`benchmarks/bench_rollout.py`: which steps count as decoding, their context, and the peer's rows and command."""

from __future__ import annotations

from types import SimpleNamespace

import bench_rollout
import pytest
from bench_rollout import DecodeClock, floor_ms, peer_command, peer_row


def test_only_steps_in_which_all_decode_and_none_computes_its_prompt_count() -> None:
    clock = DecodeClock(batch=4, prompt=100)
    clock.look(2, 50.0)  # two prompts done
    clock.look(6, 40.0)  # all draw, but two of them at the end of their prompts
    clock.look(10, 5.0)  # one step
    clock.look(10 + 4 * 8, 48.0)  # a burst of eight
    clock.look(10 + 4 * 8 + 3, 4.0)  # one has ended
    assert clock.steps == [5.0, 6.0]
    assert clock.step_ms == pytest.approx(53 / 9)
    # after 6 tokens of 4 sequences 101.5 keys on average, after 10 of them 102.5 to 109.5
    assert clock.context == pytest.approx((101.5 + sum(102.5 + i for i in range(8))) / 9)


def test_the_floor_reads_weights_and_cache_once() -> None:
    none = floor_ms("bf16", 64, 0)
    assert none == pytest.approx((36 * 192.9e6 * 2 + 2 * 622e6) / 4.29e9, rel=0.01)
    assert floor_ms("fp8", 64, 0) == pytest.approx((36 * 192.9e6 + 2 * 622e6) / 4.29e9, rel=0.01)
    assert floor_ms("bf16", 64, 1024) - none == pytest.approx(64 * 1024 * 147456 / 4.29e9)
    half = floor_ms("fp8", 64, 1024, kv_cache="fp8") - floor_ms("fp8", 64, 0)  # codes and a scale for each head
    assert half == pytest.approx(64 * 1024 * 147456 * 130 / 256 / 4.29e9)
    assert floor_ms("fp8", 64, 0, layers=0) == pytest.approx(2 * 622e6 / 4.29e9, rel=0.01)


def test_a_peers_row_keeps_its_version_and_gets_our_names() -> None:
    row = peer_row({
        "engine": "vllm-0.24.0", "batch": 64, "prompt": 512, "out": 1024, "layers": 36, "out_tok_s": 7000.0,
        "decode_tok_s": 8000.0, "peak_gib": 127.0,
    }, "bf16")
    assert (row["engine"], row["peer"], row["tokens/s"], row["peak GiB"]) == ("peer bf16", "vllm-0.24.0", 7000.0, 127.0)
    assert row["share of floor"] == pytest.approx(floor_ms("bf16", 64, 1024) / 8.0)
    bare = peer_row({"batch": 1, "out_tok_s": 10.0}, "fp8")
    assert bare["peer"] == "unknown" and "share of floor" not in bare


def test_the_peers_command_is_filled_in() -> None:
    template = "python vbench.py --dtype {dtype} --batch {batch} --prompt {prompt} --out {new} --layers {layers}"
    assert peer_command(template, "fp8", [64, 256], 8192, 512, 36) == (
        "python vbench.py --dtype fp8 --batch 64,256 --prompt 8192 --out 512 --layers 36"
    )
    assert peer_command("{dtype} {kv}", "fp8 kv8", [1], 1, 1, 1) == "fp8 fp8"
    assert peer_command("{dtype} {kv}", "bf16", [1], 1, 1, 1) == "bf16 auto"
    with pytest.raises(SystemExit, match="kv"):
        peer_command(template, "fp8 kv8", [1], 1, 1, 1)
    assert bench_rollout.PEER_MARK == "VBENCH "


def test_a_clock_times_the_steps_that_an_engine_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 9.0, 9.5, 9.75])
    monkeypatch.setattr(bench_rollout.time, "perf_counter", lambda: next(now))
    clock = DecodeClock(batch=2, prompt=10)
    for generated in (2, 4, 6):
        clock.on_step(SimpleNamespace(generated_tokens=generated))  # type: ignore[arg-type]
    assert clock.steps == [500.0, 250.0]
