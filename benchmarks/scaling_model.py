"""What a step costs on N GPUs: bytes, seconds and memory by arithmetic, next to what was measured.

    python benchmarks/scaling_model.py                        # Qwen3-8B's shape on 1 to 512 GPUs, 8 of a host
    python benchmarks/scaling_model.py --shape qwen3-32b --answers 64 --tokens 4096
    python benchmarks/scaling_model.py --check                # against benchmarks/results/scaling.json

Time of one rank in a step: rollout (measured tokens/s, by the efficiency that `simulate_queue.py` gives), update
(measured seconds a token and parameter), exchange of gradients, publishing, and the host's work: packing its own
answers, receiving those of all. Links: `--inside` is what a GPU sends to others of its host, `--outside` what it sends
to other hosts.

    exchange   4 bytes a parameter, (n - 1) / n of them leave a rank. `fast`: once an update, during the last backward
               pass, which hides it as far as it lasts; what comes after it (the embedding's gradient) is never hidden
    publish    1 byte a parameter of FP8 layers and 2 of the others, (n - 1) / n of them arrive; and `CALL` for each
               collective. Never hidden
    hybrid     masters are spread over the GPUs of a host and repeated on all hosts: gradients are then also added over
               hosts (4 bytes a parameter of the rank's part, there and back), and publishing stays within the host. Not
               built: it is what the model is for
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from math import prod
from typing import Any

from common import RESULTS, median, table

from jetrl.model.names import tensor_table
from jetrl.precision.blocks.layouts import linears_of
from jetrl.spec import SHAPES, ModelSpec

# Measured on H200s (scaling.json): one GPU, Qwen3-8B's shape, FP8 with an FP8 cache, 64 answers of 1,024 tokens
UPDATE_S = 7.5e-15  # seconds a token and parameter of an update: 4.80 s for 78,000 tokens and 8.19e9 parameters
ROLLOUT = 17_550.0  # tokens a second of a rollout, prompts counted: 4.45 s for 78,000
QUANTIZE_S = 2e-12  # seconds a parameter to round and quantize: 14 to 20 ms for 8.19e9
CALL = 1e-4  # seconds a small collective
HOST_S = 2.4e-4  # seconds an answer of 1,200 tokens that a rank packs
OTHERS = 0.06  # of that, for an answer that another rank packs: received, scored and planned (host_work.py, on a CPU)
TOKEN_BYTES = 8  # a token id and a log-prob, which every rank receives
OBJECTS = 2e9  # bytes a second by which ranks exchange objects. Assumed: nothing has run over a network
REST_S = 0.15  # seconds of a step outside of its phases
GBPS = 1e9


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes a second that a GPU sends (and receives at once) within its host, and to other hosts."""

    inside: float
    outside: float
    host: int  # GPUs of a host

    def seconds(self, leaving: float, ranks: int) -> float:
        """To send so many bytes, spread evenly over all other ranks."""
        if ranks == 1:
            return 0.0
        far = max(0, ranks - self.host) / (ranks - 1)
        return max(leaving * (1 - far) / self.inside, leaving * far / self.outside)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model: parameters, bytes that `publish` sends, collectives of it, bytes of the last gradient to be ready."""

    parameters: int
    published: int
    calls: int
    last: int


def sizes_of(spec: ModelSpec) -> Sizes:
    shapes = [piece.shape for pieces in tensor_table(spec).values() for piece in pieces]
    linears = [shape for layer in range(spec.num_layers) for shape in linears_of(spec, layer).values()]
    total, in_fp8 = sum(map(prod, shapes)), sum(sum(s.sections) * s.in_size for s in linears)
    embedding = spec.vocab_size * spec.hidden_size
    tables = 1 if spec.tie_embeddings else 2
    return Sizes(total, in_fp8 + 2 * tables * embedding, 2 * len(linears) + tables, 4 * embedding)


def step(
    sizes: Sizes, ranks: int, links: Links, answers: int, tokens: int, micro: int, efficiency: float, hybrid: bool
) -> dict[str, float]:
    """Seconds of a rank in a step, by part. `answers` of `tokens` each for every rank; `micro` tokens a micro-batch."""
    rollout = answers * tokens / ROLLOUT * (8.19e9 / sizes.parameters) ** -1 / efficiency
    update = answers * tokens * sizes.parameters * UPDATE_S
    near = min(ranks, links.host) if hybrid else ranks
    share = (near - 1) / near
    exchange = links.seconds(4 * sizes.parameters * share, near)
    hosts = -(-ranks // links.host) if hybrid else 1
    if hosts > 1:
        exchange += 2 * 4 * sizes.parameters / near * (hosts - 1) / hosts / links.outside
    backward = micro * sizes.parameters * UPDATE_S * 2 / 3
    exposed = max(exchange - backward, links.seconds(sizes.last * share, near))
    publish = links.seconds(sizes.published * share, near) + sizes.parameters * QUANTIZE_S / near
    publish += sizes.calls * CALL if ranks > 1 else 0.0
    host = HOST_S * answers * tokens / 1200 * (1 + OTHERS * (ranks - 1))
    host += TOKEN_BYTES * answers * tokens * (ranks - 1) / OBJECTS
    return {"rollout": rollout, "update": update, "exchange": exchange, "exposed": exposed, "publish": publish,
            "host": host + REST_S, "step": rollout + update + exposed + publish + host + REST_S}


def predicted(spec: ModelSpec, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of ranks, plain and hybrid."""
    from simulate_queue import table as simulated

    links, sizes = Links(args.inside * GBPS, args.outside * GBPS, args.host), sizes_of(spec)
    by_ranks = {
        int(r["ranks"]): r["shared_efficiency"]
        for r in simulated([n for n in args.ranks if n > 1], args.answers, 8, args.slots, 0.5, 1)
    } if args.ragged else {}
    rows: list[dict[str, Any]] = []
    one = step(sizes, 1, links, args.answers, args.tokens, args.micro_tokens, 1.0, False)["step"]
    for ranks in args.ranks:
        for hybrid in (False, True) if ranks > args.host else (False,):
            efficiency = by_ranks.get(ranks, 1.0)
            parts = step(sizes, ranks, links, args.answers, args.tokens, args.micro_tokens, efficiency, hybrid)
            rows.append({"ranks": ranks, "sharded over": args.host if hybrid else ranks} | parts
                        | {"efficiency": one / parts["step"]})
    return rows


def check(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The model's publishing, exchange and efficiency next to the measured ones."""
    rows = json.loads((RESULTS / "scaling.json").read_text())["rows"]
    links, sizes = Links(args.inside * GBPS, args.outside * GBPS, args.host), sizes_of(SHAPES["qwen3-8b"])

    def of(ranks: int, part: str, variant: str, key: str) -> float | None:
        found = [r[key] for r in rows if (r["ranks"], r["part"], r["variant"]) == (ranks, part, variant)
                 and r["round"] != "first"]
        return median(found) if found else None

    found = []
    one = of(1, "step", "fast", "tokens_per_s")
    for ranks in sorted({r["ranks"] for r in rows}):
        parts = step(sizes, ranks, links, args.answers, args.tokens, args.micro_tokens, 1.0, False)
        alone = step(sizes, 1, links, args.answers, args.tokens, args.micro_tokens, 1.0, False)
        rate, seconds = of(ranks, "step", "fast", "tokens_per_s"), of(ranks, "publish", "publish", "seconds")
        update, bare = of(ranks, "step", "fast", "update_s"), of(ranks, "step", "fast alone", "update_s")
        pairs = [
            ("publish ms", 1000 * parts["publish"], None if seconds is None else 1000 * seconds),
            ("update s", parts["update"], update),
            ("exchange not hidden ms", 1000 * parts["exposed"],
             None if update is None or bare is None else 1000 * (update - bare)),
            ("step, times one GPU", ranks * alone["step"] / parts["step"],
             None if rate is None or one is None else rate / one),
        ]
        found += [{"ranks": ranks, "what": what, "model": model, "measured": measured}
                  for what, model, measured in pairs if measured is not None]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8, 64, 512])
    parser.add_argument("--answers", type=int, default=64, help="for each rank")
    parser.add_argument("--tokens", type=int, default=1220, help="of an answer with its prompt")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--micro-tokens", type=int, default=6144)
    parser.add_argument("--inside", type=float, default=300.0, help="GB/s a GPU sends within its host")
    parser.add_argument("--outside", type=float, default=40.0, help="GB/s a GPU sends to other hosts")
    parser.add_argument("--host", type=int, default=8, help="GPUs of a host")
    parser.add_argument("--ragged", action="store_true", help="with the queue's efficiency for long-tailed lengths")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    rows = check(args) if args.check else predicted(SHAPES[args.shape], args)
    print(table(rows, list(rows[0])))


if __name__ == "__main__":
    main()
