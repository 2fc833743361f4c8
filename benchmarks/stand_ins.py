"""Stand-ins for what recipes name on the hub: data laid out as GSM8K, DAPO-Math-17k and AIME-2024, and tokenizers.

Problems are made from a seed; a tokenizer is trained on them. Model folders have a true config.json and no weights.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jetrl.huggingface.config import hf_config
from jetrl.spec import SHAPES

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_NAMES, _THINGS = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn"), ("apples", "pens", "cards", "eggs", "coins", "books")


def gsm8k_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with `question` and a worked `answer` that ends in `#### N`."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        name, what = draw.choice(_NAMES), draw.choice(_THINGS)
        had, more, days = draw.randint(10, 2000), draw.randint(2, 90), draw.randint(2, 30)
        total = had + more * days
        rows.append({
            "question": f"{name} has {had} {what} and buys {more} more on each of {days} days. How many {what} are "
                        "there then?",
            "answer": f"{name} buys {more} * {days} = <<{more}*{days}={more * days}>>{more * days} {what}.\n{name} has "
                      f"{had} + {more * days} = <<{had}+{more * days}={total}>>{total} {what}.\n#### {total:,}",
        })
    return rows


def verl_rows(count: int, repeats: int, source: str, seed: int = 1) -> list[dict[str, Any]]:
    """Rows in verl's layout, each problem `repeats` times."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        a, b, c = draw.randint(2, 99), draw.randint(2, 99), draw.randint(2, 9)
        text = (f"Find the positive integer $n$ with ${c} n = {a * c} + {b * c}$. End with a line \"Answer: \" and the "
                "number.")
        rows += [{
            "data_source": source, "prompt": [{"content": text, "role": "user"}], "ability": "MATH",
            "reward_model": {"ground_truth": str(a + b), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"{index}"},
        }] * repeats
    return rows


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_gsm8k(folder: Path) -> None:
    """A folder like the data set openai/gsm8k: two configurations, told by the card."""
    write_jsonl(folder / "main" / "train-00000-of-00001.jsonl", gsm8k_rows(48))
    write_jsonl(folder / "main" / "test-00000-of-00001.jsonl", gsm8k_rows(12, seed=7))
    write_jsonl(folder / "socratic" / "train-00000-of-00001.jsonl", gsm8k_rows(1))
    lines = ["---", "configs:"]
    for name, splits in (("main", ("train", "test")), ("socratic", ("train",))):
        lines += [f"- config_name: {name}", "  data_files:"]
        lines += [text for split in splits for text in (f"  - split: {split}", f"    path: {name}/{split}-*")]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")


def write_verl(folder: Path, file: str, rows: list[dict[str, Any]]) -> None:
    """A folder with one parquet file under `data/`, as the two data sets of DAPO have it. Needs pyarrow."""
    import pyarrow as pa
    from pyarrow import parquet

    (folder / "data").mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{file}.parquet")


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of some 2,000 tokens, trained on the problems, with a chat template like Qwen3's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = [text for row in gsm8k_rows(200) for text in row.values()]
    inner.train_from_iterator(texts + [row["prompt"][0]["content"] for row in verl_rows(200, 1, "")], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def write_model(folder: Path, shape: str) -> None:
    """A model folder without weights: the config.json of a published shape, and the tokenizer."""
    write_tokenizer(folder)
    published = {"attention_dropout": 0.0, "initializer_range": 0.02, "sliding_window": None, "use_cache": True,
                 "max_window_layers": SHAPES[shape].num_layers, "transformers_version": "4.51.0"}
    config = hf_config(SHAPES[shape]) | published | {"bos_token_id": 151643, "eos_token_id": 151645}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
