"""The launches of a run with the portable kernels, recorded on a CPU: `benchmarks/portable_resources.py` and
`test_portable_needed.py` compile them. In a process of its own: it takes the place of the CPU's backend."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import triton.language as tl


def launches(capability: tuple[int, int], precision: str) -> list[Any]:
    """The jobs of `kernels.compiling.recorded` for a rollout and updates on a GPU of that compute capability."""
    from jetrl.kernels import launch, tiles

    launch.CAPABILITY, launch.E4M3 = capability, tl.constexpr(capability >= (8, 9))
    launch.OLD_MMA = tl.constexpr(tiles.kind_of(capability) == "mma")
    launch.LAUNCH.clear()
    launch.LAUNCH.update({"PDL": True, "launch_pdl": True} if capability >= (9, 0) else {"PDL": False})
    from recorded_run import EXPERTS, HYBRID, as_on_a_gpu
    from tiny import ARCH, tiny_config

    from jetrl.kernels import dispatch
    from jetrl.kernels.compiling.pool import Job
    from jetrl.kernels.compiling.recorded import recording
    from jetrl.run import prepare
    from jetrl.run.compiling import needed

    product = torch.mm  # on a GPU it may give FP32 from BF16
    torch.mm = lambda a, b, out_dtype=None: product(a, b).to(out_dtype or a.dtype)  # type: ignore[assignment]
    dispatch.require = prepare.require = lambda name: None  # type: ignore[attr-defined, assignment]
    dispatch._serving["cpu"], dispatch.DEVICE_OF["triton"] = "triton", "cpu"
    found: dict[str, Job] = {}
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "precision": precision, "rollout.page_size": 128, "rollout.max_num_seqs": 24,
            "rollout.max_response_length": 900, "train.max_tokens_per_gpu": 2048, "rollout.max_tokens_per_step": 2048,
            "model.arch": ARCH | {
                "hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "max_position_embeddings": 2048,
            },
        }
        plain: dict[str, Any] = {} if precision == "bf16" else {"quant.kv_cache": "fp8"}
        experts = {"model.arch": changes["model.arch"] | EXPERTS}
        hybrid = {"model.arch": changes["model.arch"] | HYBRID | {"head_dim": 256}}
        for number, more in enumerate(({}, plain, experts, hybrid) if plain else ({}, experts, hybrid)):
            config = tiny_config(Path(folder) / str(number), changes | more).model_copy(update={"kernels": "triton"})
            spec = prepare.load_spec(config)[1]
            with as_on_a_gpu(), recording(lambda job: found.setdefault(job.key, job), 2048, libraries=False):
                needed.run(config, spec, True)
    return list(found.values())


if __name__ == "__main__":
    import sys

    for job in launches((8, 0), sys.argv[1]):
        print(job.key)
