"""The Python API: load a model, generate with log-probs, make FP8 linears of any model, compare log-probs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from jetrl import arguments
from jetrl.chat.prompts import encode_prompt
from jetrl.chat.tokenizer import BUILTIN_PREFIX, is_arithmetic
from jetrl.config import Config, load_config, resolve
from jetrl.config.load import by_full_key, quiet
from jetrl.config.lora import LoraConfig
from jetrl.config.sections import ModelConfig
from jetrl.config.toml import split_override
from jetrl.engine.engine import PagedEngine
from jetrl.errors import UserError
from jetrl.huggingface import export as export_module
from jetrl.huggingface import hub
from jetrl.huggingface import read as hf
from jetrl.huggingface.adapter import is_adapters, read_adapters
from jetrl.huggingface.carried import may_hold_more, names_of
from jetrl.huggingface.merge import export_adapters, export_merged
from jetrl.kernels.dispatch import definition
from jetrl.kernels.support import capability
from jetrl.model.linear import FlowLinear
from jetrl.model.published import Note
from jetrl.model.transformer import Transformer
from jetrl.parallel.agreement import on_every_rank, same_everywhere, together
from jetrl.parallel.world import ALONE, World
from jetrl.parity.model_under_test import (
    as_trained,
    config_for,
    load_for_parity,
    model_folder,
    random_model,
    run_of,
    told_if_not_finite,
)
from jetrl.parity.rows import fingerprint
from jetrl.phrases import some
from jetrl.precision.flow import flow_digest
from jetrl.precision.recipe import build_recipe, recipe_of
from jetrl.report.console import Output
from jetrl.report.text import wrapped
from jetrl.run.engines import EngineContext, eos_ids, paged_engine
from jetrl.run.prepare import load_spec, model_source
from jetrl.run.setup import build, build_model, build_published
from jetrl.serve.address import FrontSettings
from jetrl.serve.service import About
from jetrl.train.publish import publish
from jetrl.types import Completion, FinishReason, ForwardBatch, Request, SamplingParams, VarlenPlan
from jetrl.untrusted import inside

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "FP8Linear", "Generated", "Policy", "evaluate_checkpoint", "evaluation_config", "export_checkpoint",
    "load_for_parity", "load_model", "publish_linears", "quantize_linears", "random_model",
]

_CPU_CACHE = 65_536  # tokens
_ALL = 1 << 62  # bytes
_TOKENIZER = ("model.tokenizer", "model.tokenizer_revision")  # what an evaluation takes of the section [model]


@dataclass(frozen=True, slots=True)
class Generated:
    """What `Policy.generate` returns for the prompt number `request_id`: a `types.Completion` in plain Python, so it
    can be compared, put into a set and written as JSON. `logprobs` are the sampler's FP32 bits."""

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    weight_version: int
    flow_digest: str

    @classmethod
    def of(cls, done: Completion) -> Generated:
        return cls(
            done.request_id, tuple(done.tokens.tolist()), tuple(done.logprobs.tolist()), done.text, done.finish_reason,
            done.weight_version, done.flow_digest,
        )


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
        self, prompts: str | Sequence[str | Sequence[int] | Sequence[Mapping[str, Any]]], *, max_tokens: int = 64,
        temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0,
        stop: str | Sequence[str] = (), seed: int = 0,
    ) -> list[Generated]:
        """Complete texts, chat messages or token lists. Each `Generated` has tokens, text and the log-prob of each
        token.

        A text becomes tokens as in a run without a chat template: with the special tokens that the tokenizer adds (BOS,
        for some). A list of messages (`[{"role": "user", "content": ...}]`) goes through the chat template. Token ids
        are taken as they are. Log-probs are of the whole distribution at the temperature, also where `top_p`, `top_k`
        or `min_p` truncates the draw. `prompts` may be a single text or conversation; the result is a list even then.
        The tokens of a completion depend on (seed, its place in `prompts`) and not on the other prompts. UserError for
        arguments that make no sense, and where a master weight has changed since `model.publish()`.
        """
        self.model.require_published()
        number, most = arguments.number, self.model.spec.max_position
        params = SamplingParams(
            arguments.whole("max_tokens", max_tokens, 1, most, f" The model has {most} positions, prompt included."),
            arguments.temperature_of(temperature, greedy=True),
            number("top_p", top_p, lambda p: 0 < p <= 1, "a number above 0 and at most 1; 1 is off"),
            arguments.whole("top_k", top_k, 0, 2**31 - 1, " 0 is off."),
            number("min_p", min_p, lambda p: 0 <= p < 1, "a number from 0 to below 1; 0 is off"),
            arguments.stops_of(stop), seed=arguments.whole("seed", seed, 0),
        )
        tokens = arguments.prompts_of(prompts, partial(encode_prompt, self.tokenizer), self.model.spec.vocab_size)
        for i, prompt in enumerate(tokens):
            if len(prompt) + params.max_tokens > most:
                raise UserError(
                    f"prompts[{i}] has {len(prompt)} tokens; with max_tokens = {params.max_tokens} that is beyond the "
                    f"model's {most} positions. Shorten one of the two."
                )
        if not tokens:
            return []
        return [Generated.of(c) for c in self.engine.generate([Request(i, t, params) for i, t in enumerate(tokens)])]

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Log-prob of tokens[1:] by the training forward, FP32 [len - 1]: bit-equal to what `generate` records."""
        self.model.require_published()
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
    """Load a Hugging Face folder (Llama 3, Qwen2.5, Qwen3, Qwen3-MoE, Qwen3.5, DeepSeek V2 and V3, SmolLM2) as bf16,
    fp8, w8a16 or fp8_rollout.

    `path` may also be a run folder (its newest checkpoint) or a checkpoint, as in `jetrl eval`, or a name on the hub,
    such as Qwen/Qwen3-0.6B; `revision` is then a branch, tag or commit.
    `kv_cache` is `quant.kv_cache`: bf16 or fp8. Whatever you leave out is taken from the folder, if jetrl wrote it: its
    config.json says what the model was trained with. Else it is fp8, with a BF16 cache. `Policy.formats` says which.

    The model holds only what the forward pass reads: FP8 codes and the BF16 parts. With `masters` it holds FP32
    master weights as well, so that you can take gradients.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise UserError(f"path = {arguments.shown(path)}: give a Hugging Face model folder, or a name on the hub.")
    for name, value in (("precision", precision), ("device", device), ("kv_cache", kv_cache)):
        arguments.text(name, value, "must be a string")
    folder = model_folder(path, revision)
    run = run_of(Path(path)) if hub.on_disk(path, revision) is not None else None
    data, formats = as_trained(folder, run, precision, kv_cache)
    config = config_for(data | {"model": {"path": str(folder)}}, device)
    tokenizer, spec, _ = load_spec(config)
    model = (build_model if masters else build_published)(config, spec, recipe_of(config, spec))
    digest = flow_digest(spec, model.recipe, definition(config.kernels))
    ends = eos_ids(tokenizer, model_source(config), spec.vocab_size)
    engine = paged_engine(EngineContext(config, model, tokenizer, {}, digest, ends))
    engine.load(publish(model, 0, engine.flow_digest))
    return Policy(model, tokenizer, engine, formats)


def quantize_linears(model: nn.Module, skip: Iterable[str] = ("lm_head",)) -> nn.Module:
    """Replace every `nn.Linear` of any model, in place, with an FP8 linear with the same weights; returns the model.

    Training runs fprop, dgrad and wgrad in FP8. `skip` holds names (or last parts of names) to leave alone. After each
    optimizer step call `publish_linears(model)`, which quantizes the new weights. A forward pass behind a step without
    it is a UserError. Seen are changes that torch counts: optimizers (foreach and fused ones too), in-place operations,
    another parameter or storage in a weight's place. Not seen: writes through `weight.data`, or by kernels that are not
    torch's. `load_state_dict`, and moving or casting the module, publish by themselves.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model = {arguments.shown(model)}: give a torch module with nn.Linear layers.")
    names = set(skip)
    found = [
        (name, module) for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in names and name.split(".")[-1] not in names
    ]
    if not found:
        raise UserError(f"model = {type(model).__name__}: no nn.Linear to replace (skipped: {sorted(names)}).")
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
        self._note = Note()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Quantize the weight and round the bias. Neither changes until the next call, whatever an optimizer does."""
        super().publish()
        if self.bias is not None:  # a BF16 bias would be its own copy
            self.published_bias = self.bias.detach().to(self.dtype, copy=True)
        self._note.take((name, p) for name, p in (("weight", self.weight), ("bias", self.bias)) if p is not None)

    def _apply(self, fn: Any, recurse: bool = True) -> FP8Linear:
        super()._apply(fn, recurse)
        if not self.weight.is_meta:
            self.publish()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.publish()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # an nn.Linear's
        if (name := self._note.moved((self.weight, self.bias))) is not None:
            raise UserError(
                f"The {name} of an FP8Linear ({self.in_features} -> {self.out_features}) has changed since it was last "
                "quantized, so the forward pass would read the old one. Call jetrl.publish_linears(model) after each "
                "optimizer step."
            )
        flat = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        return super().forward(flat, "train").to(x.dtype).view(*x.shape[:-1], -1)


# ---- what the command line calls ------------------------------------------------------------------------------------


def served_model(
    path: str, name: str, precision: str, device: str, kv_cache: str, revision: str | None, seed: int,
    max_num_seqs: int, kv_cache_tokens: int | None,
) -> tuple[PagedEngine, About, str]:
    """For `jetrl serve`: an engine of its own size over a loaded model, what clients are told of it, and its formats.
    `kv_cache_tokens` None: on a GPU what is free, on a CPU as much as all sequences could fill, at most 65,536."""
    policy = load_model(path, precision, device, kv_cache=kv_cache, revision=revision)
    spec, before = policy.model.spec, policy.engine
    if kv_cache_tokens is None and policy.model.head_weight.device.type == "cpu":
        kv_cache_tokens = max(spec.max_position, min(_CPU_CACHE, max_num_seqs * spec.max_position))
    settings = replace(  # an idle server keeps its cache, and what it has captured
        before.settings, max_num_seqs=max_num_seqs, kv_cache_tokens=kv_cache_tokens, keep_bytes=_ALL
    )
    engine = PagedEngine(policy.model, policy.tokenizer, before.flow_digest, settings)
    assert before.weights is not None
    engine.load(before.weights)
    about = About(
        name or _served_name(path, revision), policy.tokenizer, spec.vocab_size, spec.max_position, before.flow_digest,
        before.weights.version, seed,
    )
    return engine, about, policy.formats


def _served_name(path: str, revision: str | None) -> str:
    return Path(path).resolve().name if hub.on_disk(path, revision) is not None else path


def serve_model(
    path: str, name: str, revision: str | None, formats: tuple[str, str, str], sizes: tuple[int, int, int | None],
    count: int, listener: socket, settings: FrontSettings, console: Console,
) -> None:
    """`jetrl serve` with `count` engines. `formats`: precision, device, kv_cache; `sizes`: seed, max_num_seqs,
    kv_cache_tokens. Several load the one folder that `path` means now, also where a run writes its next checkpoint
    meanwhile."""
    from jetrl.serve.server import serve  # needs the extra
    from jetrl.serve.workers import require_gpus, serve_workers

    def say(about: About, words: str, url: str) -> None:
        console.print(wrapped(words), style="dim")
        several = f" with {count} engines" if count > 1 else ""
        console.print(f"Serving {about.name} at {url}/v1{several} (Ctrl-C ends it)", markup=False)

    if count == 1:
        engine, about, words = served_model(path, name, *formats, revision, *sizes)
        serve(engine, about, listener, settings, lambda url: say(about, words, url))
        return
    gpus = require_gpus(count, formats[1])
    folder, name = str(model_folder(path, revision)), name or _served_name(path, revision)
    build = partial(served_model, folder, name, *formats, None, *sizes)
    errors = Output(stderr=True, highlight=False, soft_wrap=True)
    serve_workers(build, count, gpus, listener, settings, say, lambda text: errors.print(f"jetrl: {text}"))


def evaluation_config(
    where: str | Path, recipe: Path | None, overrides: Sequence[str], revision: str | None = None
) -> Config:
    """The resolved config by which a checkpoint or a model is evaluated: its run's, or the recipe's.

    Its section [model] counts only for the tokenizer: see `evaluated_config`.
    """
    named = hub.on_disk(where, revision) is None
    run = None if named else run_of(Path(where))
    if recipe is None and run is None:
        if not named and (Path(where) / "config.toml").is_file():
            raise UserError(f"{where} has no checkpoint yet. Set checkpoint.save_interval, or wait for one.")
        what = f"{where} is not a folder here, and a model from the hub" if named else where
        raise UserError(f"{what} belongs to no run, so its task is unknown. Give --recipe RECIPE.")
    path = recipe or run / "config.toml"  # type: ignore[operator]
    _require_tokenizer_only(where, overrides, path)
    config = load_config(path, overrides)
    return resolve(config, cuda_available=torch.cuda.is_available(), capability=capability())


def _require_tokenizer_only(where: str | Path, overrides: Sequence[str], recipe: Path) -> None:
    """UserError for overrides that would describe another model than the one that is evaluated."""
    said = dict(map(split_override, overrides))
    asked = {key: value for key, value in said.items() if key.split(".")[0] == "model" and key not in _TOKENIZER}
    known = by_full_key(load_config(recipe, (), quiet)) if asked else {}
    anyway = {key: "none" if known.get(key) is None else known[key] for key in asked}
    wrong = [key for key, value in asked.items() if value != anyway[key]]
    if wrong:
        raise UserError(
            f"{wrong[0]} has no effect on an evaluation: {where} is evaluated as its own config.json says. Leave it "
            "out. To evaluate another model, name its folder; for another architecture, change config.json in a copy."
        )


def evaluated_config(config: Config, folder: Path, overrides: Sequence[str] = ()) -> Config:
    """`config` with the model in `folder` as its model, and with the folder's tokenizer if it has one.

    The config's own tokenizer stays if an override names it, and if it is the built-in one and the folder's is too.
    """
    m = config.model
    tokenizer, revision = m.tokenizer, m.tokenizer_revision
    adapters = is_adapters(folder)
    if tokenizer is None and not hf.has_tokenizer(folder) and not adapters:  # adapters have at least their base's
        tokenizer, revision = m.path, m.revision
    elif hf.has_tokenizer(folder) and not any(split_override(text)[0] in _TOKENIZER for text in overrides):
        builtin = tokenizer is not None and tokenizer.startswith(BUILTIN_PREFIX)
        if not (builtin and is_arithmetic(hf.load_tokenizer_from(folder))):
            tokenizer = revision = None
    model = ModelConfig(path=str(folder), tokenizer=tokenizer, tokenizer_revision=revision)
    lora = LoraConfig(**read_adapters(folder).settings()) if adapters else LoraConfig()
    sft = config.sft.model_copy(update={"steps": 0})  # the warm start is behind these weights
    return config.model_copy(update={"model": model, "lora": lora, "sft": sft})


def evaluate_checkpoint(
    where: str | Path, recipe: Path | None, overrides: Sequence[str], revision: str | None = None,
    world: World = ALONE, console: Console | None = None, samples: Path | None = None,
) -> tuple[Path, int, dict[str, float]]:
    """Held-out accuracy of a checkpoint, or of a model (its folder or name on the hub), with the run's own task,
    sampling and precision, or a recipe's. Architecture and tokenizer are the folder's. The display goes to `console`.
    `samples`: a file for `eval.num_samples_kept` of its completions, as rows like those of eval_samples.jsonl.

    Returns the model folder that was read, the number of held-out problems, and the metrics. A collective of `world`:
    each rank reads all weights, all share the rollout, and every rank returns what one process would, to the bit.
    """
    from jetrl.run.loop import evaluate_once

    with together(world):
        config = evaluation_config(where, recipe, overrides, revision)
    # on each machine one rank reads the files to compare them with their hashes
    folder = on_every_rank(world, lambda: model_folder(where, revision, verify=world.local_rank == 0))
    config = on_every_rank(world, lambda: evaluated_config(config, folder, overrides))
    session = build(config, evaluates=True, world=world)
    if not world.alone:
        same_everywhere(world, **{f"the model in {folder}": fingerprint(session.model)})
    weights = publish(session.model, 0, session.flow_digest)
    with together(world):
        session.engine.load(weights)
    with told_if_not_finite(folder):
        metrics = evaluate_once(session, console, samples)
    return folder, len(session.task.eval_problems(config.task.num_eval)), metrics


def export_checkpoint(
    where: str | Path, out: Path, fp8: bool, revision: str | None = None,
    say: Callable[[str], object] = lambda text: None, merge: bool = False,
) -> Path:
    """Export a checkpoint with the recipe of its run (layers kept in BF16, scale rule), or a model. `say` gets which
    files of the folder the export does not have. Adapters are written as they are, or (`merge`) added to their base;
    `say` then gets what is lost by that."""
    run = run_of(Path(where)) if hub.on_disk(where, revision) is not None else None
    folder = model_folder(where, revision)
    if (root := hub.on_disk(where, revision)) is not None:
        inside(root, str(folder.relative_to(root)))  # nor may checkpoints be links out of a run that others made
    if is_adapters(folder):
        return _export_adapters(folder, out, fp8, merge, say)
    if merge:
        raise UserError(f"--merge is for adapters, and {folder} is a whole model. Leave it out.")
    config = None if run is None else load_config(run / "config.toml")
    spec = hf.spec_from_folder(folder)
    own = None if config is None else recipe_of(config, spec)
    recipe = own if own is not None and own.name != "bf16" else None
    base = None
    if config is not None and config.model.path is not None and (spec.delta is not None or spec.latent is not None):
        path, revision = config.model.path, config.model.revision
        try:
            if may_hold_more(model_folder(path, revision, verify=False, weights=False)):
                base = model_folder(path, revision)
        except UserError as error:
            say(f"The trained model alone, without the parts of {path} that jetrl does not train: {error}")
    written = export_module.export(folder, out, fp8, recipe, trained_with=own, base=base)
    if parts := names_of(written):
        say(f"Carried through as they were: {len(parts)} tensors that jetrl does not train ({some(parts)}).")
    if rest := export_module.left_out(folder):
        say(f"Left out, because jetrl does not know them as files of a model: {some(rest)}")
    return written


def _export_adapters(folder: Path, out: Path, fp8: bool, merge: bool, say: Callable[[str], object]) -> Path:
    found = read_adapters(folder)
    if fp8 and merge:
        raise UserError(
            f"--fp8 and --merge do not go together: the codes of merged weights are not those that {folder} was "
            "trained over. Leave out --fp8, or --merge: the base in FP8 and the adapters are then two folders."
        )
    if fp8:
        raise UserError(
            f"--fp8 has no effect on the adapters in {folder}. Export them without it, and their base by "
            f"`jetrl export {found.base_folder(weights=False)} OUT --fp8`."
        )
    if not merge:
        return export_adapters(found, out)
    lost = export_merged(found, out)
    say(
        "Merged: the adapters change nothing yet (the matrices B are zero), so this is their base." if lost is None else
        f"Merged: {lost:.1%} of what the adapters change was lost by rounding to BF16, and no program has the trained "
        "policy to the bit. The adapters themselves (without --merge) over their base have it."
    )
    return out
