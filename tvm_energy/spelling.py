"""Words for error messages: what would have been valid, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["listing", "suggestion"]


def listing(names: Iterable[str]) -> str:
    """``a, b, c``; ``none`` when there is nothing."""
    return ", ".join(names) or "none"


def suggestion(word: str, names: Iterable[str]) -> str:
    """`` (did you mean 'matmul'?)`` when ``word`` is close to one of ``names``, else nothing."""
    close = difflib.get_close_matches(word.strip().lower(), list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
