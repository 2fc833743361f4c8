"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.huggingface.files import AGAIN, GENERIC_TOKENIZERS, TOKENIZER_FILES, read_json
from jetrl.spec import ModelSpec
from jetrl.untrusted import inside, require_bounded

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # any one of them is enough
_MOST_BYTES = 256 << 20  # of one of its files; the largest known tokenizer.json has 35 MB


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any((Path(folder) / name).is_file() for name in _FILES)


def load_tokenizer_from(folder: str | Path) -> Any:
    """The transformers tokenizer of a folder; nothing is downloaded and no code from the folder is run."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Give the folder that holds tokenizer.json.")
    path = folder / "tokenizer_config.json"
    config = read_json(inside(folder, path.name)) if path.is_file() else {}
    code = _code_of(config) if not (folder / "tokenizer.json").is_file() else ""
    if code:
        raise UserError(
            f"{folder}: its tokenizer is the class {code}, whose code is in the repository; jetrl runs no such code. "
            "Convert it once, where you trust that code, and set model.tokenizer to the new folder: with transformers, "
            "AutoTokenizer.from_pretrained(..., trust_remote_code=True) loads it; if it reads a tiktoken file, "
            "transformers.integrations.tiktoken.convert_tiktoken_to_fast(ENCODING, 'converted') writes tokenizer.json "
            "(it needs the packages tiktoken and blobfile). Copy tokenizer_config.json beside it, and compare the ids "
            "of some texts."
        )
    if not has_tokenizer(folder):
        raise UserError(f"{folder} has no tokenizer.json, tokenizer.model or vocab.json. Set model.tokenizer to a "
                        "folder that has the model's tokenizer.")
    for path in (path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        inside(folder, path.name)  # checkpoints hold copies of what is read here
        if path.exists() and not path.is_dir():
            require_bounded(path, _MOST_BYTES)
    # A slow import, and not needed by runs with a built-in tokenizer.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer reads every tokenizer next to a qwen2 config.json as Qwen's own; if the folder says that its
    # tokenizer.json is the whole tokenizer, we load just that; and so we do where its class is code that is not run.
    plain = config.get("tokenizer_class") in GENERIC_TOKENIZERS or _code_of(config)
    loader = PreTrainedTokenizerFast if plain else AutoTokenizer
    try:
        return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken tokenizer.json surfaces as a bare Exception of the tokenizers library
        raise UserError(f"{folder}: the tokenizer cannot be read: {type(error).__name__}: {error}. {AGAIN}") from error


def _code_of(config: Mapping[str, Any]) -> str:
    """The class in the repository's own code that a tokenizer_config.json names; "" if it names none."""
    table = config.get("auto_map")
    named = table.get("AutoTokenizer") if isinstance(table, Mapping) else None
    found = [name for name in (named if isinstance(named, list | tuple) else [named]) if isinstance(name, str)]
    return found[0] if found else ""


def check_vocab(tokenizer: Any, spec: ModelSpec) -> None:
    """Raise if the tokenizer has ids that the model has no embedding row for. Unused rows at the end are fine."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= spec.vocab_size:
        raise UserError(
            f"The tokenizer's largest token id is {largest} ({len(tokenizer.get_vocab())} tokens), but the model's "
            f"vocabulary has {spec.vocab_size} rows (ids up to {spec.vocab_size - 1}). Use the tokenizer that belongs "
            "to the model."
        )
