"""Whether the HTTP port is free, asked before anything slow is started."""

import errno
import socket

from queen.errors import QueenError


def check_port(host: str, port: int) -> None:
    """Raise a QueenError that says why workers could not listen on `host` and `port`, if they could not."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise QueenError(f"HOST={host} is not an address ({error.strerror}): set another") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # Without SO_REUSEPORT, which workers use: with it, a second Queen could share the first one's port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise QueenError(_explain(error, host, port)) from None


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is already in use; choose another with --port or PORT"
    if error.errno == errno.EACCES:
        return f"port {port} is for privileged users only; choose one above 1023 with --port or PORT"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine; choose another with --host or HOST"
    return f"cannot listen on {host}, port {port}: {error.strerror}"
