"""Run by test_kernels_needed.py in a process of its own: the miniature with the hopper backend, whose launches are only
recorded, on a CPU; then a run with other lengths, whose launches must be among those found. DeepGEMM and
FlashAttention-4 are names here: a call of one is an error."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch


def refused(*args: Any, **options: Any) -> None:
    raise AssertionError("a library was called")


def stand_ins() -> None:
    gemm = types.ModuleType("deep_gemm")
    for name in ("fp8_gemm_nt", "bf16_gemm_nt", "bf16_gemm_tn"):
        setattr(gemm, name, refused)
    gemm.set_pdl = lambda on: None  # type: ignore[attr-defined]
    names = ["flash_attn", "flash_attn.cute", "flash_attn.cute.interface"]
    sys.modules |= {"deep_gemm": gemm} | {name: types.ModuleType(name) for name in names}
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        setattr(sys.modules[names[-1]], name, refused)


def main(folder: Path, kv_cache: str, master: str) -> None:
    stand_ins()
    from tiny import ARCH, tiny_config

    from jetrl.kernels import dispatch
    from jetrl.kernels.backends.recorded import recording
    from jetrl.kernels.compiling import Job
    from jetrl.train import kernels_needed, setup

    product = torch.mm  # on a GPU it may give FP32 from BF16
    torch.mm = lambda a, b, out_dtype=None: product(a, b).to(out_dtype or a.dtype)  # type: ignore[assignment]
    dispatch.require = lambda name: None  # type: ignore[attr-defined, assignment]
    dispatch._serving["cpu"], dispatch.DEVICE_OF["hopper"] = "hopper", "cpu"
    config = tiny_config(folder, {
        "quant.kv_cache": kv_cache, "rollout.page_size": 128, "rollout.max_num_seqs": 24, "train.master_dtype": master,
        "rollout.max_response_length": 4000, "task.max_prompt_length": 900, "train.max_tokens_per_gpu": 8192,
        "rollout.max_tokens_per_step": 5000, "model.arch": ARCH | {
            "hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "max_position_embeddings": 8192,
        },
    }).model_copy(update={"kernels": "hopper"})
    spec = setup.load_spec(config)[1]
    found: dict[str, Job] = {}
    with recording(lambda job: found.setdefault(job.key, job), 8192):
        kernels_needed.run(config, spec, True)
    more: dict[str, Job] = {}
    with recording(lambda job: more.setdefault(job.key, job), 1):
        ragged(config, spec)
    missed = [key for key, job in more.items() if key not in found and job.stage == 0]
    kinds = {job.name.split()[0] for job in found.values()}
    assert kinds == {"Triton", "Gluon", "DeepGEMM", "DeepGEMM's", "FlashAttention-4"}, kinds
    assert len(more) > 40, "the run must launch most of the kernels, or this finds nothing"
    print(f"{len(found)} found, {len(more)} in the run, {len(missed)} missed")
    print("\n".join(missed))


def ragged(config: Any, spec: Any) -> None:
    """A rollout and an update as a run makes them, with lengths by chance."""
    from jetrl.parity import NoText
    from jetrl.rollout.engine import PagedEngine
    from jetrl.train import setup
    from jetrl.train.packing import pack
    from jetrl.train.passes import estimate
    from jetrl.train.publish import publish
    from jetrl.train.step import update
    from jetrl.types import Group, Problem, Prompt, Request, SamplingParams, Segment, Trajectory

    rng = np.random.default_rng(0)
    model = setup.build_model(config, spec, setup.recipe_of(config, spec), weights=False)
    engine = PagedEngine(model, NoText(), "flow", page_size=128, max_num_seqs=24, max_tokens_per_step=5000)
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
            given = Segment("environment", prompt, ""), Segment("policy", (0,) * size, "", (0.0,) * size)
            answers.append(Trajectory(given, "stop", 0, "flow"))
        groups.append(Group(Prompt(number, Problem("", "", ""), prompt), tuple(answers), (0.0, 1.0, 0.0, 1.0)))
    batches = pack(groups, max_tokens_per_gpu=8192, flow_digest="flow", weight_version=0)
    _, batches, _ = estimate(groups, batches, learner, None, config, True)
    update(learner, batches, config, 1)
    model.publish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
