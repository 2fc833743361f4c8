"""The Python API: load a model, generate with log-probs, make FP8 linears of any model, compare log-probs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jetrl import arguments
from jetrl.config import Config, load_config, resolve
from jetrl.config.shipped import find_recipe, shipped
from jetrl.errors import UserError
from jetrl.kernels.dispatch import require_experts, select
from jetrl.model import export as export_module
from jetrl.model import hf, hub, trained
from jetrl.model.linear import FlowLinear
from jetrl.model.transformer import Transformer
from jetrl.precision.flow import flow_digest
from jetrl.precision.recipe import build_recipe
from jetrl.rollout.engine import PagedEngine
from jetrl.spec import SHAPES
from jetrl.train.engines import EngineContext, eos_ids, paged_engine
from jetrl.train.publish import publish
from jetrl.train.setup import build_model, build_published, load_spec, recipe_of
from jetrl.types import Completion, ForwardBatch, Request, SamplingParams, VarlenPlan


@dataclass(frozen=True, slots=True)
class Policy:
    """A loaded model with its tokenizer and engine; what `load_model` returns.

    `formats` says in which precision and KV cache it runs, and where that comes from.
    """

    model: Transformer
    tokenizer: Any
    engine: PagedEngine
    formats: str = ""

    def generate(
        self, prompts: str | Sequence[str | Sequence[int]], *, max_tokens: int = 64, temperature: float = 1.0,
        top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, stop: str | Sequence[str] = (), seed: int = 0,
    ) -> list[Completion]:
        """Complete texts or token lists. Each `Completion` has tokens, text and the log-prob of each token.

        `prompts` may be a single text; the result is a list even then. A prompt's tokens depend on (seed, its place in
        `prompts`) and not on the other prompts. UserError for arguments that make no sense.
        """
        number, most = arguments.number, self.model.spec.max_position
        params = SamplingParams(
            arguments.whole("max_tokens", max_tokens, 1, most, f" The model has {most} positions, prompt included."),
            arguments.temperature_of(temperature, greedy=True),
            number("top_p", top_p, lambda p: 0 < p <= 1, "a number above 0 and at most 1; 1 is off"),
            arguments.whole("top_k", top_k, 0, 2**31 - 1, " 0 is off."),
            number("min_p", min_p, lambda p: 0 <= p < 1, "a number from 0 to below 1; 0 is off"),
            arguments.stops_of(stop), seed=arguments.whole("seed", seed, 0),
        )
        tokens = arguments.prompts_of(
            prompts, lambda text: self.tokenizer.encode(text, add_special_tokens=False), self.model.spec.vocab_size
        )
        for i, prompt in enumerate(tokens):
            if len(prompt) + params.max_tokens > most:
                raise UserError(
                    f"prompts[{i}] has {len(prompt)} tokens; with max_tokens = {params.max_tokens} that is beyond the "
                    f"model's {most} positions. Shorten one of the two."
                )
        if not tokens:
            return []
        return self.engine.generate([Request(i, t, params) for i, t in enumerate(tokens)])

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Log-prob of tokens[1:] by the training forward, FP32 [len - 1]: bit-equal to what `generate` records."""
        device, spec = self.model.head_weight.device, self.model.spec
        known = arguments.token_ids("tokens", tokens, spec.vocab_size)
        temperature = arguments.temperature_of(temperature, greedy=False)
        if len(known) > spec.max_position:
            raise UserError(f"tokens has {len(known)} ids; the model has {spec.max_position} positions. Shorten it.")
        ids = torch.tensor(known, device=device)
        plan = VarlenPlan(torch.tensor([0, len(ids)], dtype=torch.int32, device=device), (len(ids),))
        hidden = self.model(ForwardBatch(ids, torch.arange(len(ids), device=device), plan, "train"))
        return self.model.token_logprobs(hidden[:-1], ids[1:], temperature)[0]


def load_model(
    path: str | Path, precision: str = "", device: str = "auto", *, kv_cache: str = "", revision: str | None = None,
    masters: bool = False,
) -> Policy:
    """Load a Hugging Face folder (Llama 3, Qwen2.5, Qwen3, Qwen3-MoE, SmolLM2) as bf16, fp8 or fp8_rollout.

    `path` may also be a name on the hub, such as Qwen/Qwen3-0.6B; `revision` is then a branch, tag or commit.
    `kv_cache` is `quant.kv_cache`: bf16 or fp8. Whatever you leave out is taken from the folder, if jetrl wrote it: its
    config.json says what the model was trained with. Else it is fp8, with a BF16 cache. `Policy.formats` says which.

    The model holds only what the forward pass reads: FP8 codes and the BF16 parts. With `masters` it holds FP32
    master weights as well, so that you can take gradients.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise UserError(f"path = {arguments.shown(path)}: give a Hugging Face model folder, or a name on the hub.")
    for name, value in (("precision", precision), ("device", device), ("kv_cache", kv_cache)):
        arguments.text(name, value, "must be a text")
    folder = hub.model_folder(path, revision)
    data, formats = _as_trained(folder, None, precision, kv_cache)
    config = _config_for(data | {"model": {"path": str(folder)}}, device)
    tokenizer, spec, _ = load_spec(config)
    model = (build_model if masters else build_published)(config, spec, recipe_of(config, spec))
    digest = flow_digest(spec, model.recipe)
    engine = paged_engine(EngineContext(config, model, tokenizer, {}, digest, eos_ids(tokenizer, folder)))
    engine.load(publish(model, 0, engine.flow_digest))
    return Policy(model, tokenizer, engine, formats)


def quantize_linears(model: nn.Module, skip: Iterable[str] = ("lm_head",)) -> nn.Module:
    """Replace every `nn.Linear` of any model, in place, with an FP8 linear with the same weights; returns the model.

    Training runs fprop, dgrad and wgrad in FP8. `skip` holds names (or last parts of names) to leave alone. After each
    optimizer step call `publish_linears(model)`, which quantizes the new weights.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model = {arguments.shown(model)}: give a torch module with nn.Linear layers.")
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
            module.publish()


class FP8Linear(FlowLinear):
    """An `nn.Linear` whose three GEMMs run in FP8 (1x128 activations and gradients, 128x128 weights), for any model.

    Input [..., K] of any float dtype is rounded to BF16 first; the output has the dtype of the input. Its parameters
    are the linear's own, `weight` and `bias`, so that state dicts and optimizers fit as before.
    """

    def __init__(self, linear: nn.Linear) -> None:
        recipe = build_recipe("fp8", 1).linear(0, "o", "train")
        super().__init__(
            linear.in_features, (linear.out_features,), linear.bias is not None, {"train": recipe, "rollout": recipe},
            linear.weight.dtype, torch.bfloat16,
        )
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias  # type: ignore[assignment]  # Parameters, typed as Tensors
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Quantize the weight and round the bias. Neither changes until the next call, whatever an optimizer does."""
        super().publish()
        if self.bias is not None:  # a BF16 bias would be its own copy
            self.published_bias = self.bias.detach().to(self.dtype, copy=True)

    def _apply(self, fn: Any, recurse: bool = True) -> FP8Linear:
        super()._apply(fn, recurse)
        if not self.weight.is_meta:
            self.publish()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.publish()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # an nn.Linear's
        flat = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        return super().forward(flat, "train").to(x.dtype).view(*x.shape[:-1], -1)


# ---- what the command line calls ------------------------------------------------------------------------------------


def _config_for(data: dict[str, Any], device: str) -> Config:
    from jetrl.config import parse_config

    base = {"name": "api", "device": device, "task": {"name": "addition"}}
    return resolve(parse_config(base | data, source="these options"), cuda_available=torch.cuda.is_available())


def _as_trained(folder: Path, run: Path | None, precision: str, kv_cache: str) -> tuple[dict[str, Any], str]:
    """Precision and [quant] of a config for a model folder, and in words which were chosen and from where.

    What is given wins; then what the folder's config.json says; then the run that it belongs to (folders of earlier
    versions say nothing); then fp8 with a BF16 cache.
    """
    said, source = trained.trained_of(hf.read_config(folder), folder), f"{folder / 'config.json'}"
    if said is None and run is not None:
        config, source = load_config(run / "config.toml"), f"{run / 'config.toml'}"
        said = trained.Trained(config.precision, config.quant.model_dump(mode="json"))
    return _chosen(said, source, precision, kv_cache)


def _chosen(
    said: trained.Trained | None, source: str, precision: str, kv_cache: str
) -> tuple[dict[str, Any], str]:
    taken = precision or (said.precision if said is not None else "fp8")
    quant: dict[str, Any] = {}
    if said is not None and "bf16" not in (taken, said.precision):  # BF16 has no [quant]
        quant = dict(said.quant)
    cache_said = "kv_cache" in quant or (said is not None and taken == said.precision)
    if kv_cache:
        quant["kv_cache"] = kv_cache

    def whence(given: str, known: bool) -> str:
        return "as asked" if given else f"as {source} says" if known else "the default"

    formats = (
        f"precision {taken} ({whence(precision, said is not None)}), KV cache {quant.get('kv_cache', 'bf16')} "
        f"({whence(kv_cache, cache_said)})"
    )
    return {"precision": taken} | ({"quant": quant} if quant else {}), formats


def load_for_parity(
    model: str, precision: str, device: str, kv_cache: str = "", revision: str | None = None
) -> tuple[Transformer, str, str]:
    """The model of `jetrl parity`: from a folder, the hub or a recipe, or a random one (`random:SHAPE`; none: the
    quickstart's).

    Empty `precision` and `kv_cache`: what the folder, its run or the recipe says, else fp8 with a BF16 cache.
    Returns the model without masters, its name, and its formats in words.
    """
    if revision is not None and (model.startswith("random:") or model.endswith(".toml") or not model):
        raise UserError(f"--revision {revision} is for a model of the hub, such as Qwen/Qwen3-0.6B.")
    formats = _chosen(None, "", precision, kv_cache)[1]
    if model.startswith("random:"):
        shape = model.removeprefix("random:")
        built = random_model(shape, precision or "fp8", device, kv_cache=kv_cache, masters=False)
        return built, model, formats
    if model in shipped() and not Path(model).exists() or model.endswith(".toml"):
        given = (("device", device), ("precision", precision), ("quant.kv_cache", kv_cache))
        config = load_config(find_recipe(model), [f"{key}={value}" for key, value in given if value])
        config = resolve(config, cuda_available=torch.cuda.is_available())
        said = trained.Trained(config.precision, {"kv_cache": config.quant.kv_cache})
        formats = _chosen(said, model, precision, kv_cache)[1]
    elif model:
        folder = model_folder(model, revision)
        run = run_of(Path(model)) if hub.on_disk(model) is not None else None
        data, formats = _as_trained(folder, run, precision, kv_cache)
        config = _config_for(data | {"model": {"path": str(folder)}}, device)
    else:
        arch: dict[str, Any] = {
            "model_type": "qwen3", "hidden_size": 192, "intermediate_size": 448, "num_hidden_layers": 4,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
            "rope_theta": 10000.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        }
        data = {"model": {"arch": arch, "tokenizer": "builtin:arithmetic"}}
        data |= {"task": {"name": "addition", "max_prompt_length": 64}} | _chosen(None, "", precision, kv_cache)[0]
        config = _config_for(data, device)
    _, spec, _ = load_spec(config)
    return build_published(config, spec, recipe_of(config, spec)), model or "a random Qwen3", formats


def random_model(
    shape: str, precision: str, device: str, layers: int | None = None, kv_cache: str = "", masters: bool = True
) -> Transformer:
    """A model of a published shape with random BF16 weights, made on the device; its bits depend on the device.

    `layers`: this many instead of the shape's own. Without `masters`, only the published weights are held.
    """
    if shape not in SHAPES:
        raise UserError(f"no shape {shape!r}; known: {', '.join(SHAPES)}")
    spec = replace(SHAPES[shape], num_layers=layers or SHAPES[shape].num_layers)
    model_table = {"model": {"arch": {"shape": shape}, "tokenizer": "builtin:arithmetic"}}
    config = _config_for(model_table | _chosen(None, "", precision, kv_cache)[0], device)
    select(config.kernels)
    if spec.experts is not None:
        require_experts(config.kernels)
    with torch.device(config.device):
        model = Transformer(spec, recipe_of(config, spec), master_dtype=torch.bfloat16 if masters else None)
        generator = torch.Generator(config.device).manual_seed(0)
    model.to(config.device)

    def drawn(p: Tensor) -> Tensor:
        return p.normal_(0, 0.02, generator=generator) if p.ndim > 1 else p.normal_(1, 0.1, generator=generator)

    if not masters:
        named = list(model.named_parameters())
        empty = partial(torch.empty, dtype=torch.bfloat16, device=config.device)
        return model.publish_values((name, drawn(empty(p.shape))) for name, p in named)
    with torch.no_grad():
        for p in model.parameters():
            drawn(p)
    return model.publish()


def model_folder(where: str | Path, revision: str | None = None) -> Path:
    """The Hugging Face folder meant by a run folder (its newest checkpoint), a checkpoint, a model folder or a hub
    name."""
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
    session = build(resolve(config, cuda_available=torch.cuda.is_available()), evaluates=folder)
    session.engine.load(publish(session.model, 0, session.flow_digest))
    return folder, len(session.task.eval_problems(config.task.num_eval)), evaluate_once(session)


def export_checkpoint(where: str | Path, out: Path, fp8: bool, revision: str | None = None) -> Path:
    """Export a checkpoint with the recipe of its run (layers kept in BF16, scale rule), or a model."""
    run = run_of(Path(where)) if hub.on_disk(where, revision) is not None else None
    folder = model_folder(where, revision)
    own = recipe_of(load_config(run / "config.toml"), hf.spec_from_folder(folder)) if run is not None else None
    recipe = own if own is not None and own.name != "bf16" else None
    return export_module.export(folder, out, fp8, recipe, trained_with=own)
