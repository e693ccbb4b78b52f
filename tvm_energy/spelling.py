"""Words for error messages: what would have been valid, what was probably meant, what others said."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["first_line", "last_line", "listing", "suggestion"]

#: Longest part of another program's message that is repeated.
_LONGEST = 300


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type when it has none."""
    return next(iter(_lines(error)), type(error).__name__)[:_LONGEST]


def last_line(error: BaseException) -> str:
    """The last line of an error's message, where TVM puts the reason, or its type."""
    return next(reversed(_lines(error)), type(error).__name__)[:_LONGEST]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def listing(names: Iterable[str]) -> str:
    """``a, b, c``; ``none`` when there is nothing."""
    return ", ".join(names) or "none"


def suggestion(word: str, names: Iterable[str]) -> str:
    """`` (did you mean 'matmul'?)`` when ``word`` is close to one of ``names``, else nothing."""
    close = difflib.get_close_matches(word.strip().lower(), list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
