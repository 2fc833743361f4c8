"""Parity certificates of published shapes with random weights, on a GPU.

    python benchmarks/certificates.py --again          # all 26, about 11 minutes
    python benchmarks/certificates.py                  # only those missing in benchmarks/results/certificates.json
    python benchmarks/certificates.py --budget 560     # start nothing that would not end within 560 s; call again
    python benchmarks/certificates.py --models qwen3-8b --precision fp8 --workloads long --again
    python benchmarks/certificates.py --models qwen3-30b-a3b --precision fp8 --out DIR --budget 540
    python benchmarks/certificates.py --write          # run nothing; the table goes to docs/PERFORMANCE.md
    python benchmarks/certificates.py --ranks 2        # that two ranks, one a GPU, give the bits of one

One process per model, which builds it once per precision. Workloads:

    ragged  512 sequences of 1 to 256 tokens; link c computes up to 474 of them in one step
    long    six sequences of 1 to 32,768 tokens (fewer where the model has fewer positions), prompts in chunks of 4096

Each link is kept as soon as it is measured ("links" in the file), with its peak of memory: called again after it was
stopped, a case goes on behind them, if commit and GPU are the same. The expected seconds do not include compiling
kernels (a minute or more on a fresh machine), and on busy hosts "ragged" takes four times as long: 1,000 short forward
passes wait for the host.

With `--ranks` each of RANK_CASES is one `jetrl parity random:SHAPE --nproc N`: the shape (and its layers), the flow,
and the masters of the update, which each GPU holds whole once. Rows go to benchmarks/results/certificates_ranks.json,
with the seconds of each link and of the whole command.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    ROOT,
    ask,
    between_markers,
    commit_name,
    emit,
    end_on_sigterm,
    environment,
    require_gpu,
    split_variant,
    write_json,
)
from torch import Tensor

from jetrl.api import random_model
from jetrl.model.transformer import Transformer
from jetrl.parity.certificate import Workload, chunked_link, decode_link, packed_link, random_sequences, shared_link
from jetrl.parity.drawn import draft_link, graph_link, merged_link
from jetrl.parity.rows import LinkResult
from jetrl.spec import SHAPES

MODELS = ["qwen3-8b", "llama-3.1-8b", "qwen3-1.7b", "qwen3-0.6b", "smollm2-135m", "qwen3-30b-a3b"]
PRECISIONS = ["fp8", "bf16"]
VARIANTS = [*PRECISIONS, "fp8 kv8"]  # kv8: with an FP8 KV cache
WORKLOADS = {  # pages of 128 tokens, as on every GPU
    "ragged": Workload(512, max_prompt=240, new_tokens=16, chunk=64, page_size=128, step_tokens=8192),
    "long": Workload(6, max_prompt=32768 - 24, new_tokens=24, chunk=4096, page_size=128),
}
RANK_CASES = [("qwen3-0.6b", "fp8", "fp32"), ("qwen3-0.6b", "bf16", "bf16"), ("qwen3-8b:4", "fp8", "fp32")]
RANK_SIZES = ["--sequences", "16", "--max-prompt", "240", "--new-tokens", "24", "--chunk", "64"]
LINKS: dict[str, Callable[[Transformer, list[Tensor], Workload], LinkResult]] = {  # as `certificate.certify` runs them
    "a": packed_link, "b": chunked_link, "c": decode_link, "d": graph_link, "m": merged_link, "v": draft_link,
    "s": shared_link,
}
SHARES = {"a": 0.35, "b": 0.25, "c": 0.15, "d": 0.05, "m": 0.05, "v": 0.05, "s": 0.1}  # of a case's seconds, about
START_SECONDS = 25.0  # imports, CUDA, weights
DOCUMENT = ROOT / "docs" / "PERFORMANCE.md"

Rows = list[dict[str, Any]]
Case = tuple[str, str, str]  # model, precision, workload


def case_of(row: dict[str, Any]) -> Case:
    return row["shape"], row["precision"], row["workload"]


def expected_seconds(case: Case) -> float:
    """Without compilation: the forward passes, the host's eager launches, and reading rows to compare them."""
    model, precision, name = case
    spec, work = SHAPES[model], WORKLOADS[name]
    longest = min(work.max_prompt + work.new_tokens, spec.max_position)
    ratio = longest ** (1 / (work.num_sequences - 1))  # lengths grow geometrically from 1
    lengths = [ratio**i for i in range(work.num_sequences)]
    tokens, drawn = sum(lengths), work.num_sequences * work.new_tokens
    heads = spec.num_heads * spec.head_dim
    width = spec.intermediate_size if spec.experts is None else spec.experts.per_token * spec.experts.intermediate_size
    a_layer = spec.hidden_size * (sum(spec.qkv_sections) + 3 * width + heads)
    # packed and alone (a), packed and chunked (b), packed and about four with preemption (c), two (d); two packed and a
    # shared one of the two longest (e), which hold most of the tokens of "long" alone
    most = name == "long"
    passes = 13 if most else 10
    linear = passes * tokens * 2 * spec.num_layers * a_layer / (0.6e15 if precision == "bf16" else 0.9e15)
    attention = passes * sum(2 * n * n for n in lengths) * heads * spec.num_layers / 0.45e15
    forwards = sum(1 + -(-n // work.chunk) for n in lengths) + 6 * work.new_tokens
    rows = (3 if most else 2) * tokens + 2 * drawn
    return linear + attention + forwards * spec.num_layers * 3e-4 + rows * spec.vocab_size * 2.3e-10


def link_seconds(case: Case, held: Rows) -> dict[str, float]:
    """Those of the case's links that are not `held`."""
    done = {part["link"] for part in held if case_of(part) == case}
    return {name: SHARES[name] * expected_seconds(case) for name in LINKS if name not in done}


def build(case: Case, device: str = "cuda") -> Transformer:
    shape, precision, _ = case
    name, kv_cache, _ = split_variant(precision)
    # the links read published weights only; masters of all experts would take 57 GiB more
    more = {} if SHAPES[shape].experts is None else {"masters": False}
    return random_model(shape, name, device, kv_cache=kv_cache, **more)


def measure(cases: list[tuple[Case, list[str]]], deadline: float) -> None:
    """The named links of one model's cases, in this process; a row for each, while there is time."""
    model, built = None, ""
    for case, links in cases:
        shape, precision, workload = case
        started = time.perf_counter()
        if built != precision:
            model = None  # free its memory before the next one; engines hold it in cycles
            gc.collect()
            torch.cuda.empty_cache()
            model, built = build(case), precision
            held = torch.cuda.memory_allocated() / 2**30
            print(f"{shape} {precision}: {held:.1f} GiB, made in {time.perf_counter() - started:.0f} s", flush=True)
        assert model is not None
        work, left = WORKLOADS[workload], link_seconds(case, [])
        sequences = random_sequences(model, work)
        longest = max(map(len, sequences))
        for name in links:
            if name in "dm" and not model.head_weight.is_cuda:
                continue  # graphs and merged pages are a GPU's
            if time.time() + left[name] > deadline:
                print(f"no time left for {' '.join(case)}, link {name}", flush=True)
                return
            torch.cuda.reset_peak_memory_stats()
            with torch.no_grad():
                result = LINKS[name](model, sequences, work)
            gc.collect()
            emit({
                "shape": shape, "precision": precision, "workload": workload,
                "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
                "vocabulary": model.spec.vocab_size, "longest": longest, "kv_cache": str(model.recipe.kv_cache),
                "num_parameters": sum(p.numel() for p in model.parameters()), **asdict(result),
                "environment": environment(),
            })


def whole(parts: Rows) -> dict[str, Any]:
    """The row of a case from those of its links."""
    own = {field.name for field in fields(LinkResult)}
    shared = {key: value for key, value in parts[0].items() if key not in own}
    links = [{key: value for key, value in part.items() if key in own} for part in parts]
    ok = all(link["rows"] > 0 and not link["rows_different"] for link in links)
    peak, seconds = max(part["peak GiB"] for part in parts), sum(part["seconds"] for part in parts)
    return shared | {"seconds": seconds, "peak GiB": peak, "links": links, "bit_equal": ok}


def missing(wanted: list[Case], rows: Rows, again: bool) -> list[Case]:
    held = set() if again else {case_of(row) for row in rows}
    return [case for case in wanted if case not in held]


def run(models: list[str], wanted: list[Case], path: Path, deadline: float, again: bool = False) -> bool:
    """Measure the cases that the file lacks, model by model; a new row replaces an old one. False if one failed."""
    rows: Rows = load(path)
    parts: Rows = [part for part in load(path, "links") if part["environment"]["commit"] == commit_name()]
    ok, todo = True, missing(wanted, rows, again)
    for model in models:
        left = {case: link_seconds(case, parts) for case in todo if case[0] == model}
        if not left:
            continue
        if time.time() + START_SECONDS + next(iter(next(iter(left.values())).values())) > deadline:
            print(f"{model}: no time left; call again for it")
            continue
        seconds = START_SECONDS + sum(sum(of_case.values()) for of_case in left.values())
        print(f"{model}: {len(left)} certificates, about {seconds:.0f} s and compilation", flush=True)
        ask_for = [[case, list(of_case)] for case, of_case in left.items()]
        command = [sys.executable, __file__, "--one", json.dumps(ask_for), "--deadline", str(deadline)]
        try:
            for part in ask(command, say=tell):
                case = case_of(part)
                parts.append(part)
                of_case = sorted((p for p in parts if case_of(p) == case), key=lambda p: list(LINKS).index(p["link"]))
                tell(link_line(part))
                if len(of_case) == len(LINKS):
                    row = whole(of_case)
                    rows = [*(r for r in rows if case_of(r) != case), row]
                    parts = [p for p in parts if case_of(p) != case]
                    tell(f"{line(row)} (expected {expected_seconds(case):.0f} s)")
                write_json(path, {"rows": rows} | ({"links": parts} if parts else {}))
        except RuntimeError as error:
            ok = False
            print(f"{model}: FAILED\n{error}", flush=True)
    return ok


def tell(text: str) -> None:
    print(f"  {text.strip()}", flush=True)


def link_line(part: dict[str, Any]) -> str:
    different = f"{n:,} DIFFERENT: {part['first_difference']}" if (n := part["rows_different"]) else "bit-equal"
    return (
        f"{' '.join(case_of(part))}, link {part['link']}: {part['rows']:,} rows, {different}, {part['seconds']:.1f} s, "
        f"{part['peak GiB']:.0f} GiB"
    )


def run_ranks(ranks: int, cases: list[Case], path: Path, device: str = "cuda", sizes: list[str] = RANK_SIZES) -> bool:
    """Certify the cases on `ranks` ranks; a new row replaces an old one. False if one failed or is not bit-equal.

    A case is a shape ("": the quickstart's), a flow, and the masters of the update.
    """
    ok = True
    for shape, precision, masters in cases:
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "jetrl.cli", "parity", f"random:{shape}" if shape else "", "--precision", precision,
             "--update", masters, "--device", device, "--nproc", str(ranks), "--json", *sizes],
            stdout=subprocess.PIPE, text=True,
        )
        text = "".join(done.stdout.partition("{")[1:])  # NCCL prints its version there if NCCL_DEBUG is set
        if not text:
            ok = False
            print(f"{shape} {precision} {masters}: FAILED with status {done.returncode}", flush=True)
            continue
        row = {
            "shape": shape, "flow": precision, "masters": masters, "seconds": time.perf_counter() - started,
            **json.loads(text), "environment": environment(),
        }
        keys = ("shape", "flow", "masters", "ranks")
        kept = [r for r in load(path) if any(r[key] != row[key] for key in keys)]
        write_json(path, {"rows": [*kept, row]})
        ok &= row["bit_equal"]
        print(rank_line(row), flush=True)
    return ok


def rank_line(row: dict[str, Any]) -> str:
    different = {link["link"]: f" ({n:,} DIFFERENT)" if (n := link["rows_different"]) else "" for link in row["links"]}
    links = ", ".join(f"{link['link']} {link['rows']:,}{different[link['link']]}" for link in row["links"])
    verdict = "bit-equal" if row["bit_equal"] else "NO CERTIFICATE"
    return (
        f"{row['shape']} {row['flow']}, {row['ranks']} ranks, update with {row['masters']} masters: {verdict}; rows "
        f"{links}; {row['seconds']:.0f} s"
    )


def load(path: Path, what: str = "rows") -> Rows:
    """The rows of a file, or the links of cases that were stopped."""
    return json.loads(path.read_text()).get(what, []) if path.is_file() else []


def counts(row: dict[str, Any]) -> tuple[int, int, int]:
    """Rows of log-probs compared (all links but d), drawn tokens compared (d), and how many of either differ."""
    compared = {link["link"]: link["rows"] for link in row["links"]}
    drawn = compared.pop("d", 0)
    return sum(compared.values()), drawn, sum(link["rows_different"] for link in row["links"])


def line(row: dict[str, Any]) -> str:
    rows, drawn, different = counts(row)
    verdict = "bit-equal" if row["bit_equal"] else f"{different} DIFFERENT"
    return f"{' '.join(case_of(row))}: {rows:,} rows and {drawn:,} drawn tokens, {verdict}, {row['seconds']:.1f} s"


def markdown(rows: Rows) -> str:
    """The table of all cases; those that have not been run say so."""
    found = {case_of(row): row for row in rows}
    lines = [
        "| shape | precision | workload | rows (a, b, c) | drawn tokens (d) | different | seconds | peak GiB |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for case in [(m, p, w) for m in MODELS for p in VARIANTS for w in WORKLOADS]:
        row = found.get(case)
        if row is None and case[1] not in PRECISIONS:
            continue
        if row is None:
            lines.append(f"| {' | '.join(case)} | not run | | | | |")
            continue
        compared, drawn, different = counts(row)
        verdict = "0" if row["bit_equal"] else f"**{different:,}**"
        lines.append(
            f"| {' | '.join(case)} | {compared:,} x {row['vocabulary']:,} | {drawn:,} | {verdict} "
            f"| {row['seconds']:.0f} | {row['peak GiB']:.0f} |"
        )
    places = sorted({(r["environment"]["gpu"], r["environment"]["commit"]) for r in rows})
    note = "Rows are log-probs of the whole vocabulary."
    return "\n".join([*lines, "", note, *(f"{gpu}, commit {commit}." for gpu, commit in places)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--precision", nargs="+", default=PRECISIONS, choices=VARIANTS)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--again", action="store_true", help="measure the chosen cases even if the file holds them")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--write", action="store_true", help="only put the table into docs/PERFORMANCE.md")
    parser.add_argument("--ranks", type=int, help="certify so many ranks, one a GPU, against one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder, or a file in it")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=1e12, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return measure([(tuple(case), links) for case, links in args.one], args.deadline)
    end_on_sigterm()
    if args.out.suffix != ".json":
        args.out /= "certificates.json" if args.ranks is None else "certificates_ranks.json"
    if args.ranks is not None:
        if torch.cuda.device_count() < args.ranks:
            raise SystemExit(f"--ranks {args.ranks}: this machine has {torch.cuda.device_count()} GPUs")
        raise SystemExit(0 if run_ranks(args.ranks, RANK_CASES, args.out) else 1)
    ok = True
    if not args.write:
        wanted = [(m, p, w) for m in args.models for p in args.precision for w in args.workloads]
        if missing(wanted, load(args.out), args.again):
            require_gpu()
            ok = run(args.models, wanted, args.out, time.time() + args.budget, args.again)
        else:
            print(f"nothing measured: {args.out} holds all of it already; --again measures again\n")
    rows = load(args.out)
    print(markdown(rows))
    if args.write:
        DOCUMENT.write_text(between_markers(DOCUMENT.read_text(), "certificates", markdown(rows)))
    raise SystemExit(0 if ok and all(row["bit_equal"] for row in rows) else 1)


if __name__ == "__main__":
    main()
