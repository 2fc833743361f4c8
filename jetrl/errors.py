"""The errors that the CLI shows as one message, without a traceback; and what a full disk or GPU looks like."""

from __future__ import annotations

import errno
import functools
import inspect
import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parent)
_MOST_WRAPPERS = 20  # decorators and partials around a function


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
    """The status with which the program ends after an error that is shown as one message."""
    return error.status if isinstance(error, UserError) else UserError.status


def gpu_full(error: BaseException) -> bool:
    """Whether an error means a full GPU: of torch's allocator, CUDA itself (contexts, graphs, kernels), or cuBLAS."""
    signs = ("CUDA out of memory", "CUDA error: out of memory", "CUDA driver error: out of memory",
             "CUBLAS_STATUS_ALLOC_FAILED")
    return type(error).__name__ == "OutOfMemoryError" or any(sign in text_of(error) for sign in signs)


def reason(error: BaseException) -> str:
    """What an error says; its kind where it says nothing, as MemoryError."""
    return str(error).strip() or type(error).__name__


def place_of(error: BaseException, called: Any = None) -> str:
    """Where an error was raised, as the user should read it: ` (FILE, line N)` of the last line in the user's own code,
    not of a library that it called. Where none of that code had begun, as with a wrong number of arguments, the place
    at which `called`, what jetrl called, is defined. Empty without a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    libraries = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib")}
    ours = (f"{_PACKAGE}/", f"{_PACKAGE}_study/")  # the study is a package beside this one
    theirs = [f for f in frames if not f.filename.startswith(ours)]
    if not theirs and (place := defined_at(called)):
        return place

    def installed(file: str) -> bool:
        parts = Path(file).parts
        return (
            "site-packages" in parts or "dist-packages" in parts
            or file.startswith(("<frozen", "<string>"))  # the second: what dataclasses generate
            or any(file.startswith(f"{folder}/") for folder in libraries if folder)
        )

    first = theirs[0].filename if theirs else ""  # what jetrl called; it may be an installed module itself
    own = [f for f in theirs if not installed(f.filename)] or [f for f in theirs if f.filename == first]
    frame = (own or theirs or frames)[-1]
    if frame.filename.startswith("<frozen") or isinstance(error, SyntaxError):  # of the import system; it says where
        return ""
    return f" ({frame.filename}, line {frame.lineno})"


def defined_at(thing: Any) -> str:
    """` (FILE, line N)` of where a function, method, class or callable object of the user's is written; empty for
    others, such as builtins and jetrl's own."""
    for _ in range(_MOST_WRAPPERS):
        inner = getattr(thing, "__wrapped__", None) or getattr(thing, "__func__", None)
        inner = inner or (thing.func if isinstance(thing, functools.partial) else None)
        thing = thing if inner is None else inner
    if isinstance(thing, property):
        thing = thing.fget
    code = getattr(thing, "__code__", None)
    if code is None and inspect.isclass(thing):
        code = getattr(thing.__init__, "__code__", None) or _first_code(thing)
    elif code is None:
        code = getattr(type(thing).__call__, "__code__", None) if callable(thing) else None
    if code is None or code.co_filename.startswith(f"{_PACKAGE}/"):
        return ""
    return f" ({code.co_filename}, line {code.co_firstlineno})"


def _first_code(kind: type) -> Any:
    """The code of a class without a constructor of its own: of its first method."""
    codes = (getattr(value, "__code__", None) for value in vars(kind).values())
    return next((code for code in codes if code is not None), None)


def told(error: BaseException, called: Any = None) -> str:
    """An error of code that is not jetrl's, for a message: its type, its text and `place_of`."""
    return f"{type(error).__name__}: {text_of(error)}{place_of(error, called)}"


def text_of(error: BaseException) -> str:
    """`str(error)`, for an exception of anyone's."""
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be read: __str__ raised {type(second).__name__})"


def shown(value: Any, most: int = 120) -> str:
    """A user's object for a message: its repr, cut to `most` characters."""
    if isinstance(value, int) and value.bit_length() > 10_000:  # Python refuses to print very long ones
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= most else text[: most - 3] + "..."


def as_user_error(error: BaseException) -> type[UserError]:
    """What an error of code that is not jetrl's becomes: `OutOfMemory` if it means a full GPU, else `UserError`."""
    return OutOfMemory if gpu_full(error) else UserError


def disk_full(error: BaseException) -> bool:
    """Whether an error means a full disk or quota."""
    return system_error(error) in (errno.ENOSPC, errno.EDQUOT)


def of_system(error: BaseException) -> str | None:
    """What the user reads about a disk, file or folder that fails; None for any other error."""
    if disk_full(error):
        return f"no disk space left ({error}). Free some and try again."
    if type(error) is ValueError and "null byte" in str(error):
        return "cannot read or write: a path contains a NUL character (\\0). Correct the path."
    number = system_error(error)
    if isinstance(error, OSError) or number is not None:
        return f"cannot read or write: {error}." + (" Check the path and its permissions." if number else "")
    return None


def system_error(error: BaseException) -> int | None:
    """The system's number of an error with a file, or None. safetensors has an exception of its own and tokenizers a
    plain one, with the number as text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if not (isinstance(error, OSError) or type(error) is Exception or type(error).__name__ == "SafetensorError"):
        return None
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def shorten(text: str, limit: int = 120) -> str:
    """The text for a message: its beginning, and dots where it goes on."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
