"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from typing import Final

_OWN: Final = range(20_000, 32_000)
"""Below those that the kernel gives to connections: one of these could take a port before its server has it, or between
the death of a server and its return."""


def free_port() -> int:
    """A port of this host that nobody listens on."""
    while True:
        port = random.choice(_OWN)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
