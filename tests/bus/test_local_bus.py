"""The bus among the workers of one host."""

from __future__ import annotations

from pathlib import Path

from queen.bus.local_bus import LocalBus
from tests.support.ageing import until

MORE_THAN_A_SOCKET_TAKES = 2000


async def test_a_busy_worker_gets_every_datagram_in_order_but_no_late_hints(tmp_path: Path) -> None:
    heard: list[bytes] = []
    sender = LocalBus(tmp_path, 0, 2, lambda datagram: None)
    receiver = LocalBus(tmp_path, 1, 2, heard.append)
    sender.start()
    receiver.start()
    try:
        sender.hint(b"in time")
        told = [b"%d" % number for number in range(MORE_THAN_A_SOCKET_TAKES)]
        for datagram in told:
            sender.send(datagram)
        sender.hint(b"late")

        async def all_heard() -> bool:
            return len(heard) > len(told)

        await until(all_heard)
        sender.send(b"the end")
        receiver.drain()
    finally:
        sender.close()
        receiver.close()
    assert heard == [b"in time", *told, b"the end"]
    assert sender.dropped == 1
