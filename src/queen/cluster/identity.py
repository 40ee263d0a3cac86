"""Who a host is: a number it draws when it is started, which all its workers share."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path


def boot_number(directory: Path) -> int:
    """The number of this start of this host. The first worker draws it, and leaves it in the directory they share."""
    path = directory / "boot"
    draft = directory / f"boot.{os.getpid()}.{secrets.token_hex(4)}"
    draft.write_text(str(draw_number()))
    try:
        # A link appears with its content, and only if nobody was faster.
        path.hardlink_to(draft)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return int(path.read_text())


def draw_number() -> int:
    return secrets.randbits(62)


def server_name(port: int) -> str:
    """What the host calls itself; the same after a restart."""
    return f"{socket.gethostname()}:{port}"
