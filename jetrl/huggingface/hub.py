"""Names on the Hugging Face hub: a name and a revision become a folder of the local cache.

Token, cache, offline mode and time limit are huggingface_hub's own: HF_TOKEN, HF_HUB_CACHE (or HF_HOME),
HF_HUB_OFFLINE, HF_HUB_ETAG_TIMEOUT. The library is imported, and the hub asked, only where a name is used.
"""

from __future__ import annotations

import difflib
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.huggingface.files import (
    ADAPTER_CONFIG,
    ADAPTER_RECORD,
    ADAPTER_WEIGHTS,
    INDEX,
    SINGLE,
    TOKENIZER_FILES,
    read_json,
)
from jetrl.phrases import some
from jetrl.spec import SHAPES
from jetrl.untrusted import inside, json_value

# Everything except the weights: of a model, or of adapters.
SMALL = ("config.json", "generation_config.json", INDEX, ADAPTER_CONFIG, ADAPTER_RECORD, *TOKENIZER_FILES)
WEIGHTS = ("*.safetensors",)  # never pickles
_MOST_HEADER = 100_000_001  # bytes; safetensors itself refuses more
_ELSEWHERE = ("*/*", "consolidated*")  # other formats of the same weights
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PUBLISHERS = {"qwen": "Qwen", "llama-": "meta-llama", "meta-llama-": "meta-llama", "smollm": "HuggingFaceTB"}
_URL = re.compile(r"(?:https?://(?:huggingface\.co|hf\.co)/|hf://)(?:models/|datasets/)?([\w.-]+/[\w.-]+)")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Files of one commit in the cache. `files`: what the repository holds, with bytes; None if it was not asked."""

    folder: Path
    files: dict[str, int] | None

    @property
    def commit(self) -> str:
        return self.folder.name


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a whole commit hash, which never moves."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def on_disk(path: str | Path, revision: str | None = None, kind: str = "model") -> Path | None:
    """The folder at `path`, or None for a name on the hub. UserError if it is neither."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise UserError(f"{path} is a folder on disk, so the revision {revision} has no effect; leave it out.")
        return folder
    if folder.exists():
        cure = "a model's folder or its name on the hub" if kind == "model" else "it as task.train_file (or eval_file)"
        raise UserError(f"{path} is a file. Give {cure}.")
    _check_name(str(path), kind)
    return None


def model_folder(path: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of a model: `path` itself if it is one, else that of the hub's model, downloaded if needed. What the
    hub has by a name may also be adapters (`adapter.is_adapters`).

    Without `weights`, only config and tokenizer are sure to be there. With a commit as revision, and all files in the
    cache, the hub is not asked.
    """
    folder = on_disk(path, revision)
    return folder if folder is not None else model_snapshot(str(path), revision, weights=weights).folder


def model_snapshot(name: str, revision: str | None = None, *, weights: bool = True) -> Snapshot:
    """A model on the hub at a branch, tag or commit (None: main)."""
    patterns = SMALL + WEIGHTS if weights else SMALL
    cached = _whole_in_cache(name, revision, patterns)
    if cached is not None and not _lacks(cached, weights):
        found = Snapshot(cached, None)
    else:
        found = fetch(name, revision, "model", patterns, _ELSEWHERE)
        if lacking := _lacks(found.folder, weights):
            raise UserError(_lacking(name, found, lacking))
    if weights:
        _check_whole(found.folder)
    return found


def tokenizer_folder(path: str | Path, revision: str | None = None) -> Path:
    """The folder of a tokenizer, likewise."""
    folder = on_disk(path, revision) or _whole_in_cache(str(path), revision, SMALL)
    return folder if folder is not None else fetch(str(path), revision, "model", SMALL, _ELSEWHERE).folder


def fetch(
    name: str, revision: str | None, kind: str, patterns: Sequence[str], ignore: Sequence[str] = ()
) -> Snapshot:
    """The files of a repository (kind: model or dataset) that match, from the hub or, if it fails, from the cache.

    The hub is asked once with a time limit before anything is downloaded, since a download retries for minutes. It
    is not asked if all files of a commit are known to be in the cache.
    """
    from huggingface_hub import snapshot_download

    _check_name(name, kind)
    asked = revision or "main"
    if (known := _known(name, revision, kind, patterns, ignore)) is not None:
        return Snapshot(known, None)
    answer = _ask(name, asked, kind)
    if isinstance(answer, dict):
        with _explained(name, kind):
            folder = snapshot_download(
                name, repo_type=kind, revision=asked, ignore_patterns=list(ignore), allow_patterns=list(patterns)
            )
        return Snapshot(Path(folder), answer)
    try:
        cached = _cached(name, asked, kind, patterns, ignore)
    except _Incomplete as error:
        raise UserError(f"{name}: {error}. {_again(name, kind, answer)}") from error
    if cached is None:
        raise UserError(_not_there(name, asked, kind, answer)) from answer
    return Snapshot(cached, None)


def _ask(name: str, revision: str, kind: str) -> dict[str, int] | Exception | None:
    """The files of a repository with their sizes; the error if the hub gives none; None in offline mode."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HTTPError, RevisionNotFoundError  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        info = HfApi().repo_info(
            name, repo_type=kind, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT, files_metadata=True
        )
    except RevisionNotFoundError as error:
        raise UserError(
            f"{name} has no revision {revision!r}. Give a branch, a tag or a whole commit hash; they are listed at "
            f"{_page(name, kind)}."
        ) from error
    except (HTTPError, OSError, ValueError) as error:  # ValueError: an answer that is not JSON, such as a login page
        return error
    return {file.rfilename: file.size or 0 for file in getattr(info, "siblings", None) or []}


def weights_to_come(name: str, commit: str) -> str:
    """What a dry run says about the weights that it has not downloaded. UserError if the hub has none."""
    folder = fetch(name, commit, "model", SMALL, _ELSEWHERE).folder
    lacking = _lacks(folder, True)
    if not lacking:
        return f"The weights of {name} are in {folder}."
    files = _ask(name, commit, "model")
    if not isinstance(files, dict):
        return f"The weights of {name} are not in the cache (no {some(lacking)}), and the hub was not reached."
    wanted = {file: size for file, size in files.items() if re.fullmatch(r"(?!consolidated)[^/]+\.safetensors", file)}
    if not wanted:
        raise UserError(_lacking(name, Snapshot(folder, files), lacking))
    size = f"{len(wanted)} file{'s' * (len(wanted) > 1)}, {sum(wanted.values()) / 1e9:.1f} GB"
    return f"The weights of {name} were not downloaded: {size}. The first run downloads them."


# ---- what is in the cache -------------------------------------------------------------------------------------------


class _Incomplete(Exception):
    """Files of a cached commit are missing, as huggingface_hub knows."""


def _cached(
    name: str, revision: str, kind: str, patterns: Sequence[str], ignore: Sequence[str]
) -> Path | None:
    """The cached folder of a revision, or None if there is none.

    `_Incomplete` if a part of it is missing, as far as huggingface_hub has kept the list of the commit's files.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name, repo_type=kind, revision=revision, ignore_patterns=list(ignore), allow_patterns=list(patterns),
            local_files_only=True,
        )
    except LocalEntryNotFoundError as error:
        if (part := getattr(error, "snapshot_path", None)) is None:
            return None
        missing = re.search(r"\d+ file\(s\) are missing \((.*?)\)", str(error))
        raise _Incomplete(f"the download in {part} lacks {missing[1] if missing else 'files'}") from error
    return Path(folder) if Path(folder).is_dir() else None


def _known(name: str, revision: str | None, kind: str, patterns: Sequence[str], ignore: Sequence[str]) -> Path | None:
    """The cached folder of a commit, if huggingface_hub has kept its list of files and has all that match."""
    from huggingface_hub import constants

    repo = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"
    if not is_commit(revision) or not (repo / "trees" / f"{revision}.json").is_file():
        return None
    try:
        return _cached(name, str(revision), kind, patterns, ignore)
    except _Incomplete:
        return None


def _whole_in_cache(name: str, revision: str | None, patterns: Sequence[str]) -> Path | None:
    """The cached folder of a commit, if it has a tokenizer as far as one can tell offline; else None."""
    if not is_commit(revision):
        return None
    try:
        cached = _cached(name, str(revision), "model", patterns, _ELSEWHERE)
    except _Incomplete:
        return None
    return cached if cached is not None and any((cached / file).is_file() for file in _TOKENIZERS) else None


def _lacks(folder: Path, weights: bool) -> list[str]:
    """Required files of a model, or of adapters, that its folder lacks. A link to a file that is gone counts as
    missing."""
    if not (folder / "config.json").is_file():
        if not (folder / ADAPTER_CONFIG).is_file():
            return ["config.json"]
        return [ADAPTER_WEIGHTS] if weights and not (folder / ADAPTER_WEIGHTS).is_file() else []
    if not weights or (folder / SINGLE).is_file():
        return []
    if not (folder / INDEX).is_file():
        return [SINGLE]
    shards = read_json(folder / INDEX).get("weight_map")
    names = sorted({str(file) for file in shards.values()}) if isinstance(shards, dict) else []
    return [name for name in names if not inside(folder, name, links=True, source=folder / INDEX).is_file()]


def _check_whole(folder: Path) -> None:
    """UserError for a weights file that is shorter than its header says."""
    for path in sorted(path for path in folder.glob("*.safetensors") if path.is_file()):
        size, blob = path.stat().st_size, path.resolve()
        with open(path, "rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            header = file.read(length) if length < min(size, _MOST_HEADER) else b""
        try:
            tensors = json_value(header)
            ends = [tensor["data_offsets"][1] for key, tensor in tensors.items() if key != "__metadata__"]
            whole = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            whole = None
        if whole != size:
            expected = "its header cannot be read" if whole is None else f"its header says {whole}"
            raise UserError(
                f"{path} is incomplete: it has {size} bytes, and {expected}. Delete {blob} and {path}, and run again "
                "with network access: only this file is downloaded."
            )


# ---- messages -------------------------------------------------------------------------------------------------------


def _check_name(name: str, kind: str) -> None:
    """UserError, with a suggestion, for what cannot be a name on the hub."""
    if _NAME.fullmatch(name) and ".." not in name and "--" not in name:
        return
    if found := _URL.match(name):
        raise UserError(f"{name}: write the name alone: {found[1]}")
    plain, at, revision = name.rpartition("@")
    if at and revision and _NAME.fullmatch(plain):
        how = "model.revision (--revision, or revision= in Python)" if kind == "model" else "task.dataset_revision"
        raise UserError(f"{name}: write the name alone, {plain}, and give {revision} as {how}.")
    hint = ""
    if kind == "model" and re.fullmatch(r"[\w.-]+", name) and not name.startswith("."):
        low = name.lower()
        hint = "".join(f" Did you mean {org}/{name}?" for prefix, org in _PUBLISHERS.items() if low.startswith(prefix))
        hint += f" A model of that shape with random weights: random:{name}." if low in SHAPES else ""
    if kind == "model":
        hint += " A folder holds config.json, the weights as safetensors and the tokenizer's files."
    raise UserError(
        f"{_no_folder(name)}, and it is not a name on the Hugging Face hub: "
        f"those have one slash, as in {'Qwen/Qwen3-0.6B' if kind == 'model' else 'openai/gsm8k'}.{hint}"
    )


def _no_folder(name: str) -> str:
    path = Path(name).expanduser()
    where = "" if path.is_absolute() else f" (searched from {Path.cwd()})"
    listed = path.parent != Path() and path.parent.is_dir()
    beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if listed else []
    close = difflib.get_close_matches(path.name, beside, 1)
    return f"{name}: there is no such folder{where}" + (f"; did you mean {path.parent / close[0]}?" if close else "")


def _runs_beside(name: str) -> list[str]:
    """The runs next to the folder that `name` would be: then it is a run's name with a typo, and none on the hub."""
    parent = Path(name).expanduser().parent
    return sorted(path.parent.name for path in parent.glob("*/config.toml")) if parent != Path() else []


def _page(name: str, kind: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"


def _not_there(name: str, revision: str, kind: str, problem: Exception | None) -> str:
    """Why neither the hub nor the cache has it, and how to get it."""
    from huggingface_hub import constants

    cache, what = constants.HF_HUB_CACHE, f"{name} at revision {revision}"
    option = "" if kind == "model" else " --repo-type dataset"
    option += "" if revision == "main" else f" --revision {revision}"
    bring = (
        f"On a machine with network access, `hf download {name}{option}` fills its cache; copy the folder "
        f"{kind}s--{name.replace('/', '--')} into {cache}. Or name a folder."
    )
    here = _no_folder(name)
    if name.lower().startswith("models/smollm2"):
        return f"{here}. `jetrl fetch smollm2` makes it."
    if runs := _runs_beside(name):
        return here if here.endswith("?") else f"{here}. Runs in {Path(name).parent}: {some(runs)}."
    if problem is None:
        return f"{here}, the cache {cache} does not hold {what}, and HF_HUB_OFFLINE is set. Unset it. {bring}"
    why, reached = _why(name, kind, problem)
    return f"{here}, and {why}" if reached else f"{here}, the cache {cache} does not hold {what}, and {why} {bring}"


def _why(name: str, kind: str, problem: Exception) -> tuple[str, bool]:
    """What the hub answered, or why it did not answer, with the cure; and whether it was reached."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    login = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(problem, GatedRepoError):
        token = "The token in use has no access yet." if get_token() else f"Then {login}."
        return f"it is gated: ask for access at {_page(name, kind)}. {token}", True
    if isinstance(problem, RepositoryNotFoundError):
        private = "the token in use may not read it" if get_token() else login
        what = "model" if kind == "model" else "data set"
        return f"the hub has no {what} of that name. Check the spelling; if it is private, {private}.", True
    if isinstance(problem, HfHubHTTPError):
        status = problem.response.status_code
        if status == 401:
            return "the hub does not accept the token in use. Set HF_TOKEN to a valid one, or unset it.", True
        return f"the hub answered with status {status}. Try again later.", status < 500
    return f"{constants.ENDPOINT} cannot be reached ({_brief(problem)}).", False


def _brief(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _again(name: str, kind: str, problem: Exception | None) -> str:
    """How to complete a download if the hub cannot be asked."""
    option = "" if kind == "model" else " --repo-type dataset"
    why = f"Then {_brief(problem)}." if problem is not None else "HF_HUB_OFFLINE is set."
    return f"{why} Run again with network access, or `hf download {name}{option}`: files that are whole are kept."


def _lacking(name: str, found: Snapshot, lacking: list[str]) -> str:
    """The message for a model without files that it needs: never uploaded, or not yet downloaded."""
    if found.files is None:
        where = f"{name}: the download in {found.folder} is not complete"
        return f"{where}: {some(lacking)} is missing. Run again with network access, or `hf download {name}`."
    if lacking == ["config.json"]:
        return f"{name} has no config.json on the hub, so it is not a transformers model. It has {_list(found.files)}."
    if any(file in found.files for file in lacking):
        return f"{name}: {some(lacking)} did not arrive in {found.folder}. Run again."
    return (
        f"{name} has no {some(lacking)} on the hub; jetrl reads only safetensors, since a pickle can run code. It has "
        f"{_list(found.files)}. Use a version with safetensors, or save the model again with safe_serialization=True."
    )


def _list(files: dict[str, int]) -> str:
    shown = sorted((file for file in files if not file.startswith(".")), key=lambda file: -files[file])
    return some(shown) if shown else "no files"


@contextmanager
def _explained(name: str, kind: str) -> Iterator[None]:
    """Errors of a download as one message. A disk that is full is reported as such by the command line."""
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError  # type: ignore[attr-defined]

    try:
        yield
    except (HTTPError, LocalEntryNotFoundError, RuntimeError) as error:  # RuntimeError: from the library hf_xet
        cause: Any = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
        why, answered = _why(name, kind, cause) if isinstance(cause, HTTPError) else (f"{_brief(cause)}.", False)
        if answered:
            raise UserError(f"{name}: {why}") from error
        raise UserError(f"{name}: the download was interrupted: {why} Run again: complete files are kept.") from error
