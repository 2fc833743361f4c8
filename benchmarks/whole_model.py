"""What benchmarks of whole models share (`bench_latent.py`, `bench_hybrid.py`, `profile_step.py`): rollouts with their
floor, updates with their FLOPs, another engine's rows, and the rounds in which all of them take turns.

The models are random ones of a published shape.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_rollout import PEER_MARK, DecodeClock, peer_command
from bench_step import BF16_CEILING
from bench_update import FLOW, groups_of
from common import READ_TBPS, RESULTS, NoText, ask, median, save, saved_rows, split_variant, table, timed

from jetrl.config import Config, load_config, resolve
from jetrl.config.shipped import find_recipe
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.engine.sharing import Merge
from jetrl.engine.state_pool import page_bytes
from jetrl.kernels import delta
from jetrl.model.block import Routes
from jetrl.model.master import accumulate_in, masters_of
from jetrl.model.moe import routers_of
from jetrl.model.transformer import Transformer
from jetrl.parity.rows import varlen
from jetrl.precision.blocks.layouts import linears_of
from jetrl.run.fit.advice import on_gpu, predict
from jetrl.spec import SHAPES, ModelSpec
from jetrl.train.optim import build_optimizer
from jetrl.train.packing import pack
from jetrl.train.passes import estimate
from jetrl.train.publish import publish
from jetrl.train.step import Learner, update
from jetrl.types import Request, SamplingParams, WeightSet

Row = dict[str, Any]
GIB = 2**30
DELTA_BYTES = 46.7e3  # that a decode step of Gated DeltaNet moves for a value head of 128 x 128, on average
Workload = tuple[int, int, int, int]  # sequences, prompt, new tokens, and sequences that share a prompt


# counting


def spec_of(shape: str, layers: int | None) -> ModelSpec:
    return replace(SHAPES[shape], num_layers=layers or SHAPES[shape].num_layers)


def weights_of(spec: ModelSpec, hit: float) -> tuple[float, float]:
    """Elements of the weights that a decode step reads, `hit` experts in a layer: of linears, which FP8 makes bytes,
    and of what is BF16 in every recipe (kv_b, routers, the gates of Gated DeltaNet and its convolution, lm_head)."""
    linears = 0.0
    for layer in range(spec.num_layers):
        for linear in linears_of(spec, layer).values():
            share = hit / linear.experts if linear.experts else 1.0
            linears += share * sum(linear.sections) * linear.in_size
    rest = spec.vocab_size * spec.hidden_size
    if (m := spec.latent) is not None:
        rest += spec.num_layers * spec.num_heads * (m.nope + m.value) * m.rank
    if spec.experts is not None:
        rest += len(spec.expert_layers) * spec.experts.count * spec.hidden_size
    if (d := spec.delta) is not None:
        rest += len(delta_layers(spec)) * (2 * d.value_heads * spec.hidden_size + d.conv_channels * d.conv_width)
    return linears, rest


def delta_layers(spec: ModelSpec) -> list[int]:
    """The layers of Gated DeltaNet among those that the model has."""
    return [] if spec.delta is None else [i for i in spec.delta.layers if i < spec.num_layers]


def state_bytes(spec: ModelSpec, context: float, kv_cache: str = "bf16") -> float:
    """Bytes that a decode step must move for a sequence: its cached rows, and what Gated DeltaNet keeps of it."""
    if spec.latent is not None:
        return context * spec.num_layers * 2 * spec.latent.row
    head = spec.head_dim + 2 if kv_cache == "fp8" else spec.head_dim * 2  # codes and a scale, or BF16
    moved = context * (spec.num_layers - len(delta_layers(spec))) * 2 * spec.num_kv_heads * head
    if (d := spec.delta) is not None:
        moved += len(delta_layers(spec)) * d.value_heads * DELTA_BYTES * d.key_dim * d.value_dim / 128**2
    return moved


def floor_ms(
    spec: ModelSpec, fp8: bool, sequences: int, context: float, hit: float = 0, kv_cache: str = "bf16"
) -> float:
    """Milliseconds of a decode step that reads each weight and each cached row once, and moves each state as the
    kernels' design counts it."""
    linears, rest = weights_of(spec, hit)
    moved = sequences * state_bytes(spec, context, kv_cache)
    return (linears * (1 if fp8 else 2) + 2 * rest + moved) / READ_TBPS / 1e9


def flops_of_update(spec: ModelSpec, tokens: int) -> float:
    """By active parameters and the head: three passes of 2 for each of them and token. Attention's and the delta
    rule's own do not count."""
    return 6.0 * tokens * sum(weights_of(spec, spec.experts.per_token if spec.experts is not None else 0))


@torch.no_grad()
def experts_hit(model: Transformer, sequences: list[list[int]], positions: list[int], at_once: int = 8) -> float:
    """Distinct experts that a step's tokens choose, mean over layers and the steps at `positions`."""
    assert model.spec.experts is not None
    device, hit = model.cos.device, dict[int, torch.Tensor]()
    at = torch.tensor(positions, device=device)
    for first in range(0, len(sequences), at_once):
        part = [torch.tensor(s, device=device) for s in sequences[first : first + at_once]]
        routes, start = Routes(), 0
        model(varlen(part), routes=routes)
        for tokens in part:
            for layer, chosen in routes.chosen.items():
                seen = hit.setdefault(layer, torch.zeros(len(at), model.spec.experts.count, device=device))
                seen.scatter_(1, chosen[start + at], 1.0)
            start += len(tokens)
    return torch.stack([seen.sum(-1).mean() for seen in hit.values()]).mean().item()


def delta_kernels() -> set[str]:
    """Names of the Triton kernels in `jetrl.kernels.delta`, as a profiler tells them. Empty without Triton."""
    try:
        from triton.runtime import JITFunction
    except ImportError:
        return set()
    found = set()
    for module in pkgutil.iter_modules(delta.__path__):
        name = f"{delta.__name__}.{module.name}"
        for value in vars(importlib.import_module(name)).values():
            while not isinstance(value, JITFunction) and hasattr(value, "fn"):  # tuned, or with heuristics
                value = value.fn
            launched = isinstance(value, JITFunction) and value.__name__.endswith("_kernel")
            if launched and value.__module__ == name:  # others are parts of kernels
                found.add(value.__name__)
    return found


# rollouts


def requests_of(
    spec: ModelSpec, sequences: int, prompt: int, new: int, group: int = 1, seed: int = 1
) -> list[Request]:
    """Random prompts, each for `group` sequences, which never stop early."""
    g, sampling = np.random.default_rng(seed), SamplingParams(new, ignore_eos=True)
    prompts = [tuple(g.integers(1, spec.vocab_size, prompt).tolist()) for _ in range(sequences // group)]
    return [Request(i, prompts[i // group], sampling) for i in range(sequences)]


def engine_of(model: Transformer, sequences: int, tokens: int, merge: Merge = "auto", group: int = 1) -> PagedEngine:
    """An engine with its weights loaded, for `sequences` of up to `tokens` tokens; `group` of them share a prompt."""
    on_cuda = model.cos.device.type == "cuda"
    settings = EngineSettings(
        page_size=128 if on_cuda else 16, share_beginnings=group > 1, max_num_seqs=sequences,
        max_tokens_per_step=8192, merge_prefix=merge, kv_cache_tokens=None if on_cuda else 16 * sequences * tokens,
    )
    engine = PagedEngine(model, NoText(), FLOW, settings)
    engine.load(WeightSet(1, FLOW, {}))
    return engine


def rollout_row(
    model: Transformer, fp8: bool, work: Workload, warm: tuple[int, int], merge: Merge = "auto", held: int = 0
) -> Row:
    """One `generate`, as a whole and in the steps that decode only. Before it one with prompts and answers of `warm`
    tokens compiles. `held`: bytes of the model's weights."""
    sequences, prompt, new, group = work
    spec, on_cuda = model.spec, model.cos.device.type == "cuda"
    engine = engine_of(model, sequences, prompt + new, merge, group)
    engine.generate(requests_of(spec, sequences, *warm, group, seed=2))
    requests, clock = requests_of(spec, sequences, prompt, new, group), DecodeClock(sequences, prompt)
    done, ms, peak = generated(engine, requests, clock)
    if not clock.steps:
        raise SystemExit(f"{new} new tokens are too few: no step had all {sequences} sequences decode")
    assert engine.stats is not None
    kept = model.recipe.kv_cache
    cache = engine.stats.num_pages * page_bytes(spec, engine.settings.page_size, torch.bfloat16, kept) / GIB
    del engine
    row: Row = {"sequences": sequences, "prompt": prompt, "new": new, "group": group}
    hit = 0.0
    if spec.experts is not None:
        some = [list(r.tokens) + done[r.id] for r in requests[::group]]
        hit = row["experts hit"] = experts_hit(model, some, list(range(prompt, prompt + new - 1, max(1, new // 8))))
    row |= {"tokens/s": sequences * new / ms * 1e3, "step_ms": clock.step_ms, "context": clock.context}
    floor = floor_ms(spec, fp8, sequences, clock.context, hit, "fp8" if kept.is_quantized else "bf16")
    row["share of floor"] = floor / clock.step_ms
    if on_cuda:
        row |= {"weights GiB": held / GIB, "peak GiB": peak, "peak without cache GiB": peak - cache}
        torch.cuda.empty_cache()
    return row


def generated(
    engine: PagedEngine, work: list[Request], clock: DecodeClock
) -> tuple[dict[int, list[int]], float, float]:
    """The drawn tokens by request, milliseconds of the whole, and the peak of memory in GiB."""
    done = dict[int, list[int]]()

    def generate() -> None:
        done.update({c.request_id: c.tokens.tolist() for c in engine.generate(work, on_step=clock.on_step)})

    ms, peak = timed(generate)
    return done, ms, peak


def peer_rows(command: str, dtype: str, spec: ModelSpec, part: str, workloads: Iterable[Workload]) -> Iterator[Row]:
    """The rows of another engine for the same workloads. Its floor reads all experts."""
    precision, kv_cache, _ = split_variant(dtype)
    for sequences, prompt, new, group in workloads:
        asked = peer_command(command, dtype, [sequences], prompt, new, spec.num_layers, group)
        for row in ask(asked, PEER_MARK, limit=1200):
            more = {"step_ms": sequences / row["decode_tok_s"] * 1e3} if "decode_tok_s" in row else {}
            if more:
                hit, context = spec.experts.count if spec.experts is not None else 0, prompt + new / 2
                floor = floor_ms(spec, precision == "fp8", sequences, context, hit, kv_cache or "bf16")
                more["share of floor"] = floor / more["step_ms"]
            yield {
                "part": part, "engine": f"peer {dtype}", "precision": dtype, "prompt": prompt,
                "peer": row.get("engine", "unknown"), "sequences": sequences, "new": new, "group": group,
                "tokens/s": row["out_tok_s"], **more,
            }


# updates


def recipe_for(spec: ModelSpec) -> str:
    """The shipped recipe whose update a model of this shape has."""
    if spec.latent is not None:
        return "grpo_moonlight_16b_a3b"
    if spec.delta is not None:
        return "gsm8k_qwen3.5_9b"
    return "gsm8k_qwen3_8b" if spec.experts is None else "gsm8k_qwen3_30b_a3b"


def update_config(
    spec: ModelSpec, precision: str, device: str, length: int, micro: int, kernels: str = "auto",
    offload: bool = True, checkpointing: bool = False,
) -> Config:
    """The update of the shape's recipe with BF16 masters and moments, for sequences of `length` and micro-batches of
    `micro` tokens, without a reference. `offload`: the moments lie in host memory."""
    prompt = min(512, length // 2)
    config = load_config(find_recipe(recipe_for(spec)), [
        f"precision={precision}", *(["quant.kv_cache=bf16"] if precision == "fp8" else []),
        f"kernels={kernels}", "train.master_dtype=bfloat16", "train.grad_dtype=bfloat16",
        "train.optimizer_dtype=bfloat16", f"train.offload_optimizer={str(offload).lower()}", "rl.kl_coef=0",
        f"train.activation_checkpointing={str(checkpointing).lower()}",
        "train.reduction=fast", f"train.max_tokens_per_gpu={micro}", f"rollout.max_response_length={length - prompt}",
        f"task.max_prompt_length={prompt}",
    ])
    if device == "cuda":
        return on_gpu(config)
    return resolve(config.model_copy(update={"device": "cpu", "kernels": "auto"}), cuda_available=False)


def must_offload(
    spec: ModelSpec, precision: str, device: str, length: int, micro: int, kernels: str, checkpointing: bool
) -> bool:
    """Whether the moments must lie in host memory for this GPU's memory to be enough, by `jetrl`'s prediction."""
    if device != "cuda":
        return False
    config = update_config(spec, precision, device, length, micro, kernels, False, checkpointing)
    capacity = torch.cuda.get_device_properties(0).total_memory
    return not predict(config, spec, 1, capacity).fits(capacity)


def update_of(model: Transformer, config: Config, tokens: int, length: int) -> Callable[[], None]:
    """`train.step.update` and publishing, of `tokens` in sequences of `length`. Routers are frozen."""
    model.freeze(routers_of(model))
    model.activation_checkpointing = config.train.activation_checkpointing
    accumulate_in(model, torch.bfloat16)
    learner = Learner(model, build_optimizer(masters_of(model), config.train))
    groups = groups_of(tokens, length, model.spec.vocab_size, min(512, length // 2))
    most = config.train.max_tokens_per_gpu
    batches = pack(groups, max_tokens_per_gpu=most, flow_digest=FLOW, weight_version=0)
    _, (batch,), _ = estimate(groups, batches, learner, None, config, True)

    def step() -> None:
        update(learner, [batch], config, 1)
        publish(model, 0, FLOW)

    return step


def update_row(spec: ModelSpec, tokens: int, ms: float, peak: float, device: str) -> Row:
    """What an update of `ms` milliseconds means."""
    speed = flops_of_update(spec, tokens) / ms / 1e9
    row: Row = {"tokens": tokens, "update_ms": ms, "TFLOP/s": speed, "share of 785": speed / BF16_CEILING}
    return row | ({"peak GiB": peak} if device == "cuda" else {})


# what the scripts are asked


def add_update_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=32768, help="update: of an update")
    parser.add_argument("--length", type=int, default=2048, help="update: of a sequence")
    parser.add_argument("--micro", type=int, default=8192, help="update: tokens of a micro-batch")
    parser.add_argument("--checkpointing", action="store_true", help="update: activations are made again")


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """The options that the benchmarks of whole models share; `name`: of the file of results."""
    parser.add_argument("--precision", nargs="+", choices=["fp8", "bf16"], default=["fp8", "bf16"])
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 256], help="rollout: sequences")
    parser.add_argument("--prompt", type=int, default=512, help="rollout: tokens of a prompt")
    parser.add_argument("--new", type=int, default=1024, help="rollout: new tokens of a sequence")
    add_update_options(parser)
    parser.add_argument("--repeats", type=int, default=2, help="update: in each process")
    parser.add_argument("--peer", default="", help="command of another engine, as for bench_rollout.py")
    parser.add_argument("--peer-dtype", default="fp8", help="or 'fp8 kv8' (FP8 cache)")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU; nothing is kept")
    parser.add_argument("--name", default=name)
    parser.add_argument("--out", type=Path, default=RESULTS)
    for hidden in ("--part", "--one"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)


def parsed_by(parser: argparse.ArgumentParser, tiny_shape: str) -> argparse.Namespace:
    """The arguments, with the sizes of `--tiny`."""
    args = parser.parse_args()
    args.device = "cpu" if args.tiny else "cuda"
    if args.tiny:
        args.shape, args.batch, args.prompt, args.new, args.rounds = tiny_shape, [2, 3], 20, 12, 1
        args.tokens, args.length, args.micro, args.repeats = 256, 64, 128, 1
    return args


def tell(new: list[Row], failed: list[str]) -> None:
    """The summary; SystemExit if anything failed."""
    if lines := summary(new):
        print(table(lines, list(dict.fromkeys(key for line in lines for key in line))))
    if failed:
        raise SystemExit(f"failed: {failed}")


# all of it


_CASE = ("part", "shape", "layers", "precision", "kv_cache", "kernels", "engine", "sequences", "prompt", "new", "group",
         "tokens", "length", "micro", "checkpointing", "offload", "op", "case", "round", "number")
_VALUES = {"rollout": "tokens/s", "groups": "tokens/s", "long": "tokens/s", "update": "TFLOP/s"}  # of each part


def in_turns(args: argparse.Namespace, part: str) -> Iterator[tuple[str, int, list[str]]]:
    """The rounds of a part, with the arguments of our processes; no arguments: the peer."""
    for number in range(args.rounds):
        kinds = args.precision[:: 1 if number % 2 == 0 else -1]
        yield from ((part, number, [f"--part={part}", f"--one={kind}"]) for kind in kinds)
        if part != "update" and args.peer:
            yield part, number, []


def measured(
    script: str, args: argparse.Namespace, asked: Iterable[tuple[str, int, list[str]]],
    peers: Callable[[str], Iterator[Row]],
) -> tuple[list[Row], list[str]]:
    """The rows of all that is asked, kept as they come, and what failed: the others are measured all the same."""
    path: Path = args.out / f"{args.name}.json"
    rows, new, failed = saved_rows(path), list[Row](), list[str]()
    layers = spec_of(args.shape, args.layers).num_layers
    for part, number, words in asked:
        what, start = f"{part}, {words[-1] if words else 'peer'}, round {number}", time.perf_counter()
        try:
            ours = [sys.executable, script, *words, *sys.argv[1:]]
            for row in ask(ours, limit=900) if words else peers(part):
                row |= {"shape": args.shape, "layers": layers, "round": number}
                new.append(row)
                rows = with_row(rows, row)
                if not args.tiny:
                    save(args.name, rows, args.out)
        except (RuntimeError, SystemExit) as error:
            failed.append(what)
            print(f"{what}: FAILED\n{error}", flush=True)
        print(f"{what}: {time.perf_counter() - start:.0f} s", flush=True)
    return new, failed


def with_row(rows: list[Row], new: Row, case: tuple[str, ...] = _CASE) -> list[Row]:
    """The rows with `new` in the place of an old one of the same case."""
    return [*(row for row in rows if any(row.get(key) != new.get(key) for key in case)), new]


def summary(rows: list[Row]) -> list[Row]:
    """Medians of the rounds, their spread, and ours as a multiple of the peer's, or FP8's of BF16's in an update."""
    found: list[Row] = []
    for part, value in _VALUES.items():
        cases: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
        for row in (row for row in rows if row["part"] == part):
            case = row.get("sequences"), row.get("prompt"), row.get("tokens"), row.get("checkpointing")
            cases.setdefault(case, {}).setdefault(row.get("engine", row["precision"]), []).append(row)
        for case, engines in cases.items():
            bases = [of for name, of in engines.items() if name.startswith(("peer", "bf16"))]
            base = [row[value] for of in bases for row in of]
            for name, of in engines.items():
                values = [row[value] for row in of]
                line: Row = {"part": part, "of": name, "case": " ".join(str(x) for x in case if x is not None)}
                line |= {value: median(values), "spread %": 100 * (max(values) / min(values) - 1)}
                for key in ("step_ms", "share of floor", "share of 785", "share of delta", "peak GiB",
                            "peak without cache GiB"):
                    if told := [row[key] for row in of if row.get(key) is not None]:
                        line[key] = median(told)
                if base:
                    line["ratio"] = line[value] / median(base)
                found.append(line)
    return found
