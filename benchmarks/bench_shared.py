"""The update with shared prompts (`train.share_prompts`) against packed whole sequences, by the program's functions.

    python benchmarks/bench_shared.py                                        # Qwen3-8B's shape, FP8
    python benchmarks/bench_shared.py --cases 8192+1024x8 --layers 18        # micro-batches of 16,391 rows need memory

A case is prompt + reply x samples; `--groups` of them have random tokens and advantages. `--micro-tokens` must hold a
group with its prompt once, or the group is split. Both packings come from `train.packing.pack`; an update is
`train.step.update` and publishing, with BF16 masters and moments. They take turns; medians, the first round not
counted. "different" counts log-probs of the first pass whose bits differ: it must be 0. "cosine" is the smallest of any
matrix's gradients. Writes `benchmarks/results/shared.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, emit, environment, median, save, table, timed

from jetrl.api import random_model
from jetrl.config import Config, parse_config, resolve
from jetrl.config.shipped import find_recipe
from jetrl.config.toml import read_toml
from jetrl.model.master import accumulate_in
from jetrl.model.transformer import Transformer
from jetrl.rl.objective import objective
from jetrl.train.batches import PackedBatch
from jetrl.train.optim import MixedAdamW
from jetrl.train.packing import by_trajectory, denominators, fill, held, pack, to_device, with_rows
from jetrl.train.passes import logprob_pass
from jetrl.train.step import Learner, forward_rows, inputs_of, update
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory


def parse_case(case: str) -> tuple[int, int, int]:
    """Tokens of prompt and reply, and samples, of "2048+1024x8"."""
    prompt, rest = case.split("+")
    reply, samples = rest.split("x")
    return int(prompt), int(reply), int(samples)


def groups_of(case: str, count: int, vocabulary: int) -> list[Group]:
    prompt, reply, samples = parse_case(case)
    draw = np.random.default_rng(0)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(draw.integers(1, vocabulary, number).tolist())

    groups = []
    for index in range(count):
        opening = Segment("environment", tokens(prompt), "")
        turns = [Segment("policy", tokens(reply), "", (0.0,) * reply, spans=((0, 0),)) for _ in range(samples)]
        trajectories = tuple(Trajectory((opening, turn), "stop", "") for turn in turns)
        advantages = tuple(draw.normal(size=samples).tolist())
        prompt_of = Prompt(index, Problem("", "", ""), tuple(opening.tokens.tolist()))
        groups.append(Group(prompt_of, trajectories, (), advantages))
    return groups


def packings(groups: Sequence[Group], micro_tokens: int) -> dict[str, PackedBatch]:
    found = {}
    for name, share in (("packed", False), ("shared", True)):
        batches = pack(
            groups, max_tokens_per_gpu=micro_tokens, flow_digest="", weight_version=0, share_prompts=share
        )
        (found[name],) = fill(batches, "advantages", [a for g in groups for a in g.advantages])
    return found


def logprobs(model: Transformer, batch: PackedBatch, groups: Sequence[Group]) -> np.ndarray:
    """All log-probs, in the order of trajectories."""
    lengths = [t.num_policy_tokens for g in groups for t in g.trajectories]
    rows = logprob_pass(model, batch, 1.0)
    return np.concatenate(by_trajectory([held([with_rows(batch, "ref_logprobs", rows)], "ref_logprobs")], lengths))


def gradients(model: Transformer, batch: PackedBatch, config: Config) -> list[torch.Tensor]:
    """Of all matrices, on the CPU; those of the model are then none."""
    shares = denominators(batch, config.rollout.max_response_length)
    for host in batch.micro_batches:
        micro = to_device(host, model.head_weight.device)
        rows = forward_rows(model, micro, 1.0)
        objective(inputs_of(micro, rows, None, single=True), config.rl, shares)[0].backward()
    found = [p.grad.cpu() for p in model.parameters() if p.ndim > 1 and p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def cosine(one: Sequence[torch.Tensor], two: Sequence[torch.Tensor]) -> float:
    pairs = [(a.flatten().double(), b.flatten().double()) for a, b in zip(one, two, strict=True)]
    return min(float(a @ b / (a.norm() * b.norm())) for a, b in pairs)


def measure(learner: Learner, config: Config, case: str, args: argparse.Namespace) -> dict[str, Any]:
    model = learner.model
    groups = groups_of(case, args.groups, model.spec.vocab_size)
    batches = packings(groups, args.micro_tokens)
    row: dict[str, Any] = {
        "work": case, "case": case, "groups": args.groups, "shape": args.shape, "layers": model.spec.num_layers,
        "precision": args.precision, "gradients": args.grad_dtype, "checkpointing": args.checkpointing,
    }
    for name, batch in batches.items():
        row |= {f"{name} rows": sum(len(m.tokens) for m in batch.micro_batches),
                f"{name} micro-batches": len(batch.micro_batches)}
    one, two = (logprobs(model, batch, groups) for batch in batches.values())
    row |= {"different": int((one != two).sum()), "compared": len(one)}
    if not args.no_cosine:
        row["cosine"] = cosine(*(gradients(model, batch, config) for batch in batches.values()))

    def step(batch: PackedBatch) -> None:
        update(learner, [batch], config, 1)
        model.publish()

    def read(batch: PackedBatch) -> None:
        logprob_pass(model, batch, 1.0)

    for job, fn in (("update", step), ("log-probs", read)):
        times: dict[str, list[float]] = {name: [] for name in batches}
        for turn in range(args.rounds + 1):
            for name, batch in batches.items():
                spent, peak = timed(partial(fn, batch))
                times[name] += [spent] if turn else []
                row[f"{name} {job} peak GiB"] = peak
        row |= {f"{name} {job} ms": median(spent) for name, spent in times.items()}
        row |= {f"{name} {job} all ms": spent for name, spent in times.items()}
        row[f"{job} ratio"] = row[f"packed {job} ms"] / row[f"shared {job} ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["2048+1024x8", "8192+1024x8"])
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--micro-tokens", type=int, default=16391)
    parser.add_argument("--grad-dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--no-cosine", action="store_true", help="gradients are not compared (they need host memory)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    given = read_toml(find_recipe("quickstart"))
    config = resolve(parse_config(given, "quickstart"), cuda_available=torch.cuda.is_available())
    config = config.model_copy(update={"train": config.train.model_copy(update={"lr": 1e-6, "warmup_steps": 0})})
    model = random_model(args.shape, args.precision, args.device, args.layers)
    model.activation_checkpointing = args.checkpointing
    accumulate_in(model, getattr(torch, args.grad_dtype))
    learner = Learner(model, MixedAdamW(model.parameters(), 1e-6, state_dtype=torch.bfloat16))
    rows = []
    for case in args.cases:
        rows.append(measure(learner, config, case, args))
        if args.one:
            emit(rows[-1] | {"environment": environment()})
    if args.one:
        return
    shown = [
        "case", "packed rows", "shared rows", "packed micro-batches", "shared micro-batches", "different", "cosine",
        "packed update ms", "shared update ms", "update ratio", "log-probs ratio", "shared update peak GiB",
    ]
    print(table(rows, shown))
    save("shared", rows, args.out)


if __name__ == "__main__":
    main()
