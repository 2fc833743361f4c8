"""Your own rollout engine: transformers' model, fed with the named weights that training publishes.

    jetrl train examples/guess_number.toml rollout.engine=examples/transformers_engine.py:TransformersEngine

Start from this file to connect another inference engine (`jetrl.types.Engine` is the whole contract). It gets weights
through `WeightSet.tensors` alone and shares nothing with the trainer. It is simple, not fast: requests run batch by
batch, and those that arrive meanwhile wait for the next batch.

Its log-probs are not the learner's bits; the run reports the gap as `parity/*`, and `rl.rollout_is = "token"` corrects
for it. What a request gets depends, in the last bits, on the batch that it runs in.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jetrl.errors import UserError
from jetrl.types import Completion, StepReport

BLOCK = 128  # FP8 weights have one scale for each block of 128 x 128


class TransformersEngine:
    keeps_bits = False  # so that the learner computes its own log-probs where it needs the old policy's

    def __init__(self, context):
        self.tokenizer, self.eos = context.tokenizer, context.eos_token_ids
        self.max_num_seqs = context.config.rollout.max_num_seqs
        self.device = context.model.head_weight.device
        config = AutoConfig.for_model(**context.base_config)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(self.device).eval()
        self.waiting, self.batch, self.finished = [], None, []
        self.num_steps = self.num_finished = self.num_tokens = 0

    @property
    def has_work(self):
        return bool(self.waiting or self.batch)

    @torch.no_grad()
    def load(self, weights):
        """Copy every tensor: the next update of the trainer overwrites the ones we are given."""
        for name, tensor in weights.tensors.items():  # a tied lm_head is not among them: it is the embedding
            self.parameter(name).copy_(dequantized(tensor))
        self.version, self.flow_digest = weights.version, weights.flow_digest

    def parameter(self, name):
        """Where transformers keeps a tensor: under its name, except that all experts of a layer are one tensor."""
        owner, found, rest = name.partition(".mlp.experts.")
        if not found:
            return self.model.get_parameter(name)
        expert, projection, _ = rest.split(".")  # 3.gate_proj.weight
        if projection == "down_proj":
            return self.model.get_parameter(f"{owner}{found}down_proj")[int(expert)]
        gate, up = self.model.get_parameter(f"{owner}{found}gate_up_proj")[int(expert)].chunk(2)
        return gate if projection == "gate_proj" else up

    def add(self, requests):
        for request in requests:
            p = request.sampling
            if p.top_p < 1 or p.top_k or p.min_p:
                raise UserError("TransformersEngine has no top_p, top_k and min_p; leave them at their defaults.")
        if not self.has_work:
            self.num_steps = self.num_finished = self.num_tokens = 0
        self.waiting += requests

    @torch.no_grad()
    def step(self):
        """One token for every sequence of the batch."""
        if self.batch is None:
            self.batch = Batch(self.waiting[: self.max_num_seqs], self.device)
            del self.waiting[: self.max_num_seqs]
        drawn = self.batch.draw(self.model)
        for sequence, (token, logprob) in zip(self.batch.sequences, drawn, strict=True):
            if not sequence.finish:
                sequence.tokens.append(token)
                sequence.logprobs.append(logprob)
                self.num_tokens += 1
                if self.ends(sequence):
                    self.finished.append(self.completion(sequence))
                    self.num_finished += 1
        running = sum(not s.finish for s in self.batch.sequences)
        if not running:
            self.batch = None
        self.num_steps += 1
        return StepReport(self.num_steps, running, len(self.waiting), self.num_finished, self.num_tokens)

    def collect(self):
        finished, self.finished = self.finished, []
        return finished

    def forget(self, ids):
        """Nothing is kept between two turns; a request that waits or runs is dropped."""
        self.waiting = [r for r in self.waiting if r.id not in ids]
        for sequence in self.batch.sequences if self.batch else ():
            if sequence.request.id in ids:
                sequence.finish = "stop"
        if self.batch and all(s.finish for s in self.batch.sequences):
            self.batch = None

    def release(self):
        """The KV cache went with the last batch."""

    def ends(self, sequence):
        """Whether the last token ended the sequence; says so in `sequence.finish`."""
        p, last = sequence.request.sampling, sequence.tokens[-1]
        sequence.at_token = last in p.stop_token_ids or (last in self.eos and not p.ignore_eos)
        text = self.tokenizer.decode(sequence.tokens) if p.stop else ""
        if sequence.at_token or any(stop in text for stop in p.stop):
            sequence.finish = "stop"
        elif len(sequence.tokens) == p.max_tokens:
            sequence.finish = "length"
        return bool(sequence.finish)

    def completion(self, sequence):
        tokens = sequence.tokens
        text = self.tokenizer.decode(tokens[:-1] if sequence.at_token else tokens)  # a stop token is no text
        return Completion(
            sequence.request.id, tuple(tokens), tuple(sequence.logprobs), text, sequence.finish, self.version,
            self.flow_digest,
        )


class Sequence:
    def __init__(self, request):
        self.request, self.tokens, self.logprobs, self.finish, self.at_token = request, [], [], "", False


class Batch:
    """Sequences that decode together: prompts padded on the left, then one token each a step."""

    def __init__(self, requests, device):
        self.sequences = [Sequence(request) for request in requests]
        longest = max(len(r.tokens) for r in requests)
        pad = [longest - len(r.tokens) for r in requests]
        rows = zip(pad, requests, strict=True)
        self.tokens = torch.tensor([[0] * n + list(r.tokens) for n, r in rows], device=device)
        self.mask = torch.tensor([[0] * n + [1] * (longest - n) for n in pad], device=device)
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        self.temperature = torch.tensor([[r.sampling.temperature or 1.0] for r in requests], device=device)
        self.cache = None

    def draw(self, model):
        """The next token of each sequence, with its log-prob in the whole distribution at the temperature."""
        out = model(
            self.tokens, attention_mask=self.mask, position_ids=self.positions, past_key_values=self.cache,
            use_cache=True,
        )
        self.cache = out.past_key_values
        logprobs = (out.logits[:, -1].float() / self.temperature).log_softmax(-1)
        tokens = torch.stack([self.pick(s, row) for s, row in zip(self.sequences, logprobs, strict=True)])
        self.tokens, self.positions = tokens[:, None], self.positions[:, -1:] + 1
        self.mask = torch.cat([self.mask, torch.ones_like(self.tokens)], 1)
        return zip(tokens.tolist(), logprobs.gather(1, self.tokens)[:, 0].tolist(), strict=True)

    def pick(self, sequence, logprobs):
        """A token, drawn by a number that depends on seed, request and position alone: a resumed run draws it again."""
        p, position = sequence.request.sampling, len(sequence.request.tokens) + len(sequence.tokens)
        if p.temperature == 0:
            return logprobs.argmax()
        stream = hash((p.seed, sequence.request.id, position)) % 2**63  # numbers hash alike in every process
        generator = torch.Generator(logprobs.device).manual_seed(stream)
        return torch.multinomial(logprobs.exp(), 1, generator=generator)[0]


def dequantized(tensor):
    """`code * scale` of each 128 x 128 block; tensors without scales are BF16 as they are."""
    if tensor.scales is None:
        return tensor.values
    rows, columns = tensor.values.shape
    scales = tensor.scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return tensor.values.float() * scales
