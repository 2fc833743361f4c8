"""Settings by GPU, predicted: the tables of docs/GPUS.md, and that of docs/LORA.md.

    python benchmarks/what_fits.py            # prints them
    python benchmarks/what_fits.py --write    # puts them into the pages

For each model, number of GPUs and length of answers: what `jetrl train --dry-run` would advise, beginning with the
settings of `START`. It takes seconds, and needs no GPU.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jetrl.config import load_config
from jetrl.config.load import quiet
from jetrl.config.shipped import find_recipe
from jetrl.run.fit.advice import GIB, GPUS, Change, cure, on_gpu
from jetrl.run.fit.memory import Memory, predict
from jetrl.spec import SHAPES

PAGE = Path(__file__).parents[1] / "docs" / "GPUS.md"
LORA_PAGE = PAGE.with_name("LORA.md")
ADAPTERS = ("lora.rank=32",)
BEGIN, END = "<!-- fits:begin -->\n", "<!-- fits:end -->\n"
RECIPE = "gsm8k_qwen3_0.6b"
START = ("train.max_tokens_per_gpu=16384", "rollout.max_num_seqs=256")
MODELS = {
    "qwen3-0.6b": "Qwen3-0.6B", "qwen3-1.7b": "Qwen3-1.7B", "qwen3-8b": "Qwen3-8B", "qwen3-14b": "Qwen3-14B",
    "qwen3-32b": "Qwen3-32B", "qwen3-30b-a3b": "Qwen3-30B-A3B",
}
LORA_MODELS = dict(list(MODELS.items())[2:]) | {"llama-3.3-70b": "Llama-3.3-70B"}
LENGTHS = (1024, 8192)  # of answers, at most
# Cards with less memory, in GiB as torch reports them: with FP8 in tensor cores, and without
CARDS = {
    "24 GB, `fp8`: RTX 4090, L4": (23.5, "fp8"), "24 GB, `w8a16`: RTX 3090": (23.5, "w8a16"),
    "40 GB, `w8a16`: A100": (39.4, "w8a16"), "48 GB, `fp8`: L40S": (44.4, "fp8"),
    "48 GB, `w8a16`: A40": (44.4, "w8a16"), "80 GB, `w8a16`: A100": (79.2, "w8a16"),
}
CARD_MODELS = {"qwen3-0.6b": "Qwen3-0.6B", "qwen3-1.7b": "Qwen3-1.7B", "qwen3-8b": "Qwen3-8B"}


@dataclass(frozen=True, slots=True)
class Fit:
    """The cheapest settings, beyond those of the start, with which a model fits, and the memory then; None: none do."""

    change: Change
    memory: Memory


def start(length: int, ranks: int) -> list[str]:
    """The overrides from which every row of a table begins."""
    several = ["train.reduction=fixed"] if ranks > 1 else []
    return [*START, f"rollout.max_response_length={length}", *several]


def room_of(gpu: str) -> int:
    """Bytes of a GPU: one of `GPUS`, or one of `CARDS`."""
    return GPUS[gpu] if gpu in GPUS else int(CARDS[gpu][0] * GIB)


@cache
def fit(model: str, gpu: str, ranks: int, length: int, more: tuple[str, ...] = ()) -> Fit | None:
    spec, room = SHAPES[model], room_of(gpu)
    config = on_gpu(load_config(find_recipe(RECIPE), [*start(length, ranks), *more], quiet))
    alone = predict(config, spec, ranks, room)
    if alone.fits(room):
        return Fit(Change(()), alone)
    found = cure(config, lambda changed: predict(changed, spec, ranks, room).fits(room))
    return None if found is None else Fit(found, predict(found.apply(config), spec, ranks, room))


def tables() -> str:
    """A table for each number of H100s and H200s."""
    parts = []
    for gpu, size in (("h100", "80 GB"), ("h200", "141 GB")):
        for ranks in (1, 2, 4, 8):
            parts.append(f"### {ranks} {gpu.upper()}{'s' if ranks > 1 else ''}, {size}{' each' if ranks > 1 else ''}\n")
            parts.append("| model | answers of up to | also set | GiB per GPU | host GiB per GPU |")
            parts.append("|---|--:|---|--:|--:|")
            for model, name in MODELS.items():
                parts += [_row(name, length, fit(model, gpu, ranks, length)) for length in LENGTHS]
            parts.append("")
    return "\n".join([*parts, *cards()])


def cards() -> list[str]:
    """The lines on cards with less memory: whole weights, and adapters, with answers of up to 1,024 tokens."""
    lines = [
        "### One card of 24 to 80 GB\n",
        "`kernels = \"auto\"` takes the portable kernels there ([INSTALL.md](INSTALL.md)); answers have up to\n"
        "1,024 tokens.\n",
        "| card | model | whole weights: also set | GiB | adapters (`lora.rank=32`): also set | GiB |",
        "|---|---|---|--:|---|--:|",
    ]
    for card, (_, precision) in CARDS.items():
        for model, name in CARD_MODELS.items():
            given = (f"precision={precision}",)
            whole, ours = (fit(model, card, 1, LENGTHS[0], (*given, *more)) for more in ((), ADAPTERS))
            lines.append(
                f"| {card} | {name} | {_settings(whole)} | {_peak(whole)} | {_settings(ours)} | {_peak(ours)} |"
            )
    return [*lines, ""]


def _row(name: str, length: int, found: Fit | None) -> str:
    if found is None:
        return f"| {name} | {length:,} | does not fit | | |"
    host = found.memory.host + found.memory.copy
    return f"| {name} | {length:,} | {_settings(found)} | {found.memory.peak / GIB:.0f} | {host / GIB:.0f} |"


def lora_table() -> str:
    """Whole weights and adapters on one GPU, answers of up to 1,024 tokens."""
    rows = [
        "| model | GPU | whole weights: also set | GiB | adapters: also set | GiB | host GiB |",
        "|---|---|---|--:|---|--:|--:|",
    ]
    for model, name in LORA_MODELS.items():
        for gpu in ("h100", "h200"):
            whole, ours = (fit(model, gpu, 1, LENGTHS[0], more) for more in ((), ADAPTERS))
            host = "" if ours is None else f"{(ours.memory.host + ours.memory.copy) / GIB:.1f}"
            rows.append(f"| {name} | {gpu.upper()} | {_settings(whole)} | {_peak(whole)} | {_settings(ours)} | "
                        f"{_peak(ours)} | {host} |")
    return "\n".join(rows) + "\n"


def _settings(found: Fit | None) -> str:
    if found is None:
        return "does not fit"
    return " ".join(f"`{part}`" for part in str(found.change).split()) or "nothing"


def _peak(found: Fit | None) -> str:
    return "" if found is None else f"{found.memory.peak / GIB:.0f}"


def placed(page: str, made: str | None = None) -> str:
    """The page with the tables, or with what is `made` instead, between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + (tables() if made is None else made) + END + rest.partition(END)[2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    if parser.parse_args().write:
        PAGE.write_text(placed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        LORA_PAGE.write_text(placed(LORA_PAGE.read_text(encoding="utf-8"), lora_table()), encoding="utf-8")
    else:
        print(tables(), lora_table(), sep="\n")
