"""The tables of docs/GPUS.md are what is predicted now, and every run that they advise fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import what_fits

from jetrl.config import load_config
from jetrl.config.load import quiet
from jetrl.config.shipped import find_recipe
from jetrl.run.fit.advice import GPUS, on_gpu
from jetrl.run.fit.memory import predict
from jetrl.spec import SHAPES

PAGE = what_fits.PAGE.read_text(encoding="utf-8")
TABLES = re.findall(r"^### (\d) (H[12]00)s?, .*?\n\n((?:\|.*\n)+)", PAGE, re.M)


def test_the_page_is_what_is_predicted_now() -> None:
    assert PAGE == what_fits.placed(PAGE), "run python benchmarks/what_fits.py --write"


def test_the_page_on_lora_is_what_is_predicted_now_and_what_it_advises_fits() -> None:
    page = what_fits.LORA_PAGE.read_text(encoding="utf-8")
    assert page == what_fits.placed(page, what_fits.lora_table()), "run python benchmarks/what_fits.py --write"
    of_name, seen = {name: model for model, name in what_fits.LORA_MODELS.items()}, 0
    for row in what_fits.lora_table().splitlines()[2:]:
        name, gpu, _, _, settings, peak, _ = (cell.strip() for cell in row.strip("|").split("|"))
        overrides = [*what_fits.start(1024, 1), *what_fits.ADAPTERS, *re.findall(r"`([^`]+)`", settings)]
        config = on_gpu(load_config(find_recipe(what_fits.RECIPE), overrides, quiet))
        memory = predict(config, SHAPES[of_name[name]], 1, GPUS[gpu.lower()])
        assert memory.fits(GPUS[gpu.lower()]) == (settings != "does not fit")
        assert not peak or round(memory.peak / what_fits.GIB) == int(peak)
        seen += 1
    assert seen == 10


@pytest.mark.parametrize("ranks, gpu, rows", TABLES, ids=lambda text: text if len(text) < 5 else "")
def test_what_the_page_advises_fits(ranks: str, gpu: str, rows: str) -> None:
    """As a user takes it: the printed overrides on the command line, in one go."""
    room, of_name = GPUS[gpu.lower()], {name: model for model, name in what_fits.MODELS.items()}
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()[2:]]
    assert len(cells) == len(what_fits.MODELS) * len(what_fits.LENGTHS)
    for name, length, settings, peak, _ in cells:
        printed = re.findall(r"`([^`]+)`", settings)
        assert printed or settings in ("nothing", "does not fit")
        overrides = [*what_fits.start(int(length.replace(",", "")), int(ranks)), *printed]
        config = on_gpu(load_config(find_recipe(what_fits.RECIPE), overrides, quiet))
        memory = predict(config, SHAPES[of_name[name]], int(ranks), room)
        assert memory.fits(room) == (settings != "does not fit"), (name, length, settings)
        assert not peak or round(memory.peak / what_fits.GIB) == int(peak)


def test_what_the_page_advises_for_smaller_cards_fits() -> None:
    of_name, seen = {name: model for model, name in what_fits.CARD_MODELS.items()}, 0
    for row in what_fits.cards()[4:-1]:
        assert row in PAGE
        card, name, *pairs = (cell.strip() for cell in row.strip("|").split("|"))
        gib, precision = what_fits.CARDS[card]
        for (settings, peak), more in zip((pairs[:2], pairs[2:]), ((), what_fits.ADAPTERS), strict=True):
            overrides = [*what_fits.start(1024, 1), f"precision={precision}", *more]
            overrides += re.findall(r"`([^`]+)`", settings)
            config = on_gpu(load_config(find_recipe(what_fits.RECIPE), overrides, quiet))
            memory = predict(config, SHAPES[of_name[name]], 1, int(gib * what_fits.GIB))
            assert memory.fits(int(gib * what_fits.GIB)) == (settings != "does not fit")
            assert not peak or round(memory.peak / what_fits.GIB) == int(peak)
            seen += 1
    assert seen == 2 * len(what_fits.CARDS) * len(what_fits.CARD_MODELS) == 36


def test_the_recipe_for_24_gb_fits() -> None:
    """Its comment says what is predicted."""
    path = find_recipe("gsm8k_qwen3_0.6b_24gb")
    room = int(what_fits.CARDS["24 GB, `w8a16`: RTX 3090"][0] * what_fits.GIB)
    memory = predict(on_gpu(load_config(path, [], quiet)), SHAPES["qwen3-0.6b"], 1, room)
    assert memory.fits(room) and memory.sequences >= 100
    assert f"# Memory: {memory.peak / what_fits.GIB:.0f} GiB at the peak, predicted" in path.read_text(encoding="utf-8")


def test_the_command_at_the_top_is_a_row_of_the_first_table() -> None:
    command = " ".join(re.findall(r"^ {4,8}(\S.*?) ?\\?$", PAGE.partition("## How")[0], re.M)).split()
    assert command[:3] == ["jetrl", "train", what_fits.RECIPE] and "model.path=Qwen/Qwen3-8B" in command
    (row,) = (row for row in TABLES[0][2].splitlines() if row.startswith("| Qwen3-8B | 1,024 |"))
    begin = {override.partition("=")[0]: override for override in what_fits.start(1024, 1)}
    printed = {override.partition("=")[0]: override for override in re.findall(r"`([^`]+)`", row)}
    assert set(command[3:]) - {"model.path=Qwen/Qwen3-8B"} == {*(begin | printed).values()}


def test_a_model_for_which_nothing_helps_is_told(tmp_path: Path) -> None:
    assert what_fits.fit("qwen3-32b", "h100", 1, 8192) is None
    assert "does not fit" in what_fits._row("Qwen3-32B", 8192, None)
    assert what_fits.placed("a\n" + what_fits.BEGIN + "old\n" + what_fits.END + "b\n").endswith(what_fits.END + "b\n")
