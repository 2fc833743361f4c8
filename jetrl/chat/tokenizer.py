"""Tokenizers: the built-in one for arithmetic, one token a character, and those of Hugging Face folders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.hashing import sha256_of_file
from jetrl.huggingface.files import KNOWN_FILES
from jetrl.huggingface.hub import tokenizer_folder
from jetrl.huggingface.read import load_tokenizer_from

BUILTIN_PREFIX = "builtin:"
CHARACTERS = "0123456789+-*/=#:;,. \n()?<>|_^"
VOCABULARY = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """`builtin:arithmetic`, or the tokenizer of a folder or of a repository on the hub."""
    if not name.startswith(BUILTIN_PREFIX):
        return load_tokenizer_from(tokenizer_folder(name, revision))
    if revision is not None:
        raise UserError(f"model.tokenizer_revision has no effect with model.tokenizer = {name!r}; remove it.")
    if name != "builtin:arithmetic":
        raise UserError(f"model.tokenizer = {name!r}: the only built-in tokenizer is 'builtin:arithmetic'.")
    return arithmetic_tokenizer()


def arithmetic_tokenizer() -> Any:
    """A transformers `PreTrainedTokenizerFast` with one token a character, made in memory.

    32 tokens: `<pad>`, `<eos>` and 30 characters. It adds no special tokens, and raises for any other character: an
    unknown token would let a typo train silently.
    """
    # Slow imports, and not needed by runs with another tokenizer.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.WordLevel(VOCABULARY))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def is_arithmetic(tokenizer: Any) -> bool:
    """Whether this is the built-in tokenizer, even after saving and loading."""
    return tokenizer.get_vocab() == VOCABULARY


def content_of(tokenizer: Any) -> str:
    """A hash over what decides the tokens of texts and messages: vocabulary, rules, special tokens, chat template.

    The folder's name is not in it: the same name may hold another tokenizer tomorrow.
    """
    rules = getattr(tokenizer, "backend_tokenizer", None)
    if rules is not None:
        found: Any = rules.to_str()
    else:  # one in Python, whose rules are in its files
        folder = Path(getattr(tokenizer, "name_or_path", "") or "")
        files = {name: folder / name for name in KNOWN_FILES if name != "generation_config.json"}
        found = {name: sha256_of_file(file) for name, file in files.items() if file.is_file()}
    parts = {
        "rules": found, "vocabulary": tokenizer.get_vocab(), "template": getattr(tokenizer, "chat_template", None),
        "special": getattr(tokenizer, "special_tokens_map", None),
        "adds": tokenizer.encode("", add_special_tokens=True),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
