"""What a single value of the user's code is, whichever library made it: Python's own, or None where it is missing.

Missing is None, and what libraries write in its place: a masked value of numpy, torch or another array (an attribute
`mask`, or `get_mask`), NA and NaT of pandas, NaT of numpy, a null of Arrow. The number under a mask is never looked at.
NaN is a number and stays: where it means something is for the caller to say.
"""

from __future__ import annotations

from typing import Any

_DEEPEST = 8  # an array of objects may hold another one
_ITS_OWN = (bool, int, float, str, bytes, list, tuple, dict, type(None))


def value_of(value: Any) -> Any:
    """A scalar of numpy, torch, Arrow, ... as Python's value, None where it is missing; anything else as it is, and an
    array with several entries too. Raises nothing."""
    for _ in range(_DEEPEST):
        inner = _inside(value)
        if inner is value:
            break
        value = inner
    return value


def is_single(value: Any) -> bool:
    """Whether a value is no array, or one of no dimension."""
    return getattr(value, "ndim", 0) == 0


def entries_of(value: Any) -> list[Any]:
    """The entries of an array or another sequence; those under a mask are None. Raises what the container raises."""
    if callable(getattr(value, "get_mask", None)) and callable(getattr(value, "get_data", None)):  # of torch
        entries = zip(value.get_data(), value.get_mask(), strict=True)
        return [entry if bool(valid.any()) or valid.numel() != 1 else None for entry, valid in entries]
    return list(value)


def _inside(value: Any) -> Any:
    if type(value) in _ITS_OWN:
        return value
    kind = type(value)
    if kind.__module__.partition(".")[0] == "pandas" and kind.__name__ in ("NAType", "NaTType"):
        return None
    try:
        if _is_masked(value):
            return None
        if callable(as_py := getattr(value, "as_py", None)):  # of Arrow
            return as_py()
        if callable(get_data := getattr(value, "get_data", None)) and callable(getattr(value, "get_mask", None)):
            return get_data() if is_single(value) else value
        return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        # an array that cannot be read (on no device, nested, of another library) stays what it is: no number
        return value


def _is_masked(value: Any) -> bool:
    """Whether it is one value that its mask hides."""
    if callable(get_mask := getattr(value, "get_mask", None)):  # torch: True is valid
        valid = get_mask()
        return valid is not None and valid.numel() == 1 and not bool(valid.any())
    mask = getattr(value, "mask", None)
    if mask is None or callable(mask):  # of pandas, a method
        return False
    if isinstance(mask, bool):
        return mask
    is_bool = getattr(getattr(mask, "dtype", None), "kind", "") == "b"
    return is_bool and getattr(mask, "size", 0) == 1 and bool(mask.all())
