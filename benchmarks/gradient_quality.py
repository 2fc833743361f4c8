"""What quantizing the operands of weight gradients costs: each matrix's gradient against FP32, on a run's own data.

    python benchmarks/gradient_quality.py quickstart                          # CPU: the quickstart's first step
    python benchmarks/gradient_quality.py h200_smollm2 sft.steps=20           # any recipe, with overrides

Builds the run, makes its warm start, samples its first step, and takes the gradient of its objective in FP8. Every
linear's input x and output gradient dy are caught as they are in BF16. Two tables, by role of the matrix:

    wgrad alone    dW from these x and dy with each way of quantizing, against `dy.T @ x` in FP32 (CPU: float64)
    whole          the gradient of the whole backward pass, by rows and by tiles, against that of a flow without FP8
                   and, on a CPU, without BF16 (activations in FP32); `same flow` is against FP8 by rows instead

Cosine and relative error, the median and the worst matrix. Writes `benchmarks/results/gradient_quality.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, median, save, table
from rich.console import Console
from torch import Tensor

from jetrl.config import Config, load_config, resolve
from jetrl.config.shipped import find_recipe
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.ops import quantize_act_t
from jetrl.model.linear import FlowLinear
from jetrl.model.master import frozen_values, masters_of
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import Recipe, build_recipe
from jetrl.report.console import Display
from jetrl.rl.objective import objective
from jetrl.run.gather import gather
from jetrl.run.loop import Clock
from jetrl.run.setup import Session, build
from jetrl.run.sft import warm_start
from jetrl.train.batches import PackedBatch
from jetrl.train.packing import denominators, pack, to_device
from jetrl.train.passes import estimate
from jetrl.train.publish import publish
from jetrl.train.step import forward_rows, inputs_of

Caught = dict[str, list[tuple[Tensor, Tensor]]]  # of each linear: x [T, K] and dy [T, N] of each micro-batch


def first_batch(config: Config) -> tuple[Session, PackedBatch]:
    """The session after its warm start, and the packed batch of its first step."""
    session = build(config)
    if config.sft.steps:
        warm_start(session.model, config, session.task, session.tokenizer, lambda *_: None, lambda _: None)
    session.engine.load(publish(session.model, 0, session.flow_digest))
    kept = gather(session, Clock(Display(1, "sampling", console=Console(quiet=True))), 1).learnt
    batches = pack(
        kept, max_tokens_per_gpu=config.train.max_tokens_per_gpu, flow_digest=session.flow_digest, weight_version=0
    )
    _, batches, _ = estimate(kept, batches, session.learner, session.progress.reference, config, session.unified)
    return session, batches[0]


def gradient(model: Transformer, batch: PackedBatch, config: Config) -> dict[str, Tensor]:
    """The gradient of the batch's objective, FP32, by matrix."""
    shares = denominators(batch, config.rollout.max_response_length, config.rl.masked_sequences)
    for p in model.parameters():
        p.grad = None
    for host in batch.micro_batches:
        micro = to_device(host, model.head_weight.device)
        rows = forward_rows(model, micro, config.rollout.temperature)
        objective(inputs_of(micro, rows, None, True), config.rl, shares)[0].backward()
    names = [name for name, m in model.named_modules() if isinstance(m, FlowLinear)]
    return {name: model.get_submodule(name).weight.grad.float() for name in names}


def with_recipe(model: Transformer, recipe: Recipe, dtype: torch.dtype) -> Transformer:
    """The same weights in another flow."""
    device = model.head_weight.device
    other = Transformer(model.spec, recipe, master_dtype=torch.float32, dtype=dtype).to(device)
    frozen, into = frozen_values(model), masters_of(other)
    with torch.no_grad():
        for name, master in masters_of(model).items():
            if name not in frozen:
                into[name].param.copy_(master.param)
        other.publish()
        for name, value in frozen.items():  # a router's bias, which no flow trains
            other._publish_value(name, value())
    return other


def catch(model: Transformer, into: Caught) -> None:
    """Note the input and the output gradient of every linear from now on."""

    def hook(name: str) -> Callable[..., None]:
        def see(module: Any, inputs: tuple[Any, ...], y: Tensor) -> None:
            if y.requires_grad:
                x = inputs[0].detach()
                y.register_hook(lambda dy: into.setdefault(name, []).append((x, dy.detach())))

        return see

    for name, module in model.named_modules():
        if isinstance(module, FlowLinear):
            module.register_forward_hook(hook(name))


def ways(x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """dW [N, K] of one micro-batch with each way of quantizing, FP32."""
    found = {}
    for scale, pow2 in (("fp32", False), ("pow2", True)):
        dy_t = quantize_act_t(dy, pow2)
        sides: dict[str, QTensor] = {
            "row": quantize_act_t(x, pow2), "tile": quantize_act_t(x.contiguous(), pow2, True)
        }
        found |= {f"{side} {scale}": gemm.wgrad_gemm(dy_t, x_t) for side, x_t in sides.items()}
    return found


def compared(name: str, way: str, got: Tensor, want: Tensor) -> dict[str, Any]:
    got, want = got.double(), want.double()
    cosine = float((got * want).sum() / (got.norm() * want.norm()))
    return {"matrix": name, "way": way, "cosine": cosine, "error": float((got - want).norm() / want.norm())}


def alone(caught: Caught) -> Iterable[dict[str, Any]]:
    exact = torch.float32 if torch.cuda.is_available() else torch.float64
    for name, pairs in caught.items():
        want = sum((dy.to(exact).T @ x.to(exact) for x, dy in pairs), torch.zeros(()))
        totals: dict[str, Any] = {}
        for x, dy in pairs:
            for way, part in ways(x, dy.contiguous()).items():
                totals[way] = totals.get(way, 0) + part
        yield from (compared(name, way, got, want) | {"what": "wgrad alone"} for way, got in totals.items())


def whole(model: Transformer, batch: PackedBatch, config: Config) -> Iterable[dict[str, Any]]:
    layers, cpu = model.spec.num_layers, model.head_weight.device.type == "cpu"
    plain = build_recipe("bf16", layers)
    want = gradient(with_recipe(model, plain, torch.float32 if cpu else torch.bfloat16), batch, config)
    flows = {"row": build_recipe("fp8", layers), "tile": build_recipe("fp8", layers, wgrad="tile")}
    flows["tile, saved8"] = build_recipe("fp8", layers, wgrad="tile", saved_gate_up="fp8")
    if cpu:
        flows["bf16"] = plain
    for way, recipe in flows.items():
        got = gradient(with_recipe(model, recipe, torch.bfloat16), batch, config)
        yield from (compared(name, way, got[name], want[name]) | {"what": "whole"} for name in want)
        if way == "row":
            rows = got
        elif recipe is not plain:
            yield from (compared(name, way, got[name], rows[name]) | {"what": "same flow"} for name in want)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--name", default="gradient_quality")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    config = load_config(find_recipe(args.recipe), args.overrides)
    config = resolve(config, cuda_available=torch.cuda.is_available())
    session, batch = first_batch(config)
    caught: Caught = {}
    rows_flow = with_recipe(session.model, build_recipe("fp8", session.model.spec.num_layers), torch.bfloat16)
    catch(rows_flow, caught)
    gradient(rows_flow, batch, config)
    rows = [*alone(caught), *whole(session.model, batch, config)]
    session.close()
    save(args.name, [{"recipe": args.recipe, "overrides": args.overrides, **row} for row in rows], args.out)
    shown = []
    for what, way in dict.fromkeys((row["what"], row["way"]) for row in rows):
        for role in dict.fromkeys(row["matrix"].rpartition(".")[2] for row in rows):
            of = [r for r in rows if (r["what"], r["way"]) == (what, way) and r["matrix"].endswith(f".{role}")]
            if not of:  # a linear that is BF16 in every recipe has no wgrad by codes
                continue
            cosines, errors = [r["cosine"] for r in of], [r["error"] for r in of]
            shown.append({
                "what": what, "way": way, "role": role, "cosine": f"{median(cosines):.5f}",
                "worst": f"{min(cosines):.5f}", "error": f"{median(errors):.4f}", "largest": f"{max(errors):.4f}",
            })
    print(f"{args.recipe}: {batch.num_loss_tokens} tokens with loss in {len(batch.micro_batches)} micro-batches")
    print(table(shown, list(shown[0])))


if __name__ == "__main__":
    main()
