"""Which requests can run at all. Refusals say which request it was. No torch."""

from __future__ import annotations

from jetrl.engine.pages import PageAllocator
from jetrl.errors import UserError
from jetrl.types import Request


class RefusedRequest(UserError):
    """A request that can never run. `request_id` lets a driver find whose it is."""

    def __init__(self, request_id: int, message: str) -> None:
        super().__init__(message)
        self.request_id = request_id


def most_tokens(request: Request) -> int:
    """The most tokens that a request's sequence may reach; for a conversation, over all turns."""
    return max(len(request.tokens) + request.sampling.max_tokens, request.max_conversation or 0)


def check_vocabulary(request: Request, vocab_size: int) -> None:
    """Refuse tokens that the model does not know."""
    if request.tokens and not (0 <= min(request.tokens) and max(request.tokens) < vocab_size):
        raise RefusedRequest(
            request.id,
            f"request {request.id} has tokens from {min(request.tokens)} to {max(request.tokens)}, but the model "
            f"knows 0 to {vocab_size - 1}; check that the tokenizer is the model's.",
        )


def check_sizes(request: Request, max_position: int, allocator: PageAllocator) -> None:
    """Refuse a request that is empty, too long for the model or too long for the cache."""
    prompt, new, most = len(request.tokens), request.sampling.max_tokens, request.max_conversation
    sizes = f"request {request.id}: {prompt} prompt tokens + max_tokens {new} = {prompt + new}"
    if prompt < 1 or new < 1:
        raise RefusedRequest(request.id, f"{sizes}; a request needs at least one prompt token and one new token.")
    if most is not None:
        if prompt + new > most:
            raise RefusedRequest(request.id, f"{sizes}, beyond its max_conversation = {most}.")
        sizes = f"request {request.id}: a conversation that begins with {prompt} tokens and may reach {most}"
    if most_tokens(request) > max_position:
        raise RefusedRequest(request.id, f"{sizes}, beyond the model's {max_position} positions; shorten one of them.")
    pages, size = allocator.num_pages, allocator.page_size
    if allocator.pages_for(most_tokens(request)) > pages:
        raise RefusedRequest(
            request.id,
            f"{sizes}, beyond the KV cache of {pages} pages * {size} tokens = {pages * size}; "
            "shorten one of them or raise rollout.kv_cache_tokens.",
        )
