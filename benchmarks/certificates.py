"""Parity certificates of published shapes with random weights, on a GPU.

    python benchmarks/certificates.py --again          # all 26, about 11 minutes
    python benchmarks/certificates.py                  # only those missing in benchmarks/results/certificates.json
    python benchmarks/certificates.py --budget 560     # start nothing that would not end within 560 s; call again
    python benchmarks/certificates.py --models qwen3-8b --precision fp8 --workloads long --again
    python benchmarks/certificates.py --write          # run nothing; the table goes to docs/PERFORMANCE.md
    python benchmarks/certificates.py --ranks 2        # that two ranks, one a GPU, give the bits of one

One process per model, which builds it once per precision. Workloads:

    ragged  512 sequences of 1 to 256 tokens; link c computes up to 474 of them in one step
    long    six sequences of 1 to 32,768 tokens (fewer where the model has fewer positions), prompts in chunks of 4096

The expected seconds do not include compiling kernels (a minute or more on a fresh machine).

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
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, ROOT, ask, between_markers, emit, environment, require_gpu, split_variant, write_json

from jetrl.api import random_model
from jetrl.parity import Workload, certify
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


def measure(cases: list[Case], deadline: float) -> None:
    """Certify one model in this process; one row per case, while there is time."""
    model, built = None, ""
    for case in cases:
        shape, precision, workload = case
        if time.time() + expected_seconds(case) > deadline:
            print(f"no time left for {case}", file=sys.stderr)
            return
        if built != precision:
            model = None  # free its memory before the next one; engines hold it in cycles
            gc.collect()
            torch.cuda.empty_cache()
            name, kv_cache, _ = split_variant(precision)
            # the links read published weights only; masters of all experts would take 57 GiB more
            more = {} if SHAPES[shape].experts is None else {"masters": False}
            model, built = random_model(shape, name, "cuda", kv_cache=kv_cache, **more), precision
        assert model is not None
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        certificate = certify(model, WORKLOADS[workload], f"random:{shape}", lambda text: print(text, file=sys.stderr))
        emit({
            "shape": shape, "workload": workload, "seconds": time.perf_counter() - started,
            "peak GiB": torch.cuda.max_memory_allocated() / 2**30, "vocabulary": model.spec.vocab_size,
            "longest": min(WORKLOADS[workload].max_prompt + WORKLOADS[workload].new_tokens, model.spec.max_position),
            **certificate.to_json(), "precision": precision, "environment": environment(),
        })


def missing(wanted: list[Case], rows: Rows, again: bool) -> list[Case]:
    held = set() if again else {case_of(row) for row in rows}
    return [case for case in wanted if case not in held]


def run(models: list[str], wanted: list[Case], path: Path, deadline: float, again: bool = False) -> bool:
    """Measure the cases that the file lacks, model by model; a new row replaces an old one. False if one failed."""
    rows: Rows = load(path)
    ok, todo = True, missing(wanted, rows, again)
    for model in models:
        cases = [case for case in todo if case[0] == model]
        if not cases:
            continue
        if time.time() + START_SECONDS + expected_seconds(cases[0]) > deadline:
            print(f"{model}: no time left; call again for it")
            continue
        seconds = START_SECONDS + sum(map(expected_seconds, cases))
        print(f"{model}: {len(cases)} certificates, about {seconds:.0f} s and compilation", flush=True)
        try:
            for row in ask([sys.executable, __file__, "--one", json.dumps(cases), "--deadline", str(deadline)]):
                rows = [*(r for r in rows if case_of(r) != case_of(row)), row]
                write_json(path, {"rows": rows})
                print(f"  {line(row)} (expected {expected_seconds(case_of(row)):.0f} s)", flush=True)
        except RuntimeError as error:
            ok = False
            print(f"{model}: FAILED\n{error}", flush=True)
    return ok


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


def load(path: Path) -> Rows:
    return json.loads(path.read_text())["rows"] if path.is_file() else []


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
    parser.add_argument("--out", type=Path, help="default: certificates.json or certificates_ranks.json in results/")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=1e12, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return measure([tuple(case) for case in args.one], args.deadline)
    args.out = args.out or RESULTS / ("certificates.json" if args.ranks is None else "certificates_ranks.json")
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
