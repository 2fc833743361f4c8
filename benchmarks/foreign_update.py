"""The same update by other people's code: transformers' Qwen3 with Liger's kernels or torch.compile, in BF16.

    pip install transformers liger-kernel        # and flash-attn-4, which jetrl[hopper] installs
    python benchmarks/foreign_update.py

Qwen3-8B's shape with random weights, `--tokens` in sequences of `--length`, one sequence a micro-batch, no activation
checkpointing: forward, cross-entropy of all tokens (Liger's fused linear one, which never holds all logits), backward,
clipping to norm 1, torch's fused AdamW. All is BF16, masters, gradients and moments: the least memory traffic there
is, and less than a run that trains would want. Kinder than ours in two more ways: no objective of RL with its
metrics, and nothing is published.

    kernels    liger    RMSNorm, SwiGLU and RoPE by Liger
               compile  each decoder layer by torch.compile (inductor), the loss by Liger
    attention  sdpa (torch's choice), cudnn (SDPA by cuDNN), fa4 (FlashAttention-4, any order of sums)

Each kind of kernels is a process. Variants take turns; the fastest is the baseline. A variant that fails has a row that
says why. Writes `benchmarks/results/foreign_update.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import torch
from bench_step import flops
from common import RESULTS, SPEC, ask, emit, environment, median, require_gpu, save, table, timed
from torch import Tensor, nn

KERNELS, ATTENTIONS = ("liger", "compile"), ("sdpa", "cudnn", "fa4")


@torch.compiler.disable
def fa4(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """FlashAttention-4 in transformers' interface: [B, N, T, H] in, [B, T, N, H] out; causal, whole sequences."""
    from flash_attn.cute.interface import flash_attn_func

    assert attention_mask is None
    inputs = (x.transpose(1, 2) for x in (query, key, value))
    out = flash_attn_func(*inputs, softmax_scale=scaling, causal=True)
    return (out[0] if isinstance(out, tuple) else out), None


def build(kernels: str, layers: int) -> nn.Module:
    """transformers' model with random BF16 weights on the GPU."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

    AttentionInterface.register("fa4", fa4)
    own = kernels == "liger"
    apply_liger_kernel_to_qwen3(rope=own, rms_norm=own, swiglu=own, fused_linear_cross_entropy=True)
    config = Qwen3Config(
        vocab_size=SPEC.vocab_size, hidden_size=SPEC.hidden_size, intermediate_size=SPEC.intermediate_size,
        num_hidden_layers=layers, num_attention_heads=SPEC.num_heads, num_key_value_heads=SPEC.num_kv_heads,
        head_dim=SPEC.head_dim, max_position_embeddings=SPEC.max_position, rms_norm_eps=SPEC.rms_norm_eps,
        tie_word_embeddings=False, use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    if kernels == "compile":
        for layer in model.model.layers:
            layer.compile()
    return model.to(torch.bfloat16).train()


def attention(model: Any, kind: str) -> contextlib.AbstractContextManager[Any]:
    """Set the attention of `model`; a context for its calls."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model.config._attn_implementation = "fa4" if kind == "fa4" else "sdpa"
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if kind == "cudnn" else contextlib.nullcontext()


def measure(args: argparse.Namespace) -> None:
    """All attentions with one kind of kernels, in this process."""
    model = build(args.one, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    g = torch.Generator("cuda").manual_seed(0)
    count = args.tokens // args.length
    batch = torch.randint(0, SPEC.vocab_size, (count, 1, args.length), generator=g, device="cuda")

    def update() -> None:
        for ids in batch:
            (model(input_ids=ids, labels=ids).loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def logprobs() -> None:
        with torch.no_grad():
            for ids in batch:
                model(input_ids=ids, labels=ids)

    failed = set()
    for number in range(args.rounds + 1):  # the first compiles
        for kind in args.attention:
            if kind in failed:
                continue
            variant = f"{args.one} {kind}"
            row: dict[str, Any] = {"variant": variant, "work": variant, "round": number, "tokens": args.tokens}
            try:
                with attention(model, kind):
                    row["update_ms"], row["peak GiB"] = timed(update)
                    row["logprob_ms"], _ = timed(logprobs)
                row["TFLOP/s"] = flops(args.layers, [args.length] * count, 3) / row["update_ms"] / 1e9
            except Exception as error:  # a row of its own; the others go on
                failed.add(kind)
                optimizer.zero_grad(set_to_none=True)
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            if number or "error" in row:
                emit(row)
    emit({"variant": "versions", "note": "versions", "environment": environment()} | {
        name: importlib.metadata.version(name) for name in ("transformers", "liger-kernel", "torch", "triton")
    })


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--layers", type=int, default=SPEC.num_layers)
    parser.add_argument("--tokens", type=int, default=32768, help="of an update")
    parser.add_argument("--length", type=int, default=8192, help="of a sequence, which is a micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="foreign_update")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.one:
        return measure(args)
    require_gpu()
    options = [f"--{key}={getattr(args, key)}" for key in ("layers", "tokens", "length", "rounds")]
    options += ["--attention", *args.attention]
    rows: list[dict[str, Any]] = []
    for kernels in args.kernels:
        try:
            for row in ask([sys.executable, __file__, "--one", kernels, *options]):
                rows.append(row)
                print(row, flush=True)
        except RuntimeError as error:
            rows.append({"variant": kernels, "error": str(error)[-2000:]})
            print(error, flush=True)
    save(args.name, rows, args.out)
    shown = []
    for variant in dict.fromkeys(row["variant"] for row in rows if row["variant"] != "versions"):
        of = [row for row in rows if row["variant"] == variant]
        keys = ("update_ms", "TFLOP/s", "logprob_ms", "peak GiB")
        line = {key: median([row[key] for row in of if key in row]) for key in keys if any(key in row for row in of)}
        error = next((row["error"][:60] for row in of if "error" in row), "")
        shown.append({"variant": variant} | line | {"error": error})
    print(table(shown, ["variant", "update_ms", "TFLOP/s", "logprob_ms", "peak GiB", "error"]))


if __name__ == "__main__":
    main()
