"""The benchmark of hybrids: floors and FLOPs worked out by hand, the share of kernels, and a tiny model on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import bench_hybrid
import pytest
from profile_step import by_name
from whole_model import (
    delta_kernels,
    delta_layers,
    floor_ms,
    flops_of_update,
    peer_rows,
    spec_of,
    state_bytes,
    weights_of,
)

NINE = spec_of("qwen3.5-9b", None)


def test_what_a_decode_step_of_a_hybrid_moves_at_least() -> None:
    """32 layers: 24 with qkvz 12,288 x 4,096 and out 4,096 x 4,096, 8 with q and its gate, k and v 10,240 x 4,096."""
    linears, rest = weights_of(NINE, 0)
    attention, mlp = 4096 * (10240 + 4096), 3 * 4096 * 12288
    assert linears == 24 * 4096 * (12288 + 4096) + 8 * attention + 32 * mlp
    assert rest == 24 * (64 * 4096 + 8192 * 4) + 248320 * 4096
    assert state_bytes(NINE, 1000) == 1000 * 8 * 2 * 4 * 512 + 24 * 32 * 46.7e3
    assert state_bytes(NINE, 1000, "fp8") == 1000 * 8 * 2 * 4 * 258 + 24 * 32 * 46.7e3
    step = floor_ms(NINE, True, 256, 4096, kv_cache="fp8")
    assert step == pytest.approx((linears + 2 * rest + 256 * state_bytes(NINE, 4096, "fp8")) / 4.47e9, rel=1e-12)
    assert step == pytest.approx(8.0, abs=0.2)
    assert floor_ms(NINE, False, 256, 4096) > step
    assert flops_of_update(NINE, 1) == 6 * (linears + rest)


def test_fewer_layers_have_fewer_states() -> None:
    few = spec_of("qwen3.5-9b", 6)
    assert delta_layers(few) == [0, 1, 2, 4, 5]
    assert state_bytes(few, 10) == 10 * 2 * 4 * 512 + 5 * 32 * 46.7e3


def test_the_share_of_kernels_with_these_names() -> None:
    found = by_name([("_rule_kernel", 0.0, 3000.0), ("gemm", 3000.0, 12000.0)], 1)
    row = bench_hybrid.of_kernels(found, {"_rule_kernel", "_gates_kernel"})
    assert (row["share of delta"], row["kernels_ms"], row["delta_ms"]) == (0.25, 12.0, {"_rule_kernel": 3.0})
    assert bench_hybrid.of_kernels(found, set())["share of delta"] is None
    assert bench_hybrid.of_kernels(by_name([], 1), {"gemm"})["share of delta"] is None


def test_the_kernels_of_the_delta_rule_are_found() -> None:
    pytest.importorskip("triton")
    names = delta_kernels()
    assert {"_rule_kernel", "_conv_kernel", "_gates_kernel", "_gate_kernel", "_states_kernel"} <= names
    root = Path(__file__).parents[2]
    others = "".join(p.read_text() for p in (root / "jetrl" / "kernels").rglob("*.py") if p.parent.name != "delta")
    assert not [name for name in names if f"def {name}(" in others], "a profiler could not tell them apart"


def test_names_say_what_is_not_usual() -> None:
    assert bench_hybrid.name_of("jetrl fp8", "auto", "bf16") == "jetrl fp8"
    assert bench_hybrid.name_of("jetrl fp8", "triton", "fp8") == "jetrl fp8 triton kv8"


def test_another_engines_rows_have_our_floor(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\n"
        "n = int(sys.argv[1])\n"
        "print('VBENCH ' + json.dumps({'engine': 'x-1', 'out_tok_s': 10.0 * n, 'decode_tok_s': 100.0 * n}))\n"
    )
    command = f"{sys.executable} {script} {{batch}} {{kv}}"
    few, many = peer_rows(command, "fp8 kv8", NINE, "rollout", [(64, 512, 1024, 1), (256, 512, 1024, 1)])
    assert (few["engine"], few["peer"], few["tokens/s"], many["tokens/s"]) == ("peer fp8 kv8", "x-1", 640.0, 2560.0)
    assert few["step_ms"] == many["step_ms"] == 10.0
    assert many["share of floor"] == pytest.approx(floor_ms(NINE, True, 256, 1024, kv_cache="fp8") / 10)


@pytest.mark.slow
def test_a_tiny_hybrid_runs_on_the_cpu() -> None:
    command = [sys.executable, bench_hybrid.__file__, "--tiny", "--precision", "fp8", "--batch", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines[-3:]] == [["rollout", "jetrl"], ["rollout", "jetrl"], ["update", "fp8"]]
