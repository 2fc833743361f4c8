"""Names of the hub against a hub on this machine, and against caches that are written by hand."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import ONE, TWO, Hub, Repo, files_of, serving, use, write_cache
from safetensors.torch import save

from jetrl.errors import UserError
from jetrl.huggingface import hub

WEIGHTS = save({"a": torch.arange(4.0)})
SMALL = {"config.json": b"{}", "tokenizer.json": b"{}", "chat_template.jinja": b"x"}
FILES = {**SMALL, "model.safetensors": WEIGHTS}
OTHERS = {"pytorch_model.bin": b"p", "original/a.safetensors": b"o", "consolidated.safetensors": b"c", "a.py": b"y"}
INDEX = json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}).encode()
SHARDS = {**SMALL, "model.safetensors.index.json": INDEX, "m-1.safetensors": WEIGHTS, "m-2.safetensors": WEIGHTS}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that answers, with an empty cache."""
    served = Hub()
    served.repos["model", "acme/tiny"] = Repo({ONE: FILES | OTHERS})
    with serving(served) as address:
        use(monkeypatch, cache, address)
        yield served


def names_in(folder: Path) -> set[str]:
    return set(files_of(folder))


# ---- from the hub ---------------------------------------------------------------------------------------------------


def test_what_a_run_needs_is_downloaded_and_nothing_else(server: Hub) -> None:
    small = hub.model_folder("acme/tiny", weights=False)
    assert files_of(small) == SMALL and small.name == ONE
    assert "were not downloaded: 1 file, 0.0 GB" in hub.weights_to_come("acme/tiny", ONE)
    folder = hub.model_folder("acme/tiny")
    assert folder == small and files_of(folder) == FILES
    assert hub.weights_to_come("acme/tiny", ONE) == f"The weights of acme/tiny are in {folder}."
    server.asked.clear()
    assert hub.model_folder("acme/tiny", ONE) == hub.tokenizer_folder("acme/tiny", ONE) == folder
    assert not server.asked, "a commit that is in the cache was asked for"


def test_adapters_are_downloaded_like_a_model(server: Hub) -> None:
    """With what jetrl knows of their training, and without what they may hold besides."""
    small = {"adapter_config.json": b"{}", "jetrl_adapter.json": b"{}", "tokenizer.json": b"{}"}
    files = small | {"adapter_model.safetensors": WEIGHTS}
    others = {"training_args.bin": b"p", "checkpoint-9/adapter_model.safetensors": b"o", "optimizer.pt": b"x"}
    server.repos["model", "acme/lora"] = Repo({ONE: files | others})
    folder = hub.model_folder("acme/lora", weights=False)
    assert files_of(folder) == small and "were not downloaded: 1 file" in hub.weights_to_come("acme/lora", ONE)
    assert hub.model_folder("acme/lora") == folder and files_of(folder) == files
    (folder / "adapter_model.safetensors").unlink()
    server.status = 503
    with pytest.raises(UserError, match=r"acme/lora: the download in .* lacks adapter_model.safetensors"):
        hub.model_folder("acme/lora", ONE)


def test_branches_move_and_commits_do_not(server: Hub) -> None:
    repo = server.repos["model", "acme/tiny"]
    first = hub.model_folder("acme/tiny")
    repo.commits[TWO] = FILES | {"config.json": b'{"new": 1}'}
    repo.refs |= {"main": TWO, "v1.0": ONE, "a/b": TWO}
    second = hub.model_folder("acme/tiny")
    assert second.name == TWO and (second / "config.json").read_bytes() == b'{"new": 1}'
    assert hub.model_folder("acme/tiny", "v1.0") == hub.model_folder("acme/tiny", ONE) == first
    assert hub.model_folder("acme/tiny", "a/b") == second


def test_a_download_that_broke_off_is_completed(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repos["model", "acme/tiny"] = Repo({ONE: SHARDS})
    folder = hub.model_folder("acme/tiny")
    (folder / "m-2.safetensors").unlink()
    (folder / "m-1.safetensors").resolve().unlink()  # the link stays, and leads nowhere
    with monkeypatch.context() as away:
        use(away, folder.parents[2], offline=True)
        with pytest.raises(UserError, match=r"lacks m-1.safetensors, m-2.safetensors. HF_HUB_OFFLINE is set. Run"):
            hub.model_folder("acme/tiny", ONE)
    server.asked.clear()
    assert files_of(hub.model_folder("acme/tiny", ONE)) == SHARDS
    assert not any("config.json" in path for path in server.asked), "a file that was whole came again"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({**SMALL, "pytorch_model.bin": b"1"}, r"acme/x has no model.safetensors on the hub.*It has .*pytorch_model"),
        ({"adapter_config.json": b"{}", "adapter_model.bin": b"1"},
         r"acme/x has no adapter_model.safetensors on the hub; .*It has adapter_.*Use a version with safetensors"),
        ({"x.gguf": b"1"}, "acme/x has no config.json on the hub, so it is not a transformers model. It has x.gguf"),
    ],
)
def test_repositories_that_are_no_model_of_ours(server: Hub, files: dict[str, bytes], message: str) -> None:
    server.repos["model", "acme/x"] = Repo({ONE: files})
    with pytest.raises(UserError, match=message):
        hub.model_folder("acme/x")
    if not {"config.json", "adapter_config.json"}.isdisjoint(files):
        hub.model_folder("acme/x", weights=False)
        with pytest.raises(UserError, match=message):
            hub.weights_to_come("acme/x", ONE)


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_model(server: Hub, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repos["model", "acme/gated"] = Repo({ONE: FILES}, refuses=(status, "GatedRepo"))
    with pytest.raises(UserError, match=r"acme/gated: it is gated: ask for access at http\S+/acme/gated. Then log in"):
        hub.model_folder("acme/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    with pytest.raises(UserError, match="it is gated.*The token in use has no access yet"):
        hub.model_folder("acme/gated")


def test_what_the_hub_does_not_have(server: Hub) -> None:
    with pytest.raises(UserError, match="acme/nothing: there is no such folder.*the hub has no model of that name"):
        hub.model_folder("acme/nothing")
    for revision in ("v9", TWO):
        with pytest.raises(UserError, match=f"acme/tiny has no revision '{revision}'. Give a branch, a tag or"):
            hub.model_folder("acme/tiny", revision)


@pytest.mark.parametrize(
    ("status", "message"),
    [(503, "the hub answered with status 503. Try again later"), (401, "not accept the token in use. Set HF_TOKEN")],
)
def test_a_hub_that_answers_with_an_error_is_asked_once(server: Hub, status: int, message: str) -> None:
    server.status = status
    with pytest.raises(UserError, match=message):
        hub.model_folder("acme/tiny")
    assert len([path for path in server.asked if "acme" in path]) == 1
    server.status = 0
    folder = hub.model_folder("acme/tiny")
    server.status = status
    assert hub.model_folder("acme/tiny") == folder, "what is in the cache does not need the hub"


# ---- without the hub ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offline", [True, False])
def test_a_cache_is_enough(cache: Path, offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, cache, offline=offline)
    folder = write_cache(cache, "acme/tiny", FILES)
    assert hub.model_folder("acme/tiny") == hub.model_folder("acme/tiny", ONE) == folder
    assert hub.tokenizer_folder("acme/tiny") == folder


def test_a_commit_in_a_cache_that_was_copied_is_not_asked_for(server: Hub, cache: Path) -> None:
    folder = write_cache(cache, "acme/copied", SHARDS)
    assert hub.model_folder("acme/copied", ONE) == hub.tokenizer_folder("acme/copied", ONE) == folder
    assert not server.asked
    (folder / "m-2.safetensors").unlink()
    with pytest.raises(UserError, match="is not complete: m-2.safetensors is missing"):
        hub.model_folder("acme/copied", ONE)
    assert server.asked, "what is missing is asked for"


@pytest.mark.parametrize("offline", [True, False])
def test_neither_hub_nor_cache(cache: Path, offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, cache, offline=offline)
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        hub.model_folder("acme/tiny", "v1")
    assert time.monotonic() - start < 2
    text = str(caught.value)
    for part in ("acme/tiny: there is no such folder (searched from", f"the cache {cache} does not hold acme/tiny at",
                 "`hf download acme/tiny --revision v1`", f"copy the folder models--acme--tiny into {cache}",
                 "HF_HUB_OFFLINE is set" if offline else "http://127.0.0.1:9 cannot be reached (ConnectError"):
        assert part in text, text


def test_the_name_of_a_run_with_a_typo(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, cache, offline=True)
    monkeypatch.chdir(tmp_path)
    for name in ("sums", "words"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    with pytest.raises(UserError, match=r"\(searched from .*\)\. Runs in runs: sums, words\.$"):
        hub.model_folder("runs/nope")
    with pytest.raises(UserError, match=r"did you mean runs/sums\?$"):
        hub.model_folder("runs/sum")


def test_a_server_that_never_answers_is_given_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use(monkeypatch, cache, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 0.3)
        start = time.monotonic()
        with pytest.raises(UserError, match="cannot be reached .*Timeout"):
            hub.model_folder("acme/tiny")
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("lost", ["m-2.safetensors", "config.json", "model.safetensors.index.json"])
def test_half_a_download(cache: Path, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, cache, offline=True)
    write_cache(cache, "acme/tiny", {name: data for name, data in SHARDS.items() if name != lost})
    named = "model.safetensors" if "index" in lost else lost
    with pytest.raises(UserError, match=rf"is not complete: {named} is missing. Run again with network access, or `hf"):
        hub.model_folder("acme/tiny")


@pytest.mark.parametrize("damaged", [WEIGHTS[:-1], WEIGHTS[:20], b"", WEIGHTS + b"x"])
def test_a_file_of_weights_that_is_not_whole(cache: Path, damaged: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, cache, offline=True)
    folder = write_cache(cache, "acme/tiny", FILES | {"model.safetensors": damaged})
    blob = (folder / "model.safetensors").resolve()
    with pytest.raises(UserError, match=rf"model.safetensors is incomplete: it has \d+ bytes.*Delete {blob} and"):
        hub.model_folder("acme/tiny", ONE)


def test_the_length_of_a_whole_file_is_that_of_its_header() -> None:
    (length,) = struct.unpack("<Q", WEIGHTS[:8])
    assert json.loads(WEIGHTS[8 : 8 + length])["a"]["data_offsets"] == [0, 16] and len(WEIGHTS) == 8 + length + 16


# ---- folders and what looks like a name -----------------------------------------------------------------------------


def test_a_folder_wins_and_needs_no_library(tmp_path: Path) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    code = "import sys, jetrl; from jetrl.huggingface.hub import model_folder as of"
    code += "; print(of('acme/tiny'), 'huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["acme/tiny", "False"], done.stderr


def test_a_revision_of_a_folder_has_no_effect(cache: Path) -> None:
    cache.mkdir()
    with pytest.raises(UserError, match="is a folder on disk, so the revision main has no effect"):
        hub.model_folder(cache, "main")
    (cache / "file").touch()
    with pytest.raises(UserError, match="file is a file. Give a model's folder or its name on the hub"):
        hub.model_folder(cache / "file")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen3-0.6B", r"have one slash, as in Qwen/Qwen3-0.6B. Did you mean Qwen/Qwen3-0.6B\? .* random:Qwen3-0.6B"),
        ("Llama-3.2-1B", r"Did you mean meta-llama/Llama-3.2-1B\?"),
        ("./acme/tiny", "there is no such folder .searched from"),
        (str(Path(__file__).parents[1] / "mdel"), "there is no such folder; did you mean .*tests/model"),
        ("/nowhere/at/all", "/nowhere/at/all: there is no such folder, and it is not a name"),
        ("a/b/c", "those have one slash"),
        ("acme/..", "those have one slash"),
        ("acme/ti ny", "those have one slash"),
        ("acme/tiny@v1", r"write the name alone, acme/tiny, and give v1 as model.revision \(--revision, or revision="),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "write the name alone: Qwen/Qwen3-0.6B"),
        ("hf://datasets/acme/sums", "write the name alone: acme/sums"),
    ],
)
def test_what_is_no_name(cache: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        hub.model_folder(name)


def test_the_folder_that_is_made_by_a_command(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, cache)
    with pytest.raises(UserError, match="there is no such folder.*`jetrl fetch smollm2` makes it"):
        hub.model_folder("models/smollm2-135m-instruct")
