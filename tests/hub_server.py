"""A hub on this machine: the few answers of the Hugging Face hub that its own library asks for, and caches by hand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ONE, TWO = "1" * 40, "2" * 40  # commits


@dataclass
class Repo:
    """Files by commit, and what branches and tags stand for. `refuses`: status and X-Error-Code of its files."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str] = field(default_factory=lambda: {"main": ONE})
    refuses: tuple[int, str] | None = None


class Hub:
    """Repositories by (kind, name), the requests that were made, and answers that fail: every one, or none."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.asked: list[str] = []
        self.status = 0

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(path)
        if self.status:
            return self.status, {}, b"down"
        kind, rest = ("dataset", path[10:]) if path.startswith("/datasets/") else ("model", path[1:])
        api = rest.startswith("api/")
        if api:
            kind, _, rest = rest[4:].partition("s/")
        if rest.count("/") < 3:
            return 404, {}, b""
        name, (verb, revision, *file) = "/".join(rest.split("/")[:2]), rest.split("/", 4)[2:]
        repo = self.repos.get((kind, name))
        if repo is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        commit = repo.refs.get(unquote(revision), revision)
        if commit not in repo.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = repo.commits[commit]
        if api:
            rows: Any = [{"type": "file", "path": f, "size": len(b), "oid": sha(b)} for f, b in files.items()]
            if verb == "revision":
                rows = {"id": name, "sha": commit, "siblings": [{"rfilename": r["path"], **r} for r in rows]}
            return 200, {"Content-Type": "application/json"}, json.dumps(rows).encode()
        if repo.refuses is not None:
            return repo.refuses[0], {"X-Error-Code": repo.refuses[1]}, b""
        head = {"X-Repo-Commit": commit}
        if file[0] not in files:
            return 404, head | {"X-Error-Code": "EntryNotFound"}, b""
        return 200, head | {"ETag": f'"{sha(files[file[0]])}"'}, files[file[0]]


def sha(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """The address under which `hub` answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(urlsplit(self.path).path)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


NOBODY = "http://127.0.0.1:9"  # an address where nothing answers


def use(monkeypatch: pytest.MonkeyPatch, cache: Path, endpoint: str = NOBODY, offline: bool = False) -> None:
    """Point huggingface_hub to a cache and to an address, as its variables do when it is imported."""
    from huggingface_hub import close_session, constants

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()  # the next one reads the variable
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no token"))


def write_cache(cache: Path, name: str, files: dict[str, bytes], commit: str = ONE, kind: str = "model") -> Path:
    """A repository in huggingface_hub's layout, written by hand; returns the snapshot's folder."""
    repo = cache / f"{kind}s--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / "main").write_text(commit)
    for file, data in files.items():
        blob, link = repo / "blobs" / sha(data), repo / "snapshots" / commit / file
        blob.parent.mkdir(exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link.symlink_to(Path(*[".."] * (2 + file.count("/")), "blobs", blob.name))
    return repo / "snapshots" / commit


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
