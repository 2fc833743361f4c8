"""Kernels of the hopper backend at the sizes of Qwen3-8B: `python benchmarks/bench_kernels.py [PART ...]`.

Parts: memory, gemm, attention, head, layer. Prints one table per part and writes
`benchmarks/results/kernels_<part>.json` (`--out` for another folder).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import COPY_TBPS, RESULTS, graphed, host_us, interleaved, median, quantiles, require_gpu, save, table
from torch import Tensor

from jetrl.engine.state_pool import StatePool
from jetrl.kernels.dispatch import load_backend
from jetrl.model.blocks import Layer
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec, RopeSpec
from jetrl.types import ForwardBatch, LayerCache, PagedPlan, VarlenPlan

CUDA = "cuda"
D, F, N, G, H, V = 4096, 12288, 32, 8, 128, 151936
Rows = list[dict[str, Any]]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16)


Cases = dict[str, tuple[Callable[[], Any], float]]


def _memory_cases(t: int) -> Cases:
    """Calls on `t` tokens, each with the bytes that it must move."""
    ops, w = load_backend("hopper"), normal(D)
    x, r, gu, qkv, gf = normal(t, D), normal(t, D), normal(t, 2 * F), normal(t, (N + 2 * G) * H), normal(t, F)
    q, rotated = normal(t, N, H), min(t, 8192)
    cos, sin = torch.randn(2, 8192, H // 2, device=CUDA)
    pos, slots = torch.randint(0, 8192, (t,), device=CUDA), torch.randperm(t, device=CUDA)
    cache = torch.zeros(2, t // 16 + 1, 16, G, H, device=CUDA, dtype=torch.bfloat16)
    norms, one, paged = (normal(H), normal(H)), t * D, (LayerCache(cache[0], cache[1]), slots)
    return {
        "quantize_act": (lambda: ops.quantize_act(x), one * 3 + one / 32),
        "quantize_act_t": (lambda: ops.quantize_act_t(x), one * 3 + one / 32),
        "rms_norm": (lambda: ops.rms_norm(x, w, 1e-6), one * 4),
        "add_rms_norm": (lambda: ops.add_rms_norm(x, r, w, 1e-6), one * 8),
        "add_rms_norm_quantize": (lambda: ops.add_rms_norm_quantize(x, r, w, 1e-6, False), one * 7 + one / 32),
        "rms_norm_backward": (lambda: ops.rms_norm_backward(r, x, w, 1e-6), one * 6),
        "swiglu": (lambda: ops.swiglu(gu), t * F * 6.0),
        "swiglu_quantize": (lambda: ops.swiglu_quantize(gu, False), t * F * 5.03),
        "swiglu_backward": (lambda: ops.swiglu_backward(gf, gu), t * F * 10.0),
        "rope": (lambda: ops.rope(q[:rotated], cos[:rotated], sin[:rotated]), rotated * N * H * 4.0),
        "qkv_norm_rope paged": (
            lambda: ops.qkv_norm_rope(qkv, (N, G), H, norms, 1e-6, (cos, sin), pos, paged, False),
            t * (N + 2 * G) * H * 4.0,
        ),
    }


def _weight_cases(n: int, k: int) -> Cases:
    ops, w = load_backend("hopper"), normal(n, k)
    q = ops.quantize_weight(w)
    return {
        "quantize_weight": (lambda: ops.quantize_weight(w), n * k * 3.0),
        "prepare_fp8_t": (lambda: ops.prepare_fp8_t(q), n * k * 2.0),
    }


def memory() -> Rows:
    """Memory-bound kernels: the bytes that must move, divided by the time, as a share of the copy rate."""
    rows: Rows = []
    sets = [(t, _memory_cases(t)) for t in (64, 256, 16384)] + [(n, _weight_cases(n, D)) for n in (6144, 24576)]
    for size, cases in sets:
        weights = "quantize_weight" in cases
        times = interleaved({name: fn if weights else graphed(fn) for name, (fn, _) in cases.items()}, rounds=20)
        for name, (fn, moved) in cases.items():
            us = median(times[name])
            rows.append({
                "kernel": name, "rows": size, "us": us, "TB/s": moved / us / 1e6,
                "share": moved / us / 1e6 / COPY_TBPS, "host_us": host_us(fn, 20), **quantiles(times[name]),
            })
    print(table(rows, ["kernel", "rows", "us", "TB/s", "share", "host_us"]))
    return rows


def _gemm_cases(m: int, n: int, k: int) -> dict[str, Callable[[], Any]]:
    ops, w = load_backend("hopper"), normal(n, k) * 0.02
    q = ops.quantize_weight(w)
    fp8, fp8_t, bf16 = ops.prepare_fp8(q), ops.prepare_fp8_t(q), ops.prepare_bf16(w)
    x, dy, out = normal(m, k), normal(m, n), torch.bfloat16
    xq, dyq, xt, dyt = ops.quantize_act(x), ops.quantize_act(dy), ops.quantize_act_t(x), ops.quantize_act_t(dy)
    cases: dict[str, Callable[[], Any]] = {
        "cublas": lambda: x @ w.T,
        "bf16": lambda: ops.bf16_gemm(x, bf16, out),
        "fp8": lambda: ops.fp8_gemm(xq, fp8, out),
        "fp8+quantize": lambda: ops.fp8_gemm(ops.quantize_act(x), fp8, out),
    }
    if m > 256:
        wide, narrow = (torch.zeros(n, k, dtype=dtype, device=CUDA) for dtype in (torch.float32, torch.bfloat16))
        cases |= {
            "dgrad fp8": lambda: ops.fp8_gemm(dyq, fp8_t, out),
            "dgrad bf16": lambda: ops.bf16_dgrad(dy, w),
            "wgrad fp8": lambda: ops.wgrad_gemm(dyt, xt),
            "wgrad bf16": lambda: ops.bf16_wgrad(dy, x),
            "wgrad fp8 into fp32": lambda: ops.wgrad_into(dyt, xt, wide),
            "wgrad bf16 into fp32": lambda: ops.bf16_wgrad_into(dy, x, wide),
            "wgrad fp8 into bf16": lambda: ops.wgrad_into(dyt, xt, narrow),
            "wgrad bf16 into bf16": lambda: ops.bf16_wgrad_into(dy, x, narrow),
            "quantize dy": lambda: (ops.quantize_act(dy), ops.quantize_act_t(dy)),
        }
    return cases


def gemm() -> Rows:
    """FP8 with its quantizers against BF16 (cuBLAS), three GEMMs of a linear."""
    rows: Rows = []
    for role, n, k in (("qkv", 6144, D), ("o", D, D), ("gate_up", 2 * F, D), ("down", D, F)):
        for m in (64, 256, 16384):
            times = interleaved(_gemm_cases(m, n, k), rounds=10)
            for name, spent in times.items():
                us, work = median(spent), 2.0 * m * n * k
                rate = {} if name == "quantize dy" else {"TFLOP/s": work / us / 1e6}
                rows.append({"role": role, "M": m, "what": name, "us": us, **rate, **quantiles(spent)})
    print(table(rows, ["role", "M", "what", "us", "TFLOP/s"]))
    return rows


def decode_plan(batch: int, length: int, page: int, cache: Any, pages_per: int, device: str = CUDA) -> PagedPlan:
    table_ = torch.randperm(batch * pages_per, device=device).view(batch, pages_per).to(torch.int32)
    last = length - 1
    slots = table_[:, last // page].long() * page + last % page
    return PagedPlan(
        cache=cache, cu_seqlens=torch.arange(batch + 1, dtype=torch.int32, device=device), query_lengths=(1,) * batch,
        kv_lengths=torch.full((batch,), length, dtype=torch.int32, device=device),
        kv_pages=(-(-length // page),) * batch, block_table=table_, slots=slots,
    )


class OneLayer:
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.cache = LayerCache(keys, values)

    def layer(self, index: int) -> LayerCache:
        return self.cache


def attention() -> Rows:
    ops, rows = load_backend("hopper"), []
    lengths = (8192,) * 4
    cu = torch.arange(5, dtype=torch.int32, device=CUDA) * 8192
    q, k, v = normal(32768, N, H), normal(32768, G, H), normal(32768, G, H)
    plan, flops = VarlenPlan(cu, lengths), 4 * 8192**2 * N * H * 4 / 2.0
    out, lse = ops.attend_varlen(q, k, v, plan, H**-0.5, True)
    cases = {
        "varlen forward 4x8192": (lambda: ops.attend(q, k, v, plan, 0, H**-0.5), flops),
        "varlen backward": (lambda: ops.attend_backward(out, q, k, v, plan, H**-0.5, out, lse), flops * 2.5),
        "varlen backward, forward again": (lambda: ops.attend_backward(out, q, k, v, plan, H**-0.5), flops * 2.5),
    }
    times = interleaved({name: fn for name, (fn, _) in cases.items()}, rounds=10)
    for name, (fn, work) in cases.items():
        us = median(times[name])
        rows.append({"what": name, "us": us, "rate": work / us / 1e6, "unit": "TFLOP/s", "host_us": host_us(fn, 5)})
    for batch, length in ((64, 2048), (256, 1024), (64, 8192)):
        decode: dict[str, Callable[[], Any]] = {}
        for page in (16, 32, 64, 128, 256):
            per = length // page
            kv = OneLayer(normal(batch * per, page, G, H), normal(batch * per, page, G, H))
            p = decode_plan(batch, length, page, kv, per)
            query = normal(batch, N, H)
            name = f"decode {batch}x{length} page {page}"
            decode[name] = lambda query=query, p=p: ops.attend_cached(query, p, 0, H**-0.5)
        times = interleaved({name: graphed(fn) for name, fn in decode.items()}, rounds=10)
        size = batch * length * G * H * 4.0
        for name, fn in decode.items():
            us = median(times[name])
            rows.append({"what": name, "us": us, "rate": size / us / 1e6, "unit": "TB/s", "host_us": host_us(fn, 10)})
    print(table(rows, ["what", "us", "rate", "unit", "host_us"]))
    return rows


def head() -> Rows:
    """The lm_head with log-probs, its gradient, and the draw."""
    ops, rows = load_backend("hopper"), []
    w = normal(V, D) * 0.02
    prepared = ops.prepare_bf16(w)
    for t in (64, 256, 8192):
        hidden, targets = normal(t, D), torch.randint(0, V, (t,), device=CUDA)
        temperature, keys = torch.ones(t, device=CUDA), torch.randint(0, 1 << 60, (t,), device=CUDA)
        cases: dict[str, Callable[[], Any]] = {
            "logprob_entropy": lambda h=hidden, y=targets, s=temperature: ops.logprob_entropy(h, prepared, y, s),
        }
        if t <= 256:
            z = ops.head_logits(hidden, prepared)
            cases["head_logits"] = lambda h=hidden: ops.head_logits(h, prepared)
            cases["sample"] = lambda z=z, s=temperature, k=keys: ops.sample(z, s, k, k)
            cases["logprobs"] = lambda z=z, s=temperature, y=targets: ops.logprobs(z, y, s)
        else:
            g = torch.randn(t, device=CUDA)
            *_, statistics, residual = ops.logprob_entropy(hidden, prepared, targets, temperature, True)
            grad = torch.zeros(V, D, device=CUDA)
            for name, entropy, kept in (("", None, None), (", kept", None, residual), (", entropy", g, None)):
                inputs = (g, entropy, hidden, w, targets, temperature, statistics, kept, grad)
                cases[f"logprob_backward{name}"] = lambda inputs=inputs: ops.logprob_backward(*inputs)
            cases["logprob_entropy, kept"] = lambda h=hidden, y=targets, s=temperature: ops.logprob_entropy(
                h, prepared, y, s, True
            )
            part = hidden[:768]
            cases["head_logits 768 rows"] = lambda part=part: ops.head_logits(part, prepared)
        times = interleaved(cases, rounds=5)
        rows += [{"what": n, "T": t, "us": median(times[n]), "host_us": host_us(fn, 5)} for n, fn in cases.items()]
    print(table(rows, ["what", "T", "us", "host_us"]))
    return rows


def fused_layer(layer: Layer, x: Any, residual: Tensor | None, model: Transformer, batch: ForwardBatch) -> Any:
    """A decoder layer of FP8 linears with fused kernels: what the model could do if no gradient is needed."""
    ops, spec, index = load_backend("hopper"), model.spec, layer.attn.layer
    eps = spec.rms_norm_eps
    y, residual = ops.add_rms_norm_quantize(x, residual, layer.attn.norm.published, eps, False)
    qkv = ops.fp8_gemm(y, layer.attn.qkv.fp8_operand(), torch.bfloat16)
    norms = (layer.attn.q_norm.published, layer.attn.k_norm.published)
    heads, tables = (spec.num_heads, spec.num_kv_heads), (model.cos, model.sin)
    q, _, _ = ops.qkv_norm_rope(
        qkv, heads, spec.head_dim, norms, eps, tables, batch.positions,
        (batch.plan.cache.layer(index), batch.plan.slots), layer.attn.fp8_kv,
    )
    a = ops.attend_cached(q, batch.plan, index, spec.head_dim**-0.5).flatten(1)
    y = ops.fp8_gemm(ops.quantize_act(a), layer.attn.o.fp8_operand(), torch.bfloat16)
    y, residual = ops.add_rms_norm_quantize(y, residual, layer.mlp.norm.published, eps, False)
    y = ops.fp8_gemm(y, layer.mlp.gate_up.fp8_operand(), torch.bfloat16)
    return ops.fp8_gemm(ops.swiglu_quantize(y, False), layer.mlp.down.fp8_operand(), torch.bfloat16), residual


def layer() -> Rows:
    """Decode and training of decoder layers, with and without host time; the device time by kernel."""
    rows: Rows = []
    count = 4
    spec = ModelSpec(
        family="qwen3", vocab_size=8192, hidden_size=D, intermediate_size=F, num_layers=count, num_heads=N,
        num_kv_heads=G, head_dim=H, rms_norm_eps=1e-6, rope=RopeSpec(1e6), max_position=16384, tie_embeddings=True,
        qkv_bias=False, qk_norm=True,
    )
    for precision in ("bf16", "fp8"):
        with torch.device(CUDA):
            model = Transformer(spec, Recipe(precision, count), master_dtype=torch.bfloat16)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.02) if p.ndim > 1 else p.fill_(1.0)
        model.to(CUDA).publish()  # the tables of RoPE are made on the CPU
        for size, length, page in ((64, 1024, 128), (256, 1024, 128), (64, 1024, 16)):
            per = length // page
            cache = StatePool(spec, size * per, page, torch.bfloat16, torch.device(CUDA))
            cache.keys.normal_()
            cache.values.normal_()
            batch = ForwardBatch(
                torch.randint(0, 8192, (size,), device=CUDA), torch.full((size,), length - 1, device=CUDA),
                decode_plan(size, length, page, cache, per), "rollout",
            )

            def plain(batch: ForwardBatch = batch, model: Transformer = model) -> Any:
                with torch.no_grad():
                    return model(batch)

            def fused(batch: ForwardBatch = batch, model: Transformer = model) -> Any:
                with torch.no_grad():
                    x, residual = model.embed.published[batch.tokens], None
                    for one in model.layers:
                        x, residual = fused_layer(one, x, residual, model, batch)
                    return load_backend("hopper").add_rms_norm(x, residual, model.norm.published, 1e-6)[0]

            cases = {"plain": plain} | ({"fused": fused} if precision == "fp8" else {})
            if precision == "fp8":
                assert torch.equal(plain(), fused()), "the fused layer changes bits"
            times = interleaved({n: graphed(fn) for n, fn in cases.items()}, rounds=15)
            weights = sum(m.weight.numel() for m in model.modules() if hasattr(m, "fp8_operand"))
            floor = (weights * (1 if precision == "fp8" else 2) + 2 * cache.keys.numel() * 2) / COPY_TBPS / 1e6
            for name, fn in cases.items():
                us = median(times[name])
                rows.append({
                    "what": f"decode {precision} {name} page {page}", "T": size, "us/layer": us / count,
                    "host_us/layer": host_us(fn, 10) / count, "share of floor": floor / us,
                })
        tokens = 8192
        cu = torch.arange(0, tokens + 1, 2048, dtype=torch.int32, device=CUDA)
        plan = VarlenPlan(cu, (2048,) * 4)
        batch = ForwardBatch(
            torch.randint(0, 8192, (tokens,), device=CUDA), torch.arange(2048, device=CUDA).repeat(4), plan, "train"
        )

        def train(batch: ForwardBatch = batch, model: Transformer = model) -> None:
            model(batch).sum().backward()
            model.zero_grad(set_to_none=True)

        us = median(interleaved({"train": train}, rounds=5)["train"])
        flops = 6.0 * tokens * weights + 3.5 * 4 * 4 * 2048**2 * N * H * count / 2
        rows.append({
            "what": f"train {precision}", "T": tokens, "us/layer": us / count, "TFLOP/s": flops / us / 1e6,
            "host_us/layer": host_us(train, 3) / count,
        })
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as p:
            train()
            torch.cuda.synchronize()
        spent: dict[str, tuple[float, int]] = {}
        for e in p.events():
            if e.device_type == torch.autograd.DeviceType.CUDA:
                total, calls = spent.get(e.name, (0.0, 0))
                spent[e.name] = total + e.device_time, calls + 1
        for name, (total, calls) in sorted(spent.items(), key=lambda kv: -kv[1][0])[:16]:
            rows.append({"what": f"  {precision} {name[:70]}", "T": calls, "us/layer": total / count})
        del model
        torch.cuda.empty_cache()
    print(table(rows, ["what", "T", "us/layer", "host_us/layer", "share of floor", "TFLOP/s"]))
    return rows


PARTS: dict[str, Callable[[], Rows]] = {
    "memory": memory, "gemm": gemm, "attention": attention, "head": head, "layer": layer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="part", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    for part in args.parts:
        print(f"== {part}", flush=True)
        save(f"kernels_{part}", PARTS[part](), args.out)


if __name__ == "__main__":
    main()
