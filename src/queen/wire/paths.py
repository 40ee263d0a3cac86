"""Paths of requests to the HTTP API."""

from __future__ import annotations

from urllib.parse import quote


def path_of(base: str, *segments: str) -> str:
    """The path below `base`, each segment escaped: a name may contain any character, slashes included."""
    return "/".join([base, *(quote(segment, safe="") for segment in segments)])
