"""Ports for servers that tests start."""

from __future__ import annotations

import itertools
import os
import random
import socket
from typing import Final

_OWN: Final = range(20_000, 32_000)
"""Below those that the kernel gives to connections: one of these could take a port before its server has it, or between
the death of a server and its return."""
_PROCESSES: Final = 12
"""Each process of a test run has its own range of ports: between the search and the start no process holds the port."""


def _candidates() -> list[int]:
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = list(_OWN[number % _PROCESSES :: _PROCESSES])
    random.shuffle(own)
    return own


_ports: Final = itertools.cycle(_candidates())


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """A free port of this host that this process has not been given before."""
    for port in _ports:
        with socket.socket(type=kind) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("a cycle has no end")
