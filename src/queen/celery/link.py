"""Requests of Kombu and Celery, which are synchronous, fork, and run under gevent: one keep-alive connection each."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import socket
import ssl
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from queen.client.errors import QueenConnectionError, QueenTimeoutError, error_of_status

DEFAULT_PORT = 6632
DEFAULT_NAMESPACE = "celery"
REQUEST_SECONDS = 30.0

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Address:
    """A server, the token for it, and the namespace in which an application keeps its queues."""

    host: str = "localhost"
    port: int = DEFAULT_PORT
    namespace: str = DEFAULT_NAMESPACE
    token: str | None = field(default=None, repr=False)
    secure: bool = False
    verify: bool = True

    @classmethod
    def of_url(cls, url: str) -> Address:
        """The address in `queen://[:token@]host[:port][/namespace]`; `queens://` is the same with TLS."""
        parts = urlsplit(url)
        return cls(
            host=parts.hostname or "localhost",
            port=parts.port or DEFAULT_PORT,
            namespace=unquote(parts.path).strip("/") or DEFAULT_NAMESPACE,
            token=unquote(parts.password) if parts.password else None,
            secure=parts.scheme == "queens",
        )

    @property
    def url(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.host}:{self.port}"


class Link:
    """One connection to a server, used by one request at a time; it opens again when it was lost, and after a fork."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._pid = 0
        self._headers = {"Content-Type": "application/json"}
        if address.token:
            self._headers["Authorization"] = f"Bearer {address.token}"

    def get(self, path: str, seconds: float = REQUEST_SECONDS) -> bytes:
        """The body of the answer to a GET; raises `RequestError`."""
        return self._request("GET", path, None, seconds)

    def post(self, path: str, body: Any, seconds: float = REQUEST_SECONDS) -> bytes:
        """Send a body as JSON, and return that of the answer; raises `RequestError`."""
        return self._request("POST", path, _encode(body), seconds)

    def delete(self, path: str) -> bytes:
        """Send a DELETE; raises `RequestError`."""
        return self._request("DELETE", path, None, REQUEST_SECONDS)

    def close(self) -> None:
        """Close the connection, from any thread: a request that waits for its answer fails at once."""
        connection = self._connection
        if connection is not None and connection.sock is not None and self._pid == os.getpid():
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _request(self, method: str, path: str, body: bytes | None, seconds: float) -> bytes:
        with self._lock:
            connection = self._open(seconds)
            try:
                connection.request(method, path, body, self._headers)
                response = connection.getresponse()
                answer = response.read()
            except TimeoutError as error:
                self._drop()
                text = f"request timed out after {seconds} s"
                raise QueenTimeoutError(text, method, self.address.url + path) from error
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                text = f"connection failed: {error or type(error).__name__}"
                raise QueenConnectionError(text, method, self.address.url + path) from error
            if response.will_close:
                self._drop()
        if response.status < 300:
            return answer
        retry_after = response.headers.get("Retry-After", "")
        raise error_of_status(response.status, response.reason, answer, retry_after, method, self.address.url + path)

    def _open(self, seconds: float) -> http.client.HTTPConnection:
        connection = self._connection
        if connection is not None and (self._pid != os.getpid() or _is_closed(connection)):
            self._drop()
            connection = None
        if connection is None:
            connection = self._connection = self._create(seconds)
            self._pid = os.getpid()
        connection.timeout = seconds
        if connection.sock is not None:
            connection.sock.settimeout(seconds)
        return connection

    def _create(self, seconds: float) -> http.client.HTTPConnection:
        where = self.address
        if not where.secure:
            return http.client.HTTPConnection(where.host, where.port, timeout=seconds)
        context = ssl.create_default_context()
        if not where.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(where.host, where.port, timeout=seconds, context=context)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            # In a forked child this closes its copy alone; the parent goes on with the connection.
            connection.close()


def _is_closed(connection: http.client.HTTPConnection) -> bool:
    """Whether the server closed an idle connection: nothing but its end can arrive on one that waits for nothing."""
    if connection.sock is None:
        return True
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))
