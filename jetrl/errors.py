"""The errors that the CLI shows as one message, without a traceback; and what a full disk or GPU looks like."""

from __future__ import annotations

import errno
import re
import sysconfig
import traceback
from pathlib import Path

# C0 without tab and newline, delete, C1, marks that turn the direction of text, separators of lines, lone surrogates
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Text with its control characters spelled out (`\x1b`, `\u202e`), so that it cannot steer a terminal.

    Newlines and tabs stay. ESC and C1 begin sequences that set titles, clear screens or write to the clipboard; a
    carriage return and marks of direction make a line look like another one.
    """
    return _CONTROL.sub(_spelled, text)


def _spelled(match: re.Match[str]) -> str:
    code = ord(match[0])
    return {"\r": "\\r"}.get(match[0], f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


class UserError(ValueError):
    """A mistake that the user can fix. The message says what is wrong, with the values, and what to do about it.

    It may quote files of others: its text is `printable`. `status`: that with which the program ends.
    """

    status = 2

    def __str__(self) -> str:
        return printable(super().__str__())


class OutOfMemory(UserError):
    """A GPU is full. It has a status of its own, as the same run may fit once others have left the GPU."""

    status = 3


class Notice(UserWarning):
    """A warning of jetrl's own to its user. The command line shows it as `jetrl: warning: ...`, without a place in
    code: the text says what to do."""


def status_of(error: BaseException) -> int:
    """The status with which the program ends after an error that is told as one message."""
    return error.status if isinstance(error, UserError) else UserError.status


def gpu_full(error: BaseException) -> bool:
    """Whether an error means a full GPU: of torch's allocator, CUDA itself (contexts, graphs, kernels), or cuBLAS."""
    signs = ("CUDA out of memory", "CUDA error: out of memory", "CUDA driver error: out of memory",
             "CUBLAS_STATUS_ALLOC_FAILED")
    return type(error).__name__ == "OutOfMemoryError" or any(sign in str(error) for sign in signs)


def reason(error: BaseException) -> str:
    """What an error says; its kind where it says nothing, as MemoryError."""
    return str(error).strip() or type(error).__name__


def place_of(error: BaseException) -> str:
    """Where an error was raised, as the user should read it: ` (FILE, line N)` of the last line in the user's own code,
    not of a library that it called; empty without a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    package, libraries = str(Path(__file__).parent), {sysconfig.get_path(key) for key in ("stdlib", "platstdlib")}
    theirs = [f for f in frames if not f.filename.startswith(package + "/")]

    def installed(file: str) -> bool:
        parts = Path(file).parts
        return (
            "site-packages" in parts or "dist-packages" in parts or file.startswith("<frozen")
            or any(file.startswith(f"{folder}/") for folder in libraries if folder)
        )

    first = theirs[0].filename if theirs else ""  # what jetrl called; it may be an installed module itself
    own = [f for f in theirs if not installed(f.filename)] or [f for f in theirs if f.filename == first]
    frame = (own or theirs or frames)[-1]
    if frame.filename.startswith("<frozen") or isinstance(error, SyntaxError):  # of the import system; it says where
        return ""
    return f" ({frame.filename}, line {frame.lineno})"


def as_user_error(error: BaseException) -> type[UserError]:
    """What an error of code that is not jetrl's becomes: `OutOfMemory` if it means a full GPU, else `UserError`."""
    return OutOfMemory if gpu_full(error) else UserError


def disk_full(error: BaseException) -> bool:
    """Whether an error means a full disk or quota."""
    return system_error(error) in (errno.ENOSPC, errno.EDQUOT)


def system_error(error: BaseException) -> int | None:
    """The system's number of an error with a file, or None. safetensors has an exception of its own and tokenizers a
    plain one, with the number as text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if not (isinstance(error, OSError) or type(error) is Exception or type(error).__name__ == "SafetensorError"):
        return None
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None
