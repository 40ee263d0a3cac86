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
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from queen.client.errors import QueenConnectionError, QueenTimeoutError, error_of_status

DEFAULT_PORT = 6632
DEFAULT_NAMESPACE = "celery"
REQUEST_SECONDS = 30.0
_RECEIVED_AT_ONCE = 1 << 16
_LONGEST_HEAD = 1 << 16

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
    ca_file: str | None = None
    """The certificate authority that has signed the certificate of the server; None: those that the system trusts."""

    @classmethod
    def of_url(cls, url: str) -> Address:
        """The address in `queen://[:token@]host[:port][/namespace]`; `queens://` is the same with TLS.

        `?ssl_ca_certs=PATH` names the certificate authority, `?ssl_cert_reqs=CERT_NONE` trusts any certificate, as
        Kombu has it for other brokers.
        """
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query))
        return cls(
            host=parts.hostname or "localhost",
            port=parts.port or DEFAULT_PORT,
            namespace=unquote(parts.path).strip("/") or DEFAULT_NAMESPACE,
            token=unquote(parts.password) if parts.password else None,
            secure=parts.scheme == "queens",
            verify=options.get("ssl_cert_reqs") not in ("CERT_NONE", "none"),
            ca_file=options.get("ssl_ca_certs"),
        )

    @property
    def url(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.host}:{self.port}"


class Link:
    """One connection to a server, used by one request at a time; it opens again when it was lost, and after a fork.

    Requests are written and answers are read here and not by `http.client`, which takes longer for both than the
    server takes for a publish.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._wire: _Wire | None = None
        self._pid = 0
        token = f"Authorization: Bearer {address.token}\r\n" if address.token else ""
        if not (token.isascii() and token.rstrip().isprintable()):
            raise ValueError("the token in the URL has characters that a header cannot have")
        where = f"[{address.host}]" if ":" in address.host else address.host
        self._headers = f" HTTP/1.1\r\nHost: {where}:{address.port}\r\n{token}".encode()

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
        wire = self._wire
        if wire is not None and self._pid == os.getpid():
            wire.shut_down()

    def _request(self, method: str, path: str, body: bytes | None, seconds: float) -> bytes:
        start = b"%b %b%b" % (method.encode(), path.encode(), self._headers)
        if body is None:
            sent = start + b"\r\n"
        else:
            sent = b"%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (start, len(body), body)
        with self._lock:
            try:
                wire = self._open(seconds)
                answer = wire.exchange(sent)
            except TimeoutError as error:
                self._drop()
                text = f"request timed out after {seconds} s"
                raise QueenTimeoutError(text, method, self.address.url + path) from error
            except (OSError, ValueError) as error:
                self._drop()
                text = f"connection failed: {str(error) or type(error).__name__}"
                raise QueenConnectionError(text, method, self.address.url + path) from error
            if answer.is_last:
                self._drop()
        if answer.status < 300:
            return answer.body
        reason = http.client.responses.get(answer.status, "")
        url = self.address.url + path
        raise error_of_status(answer.status, reason, answer.body, answer.retry_after, method, url)

    def _open(self, seconds: float) -> _Wire:
        wire = self._wire
        if wire is not None and (self._pid != os.getpid() or wire.is_closed()):
            self._drop()
            wire = None
        if wire is None:
            wire = self._wire = _Wire(self._connect(seconds))
            self._pid = os.getpid()
        wire.set_timeout(seconds)
        return wire

    def _connect(self, seconds: float) -> socket.socket:
        where = self.address
        connection = socket.create_connection((where.host, where.port), seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not where.secure:
            return connection
        context = ssl.create_default_context(cafile=where.ca_file)
        if not where.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        try:
            return context.wrap_socket(connection, server_hostname=where.host)
        except BaseException:
            connection.close()
            raise

    def _drop(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            # In a forked child this closes its copy alone; the parent goes on with the connection.
            wire.close()


class _Answer(NamedTuple):
    status: int
    body: bytes
    is_last: bool
    retry_after: str


class _Wire:
    """HTTP/1.1 over a socket: one request after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._seconds = connection.gettimeout()
        self._received = b""

    def set_timeout(self, seconds: float) -> None:
        if seconds != self._seconds:
            self._seconds = seconds
            self._socket.settimeout(seconds)

    def is_closed(self) -> bool:
        """Whether the server has ended an idle connection: nothing but that can arrive when nothing was asked."""
        return is_readable(self._socket.fileno(), 0.0)

    def exchange(self, request: bytes) -> _Answer:
        """Send a request, and read its answer; raises `OSError`, or `ValueError` for what is no HTTP."""
        self._socket.sendall(request)
        while True:
            head = self._until(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            version, _, rest = first.partition(" ")
            if not version.startswith("HTTP/1."):
                raise ValueError(f"the answer is not HTTP: {first[:80]!r}")
            status = int(rest[:3])
            if status >= 200:
                break
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        is_last = headers.get("connection", "").lower() == "close" or version == "HTTP/1.0"
        if status in (204, 304):
            body = b""
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            body = self._chunks()
        elif "content-length" in headers:
            body = self._exactly(int(headers["content-length"]))
        else:
            body, is_last = self._all(), True
        return _Answer(status, body, is_last, headers.get("retry-after", ""))

    def shut_down(self) -> None:
        """End what waits for an answer, in whatever thread it is."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _until(self, mark: bytes) -> bytes:
        while (end := self._received.find(mark)) < 0:
            if len(self._received) > _LONGEST_HEAD:
                raise ValueError("the head of the answer is too long")
            self._receive()
        found, self._received = self._received[:end], self._received[end + len(mark) :]
        return found

    def _exactly(self, size: int) -> bytes:
        if size <= len(self._received):
            found, self._received = self._received[:size], self._received[size:]
            return found
        parts, missing = [self._received], size - len(self._received)
        self._received = b""
        while missing > 0:
            part = self._socket.recv(min(missing, _RECEIVED_AT_ONCE))
            if not part:
                raise ConnectionResetError("the server ended the connection inside an answer")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self._until(b"\r\n").split(b";")[0], 16):
            parts.append(self._exactly(size))
            self._exactly(2)
        while self._until(b"\r\n"):
            pass
        return b"".join(parts)

    def _all(self) -> bytes:
        parts = [self._received]
        self._received = b""
        while part := self._socket.recv(_RECEIVED_AT_ONCE):
            parts.append(part)
        return b"".join(parts)

    def _receive(self) -> None:
        part = self._socket.recv(_RECEIVED_AT_ONCE)
        if not part:
            raise ConnectionResetError("the server ended the connection without an answer")
        self._received += part


def is_readable(fileno: int, seconds: float | None) -> bool:
    """Whether something can be read within `seconds`; None: wait for it."""
    if not hasattr(select, "poll"):
        # Eventlet takes it away, because it would block all of its green threads; its `select` does not.
        return bool(select.select([fileno], [], [], seconds)[0])
    poll = select.poll()
    poll.register(fileno, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))
