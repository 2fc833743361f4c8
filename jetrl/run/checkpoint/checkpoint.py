"""Checkpoints that survive a kill at any moment, and resume to the same bits, on any number of ranks.

A checkpoint is a folder `checkpoints/step_000100`:

    model/       Hugging Face folder (BF16), for `eval`, `export` and other programs; of adapters a PEFT folder
    state/       master weights and optimizer state, to the bit: safetensors with each rank's rows (`store.py`)
    under_way.safetensors   with rollout.overcommit, tokens and log-probs of answers that are under way
    state.json   step, counters, flow digest, settings, SHA-256 of every safetensors file and of itself; its presence
                 makes the folder complete

All ranks write it under another name. When all of their files are synced, the first rank adds state.json and renames
the folder; `latest` (a file with the folder's name) is replaced last. A checkpoint that goes is renamed first, so that
there is never half of one under its name.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from safetensors import SafetensorError

from jetrl.errors import Notice, UserError
from jetrl.huggingface import hub
from jetrl.huggingface.write import sync
from jetrl.model.shards import Part
from jetrl.parallel.agreement import gather_from_ranks, on_rank0, together
from jetrl.parallel.posts import Abandoned, Posts
from jetrl.parallel.world import ALONE, World
from jetrl.run.checkpoint import store
from jetrl.untrusted import fresh, inside, json_file, text_file

_STATE, _MODEL, _META = "state", "model", "state.json"
_NAME = re.compile(r"step_[0-9]{6,}")  # copies under other names are the user's
_WRITING, _REMOVED = ".writing_", ".removed_"
_PAUSE = 0.05  # seconds between two looks at a thread that writes
_PATIENCE = 5.0  # seconds for a thread that is to end
WriteModel = Callable[[Path, Path, Mapping[str, Part], Callable[[], None]], Iterable[Path]]
"""model folder, state folder, this rank's parts, what to call before each file -> this rank's safetensors files."""
Copy = Callable[[Mapping[str, Part]], dict[str, Part]]
_ANOTHER = "Resume from another step of the run (checkpoint.resume = PATH)."


@dataclass(frozen=True, slots=True)
class Meta:
    """The small part of a checkpoint. The hashes and the digest are filled in by `save`."""

    step: int
    weight_version: int
    flow_digest: str
    settings: dict[str, Any]  # by full key: those that must be the same in a resumed run
    paths: dict[str, Any]  # by full key: those of them that are paths, absolute
    initial_accuracy: float | None = None
    num_prompts: int = 0  # taken from the training stream so far
    first_row: int = 0  # the step of the first row of the run folder's metrics
    data: dict[str, str] = field(default_factory=dict)  # SHA-256 of local data files, by key
    clip_bounds: list[float] | None = None  # of a calibrated clip
    under_way: list[dict[str, Any]] | None = None  # groups that go on in the next step (`suspended.py`)
    base: str | None = None  # digest of the frozen base of adapters
    files: dict[str, str] | None = None  # SHA-256 by path in the checkpoint
    digest: str | None = None  # SHA-256 of all of the above; None in checkpoints until 2026-11-24


def save(
    folder: Path, meta: Meta, parts: Mapping[str, Part], write_model: WriteModel, keep: int, world: World = ALONE,
) -> Path:
    """Write `folder/step_NNNNNN` atomically, point `folder/latest` at it, and remove all but the newest `keep`.

    What an old checkpoint or a killed writer left and cannot be removed is warned of. Every rank gives its `parts`.
    `write_model` writes this rank's files of the model's folder, when the state of all ranks is in its own. Collective.
    """
    return begin(folder, meta, parts, write_model, keep, world).finish()


def begin(
    folder: Path, meta: Meta, parts: Mapping[str, Part], write_model: WriteModel, keep: int, world: World = ALONE,
    copy: Copy | None = None,
) -> Writing:
    """`save` up to where its files are written: `finish` makes it a checkpoint. Collective.

    With `copy`, a thread of each rank writes beside the run, from `copy(parts)`, which it makes first; the parts may
    change once `release` has returned. There is no collective in it. Else `finish` writes, from the parts themselves.
    """
    final = folder / f"step_{meta.step:06d}"
    temporary = on_rank0(world, lambda: _begun(folder, final))
    return Writing(_Job(temporary, final, meta, dict(parts), write_model, keep, world, Posts(world)), copy)


def _begun(folder: Path, final: Path) -> Path:
    """The empty folder that becomes the checkpoint `final`."""
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    temporary = _free(folder / f"{_WRITING}{final.name}")
    with _told(temporary, final):
        (temporary / _MODEL).mkdir(parents=True)
    return temporary


@contextmanager
def _told(temporary: Path, final: Path) -> Iterator[None]:
    """A full disk, or a folder that is gone, as UserErrors."""
    folder = final.parent
    try:
        with store.told_if_full(f"the checkpoint {final}", folder, lambda: (
            f"{left(folder)} Free some space, then continue with --resume."
        )):
            yield
    except (OSError, SafetensorError) as error:
        if not isinstance(error, FileNotFoundError) and temporary.is_dir():
            raise
        raise UserError(
            f"{temporary} was removed, at least in part, while the checkpoint was written there ({error}). "
            f"{left(folder)} Keep the folder of a run in place while it runs, then continue with --resume."
        ) from error


@dataclass(slots=True)
class _Job:
    """What one rank does for a checkpoint, in a thread or not. Not collective: ranks tell each other by `posts`."""

    temporary: Path
    final: Path
    meta: Meta
    parts: dict[str, Part]
    write_model: WriteModel
    keep: int
    world: World
    posts: Posts
    ending: threading.Lock = field(default_factory=threading.Lock)  # held while the checkpoint gets its name
    abandoned: bool = False

    def write(self) -> None:
        """This rank's files, and on the first rank the end of it all."""
        try:
            with _told(self.temporary, self.final):
                self.posts.put("hashes", self._write())
                if self.world.first:
                    every = self.posts.all("hashes", self.check)
                    self._end({name: digest for own in every for name, digest in own.items()})
        except Exception:
            self.posts.fail()
            raise

    def check(self) -> None:
        """Raises Abandoned if nobody wants the checkpoint any more."""
        if self.abandoned:
            raise Abandoned

    def _write(self) -> dict[str, str]:
        """This rank's files with their hashes."""
        state, model = self.temporary / _STATE, self.temporary / _MODEL
        written = store.write(state, self.parts, self.world, self.check)
        self.posts.put("state", None)
        self.posts.all("state", self.check)
        written += self.write_model(model, state, self.parts, self.check)
        self.check()
        return store.sha256_of(self.temporary, sorted(str(path.relative_to(self.temporary)) for path in written))

    def _end(self, files: dict[str, str]) -> None:
        folder = self.final.parent
        record = asdict(replace(self.meta, files=dict(sorted(files.items()))))
        (self.temporary / _META).write_text(json.dumps(record | {"digest": _digest(record)}, indent=1) + "\n")
        for path in (self.temporary / _META, self.temporary / _STATE, self.temporary / _MODEL, self.temporary):
            sync(path)
        with self.ending:
            self.check()
            if self.final.exists():  # a run resumed from an earlier step writes this one again
                _hide(self.final)
            os.replace(self.temporary, self.final)
            _replace_text(folder / "latest", self.final.name)
        others = [p for p in complete(folder) if p != self.final]  # as there, later ones may be here
        for old in others[: max(0, len(others) - self.keep + 1)]:
            with _warned(old):
                _hide(old)
        _sweep(folder)


class Writing:
    """A checkpoint that has begun."""

    def __init__(self, job: _Job, copy: Copy | None) -> None:
        self.path, self._job = job.final, job
        self.seconds: float | None = None  # that its thread took, once it has ended
        self._copied, self._over = threading.Event(), Future[None]()
        self._thread: threading.Thread | None = None
        if copy is not None:
            name = f"jetrl-{job.final.name}"
            # a daemon, so that a second signal ends the program at once; one that ends by itself waits for it
            self._thread = threading.Thread(target=self._carry, args=(copy,), name=name, daemon=True)
            atexit.register(self._thread.join)
            self._thread.start()

    def _carry(self, copy: Copy) -> None:
        """In the thread."""
        start = time.perf_counter()
        try:
            try:
                self._job.parts = copy(self._job.parts)
            finally:
                self._copied.set()
            self._job.write()
        except BaseException as error:  # raised by `finish`, in the main thread
            self._job.posts.fail()
            self._over.set_exception(error)
        else:
            self.seconds = time.perf_counter() - start
            self._over.set_result(None)

    def release(self) -> None:
        """Returns once the parts may change. Not collective."""
        if self._thread is not None:
            self._copied.wait()

    def done(self) -> bool:
        """Whether `finish` would not wait. Collective."""
        return all(self._job.world.gather(self._over.done()))

    def finish(self, show: Callable[[int], None] = lambda _: None) -> Path:
        """Returns once the checkpoint is on the disk; raises what kept it from that. Collective.

        While it waits it calls `show` with the bytes that are there.
        """
        job = self._job

        def wait() -> None:
            with suppress(Abandoned):  # the other rank says why
                if self._thread is None:
                    return job.write()
                while not self._over.done():  # in short waits, so that signals are heard
                    show(_size(job.temporary) if job.world.first else 0)
                    with suppress(TimeoutError):
                        self._over.exception(_PAUSE)
                atexit.unregister(self._thread.join)
                self._over.result()

        try:
            gather_from_ranks(job.world, wait)
        finally:
            if job.world.first and (self._thread is None or self._over.done()):  # nobody writes there any more
                shutil.rmtree(job.temporary, ignore_errors=True)
        return self.path

    def abandon(self) -> None:
        """The checkpoint stays what it is: whole, or nothing that counts. Its thread ends with the file at hand, which
        is waited for shortly. Not collective."""
        if self._thread is not None:
            with self._job.ending:
                self._job.abandoned = True
            atexit.unregister(self._thread.join)
            self._thread.join(_PATIENCE)


def _size(folder: Path) -> int:
    """Bytes in the files of a folder that changes meanwhile."""
    total = 0
    with suppress(OSError):  # it got its name
        for path in folder.glob("*/*"):
            total += path.stat().st_size
    return total


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    found = (p for p in folder.glob("step_*") if _NAME.fullmatch(p.name) and (p / _META).is_file())
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def newest(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, else the newest complete one, else None."""
    pointer = folder / "latest"
    try:
        named = text_file(pointer).strip() if pointer.is_file() else ""
    except ValueError:  # no text, or too large: no name of a step
        named = ""
    if _NAME.fullmatch(named) and (folder / named / _META).is_file():
        return folder / named
    found = complete(folder)
    return found[-1] if found else None


def left(folder: Path) -> str:
    """What a run that stops here can be resumed from, as a sentence."""
    last = newest(folder)
    return "There is no checkpoint yet, so a resumed run starts over." if last is None else f"{last} is intact."


def load(path: Path, world: World = ALONE) -> Meta:
    """Read state.json and verify the hashes of the state's files; `read` reads these. Collective."""
    meta = on_rank0(world, lambda: _read_meta(path))
    store.verify(path / _STATE, _below(_STATE, meta), _ANOTHER, world)
    return meta


def read(path: Path, parts: Callable[[store.Stored], Mapping[str, Part]], world: World = ALONE) -> None:
    """Fill `parts(what the checkpoint holds)` in place, on each rank its own. After `load`. Collective."""
    with together(world):
        try:
            store.read(path / _STATE, parts(store.stored(path / _STATE)))
        except (ValueError, SafetensorError) as error:  # unreachable unless the hashes were made of broken files
            raise UserError(f"{path / _STATE} cannot be read: {error}. {_ANOTHER}") from error


def _below(folder: str, meta: Meta) -> dict[str, str]:
    """The hashes of a folder's files, by path in it."""
    files, prefix = meta.files or {}, folder + "/"
    return {name.removeprefix(prefix): digest for name, digest in files.items() if name.startswith(prefix)}


def _read_meta(path: Path) -> Meta:
    if not (path / _META).is_file():
        raise UserError(f"{path} is not a complete checkpoint: {_META} is missing. Choose another step or a new run.")
    try:
        record = json_file(path / _META)
        if not isinstance(record, dict):
            raise ValueError("it must hold a table")
        if record.keys() & {"config_digest", "sha256"}:
            raise UserError(f"{path} was written by an older version of jetrl and cannot be resumed. Start a new run.")
        meta = Meta(**record)
        _check_types(meta)
        if meta.digest not in (None, _digest(record)):
            raise ValueError("it does not have the hash that was written into it: it was damaged or changed")
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(f"{path / _META} cannot be read ({error}). Choose another step of the run.") from error
    return meta


def _check_types(meta: Meta) -> None:
    """ValueError naming the first field that does not hold what `save` writes there."""
    hashes = "names with hashes", lambda v: isinstance(v, dict) and all(isinstance(x, str) for x in v.values())
    whole = "a whole number from 0 on", lambda v: type(v) is int and v >= 0
    table = "a table", lambda v: isinstance(v, dict)
    wanted: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "step": whole, "weight_version": whole, "num_prompts": whole, "first_row": whole, "files": hashes,
        "data": hashes, "settings": table, "paths": table, "flow_digest": ("a string", lambda v: isinstance(v, str)),
        "clip_bounds": ("two numbers or null", lambda v: v is None or (
            isinstance(v, list) and len(v) == 2 and all(type(x) in (int, float) for x in v))),
        "under_way": ("a list of tables or null", lambda v: v is None or (
            isinstance(v, list) and all(isinstance(x, dict) for x in v))),
        "base": ("a string or null", lambda v: v is None or isinstance(v, str)),
        "initial_accuracy": ("a number or null", lambda v: v is None or type(v) in (int, float)),
    }
    for name, (what, fits) in wanted.items():
        if not fits(value := getattr(meta, name)):
            raise ValueError(f"{name} is {shorten(repr(value), 60)}, and must be {what}")


def _digest(record: Mapping[str, Any]) -> str:
    """SHA-256 of what state.json holds next to it."""
    rest = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _hide(path: Path) -> None:
    """Take a checkpoint away in one move; `_sweep` then removes it."""
    os.replace(path, _free(path.with_name(_REMOVED + path.name)))


def _free(path: Path) -> Path:
    """This name, or the next one that is free: what lies there may be another user's, which cannot be removed."""
    found, number = path, 1
    while os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def _sweep(folder: Path) -> None:
    """Remove checkpoints that were taken away, and what writers that were killed have left."""
    for path in (*folder.glob(f"{_REMOVED}step_*"), *folder.glob(f"{_WRITING}step_*")):
        with _warned(path):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)


@contextmanager
def _warned(path: Path) -> Iterator[None]:
    """What cannot be removed takes space, and is no reason to end a run."""
    try:
        yield
    except OSError as error:
        text = f"{path} cannot be removed ({error}) and takes disk space: remove it yourself."
        warnings.warn(text, Notice, stacklevel=3)


def verify_model(path: Path) -> None:
    """Check the hashes of a checkpoint's `model/` weights, for callers that read only these."""
    store.verify(path / _MODEL, _below(_MODEL, _read_meta(path)), "Use another checkpoint.")


def model_folder(
    where: str | Path, revision: str | None = None, verify: bool = True, *, weights: bool = True
) -> Path:
    """The Hugging Face folder meant by a run folder (its newest checkpoint), a checkpoint, a model folder or a hub
    name. `verify`: UserError if a checkpoint's weights do not have their hashes. Without `weights` only the small files
    of a model on the hub are sure to be there."""
    path = hub.model_folder(where, revision, weights=weights)
    if (path / "checkpoints").is_dir():
        found = newest(path / "checkpoints")
        if found is None:
            raise UserError(f"{path} has no complete checkpoint yet. Set checkpoint.save_interval, or wait for one.")
        path = found
    if verify and (path / _META).is_file():
        verify_model(path)
    return inside(path, _MODEL) if (path / _MODEL).is_dir() else path


def _replace_text(path: Path, text: str) -> None:
    temporary = fresh(path)
    temporary.write_text(text + "\n")
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)
