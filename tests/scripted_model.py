"""A policy that says what a test wrote: a real model whose next token depends on the last one alone.

Attention and MLP add nothing, so the hidden state is the embedding of the last token, which names a place in the
script; the head gives that place's next token a logit of 16 and all others 0. A turn is a list of pieces, each a token
of its own; a tuple holds alternatives, of which one is drawn. The chat template opens the policy's n-th turn with a
token of its own, which begins the n-th turn of the script (the last one again, where there are more).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from byte_tokenizer import ENDS, byte_tokenizer
from tiny import ARCH

from jetrl.huggingface import read as hf
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe

Piece = str | tuple[str, ...]
HIDDEN, LOGIT = 64, 16.0
TEMPLATE = (
    "{% set at = namespace(n=0) %}"
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    'Write <tool_call>{"name": n, "arguments": a}</tool_call>.<|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}OPENER{% set at.n = at.n + 1 %}"
    "{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nOPENER{% endif %}"
)


def scripted_model(
    folder: Path, turns: Sequence[Sequence[Piece]], more: Sequence[str] = (), positions: int = 16_384
) -> Path:
    """A folder with such a model. `more`: tokens that the policy does not draw, and texts may be encoded with."""
    openers = [f"<|turn{i}|>" for i in range(len(turns))]
    pieces = [[(one,) if isinstance(one, str) else one for one in turn] for turn in turns]
    texts = [text for turn in pieces for piece in turn for text in piece]
    assert len(texts) == len(set(texts)), "each piece needs a text of its own"
    last = len(turns) - 1
    template = TEMPLATE.replace("OPENER", f"<|turn{{{{ [at.n, {last}] | min }}}}|>")
    tokenizer = byte_tokenizer(template, [*openers, *texts, *(one for one in more if one not in texts)])
    place: dict[int, int] = {}  # of the token that comes next
    follow: dict[int, list[int]] = {}
    end = tokenizer.convert_tokens_to_ids(ENDS[2])
    for opener, turn in zip(openers, pieces, strict=True):
        before = [tokenizer.convert_tokens_to_ids(opener)]
        for piece in [*turn, (ENDS[2],)]:
            drawn = [end] if piece == (ENDS[2],) else [tokenizer.convert_tokens_to_ids(text) for text in piece]
            at = len(follow) + 1
            place |= dict.fromkeys(before, at)
            follow[at] = drawn
            before = drawn
    assert len(follow) < HIDDEN, f"{len(follow)} pieces: at most {HIDDEN - 1}"
    shape = {"hidden_size": HIDDEN, "vocab_size": len(tokenizer), "max_position_embeddings": positions,
             "tie_word_embeddings": False}
    spec = hf.spec_from_hf(ARCH | shape)
    model = Transformer(spec, build_recipe("bf16", spec.num_layers)).init_random(0)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            if name.endswith(("o.weight", "down.weight")) or "embed" in name or "head" in name:
                tensor.zero_()
        embed, head = (next(t for name, t in state.items() if part in name) for part in ("embed", "head"))
        embed[:, 0] = 1.0
        for token, at in place.items():
            embed[token] = torch.eye(HIDDEN)[at]
        for at, tokens in follow.items():
            head[tokens, at] = LOGIT / HIDDEN**0.5
    hf.save_model(folder, spec, state, tokenizer=tokenizer)
    return folder
