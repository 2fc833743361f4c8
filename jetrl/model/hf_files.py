"""What a Hugging Face folder consists of, and what its reading and its writing share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jetrl.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Tokenizer and prompt files of a model folder: what an export copies.
TOKENIZER_FILES = (
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"
)
GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the class's names in transformers 4 and 5
AGAIN = "Download or export the folder again."


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; UserError with the path for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UserError(f"{path} is not valid JSON: {error}. {AGAIN}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__} where an object is needed. {AGAIN}")
    return value


def some(names: list[str]) -> str:
    """The first of many names, as text."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
