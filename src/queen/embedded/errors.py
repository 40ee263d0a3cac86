"""Errors of the embedded PostgreSQL, with hints."""

from pathlib import Path

from queen.errors import QueenError

# Messages of PostgreSQL, and the hint for each.
_HINTS = (
    ("No space left on device", "Disk full: free some space, or choose a directory on another disk."),
    ("Disk quota exceeded", "Disk quota exceeded: free some space, or choose another directory."),
    ("Cannot allocate memory", "Out of memory: stop other programs, or add memory."),
    ("could not bind", "Port in use: stop the program that uses it, or choose another port."),
    ("invalid value for parameter", "A PostgreSQL setting is invalid; see the log."),
    ("unrecognized configuration parameter", "A PostgreSQL setting does not exist; see the log."),
    ("Permission denied", "The user that runs PostgreSQL cannot access this directory: change its permissions."),
    ("Operation not permitted", "The user that runs PostgreSQL cannot access this directory: change its owner."),
    ("Read-only file system", "The file system is read-only: choose another directory."),
)


class EmbeddedPostgresError(QueenError):
    """The embedded PostgreSQL cannot be created, started or stopped."""


def failure(what: str, output: str, where: Path) -> EmbeddedPostgresError:
    """The error for a failed PostgreSQL program, with a hint and its last output lines."""
    hint = next((hint for text, hint in _HINTS if text in output), "")
    lines = output.strip().splitlines()[-12:] or ["(none)"]
    shown = "\n".join(f"  {line}" for line in lines)
    return EmbeddedPostgresError(f"{what} in {where}. {hint}".strip() + f"\nLast output:\n{shown}")
