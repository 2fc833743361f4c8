"""A tokenizer of bytes with a chat template, made in memory: ids 0 to 255 are bytes, then the added tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENDS = ("<|end|>", "<|im_start|>", "<|im_end|>")
SHOWN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{{ 'FORM' }}<|im_end|>\n"
    "{% endif %}"
)
# A template of the usual kind: `FORM` stands for what tells the model how to write calls.
CHAT = SHOWN + (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = CHAT.replace("FORM", '<tool_call>{"name": n, "arguments": a}</tool_call>')


def byte_tokenizer(template: str | None = HERMES, added: Sequence[str] = (), special: bool = False) -> Any:
    """`added`: further tokens after `ENDS`, special ones or not. `<|im_end|>` is the end of sequence."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ENDS])
    bytes_only.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def saved(folder: Path, *args: Any, **settings: Any) -> str:
    """The same in a folder, as `model.tokenizer` names it."""
    byte_tokenizer(*args, **settings).save_pretrained(str(folder))
    return str(folder)
