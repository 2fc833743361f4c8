"""The certificate of several ranks: exact on any number of them, and a rank that computes otherwise is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_ops import owners
from ranks import run_ranks
from tiny import ARCH

from jetrl.errors import UserError
from jetrl.kernels.dispatch import load_backend
from jetrl.parallel.world import ALONE, World
from jetrl.parity import ranks as parity_ranks
from jetrl.parity.certificate import Certificate, Workload
from jetrl.parity.model_under_test import Subject, config_for, subject_of
from jetrl.parity.ranks import Masters, certified, certify_ranks, merged, rollout_links, training_of, update_link
from jetrl.parity.rows import LinkResult, row_bits
from jetrl.precision.recipe import Recipe, recipe_of
from jetrl.run.prepare import load_spec
from jetrl.spec import SHAPES
from jetrl.train import reduction

WORK = Workload(num_sequences=3, max_prompt=14, new_tokens=6, chunk=6, page_size=4)


def subject(precision: str = "fp8", seed: int = 1, **quant: Any) -> Subject:
    model = {"arch": ARCH, "tokenizer": "builtin:arithmetic", "init_seed": seed}
    config = config_for({"model": model, "precision": precision} | ({"quant": quant} if quant else {}), "cpu")
    spec = load_spec(config)[1]
    return Subject(config, spec, recipe_of(config, spec), "tiny", "", random=False)


def certificate(world: World, masters: Masters = "fp32", **options: Any) -> Certificate:
    return certify_ranks(subject(**options), WORK, world, masters, lambda text: None)


def on_rank_1(world: World, op: Callable[..., Any]) -> Callable[..., Any]:
    """`op`, a little larger on rank 1."""
    return op if world.rank != 1 else lambda *args: op(*args) * 1.01


def rank_links(world: World, masters: Masters = "fp32", **options: Any) -> list[LinkResult]:
    """Links e to g alone."""
    return links_of(subject(**options), world, masters)


def random_links(world: World) -> list[LinkResult]:
    """Of weights that are drawn on the device."""
    shape = load_spec(subject().config)[1]
    SHAPES["tiny"] = replace(shape, num_layers=2)
    return links_of(subject_of("random:tiny:1", "fp8", "cpu"), world, "fp32")


def links_of(of: Subject, world: World, masters: Masters) -> list[LinkResult]:
    links, batch = rollout_links(of.published(), WORK, world, lambda text: None)
    if masters != "no":
        links.append(merged(world, update_link(of, batch, training_of(of.config, WORK, masters), world)))
    return links


def broken_sampling(world: World) -> list[LinkResult]:
    """Rank 1 samples alone as the others do, and otherwise while it shares a rollout."""
    real, right = parity_ranks.roll_out, load_backend("reference").swiglu

    def rolled(*args: Any, queues: Any = None) -> Any:
        for owner in owners("swiglu"):
            owner.swiglu = on_rank_1(world, right) if queues is not None else right
        try:
            return real(*args, queues=queues)
        finally:
            for owner in owners("swiglu"):
                owner.swiglu = right

    parity_ranks.roll_out = rolled  # type: ignore[assignment]
    try:
        return rank_links(world, "no")
    finally:
        parity_ranks.roll_out = real


def broken_sum(world: World) -> list[LinkResult]:
    """Ranks that add up as `fast` does, whose bits depend on their number."""
    real = reduction.turns_of

    def unordered(count: int, lanes: int, size: int) -> list[reduction.Turn]:
        return real(count, lanes if size == 1 else size, size)

    reduction.turns_of = unordered
    try:
        return rank_links(world)
    finally:
        reduction.turns_of = real


def other_weights(world: World) -> str:
    with pytest.raises(UserError) as error:
        certificate(world, seed=world.rank)
    return str(error.value)


def everything(world: World) -> dict[str, Any]:
    """All that the tests ask of ranks, in one start of processes."""
    return {
        "fp8": certificate(world), "without": certificate(world, "no", precision="bf16"),
        "bf16": rank_links(world, "bf16", precision="bf16"), "kv8": rank_links(world, "no", kv_cache="fp8"),
        "w8a16": rank_links(world, "fp32", precision="w8a16"),
        "rollout": rank_links(world, "no", precision="fp8_rollout"),
        "random": random_links(world), "sampling": broken_sampling(world), "sum": broken_sum(world),
        "weights": other_weights(world),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(everything, 2, seconds=200)


def by_letter(links: Iterable[LinkResult]) -> dict[str, LinkResult]:
    return {link.link: link for link in links}


@pytest.mark.slow  # it starts the ranks of the next four tests
def test_two_ranks_give_what_one_gives(two: list[dict[str, Any]]) -> None:
    for key, letters in (("fp8", "abcvswefg"), ("without", "abcvswef")):
        found = two[0][key]
        assert found == two[1][key] and found.ok and found.ranks == 2, found.links
        assert "".join(by_letter(found.links)) == letters
    for links in (two[0]["fp8"].links, two[0]["bf16"], two[0]["kv8"], two[0]["w8a16"], two[0]["random"]):
        assert all(link.ok and link.first_difference is None and link.max_abs_diff == 0.0 for link in links)
    links = by_letter(two[0]["fp8"].links)
    assert links["f"].rows > 20 and links["e"].rows == 2 * links["f"].rows and links["g"].rows > 1000
    assert two[0]["fp8"].to_json()["ranks"] == 2


def test_two_precisions_are_told_apart_from_two_ranks(two: list[dict[str, Any]]) -> None:
    """In fp8_rollout sampling and training differ, and still N ranks do what one does."""
    assert [link.link for link in two[0]["rollout"] if link.ok] == ["e"]


def test_a_rank_that_samples_otherwise_is_found(two: list[dict[str, Any]]) -> None:
    links = by_letter(two[0]["sampling"])
    assert [key for key, link in links.items() if not link.ok] == ["e", "f"]
    assert "sequence" in str(links["e"].first_difference) and links["e"].rows_different
    assert str(links["f"].first_difference).startswith("rank ") and "micro-batch" in str(links["f"].first_difference)


def test_an_update_in_another_order_is_found(two: list[dict[str, Any]]) -> None:
    links = by_letter(two[0]["sum"])
    assert [key for key, link in links.items() if not link.ok] == ["g"] and links["g"].max_abs_diff is None
    assert str(links["g"].first_difference).startswith("rank 0: "), links["g"]


def test_ranks_with_other_weights_are_refused(two: list[dict[str, Any]]) -> None:
    assert "the model tiny is" in two[0]["weights"] and two[0]["weights"] == two[1]["weights"]


def test_what_makes_no_sense_in_one_process() -> None:
    with pytest.raises(UserError, match="--update fp32 compares .* Add --nproc 2"):
        certified(ALONE, subject, lambda size: WORK, "fp32", lambda text: None)
    with pytest.raises(UserError, match="--update fp64: give fp32, bf16 or no"):
        parity_ranks._masters_of("fp64", World(0, 2, 0))
    found, formats = certified(ALONE, subject, lambda size: replace(WORK, page_size=size), "", lambda text: None)
    assert found.ok and formats == "" and found.ranks == 1


def test_an_update_that_does_not_fit_a_gpu_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    large = subject_of("random:qwen3-8b", "fp8", "cpu")
    large = replace(large, config=large.config.model_copy(update={"device": "cuda"}))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for gib, masters, advice in (
        (139, "fp32", r"--update fp32: .*14\d GiB of 139\. Give --update bf16 \(8\d GiB\)"), (139, "bf16", None),
        (78, "bf16", r"Give --update no, which leaves the update out"), (78, "fp32", "Give --update no"),
    ):
        device = type("Device", (), {"total_memory": gib << 30})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number, found=device: found)
        if advice is None:
            parity_ranks._require_memory(large, masters)
            continue
        with pytest.raises(UserError, match=advice):
            parity_ranks._require_memory(large, masters)


def test_fewer_layers_of_a_shape() -> None:
    found = subject_of("random:qwen3-8b:4", "bf16", "cpu")
    assert (found.spec.num_layers, found.spec.hidden_size, found.random) == (4, 4096, True)
    assert isinstance(found.recipe, Recipe)
    for wrong in ("random:qwen3-8b:x", "random:qwen3-8b:0", "random:none:4"):
        with pytest.raises(UserError):
            subject_of(wrong, "bf16", "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_row_bits_tell_every_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(7, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    padded = torch.zeros(7, 16, dtype=torch.uint8).view(torch.int8)
    padded[:, :12] = values.view(torch.int8)[:, :12]
    found = row_bits(values)
    assert found.shape == (7,) and len(set(found.tolist())) == 7
    if values.element_size() == 1:
        assert torch.equal(row_bits(padded.view(dtype)[:, :12]), found), "rows may lie apart"
    monkeypatch.setattr("jetrl.parity.rows._HASHED", 30)
    assert torch.equal(row_bits(values), found), "in parts"
    for byte in range(12 * values.element_size()):
        other = values.clone()
        other.view(torch.uint8)[3, byte] ^= 1
        assert (row_bits(other) != found).tolist() == [row == 3 for row in range(7)]
    assert len(row_bits(values[:0])) == 0 and row_bits(values[0]).shape == (12,)
