"""The first rollout and the first update of a fresh machine: seconds in compilers, with kernels compiled ahead or not.

    python benchmarks/bench_first_run.py --out DIR           # both cases, both ways: at most 5 minutes
    python benchmarks/bench_first_run.py --cases h200_smollm2 --ways ahead

Cases are Qwen3-8B's shape (FP8 with FP8 KV, 256 sequences) and the recipe h200_smollm2. Each way is a process of its
own with empty caches of compilers, in a folder that is deleted. `needed`, the baseline: kernels are compiled when they
are first called. `ahead`: first by `run/compiling/ahead.py`, as a run does. Then both make a rollout in which
sequences end one after the other, so that every batch size occurs, and one update of ragged sequences, each twice: what
the first takes longer than the second is compilation (and capture of graphs). Weights are zeros: only shapes count.
`new` counts kernels that were not on disk: after `ahead` there should be none. The ways `ahead` run one at a time, as
all cores work for them; then the ways `needed`, of which each has one process, run side by side. What has not ended
after `--limit` seconds in all is ended, and the rows that are there are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import MARK, RESULTS, NoText, emit, environment, require_gpu, save, table

from jetrl.config import Config, parse_config, resolve
from jetrl.config.shipped import shipped
from jetrl.config.toml import read_toml
from jetrl.kernels.support import caches
from jetrl.parallel.world import ALONE
from jetrl.spec import SHAPES, ModelSpec
from jetrl.types import Group, Problem, Prompt, Request, SamplingParams, Segment, Trajectory

CASES = ("qwen3-8b", "h200_smollm2")
PARTS = ("rollout", "update")
COLUMNS = [
    "case", "way", "what", "first s", "in compilers", "longest step s", "again s", "Triton new", "DeepGEMM new",
    "FA4 new",
]
CACHES = {  # where each compiler keeps kernels: a variable, and a folder within ours
    "TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "deepgemm", "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash/kernels",  # the marker stands next to it
}


@dataclass(frozen=True, slots=True)
class Case:
    """A run's config and shape; `prompts` and `answers` are the longest of its sequences."""

    config: Config
    spec: ModelSpec
    prompts: int
    answers: int
    name: str
    way: str

    @property
    def batch(self) -> int:
        return self.config.rollout.max_num_seqs


def case_for(name: str, way: str, layers: int) -> Case:
    if name == "qwen3-8b":
        data: dict[str, Any] = {
            "name": "first", "precision": "fp8", "quant": {"kv_cache": "fp8"},
            "task": {"name": "addition", "max_prompt_length": 1024},
            "rollout": {"max_num_seqs": 256, "max_response_length": 2048},
            "train": {
                "max_tokens_per_gpu": 8192, "master_dtype": "bfloat16", "optimizer_dtype": "bfloat16",
                "grad_dtype": "float32",
            },
        }
        spec = SHAPES[name]
    else:
        data, spec = read_toml(shipped()[name]), SHAPES["smollm2-135m"]
        data["task"].pop("chat_template", None)  # it is the tokenizer's, and no tokenizer is read here
    data["model"] = {"arch": {"model_type": "qwen3"}, "tokenizer": "builtin:arithmetic"}
    config = resolve(parse_config(data), cuda_available=True)
    prompts, answers = config.task.max_prompt_length, config.rollout.max_response_length
    return Case(config, replace(spec, num_layers=min(layers, spec.num_layers)), prompts, answers, name, way)


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

        from jetrl.kernels.attention import flash

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


def requests(case: Case) -> list[Request]:
    """Prompts of all lengths; answers end one after the other, so that every batch size occurs."""
    rng, last = np.random.default_rng(0), min(case.answers, 8 + 2 * case.batch)

    def prompt() -> tuple[int, ...]:
        size = int(rng.integers(min(50, case.prompts // 2), case.prompts))
        return tuple(rng.integers(case.spec.vocab_size, size=size).tolist())

    return [
        Request(k, prompt(), SamplingParams(8 + (last - 8) * k // case.batch, ignore_eos=True))
        for k in range(case.batch)
    ]


def rollout(case: Case, compilers: Compilers) -> dict[str, Any]:
    from jetrl.engine.engine import PagedEngine
    from jetrl.engine.settings import EngineSettings
    from jetrl.model.transformer import Transformer
    from jetrl.precision.recipe import recipe_of

    config, spec = case.config, case.spec
    model = Transformer(spec, recipe_of(config, spec), master_dtype=None).to("cuda")
    row = about(case, f"rollout, {case.batch} to 1 sequences, {spec.num_layers} layers")
    asked, longest = requests(case), 0.0
    with measured(row, compilers):
        zeros = ((name, torch.zeros(p.shape, device="cuda")) for name, p in list(model.named_parameters()))
        model.publish_values(zeros)
        settings = EngineSettings(
            page_size=config.rollout.page_size or 0, max_num_seqs=case.batch, share_beginnings=False,
            max_tokens_per_step=config.rollout.max_tokens_per_step or 0,
        )
        engine = PagedEngine(model, NoText(), "flow", settings)
        engine.load(weights_in_place())
        longest = generated(engine, asked)
    row["longest step s"] = longest
    engine.release()  # a run gives the cache back, and captures its graphs anew
    start = time.perf_counter()
    generated(engine, asked)
    row["again s"] = time.perf_counter() - start
    return row


def about(case: Case, what: str) -> dict[str, Any]:
    return {"case": case.name, "way": case.way, "what": what}


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


def groups(case: Case) -> list[Group]:
    """Four groups of eight ragged answers."""
    rng, spec = np.random.default_rng(1), case.spec

    def answer(prompt: tuple[int, ...]) -> Trajectory:
        size = int(np.clip(rng.lognormal(6.3, 0.8), 20, case.answers))
        tokens = tuple(rng.integers(spec.vocab_size, size=size).tolist())
        drawn = Segment("policy", tokens, "", (0.0,) * len(tokens), spans=((0, 0),))
        given = Segment("environment", prompt, ""), drawn
        return Trajectory(given, "stop", "flow")

    found = []
    for number in range(4):
        prompt = tuple(rng.integers(spec.vocab_size, size=int(rng.integers(20, min(500, case.prompts)))).tolist())
        answers = tuple(answer(prompt) for _ in range(8))
        rewards = tuple(float(i % 2) for i in range(8))
        found.append(Group(Prompt(number, Problem("", "", ""), prompt), answers, rewards))
    return found


def update(case: Case, compilers: Compilers) -> dict[str, Any]:
    from jetrl.precision.recipe import recipe_of
    from jetrl.run import setup
    from jetrl.train.packing import pack
    from jetrl.train.passes import estimate
    from jetrl.train.step import update as one_update

    config, spec = case.config, replace(case.spec, num_layers=min(4, case.spec.num_layers))
    row = about(case, f"update, {spec.num_layers} layers")

    def once(learner: Any) -> None:
        batches = pack(
            groups(case), max_tokens_per_gpu=config.train.max_tokens_per_gpu, flow_digest="flow", weight_version=0
        )
        _, filled, _ = estimate(groups(case), batches, learner, None, config, True)
        one_update(learner, filled, config, 1)
        learner.model.publish()
        torch.cuda.synchronize()

    with measured(row, compilers):
        model = setup.build_model(config, spec, recipe_of(config, spec), weights=False)
        learner = setup.build_learner(config, model)
        once(learner)
    start = time.perf_counter()
    once(learner)
    row["again s"] = time.perf_counter() - start
    return row


def one(case: Case, parts: Sequence[str] = PARTS) -> None:
    """One way, in this process, whose caches are empty; `parts` are measured after the phase, if there is one."""
    from jetrl.kernels.dispatch import select
    from jetrl.run.compiling.ahead import compile_ahead
    from jetrl.run.compiling.display import Compiling

    config, phase = case.config, 0.0
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if case.way == "ahead":
        before, start = on_disk(), time.perf_counter()
        compile_ahead(config, case.spec, ALONE, Compiling)
        phase = time.perf_counter() - start
        row = about(case, "phase before the run") | {"first s": phase}
        row |= {name: count - before[name] for name, count in on_disk().items()}
        markers = list((caches()["FlashAttention-4"].parent / "compiled").glob("*.json"))
        row["marker"] = json.loads(markers[0].read_text()) if markers else "none: something failed, see above"
        start = time.perf_counter()
        compile_ahead(config, case.spec, ALONE, Compiling)
        emit(row | {"again s": time.perf_counter() - start, "environment": environment()})
    select(config.kernels)
    compilers = Compilers()
    compilers.watch()
    errors = []
    for part in (rollout, update):
        if part.__name__ not in parts:
            continue
        before_names = kernels_on_disk()
        try:
            row = part(case, compilers)
            emit(row | {"new kernels": sorted(kernels_on_disk() - before_names), "environment": environment()})
            if part is rollout:
                total = {"work": "sum", "seconds": phase + row["in compilers"]}
                emit(about(case, "compilation in all") | total)
        except Exception as error:  # the other part still tells something; the status tells of this one
            errors.append(error)
            print(f"{case.name}, {case.way}: {part.__name__} failed: {type(error).__name__}: {error}", flush=True)
        torch.cuda.empty_cache()
    if errors:
        raise errors[0]


def kernels_on_disk() -> set[str]:
    """Compiled kernels in the caches, each as its compiler, its name and the beginning of its key."""
    where = caches()
    triton = {f"Triton {path.stem} {path.parent.name[:8]}" for path in where["Triton"].glob("*/*.cubin")}
    gemms = {f"DeepGEMM {path.parent.name[:60]}" for path in where["DeepGEMM"].rglob("kernel.cubin")}
    return triton | gemms | {f"FA4 {path.stem[:60]}" for path in where["FlashAttention-4"].rglob("*.o")}


def run_way(case: str, way: str, rows: list[dict[str, Any]], failures: list[str], deadline: float) -> None:
    """Measure one way in a new process; its rows go to `rows`, everything else that it prints is shown."""
    with tempfile.TemporaryDirectory(prefix="first-run-") as folder:
        variables = {name: str(Path(folder) / where) for name, where in CACHES.items()}
        process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--cases", case, "--way", way], env=os.environ | variables,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )
        timer = threading.Timer(max(1.0, deadline - time.monotonic()), os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                rows.append(json.loads(line[len(MARK) :]))
            else:
                print(f"[{case}, {way}] {line}", end="", flush=True)
        status = process.wait()
        timer.cancel()
        if status:
            failures.append(f"{case}, {way}: status {status}" + (" (time is up)" if status == -9 else ""))


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What the issue asks for, in a line for each way: seconds of the phase, and of compilation after it."""
    lines = []
    for case, way in dict.fromkeys((row["case"], row["way"]) for row in rows):
        mine = [row for row in rows if (row["case"], row["way"]) == (case, way)]
        phase = sum(row["first s"] for row in mine if row["what"].startswith("phase"))
        within = sum(row.get("in compilers", 0.0) for row in mine)
        lines.append(f"{case}, {way}: phase {phase:.1f} s, then {within:.1f} s in compilers within the run")
        for row in mine:
            if way == "ahead" and row.get("new kernels"):
                lines.append(f"  compiled by the {row['what']}: {', '.join(row['new kernels'])}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=("ahead", "needed"), default=["ahead", "needed"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--layers", type=int, default=12, help="of the rollout, at most; kernels do not depend on it")
    parser.add_argument("--limit", type=float, default=290.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="first_run")
    parser.add_argument("--way", choices=("ahead", "needed"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        one(case_for(args.cases[0], args.way, args.layers), args.parts)
        return
    require_gpu()
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    deadline = time.monotonic() + args.limit
    if "ahead" in args.ways:
        for case in args.cases:
            run_way(case, "ahead", rows, failures, deadline)
    if "needed" in args.ways:
        threads = [
            threading.Thread(target=run_way, args=(case, "needed", rows, failures, deadline)) for case in args.cases
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    args.out.mkdir(parents=True, exist_ok=True)
    save(args.name, rows, args.out)
    for row in rows:
        if "marker" in row:
            print(f"{row['case']}, compiled ahead: {json.dumps(row['marker'])}")
    print(table(rows, COLUMNS))
    for line in [*summary(rows), *failures]:
        print(line)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
