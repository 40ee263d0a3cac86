"""Where the other hosts are: names are looked up again and again, because pods come late and move."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from queen.setting_kinds import split_host_port

log = logging.getLogger(__name__)

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[tuple[socket.AddressFamily, str]]]]

_LOOK_UP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Address:
    """A place datagrams are sent to."""

    family: socket.AddressFamily
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class AddressBook:
    """The addresses of peers given as `host` or `host:port`. A name with several addresses stands for all of them."""

    def __init__(self, peers: Sequence[str], default_port: int, resolve: Resolve | None = None) -> None:
        self._resolve = resolve or _resolve
        self._peers = [(host, port or default_port) for host, port in map(split_host_port, peers)]
        self._found: dict[tuple[str, int], list[Address]] = {}
        self._failing: set[tuple[str, int]] = set()
        self.addresses: tuple[Address, ...] = ()

    async def keep_up(self) -> None:
        """Look all names up, for ever."""
        while True:
            await self.look_up()
            await asyncio.sleep(_LOOK_UP_SECONDS)

    async def look_up(self) -> None:
        await asyncio.gather(*(self._look_up(*peer) for peer in self._peers))
        # The same place may have several names.
        self.addresses = tuple(dict.fromkeys(address for peer in self._peers for address in self._found.get(peer, ())))

    async def _look_up(self, host: str, port: int) -> None:
        peer = (host, port)
        try:
            found = await self._resolve(host, port)
        except OSError as error:
            # What it was is kept: an answer that fails says nothing about the host.
            if peer not in self._failing:
                log.warning("the peer %s cannot be looked up: %s; trying again soon", host, error)
                self._failing.add(peer)
            return
        self._failing.discard(peer)
        places = sorted((Address(family, place, port) for family, place in found), key=str)
        # One way to reach it is enough.
        preferred = [place for place in places if place.family == socket.AF_INET] or places
        if preferred != self._found.get(peer):
            log.info("the peer %s is at %s", host, ", ".join(map(str, preferred)))
            self._found[peer] = preferred


async def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    return [(family, str(where[0])) for family, _, _, _, where in found]
