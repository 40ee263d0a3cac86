"""TLS: the certificate of the server, and those that clients show."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any, Final

from queen.errors import SettingsError

_LOOK_SECONDS: Final = 5.0

log = logging.getLogger(__name__)


class ServerTls:
    """The context that connections are accepted with.

    New files are taken up without a restart: connections that are open keep what they agreed on.
    """

    def __init__(self, certificate: str, key: str, client_ca: str = "", client_auth: str = "off") -> None:
        """Raises `SettingsError` when a file is missing or malformed."""
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._task: asyncio.Task[None] | None = None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        # Renegotiation is work that a client can ask for again and again.
        self.context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        if client_auth != "off":
            if not client_ca:
                raise SettingsError(
                    f"TLS_CLIENT_AUTH={client_auth} needs TLS_CLIENT_CA, the file with the CA of client certificates"
                )
            required = client_auth == "required"
            self.context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        self._load(self.context)
        self._seen = self._stamp()

    def reload(self) -> bool:
        """Load the files again; returns whether they could be used. If not, the certificate in use stays."""
        self._seen = self._stamp()
        try:
            # Tried on another context first: a certificate without its key must not reach clients.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except SettingsError as error:
            log.error("%s; the previous certificate stays in use", error)
            return False
        log.info("TLS_CERT=%s reloaded", self._certificate)
        return True

    def start(self) -> None:
        """Look for new files from now on."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._stamp() != self._seen:
                self.reload()

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        return tuple(_stamp(path) for path in (self._certificate, self._key, self._client_ca) if path)

    def _load(self, context: ssl.SSLContext) -> None:
        for variable, path in (
            ("TLS_CERT", self._certificate),
            ("TLS_KEY", self._key),
            ("TLS_CLIENT_CA", self._client_ca),
        ):
            if path:
                try:
                    Path(path).read_bytes()
                except OSError as error:
                    raise SettingsError(
                        f"{variable}={path}: expected a file that can be read: {error.strerror}"
                    ) from None
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else error
            raise SettingsError(
                f"TLS_CERT={self._certificate}, TLS_KEY={self._key}: expected a certificate and its key: {reason}"
            ) from None
        if self._client_ca:
            try:
                context.load_verify_locations(self._client_ca)
            except (ssl.SSLError, OSError) as error:
                raise SettingsError(f"TLS_CLIENT_CA={self._client_ca}: expected certificates in PEM: {error}") from None


def common_name(certificate: Any) -> str | None:
    """The common name in a certificate as `getpeercert` gives it."""
    for part in (certificate or {}).get("subject", ()):
        for name, value in part:
            if name == "commonName":
                return str(value)
    return None


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not")


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = Path(path).stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino
