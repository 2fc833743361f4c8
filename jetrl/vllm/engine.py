"""`VllmEngine`: vLLM behind the `Engine` protocol, in this process, on the trainer's device.

Each `load` sends the published weights, and each rollout begins and ends with memory changing hands: when nothing runs,
waits or is kept for a conversation, vLLM sleeps (GPU). Its log-probs are its own (`keeps_bits = False`), so the learner
makes its own pass, and `parity/*` measures the gap. What is exact and what is not: docs/ENGINES.md.
"""

from __future__ import annotations

import gc
import hashlib
import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from jetrl.config import Config
from jetrl.engine.limits import RefusedRequest, check_vocabulary, most_tokens
from jetrl.engine.sampler import check_params
from jetrl.engine.stopper import Stopper, StopStrings, Tokenizer
from jetrl.errors import UserError
from jetrl.model.transformer import Transformer
from jetrl.types import (
    Completion,
    Engine,
    FinishReason,
    Request,
    SamplingParams,
    StepReport,
    WeightSet,
    log_probs,
    token_ids,
)
from jetrl.vllm import scales as vllm_scales
from jetrl.vllm import weights as vllm_weights
from jetrl.vllm.start import ENGINE, apart, fp32_logits, imported, longest_sequence, started, untried

AWAKE, NO_CACHE, ASLEEP = "awake", "no cache", "asleep"  # what vLLM has in memory: all, its weights, nothing


@dataclass(slots=True)
class _Live:
    """A request that vLLM works on. Those with stop strings tell their tokens step by step."""

    request: Request
    strings: StopStrings | None  # that end it
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def draw_seed(params: SamplingParams, request_id: int, position: int) -> int:
    """The 63-bit seed of a request whose first new token is at `position`: turns of a conversation differ."""
    named = f"{params.seed} {request_id} {position}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest()) >> 1


class VllmEngine(Engine):
    """vLLM for one run. `model` is the trainer's: it gives the weights' names, and measures the scales of an FP8 cache.

    UserError if vLLM is missing, of another version, or refuses the model.
    """

    keeps_bits = False

    def __init__(
        self, config: Config, model: Transformer, tokenizer: Tokenizer, base_config: dict[str, Any], flow_digest: str,
        eos_token_ids: Collection[int],
    ) -> None:
        self.config, self.model, self.tokenizer, self.flow_digest = config, model, tokenizer, flow_digest
        self.eos_token_ids = frozenset(eos_token_ids)
        self.layout = vllm_weights.layout(model.spec, model.recipe, config.vllm.partial_blocks, config.device)
        vllm = imported(self.layout.by_value)
        self.version, self._params = str(vllm.__version__), vllm.sampling_params
        self._folder = TemporaryDirectory(prefix="jetrl-vllm-")
        described = base_config | self.layout.changes
        self._llm = started(vllm, config, model.spec, described, Path(self._folder.name))
        self._sleeps = config.vllm.sleep and config.device == "cuda"
        self._memory = AWAKE
        self.weights: WeightSet | None = None
        self._live: dict[int, _Live] = {}
        self._open: set[int] = set()  # conversations that may have another turn
        self._finished: list[Completion] = []
        self._seen: dict[int, tuple[int, ...]] = {}  # what was rolled out with these weights, for the scales
        self._scales: vllm_scales.Scales | None = None
        self._stopper = Stopper(self.eos_token_ids, tokenizer, 0)  # its rules; the sequences are in `_live`
        self._steps = self._num_finished = self._num_tokens = 0
        self._metrics: dict[str, float] = {}
        self.checksum = ""  # with vllm.check_weights: of what vLLM holds, which is what was published
        self._sleep()

    @property
    def about(self) -> str:
        """What is exact with this engine and what is not, for the start of a run."""
        layout, fp8_cache = self.layout, self.config.vllm.kv_cache == "fp8"
        if layout.by_value:
            weights = "its weights have the published values (it may write other powers of two as scales)"
        elif layout.fp8:
            weights = "its weights are the published FP8 codes and scales, and BF16 values"
        else:
            weights = "its weights are the published BF16 values"
        if layout.widened:
            weights += f"; {len(layout.widened)} FP8 weights are code * scale in BF16 there (vllm.partial_blocks)"
        differs = "its kernels round and add up in other places and orders than training's"
        if not fp32_logits(self.version):
            differs += ", its logits are rounded to BF16"
        if fp8_cache:
            differs += ", and its KV cache is FP8 while training does not round keys and values"
        lines = [
            f"{ENGINE} ({self.version}). Exact: {weights}. Not exact: log-probs, as {differs}. parity/* shows the gap; "
            "rl.rollout_is, rl.rollout_rs and rl.rollout_veto correct for it. A repeated or resumed run need not "
            "repeat the bits.",
            untried(self.version),
        ]
        return "\n".join(line for line in lines if line)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def load(self, weights: WeightSet) -> None:
        """Send newly published weights; then measure the cache's scales on what was rolled out with the old ones.

        ValueError if they were published for another precision flow.
        """
        if weights.flow_digest != self.flow_digest:
            raise ValueError(
                f"weights of version {weights.version} have flow {weights.flow_digest}, this engine runs flow "
                f"{self.flow_digest}; build engine and trainer from one recipe."
            )
        assert not self._live, "load() of an engine with work"
        self.weights, self._scales = weights, None
        self._send()
        if self.config.vllm.kv_cache == "fp8" and self._seen:
            self._measure(list(self._seen.values()))
        self._seen.clear()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none. UserError if one can never run."""
        if self.weights is None:
            raise ValueError("no weights are loaded; call engine.load(weights) before engine.add()")
        for request in requests:
            self._check(request)
        if not (self._live or self._open or self._finished):
            self._steps = self._num_finished = self._num_tokens = 0
        self._wake([r.tokens for r in requests])
        with apart():
            for request in requests:
                self._live[request.id] = _Live(request, self._stopper.strings(request.sampling))
                if request.max_conversation is not None:
                    self._open.add(request.id)
                prompt = {"prompt_token_ids": list(request.tokens), "cache_salt": f"w{self.weights.version}"}
                self._llm.llm_engine.add_request(str(request.id), prompt, self._sampling(request))

    def step(self) -> StepReport:
        """One step of vLLM's scheduler."""
        with apart():
            outputs = self._llm.llm_engine.step()
        for output in outputs:
            if (live := self._live.get(int(output.request_id))) is not None:
                self._take(live, output.outputs[0])
        self._steps += 1
        running = min(len(self._live), self.config.rollout.max_num_seqs)
        waiting = len(self._live) - running
        return StepReport(self._steps, running, waiting, self._num_finished, self._num_tokens)

    def collect(self) -> list[Completion]:
        finished, self._finished = self._finished, []
        self._rest()
        return finished

    def forget(self, ids: Collection[int]) -> None:
        """These conversations have ended; what still runs of them is dropped."""
        if running := [i for i in ids if i in self._live]:
            self._abort(running)
        self._open.difference_update(ids)
        self._rest()

    def release(self) -> None:
        """Give vLLM's memory back until the next `add` (on a GPU, unless `vllm.sleep` is off)."""
        assert not self._live, "release() of an engine with work"
        self._open.clear()
        self._sleep()

    def close(self) -> None:
        """End vLLM and free what it holds. The engine cannot be used afterwards."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        gc.collect()
        self._folder.cleanup()

    def take_metrics(self) -> dict[str, float]:
        """Seconds for weights, memory, checks and scales since the last call, and the scales of an FP8 cache."""
        found, self._metrics = self._metrics, {}
        return found | (self._scales.metrics() if self._scales is not None else {})

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        p = request.sampling
        check_params(p)
        check_vocabulary(request, self.model.spec.vocab_size)
        if (p.top_p, p.top_k, p.min_p) != (1.0, 0, 0.0):
            raise UserError(f"{ENGINE}: top_p, top_k and min_p have no full-distribution log-probs there; remove them.")
        reach, longest = most_tokens(request), longest_sequence(self.config)
        if not request.tokens or reach > longest:
            raise RefusedRequest(
                request.id, f"request {request.id} has {len(request.tokens)} tokens and may reach {reach}; this run's "
                f"vLLM takes 1 to {longest} (task.max_prompt_length + rollout.max_response_length)."
            )

    def _sampling(self, request: Request) -> Any:
        p, module = request.sampling, self._params
        ends = set(p.stop_token_ids) | (set() if p.ignore_eos else self.eos_token_ids)
        kinds = module.RequestOutputKind
        return module.SamplingParams(
            temperature=p.temperature, seed=draw_seed(p, request.id, len(request.tokens)), max_tokens=p.max_tokens,
            stop_token_ids=sorted(ends), ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=kinds.DELTA if p.stop else kinds.FINAL_ONLY,
        )

    def _take(self, live: _Live, output: Any) -> None:
        """What vLLM tells about a request: its newest tokens, or all of them at its end."""
        tokens, logprobs = list(output.token_ids), list(output.logprobs.logprobs)
        if list(output.logprobs.token_ids) != tokens:
            raise RuntimeError(f"vLLM gave {len(logprobs)} log-probs for {len(tokens)} sampled tokens")
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError(f"vLLM gives request {live.request.id} a log-prob that is NaN or infinite")
        stopped = output.finish_reason == "stop"
        if output.finish_reason not in (None, "stop", "length"):
            raise RuntimeError(f"vLLM ended request {live.request.id} as {output.finish_reason!r}")
        if live.strings is not None:  # the rule of jetrl's own engine, on the same tokens
            for place, token in enumerate(tokens):
                if live.strings.completed_by(token) or self._stopper.stops_by_id(live.request.sampling, token):
                    tokens, logprobs, stopped = tokens[: place + 1], logprobs[: place + 1], True
                    break
        live.tokens += tokens
        live.logprobs += logprobs
        if stopped and output.finish_reason is None:
            self._abort([live.request.id])
        if stopped or output.finish_reason is not None:
            self._finish(live, stopped)

    def _finish(self, live: _Live, stopped: bool) -> None:
        assert self.weights is not None
        request, tokens = live.request, tuple(map(int, live.tokens))
        self._live.pop(request.id, None)
        hidden_end = stopped and self._stopper.stops_by_id(request.sampling, tokens[-1])
        text = self.tokenizer.decode(list(tokens[:-1] if hidden_end else tokens))
        finish = cast(FinishReason, "stop" if stopped else "length")
        self._finished.append(Completion(
            request.id, token_ids(tokens), log_probs([*map(float, live.logprobs)]), text, finish, self.weights.version,
            self.flow_digest,
        ))
        self._num_finished += 1
        self._num_tokens += len(tokens)
        if self.config.vllm.kv_cache == "fp8":
            self._seen[request.id] = request.tokens + tokens

    def _abort(self, ids: Sequence[int]) -> None:
        with apart():
            self._llm.llm_engine.abort_request([str(i) for i in ids])
        for i in ids:
            del self._live[i]

    # ---- weights and memory -----------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        key = f"perf/vllm_{what}_s"
        self._metrics[key] = self._metrics.get(key, 0.0) + time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.config.device == "cuda":
            torch.cuda.synchronize()

    def _send(self) -> None:
        """vLLM's weights become the published ones; what it cached with the old ones is dropped."""
        assert self.weights is not None
        if self._memory == ASLEEP:
            with self._timed("wake"):
                self._wake_up("weights")
            self._memory = NO_CACHE
        with self._timed("sync"), apart():
            tensors = vllm_weights.checkpoint(self.weights.tensors, self.layout)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
            self._llm.llm_engine.reset_prefix_cache()
        if self.config.vllm.check_weights:
            with self._timed("check"):
                (parameters,) = self._llm.apply_model(lambda model: dict(model.named_parameters()))
                self.checksum = vllm_weights.check(parameters, self.weights, self.layout)

    def _wake(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Everything that a rollout needs is in memory; without scales for an FP8 cache, `prompts` give them."""
        if self._memory == ASLEEP:  # what slept has lost its weights; the published ones are still those of `load`
            self._send()
        fresh = self._memory != AWAKE
        if fresh:
            with self._timed("wake"):
                self._wake_up("kv_cache")
            self._memory = AWAKE
        if self.config.vllm.kv_cache == "fp8" and (fresh or self._scales is None):
            if self._scales is None:
                self._measure(prompts)
            self._set_scales()

    def _wake_up(self, tag: str) -> None:
        torch.cuda.empty_cache()  # training's blocks, which vLLM's allocator cannot use
        with apart():
            self._llm.wake_up(tags=[tag])

    def _measure(self, sequences: Sequence[tuple[int, ...]]) -> None:
        v, batch = self.config.vllm, self.config.train.max_tokens_per_gpu
        with self._timed("calibrate"):
            self._scales = vllm_scales.measure(self.model, sequences, v.kv_scale_tokens, batch)
        if self._memory == AWAKE:
            self._set_scales()

    def _set_scales(self) -> None:
        scales = self._scales
        assert scales is not None
        (count,) = self._llm.apply_model(lambda model: vllm_scales.set_scales(model, scales))
        if count != self.model.spec.num_layers:
            raise RuntimeError(f"vLLM has {count} attention layers with scales, the model {self.model.spec.num_layers}")

    def _rest(self) -> None:
        """Sleep once nothing runs, waits, or is kept for a next turn."""
        if not (self._live or self._open or self._finished):
            self._sleep()

    def _sleep(self) -> None:
        if self._sleeps and self._memory != ASLEEP:
            with self._timed("sleep"), apart():
                self._llm.sleep(level=2)  # the next `load` or `add` sends the weights again
            self._memory = ASLEEP
