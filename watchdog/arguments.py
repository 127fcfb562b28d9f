"""Bad input gets a clear error at the call, with the value in it."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterable
from functools import partial
from typing import Any

__all__ = ["callback", "exit_codes", "natural", "printable", "seconds", "start_context"]


_CO_COROUTINE = 0x80  # inspect.CO_COROUTINE, without importing inspect for it


def seconds(what: str, value: float, *, zero: bool = True) -> float:
    """A finite number of seconds, not negative, and not zero either unless `zero`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} must be a number of seconds, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        least = "0 or more" if zero else "more than 0"
        raise ValueError(f"{what} must be a finite number of seconds, {least}, not {value!r}")
    return number


def callback(what: str, value: Any) -> Any:
    """A callable that is run to its end by calling it, or None."""
    if value is not None and not callable(value):
        raise TypeError(f"{what} must be callable or None, not {value!r}")
    if any(_is_coroutine_function(function) for function in (value, type(value).__call__)):
        raise TypeError(f"{what} must not be a coroutine function, which nobody would await: {value!r}")
    return value


def _is_coroutine_function(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and bool(code.co_flags & _CO_COROUTINE)


def natural(what: str, value: int) -> int:
    """An integer from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an integer, not {value!r}")
    if value < 0:
        raise ValueError(f"{what} must be 0 or more, not {value!r}")
    return value


def printable(what: str, value: str) -> str:
    """A name that can stand in a line of a report."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, not {value!r}")
    if not value.strip() or not value.isprintable():
        raise ValueError(f"{what} must be printable and not empty, not {value!r}")
    return value


def exit_codes(what: str, values: Iterable[int]) -> frozenset[int]:
    """Exit codes as multiprocessing has them: 0 to 255, or a negative signal number."""
    try:
        codes = frozenset(values)
    except TypeError:
        raise TypeError(f"{what} must be a collection of exit codes, not {values!r}") from None
    for code in codes:
        if isinstance(code, bool) or not isinstance(code, int):
            raise TypeError(f"{what} must hold integers, not {code!r}")
        if not -64 <= code <= 255:
            raise ValueError(f"{what} must hold codes from 0 to 255 or negative signal numbers, not {code!r}")
    return codes


def start_context(context: Any) -> Any:
    """A multiprocessing context from a start method's name, a context, or None for the default."""
    if context is None or isinstance(context, str):
        return multiprocessing.get_context(context)
    if not callable(getattr(context, "Process", None)):
        raise TypeError(f"context must be a start method's name or a multiprocessing context, not {context!r}")
    return context
