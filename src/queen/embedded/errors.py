"""What can go wrong with the embedded PostgreSQL, and what its user can do about it."""

from pathlib import Path

from queen.errors import QueenError

# What PostgreSQL writes when it gives up, and what to tell the person who reads it.
_HINTS = (
    ("No space left on device", "The disk is full: free some space, or choose a directory on another disk."),
    ("Disk quota exceeded", "The disk quota is used up: free some space, or choose another directory."),
    ("Cannot allocate memory", "There is too little memory: stop something else, or give this machine more."),
    ("could not bind", "Its port is taken: stop the program that uses it, or choose another port."),
    ("invalid value for parameter", "One of the settings given to PostgreSQL is wrong; the log names it."),
    ("unrecognized configuration parameter", "One of the settings given to PostgreSQL does not exist."),
    ("Permission denied", "The user that runs PostgreSQL may not use this directory: mend its permissions."),
    ("Operation not permitted", "The user that runs PostgreSQL may not use this directory: mend its owner."),
    ("Read-only file system", "The file system is mounted read-only: choose another directory."),
)


class EmbeddedPostgresError(QueenError):
    """The embedded PostgreSQL cannot be made, started or stopped."""


def failure(what: str, output: str, where: Path) -> EmbeddedPostgresError:
    """The error for a PostgreSQL program that gave up, with its last lines and what they mean."""
    hint = next((hint for text, hint in _HINTS if text in output), "")
    lines = output.strip().splitlines()[-12:] or ["(nothing)"]
    shown = "\n".join(f"  {line}" for line in lines)
    return EmbeddedPostgresError(f"{what} in {where}. {hint}".strip() + f"\nIts last words were:\n{shown}")
