"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

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
    # tokenizer.json is the whole tokenizer, we load just that.
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    loader = PreTrainedTokenizerFast if config.get("tokenizer_class") in GENERIC_TOKENIZERS else AutoTokenizer
    try:
        return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken tokenizer.json surfaces as a bare Exception of the tokenizers library
        raise UserError(f"{folder}: the tokenizer cannot be read: {type(error).__name__}: {error}. {AGAIN}") from error


def check_vocab(tokenizer: Any, spec: ModelSpec) -> None:
    """Raise if the tokenizer has ids that the model has no embedding row for. Unused rows at the end are fine."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= spec.vocab_size:
        raise UserError(
            f"The tokenizer's largest token id is {largest} ({len(tokenizer.get_vocab())} tokens), but the model's "
            f"vocabulary has {spec.vocab_size} rows (ids up to {spec.vocab_size - 1}). Use the tokenizer that belongs "
            "to the model."
        )
