"""A TCP proxy that cuts, stalls and delays: in front of PostgreSQL, or of whatever else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlencode, urlsplit

from queen.storage.database import HEARTBEAT_SESSION

Chooses = Callable[[bytes], bool]


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class TcpProxy:
    """Stands between a client and what `connect` reaches, and harms the connections on demand."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._server: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.refusing = False
        self.delay = 0.0
        self.lost_answers = 0
        self.answered_bytes = 0
        self.harmed = 0
        """Connections cut or refused, and chunks delayed, held up or swallowed."""
        self._to_lose = 0
        self._of: Chooses = lambda sent: True
        self._within = b""

    @property
    def port(self) -> int:
        """Where clients connect to."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.flowing.set()
        self.cut()

    def cut(self, every: int = 1) -> None:
        """End every connection (or one of so many) at once, in whatever state it is."""
        for pair in sorted(self._pairs, key=id)[::every]:
            self.harmed += 1
            pair.cut()

    def half_open(self, every: int = 1) -> int:
        """Of every so many connections one is dead and does not say so: nothing comes of what is sent; how many are."""
        chosen = sorted(self._pairs, key=id)[::every]
        for pair in chosen:
            pair.go_silent()
        return len(chosen)

    def cut_silent(self) -> None:
        """End the connections that are half open, as a router does that knows nothing of them."""
        for pair in list(self._pairs):
            if pair.silent:
                pair.cut()

    def lose_answers(self, count: int, of: Chooses = lambda sent: True) -> None:
        """The next answers to chosen statements (by the bytes sent for them) break off in the middle.

        What was asked for has happened by then, and the client cannot know.
        """
        self._to_lose, self._of, self._within = count, of, b""

    def lose_commit(self, within: bytes) -> None:
        """The next answer to the commit of a transaction that has sent these bytes breaks off, and of no other one."""
        self._to_lose, self._of, self._within = 1, lambda sent: b"COMMIT" in sent, within

    @asynccontextmanager
    async def stalled(self) -> AsyncIterator[None]:
        """No byte goes either way while the block runs."""
        self.flowing.clear()
        try:
            yield
        finally:
            self.flowing.set()

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Every connection is cut, and no other is made while the block runs."""
        self.refusing = True
        self.cut()
        try:
            yield
        finally:
            self.refusing = False

    def loses(self, sent: bytes, transaction: bytes) -> bool:
        if self._to_lose and self._of(sent) and self._within in transaction:
            self._to_lose -= 1
            self.lost_answers += 1
            self.harmed += 1
            return True
        return False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            self.harmed += 1
            writer.transport.abort()
            return
        try:
            upstream_reader, upstream_writer = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(self, writer, upstream_writer)
        if self.refusing:
            # It was being made while all others were cut.
            self.harmed += 1
            pair.cut()
            return
        self._pairs.add(pair)
        try:
            await asyncio.gather(pair.carry_questions(reader), pair.carry_answers(upstream_reader))
        finally:
            self._pairs.discard(pair)
            pair.cut()


class Proxy(TcpProxy):
    """Stands in front of the PostgreSQL at a unix socket."""

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        where = parse_qs(parts.query)
        target = f"{where['host'][0]}/.s.PGSQL.{where['port'][0]}"
        self._user, self._database = parts.netloc.removesuffix("@"), parts.path
        super().__init__(lambda: asyncio.open_unix_connection(target))

    @property
    def dsn(self) -> str:
        """Where clients connect to."""
        where = urlencode({"host": "127.0.0.1", "port": self.port, "sslmode": "disable"})
        return f"postgresql://{self._user}@{self._database}?{where}"


@asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[Proxy]:
    """A proxy in front of a database while the block runs."""
    proxy = Proxy(dsn)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


class _Pair:
    """A connection of a client and the one made for it behind the proxy."""

    def __init__(self, proxy: TcpProxy, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._sent = b""
        self._transaction = b""
        """What was sent since the last transaction began."""
        # The heartbeat goes on beside whatever a test does: its answers are not those that are to be lost.
        self._watches = False
        self._ended = False
        self.silent = False
        """Whether it is half open."""

    def go_silent(self) -> None:
        """From now on nothing passes in either direction, and neither end is closed."""
        self.silent = True

    async def carry_questions(self, reader: asyncio.StreamReader) -> None:
        async for chunk in self._chunks(reader):
            self._sent += chunk
            self._server.write(chunk)

    async def carry_answers(self, reader: asyncio.StreamReader) -> None:
        async for chunk in self._chunks(reader):
            sent, self._sent = self._sent, b""
            self._proxy.answered_bytes += len(chunk)
            if b"application_name\0" + HEARTBEAT_SESSION.encode() in sent:
                self._watches = True
            self._transaction = sent if b"BEGIN" in sent else self._transaction + sent if self._transaction else b""
            if not self._watches and self._proxy.loses(sent, self._transaction):
                self._break_off(chunk[: len(chunk) // 2])
                return
            self._client.write(chunk)

    async def _chunks(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """What comes in, held up as long as the proxy says. At its end both connections end."""
        try:
            while chunk := await reader.read(65536):
                if self._proxy.delay or self.silent or not self._proxy.flowing.is_set():
                    self._proxy.harmed += 1
                if self._proxy.delay:
                    await asyncio.sleep(self._proxy.delay)
                await self._proxy.flowing.wait()
                if self._ended:
                    return
                if not self.silent:
                    yield chunk
        except ConnectionError:
            return
        finally:
            self.cut()

    def cut(self) -> None:
        if not self._ended:
            self._ended = True
            self._client.transport.abort()
            self._server.transport.abort()

    def _break_off(self, rest: bytes) -> None:
        """End both connections, but let the client have a few bytes more."""
        self._ended = True
        self._client.write(rest)
        self._client.close()
        self._server.transport.abort()
