"""Two ranks over NCCL, one a GPU: the bits of one rank, repeats to the bit, weights published in place.

`make test-gpu2`. To try these tests themselves without GPUs: `JETRL_TEST_RANKS=cpu`, which runs them over gloo.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_ranks import run_gpu_ranks
from ranks import run_ranks
from test_ranks_loop import assert_same_run
from tiny import ARCH, numbers, tiny_config, tiny_data

from jetrl.engine.graphs.cache import GraphCache
from jetrl.engine.graphs.decode import DecodeGraphs
from jetrl.parallel.world import ALONE, World
from jetrl.parity.certificate import Workload
from jetrl.parity.model_under_test import Subject, config_for
from jetrl.parity.ranks import certified
from jetrl.precision.recipe import recipe_of
from jetrl.run import loop
from jetrl.run.prepare import load_spec
from jetrl.run.stopping import StopRequest

pytestmark = pytest.mark.gpu2
DEVICE = os.environ.get("JETRL_TEST_RANKS", "cuda")
SIZE = 2
# heads that the decode kernels serve, and positions enough for a whole page that samples share (link m)
WIDE = ARCH | {"hidden_size": 128, "head_dim": 128, "intermediate_size": 200, "max_position_embeddings": 256}
COMMON: dict[str, Any] = {
    "device": DEVICE, "model.arch": ARCH | {"hidden_size": 72, "head_dim": 32}, "train.steps": 3,
    "train.max_tokens_per_gpu": 64, "checkpoint.save_interval": 1, "checkpoint.keep": 9, "rollout.max_num_seqs": 4,
    "rollout.kv_cache_tokens": 4096,
}
CASES: dict[str, dict[str, Any]] = {
    "fp8": {}, "bf16": {"precision": "bf16"}, "wide": {"model.arch": WIDE},
    "fp8 cache": {"quant.kv_cache": "fp8", "train.activation_checkpointing": True},
    "bf16 masters": {
        "train.master_dtype": "bfloat16", "train.optimizer_dtype": "bfloat16", "rl.kl_coef": 0.1,
        "rl.updates_per_step": 2, "train.max_tokens_per_gpu": 32,
    },
}
WORK = Workload(num_sequences=6, max_prompt=40, new_tokens=8, chunk=16, page_size=16)


def one_run(world: World, data: Path, run_dir: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """A run; where each publishing put the weights, and how often graphs were begun anew."""
    publish, begin, clear = loop.publish, DecodeGraphs.__init__, GraphCache.clear
    places: list[Any] = []
    graphs: list[int] = []

    def watched(model: Any, *args: Any) -> Any:
        weights = publish(model, *args)
        places.append(model.addresses())
        return weights

    def counted(self: Any, *args: Any) -> None:
        graphs.append(1)
        begin(self, *args)

    def dropped(self: Any) -> None:
        graphs.append(1)
        clear(self)

    loop.publish, DecodeGraphs.__init__, GraphCache.clear = watched, counted, dropped  # type: ignore[method-assign]
    try:
        with StopRequest(world) as stop:
            ended = loop.run(tiny_config(data, COMMON | changes), run_dir, ["test"], stop)
    finally:
        loop.publish, DecodeGraphs.__init__, GraphCache.clear = publish, begin, clear  # type: ignore[method-assign]
    return {"ended": ended, "in_place": all(one == places[0] for one in places), "published": len(places),
            "graphs": len(graphs)}


def certificate(world: World, precision: str, kv_cache: str) -> Any:
    quant = {"quant": {"kv_cache": kv_cache}} if kv_cache else {}
    arch = {"model": {"arch": WIDE, "tokenizer": "builtin:arithmetic"}}
    config = config_for(arch | {"precision": precision} | quant, DEVICE)
    spec = load_spec(config)[1]
    subject = Subject(config, spec, recipe_of(config, spec), "tiny", "", random=False)
    return certified(world, lambda: subject, lambda size: WORK, "fp32", lambda text: None)[0]


def everything(world: World, data: Path, folder: Path) -> dict[str, Any]:
    """All runs and certificates of the tests below, in one start of ranks."""
    found: dict[str, Any] = {}
    for name, changes in CASES.items():
        fixed = changes | {"train.reduction": "fixed"}
        found[name] = {
            "alone": one_run(ALONE, data / str(world.rank), folder / name / f"alone{world.rank}", fixed),
            "fixed": one_run(world, data / str(world.rank), folder / name / "fixed", fixed),
            "fast": one_run(world, data / str(world.rank), folder / name / "fast", changes),
            "again": one_run(world, data / str(world.rank), folder / name / "again", changes),
        }
    found["certificates"] = [certificate(world, *of) for of in (("fp8", ""), ("bf16", ""), ("fp8", "fp8"))]
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(SIZE):
        tiny_data(folder / "data" / str(rank))
    start = run_gpu_ranks if DEVICE == "cuda" else run_ranks
    return folder, start(everything, SIZE, folder / "data", folder, seconds=900.0)


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_fixed_sums_has_the_bits_of_one_rank(name: str, ran: tuple[Path, list[dict[str, Any]]]) -> None:
    """Metrics, samples and checkpoints; each GPU alone, and both together."""
    folder, results = ran
    for result in results:
        assert all(one["ended"] for one in result[name].values())
    assert_same_run(folder / name / "alone1", folder / name / "alone0")
    assert_same_run(folder / name / "fixed", folder / name / "alone0")
    rows = numbers(folder / name / "fixed")
    assert [row["parity/logprob_abs_diff_max"] for row in rows[1:]] == [0.0] * 3
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_fast_sums_repeats_to_the_bit(name: str, ran: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = ran
    assert_same_run(folder / name / "again", folder / name / "fast")
    rows = numbers(folder / name / "fast")
    assert [row["parity/logprob_abs_diff_max"] for row in rows[1:]] == [0.0] * 3
    assert rows[1]["reward/mean"] == numbers(folder / name / "fixed")[1]["reward/mean"], "step 1 samples the same"


@pytest.mark.parametrize("name", CASES)
def test_weights_are_published_in_place(name: str, ran: tuple[Path, list[dict[str, Any]]]) -> None:
    """So captured graphs go on reading the right memory: ranks begin them as often as one process does."""
    for result in ran[1]:
        alone, together = result[name]["alone"], result[name]["fixed"]
        assert together["in_place"] and together["published"] == alone["published"] == 4
        assert together["graphs"] == alone["graphs"]
        assert (together["graphs"] > 0) is torch.cuda.is_available()


def test_certificates_of_both_ranks(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    letters = "abcdmvswefg" if DEVICE == "cuda" else "abcvswefg"
    for result in ran[1]:
        for found in result["certificates"]:
            assert found.ok and found.ranks == SIZE, found.links
            assert "".join(link.link for link in found.links) == letters
