"""vLLM's worker on a GPU: what sleeps. `freed`: how much more of the GPU is free then, other processes included."""

import torch

freed = 1


class Worker:
    def __init__(self, llm):
        self.llm = llm

    def sleep(self, level):
        assert level == 2 and not self.llm.llm_engine.requests, "sleep(2) with nothing running is all that jetrl calls"
        self.llm.log.append("sleep")
        for parameter in self.llm.model.theirs.values():
            parameter.view(torch.uint8).fill_(255)  # NaN, in all formats
        self.llm.llm_engine.cached.clear()
        assert freed >= 0, "Memory usage increased after sleeping."
