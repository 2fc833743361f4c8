"""A name of the hub in a config becomes one commit, and a resumed run keeps it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import ONE, TWO, Hub, Repo, serving, use

from jetrl.config import Config, parse_config, resolve, to_toml
from jetrl.errors import UserError
from jetrl.run.pin import Pin, pinned, pins_of, record

MODEL = {"config.json": b"{}", "tokenizer.json": b"{}"}
DATA = {"train.jsonl": b"{}"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    served = Hub()
    refs = {"main": ONE, "v2": TWO}
    served.repos["model", "acme/tiny"] = Repo({ONE: MODEL, TWO: MODEL}, dict(refs))
    served.repos["model", "acme/words"] = Repo({TWO: {"tokenizer.json": b"{}"}}, {"main": TWO})
    served.repos["dataset", "acme/sums"] = Repo({ONE: DATA, TWO: DATA}, dict(refs))
    with serving(served) as address:
        use(monkeypatch, tmp_path / "cache", address)
        yield served


def config(model: dict[str, Any], **task: Any) -> Config:
    return parse_config({"name": "x", "model": model, "task": {"name": "addition", **task}})


def test_every_name_is_bound_to_a_commit(server: Hub, tmp_path: Path) -> None:
    asked = config(
        {"path": "acme/tiny", "tokenizer": "acme/words"}, name="file", dataset="acme/sums", eval_dataset="acme/sums",
        eval_dataset_revision="v2", eval_split="test",
    )
    bound, pins = pinned(asked)
    assert (bound.model.revision, bound.model.tokenizer_revision) == (ONE, TWO)
    assert (bound.task.dataset_revision, bound.task.eval_dataset_revision) == (ONE, TWO)
    assert pins == [
        Pin("model.path", "acme/tiny", None, ONE), Pin("model.tokenizer", "acme/words", None, TWO),
        Pin("task.dataset", "acme/sums", None, ONE), Pin("task.eval_dataset", "acme/sums", "v2", TWO),
    ]
    assert f'revision = "{ONE}"' in to_toml(bound)
    server.asked.clear()
    assert pinned(bound)[0] == bound and not server.asked, "a commit needs no hub"
    file = tmp_path / "env.json"
    file.write_text(json.dumps({"date": "", **record(pins)}))
    assert pins_of(file) == pins


def test_a_tokenizer_from_the_models_own_repository_has_the_models_revision(server: Hub) -> None:
    """With model.revision alone, the template would come from main and the weights from the pin."""
    def bound(**more: str) -> Config:
        asked = config({"path": "acme/tiny", "revision": "v2", "tokenizer": "acme/tiny", **more})
        return pinned(resolve(asked, cuda_available=False))[0]

    assert (bound().model.revision, bound().model.tokenizer_revision) == (TWO, TWO)
    assert bound(tokenizer_revision="main").model.tokenizer_revision == ONE, "what is given stays"
    assert bound(tokenizer="acme/words").model.tokenizer_revision == TWO, "another repository's main"


def test_folders_and_builtin_tokenizers_stay(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    plain = config({"path": "acme/tiny", "tokenizer": "builtin:arithmetic"})
    assert pinned(plain) == (plain, []) and record([]) == {} and not server.asked
    with pytest.raises(UserError, match="acme/tiny is a folder on disk, so the revision v2 has no effect"):
        pinned(config({"path": "acme/tiny", "revision": "v2"}))


def test_a_resumed_run_keeps_its_commit_though_the_branch_has_moved(server: Hub) -> None:
    asked = config({"path": "acme/tiny"})
    bound, pins = pinned(asked)
    server.repos["model", "acme/tiny"].refs["main"] = TWO
    assert pinned(asked)[0].model.revision == TWO
    assert pinned(asked, pins) == (bound, pins), "the recipe that it began with"
    assert pinned(bound, pins) == (bound, pins), "its own config.toml"
    other = config({"path": "acme/tiny", "revision": "v2"})
    assert pinned(other, pins)[1] == [Pin("model.path", "acme/tiny", "v2", TWO)], "something else was asked for"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hub": 1}', '{"hub": [{"key": "model.path"}, 2]}'])
def test_a_record_that_is_missing_or_damaged_says_nothing(tmp_path: Path, text: str) -> None:
    assert pins_of(tmp_path / "env.json") == []
    (tmp_path / "env.json").write_text(text)
    assert pins_of(tmp_path / "env.json") == []
