"""LoRA's costs on one GPU: decode, update, publishing, a checkpoint, and what fits a smaller GPU. Random weights.

    python benchmarks/bench_lora.py                                   # all parts, Qwen3-8B's shape, rank 32
    python benchmarks/bench_lora.py --parts decode --precision fp8 w8a16 bf16 --batch 1 64 256
    python benchmarks/bench_lora.py --parts update --rounds 2 --precision w8a16
    python benchmarks/bench_lora.py --parts fit --recipes gsm8k_qwen3_32b_lora --gpu h100
    python benchmarks/bench_lora.py --tiny                            # a small model on the CPU: that it runs

decode  milliseconds of a decode step, in one process: the model with adapters, and the same one without them (over the
        same memory), take turns. Prompts of `--prompt` tokens, `--new` new ones. Goal: at most +10 % at 64 sequences,
        +6 % at 256. `--also apart`: adapters beside their neighbours, in kernels of their own; `fork`: A x on a
        second stream (`model.adapter.FORK`); `joined`: and q, k and v in the kernel of heads
        (`kernels.adapters.heads.JOINED`). Each engine has a cache of its own.
update  `train.step.update` of `--tokens` in sequences of `--length`, one a micro-batch, and publishing, as in
        `bench_update.py`. All weights (BF16 masters and moments, as FP32 ones do not fit) and adapters (FP32 masters
        and moments) take turns in processes of their own, of which each measures `--repeats`. With adapters also
        publishing alone, and a checkpoint: its bytes and seconds (of the disk that `--folder` is on). Goals: at most
        0.87 times all weights, 1 ms, 1.7 GB.
fit     two steps of each recipe over stand-ins (`recipes_on_random.py`) with adapters that are not zero: parity, the
        peak, and what was predicted. `--gpu` is the memory that there is: on a larger GPU torch gets no more than that
        one has, less `CONTEXT`, and the run is told so.

Writes benchmarks/results/lora.json after each row: new rows replace old ones of the same part, case and round.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench_rollout import DecodeClock
from bench_update import FLOW, groups_of
from common import (
    RESULTS,
    NoText,
    ask,
    emit,
    end_on_sigterm,
    environment,
    median,
    require_gpu,
    save,
    saved_rows,
    table,
    timed,
)

from jetrl.config import Config, load_config, resolve, to_toml
from jetrl.config.shipped import find_recipe
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.huggingface.adapter import write_adapters
from jetrl.huggingface.config import hf_config
from jetrl.kernels.pointwise import ops as pointwise
from jetrl.model import adapter
from jetrl.model.adapter import Adapter, without_adapters
from jetrl.model.block import Block
from jetrl.model.master import masters_of, parts_of
from jetrl.model.transformer import Transformer
from jetrl.parallel.world import ALONE
from jetrl.parity.model_under_test import Subject, config_for
from jetrl.precision.recipe import recipe_of
from jetrl.report.recorder import read_metrics
from jetrl.run import setup
from jetrl.run.checkpoint import checkpoint
from jetrl.run.checkpoint.optim_state import optimizer_parts, prefixed
from jetrl.run.fit.advice import GPUS, on_gpu
from jetrl.run.fit.memory import GIB, predict
from jetrl.run.loop import StopRequest, run
from jetrl.spec import SHAPES, ModelSpec
from jetrl.train.optim import build_optimizer
from jetrl.train.packing import pack
from jetrl.train.passes import estimate
from jetrl.train.publish import publish
from jetrl.train.step import Learner, update
from jetrl.types import Request, SamplingParams, WeightSet

TINY = replace(
    SHAPES["qwen3-0.6b"], vocab_size=2304, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=64, max_position=4096,
)
WHOLE, LORA = "all weights", "adapters"
ALSO = {"apart": "adapters, apart", "fork": "adapters, two streams", "joined": "adapters, with heads"}
CONTEXT = GIB  # of a GPU's memory, that torch's allocator cannot have
PARTS = ("decode", "update", "fit")


def spec_of(args: argparse.Namespace, shape: str) -> ModelSpec:
    if args.tiny:
        return TINY
    return replace(SHAPES[shape], num_layers=args.layers or SHAPES[shape].num_layers)


def subject(args: argparse.Namespace, precision: str, rank: int | None) -> Subject:
    """The model with random weights; adapters of `rank` are drawn, and none of them is zero."""
    spec = spec_of(args, args.shape)
    arch = {key: value for key, value in hf_config(spec).items() if value is not None}
    data: dict[str, Any] = {"model": {"arch": arch, "tokenizer": "builtin:arithmetic"}, "precision": precision}
    data |= {} if rank is None else {"lora": {"rank": rank}}
    config = config_for(data, args.device)
    return Subject(config, spec, recipe_of(config, spec), args.shape, "", random=True, draws=rank is not None)


def synchronized() -> float:
    """Now, when the device has done all that it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# decode


def decode(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each batch size, round and model."""
    precision = args.one
    with_adapters = subject(args, precision, args.rank).published()
    models = {WHOLE: without_adapters(with_adapters), LORA: with_adapters}
    models |= {ALSO[name]: with_adapters for name in args.also}
    for batch in args.batch:
        settings = EngineSettings(
            page_size=128 if args.device == "cuda" else 16, share_beginnings=False, max_num_seqs=batch,
            max_tokens_per_step=8192, kv_cache_tokens=batch * 128 * -(-(args.prompt + args.new) // 128),
        )
        engines = {name: PagedEngine(model, NoText(), FLOW, settings) for name, model in models.items()}
        for name, engine in engines.items():  # compiles, and captures graphs
            engine.load(WeightSet(1, FLOW, {}))
            with way(name):
                engine.generate(requests_of(args, batch, min(args.prompt, 512), min(args.new, 40)))
        for number in range(args.rounds):
            for name, engine in list(engines.items())[:: 1 if number % 2 == 0 else -1]:
                row = {"part": "decode", "precision": precision, "variant": name, "batch": batch, "round": number}
                with way(name):
                    yield row | steps_of(engine, args, batch)
        del engines, engine


@contextmanager
def way(variant: str) -> Iterator[None]:
    """Within it, adapters are computed as that variant says."""
    with ExitStack() as stack:
        if variant in (ALSO["fork"], ALSO["joined"]):
            stack.enter_context(mock.patch.object(adapter, "FORK", True))
        if variant == ALSO["joined"]:
            name = "jetrl.kernels.adapters.heads"  # needs Triton
            if importlib.util.find_spec("triton"):
                stack.enter_context(mock.patch.object(importlib.import_module(name), "JOINED", True))
        if variant == ALSO["apart"]:
            for owner, name, apart in (
                (Block, "add_norm_for", lambda self, linear, x, residual, side: self._normed(x, residual)),
                (Adapter, "finish_heads", lambda self, y, begun, of: pointwise.qkv_norm_rope(
                    self.finish(y, begun), *of)),
                (Adapter, "finish_swiglu", lambda self, y, begun, reads: pointwise.swiglu(self.finish(y, begun))),
            ):
                stack.enter_context(mock.patch.object(owner, name, apart))
        yield


def requests_of(args: argparse.Namespace, batch: int, prompt: int, new: int) -> list[Request]:
    """Random prompts whose sequences never stop early."""
    g, sampling = np.random.default_rng(1), SamplingParams(new, ignore_eos=True)
    vocab = spec_of(args, args.shape).vocab_size
    return [Request(i, tuple(g.integers(1, vocab, prompt).tolist()), sampling) for i in range(batch)]


def steps_of(engine: PagedEngine, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """One `generate`: the steps in which all sequences decode, and the whole."""
    clock, start = DecodeClock(batch, args.prompt), synchronized()
    engine.generate(requests_of(args, batch, args.prompt, args.new), on_step=clock.on_step)
    if not clock.steps:
        raise SystemExit(f"--new {args.new} are too few: no step had all {batch} sequences decode")
    # the median leaves out looks in which a graph was captured
    return {"step_ms": median(clock.steps), "seconds": synchronized() - start, "context": clock.context}


# update


def update_config(args: argparse.Namespace, whole: bool) -> Config:
    dtype, prompt = "bfloat16" if whole else "float32", min(512, args.length // 2)
    overrides = [
        f"precision={args.one}", f"train.master_dtype={dtype}", f"train.optimizer_dtype={dtype}",
        "train.offload_optimizer=false", f"train.max_tokens_per_gpu={args.length}",
        f"rollout.max_response_length={args.length - prompt}", f"task.max_prompt_length={prompt}",
    ]
    overrides += [] if args.one == "bf16" else ["quant.kv_cache=bf16"]
    overrides += [] if whole else [f"lora.rank={args.rank}"]
    config = load_config(find_recipe("gsm8k_qwen3_8b"), overrides)
    return on_gpu(config) if args.device == "cuda" else config.model_copy(update={"device": "cpu", "kernels": "auto"})


def updates(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of one variant in this process: the first call compiles and is not counted."""
    whole = args.variant == WHOLE
    config = resolve(update_config(args, whole), cuda_available=args.device == "cuda")
    model = subject(args, args.one, None if whole else args.rank).trained(config, ALONE)
    masters = masters_of(model)
    learner = Learner(model, build_optimizer(masters, config.train))
    groups = groups_of(args.tokens, args.length, model.spec.vocab_size, min(512, args.length // 2))
    batches = pack(groups, max_tokens_per_gpu=args.length, flow_digest=FLOW, weight_version=0)
    _, (batch,), _ = estimate(groups, batches, learner, None, config, True)
    row = {"part": "update", "precision": args.one, "variant": args.variant, "tokens": args.tokens}

    def step() -> None:
        update(learner, [batch], config, 1)
        publish(model, 0, FLOW)

    step()
    for number in range(args.repeats):
        ms, peak = timed(step)
        yield row | {"number": number, "update_ms": ms} | ({"peak GiB": peak} if torch.cuda.is_available() else {})
    if not whole:
        times = [timed(lambda: publish(model, 0, FLOW))[0] for _ in range(20)]
        of_optimizer = optimizer_parts(learner.optimizer, masters.values())
        parts = prefixed("model", parts_of(model)) | prefixed("optimizer", of_optimizer)
        yield row | {"part": "save", "publish_ms": median(times)} | saved(model, parts, args.folder)


def saved(model: Transformer, parts: dict[str, Any], where: Path | None) -> dict[str, Any]:
    """Seconds and bytes of a checkpoint with the adapters' folder, as a run writes it."""
    def folder_of(
        folder: Path, state: Path, parts: Mapping[str, Any], check: Callable[[], None]
    ) -> list[Path]:
        return write_adapters(
            folder, model.spec, model.recipe, lambda name: parts[f"model.{name}"].value, {}, ("base", None), None
        )

    with tempfile.TemporaryDirectory(dir=where) as name:
        start = synchronized()
        path = checkpoint.save(Path(name), checkpoint.Meta(1, 1, FLOW, {}, {}), parts, folder_of, 1)
        seconds = time.perf_counter() - start
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return {"checkpoint s": seconds, "checkpoint GB": size / 1e9}


# fit


class Properties:
    """A GPU's properties, with less memory."""

    def __init__(self, true: Any, total: int) -> None:
        self._true, self.total_memory = true, total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._true, name)


def limit_memory(total: int) -> int:
    """Make this GPU one of `total` bytes, if it has more: for torch's allocator, and for all that ask how much there
    is. Returns what it then has."""
    true, ask_free = torch.cuda.get_device_properties, torch.cuda.mem_get_info
    has = true(0).total_memory
    if has <= total:
        return int(has)
    torch.cuda.set_per_process_memory_fraction((total - CONTEXT) / has)
    torch.cuda.get_device_properties = lambda *a: Properties(true(*a), total)

    def free(*where: Any) -> tuple[int, int]:
        return min(ask_free(*where)[0], total - CONTEXT - torch.cuda.memory_reserved()), total

    torch.cuda.mem_get_info = free
    return total


def drawn_on_device(config: Config, spec: ModelSpec, recipe: Any, **_: Any) -> Transformer:
    """In place of `setup.build_model`: weights and adapters are drawn where they stay."""
    return Subject(config, spec, recipe, "", "", random=True, draws=True).trained(config, ALONE)


def two_steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The recipe `args.one`, within the memory of `--gpu`."""
    from recipes_on_random import shape_of, stand_in_config

    from jetrl.run.checkpoint import base

    on_device = args.device == "cuda"
    capacity = limit_memory(GPUS[args.gpu]) if on_device else GPUS[args.gpu]
    spec = spec_of(args, shape_of(args.one))
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        config = stand_in_config(args.one, folder, spec, args.sampled, args.response, args.device)
        (folder / "run.toml").write_text(to_toml(config.model_copy(update={"device": args.device, "kernels": "auto"})))
        settings = ["eval.eval_interval=0", "checkpoint.save_interval=2", 'checkpoint.background="off"', *args.settings]
        config = resolve(load_config(folder / "run.toml", settings), cuda_available=on_device)
        setup.build_model = drawn_on_device
        base.made_here = lambda config: False  # a drawn base is not kept: it would be all that a checkpoint takes
        base.named = lambda *_: ("base", None)
        if on_device:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with StopRequest() as stop:
            assert run(config, folder / "runs" / config.name, ["bench_lora"], stop)
        run_dir = folder / "runs" / config.name
        steps = read_metrics(run_dir)[1:]
        files = (run_dir / "checkpoints" / "step_000002").rglob("*")
        row: dict[str, Any] = {
            "part": "fit", "recipe": args.one, "settings": args.settings, "layers": spec.num_layers,
            "GPU GiB": capacity / GIB, "max_tokens_per_gpu": config.train.max_tokens_per_gpu,
            "parity": max(step["parity/logprob_abs_diff_max"] for step in steps),
            "predicted GiB": predict(config, spec, 1, capacity).peak / GIB,
            "rollout s": steps[-1]["time/rollout"], "update s": steps[-1]["time/update"],
            "publish ms": 1e3 * steps[-1]["time/publish"], "checkpoint s": steps[-1]["time/checkpoint"],
            "checkpoint GB": sum(file.stat().st_size for file in files if file.is_file()) / 1e9,
            "seconds": time.perf_counter() - start,
        }
        if on_device:
            row["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
            row["reserved GiB"] = torch.cuda.max_memory_reserved() / GIB
    yield row


# all of it


def asked(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """What each process measures, in order, and its own arguments."""
    for part in args.parts:
        if part == "decode":
            yield from ((f"decode, {precision}", ["--part=decode", f"--one={precision}"])
                        for precision in args.precision)
        elif part == "update":
            for number in range(args.rounds):
                for precision in args.precision:
                    for variant in (WHOLE, LORA)[:: 1 if number % 2 == 0 else -1]:
                        yield (f"update, {precision}, {variant}, round {number}",
                               ["--part=update", f"--one={precision}", f"--variant={variant}", f"--round={number}"])
        else:
            yield from ((f"fit, {recipe}", ["--part=fit", f"--one={recipe}"]) for recipe in args.recipes)


_CASE = ("part", "shape", "layers", "precision", "variant", "rank", "batch", "recipe", "settings", "round", "number")


def with_row(rows: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with `new` in the place of an old one of the same case."""
    return [*(row for row in rows if any(row.get(key) != new.get(key) for key in _CASE)), new]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians with and without adapters, their spread, and the ratio, of each case of decode and update."""
    found = []
    for part, value in (("decode", "step_ms"), ("update", "update_ms")):
        of_part = [row for row in rows if row["part"] == part]
        for case in dict.fromkeys((row["precision"], row.get("batch", row.get("tokens"))) for row in of_part):
            line: dict[str, Any] = {"part": part, "precision": case[0], "batch/tokens": case[1]}
            for name in (WHOLE, LORA, *ALSO.values()):
                same = [r for r in of_part if (r["precision"], r.get("batch", r.get("tokens"))) == case]
                values = [r[value] for r in same if r["variant"] == name]
                peaks = [r["peak GiB"] for r in same if r["variant"] == name and "peak GiB" in r]
                if values:
                    line |= {f"{name} ms": median(values), f"{name} spread %": 100 * (max(values) / min(values) - 1)}
                if peaks:
                    line[f"{name} GiB"] = max(peaks)
            for name, short in ((LORA, "ratio"), *((name, f"ratio {short}") for short, name in ALSO.items())):
                if f"{WHOLE} ms" in line and f"{name} ms" in line:
                    line[short] = line[f"{name} ms"] / line[f"{WHOLE} ms"]
            found.append(line)
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", default="qwen3-8b", choices=list(SHAPES))
    parser.add_argument("--precision", nargs="+", choices=["fp8", "w8a16", "bf16"], default=["fp8"])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 256], help="decode: sequences")
    parser.add_argument("--prompt", type=int, default=512, help="decode: tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="decode: new tokens of a sequence")
    parser.add_argument("--also", nargs="+", choices=list(ALSO), default=[], help="decode: other ways to compute it")
    parser.add_argument("--tokens", type=int, default=32768, help="update: of an update")
    parser.add_argument("--length", type=int, default=8192, help="update: of a sequence, which is a micro-batch")
    parser.add_argument("--repeats", type=int, default=2, help="update: in each process")
    parser.add_argument("--recipes", nargs="+", default=["gsm8k_qwen3_32b_lora"], help="fit")
    parser.add_argument("--gpu", choices=list(GPUS), default="h100", help="fit: the memory that there is")
    parser.add_argument("--sampled", type=int, default=32768, help="fit: tokens that a step samples, about")
    parser.add_argument("--response", type=int, default=512, help="fit: longest answer")
    parser.add_argument("--settings", nargs="+", default=[], help="fit: further settings")
    parser.add_argument("--folder", type=Path, help="of temporary files (the system's)")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU; nothing is kept")
    parser.add_argument("--name", default="lora")
    parser.add_argument("--out", type=Path, default=RESULTS)
    for name in ("--part", "--one", "--variant"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = "cpu" if args.tiny else "cuda"
    if args.tiny:
        args.batch, args.prompt, args.new, args.rounds, args.rank = [2, 3], 20, 12, 1, 8
        args.tokens, args.length, args.repeats, args.sampled, args.response = 256, 64, 1, 64, 4
        args.recipes = args.recipes[:1]
        args.settings = ["train.max_tokens_per_gpu=1024", "task.max_prompt_length=256", *args.settings]
    return args


def main() -> None:
    args = parsed()
    if args.part:
        measure = {"decode": decode, "update": updates, "fit": two_steps}[args.part]
        own = {"round": args.round} if args.part == "update" else {}
        for row in measure(args):
            sizes = {} if args.part == "fit" else {
                "shape": args.shape, "layers": spec_of(args, args.shape).num_layers, "rank": args.rank,
            }
            emit(row | sizes | own | {"environment": environment()})
        return
    if not args.tiny:
        require_gpu()
    end_on_sigterm()
    rows, new, failed = saved_rows(args.out / f"{args.name}.json"), [], []
    for what, words in asked(args):
        start = time.perf_counter()
        try:
            for row in ask([sys.executable, __file__, *words, *sys.argv[1:]], limit=600):
                new.append(row)
                rows = with_row(rows, row)
                if not args.tiny:
                    save(args.name, rows, args.out)
        except RuntimeError as error:  # of one of several: the others are measured all the same
            failed.append(what)
            print(f"{what}: FAILED\n{error}", flush=True)
        print(f"{what}: {time.perf_counter() - start:.0f} s", flush=True)
    for name, columns in (
        ("save", ["precision", "round", "publish_ms", "checkpoint s", "checkpoint GB"]),
        ("fit", ["recipe", "layers", "GPU GiB", "parity", "peak GiB", "predicted GiB", "rollout s", "update s",
                 "publish ms", "checkpoint s", "checkpoint GB", "seconds"]),
    ):
        if of_part := [row for row in new if row["part"] == name]:
            print(table(of_part, columns))
    if lines := summary(new):
        print(table(lines, list(dict.fromkeys(key for line in lines for key in line))))
    if failed or any(row.get("parity", 0.0) != 0.0 for row in new):
        raise SystemExit(f"failed: {failed}" if failed else "a log-prob of the learner differs from the sampler's")


if __name__ == "__main__":
    main()
