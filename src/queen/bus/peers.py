"""The other hosts on the same PostgreSQL: sending them events, and receiving theirs.

Every worker sends its own events. A packet is received by one worker (UDP: the one that has the host's port, HTTP: the
one that accepted the connection), which validates it and relays it to the others over the local bus. Nothing is relayed
to a third host. All of it is for speed: what is lost is found by the safety poll and the change log.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import ssl
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from queen.bus.members import Members, PeerStats, Traffic
from queen.bus.packets import (
    Event,
    Heartbeat,
    Packet,
    PacketRefusal,
    PacketRefused,
    PacketSigner,
    PacketValidator,
    PacketWriter,
    boot_number,
    decode,
    is_frame,
    plain_frame,
    server_name,
)
from queen.bus.udp import DATAGRAM_BYTES, Address, AddressBook, UdpLeader, UdpSocket
from queen.errors import SettingsError
from queen.settings import Settings

if TYPE_CHECKING:
    from queen.bus.http_peer import HttpPeer

log = logging.getLogger(__name__)

_STAND_SECONDS = 0.25
_LEAVE_SECONDS = 0.5
# What the workers of a host pass on to each other needs no signature.
_BARE = PacketSigner(())


class Peers:
    """One worker's connection to other hosts."""

    def __init__(
        self,
        settings: Settings,
        runtime_dir: Path,
        relay: Callable[[bytes], None],
        deliver: Callable[[Sequence[Event]], None],
    ) -> None:
        """`relay` passes a frame on to the other workers of this host; `deliver` takes in events of other hosts."""
        self.enabled = settings.queen_sync_enabled
        self.name = server_name(settings.port)
        self._relay = relay
        self._deliver = deliver
        self._signer = PacketSigner([bytes.fromhex(key) for key in settings.queen_sync_secret])
        self._validator = PacketValidator(self._signer)
        self._dead_after = settings.queen_sync_dead_threshold_ms / 1000
        self._beat_seconds = settings.queen_sync_heartbeat_ms / 1000
        self._members = Members(self._dead_after)
        self._leader = UdpLeader(runtime_dir)
        self._traffic = Traffic()
        self._boot = boot_number(runtime_dir)
        writer = self._writer = PacketWriter(self._boot, self._signer)
        self._book = AddressBook(settings.queen_udp_peers, settings.queen_udp_notify_port)
        self._udp: UdpSocket | None = None
        if self.enabled and settings.queen_udp_peers:
            self._udp = UdpSocket(
                settings.host or "0.0.0.0", settings.queen_udp_notify_port, self._arrived, self._traffic
            )
        batch = settings.peer_notify_batch_ms / 1000
        self._http: list[HttpPeer] = []
        if self.enabled and settings.queen_peers:
            # An HTTP client is 10 MB of memory that few workers have a use for.
            from queen.bus.http_peer import HttpPeer

            read_tls = partial(_peer_tls, settings)
            read_tls()
            self._http = [
                HttpPeer(url, self.name, writer, self._traffic, batch_seconds=batch, read_tls=read_tls)
                for url in settings.queen_peers
            ]
        self.active = self._udp is not None or bool(self._http)
        """Whether peers are configured."""
        # Addresses that have turned out to be this host's own, and when.
        self._own: dict[str, float] = {}
        self._pending: list[Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def signed(self) -> bool:
        """Whether hosts share a secret, so that what comes in proves where it is from."""
        return self._signer.signs

    def start(self) -> None:
        if self.active and not self.signed:
            log.warning("QUEEN_SYNC_SECRET is not set: packets of other hosts are accepted without a signature")
        if self._udp is not None:
            self._spawn(self._book.keep_up())
        for peer in self._http:
            self._spawn(peer.post_events())
            self._spawn(self._keep_beating(peer))
        if self.active:
            self._spawn(self._lead())

    async def stop(self) -> None:
        """Send a last heartbeat that says so, and close."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._flush()
        if self._leader.elected:
            self._beat_udp(leaving=True)
            goodbyes = [peer.post_heartbeat(leaving=True) for peer in self._http]
            try:
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await asyncio.gather(*goodbyes)
            except TimeoutError:
                log.debug("peer could not be notified in time that this host stops")
        for peer in self._http:
            await peer.close()
        if self._udp is not None:
            self._udp.close()
        self._leader.close()

    def publish(self, events: Sequence[Event]) -> None:
        """Send events to every other host; those of one iteration of the event loop go together."""
        if not self.active or not events:
            return
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending += events

    def receive(self, frame: bytes) -> bool:
        """Take in a frame from the network; whether it is this host's own. Raises `PacketRefused`, which is counted."""
        self._traffic.packets_received += 1
        try:
            if not self.signed and not self.active:
                # Without a secret and without peers no packet is expected.
                raise PacketRefused(PacketRefusal.UNEXPECTED)
            packet, body = self._validator.admit(frame)
        except PacketRefused as refused:
            self._traffic.dropped[refused.reason.value] += 1
            raise
        if packet.boot != self._boot or packet.heartbeat is not None:
            self._relay(plain_frame(body))
        return self._take_in(packet)

    def take_relayed(self, frame: bytes) -> None:
        """Take in what another worker of this host received and checked."""
        self._traffic.packets_relayed += 1
        try:
            packet = decode(_BARE.verify(frame))
        except PacketRefused as refused:
            # A worker of another version, during an upgrade.
            self._traffic.dropped[refused.reason.value] += 1
            return
        self._validator.note(packet)
        self._take_in(packet)

    def stats(self) -> PeerStats:
        """Statistics of the other hosts."""
        tracked = self._members.count(_now())
        return PeerStats(
            enabled=self.enabled,
            running=bool(self._tasks),
            server_id=self.name,
            transports=(*(("udp",) if self._udp else ()), *(("http",) if self._http else ())),
            listening=self._udp is not None and self._udp.listening,
            servers_tracked=tracked.tracked,
            servers_alive=tracked.alive,
            servers_dead=tracked.dead,
            heartbeats_received=self._members.heartbeats,
            restarts_detected=self._members.restarts,
            **dataclasses.asdict(self._traffic) | {"dropped": dict(self._traffic.dropped)},
        )

    def _flush(self) -> None:
        events, self._pending = list(dict.fromkeys(self._pending)), []
        if not events:
            return
        for peer in self._http:
            peer.publish(events)
        addresses = self._others()
        if self._udp is None or not addresses:
            return
        self._traffic.events_sent += len(events)
        for frame, _ in self._writer.events(events, DATAGRAM_BYTES):
            for address in addresses:
                self._udp.send(frame, address)

    def _others(self) -> list[Address]:
        """The addresses of other hosts, resolved again after a while: an address may belong to another host by then."""
        if not self._own:
            return list(self._book.addresses)
        recent = _now() - self._dead_after
        return [address for address in self._book.addresses if self._own.get(str(address), -math.inf) < recent]

    def _arrived(self, frame: bytes) -> None:
        try:
            self.receive(frame)
        except PacketRefused as refused:
            log.debug("datagram dropped: %s", refused.reason.value)

    def _take_in(self, packet: Packet) -> bool:
        now = _now()
        if packet.boot == self._boot:
            self._traffic.own += 1
            if packet.heartbeat is not None:
                self._own[packet.heartbeat.to] = now
            return True
        self._members.received(packet, now)
        if packet.events:
            self._traffic.events_received += len(packet.events)
            self._deliver(packet.events)
        return False

    async def _lead(self) -> None:
        """Stand for UDP leader; as leader, listen and send heartbeats."""
        beat_at = 0.0
        while True:
            now = _now()
            if self._leader.try_acquire():
                if self._udp is not None:
                    self._udp.listen()
                if now >= beat_at:
                    self._beat_udp()
                    beat_at = now + self._beat_seconds
            self._members.settle(now)
            await asyncio.sleep(min(_STAND_SECONDS, self._beat_seconds))

    def _beat_udp(self, *, leaving: bool = False) -> None:
        # To every address, this host's own too: that is how it is known.
        for address in self._book.addresses if self._udp else ():
            assert self._udp is not None
            self._udp.send(self._writer.heartbeat(Heartbeat(self.name, str(address), leaving)), address)

    async def _keep_beating(self, peer: HttpPeer) -> None:
        """Heartbeats come from the leader; another worker only has to find out whether the peer is this host."""
        while True:
            if self._leader.elected or peer.is_self is None:
                await peer.post_heartbeat()
            await asyncio.sleep(self._beat_seconds)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(_ended)
        self._tasks.append(task)


def _peer_tls(settings: Settings) -> ssl.SSLContext | None:
    """How peers at https:// are verified, and shown who calls; None: as any other server."""
    if not settings.peer_ca:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.peer_ca)
        if settings.tls_cert and settings.tls_key:
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        raise SettingsError(f"PEER_CA={settings.peer_ca}: expected certificates in PEM: {error.strerror}") from None
    return context


def is_relayed(data: bytes) -> bool:
    """Whether a datagram of the local bus is a packet of another host."""
    return is_frame(data)


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("background task for other hosts failed", exc_info=task.exception())


def _now() -> float:
    return asyncio.get_running_loop().time()


# Names hold no control characters, so no name begins with this.
_MARK: Final = "\x01"
_SHARD_DIGITS: Final = 4


class ShardPeers(Peers):
    """Sends the events of one shard through the peers of the first, which also receive for all."""

    def __init__(self, settings: Settings, runtime_dir: Path, first: Peers, shard: int) -> None:
        alone = dataclasses.replace(settings, queen_sync_enabled=False)
        super().__init__(alone, runtime_dir, relay=lambda frame: None, deliver=lambda events: None)
        self._first = first
        self._shard = shard
        self.active = first.active

    def start(self) -> None:
        return

    def publish(self, events: Sequence[Event]) -> None:
        self._first.publish([(*event[:5], f"{_MARK}{self._shard}{_MARK}{event[5]}") for event in events])


def by_shard(events: Sequence[Event]) -> dict[int, list[Event]]:
    """Events as their shards know them."""
    found: dict[int, list[Event]] = {}
    for event in events:
        shard = 0
        if event[5].startswith(_MARK):
            number, _, name = event[5][1:].partition(_MARK)
            if not (number.isascii() and number.isdigit() and len(number) <= _SHARD_DIGITS):
                continue
            shard, event = int(number), (*event[:5], name)
        found.setdefault(shard, []).append(event)
    return found
