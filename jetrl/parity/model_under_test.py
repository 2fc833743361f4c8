"""The model that a command names: a folder, a run, a recipe, a name on the hub, or a random one of a known shape."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl.config import Config, load_config, resolve, switched_off
from jetrl.config.shipped import find_recipe, shipped
from jetrl.config.toml import read_toml, split_override
from jetrl.errors import UserError
from jetrl.huggingface import hub
from jetrl.huggingface import provenance as trained
from jetrl.huggingface import read as hf
from jetrl.huggingface.adapter import RECORD, is_adapters, read_adapters
from jetrl.kernels.dispatch import select
from jetrl.kernels.support import capability, require_precision
from jetrl.model.adapter import draw_adapters
from jetrl.model.master import accumulate_in, masters_of
from jetrl.model.names import adapted_projections
from jetrl.model.sharding import shard_model
from jetrl.model.transformer import Transformer
from jetrl.parallel.world import World
from jetrl.precision.recipe import Recipe, recipe_of
from jetrl.run.checkpoint.checkpoint import model_folder as model_folder
from jetrl.run.prepare import adapters_in, check_experts, check_lora, check_sizes, load_spec, model_source
from jetrl.run.setup import build_model, build_published
from jetrl.spec import SHAPES, ModelSpec

_SEED = 0  # of drawn adapters


@dataclass(frozen=True, slots=True)
class Subject:
    """What `jetrl parity` certifies. `formats` says in words which precision and KV cache, and where from. `draws`: its
    adapters are none that were trained."""

    config: Config
    spec: ModelSpec
    recipe: Recipe
    name: str
    formats: str
    random: bool  # drawn on the device: there is nothing to read
    draws: bool = False

    def published(self) -> Transformer:
        """The model without masters. Adapters are drawn: those that begin as nothing would certify nothing."""
        if self.random:
            model = _drawn(self.config, self.spec, self.recipe, None)
        else:
            model = build_published(self.config, self.spec, self.recipe)
        if self.draws:
            draw_adapters(model, _SEED)
        return model

    def trained(self, config: Config, world: World) -> Transformer:
        """The model with the masters that `config.train` asks for, cut for `world` and published. A collective."""
        if not self.random:
            model = build_model(config, self.spec, self.recipe, world=world)
            if self.draws:
                draw_adapters(model, _SEED)
            return model.publish()
        model = _drawn(config, self.spec, self.recipe, getattr(torch, config.train.master_dtype))
        model.activation_checkpointing = config.train.activation_checkpointing
        shard_model(model, world)
        draw_adapters(model, _SEED)
        model.publish()
        accumulate_in(model, getattr(torch, config.train.grad_dtype))
        return model


def load_for_parity(
    model: str, precision: str, device: str, kv_cache: str = "", revision: str | None = None
) -> tuple[Transformer, str, str]:
    """The model that `subject_of` finds, without masters, its name, and its formats in words."""
    found = subject_of(model, precision, device, kv_cache, revision)
    return found.published(), found.name, found.formats


def subject_of(
    model: str, precision: str, device: str, kv_cache: str = "", revision: str | None = None,
    overrides: Sequence[str] = (),
) -> Subject:
    """The model of `jetrl parity`: from a folder, the hub or a recipe, or a random one (`random:SHAPE`, or with fewer
    layers `random:SHAPE:LAYERS`; none: the quickstart's). What must be downloaded is on the disk then.

    Empty `precision` and `kv_cache`: what the folder, its run or the recipe says, else fp8 with a BF16 cache.
    `overrides` are `kernels`, and settings of [lora]: adapters, drawn at random, beside the model's linears.
    """
    if model.startswith(("lora.", "kernels=")) and "=" in model:
        model, overrides = "", (model, *overrides)
    said = _settings(overrides)
    lora = {"lora": said["lora"]} if "lora" in said else {}
    if revision is not None and (model.startswith("random:") or model.endswith(".toml") or not model):
        raise UserError(f"revision {revision} (--revision) is for a model of the hub, such as Qwen/Qwen3-0.6B.")
    formats = _chosen(None, "", precision, kv_cache)[1]
    if model.startswith("random:"):
        shape, _, layers = model.removeprefix("random:").partition(":")
        if layers and not (layers.isascii() and layers.isdigit() and int(layers)):
            raise UserError(
                f"{model}: {layers!r} is not a number of layers. Write random:SHAPE or random:SHAPE:LAYERS."
            )
        config, spec = _random_shape(shape, precision, device, kv_cache, int(layers or 0), said)
        return _subject(config, spec, model, formats, random=True)
    if model in shipped() and not Path(model).exists() or model.endswith(".toml"):
        given = (("device", device), ("precision", precision), ("quant.kv_cache", kv_cache))
        config = load_config(find_recipe(model), [*(f"{key}={value}" for key, value in given if value), *overrides])
        config = resolve(config, cuda_available=torch.cuda.is_available(), capability=capability())
        in_it = trained.Trained(config.precision, {"kv_cache": config.quant.kv_cache})
        formats = _chosen(in_it, model, precision, kv_cache)[1]
    elif model:
        folder = model_folder(model, revision)
        run = run_of(Path(model)) if hub.on_disk(model) is not None else None
        data, formats = as_trained(folder, run, precision, kv_cache)
        rollout = {} if run is None else read_toml(run / "config.toml").get("rollout", {})
        if (sampler := rollout.get("engine", "jetrl")) != "jetrl":
            formats += f". The run sampled with {sampler}; this certificate is of jetrl's own engine"
        if lora and "lora" in data:
            first = next(one for one in overrides if one.startswith("lora."))
            raise UserError(f"{first}: {folder} has adapters of its own. Leave the setting out.")
        config = config_for(data | {"model": {"path": str(folder)}} | said, device)
    else:
        arch: dict[str, Any] = {
            "model_type": "qwen3", "hidden_size": 192, "intermediate_size": 448, "num_hidden_layers": 4,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
            "rope_theta": 10000.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        }
        data = {"model": {"arch": arch, "tokenizer": "builtin:arithmetic"}}
        data |= {"task": {"name": "addition", "max_prompt_length": 64}} | _chosen(None, "", precision, kv_cache)[0]
        data |= said
        config = config_for(data, device)
    _, spec, _ = load_spec(config)
    model_source(config, weights=True)
    return _subject(config, spec, model or "a random Qwen3", formats, random=False)


def _subject(config: Config, spec: ModelSpec, name: str, formats: str, random: bool) -> Subject:
    recipe = recipe_of(config, spec)
    check_lora(config, spec)
    require_precision(config.kernels, config.precision)
    draws = recipe.lora is not None and adapters_in(config) is None
    if recipe.lora is not None:
        beside = ", ".join(adapted_projections(spec, recipe.lora))
        formats += f", adapters of rank {recipe.lora.rank}{', drawn at random,' if draws else ''} beside {beside}"
    return Subject(config, spec, recipe, name, formats, random, draws)


def _settings(overrides: Sequence[str]) -> dict[str, Any]:
    """`kernels` and the table [lora] that overrides make, as part of a config's; empty without any."""
    said = dict(map(split_override, overrides))
    if wrong := [key for key in said if key != "kernels" and not key.startswith("lora.")]:
        raise UserError(
            f"{wrong[0]}: a certificate takes settings of [lora], such as lora.rank=8, and kernels=triton. Give "
            "precision, cache and device by --precision, --kv-cache and --device."
        )
    lora = {key.removeprefix("lora."): value for key, value in said.items() if key != "kernels"}
    return ({"lora": lora} if lora else {}) | {key: value for key, value in said.items() if key == "kernels"}


@contextmanager
def told_if_not_finite(name: object) -> Iterator[None]:
    """A FloatingPointError (logits that are no numbers) of the model `name` becomes a UserError."""
    try:
        yield
    except FloatingPointError as error:
        raise UserError(
            f"{name}: {error}. Its weights are finite, but some are so large that sums overflow, or that BF16 rounds "
            "them to infinity. Use another checkpoint, or find out where such values come from."
        ) from error


def random_model(
    shape: str, precision: str, device: str, layers: int | None = None, kv_cache: str = "", masters: bool = True,
    master_dtype: torch.dtype = torch.bfloat16, kernels: str = "auto",
) -> Transformer:
    """A model of a published shape with random BF16 weights, made on the device; its bits depend on the device.

    `layers`: this many instead of the shape's own. Without `masters`, only the published weights are held; else masters
    are of `master_dtype`.
    """
    config, spec = _random_shape(shape, precision, device, kv_cache, layers, {"kernels": kernels})
    model = _drawn(config, spec, recipe_of(config, spec), master_dtype if masters else None)
    return model.publish() if masters else model


def _random_shape(
    shape: str, precision: str, device: str, kv_cache: str, layers: int | None = None,
    more: Mapping[str, Any] | None = None,
) -> tuple[Config, ModelSpec]:
    if shape not in SHAPES:
        close = difflib.get_close_matches(shape, SHAPES, 1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(f"no shape {shape!r}{meant}; known: {', '.join(SHAPES)}")
    model_table = {"model": {"arch": {"shape": shape}, "tokenizer": "builtin:arithmetic"}}
    config = config_for(model_table | _chosen(None, "", precision, kv_cache)[0] | dict(more or {}), device)
    return config, replace(SHAPES[shape], num_layers=layers or SHAPES[shape].num_layers)


def _drawn(config: Config, spec: ModelSpec, recipe: Recipe, master_dtype: torch.dtype | None) -> Transformer:
    """Values that BF16 holds, whatever the masters are: the same published weights with and without these.

    With masters, publish it afterwards.
    """
    select(config.kernels)
    check_experts(config, spec)
    check_sizes(config, spec, recipe)
    with torch.device(config.device):
        model = Transformer(spec, recipe, master_dtype=master_dtype)
        generator = torch.Generator(config.device).manual_seed(0)
    model.to(config.device)
    empty = partial(torch.empty, dtype=torch.bfloat16, device=config.device)

    def drawn(p: Tensor) -> Tensor:
        return p.normal_(0, 0.02, generator=generator) if p.ndim > 1 else p.normal_(1, 0.1, generator=generator)

    if master_dtype is None:
        named = list(model.named_parameters())
        return model.publish_values((name, drawn(empty(p.shape))) for name, p in named)
    with torch.no_grad():
        for name, master in masters_of(model).items():
            value = drawn(empty(master.param.shape))
            if master.frozen:
                model.publish_frozen([(name, value)])
            else:
                master.param.copy_(value)
    return model


def run_of(path: Path) -> Path | None:
    """The run folder that a run or checkpoint folder belongs to, else None."""
    for folder in (path, *path.absolute().parents[:3]):
        if (folder / "config.toml").is_file() and (folder / "checkpoints").is_dir():
            return folder
    return None


def config_for(data: dict[str, Any], device: str) -> Config:
    from jetrl.config import parse_config

    base = {"name": "api", "device": device, "task": {"name": "addition"}}
    config = parse_config(base | data, source="these options")
    return resolve(config, cuda_available=torch.cuda.is_available(), capability=capability())


def as_trained(folder: Path, run: Path | None, precision: str, kv_cache: str) -> tuple[dict[str, Any], str]:
    """Precision and [quant] of a config for a model folder, and in words which were chosen and from where.

    What is given wins; then what the folder's config.json says; then the run that it belongs to (folders of earlier
    versions say nothing); then fp8 with a BF16 cache. With adapters there is a table [lora], too.
    """
    lora: dict[str, Any] = {}
    if is_adapters(folder):
        found = read_adapters(folder)
        said, source = trained.trained_of({trained.KEY: found.trained}, folder), f"{folder / RECORD}"
        lora = {"lora": found.settings()}
    else:
        said, source = trained.trained_of(hf.read_config(folder), folder), f"{folder / 'config.json'}"
    if said is None and run is not None:
        config, source = load_config(run / "config.toml"), f"{run / 'config.toml'}"
        said = trained.Trained(config.precision, config.quant.model_dump(mode="json"))
    chosen, formats = _chosen(said, source, precision, kv_cache)
    return chosen | lora, formats


def _chosen(
    said: trained.Trained | None, source: str, precision: str, kv_cache: str
) -> tuple[dict[str, Any], str]:
    taken = precision or (said.precision if said is not None else "fp8")
    quant: dict[str, Any] = {}
    if said is not None and said.precision != "bf16":  # BF16 has no [quant]
        off = switched_off("precision", taken)
        quant = {key: value for key, value in said.quant.items() if f"quant.{key}" not in off}
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
