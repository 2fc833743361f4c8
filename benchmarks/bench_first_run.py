"""The first rollout and the first update of a fresh machine: seconds in compilers, with kernels compiled ahead or not.

    python benchmarks/bench_first_run.py                     # both ways, side by side where there are two GPUs
    python benchmarks/bench_first_run.py --ways ahead --layers 4 --shape qwen3-0.6b --precision bf16

Each way is a process of its own with empty caches of compilers, in a folder that is deleted. `needed`: kernels are
compiled when they are first called. `ahead`: first by `train/compile_ahead.py`, as a run does. Then both make a rollout
of 256 sequences that end one after the other, and one update of ragged sequences with few layers, each twice: what the
first takes longer than the second is compilation (and capture of graphs). Weights are zeros: only shapes count. `new`
counts the kernels that were not on disk: after `ahead` there should be none. On one GPU `ahead` comes first; whatever
has not ended after `--limit` seconds in all is ended, and the rows that are there are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import MARK, RESULTS, NoText, emit, environment, require_gpu, save, table

from jetrl.config import Config, parse_config, resolve
from jetrl.kernels.support import caches
from jetrl.parallel.world import ALONE
from jetrl.spec import SHAPES, ModelSpec
from jetrl.types import Group, Problem, Prompt, Request, SamplingParams, Segment, Trajectory

COLUMNS = [
    "way", "what", "first s", "in compilers", "longest step s", "again s", "Triton new", "DeepGEMM new", "FA4 new",
]
CACHES = {  # where each compiler keeps kernels: a variable, and a folder within ours
    "TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "deepgemm", "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash/kernels",  # the marker stands next to it
}


def config_for(args: argparse.Namespace) -> Config:
    precision, _, kv = args.precision.partition(" ")
    data: dict[str, Any] = {
        "name": "first", "precision": precision, "quant": {"kv_cache": "fp8"} if kv else {},
        "model": {"arch": {"model_type": "qwen3"}, "tokenizer": "builtin:arithmetic"},
        "task": {"name": "addition", "max_prompt_length": 1024},
        "rollout": {"max_num_seqs": args.batch, "max_response_length": 2048},
        "train": {
            "max_tokens_per_gpu": 8192, "master_dtype": "bfloat16", "optimizer_dtype": "bfloat16",
            "grad_dtype": "float32",
        },
    }
    if not data["quant"]:
        del data["quant"]
    return resolve(parse_config(data), cuda_available=True)


class Compilers:
    """Seconds that this process's main thread spends in compilers, and the kernels that appear on disk."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def timed(self, call: Callable[..., Any], least: float) -> Callable[..., Any]:
        """Counts calls that take at least `least` seconds: a launch takes microseconds, a kernel found on disk some
        milliseconds."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                spent = time.perf_counter() - start
                if spent >= least and not self._depth:
                    self.seconds += spent

        return run

    def watch(self) -> None:
        import deep_gemm
        from triton.runtime.jit import JITFunction

        from jetrl.kernels.backends import flash

        JITFunction._do_compile = self.timed(JITFunction._do_compile, 0.0)
        for name in [name for name in dir(deep_gemm) if "gemm" in name and not name.startswith("_")]:
            if callable(getattr(deep_gemm, name)):
                setattr(deep_gemm, name, self.timed(getattr(deep_gemm, name), 0.2))
        for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
            setattr(flash, name, self.timed(getattr(flash, name), 0.02))


def on_disk() -> dict[str, int]:
    """Compiled kernels in each cache."""
    where = caches()
    return {
        "Triton new": sum(1 for _ in where["Triton"].glob("*/*.cubin")),
        "DeepGEMM new": sum(1 for _ in where["DeepGEMM"].rglob("kernel.cubin")),
        "FA4 new": sum(1 for _ in where["FlashAttention-4"].rglob("*.o")),
    }


@contextmanager
def measured(row: dict[str, Any], compilers: Compilers) -> Iterator[None]:
    before, spent = on_disk(), compilers.seconds
    torch.cuda.synchronize()
    start = time.perf_counter()
    yield
    torch.cuda.synchronize()
    row["first s"] = time.perf_counter() - start
    row["in compilers"] = compilers.seconds - spent
    row |= {name: count - before[name] for name, count in on_disk().items()}


def requests(batch: int, vocabulary: int) -> list[Request]:
    """Prompts of 50 to 1,000 tokens; the k-th answer has 8 + 2 k tokens, so that every batch size occurs."""
    rng = np.random.default_rng(0)
    return [
        Request(
            k, tuple(rng.integers(vocabulary, size=int(rng.integers(50, 1000))).tolist()),
            SamplingParams(8 + 2 * k, ignore_eos=True),
        )
        for k in range(batch)
    ]


def rollout(config: Config, spec: ModelSpec, args: argparse.Namespace, compilers: Compilers) -> dict[str, Any]:
    from jetrl.model.transformer import Transformer
    from jetrl.rollout.engine import PagedEngine
    from jetrl.train.setup import recipe_of

    model = Transformer(spec, recipe_of(config, spec), master_dtype=None).to("cuda")
    row: dict[str, Any] = {"way": args.way, "what": f"rollout, {args.batch} to 1 sequences, {spec.num_layers} layers"}
    asked, longest = requests(args.batch, spec.vocab_size), 0.0
    with measured(row, compilers):
        zeros = ((name, torch.zeros(p.shape, device="cuda")) for name, p in list(model.named_parameters()))
        model.publish_values(zeros)
        engine = PagedEngine(
            model, NoText(), "flow", page_size=config.rollout.page_size or 0, max_num_seqs=args.batch,
            max_tokens_per_step=config.rollout.max_tokens_per_step or 0,
        )
        engine.load(weights_in_place())
        longest = generated(engine, asked)
    row["longest step s"] = longest
    engine.release()  # a run gives the cache back, and captures its graphs anew
    start = time.perf_counter()
    generated(engine, asked)
    row["again s"] = time.perf_counter() - start
    return row


def weights_in_place() -> Any:
    """What `load` notes: the engine reads the model itself."""
    from jetrl.types import WeightSet

    return WeightSet(0, "flow", {})


def generated(engine: Any, asked: list[Request]) -> float:
    """Generate all; the longest look at the engine, in seconds."""
    longest, last = 0.0, time.perf_counter()

    def on_step(_: object) -> None:
        nonlocal longest, last
        now = time.perf_counter()
        longest, last = max(longest, now - last), now

    engine.generate(asked, on_step=on_step)
    return longest


def groups(spec: ModelSpec) -> list[Group]:
    """Four groups of eight ragged answers."""
    rng = np.random.default_rng(1)

    def answer(prompt: tuple[int, ...]) -> Trajectory:
        tokens = tuple(rng.integers(spec.vocab_size, size=int(np.clip(rng.lognormal(6.3, 0.8), 20, 2000))).tolist())
        given = Segment("environment", prompt, ""), Segment("policy", tokens, "", (0.0,) * len(tokens))
        return Trajectory(given, "stop", 0, "flow")

    found = []
    for number in range(4):
        prompt = tuple(rng.integers(spec.vocab_size, size=int(rng.integers(50, 500))).tolist())
        answers = tuple(answer(prompt) for _ in range(8))
        rewards = tuple(float(i % 2) for i in range(8))
        found.append(Group(Prompt(number, Problem("", "", ""), prompt), answers, rewards))
    return found


def update(config: Config, spec: ModelSpec, args: argparse.Namespace, compilers: Compilers) -> dict[str, Any]:
    from jetrl.train import setup
    from jetrl.train.packing import pack
    from jetrl.train.passes import estimate
    from jetrl.train.step import update as one_update

    row: dict[str, Any] = {"way": args.way, "what": f"update, {spec.num_layers} layers"}

    def once(learner: Any) -> None:
        batches = pack(
            groups(spec), max_tokens_per_gpu=config.train.max_tokens_per_gpu, flow_digest="flow", weight_version=0
        )
        _, filled, _ = estimate(groups(spec), batches, learner, None, config, True)
        one_update(learner, filled, config, 1)
        learner.model.publish()
        torch.cuda.synchronize()

    with measured(row, compilers):
        model = setup.build_model(config, spec, setup.recipe_of(config, spec), weights=False)
        learner = setup.build_learner(config, model)
        once(learner)
    start = time.perf_counter()
    once(learner)
    row["again s"] = time.perf_counter() - start
    return row


def one(args: argparse.Namespace) -> None:
    """One way, in this process, whose caches are empty."""
    from dataclasses import replace

    from jetrl.kernels.dispatch import select
    from jetrl.report.compiling import Compiling
    from jetrl.train.compile_ahead import compile_ahead

    config, shape = config_for(args), SHAPES[args.shape]
    phase = 0.0
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if args.way == "ahead":
        before, start = on_disk(), time.perf_counter()
        compile_ahead(config, shape, ALONE, Compiling)
        row: dict[str, Any] = {"way": "ahead", "what": "phase before the run", "first s": time.perf_counter() - start}
        phase = row["first s"]
        row |= {name: count - before[name] for name, count in on_disk().items()}
        markers = list((caches()["FlashAttention-4"].parent / "compiled").glob("*.json"))
        row["marker"] = json.loads(markers[0].read_text()) if markers else "none: something failed, see above"
        start = time.perf_counter()
        compile_ahead(config, shape, ALONE, Compiling)
        emit(row | {"again s": time.perf_counter() - start, "environment": environment()})
    select(config.kernels)
    compilers = Compilers()
    compilers.watch()
    errors: list[Exception] = []
    for part, layers in ((rollout, args.layers), (update, min(4, args.layers))):
        if part.__name__ not in args.parts:
            continue
        try:
            row = part(config, replace(shape, num_layers=layers), args, compilers)
            emit(row | {"environment": environment()})
            if part is rollout:
                spent = phase + row["in compilers"]
                emit({"way": args.way, "work": "sum", "what": "compilation in all", "seconds": spent})
        except Exception as error:  # the other part still tells something; the status tells of this one
            errors.append(error)
            print(f"{args.way}: {part.__name__} failed: {type(error).__name__}: {error}", flush=True)
        torch.cuda.empty_cache()
    if errors:
        raise errors[0]


def run_way(way: str, gpu: str | None, rows: list[dict[str, Any]], failures: list[str], deadline: float) -> None:
    """Measure one way in a new process; its rows go to `rows`, everything else that it prints is shown."""
    with tempfile.TemporaryDirectory(prefix="first-run-") as folder:
        variables = {name: str(Path(folder) / where) for name, where in CACHES.items()}
        variables |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        process = subprocess.Popen(
            [sys.executable, __file__, "--way", way, *sys.argv[1:]], env=os.environ | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        timer = threading.Timer(max(1.0, deadline - time.monotonic()), process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                rows.append(json.loads(line[len(MARK) :]))
            else:
                print(f"[{way}] {line}", end="", flush=True)
        status = process.wait()
        timer.cancel()
        if status:
            failures.append(f"{way}: ended with status {status}" + (" (time is up)" if status == -9 else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=("ahead", "needed"), default=["ahead", "needed"])
    parser.add_argument("--parts", nargs="+", choices=("rollout", "update"), default=["rollout", "update"])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--precision", default="fp8 kv8", help="bf16, fp8 or 'fp8 kv8'")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--limit", type=float, default=290.0, help="seconds for everything")
    parser.add_argument("--name", default="first_run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--way", choices=("ahead", "needed"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        one(args)
        return
    require_gpu()
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    deadline, gpus = time.monotonic() + args.limit, torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    threads = [
        threading.Thread(target=run_way, args=(way, visible[i % gpus], rows, failures, deadline))
        for i, way in enumerate(args.ways)
    ]
    for i, thread in enumerate(threads):
        thread.start()
        if i % gpus == gpus - 1 or i == len(threads) - 1:
            for begun in threads[: i + 1]:
                begun.join()
    save(args.name, rows, args.out)
    for row in rows:
        if "marker" in row:
            print(f"compiled ahead: {json.dumps(row['marker'])}")
    print(table(rows, COLUMNS))
    for failure in failures:
        print(failure)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
