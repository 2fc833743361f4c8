"""The sampling parameters that jetrl sets; others do not exist here."""

from dataclasses import dataclass, field
from enum import Enum


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    temperature: float
    seed: int
    max_tokens: int
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self):
        assert self.logprobs == 0 and self.flat_logprobs and not self.detokenize
        assert self.temperature == 0 or 0.01 <= self.temperature <= 2
        assert 0 <= self.seed < 2**63
