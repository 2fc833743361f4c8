"""Memory of each rank by part, measured next to what `run/fit/memory.py` predicts, and seconds by phase: two steps of a
recipe on N GPUs.

    python benchmarks/memory_by_part.py --shape qwen3-14b --nproc 2 train.activation_checkpointing=true
    torchrun --nproc-per-node 2 benchmarks/memory_by_part.py --shape qwen3-32b train.master_dtype=bfloat16
    python benchmarks/memory_by_part.py --shape tiny --nproc 2 device=cpu        # without a GPU, over gloo

The weights are random, drawn on the device, by each rank its own rows, so a 32B model needs no host copy. Data,
tokenizer and all else are those of `recipes_on_random.py`; overrides are the recipe's. What is held is counted from the
objects themselves; on a GPU, peaks of the rollout and of the update are torch's. Seconds are those of the last step, as
the first compiles kernels. A row for each call is added to benchmarks/results/memory.json. Status 1 where a log-prob of
the learner differs from the sampler's.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, environment, save, saved_rows, table
from recipes_on_random import stand_in_config
from torch import Tensor, nn

from jetrl.config import Config, load_config, resolve, to_toml
from jetrl.engine.runner import ModelRunner
from jetrl.model.master import accumulate_in
from jetrl.model.rope import rope_tables
from jetrl.model.sharding import shard_model
from jetrl.model.transformer import Transformer
from jetrl.parallel import launch
from jetrl.parallel.agreement import on_rank0
from jetrl.parallel.spawn import spawn
from jetrl.parallel.world import World
from jetrl.precision.recipe import Recipe
from jetrl.report.recorder import read_metrics
from jetrl.run import loop, setup
from jetrl.run.fit.advice import GPUS
from jetrl.run.fit.memory import GIB, predict
from jetrl.run.loop import StopRequest
from jetrl.run.setup import Session
from jetrl.spec import SHAPES, ModelSpec
from jetrl.train.optim import MixedAdamW

TINY = dataclasses.replace(  # whole blocks of 128, so that a CPU holds what a GPU does
    SHAPES["qwen3-0.6b"], vocab_size=2304, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=64, max_position=4096,
)

MINIATURES = {
    "tiny": TINY, "tiny-moe": dataclasses.replace(SHAPES["tiny-moe"], vocab_size=2304, max_position=4096)
}


def random_on_device(config: Config, spec: ModelSpec, recipe: Recipe, *, world: World, **_: Any) -> Transformer:
    """In place of `setup.build_model`: each rank draws its own rows on its device. Not the bits of `init_random`."""
    device = torch.device(config.device)
    with torch.device("meta"):
        model = Transformer(
            spec, recipe, master_dtype=getattr(torch, config.train.master_dtype),
            activation_checkpointing=config.train.activation_checkpointing,
        )
    shard_model(model, world)
    generator = torch.Generator(device).manual_seed(world.rank)
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is None:
                continue
            value = torch.ones(old.shape, dtype=old.dtype, device=device)
            if old.ndim > 1:
                value.normal_(0.0, 0.02, generator=generator)
            setattr(module, name, nn.Parameter(value))
    model.cos, model.sin = (t.to(device) for t in rope_tables(spec.rope, spec.head_dim, spec.max_position))
    model.publish()
    accumulate_in(model, getattr(torch, config.train.grad_dtype))
    return model


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of (nested) dataclasses, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(inner)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by the address of the memory, so that views count once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}


def published_of(model: Transformer) -> dict[int, int]:
    """The memory of everything that `publish` made and GEMMs read, except masters that are their own copy.

    A CPU's operands are made otherwise (FP64); there the codes for dgrad count as what a GPU has, a transpose.
    """
    gpu, masters = model.cos.is_cuda, storages(model.parameters())
    found = storages(tensors_in(model._head_operand)) if gpu else {}
    for module in model.published_modules():
        names = ("published", "published_bias", "quantized", *(["_operands"] if gpu else []))
        found |= storages(t for name in names for t in tensors_in(getattr(module, name, None)))
        if not gpu and "fp8_t" in getattr(module, "_operands", {}):
            found |= {-key: size for key, size in storages(tensors_in(module.quantized)).items()}
    return {k: v for k, v in found.items() if k not in masters}


def held(session: Session) -> dict[str, int]:
    """Bytes of what a session holds between two steps, by part as in `run.fit.memory.Memory`."""
    learner, models = session.learner, []
    if session.progress.reference is not None:
        models.append(session.progress.reference)
    if learner.critic is not None and learner.critic.body is not None:
        models.append(learner.critic.body)
    others = sum(
        sum(storages(m.parameters()).values()) + sum(published_of(m).values()) + m.cos.nbytes + m.sin.nbytes
        for m in models
    )
    if learner.critic is not None:
        head = learner.critic.head
        others += sum(storages([head.weight, head.published]).values())
    size, critics = (
        sum(t.nbytes for state in optimizer.state.values() for t in moments_in(state)) if optimizer is not None else 0
        for optimizer in (learner.optimizer, learner.critic_optimizer)
    )
    offloaded = isinstance(learner.optimizer, MixedAdamW) and learner.optimizer.host is not None
    others += 0 if offloaded else critics
    return {
        "masters": sum(storages(session.model.parameters()).values()), "moments": 0 if offloaded else size,
        "host": size + critics if offloaded else 0, "published": sum(published_of(session.model).values()),
        "tables": session.model.cos.nbytes + session.model.sin.nbytes, "others": others,
    }


def moments_in(state: dict[str, Any]) -> Iterator[Tensor]:
    for key, value in state.items():
        if key != "step" and isinstance(value, Tensor):
            parts = [getattr(value, name) for name in ("codes", "scale", "qmap") if hasattr(value, name)]
            yield from parts or [value]


class Meter:
    """Notes, during a run, what exists only for a moment: gradients, the cache, and on a GPU the peaks of phases."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.found: dict[str, int] = {}
        self.gpu = torch.cuda.is_available()

    def note(self, key: str, value: int) -> None:
        self.found[key] = max(value, self.found.get(key, 0))

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                self.note(f"before {name}", torch.cuda.memory_allocated())
            try:
                return function(*args, **kwargs)
            finally:
                if self.gpu:
                    torch.cuda.synchronize()
                    self.note(name, torch.cuda.max_memory_allocated())
                    self.note(f"{name} reserved", torch.cuda.max_memory_reserved())
        return call

    def built(self, *args: Any, **kwargs: Any) -> Session:
        self.session = session = setup.build(*args, **kwargs)
        session.learner.optimizer.register_step_pre_hook(lambda *_: self.note("gradients", sum(
            p.grad.nbytes for p in session.model.parameters() if p.grad is not None
        )))
        return session

    def reserved(self, runner: ModelRunner, num_pages: int) -> None:
        _RESERVE(runner, num_pages)
        assert runner.cache is not None
        self.note("cache", runner.cache.num_bytes)


_RESERVE = ModelRunner.reserve


def measure(config: Config, folder: Path, world: World) -> dict[str, Any]:
    """Run `config` on every rank; the bytes of this one, by part."""
    meter, kept = Meter(), (setup.build_model, loop.build, loop.gather, loop.update)
    setup.build_model, loop.build = random_on_device, meter.built
    loop.gather, loop.update = meter.around("rollout", loop.gather), meter.around("update", loop.update)
    ModelRunner.reserve = lambda runner, pages: meter.reserved(runner, pages)  # type: ignore[method-assign]
    try:
        with StopRequest(world) as stop:
            assert loop.run(config, folder / "runs" / config.name, ["memory_by_part"], stop)
    finally:
        setup.build_model, loop.build, loop.gather, loop.update = kept
        ModelRunner.reserve = _RESERVE  # type: ignore[method-assign]
    assert meter.session is not None
    if "before update" in meter.found:
        meter.note("activations", meter.found["update"] - meter.found["before update"] - meter.found["gradients"])
    return held(meter.session) | meter.found


def predicted(config: Config, spec: ModelSpec, ranks: int) -> dict[str, int]:
    capacity = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else GPUS["h200"]
    memory = predict(config, spec, ranks, capacity)
    row = {f.name: getattr(memory, f.name) for f in dataclasses.fields(memory)}
    # measured activations are all that stands between the owned gradients and the peak
    row["activations"] = memory.in_flight + max(memory.activations + memory.passing, memory.optimizer)
    between = memory.resident + memory.kept_cache
    return row | {"before update": between, "rollout": memory.rollout, "update": memory.update}


def on_rank(args: argparse.Namespace) -> None:
    """The program of each rank, and of a single process."""
    world = launch.join("cpu" if "device=cpu" in args.overrides else "auto")
    spec = (SHAPES | MINIATURES)[args.shape]
    made = tempfile.TemporaryDirectory() if world.first else None
    folder = Path(world.share(made.name if made is not None else None))

    def written() -> None:
        config = stand_in_config(args.recipe, folder, spec, args.tokens, args.response, "auto")
        (folder / "run.toml").write_text(to_toml(config.model_copy(update={"device": "auto", "kernels": "auto"})))

    on_rank0(world, written)
    config = resolve(load_config(folder / "run.toml", args.overrides), cuda_available=torch.cuda.is_available())
    rows, parity = world.gather(measure(config, folder, world)), 0.0
    if world.first:
        steps = read_metrics(folder / "runs" / config.name)[1:]
        parity = max(step["parity/logprob_abs_diff_max"] for step in steps)
        seconds = {k.removeprefix("time/"): v for k, v in steps[-1].items() if k.startswith("time/")}
        told = predicted(config, spec, world.size)
        parts = [k for k in (*told, "gradients", "rollout reserved", "update reserved") if k in rows[0]]
        shown = [
            {"part": key, "predicted": gib(told.get(key)), **{f"rank {r}": gib(row[key]) for r, row in enumerate(rows)}}
            for key in dict.fromkeys(parts)
        ]
        print(table(shown, list(shown[0])), flush=True)
        print(", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()), f"  parity {parity:g}", flush=True)
        record(args, {
            "shape": args.shape, "recipe": args.recipe, "ranks": world.size, "overrides": args.overrides,
            "tokens": told["tokens"], "predicted": told, "measured": rows, "seconds": seconds, "parity": parity,
            "environment": environment(),
        })
    if made is not None:
        made.cleanup()
    if parity != 0.0:
        raise SystemExit("a log-prob of the learner differs from the sampler's")


def gib(value: int | None) -> str:
    return "" if value is None else f"{value / GIB:.3f}"


def record(args: argparse.Namespace, row: dict[str, Any]) -> None:
    save("memory", [*saved_rows(args.out / "memory.json"), row], args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="settings of the recipe, such as train.offload_optimizer=true")
    parser.add_argument("--recipe", default="gsm8k_qwen3_8b")
    parser.add_argument("--shape", default="qwen3-8b", choices=[*(SHAPES | MINIATURES)])
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=300_000, help="to be sampled in a step, about")
    parser.add_argument("--response", type=int, help="longest response (default: the recipe's)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_intermixed_args()
    if launch.is_rank():
        launch.as_rank(lambda: on_rank(args), lambda error: None)
    if args.nproc > 1:
        raise SystemExit(spawn(args.nproc, sys.argv[1:], program=[__file__]))
    on_rank(args)


if __name__ == "__main__":
    main()
