"""The benchmark of latent attention: floors and FLOPs worked out by hand, ratios, and a tiny model on the CPU."""

from __future__ import annotations

import subprocess
import sys

import bench_latent
import pytest
from whole_model import experts_hit, floor_ms, flops_of_update, summary, weights_of, with_row

from jetrl.api import random_model
from jetrl.spec import SHAPES

MOONLIGHT = SHAPES["moonlight-16b-a3b"]


def test_what_a_decode_step_reads_at_least() -> None:
    """27 layers: q and kv_a 3,648 x 2,048, o 2,048 x 2,048; one dense MLP of 11,264; 26 with 64 and 2 of 1,408."""
    linears, rest = weights_of(MOONLIGHT, 64)
    attention, expert = 27 * 2048 * (3072 + 576 + 2048), 3 * 2048 * 1408
    assert linears == attention + 3 * 2048 * 11264 + 26 * 66 * expert
    assert rest == 27 * 4096 * 512 + 26 * 64 * 2048 + 163840 * 2048
    assert weights_of(MOONLIGHT, 32)[0] == linears - 26 * 32 * expert
    step = floor_ms(MOONLIGHT, True, 256, 1024, 64)
    assert step == pytest.approx((linears + 2 * rest + 256 * 1024 * 27 * 1152) / 4.47e9, rel=1e-12)
    assert step == pytest.approx(5.4, abs=0.15)
    assert floor_ms(MOONLIGHT, True, 64, 1024, 64) == pytest.approx(4.0, abs=0.15)
    assert floor_ms(MOONLIGHT, False, 64, 1024, 64) > 1.7 * floor_ms(MOONLIGHT, True, 64, 1024, 64)


def test_an_update_counts_active_parameters_and_the_head() -> None:
    assert flops_of_update(MOONLIGHT, 1) == pytest.approx(15.5e9, rel=5e-3)


def test_experts_are_counted() -> None:
    model = random_model("tiny-mla", "bf16", "cpu", masters=False)
    one, most = model.spec.experts.per_token, model.spec.experts.count
    assert experts_hit(model, [[5, 6, 7, 8]], [1, 3]) == one
    assert one < experts_hit(model, [[t] * 3 for t in range(12)], [0], at_once=5) <= most


def test_a_new_row_replaces_an_old_one_and_ratios_are_of_the_peer_or_of_bf16() -> None:
    rows = [
        {"part": "rollout", "engine": name, "precision": "fp8", "sequences": 64, "tokens/s": x, "round": i}
        for name, values in (("jetrl fp8", (90.0, 110.0, 100.0)), ("peer fp8", (50.0, 40.0, 60.0)))
        for i, x in enumerate(values)
    ]
    ours, peer = summary(rows)
    assert (ours["tokens/s"], ours["ratio"], ours["spread %"]) == (100.0, 2.0, pytest.approx(22.2, abs=0.1))
    assert peer["ratio"] == 1.0 and "peak GiB" not in peer
    assert with_row(rows, rows[0] | {"tokens/s": 1.0}) == [*rows[1:], rows[0] | {"tokens/s": 1.0}]
    updates = [
        {"part": "update", "precision": p, "tokens": 9, "TFLOP/s": x} for p, x in (("fp8", 330.0), ("bf16", 300.0))
    ]
    assert [line["ratio"] for line in summary(updates)] == [pytest.approx(1.1), 1.0]


@pytest.mark.slow
def test_a_tiny_model_runs_on_the_cpu() -> None:
    command = [sys.executable, bench_latent.__file__, "--tiny", "--precision", "fp8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines[-5:]] == ["rollout", "groups", "groups", "long", "update"]
    assert {line[0] for line in lines} >= {"absorb", "lift", "attend", "backward"}
    assert any(line[:4] == ["4", "x", "(256", "+"] and line[-1] == "equal" for line in lines)
