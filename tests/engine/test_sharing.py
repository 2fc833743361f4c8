"""Groups of sequences with the same first pages: nothing is read that is not there, and what can be saved is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ARCH, long_prompts, numbers, saved, tiny_run
from torch import equal

from jetrl.engine.sharing import Sharing, chunk_size, find_sharing, heads_of_a_key, served
from jetrl.spec import SHAPES

PAGE = 256


def table_of(rows: list[list[int]], width: int) -> np.ndarray:
    return np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int32)


def check(found: Sharing, table: np.ndarray, positions: np.ndarray, size: int) -> None:
    """Every sequence is in at most one chunk, and its shared tiles are full of the same keys, before its own page."""
    seen: set[int] = set()
    saved = 0
    for members, tiles in zip(found.members.tolist(), found.tiles.tolist(), strict=True):
        real = [m for m in members if m >= 0]
        assert len(members) == size and members[: len(real)] == real and len(real) >= 2 and not seen & set(real)
        assert tiles > 0 and tiles * 128 % PAGE == 0
        seen |= set(real)
        pages = tiles * 128 // PAGE
        for m in real:
            assert found.first[m] == tiles and positions[m] // PAGE >= pages
            assert (table[m, :pages] == table[real[0], :pages]).all()
        saved += (len(real) - 1) * tiles * 128
    assert found.saved == saved
    assert (found.first[[b for b in range(len(table)) if b not in seen]] == 0).all()


def test_samples_of_two_prompts() -> None:
    rows = [[1, 2, 3, 7], [4, 5, 8], [1, 2, 3, 9], [4, 5, 10, 11], [1, 2, 3, 12], [13, 14]]
    table, positions = table_of(rows, 6), np.array([3 * PAGE, 2 * PAGE + 9, 4 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1, 300])
    found = find_sharing(table, positions, PAGE, 4)
    check(found, table, positions, 4)
    assert found.first.tolist() == [6, 4, 6, 4, 6, 0]
    assert sorted(found.members.tolist()) == [[0, 2, 4, -1], [1, 3, -1, -1]]
    assert found.saved == 2 * 3 * PAGE + 2 * PAGE


def test_the_page_of_a_new_token_is_not_shared() -> None:
    """Copies of a partial page are taken when they are written to; until then the table shows one page."""
    table = table_of([[1, 2], [1, 2]], 2)
    found = find_sharing(table, np.array([PAGE + 5, PAGE + 5]), PAGE, 8)
    assert found.first.tolist() == [2, 2]
    found = find_sharing(table, np.array([PAGE - 1, PAGE + 5]), PAGE, 8)
    assert not found.members.size and not found.tiles.size and not found.saved


def test_what_shares_more_stays_together() -> None:
    """A page that all have, and prompts of eight pages that four have each."""
    rows = [[1, *range(10 * g, 10 * g + 7), 100 + 10 * g + i] for i in range(4) for g in (1, 2, 3)]
    table = table_of(rows, 12)
    found = find_sharing(table, np.full(12, 8 * PAGE + 3), PAGE, 16)
    check(found, table, np.full(12, 8 * PAGE + 3), 16)
    assert sorted(found.tiles.tolist()) == [16, 16, 16] and found.saved == 3 * 3 * 8 * PAGE


def test_a_large_group_falls_into_chunks_and_a_small_gain_does_not_pay() -> None:
    table = table_of([[1, 2 + i] for i in range(9)], 3)
    found = find_sharing(table, np.full(9, PAGE + 1), PAGE, 4)
    check(found, table, np.full(9, PAGE + 1), 4)
    assert len(found.members) == 2 and found.first.tolist().count(0) == 1 and not found.pays(2048)
    deep = table_of([[*range(1, 17), 20 + i] for i in range(256)], 20)
    assert find_sharing(deep, np.full(256, 16 * PAGE), PAGE, 16).pays(2048)


def test_padding_names_no_sequence() -> None:
    found = find_sharing(table_of([[1, 2], [3, 4], [1, 5]], 2), np.full(3, PAGE), PAGE, 4)
    first, members, tiles = found.padded(8, 4)
    assert first.tolist() == [2, 0, 2, 0, 0, 0, 0, 0] and tiles.tolist() == [2, 0, 0, 0]
    assert members.tolist() == [[0, 2, -1, -1]] + [[-1] * 4] * 3
    assert found.room == 1 and found.padded(3, 1)[2].tolist() == [2]


def measured(batch: int, prompt: int) -> Sharing:
    """Groups of 16 samples as benchmarks/bench_tail.py has them, over pages of 128."""
    pages = prompt // 128
    rows = [[*range(b // 16 * pages, (b // 16 + 1) * pages), 10**6 + b] for b in range(batch)]
    return find_sharing(table_of(rows, pages + 1), np.full(batch, prompt + 60), 128, 16)


@pytest.mark.parametrize("row", [
    (True, 64, 512, 0.936), (True, 64, 4096, 0.995), (True, 256, 512, 1.35), (True, 256, 4096, 2.61),
    (False, 64, 512, 0.95), (False, 64, 4096, 1.65), (False, 256, 512, 1.04), (False, 256, 4096, 2.67),
])  # fmt: skip
def test_auto_merges_what_was_measured_to_win(row: tuple[bool, int, int, float]) -> None:
    """The rows of results/tail.json, with their gain."""
    fp8, batch, prompt, gain = row
    found = measured(batch, prompt)
    key_bytes = 2 * 8 * 128 * (1 if fp8 else 2)
    assert found.saved == (batch - batch // 16) * prompt
    assert found.merges("auto", batch, key_bytes) is (gain > 1)
    assert found.merges("on", batch, key_bytes) and not found.merges("off", batch, key_bytes)


def test_auto_leaves_few_sequences_to_the_kernels_that_read_keys_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sharing, "pays", lambda *args: True)
    found = measured(16, 4096)
    assert not found.merges("auto", 16, 4096) and found.merges("auto", 17, 4096)
    assert found.merges("on", 16, 4096)


def test_latents_are_read_by_all_heads_at_once() -> None:
    """Programs of 64 rows: four sequences of Moonlight's 16 heads; none where two sequences' heads do not fit."""
    spec = SHAPES["moonlight-16b-a3b"]
    assert served(spec, 128) and heads_of_a_key(spec) == 16 and chunk_size(16) == 4
    assert heads_of_a_key(SHAPES["qwen3-8b"]) == 4
    assert not served(spec, 64) and not served(replace(spec, num_heads=33), 128)
    assert served(replace(spec, num_heads=32), 128)


@pytest.mark.parametrize(("batch", "prompt", "pays"), [
    (256, 4096, True), (256, 2048, True), (256, 1024, False), (256, 512, False), (128, 4096, True), (64, 512, False),
    (1024, 1024, True),
])  # fmt: skip
def test_auto_merges_latents_where_products_cost_less_than_bytes(batch: int, prompt: int, pays: bool) -> None:
    """All but the last two are measured cases (`benchmarks/results/latent.json`); those that pay gained 1.4 or more."""
    pages = prompt // 128
    rows = [[*range(b // 16 * pages, (b // 16 + 1) * pages), 10**6 + b] for b in range(batch)]
    found = find_sharing(table_of(rows, pages + 1), np.full(batch, prompt + 60), 128, chunk_size(16))
    assert found.saved == (batch - batch // 4) * prompt
    assert found.merges("auto", batch, 1152, latent=True) is pays
    assert found.merges("on", batch, 1152, latent=True) and not found.merges("off", batch, 1152, latent=True)


def test_nothing_shared_is_never_merged() -> None:
    found = find_sharing(table_of([[i] for i in range(64)], 2), np.full(64, 500), 256, 16)
    assert found.room == 0
    assert not found.merges("on", 64, 4096) and not found.merges("auto", 64, 4096)
    assert not found.merges("on", 64, 1152, latent=True) and not found.merges("auto", 64, 1152, latent=True)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_groups_that_shrink_and_grow(data: st.DataObject) -> None:
    """Samples of some prompts grow token by token and end at any time; what is shared then is still right, what was
    found before stays right for those that go on, and no page of a group is read for more chunks than it needs."""
    size, prompts = data.draw(st.integers(2, 5)), data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    fresh = iter(range(1000, 9999))
    alive: list[tuple[int, list[int], int]] = []
    for number, pages in enumerate(prompts):
        first = [100 * number + i for i in range(pages)]
        inside = data.draw(st.integers(0, PAGE - 1))
        alive += [(number, [*first, next(fresh)], pages * PAGE + inside) for _ in range(data.draw(st.integers(1, 7)))]
    width = 8
    while alive:
        table, at = table_of([row for _, row, _ in alive], width), np.array([place for *_, place in alive])
        found = find_sharing(table, at, PAGE, size)
        check(found, table, at, size)
        counts = [sum(n == number for n, *_ in alive) for number in range(len(prompts))]
        assert found.saved == sum((n - -(-n // size)) * p * PAGE for n, p in zip(counts, prompts, strict=True))
        assert len(found.members) <= found.room <= 2 * max(1, len(found.members))
        for first, place in zip(found.first.tolist(), at.tolist(), strict=True):
            assert first * 128 <= place // PAGE * PAGE
        keep = data.draw(st.lists(st.booleans(), min_size=len(alive), max_size=len(alive)))
        grown = data.draw(st.integers(1, PAGE))
        left = [a for a, stays in zip(alive, keep, strict=True) if stays][: len(alive) - 1]
        alive = []
        for number, row, place in left:
            if (place + grown) // PAGE + 1 > width:
                continue
            row = row + [next(fresh) for _ in range((place + grown) // PAGE + 1 - len(row))]
            alive.append((number, row, place + grown))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_tables(data: st.DataObject) -> None:
    """Whatever pages are shared: nothing wrong is read, and equal prompts are found."""
    count, size = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    width = 6
    rows, positions = [], []
    fresh = iter(range(1000, 9999))
    prompts = [[100 * p + i for i in range(data.draw(st.integers(0, 4)))] for p in range(1, 4)]
    for _ in range(count):
        row = list(data.draw(st.sampled_from(prompts)))
        positions.append(len(row) * PAGE + data.draw(st.integers(0, PAGE - 1)))
        rows.append([*row, next(fresh)])
    table, at = table_of(rows, width), np.array(positions)
    found = find_sharing(table, at, PAGE, size)
    check(found, table, at, size)
    if size > 1:
        best = 0
        for prompt in prompts:
            n = sum(row[:-1] == prompt for row in rows)
            best += (n - -(-n // size)) * len(prompt) * PAGE
        assert found.saved >= best


@pytest.mark.parametrize("count", [0, 1])
def test_nobody_to_share_with(count: int) -> None:
    found = find_sharing(np.ones((count, 3), dtype=np.int32), np.full(count, 600), PAGE, 4)
    assert found.first.tolist() == [0] * count and not found.saved and not found.pays(2048)


def test_a_run_on_a_cpu_with_the_switch_on_is_the_run_with_it_off(tmp_path: Path) -> None:
    """Prompts of more than a page of 128, so that pages are shared."""
    arch = ARCH | {"max_position_embeddings": 512}
    long = long_prompts(tmp_path) | {"model.arch": arch, "rollout.page_size": 128, "train.steps": 2}
    runs = {mode: tiny_run(tmp_path / str(mode), long | {"rollout.merge_prefix": mode}) for mode in ("on", "off", True)}
    tensors = saved(runs["off"], 2)
    for mode in ("on", True):
        assert numbers(runs[mode]) == numbers(runs["off"])
        assert (runs[mode] / "samples.jsonl").read_bytes() == (runs["off"] / "samples.jsonl").read_bytes()
        assert all(equal(x, tensors[name]) for name, x in saved(runs[mode], 2).items())
    assert 'merge_prefix = "on"' in (runs[True] / "config.toml").read_text()
