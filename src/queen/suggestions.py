"""Hints in errors about names that are not known: the nearest one that is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """`did you mean 'orders'?`, or `otherwise` where no known name is that similar."""
    close = difflib.get_close_matches(name, list(known), 1, cutoff)
    # The known names may be members of an enumeration, whose repr is more than the name.
    return f"did you mean {str(close[0])!r}?" if close else otherwise
