"""Writes the training sets of GSM8K and MATH as one file of problems, and MATH-500 for evaluation.

    python examples/gsm8k_math.py [FOLDER]         # needs `pip install datasets` and access to the Hugging Face hub

A row has `problem`, `answer` and `source`. Problems of MATH-500 are left out of the training file. The recipes
grpo_qwen3_8b_base and grpo_qwen2.5_7b read both files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


def problems() -> Iterator[dict[str, str]]:
    """The training rows of both sets."""
    from datasets import load_dataset

    for row in load_dataset("openai/gsm8k", "main", split="train"):
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        yield {"problem": row["question"], "answer": answer, "source": "gsm8k"}
    for row in load_dataset("hiyouga/math12k", split="train"):
        yield {"problem": row["problem"], "answer": row["answer"], "source": "math"}


def without(rows: Iterable[dict[str, str]], held_out: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """The rows whose problem is none of `held_out`, up to white space."""
    known = {" ".join(row["problem"].split()) for row in held_out}
    return [row for row in rows if " ".join(row["problem"].split()) not in known]


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(path)


def main() -> None:
    from datasets import load_dataset

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    held_out = [
        {"problem": row["problem"], "answer": row["answer"], "source": "math500"}
        for row in load_dataset("HuggingFaceH4/MATH-500", split="test")
    ]
    write(folder / "gsm8k_math.jsonl", without(problems(), held_out))
    write(folder / "math500.jsonl", held_out)


if __name__ == "__main__":
    main()
