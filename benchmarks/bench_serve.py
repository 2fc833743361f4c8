"""`jetrl serve`: requests per second of its HTTP alone, and agents over HTTP against the engine in process and vLLM.

    python benchmarks/bench_serve.py http                      # a CPU: the engine answers at once
    python benchmarks/bench_serve.py agents --agents 256 32    # a GPU: Qwen3-8B's shape, random FP8 weights
    python benchmarks/bench_serve.py vllm --agents 256 32 --peer-path "SITE:MORE"   # the same load, after `agents`
    python benchmarks/bench_serve.py agents --tiny             # both on a CPU, to try the program

`http`: the whole server but for the model. The client is one process (`http_load.py`), on the same cores; prompts have
`--prompt` tokens, and answers `--new` with their log-probs; columns `front ms` to `client ms` are CPU time a request of
each process (where other programs have the cores, these say more than requests per second). `agents`: conversations of
`--turns` turns of `--prompt` new and `--new` drawn tokens (`agents_load.py`), over HTTP and, in the same process and
with the same engine, without it: there each turn goes on in the pages that were kept for its conversation, as in a
rollout. Rounds take turns; `computed tokens` counts from when the engine was last idle. `vllm` starts vLLM's server
from `--peer-path` (folders for PYTHONPATH) in a process of its own, with prefix caching, and runs the same load;
compare it with `agents` on the same machine. Writes `results/serve_PART.json` as rows come.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib import request

import agents_load
import numpy as np
import torch
from agents_load import Load, Times, times_of
from common import RESULTS, median, require_gpu, save, saved_rows, table
from stand_ins import gsm8k_rows, write_tokenizer
from vllm_kernels import compile_all

from jetrl.api import random_model
from jetrl.engine.engine import PagedEngine
from jetrl.engine.plan import NewTokens
from jetrl.engine.settings import EngineSettings
from jetrl.huggingface.config import hf_config
from jetrl.precision.flow import flow_digest
from jetrl.serve.address import FrontSettings, listen
from jetrl.serve.engine_side import serve_engine
from jetrl.serve.server import Running, running_front
from jetrl.serve.service import About
from jetrl.spec import SHAPES, ModelSpec
from jetrl.types import Completion, Request, SamplingParams, StepReport, WeightSet

MODEL = "bench"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
COLUMNS = ["server", "agents", "round", "tokens/s", "first p50 ms", "first p95 ms", "turn p95 s", "computed tokens"]


def words_tokenizer(folder: Path, vocab_size: int) -> Any:
    """A tokenizer in a folder whose every id is a text of some letters; the last ids are special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"w{i:x}" for i in range(vocab_size - len(letters) - len(SPECIAL)))]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@contextmanager
def over_http(engine: Any, about: About, most: int = 4096) -> Iterator[Running]:
    """The server over an engine that another thread steps."""
    stop = threading.Event()
    with running_front(listen("127.0.0.1", 0), about, FrontSettings(max_requests=most)) as front:
        thread = threading.Thread(target=serve_engine, args=(engine, front.connection, stop.is_set, 0.1))
        thread.start()
        try:
            wait_for(f"{front.url}/health", 120, thread.is_alive)
            yield front
        finally:
            stop.set()
            thread.join()


def wait_for(url: str, limit: float, alive: Any) -> None:
    """Until the address answers with 200."""
    end = time.monotonic() + limit
    while alive() and time.monotonic() < end:
        try:
            with request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"{url} did not answer within {limit:g} s")


def cpu_seconds(pid: int) -> float:
    """Of a process, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- http -----------------------------------------------------------------------------------------------------------


class Instant:
    """An engine that has every answer at once: the same `new` tokens, and the text, log-probs and end of each."""

    def __init__(self, about: About, new: int) -> None:
        draw = np.random.default_rng(0)
        self.tokens = draw.integers(300, about.vocab_size - 10, new).astype(np.int32)
        self.logprobs = -draw.exponential(2.0, new).astype(np.float32)
        self.text, self.digest = about.tokenizer.decode(self.tokens.tolist()), about.flow_digest
        self.on_tokens: Any = None
        self._asked: list[Request] = []
        self._steps = self._done = 0

    @property
    def has_work(self) -> bool:
        return bool(self._asked)

    def add(self, requests: list[Request]) -> None:
        self._asked += requests

    def cancel(self, ids: Any) -> None:
        self._asked = [one for one in self._asked if one.id not in ids]

    def step(self) -> StepReport:
        self._steps += 1
        self._done += len(self._asked)
        self.on_tokens([NewTokens(one.id, 0, self.tokens, self.logprobs) for one in self._asked])
        return StepReport(self._steps, 0, 0, self._done, self._done * len(self.tokens))

    def collect(self) -> list[Completion]:
        asked, self._asked = self._asked, []
        return [
            Completion(one.id, self.tokens, self.logprobs, self.text, "length", 0, self.digest) for one in asked
        ]


def http_bodies(kind: str, tokenizer: Any, prompt: int, new: int, count: int = 200) -> tuple[str, list[dict[str, Any]]]:
    """The path of an endpoint, and different requests for it with `prompt` tokens each."""
    draw, shared = np.random.default_rng(1), {"model": MODEL, "max_tokens": new, "return_token_ids": True}
    if kind == "chat":
        text = " ".join(row["answer"] for row in gsm8k_rows(count * 4, seed=3))
        some = len(text) * prompt // len(tokenizer(text)["input_ids"])  # letters
        starts = draw.integers(0, len(text) - some, count).tolist()
        return "/v1/chat/completions", [
            shared | {"logprobs": True, "messages": [{"role": "user", "content": text[at : at + some]}]}
            for at in starts
        ]
    ids = draw.integers(300, len(tokenizer) - 10, (count, prompt)).tolist()
    if kind == "generate":
        sampling = {"max_tokens": new, "logprobs": 0}
        return "/inference/v1/generate", [
            {"model": MODEL, "token_ids": row, "sampling_params": sampling} for row in ids
        ]
    return "/v1/completions", [shared | {"logprobs": 0, "prompt": row} for row in ids]


def http(args: argparse.Namespace) -> None:
    """Rounds of each kind of request, in turn."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_tokenizer(folder)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        about = About(MODEL, tokenizer, len(tokenizer), args.prompt + args.new + 512, "0" * 16, 0)
        loads = {}
        for kind in args.kinds:
            path, bodies = http_bodies(kind, tokenizer, args.prompt, args.new)
            file = folder / f"{kind}.jsonl"
            file.write_text("\n".join(json.dumps(body) for body in bodies))
            loads[kind] = path, file
        with over_http(Instant(about, args.new), about) as front:
            for i in range(args.rounds):
                for kind, (path, file) in loads.items():
                    before = cpu_seconds(front.process.pid), time.process_time()
                    text = subprocess.run(
                        [sys.executable, Path(__file__).with_name("http_load.py"), front.url, file, "--path", path,
                         f"--seconds={args.seconds}", f"--connections={args.connections}", f"--expect={args.new}"],
                        check=True, stdout=subprocess.PIPE, text=True,
                    ).stdout
                    row = {"kind": kind, "prompt": args.prompt, "new": args.new, "round": i} | json.loads(text)
                    spent = cpu_seconds(front.process.pid) - before[0], time.process_time() - before[1]
                    parts = {"front": spent[0], "engine": spent[1], "client": row.pop("client cpu s")}
                    row |= {f"{who} ms": seconds / row["requests"] * 1e3 for who, seconds in parts.items()}
                    rows.append(row | {"cores": os.cpu_count()})
                    save("serve_http", rows, args.out)
    print(table(rows, ["kind", "round", "requests/s", "p50 ms", "p95 ms", "front ms", "engine ms", "client ms"]))
    for kind in args.kinds:
        found = [row["requests/s"] for row in rows if row["kind"] == kind]
        print(f"{kind}: {median(found):.0f} requests/s ({min(found):.0f} to {max(found):.0f})")


# ---- agents ---------------------------------------------------------------------------------------------------------


def in_process(engine: PagedEngine, load: Load) -> Times:
    """The same conversations without a server, each in the pages that are kept for it."""
    histories = [load.said(number, 0) for number in range(load.agents)]
    done = [0] * load.agents  # turns
    started, first, turns = dict[int, float](), dict[int, float](), list[tuple[float, float, float]]()

    def ask(number: int) -> None:
        sampling = SamplingParams(load.new, ignore_eos=True, seed=load.seed)
        started[number] = time.monotonic()
        engine.add([Request(number, tuple(histories[number]), sampling, load.longest)])

    def heard(news: list[NewTokens]) -> None:
        for one in news:
            if len(one.tokens):
                first.setdefault(one.request_id, time.monotonic())

    engine.on_tokens = heard
    for number in range(load.agents):
        ask(number)
    while engine.has_work:
        engine.step()
        for completion in engine.collect():
            number = completion.request_id
            turns.append((started[number], first.pop(number), time.monotonic()))
            done[number] += 1
            histories[number] += completion.tokens.tolist()
            if done[number] == load.turns:
                engine.forget([number])
            else:
                histories[number] += load.said(number, done[number])
                ask(number)
    engine.on_tokens = None
    return times_of(turns)


def build(args: argparse.Namespace, loads: list[Load], folder: Path) -> tuple[PagedEngine, About]:
    """The engine that both ways of `agents` use, with room for all conversations if the memory has it."""
    model = random_model(args.shape, args.precision, args.device, args.layers, args.kv, masters=False)
    tokenizer, spec, most = words_tokenizer(folder, model.spec.vocab_size), model.spec, max(args.agents)
    page, step = (128, 8192) if args.device == "cuda" else (16, 2048)
    settings = EngineSettings(
        page_size=page, max_num_seqs=most, max_tokens_per_step=step, keep_bytes=1 << 62,
        kv_cache_tokens=None if args.device == "cuda" else most * (loads[0].longest + page),
    )
    digest = flow_digest(spec, model.recipe)
    engine = PagedEngine(model, tokenizer, digest, settings)
    engine.load(WeightSet(1, digest, {}))
    engine.expect([load.longest + page for load in loads[:1] for _ in range(most)])
    return engine, About(MODEL, tokenizer, spec.vocab_size, spec.max_position, digest, 1)


def computed(engine: PagedEngine) -> dict[str, Any]:
    """Rows of all forward passes since the engine was last idle, and preemptions."""
    stats = engine.stats
    return {} if stats is None else {"computed tokens": stats.computed_tokens, "preemptions": stats.preemptions}


def loads_of(args: argparse.Namespace, vocab_size: int) -> list[Load]:
    return [
        Load(n, args.turns, args.prompt, args.new, vocab_size - len(SPECIAL), logprobs=args.logprobs)
        for n in args.agents
    ]


def spec_of(args: argparse.Namespace) -> ModelSpec:
    return replace(SHAPES[args.shape], num_layers=args.layers or SHAPES[args.shape].num_layers)


def warm(load: Load) -> Load:
    """The same, short: graphs are captured, kernels compiled."""
    return replace(load, turns=min(2, load.turns), new=max(8, load.new // 4), seed=1_000_000)


def agents(args: argparse.Namespace) -> None:
    """Rounds of both ways, in turn."""
    rows, loads = list[dict[str, Any]](), loads_of(args, spec_of(args).vocab_size)
    with tempfile.TemporaryDirectory() as place:
        engine, about = build(args, loads, Path(place))
        since = time.monotonic()
        for load in loads:
            in_process(engine, warm(load))
        with over_http(engine, about) as front:
            agents_load.run(front.url, MODEL, warm(loads[0]), args.processes)
        print(f"warm after {time.monotonic() - since:.0f} s", flush=True)
        for i in range(args.rounds):
            for load in loads:
                load = replace(load, seed=i)
                rows.append(row_of("in process", args, in_process(engine, load), load, i) | computed(engine))
                with over_http(engine, about) as front:
                    times = agents_load.run(front.url, MODEL, load, args.processes)
                rows.append(row_of("jetrl serve", args, times, load, i) | computed(engine))
                print(table(rows[-2:], COLUMNS), flush=True)
                save(args.name or "serve_agents", rows, args.out)
    print(summary(rows, "jetrl serve", "in process"))


def row_of(server: str, args: argparse.Namespace, times: Times, load: Load, i: int) -> dict[str, Any]:
    about = {"server": server, "shape": args.shape, "precision": args.precision, "kv": args.kv, "layers": args.layers}
    return about | times.row(load) | {"round": i}


def summary(rows: list[dict[str, Any]], ours: str, base: str) -> str:
    """Medians of both, and the ratio."""
    lines = []
    for count in dict.fromkeys(row["agents"] for row in rows):
        def found(server: str, what: str, count: int = count) -> list[float]:
            return [row[what] for row in rows if row["server"] == server and row["agents"] == count]

        if not (found(ours, "tokens/s") and found(base, "tokens/s")):
            continue
        speeds, firsts = ([median(found(s, what)) for s in (ours, base)] for what in ("tokens/s", "first p95 ms"))
        spread = ", ".join(f"{s}: {min(v):.0f} to {max(v):.0f}" for s in (ours, base) if (v := found(s, "tokens/s")))
        lines.append(
            f"{count} agents: {ours} {speeds[0]:.0f} tokens/s, {base} {speeds[1]:.0f}: {speeds[0] / speeds[1]:.3f} "
            f"({spread}); p95 of the first token {firsts[0]:.0f} and {firsts[1]:.0f} ms"
        )
    return "\n".join(lines)


# ---- vLLM -----------------------------------------------------------------------------------------------------------


def vllm_command(args: argparse.Namespace, folder: Path, port: int) -> list[str]:
    most, longest = max(args.agents), args.turns * (args.prompt + args.new)
    sizes = sorted({1, 2, 4, *range(8, most + 1, 8), most})
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--served-model-name", MODEL,
        "--load-format", "dummy", "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", str(longest + 16), "--max-num-seqs", str(most), "--gpu-memory-utilization", "0.9",
        "--enable-prefix-caching", "--kv-cache-dtype", "fp8" if args.kv == "fp8" else "auto",
        "--generation-config", "vllm", "--compilation-config", json.dumps({"cudagraph_capture_sizes": sizes}),
        "--attention-config", json.dumps({"backend": "FLASH_ATTN"}), *args.peer_args.split(),
    ]


def vllm_env(args: argparse.Namespace) -> dict[str, str]:
    """Without the network; FlashInfer is not there."""
    cache = args.peer_cache
    return os.environ | {
        "PYTHONPATH": args.peer_path, "VLLM_USE_DEEP_GEMM": "1", "VLLM_DEEP_GEMM_WARMUP": args.peer_warmup,
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0", "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_CACHE_ROOT": cache,
        "DG_JIT_CACHE_DIR": f"{cache}/deep_gemm", "TOKENIZERS_PARALLELISM": "false",
    } | ({"CUDA_HOME": "/usr/local/cuda"} if Path("/usr/local/cuda/bin/nvcc").exists() else {})


@contextmanager
def vllm_server(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """vLLM's server; its address. Its log is `vllm_serve.log` in the folder of results."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "vllm_serve.log").open("w") as log:
        process = subprocess.Popen(
            vllm_command(args, folder, port), env=vllm_env(args), stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", args.peer_limit, lambda: process.poll() is None)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def vllm(args: argparse.Namespace) -> None:
    """Rounds of the same load; then the comparison with `agents`."""
    rows, spec = list[dict[str, Any]](), spec_of(args)
    loads, name = loads_of(args, spec.vocab_size), f"vllm serve {args.peer_args}".strip()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tokenizer = words_tokenizer(folder, spec.vocab_size)
        config = hf_config(spec, tokenizer=tokenizer)
        if args.precision == "fp8":
            config["quantization_config"] = {
                "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
            }
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        since = time.monotonic()
        sizes = sorted({*range(8, 257, 8), *range(64, 8193, 64)})
        failed = compile_all(spec, sizes, vllm_env(args)) if args.precision == "fp8" else 0
        print(f"kernels after {time.monotonic() - since:.0f} s ({failed} processes failed)", flush=True)
        with vllm_server(args, folder) as url:
            for load in loads:
                agents_load.run(url, MODEL, warm(load), args.processes)
            print(f"warm after {time.monotonic() - since:.0f} s", flush=True)
            for i in range(args.rounds):
                for load in loads:
                    load = replace(load, seed=i)
                    times = agents_load.run(url, MODEL, load, args.processes)
                    rows.append(row_of(name, args, times, load, i))
                    print(table(rows[-1:], COLUMNS), flush=True)
                    save(args.name or "serve_vllm", rows, args.out)
    ours = saved_rows(args.out / "serve_agents.json")
    print(summary(rows + [row for row in ours if row["server"] == "jetrl serve"], "jetrl serve", name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["http", "agents", "vllm"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, help="tokens (default: 2048 of http, 256 of each turn)")
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="", help="of the file with the results")
    parser.add_argument("--kinds", nargs="+", default=["completions", "generate", "chat"], help="of http")
    parser.add_argument("--seconds", type=float, default=8.0, help="of http, each round and kind")
    parser.add_argument("--connections", type=int, default=32, help="of http")
    parser.add_argument("--agents", nargs="+", type=int, default=[256, 32], help="the most first")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--logprobs", action="store_true", help="clients ask for log-probs")
    parser.add_argument("--processes", type=int, default=8, help="of the client")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--kv", default="fp8", help="cache: bf16 or fp8")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tiny", action="store_true", help="a small shape on a CPU")
    parser.add_argument("--peer-path", default="", help="PYTHONPATH of vLLM's process")
    parser.add_argument("--peer-args", default="", help="further arguments of vLLM's server, as '--stream-interval 8'")
    parser.add_argument("--peer-warmup", default="relax", help="VLLM_DEEP_GEMM_WARMUP")
    parser.add_argument("--peer-cache", default="/tmp/vllm_cache")
    parser.add_argument("--peer-limit", type=float, default=300.0, help="seconds until vLLM's server must answer")
    args = parser.parse_args()
    args.prompt = args.prompt or (2048 if args.part == "http" else 256)
    args.device = "cpu" if args.tiny else "cuda"
    if args.tiny:
        small = {"shape": "smollm2-135m", "layers": 1, "agents": [8, 2], "turns": 3, "prompt": 24, "new": 16,
                 "processes": 2}
        vars(args).update(small)
    elif args.part != "http":
        require_gpu()
        torch.cuda.init()
    {"http": http, "agents": agents, "vllm": vllm}[args.part](args)


if __name__ == "__main__":
    main()
