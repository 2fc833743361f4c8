"""How long it takes to send a model's published weights to vLLM, checked: `rollout.engine = "vllm"`, one GPU.

    python benchmarks/bench_vllm_sync.py --shape qwen3-8b --precision fp8 --out benchmarks/results/vllm_sync.json

Random weights; no masters and no optimizer, so that an 8B model fits next to vLLM's. Each round is `engine.load` after
sleep, as in a step: waking the weights' memory, sending, and (timed apart) reading back and comparing checksums. Then a
small rollout, whose times (waking the cache, sleep, scales of an FP8 cache) begin with "rollout". The first round is
left out: it also compiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from common import NoText, environment

from jetrl.config import Config, parse_config, resolve
from jetrl.huggingface import read as hf
from jetrl.kernels.dispatch import select
from jetrl.model.transformer import Transformer
from jetrl.model.weights import published, published_bytes
from jetrl.precision.flow import flow_digest
from jetrl.precision.recipe import recipe_of
from jetrl.spec import SHAPES, ModelSpec
from jetrl.types import Request, SamplingParams, WeightSet
from jetrl.vllm.engine import VllmEngine

LENGTHS = (64, 32)  # of prompts and answers


def config_of(args: argparse.Namespace, spec: ModelSpec) -> Config:
    arch = {key: value for key, value in hf.hf_config(spec).items() if value is not None}
    data: dict[str, Any] = {
        "name": "sync", "precision": args.precision, "device": args.device,
        "model": {"arch": arch, "tokenizer": "builtin:arithmetic"},
        "task": {"name": "addition", "max_prompt_length": LENGTHS[0]},
        "rollout": {"engine": "vllm", "max_response_length": LENGTHS[1], "max_num_seqs": 16},
        "vllm": {"check_weights": args.check, "enforce_eager": True, "kv_cache": args.kv_cache},
    }
    return resolve(parse_config(data), cuda_available=torch.cuda.is_available())


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Rows of seconds, one a round, and what was sent."""
    spec = SHAPES[args.shape]
    config = config_of(args, spec)
    recipe = recipe_of(config, spec)
    select(config.kernels)
    model = Transformer(spec, recipe, master_dtype=None).to(config.device)
    model.init_random(0)
    digest = flow_digest(spec, recipe)
    engine = VllmEngine(config, model, NoText(), hf.hf_config(spec), digest, frozenset())
    engine.take_metrics()
    rounds = []
    try:
        for version in range(args.rounds):
            with torch.no_grad():  # every round has other weights to send
                model.norm.published.add_(0.125)
            engine.load(WeightSet(version, digest, published(model)))
            row = engine.take_metrics() | {"checksum": engine.checksum}
            prompt = tuple(range(1, LENGTHS[0] + 1))
            sampling = SamplingParams(LENGTHS[1], ignore_eos=True)
            engine.add([Request(i, prompt, sampling) for i in range(16)])
            while engine.has_work:
                engine.step()
            engine.collect()
            rounds.append(row | {f"rollout {key}": value for key, value in engine.take_metrics().items()})
    finally:
        engine.close()
    assert not args.check or len({row["checksum"] for row in rounds}) == len(rounds)
    return environment() | {
        "shape": args.shape, "precision": args.precision, "kv_cache": args.kv_cache, "device": config.device,
        "vllm": engine.version, "bytes": published_bytes(spec, recipe), "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="fp8")
    parser.add_argument("--kv-cache", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--no-check", dest="check", action="store_false", help="vLLM on a CPU cannot be read back")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = measured(args)
    print(f"{args.shape} {args.precision}, {result['bytes'] / 1e9:.2f} GB published, {result['device']}, "
          f"vLLM {result['vllm']}; {args.rounds - 1} rounds after the first")
    later = result["rounds"][1:]
    for key in [key for key in later[0] if key.endswith("_s")]:
        values = [1000 * row[key] for row in later if key in row]
        print(f"  {key:32} median {statistics.median(values):9.1f} ms, worst {max(values):9.1f} ms")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
