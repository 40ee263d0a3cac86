"""The file of contexts: which servers there are, and how to log in to each.

current-context: production
contexts:
  - {name: production, server: "https://queen.example", token-ref: "env"}
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from queen.cli.common.exits import AuthFailed, UserError

KEYCHAIN_SERVICE: Final = "queenctl"
TOKEN_VARIABLE: Final = "QUEEN_TOKEN"


def config_path(given: Path | None, environ: Mapping[str, str]) -> Path:
    """Where the file is: `--config`, `$QUEEN_CONFIG`, or below the home directory."""
    if given is not None:
        return given
    if environ.get("QUEEN_CONFIG"):
        return Path(environ["QUEEN_CONFIG"])
    return Path.home() / ".queen" / "config.yaml"


class Contexts:
    """The contexts of one file; `save()` writes it back whole, readable by its owner alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._document: dict[str, Any] = _read(path)
        entries = self._document.get("contexts") or []
        if not isinstance(entries, list) or not all(isinstance(one, dict) and one.get("name") for one in entries):
            raise UserError(f"{path}: contexts must be a list of entries with a name; correct or remove the file")
        self.entries: list[dict[str, Any]] = entries

    @property
    def current(self) -> str | None:
        name = self._document.get("current-context")
        return str(name) if name else None

    @current.setter
    def current(self, name: str | None) -> None:
        self._document["current-context"] = name

    def get(self, name: str) -> dict[str, Any]:
        """The context of that name. Raises `UserError` that names those there are."""
        for entry in self.entries:
            if entry["name"] == name:
                return entry
        known = ", ".join(entry["name"] for entry in self.entries) or "none yet"
        raise UserError(f"no context {name!r} in {self.path} (there is: {known}); queen config set-context makes one")

    def set(self, name: str, **values: Any) -> dict[str, Any]:
        """Make a context or change what is given (not None) of it."""
        entry = next((one for one in self.entries if one["name"] == name), None)
        if entry is None:
            entry = {"name": name}
            self.entries.append(entry)
        entry.update({key.replace("_", "-"): value for key, value in values.items() if value is not None})
        return entry

    def delete(self, name: str) -> None:
        self.entries.remove(self.get(name))
        if self.current == name:
            self.current = None

    def save(self) -> None:
        """Write the file whole or not at all."""
        import yaml

        self._document["contexts"] = self.entries
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=".config-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                yaml.safe_dump(self._document, file, sort_keys=False)
            Path(temporary).replace(self.path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def resolve_token(reference: str | None, environ: Mapping[str, str]) -> str | None:
    """The token that a `token-ref` stands for; None when it stands for none."""
    if not reference:
        return None
    if reference == "env":
        return environ.get(TOKEN_VARIABLE) or None
    kind, colon, rest = reference.partition(":")
    if colon and kind == "literal":
        return rest
    if reference.startswith("file://"):
        path = Path(reference.removeprefix("file://")).expanduser()
        try:
            return path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise AuthFailed(
                f"the token file {path} cannot be read: {error.strerror}; queen login makes one"
            ) from error
    if reference.startswith("keychain://"):
        token = _keychain().get_password(KEYCHAIN_SERVICE, reference.removeprefix("keychain://"))
        if token is None:
            raise AuthFailed(f"the keychain has no token {reference}; log in again: queen login")
        return str(token)
    return reference


def store_token(name: str, token: str, keychain: bool) -> str:
    """Keep a token in the keychain if there is one, else in the file; the `token-ref` of it."""
    if keychain:
        with contextlib.suppress(Exception):
            _keychain().set_password(KEYCHAIN_SERVICE, name, token)
            return f"keychain://{name}"
    return f"literal:{token}"


def forget_token(reference: str | None) -> None:
    """Remove a token from the keychain, if it is there."""
    if reference and reference.startswith("keychain://"):
        with contextlib.suppress(Exception):
            _keychain().delete_password(KEYCHAIN_SERVICE, reference.removeprefix("keychain://"))


def _keychain() -> Any:
    try:
        return importlib.import_module("keyring")
    except ModuleNotFoundError as error:
        raise AuthFailed("no keychain here: pip install keyring, or use --token-ref file:///path or env") from error


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}; correct or remove it") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UserError(f"{path} must hold contexts, not {type(document).__name__}; correct or remove it")
    return document
