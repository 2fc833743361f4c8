"""`EngineSettings`: the sizes and switches of a `PagedEngine`, as one value. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from jetrl.engine.sharing import Merge
from jetrl.errors import UserError


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Names and meanings are those of the config's `rollout` section. UserError for sizes below 1.

    `kv_cache_tokens=None` sizes the cache whenever the engine begins to work: for what its first requests can need,
    within most of the free memory. On a GPU a cache of up to `keep_bytes` stays while the engine is idle, with the CUDA
    graphs that read it (None: of up to a tenth of its memory). `max_burst` decode steps lie between two looks at the
    tokens: more hide the host better, and waste up to as many tokens, less one, of each sequence that ends.
    `eos_token_ids=None` takes the tokenizer's. `share_beginnings`: a new request reads the full pages that another one
    with the same beginning has filled with the same weights, also after that one has gone. `drafts`: states of
    sequences can go back from wrong drafts; an engine with a speculator sets it.
    """

    page_size: int = 16
    max_num_seqs: int = 256
    max_tokens_per_step: int = 2048
    kv_cache_tokens: int | None = None
    eos_token_ids: frozenset[int] | None = None
    merge_prefix: Merge = "off"
    keep_bytes: int | None = None
    max_burst: int = 8
    share_beginnings: bool = True
    drafts: bool = False

    def __post_init__(self) -> None:
        for name in ("page_size", "max_num_seqs", "max_tokens_per_step", "kv_cache_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"rollout.{name} = {value}; it must be at least 1.")
