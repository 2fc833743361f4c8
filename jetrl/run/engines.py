"""Which engine does the rollout (`rollout.engine`): our own over the trainer's model, vLLM, or the user's."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl.config import Config
from jetrl.config.toml import toml_literal
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.engine.speculation.speculator import build_speculator
from jetrl.errors import UserError, defined_at
from jetrl.huggingface import read as hf
from jetrl.kernels.attention.latent import STEPS, require_page
from jetrl.kernels.dispatch import definition
from jetrl.model.transformer import Transformer
from jetrl.parallel.world import World
from jetrl.precision.blocks.layouts import require_rewind
from jetrl.precision.flow import flow_digest
from jetrl.precision.recipe import Recipe
from jetrl.run.checked_engine import CheckedEngine, blamed
from jetrl.run.fit.memory import GIB, predict
from jetrl.spec import ModelSpec
from jetrl.types import Engine
from jetrl.user_code.importing import import_attribute
from jetrl.vllm.engine import VllmEngine
from jetrl.vllm.start import require_installed, require_on_cpu
from jetrl.vllm.weights import layout

_METHODS = ("load", "add", "step", "collect", "forget", "release")


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What an engine's constructor gets.

    `model` is the trainer's own, for engines that share it; others read `WeightSet.tensors` in `load`. `base_config` is
    the model's Hugging Face config.json. `eos_token_ids` end a sequence.
    """

    config: Config
    model: Transformer
    tokenizer: Any
    base_config: dict[str, Any]
    flow_digest: str
    eos_token_ids: frozenset[int]


def build_engine(
    config: Config, model: Transformer, tokenizer: Any, base_config: dict[str, Any] | None, source: Path | None
) -> Engine:
    """The engine that `rollout.engine` names. `source`: the model's folder, if it has one."""
    context = EngineContext(
        config, model, tokenizer, hf.hf_config(model.spec, base_config), 
        flow_digest(model.spec, model.recipe, definition(config.kernels)),
        eos_ids(tokenizer, source, model.spec.vocab_size),
    )
    if config.rollout.engine == "vllm":
        return _vllm_engine(context)
    return paged_engine(context) if engine_class(config.rollout.engine) is None else _users_engine(context)


def require_engine(config: Config, spec: ModelSpec, recipe: Recipe) -> None:
    """What can be known of the engine without the model's weights: UserError if it is missing or cannot run it."""
    if config.rollout.engine == "jetrl" and config.rollout.speculate != "off":
        require_rewind(spec)
    if config.rollout.engine == "jetrl" and spec.latent is not None and config.kernels != "reference":
        assert config.rollout.page_size is not None, "resolve() has set it"
        require_page(config.rollout.page_size, STEPS[config.kernels])
    if engine_class(config.rollout.engine) is None and config.rollout.engine == "vllm":
        layout(spec, recipe, config.vllm.partial_blocks, config.device)  # before what costs gigabytes to cure
        require_installed()
        if config.device == "cpu":
            require_on_cpu(config, spec)


def check_engine(config: Config, world: World) -> None:
    """Refuse an engine that does not run in several processes."""
    if config.rollout.engine == "vllm" and not world.alone:
        raise UserError(
            f'rollout.engine = "vllm" runs in one process on one GPU, and this run has {world.size}. Start it without '
            '--nproc, or set rollout.engine = "jetrl".'
        )


def paged_engine(context: EngineContext) -> PagedEngine:
    """The rollout engine over the trainer's own model object."""
    r = context.config.rollout
    assert r.page_size is not None and r.max_tokens_per_step is not None, "resolve() has set both"
    settings = EngineSettings(
        page_size=r.page_size, max_num_seqs=r.max_num_seqs, max_tokens_per_step=r.max_tokens_per_step,
        kv_cache_tokens=r.kv_cache_tokens, eos_token_ids=context.eos_token_ids, merge_prefix=r.merge_prefix,
    )
    speculator = build_speculator(r.speculate, r.max_draft_tokens, r.max_num_seqs)
    return PagedEngine(context.model, context.tokenizer, context.flow_digest, settings, speculator)


def keep_cache(engine: Engine, config: Config, ranks: int, capacity: int) -> None:
    """Tell our engine, and the user, how large a KV cache may stay on a GPU of `capacity` bytes during the update."""
    if not isinstance(engine, PagedEngine):
        return
    memory, told = predict(config, engine.model.spec, ranks, capacity), ""
    size = f"KV cache: {memory.cache / GIB:.1f} GiB (predicted)"
    if memory.kept_cache:
        told = f"{size}; it stays on the GPU during updates, with its CUDA graphs (rollout.keep_kv_cache)"
    elif config.rollout.keep_kv_cache == "auto":
        told = (
            f"{size}; updates leave room for {memory.keep / GIB:.1f}, so it is freed after each rollout, and CUDA "
            "graphs are captured again (rollout.keep_kv_cache)"
        )
    engine.keep(memory.keep, told)


def engine_class(name: str) -> Any:
    """The class that `rollout.engine` names, checked as far as possible without an instance; None for jetrl and vllm,
    which are built in."""
    if name in ("jetrl", "vllm"):
        return None
    if ":" not in name:
        raise UserError(f"rollout.engine = {name!r}: write jetrl, vllm, module:Class or path/to/file.py:Class.")
    kind = import_attribute(name, "rollout.engine", "class")
    if missing := [method for method in _METHODS if not callable(getattr(kind, method, None))]:
        raise UserError(f"rollout.engine = {name}: it has no {', '.join(missing)}; see jetrl.types.Engine.")
    try:
        inspect.signature(kind).bind(None)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"rollout.engine = {name}: write {kind.__name__}.__init__(self, context){defined_at(kind)}: {error}."
        ) from error
    return kind


def promises_bits(config: Config) -> bool:
    """Whether the engine of a config promises the learner's bits, as far as its class tells."""
    engine = config.rollout.engine
    return engine == "jetrl" or getattr(engine_class(engine), "keeps_bits", False) is True


def why_not_exact(config: Config, promises: bool) -> str | None:
    """The setting by which the sampler's logits are not the learner's, bit for bit; None: they are. `promises`: whether
    the engine says so."""
    if config.precision == "fp8_rollout":
        return 'precision = "fp8_rollout"'
    if (config.precision, config.kernels) == ("fp8", "hopper_scaled_mm"):
        return 'kernels = "hopper_scaled_mm"'
    return None if promises else f"rollout.engine = {toml_literal(config.rollout.engine)}"


def check_truncation(config: Config, promises: bool) -> None:
    """UserError where the truncated distribution is to be trained and the learner cannot find what the sampler kept."""
    r = config.rollout
    if r.logprobs != "sampled" or (why := why_not_exact(config, promises)) is None:
        return
    keys = [key for key in ("top_p", "top_k", "min_p") if getattr(r, key) != r.usual(key)]
    on = [f"rollout.{key} = {getattr(r, key):g}" for key in keys]
    raise UserError(
        f"{' and '.join(on)}: the learner works out from its own logits which tokens the sampler kept, and with {why} "
        'its logits are not bit-equal to the sampler\'s. Set rollout.logprobs = "full" (log-probs are then of the '
        "whole distribution, from which tokens are not drawn), or sample from the whole distribution by removing "
        f"{' and '.join(f'rollout.{key}' for key in keys)}."
    )


def _vllm_engine(context: EngineContext) -> Engine:
    engine = VllmEngine(
        context.config, context.model, context.tokenizer, context.base_config, context.flow_digest,
        context.eos_token_ids,
    )
    cure = "This is a bug in vLLM or in how jetrl drives it: please report it, with both versions"
    return CheckedEngine(engine, "vllm", context.model.spec.vocab_size, cure)


def _users_engine(context: EngineContext) -> Engine:
    name = context.config.rollout.engine
    with blamed(name, "the constructor", called=engine_class(name)):
        engine = engine_class(name)(context)
    if not isinstance(getattr(engine, "keeps_bits", None), bool):
        raise UserError(
            f"rollout.engine = {name}: set keeps_bits, to True only if its log-probs equal the learner's bit for bit."
        )
    if not hasattr(engine, "has_work"):
        raise UserError(f"rollout.engine = {name}: it has no has_work; see jetrl.types.Engine.")
    return CheckedEngine(engine, name, context.model.spec.vocab_size)


def eos_ids(tokenizer: Any, folder: Path | None, vocab_size: int) -> frozenset[int]:
    """End-of-sequence ids: the tokenizer's, and those in the model folder's config.json and generation_config.json.

    UserError for one that is no id of the model's vocabulary: the policy could never draw it.
    """
    found: list[tuple[str, Any]] = [("the tokenizer", tokenizer.eos_token_id)]
    if folder is not None:
        for name, source in (
            ("config.json", hf.read_config(folder)), ("generation_config.json", hf.read_generation_config(folder))
        ):
            listed = (source or {}).get("eos_token_id")
            found += [(f"{folder}/{name}", i) for i in (listed if isinstance(listed, list) else [listed])]
    for where, value in found:
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(
                f"{where}: eos_token_id {value!r} is not a token id. Write the id of the token that ends a turn, or a "
                "list of such ids."
            )
        if not 0 <= value < vocab_size:
            raise UserError(
                f"{where}: eos_token_id {value} is not in the model's vocabulary (ids from 0 to {vocab_size - 1}). "
                "Write the id of the token that ends a turn, or remove the key."
            )
    return frozenset(value for _, value in found if value is not None)
