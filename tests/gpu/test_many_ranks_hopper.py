"""Two and four ranks over NCCL (eight where there are as many GPUs): a short run has the bits of one GPU, also where it
goes from one number of ranks to another.

`make test-gpu4`. To try these tests themselves without GPUs: `JETRL_TEST_RANKS=cpu`, which runs them over gloo.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_ranks import run_gpu_ranks
from ranks import run_ranks
from test_ranks_loop import assert_same_run
from tiny import ARCH, numbers, tiny_config, tiny_data

from jetrl.parallel.world import ALONE, World
from jetrl.run import loop
from jetrl.run.stopping import StopRequest

pytestmark = pytest.mark.gpu4
DEVICE = os.environ.get("JETRL_TEST_RANKS", "cuda")
SIZES = [2, 4, 8] if torch.cuda.device_count() >= 8 else [2, 4]
STEPS = 3
COMMON: dict[str, Any] = {
    "device": DEVICE, "model.arch": ARCH | {"hidden_size": 128, "head_dim": 128, "intermediate_size": 200},
    "train.steps": STEPS, "train.reduction": "fixed", "train.max_tokens_per_gpu": 32, "checkpoint.save_interval": 1,
    "checkpoint.keep": 9, "eval.eval_interval": 1, "rollout.max_num_seqs": 4, "rollout.kv_cache_tokens": 4096,
}
CASES: dict[str, dict[str, Any]] = {
    "fp8 cache": {"quant.kv_cache": "fp8"},
    "bf16": {"precision": "bf16"},
    "lanes": {"train.reduction_lanes": 8, "train.optimizer_dtype": "bfloat16", "rl.updates_per_step": 2},
}
Part = tuple[str, int]  # the folder of a run, and the step up to which it goes


def parts(world: World, folder: Path, of: Sequence[Part]) -> list[bool]:
    """All cases of each part on the ranks of `world`; on one rank as a run of one process."""
    mine, ended = ALONE if world.size == 1 else world, []
    for name, steps in of:
        for case, changes in CASES.items():
            changes = COMMON | changes | {"train.steps": steps, "checkpoint.resume": "auto"}
            with StopRequest(mine) as stop:
                config = tiny_config(folder / "data" / str(world.rank), changes)
                ended.append(loop.run(config, folder / name / case, ["test"], stop))
    return ended


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process alone; each number of ranks; and one run that goes on with 2, then with the most, then with 2."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(SIZES[-1]):
        tiny_data(folder / "data" / str(rank))
    start = run_gpu_ranks if DEVICE == "cuda" else run_ranks
    plan: list[tuple[int, list[Part]]] = [
        (1, [("1", STEPS)]),
        *((size, [(str(size), STEPS)]) for size in SIZES[1:-1]),
        (2, [("2", STEPS), ("changing", 1)]),
        (SIZES[-1], [(str(SIZES[-1]), STEPS), ("changing", 2)]),
        (2, [("changing", STEPS)]),
    ]
    for size, of in plan:
        assert start(parts, size, folder, of, seconds=900.0) == [[True] * len(of) * len(CASES)] * size
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_a_run_has_the_bits_of_one_gpu(case: str, size: int, ran: Path) -> None:
    """Metrics, samples and checkpoints of every step."""
    assert_same_run(ran / str(size) / case, ran / "1" / case)
    rows = numbers(ran / str(size) / case)
    assert [row["parity/logprob_abs_diff_max"] for row in rows[1:]] == [0.0] * STEPS
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_goes_on_with_more_ranks_and_back(case: str, ran: Path) -> None:
    assert_same_run(ran / "changing" / case, ran / "1" / case)
