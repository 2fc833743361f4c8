"""Run by test_kernels_needed.py in a process of its own: the miniature with the hopper backend, whose launches are only
recorded, on a CPU; then a run, whose launches must be among those found. DeepGEMM and
FlashAttention-4 are names here: a call of one is an error."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

SETTINGS: dict[str, dict[str, Any]] = {  # `ragged`: a rollout and an update with lengths by chance; others: whole runs
    "ragged": {}, "plain": {"rollout.max_num_seqs": 16},
    "sft": {"sft.steps": 3, "rl.kl_coef": 0.1, "rollout.top_p": 0.9},
    "drafts": {"rollout.speculate": "on", "rollout.merge_prefix": True, "rollout.max_num_seqs": 20},
    "experts": {"rollout.max_num_seqs": 40},
}
GROUPED = (
    "k_grouped_bf16_gemm_tn_contiguous",
    "k_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
)
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
HYBRID = {
    "model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
}


def refused(*args: Any, **options: Any) -> None:
    raise AssertionError("a library was called")


def stand_ins() -> None:
    from jetrl.kernels.compiling.recorded import spare_imports

    gemm = types.ModuleType("deep_gemm")
    for name in ("fp8_gemm_nt", "bf16_gemm_nt", "bf16_gemm_tn", *GROUPED):
        setattr(gemm, name, refused)
    tiles = [128]
    settings = {"get": lambda: tiles[0], "set": lambda rows: tiles.__setitem__(0, rows)}
    for verb, call in settings.items():
        setattr(gemm, f"{verb}_mk_alignment_for_contiguous_layout", call)
    gemm.set_pdl = lambda on: None  # type: ignore[attr-defined]
    sys.modules["deep_gemm"] = gemm
    spare_imports()


class Gpu(str):
    """A device that is a CPU, and says that it is a GPU where the code asks to choose a path."""

    type = "cuda"


class Capture:
    """Stands for `engine.graphs.capture.Capture`: a replay runs the step."""

    def __init__(self, device: Gpu) -> None:
        self.device = device

    def make_room(self) -> bool:
        return True

    def __call__(self, step: Any) -> tuple[Any, Any]:
        return SimpleNamespace(replay=step), step()


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The paths that a GPU takes, on a CPU: decode steps as graphs, drawn by the kernel; tokens by chance."""
    from jetrl.engine import runner, sampler
    from jetrl.engine.graphs.decode import DecodeGraphs
    from jetrl.engine.graphs.drafts import DraftGraphs
    from jetrl.engine.runner import ModelRunner
    from jetrl.engine.speculation.verify import Burst
    from jetrl.kernels.logprob.ops import draw

    rng, chunk, steps = np.random.default_rng(1), sampler._sample_chunk, DecodeGraphs.run

    def drawn(logits: torch.Tensor, table: Any, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if sampler.is_cut(table, logits.shape[1]).any():
            return chunk(logits, table, positions)
        columns = (table.temperature, table.key.view(np.int64), positions.astype(np.int64))
        _, logprobs, _ = draw(logits, *(torch.from_numpy(c) for c in columns))
        return torch.from_numpy(rng.integers(logits.shape[1], size=len(logits))), logprobs

    def burst(self: Any, step: Any, count: int) -> tuple[torch.Tensor, ...]:
        tokens, *rest = steps(self, step, count)
        return torch.from_numpy(rng.integers(self.model.spec.vocab_size, size=tokens.shape)), *rest

    def again(self: Any, plan: Any, table: Any, rows: np.ndarray, count: int) -> Burst:
        held = self._ready(plan, table, rows, count, draws=True)
        for _ in range(count):
            held.step()
        return Burst.read(held.inputs.state.record[:count, :, : len(plan.tokens)].numpy())

    with ExitStack() as stack:
        for name, value in {
            "synchronize": lambda device=None: None, "mem_get_info": lambda device=None: (8 << 30, 8 << 30),
            "get_device_properties": lambda device=None: SimpleNamespace(
                total_memory=8 << 30, multi_processor_count=132
            ),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(ModelRunner, "device", property(lambda self: Gpu("cpu"))))
        stack.enter_context(mock.patch.object(runner, "Capture", Capture))
        stack.enter_context(mock.patch.object(sampler, "_sample_chunk", drawn))
        stack.enter_context(mock.patch.object(DecodeGraphs, "run", burst))
        stack.enter_context(mock.patch.object(DraftGraphs, "run", again))
        yield


def main(folder: Path, which: str, kv_cache: str, master: str) -> None:
    stand_ins()
    from tiny import ARCH, tiny_config

    from jetrl.kernels import dispatch
    from jetrl.kernels.compiling.pool import Job
    from jetrl.kernels.compiling.recorded import recording
    from jetrl.run import loop, prepare
    from jetrl.run.compiling import needed as kernels_needed
    from jetrl.run.loop import StopRequest

    product = torch.mm  # on a GPU it may give FP32 from BF16
    torch.mm = lambda a, b, out_dtype=None: product(a, b).to(out_dtype or a.dtype)  # type: ignore[assignment]
    dispatch.require = prepare.require = lambda name: None  # type: ignore[attr-defined, assignment]
    dispatch._serving["cpu"], dispatch.DEVICE_OF["hopper"] = "hopper", "cpu"
    large = {
        "rollout.max_num_seqs": 24, "rollout.max_response_length": 4000, "task.max_prompt_length": 900,
        "train.max_tokens_per_gpu": 8192, "rollout.max_tokens_per_step": 5000,
    }
    arch = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    changes = SETTINGS[which] | {
        "quant.kv_cache": kv_cache, "rollout.page_size": 128, "train.master_dtype": master,
    } | (large if which == "ragged" else {})
    changes["model.arch"] = ARCH | arch | ({"max_position_embeddings": 8192} if which == "ragged" else {})
    changes["model.arch"] |= EXPERTS if which == "experts" else {}
    if "sft.steps" in changes:
        changes["sft.cache_dir"] = str(folder / "sft")
    config = tiny_config(folder, changes).model_copy(update={"kernels": "hopper"})
    spec = prepare.load_spec(config)[1]
    found: dict[str, Job] = {}
    more: dict[str, Job] = {}
    with as_on_a_gpu():
        with recording(lambda job: found.setdefault(job.key, job), 8192):
            kernels_needed.run(config, spec, True)
        with recording(lambda job: more.setdefault(job.key, job), 1):
            if which == "ragged":
                ragged(config, spec)
            else:
                assert loop.run(config, folder / "run", ["test"], StopRequest())
    missed = [key for key, job in more.items() if key not in found and job.stage == 0]
    kinds = {job.name.split()[0] for job in found.values()}
    assert kinds == {"Triton", "Gluon", "DeepGEMM", "DeepGEMM's", "FlashAttention-4"}, kinds
    names = Counter(job.name for job in more.values())
    for name in ("sample_kernel", "columns_kernel", "both_kernel" if which == "experts" else "swiglu_kernel"):
        assert names[f"Triton {name}"], f"the run must go through everything, or this finds nothing: {names}"
    print(f"{len(found)} found, {len(more)} in the run, {len(missed)} missed")
    print("\n".join(missed))
    triton = Counter(job.name for job in found.values() if job.name.split()[0] in ("Triton", "Gluon"))
    print(f"{triton.total()} kernels of Triton: {dict(triton)}")


def ragged(config: Any, spec: Any) -> None:
    """A rollout and an update as a run makes them, with lengths by chance."""
    from jetrl.engine.engine import PagedEngine
    from jetrl.engine.settings import EngineSettings
    from jetrl.parity.certificate import NoText
    from jetrl.precision.recipe import recipe_of
    from jetrl.run import setup
    from jetrl.train.packing import pack
    from jetrl.train.passes import estimate
    from jetrl.train.publish import publish
    from jetrl.train.step import update
    from jetrl.types import Group, Problem, Prompt, Request, SamplingParams, Segment, Trajectory

    rng = np.random.default_rng(0)
    model = setup.build_model(config, spec, recipe_of(config, spec), weights=False)
    settings = EngineSettings(page_size=128, max_num_seqs=24, max_tokens_per_step=5000)
    engine = PagedEngine(model, NoText(), "flow", settings)
    engine.load(publish(model, 0, "flow"))
    sizes = rng.integers(1, 900, size=40)
    engine.generate([
        Request(i, (i % 16, *[0] * int(size)), SamplingParams(int(rng.integers(1, 30)), ignore_eos=True))
        for i, size in enumerate(sizes)
    ])
    learner, groups = setup.build_learner(config, model), []
    for number in range(6):
        prompt = (number,) * int(rng.integers(1, 900))
        answers = []
        for _ in range(4):
            size = int(rng.integers(5, 4000))
            drawn = Segment("policy", (0,) * size, "", (0.0,) * size, spans=((0, 0),))
            given = Segment("environment", prompt, ""), drawn
            answers.append(Trajectory(given, "stop", "flow"))
        groups.append(Group(Prompt(number, Problem("", "", ""), prompt), tuple(answers), (0.0, 1.0, 0.0, 1.0)))
    batches = pack(groups, max_tokens_per_gpu=8192, flow_digest="flow", weight_version=0)
    _, batches, _ = estimate(groups, batches, learner, None, config, True)
    update(learner, batches, config, 1)
    model.publish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
