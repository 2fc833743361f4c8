"""Programs that tests of the real vLLM run, on a CPU or a GPU, each in a process of its own: vLLM sets up threads,
memory pools and process groups that other tests should not inherit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

from jetrl.chat.tokenizer import load_tokenizer
from jetrl.huggingface import read as hf
from jetrl.huggingface.adapter import read_adapters, write_adapters
from jetrl.huggingface.export import export
from jetrl.kernels.reference import dequantize, quantize_1x128
from jetrl.model.adapter import first_values
from jetrl.model.transformer import Transformer
from jetrl.precision.lora import Lora, expanded
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec, RopeSpec

ROOT = Path(__file__).parents[1]
SPEC = ModelSpec(
    family="qwen3", vocab_size=60, hidden_size=256, intermediate_size=384, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=64, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e4), max_position=64, tie_embeddings=False, qkv_bias=False,
    qk_norm=True,
)
PROMPTS = [[1, 2, 3], list(range(5, 25)), [9], [50, 7, 50, 7]]
NEW = 24
TALK = (
    "class Talk:\n"
    "    def reset(self, problem):\n        self.turns = 0\n        return '1+1='\n"
    "    def step(self, action):\n        self.turns += 1\n        return '2', len(set(action)), self.turns == 3\n"
)
_RUN = """\
import json, sys
from pathlib import Path
import tiny
from jetrl.report.recorder import read_metrics, read_samples
tiny.ARCH.update(json.loads(sys.argv[3]))
run_dir = tiny.tiny_run(Path(sys.argv[1]), {"rollout.engine": "vllm", **json.loads(sys.argv[2])})
print("FOUND " + json.dumps([read_metrics(run_dir), list(read_samples(run_dir))]))
"""
# vLLM's own DeepGEMM: with that of sgl-deep-gemm it loses its scales (docs/ENGINES.md).
_GREEDY = """\
import json, os, sys
sys.modules["deep_gemm"] = None
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
               "VLLM_USE_DEEP_GEMM_E8M0": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
from vllm import LLM, SamplingParams
adapters, over = sys.argv[4] if len(sys.argv) > 4 else "", {}
if adapters:
    from vllm.lora.request import LoRARequest
    over = {"lora_request": LoRARequest("ours", 1, adapters)}
llm = LLM(model=sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", generation_config="vllm", enforce_eager=True,
          max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes=1 << 27, gpu_memory_utilization=0.1,
          enable_lora=bool(adapters), max_lora_rank=8)
params = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[3]), ignore_eos=True, detokenize=False)
prompts = [{"prompt_token_ids": p} for p in json.loads(sys.argv[2])]
out = llm.generate(prompts, params, use_tqdm=False, **over)
print("FOUND " + json.dumps([list(o.outputs[0].token_ids) for o in out]))
"""


def found(code: str, *arguments: str) -> Any:
    """What a program in a process of its own says after FOUND."""
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, timeout=570
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(lines[-1].removeprefix("FOUND "))


def run(folder: Path, changes: dict[str, object], arch: dict[str, object]) -> tuple[list[dict[str, Any]], list[Any]]:
    """The rows and samples of a tiny run with vLLM."""
    rows, samples = found(_RUN, str(folder), json.dumps(changes), json.dumps(arch))
    return rows, samples


def talking(folder: Path) -> dict[str, object]:
    """Settings of a run whose problems are conversations of three turns."""
    (folder / "talk.py").write_text(TALK)
    return {
        "task.name": "environment", "task.params": {}, "task.reward": None, "environment.max_turn_tokens": 4,
        "rollout.max_response_length": 30, "environment.name": f"{folder}/talk.py:Talk", "train.steps": 2,
    }


def sharp(folder: Path, arch: dict[str, object]) -> dict[str, object]:
    """Changes for a run from weights twice as large as random ones: its log-probs differ, so wrong scales show."""
    vocabulary = {"vocab_size": len(load_tokenizer("builtin:arithmetic"))}
    spec = hf.spec_from_hf(tiny.ARCH | arch | vocabulary)
    _save_larger(Transformer(spec, Recipe(name="fp8", num_layers=spec.num_layers)), 2.0, folder / "sharp")
    return {"model.path": str(folder / "sharp"), "model.arch": None}


def _save_larger(model: Transformer, factor: float, folder: Path) -> None:
    model.init_random(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    hf.save_model(folder, model.spec, model.state_dict(), dtype=torch.float32)


def exported(folder: Path, fp8: bool, tied: bool = False) -> Path:
    """A folder by `jetrl export` of a random model, whose most probable tokens stand out. In FP8 less so: with weights
    three times as large, one code that rounds differently changes all tokens after it."""
    spec, recipe = replace(SPEC, tie_embeddings=tied), Recipe(name="fp8", num_layers=SPEC.num_layers)
    _save_larger(Transformer(spec, recipe), 2.0 if fp8 else 3.0, folder / "model")
    return export(folder / "model", folder / "out", fp8=fp8, recipe=recipe)


def adapters_over(base: Path, folder: Path) -> Path:
    """A folder of adapters of rank 8 beside all projections of a BF16 `base`, as a run writes it."""
    recipe = Recipe(name="bf16", num_layers=SPEC.num_layers, lora=Lora(8, 12.0, expanded(["all"])))
    model = Transformer(SPEC, recipe, master_dtype=None)
    values = {name: value * (1 + 3 * name.endswith("b.weight")) for name, value in first_values(model, 0, drawn=True)}
    folder.mkdir()
    write_adapters(folder, SPEC, recipe, values.__getitem__, {}, (str(base), None), None)
    return folder


@torch.no_grad()
def add_adapters(model: torch.nn.Module, folder: Path) -> None:
    """W + s B A in FP32 in the weights of a transformers model, rounded to their own type."""
    lora, stored = read_adapters(folder).lora, load_file(folder / "adapter_model.safetensors")
    for name, a in stored.items():
        if not name.endswith("lora_A.weight"):
            continue
        weight = model.get_parameter(name.removeprefix("base_model.model.").replace("lora_A.", ""))
        b = stored[name.replace("lora_A", "lora_B")]
        weight.copy_(weight.float() + (b.float() @ a.float() * lora.scale).to(weight.device))


def _round_activations(module: torch.nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """To FP8, by rows of 128, as `activation_scheme = "dynamic"` in the folder's config.json asks."""
    (x,) = inputs
    rounded = dequantize(quantize_1x128(x.flatten(0, -2).cpu()))
    return rounded.reshape(x.shape).to(x)


@torch.no_grad()
def greedy_in_both(folder: Path, device: str, adapters: Path | None = None) -> tuple[float, float, float]:
    """vLLM's greedy tokens of `PROMPTS` against transformers: the share that is greedy there too, the most that one of
    them lies below the best in FP32, and the largest error of transformers' own logits, from rounding to the folder's
    formats. Two programs with such errors may part where logits are closer than twice that. transformers reads the FP8
    weights; its own FP8 GEMM needs a kernel from the hub, so activations are rounded here, before each linear layer.
    With `adapters` vLLM serves them over the folder, and transformers' weights get them added.
    """
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    fp8 = "quantization_config" in json.loads((folder / "config.json").read_text())
    read = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if fp8 else {}
    theirs = found(_GREEDY, str(folder), json.dumps(PROMPTS), str(NEW), *([str(adapters)] if adapters else []))
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=device, **read).eval()
    for name, module in rounded.named_modules() if fp8 else ():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(_round_activations)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu", **read).eval()
    torch.nn.Module.float(exact)  # transformers' own refuses what was read from codes
    for model in (exact, rounded) if adapters else ():
        add_adapters(model, adapters)

    def logits(model: Any, tokens: list[int], start: int) -> Tensor:
        rows = model(torch.tensor([tokens], device=model.device)).logits[0, start - 1 : -1]
        return rows.float().cpu()

    lost, errors, same = 0.0, 0.0, 0
    for prompt, tokens in zip(PROMPTS, theirs, strict=True):
        assert len(tokens) == NEW
        rows, other = (logits(model, prompt + tokens, len(prompt)) for model in (exact, rounded))
        below = rows.max(-1).values - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        lost, errors = max(lost, float(below.max())), max(errors, float((rows - other).abs().max()))
        same += int((other.argmax(-1) == torch.tensor(tokens)).sum())
    return same / (NEW * len(PROMPTS)), lost, errors
