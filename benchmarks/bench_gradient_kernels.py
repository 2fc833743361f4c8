"""The kernels of the backward pass that `quant.wgrad` chooses between, for one layer of Qwen3-8B's shape; old and new.

    python benchmarks/bench_gradient_kernels.py            # 8,192 tokens; about a minute
    python benchmarks/bench_gradient_kernels.py --tokens 16384

Rows: for each matrix the weight gradient by rows and by tiles, added to an FP32 gradient or written first; for each
input and output gradient the quantizers of both orientations; SwiGLU's backward pass, with its output again and apart;
the norm's; the lm_head's. `TB/s` counts the bytes that the operation needs, read and written once. The fused kernel's
warps and registers are swept. Calls take turns, each with a cold L2. Writes `benchmarks/results/kernels_gradient.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import COPY_TBPS, RESULTS, SPEC, interleaved, median, require_gpu, save, table
from torch import Tensor

from jetrl.kernels.dispatch import load_backend

D, F, V = SPEC.hidden_size, SPEC.intermediate_size, SPEC.vocab_size
MATRICES = {"qkv": (sum(SPEC.qkv_sections), D), "o": (D, SPEC.num_heads * SPEC.head_dim), "gate_up": (2 * F, D),
            "down": (D, F)}
Cases = dict[str, tuple[Callable[[], Any], float, float]]  # call, bytes, FLOP


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def wgrads(ops: Any, tokens: int) -> Cases:
    cases: Cases = {}
    for name, (n, k) in MATRICES.items():
        dy_t, x = ops.quantize_act_t(normal(tokens, n)), normal(tokens, k)
        by_row, by_tile = ops.quantize_act_t(x), ops.quantize_act_t(x, False, True)
        grad = torch.zeros(n, k, device="cuda")
        flop = 2.0 * tokens * n * k
        for way, x_t in (("row", by_row), ("tile", by_tile)):
            cases[f"wgrad {name}, {way}"] = (lambda a=dy_t, b=x_t, g=grad: ops.wgrad_into(a, b, g), 0.0, flop)
        cases[f"wgrad {name}, tile, first"] = (lambda a=dy_t, b=by_tile: ops.wgrad_gemm(a, b), 0.0, flop)
    return cases


def quantizers(ops: Any, options: dict[str, int], tokens: int) -> Cases:
    cases: Cases = {}
    for width in (D, MATRICES["qkv"][0], F):
        x, size = normal(tokens, width), 3.0 * tokens * width
        cases[f"quantize {width}, rows"] = (lambda x=x: ops.quantize_act(x), size, 0.0)
        cases[f"quantize {width}, columns"] = (lambda x=x: ops.quantize_act_t(x), size, 0.0)
        cases[f"quantize {width}, tiles transposed"] = (lambda x=x: ops.quantize_act_t(x, False, True), size, 0.0)
    gate_up, grad = normal(tokens, 2 * F), normal(tokens, F)
    size = 10.0 * tokens * F
    cases["swiglu backward, gradient only"] = (lambda: ops.swiglu_backward(grad, gate_up), size, 0.0)
    cases["swiglu again, its tiles"] = (
        lambda: ops.quantize_act_t(ops.swiglu(gate_up), False, True), 5.0 * tokens * F, 0.0)
    for warps, registers in ((8, 128), (8, 255), (16, 128)):

        def both(warps: int = warps, registers: int = registers) -> None:
            options.update(num_warps=warps, maxnreg=registers)
            ops.swiglu_backward_act(grad, gate_up, False)

        cases[f"swiglu backward with its tiles, {warps} warps, {registers} registers"] = (both, size + tokens * F, 0.0)

    def forward() -> None:
        act = ops.swiglu(gate_up)
        ops.quantize_act(act)
        ops.quantize_act_t(act)

    cases["swiglu forward, output and two quantizers"] = (forward, 6.0 * tokens * F, 0.0)
    cases["swiglu forward, row codes"] = (lambda: ops.swiglu_quantize(gate_up, False), 5.0 * tokens * F, 0.0)
    x, g, more, w = normal(tokens, D), normal(tokens, D), normal(tokens, D), normal(D)
    cases["norm and sum forward, row codes"] = (
        lambda: ops.add_rms_norm_quantize(x, more, w, 1e-6, False), 7.0 * tokens * D, 0.0)
    size = 8.0 * tokens * D
    cases["norm backward with the stream's"] = (lambda: ops.rms_norm_backward(g, x, w, 1e-6, more), size, 0.0)
    return cases


def head(ops: Any, tokens: int) -> Cases:
    w, hidden = normal(V, D) * 0.02, normal(tokens, D)
    prepared, targets = ops.prepare_bf16(w), torch.randint(0, V, (tokens,), device="cuda")
    temperature, g = torch.ones(tokens, device="cuda"), torch.randn(tokens, device="cuda")
    grad = torch.zeros(V, D, device="cuda")
    *_, statistics, kept = ops.logprob_entropy(hidden, prepared, targets, temperature, True)
    once = 2.0 * tokens * V * D
    cases: Cases = {}
    for keep in (False, True):
        cases[f"lm_head forward, keep={keep}"] = (
            lambda keep=keep: ops.logprob_entropy(hidden, prepared, targets, temperature, keep), 0.0, once)
    for name, entropy, residual in (("logits again", None, None), ("kept", None, kept), ("entropy gradient", g, None)):
        cases[f"lm_head backward, {name}"] = (
            lambda e=entropy, r=residual: ops.logprob_backward(
                g, e, hidden, w, targets, temperature, statistics, r, grad), 0.0, 2 * once)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--name", default="kernels_gradient")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    require_gpu()
    ops = load_backend("hopper")
    from jetrl.kernels.pointwise.swiglu import OPTIONS

    rows: list[dict[str, Any]] = []
    chosen = dict(OPTIONS)
    parts: list[Callable[[], Cases]] = [
        lambda: wgrads(ops, args.tokens), lambda: quantizers(ops, OPTIONS, args.tokens), lambda: head(ops, args.tokens)
    ]
    for part in parts:
        try:
            cases = part()
            times = interleaved({name: case[0] for name, case in cases.items()}, rounds=args.rounds)
        except Exception as error:  # told, and the other parts go on
            rows.append({"what": f"FAILED: {type(error).__name__}: {str(error)[:200]}"})
            continue
        finally:
            OPTIONS.update(chosen)
        for name, (_, size, flop) in cases.items():
            us = median(times[name])
            row: dict[str, Any] = {"what": name, "tokens": args.tokens, "us": us}
            row |= {"TB/s": size / us / 1e6, "share of copy": size / us / 1e6 / COPY_TBPS} if size else {}
            rows.append(row | ({"PFLOP/s": flop / us / 1e9} if flop else {}))
        torch.cuda.empty_cache()
    save(args.name, rows, args.out)
    print(table(rows, ["what", "us", "TB/s", "share of copy", "PFLOP/s"]))
    if failed := [row for row in rows if row["what"].startswith("FAILED")]:
        raise SystemExit(f"{len(failed)} parts failed")


if __name__ == "__main__":
    main()
