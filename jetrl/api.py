"""The Python API: load a model, generate with log-probs, make FP8 linears of any model, compare log-probs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jetrl.config import Config, load_config, resolve
from jetrl.errors import UserError
from jetrl.kernels.dispatch import select
from jetrl.model import export as export_module
from jetrl.model import hf, hub
from jetrl.model.linear import FlowLinear
from jetrl.model.transformer import Transformer
from jetrl.precision.flow import flow_digest
from jetrl.precision.recipe import build_recipe
from jetrl.rollout.engine import PagedEngine
from jetrl.spec import SHAPES
from jetrl.train.engines import EngineContext, eos_ids, paged_engine
from jetrl.train.publish import publish
from jetrl.train.setup import build_model, load_spec, load_weights, recipe_of
from jetrl.types import Completion, ForwardBatch, Request, SamplingParams, VarlenPlan


@dataclass(frozen=True, slots=True)
class Policy:
    """A loaded model with its tokenizer and engine; what `load_model` returns."""

    model: Transformer
    tokenizer: Any
    engine: PagedEngine

    def generate(
        self, prompts: Sequence[str | Sequence[int]], *, max_tokens: int = 64, temperature: float = 1.0,
        top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, stop: Sequence[str] = (), seed: int = 0,
    ) -> list[Completion]:
        """Complete texts or token lists. Each `Completion` has tokens, text and the log-prob of each token.

        A prompt's tokens depend on (seed, its place in `prompts`) and not on the other prompts.
        """
        params = SamplingParams(max_tokens, temperature, top_p, top_k, min_p, tuple(stop), seed=seed)
        encode = self.tokenizer.encode
        tokens = [tuple(encode(p, add_special_tokens=False) if isinstance(p, str) else p) for p in prompts]
        return self.engine.generate([Request(i, t, params) for i, t in enumerate(tokens)])

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Log-prob of tokens[1:] by the training forward, FP32 [len - 1]: bit-equal to what `generate` records."""
        device = self.model.head_weight.device
        ids = torch.tensor(list(tokens), device=device)
        plan = VarlenPlan(torch.tensor([0, len(ids)], dtype=torch.int32, device=device), (len(ids),))
        hidden = self.model(ForwardBatch(ids, torch.arange(len(ids), device=device), plan, "train"))
        return self.model.token_logprobs(hidden[:-1], ids[1:], temperature)[0]


def load_model(
    path: str | Path, precision: str = "fp8", device: str = "auto", *, kv_cache: str = "", revision: str | None = None
) -> Policy:
    """Load a Hugging Face folder (Llama 3, Qwen2.5, Qwen3, SmolLM2) in a precision flow: bf16, fp8 or fp8_rollout.

    `path` may also be a name on the hub, such as Qwen/Qwen3-0.6B; `revision` is then a branch, tag or commit.
    `kv_cache` is `quant.kv_cache`: bf16, the default, or fp8. The folder does not say what its model was trained with.
    """
    folder = hub.model_folder(path, revision)
    config = _config_for({"model": {"path": str(folder)}} | _quant(kv_cache), precision, device)
    tokenizer, spec, _ = load_spec(config)
    model = build_model(config, spec, recipe_of(config, spec))
    digest = flow_digest(spec, model.recipe)
    engine = paged_engine(EngineContext(config, model, tokenizer, {}, digest, eos_ids(tokenizer, folder)))
    engine.load(publish(model, 0, engine.flow_digest))
    return Policy(model, tokenizer, engine)


def quantize_linears(model: nn.Module, skip: Iterable[str] = ("lm_head",)) -> nn.Module:
    """Replace every `nn.Linear` of any model, in place, by an FP8 linear with the same weights; returns the model.

    Training runs fprop, dgrad and wgrad in FP8. `skip` holds names (or last parts of names) to leave alone. After each
    optimizer step call `publish_linears(model)`, which quantizes the new weights.
    """
    names = set(skip)
    found = [
        (name, module) for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in names and name.split(".")[-1] not in names
    ]
    if not found:
        raise ValueError(f"no nn.Linear to replace (skipped: {sorted(names)})")
    for name, linear in found:
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], FP8Linear(linear))
    return model


def publish_linears(model: nn.Module) -> None:
    """Quantize the current weights of all `FP8Linear`s; call it after each optimizer step."""
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.inner.publish()


class FP8Linear(nn.Module):
    """An `nn.Linear` whose three GEMMs run in FP8 (1x128 activations and gradients, 128x128 weights), for any model.

    Input [..., K] of any float dtype is rounded to BF16 first; the output has the dtype of the input.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        recipe = build_recipe("fp8", 1).linear(0, "o", "train")
        dtype = linear.weight.dtype
        self.inner = FlowLinear(
            linear.in_features, (linear.out_features,), linear.bias is not None, {"train": recipe, "rollout": recipe},
            dtype, torch.bfloat16,
        )
        self.inner.weight = linear.weight  # type: ignore[assignment]  # a Parameter, though typed as a Tensor
        self.inner.bias = linear.bias
        self.inner.publish()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        return self.inner(flat, "train").to(x.dtype).view(*x.shape[:-1], -1)


# ---- what the command line calls ------------------------------------------------------------------------------------


def _config_for(data: dict[str, Any], precision: str, device: str) -> Config:
    from jetrl.config import parse_config

    base = {"name": "api", "precision": precision, "device": device, "task": {"name": "addition"}}
    return resolve(parse_config(base | data, source="these options"), cuda_available=torch.cuda.is_available())


def load_for_parity(
    model: str, precision: str, device: str, kv_cache: str = "", revision: str | None = None
) -> tuple[Transformer, str]:
    """The model of `jetrl parity`: a folder's, the hub's, a recipe's or a random one (`random:SHAPE`; none: the
    quickstart's).

    Empty `precision` and `kv_cache`: the recipe's or the run's own, else fp8 with a cache in BF16.
    """
    if revision is not None and (model.startswith("random:") or model.endswith(".toml") or not model):
        raise UserError(f"--revision {revision} is for a model of the hub, such as Qwen/Qwen3-0.6B.")
    if model.startswith("random:"):
        return random_model(model.removeprefix("random:"), precision or "fp8", device, kv_cache=kv_cache), model
    if model.endswith(".toml"):
        given = (("device", device), ("precision", precision), ("quant.kv_cache", kv_cache))
        config = load_config(model, [f"{key}={value}" for key, value in given if value])
        config = resolve(config, cuda_available=torch.cuda.is_available())
    elif model:
        data: dict[str, Any] = {"model": {"path": str(model_folder(model, revision))}}
        run = run_of(Path(model)) if hub.on_disk(model) is not None else None
        trained = load_config(run / "config.toml") if run is not None else None
        precision = precision or (trained.precision if trained is not None else "fp8")
        if trained is not None and "bf16" not in (precision, trained.precision):  # BF16 has no [quant]
            data["quant"] = trained.quant.model_dump(mode="json")
        if kv_cache:
            data["quant"] = data.get("quant", {}) | {"kv_cache": kv_cache}
        config = _config_for(data, precision, device)
    else:
        arch: dict[str, Any] = {
            "model_type": "qwen3", "hidden_size": 192, "intermediate_size": 448, "num_hidden_layers": 4,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
            "rope_theta": 10000.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        }
        data = {"model": {"arch": arch, "tokenizer": "builtin:arithmetic"}}
        data |= {"task": {"name": "addition", "max_prompt_length": 64}} | _quant(kv_cache)
        config = _config_for(data, precision or "fp8", device)
    _, spec, _ = load_spec(config)
    return build_model(config, spec, recipe_of(config, spec)), model or "a random Qwen3"


def _quant(kv_cache: str) -> dict[str, Any]:
    """The [quant] table of a config that sets nothing but, perhaps, the format of the KV cache."""
    return {"quant": {"kv_cache": kv_cache}} if kv_cache else {}


def random_model(
    shape: str, precision: str, device: str, layers: int | None = None, kv_cache: str = ""
) -> Transformer:
    """A model of a published shape with random BF16 weights, made on the device; its bits depend on the device.

    `layers`: that many instead of the shape's own.
    """
    if shape not in SHAPES:
        raise UserError(f"no shape {shape!r}; known: {', '.join(SHAPES)}")
    spec = replace(SHAPES[shape], num_layers=layers or SHAPES[shape].num_layers)
    model_table = {"model": {"arch": {"shape": shape}, "tokenizer": "builtin:arithmetic"}}
    config = _config_for(model_table | _quant(kv_cache), precision, device)
    select(config.kernels)
    with torch.device(config.device):
        model = Transformer(spec, recipe_of(config, spec), master_dtype=torch.bfloat16)
        generator = torch.Generator(config.device).manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.02, generator=generator) if p.ndim > 1 else p.normal_(1, 0.1, generator=generator)
    return model.to(config.device).publish()


def model_folder(where: str | Path, revision: str | None = None) -> Path:
    """The Hugging Face folder that a run folder (newest checkpoint), a checkpoint, a model folder or a name on the hub
    stands for."""
    from jetrl.train.checkpoint import newest, verify_model

    path = hub.model_folder(where, revision)
    if (path / "checkpoints").is_dir():
        found = newest(path / "checkpoints")
        if found is None:
            raise UserError(f"{path} has no complete checkpoint yet. Set checkpoint.save_interval, or wait for one.")
        path = found
    if (path / "state.json").is_file():
        verify_model(path)
    return path / export_module.HF_SUBFOLDER if (path / export_module.HF_SUBFOLDER).is_dir() else path


def run_of(path: Path) -> Path | None:
    """The run folder that a run or checkpoint folder belongs to, else None."""
    for folder in (path, *path.absolute().parents[:3]):
        if (folder / "config.toml").is_file() and (folder / "checkpoints").is_dir():
            return folder
    return None


def evaluate_checkpoint(
    where: str | Path, recipe: Path | None, overrides: Sequence[str], revision: str | None = None
) -> tuple[Path, int, dict[str, float]]:
    """Held-out accuracy of a checkpoint, or of a model (its folder or name on the hub), with the run's own task and
    sampling, or a recipe's.

    Returns the model folder that was read, the number of held-out problems, and the metrics.
    """
    from jetrl.loop import evaluate_once
    from jetrl.train.setup import build

    named = hub.on_disk(where, revision) is None
    run = None if named else run_of(Path(where))
    if recipe is None and run is None:
        raise UserError(f"{where} belongs to no run, so its task is unknown. Give --recipe RECIPE.")
    config = load_config(recipe or run / "config.toml", overrides)  # type: ignore[operator]
    folder = model_folder(where, revision)
    session = build(resolve(config, cuda_available=torch.cuda.is_available()), weights=False)
    load_weights(session.model, folder)
    session.engine.load(publish(session.model, 0, session.flow_digest))
    return folder, len(session.task.eval_problems(config.task.num_eval)), evaluate_once(session)


def export_checkpoint(where: str | Path, out: Path, fp8: bool, revision: str | None = None) -> Path:
    """Export a checkpoint with the recipe of its run (layers kept in BF16, scale rule), or a model."""
    run = run_of(Path(where)) if hub.on_disk(where, revision) is not None else None
    folder = model_folder(where, revision)
    recipe = None
    if run is not None:
        recipe = recipe_of(load_config(run / "config.toml"), hf.spec_from_folder(folder))
        if recipe.name == "bf16":
            recipe = None
    return export_module.export(folder, out, fp8, recipe)
