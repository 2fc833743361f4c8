"""A stand-in for the parts of vLLM's Python API that jetrl calls, for tests without vLLM.

It has vLLM's traps: a constructor that seeds all generators, operators without a deterministic version, no stop at the
end of sequence, fused projections, vocabularies padded to 64, a loader that knows only listed names and dtypes, a
prefix cache that outlives weights, weights that are gone after sleep level 2, a sleep that fails where another process
took memory of the GPU, scales of an FP8 cache that are 1 after waking, and (as on a CPU) a tied lm_head that keeps the
values of the start. It computes with transformers' model.
"""

import json
import random
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm import sampling_params
from vllm.sampling_params import RequestOutputKind

__version__ = "0.32.0"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
engines = []  # every LLM that was made
SamplingParams = sampling_params.SamplingParams


def nondeterministic():
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("an operator of vLLM does not have a deterministic implementation")


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for part in "qkv":
            self.register_buffer(f"_{part}_scale", torch.tensor(1.0))
            setattr(self, f"_{part}_scale_float", 1.0)


class Model(torch.nn.Module):
    """Parameters by vLLM's names, and transformers' model made of them."""

    def __init__(self, config):
        super().__init__()
        self.config, self.quantized = config, config.pop("quantization_config", None)
        config.pop("architectures")
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).eval()
        self.tied = config["tie_word_embeddings"]
        self.old_head = self.model.lm_head.weight.detach().clone()
        self.theirs, self.rows = torch.nn.ParameterDict(), {}
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"attn": Attention()}) for _ in range(config["num_hidden_layers"])
        )
        for name, value in self.model.state_dict().items():
            if name == "lm_head.weight" and self.tied:
                continue
            self.add(name, value)

    def place(self, name):
        """Our fused parameter of a checkpoint's tensor."""
        for fused, parts in FUSED.items():
            for part in parts:
                if f".{part}." in name:
                    return name.replace(part, fused)
        return name

    def add(self, name, value):
        module = name.removesuffix(".weight")
        fp8 = self.quantized and name.endswith("_proj.weight") and module not in self.quantized["ignored_layers"]
        assert not (fp8 and value.shape[0] % 128), "not divisible by weight quantization block_n"
        pieces = [(name, value.to(torch.float8_e4m3fn if fp8 else torch.bfloat16))]
        if fp8:
            pieces.append((f"{name}_scale_inv", torch.ones(value.shape[0] // 128, -(-value.shape[1] // 128))))
        for piece, data in pieces:
            key = self.place(piece)
            if "embed_tokens" in key or "lm_head" in key:  # the vocabulary is padded
                data = torch.cat([data, data.new_zeros(-len(data) % 64, data.shape[1])])
            start = len(self.theirs[key.replace(".", "/")]) if key.replace(".", "/") in self.theirs else 0
            self.rows[piece] = (start, start + (len(value) if piece == name else len(data)))
            whole = data if not start else torch.cat([self.theirs[key.replace(".", "/")].view(data.dtype), data])
            self.theirs[key.replace(".", "/")] = torch.nn.Parameter(whole, requires_grad=False)

    def named_parameters(self, *args, **kwargs):
        return ((key.replace("/", "."), value) for key, value in self.theirs.items())

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "lm_head.weight" and self.tied:
                continue  # vLLM skips it
            if name not in self.rows:
                raise ValueError(f"There is no module or parameter named {name!r}")
            start, end = self.rows[name]
            target = self.theirs[self.place(name).replace(".", "/")][start:end]
            assert target.dtype == tensor.dtype and target.shape == tensor.shape, name
            target.copy_(tensor)
        self.rebuild()

    def rebuild(self):
        """transformers' weights from ours: FP8 ones as code * scale."""
        state = {}
        for name, (start, end) in self.rows.items():
            if name.endswith("_scale_inv"):
                continue
            value = self.theirs[self.place(name).replace(".", "/")][start:end]
            if f"{name}_scale_inv" in self.rows:
                first, last = self.rows[f"{name}_scale_inv"]
                scale = self.theirs[self.place(f"{name}_scale_inv").replace(".", "/")][first:last]
                value = value.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, : value.shape[1]]
            state[name] = value.to(torch.bfloat16)
        self.model.load_state_dict(state | ({"lm_head.weight": self.old_head} if self.tied else {}), strict=True)
        if self.tied:
            self.model.lm_head.weight = torch.nn.Parameter(self.old_head)

    def logits(self, tokens):
        return self.model(torch.tensor([tokens])).logits[0, -1].float()


class LLM:
    def __init__(self, model, **options):
        nondeterministic()
        torch.manual_seed(options["seed"])
        np.random.seed(options["seed"])
        random.seed(options["seed"])
        config = json.loads((Path(model) / "config.json").read_text())
        if config["architectures"] != ["Qwen3ForCausalLM"]:
            raise ValueError(f"Model architectures {config['architectures']} are not supported for now.\nand so on")
        self.options, self.log = options, []
        self.model, self.asleep = Model(config), set()
        self.llm_engine = Engine(self)
        module, _, name = options.get("worker_cls", "vllm.v1.worker.gpu_worker.Worker").rpartition(".")
        self.worker = getattr(import_module(module), name)(self)
        engines.append(self)

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and set(kwargs) == {"weights_iterator"}
        assert "weights" not in self.asleep, "the weights' memory is not mapped"
        self.log.append("reload")
        self.model.load_weights(kwargs["weights_iterator"])

    def apply_model(self, function):
        return [function(self.model)]

    def sleep(self, level):
        self.worker.sleep(level)
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags):
        assert set(tags) <= self.asleep
        self.log.append(f"wake {tags[0]}")
        self.asleep -= set(tags)
        if "kv_cache" in tags:
            for layer in self.model.layers:
                layer["attn"]._k_scale.fill_(1.0)
                layer["attn"]._v_scale.fill_(1.0)


class Engine:
    """`LLMEngine`: one token a step for the requests that run."""

    def __init__(self, llm):
        self.llm, self.requests, self.cached = llm, {}, {}
        self.engine_core = SimpleNamespace(shutdown=lambda: llm.log.append("shutdown"))

    def has_unfinished_requests(self):
        return bool(self.requests)

    def reset_prefix_cache(self):
        self.cached.clear()
        return True

    def add_request(self, request_id, prompt, params):
        nondeterministic()
        assert isinstance(request_id, str) and request_id not in self.requests
        assert len(prompt["prompt_token_ids"]) < self.llm.options["max_model_len"]
        self.requests[request_id] = SimpleNamespace(
            tokens=list(prompt["prompt_token_ids"]), salt=prompt["cache_salt"], params=params, drawn=[], logprobs=[],
            told=0, generator=torch.Generator().manual_seed(params.seed),
        )

    def abort_request(self, request_ids):
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    @torch.no_grad()
    def step(self):
        nondeterministic()
        assert not self.llm.asleep, "the memory is not mapped"
        outputs = []
        for request_id in list(self.requests)[: self.llm.options["max_num_seqs"]]:
            one = self.requests[request_id]
            finish = self.draw(one)
            if finish:
                del self.requests[request_id]
            if finish or one.params.output_kind == RequestOutputKind.DELTA:
                outputs.append(self.output(request_id, one, finish))
        return outputs

    def draw(self, one):
        key = (one.salt, *one.tokens)
        if key not in self.cached:
            self.cached[key] = self.llm.model.logits(one.tokens)
        p = one.params
        logprobs = (self.cached[key] / (p.temperature or 1.0)).log_softmax(-1)
        if p.temperature == 0:
            token = int(logprobs.argmax())
        else:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=one.generator))
        one.tokens.append(token)
        one.drawn.append(token)
        one.logprobs.append(float(logprobs[token]))
        if token in p.stop_token_ids:
            return "stop"
        return "length" if len(one.drawn) == p.max_tokens else None

    def output(self, request_id, one, finish):
        start, one.told = one.told, len(one.drawn)
        tokens = one.drawn[start:]
        logprobs = SimpleNamespace(logprobs=one.logprobs[start:], token_ids=list(tokens))
        completion = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=finish)
        return SimpleNamespace(request_id=request_id, outputs=[completion])
