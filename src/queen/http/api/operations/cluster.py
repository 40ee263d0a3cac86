"""Other hosts: their notifications, and the state shared with them."""

from __future__ import annotations

from queen.broker.broker import Broker
from queen.bus.packets import ROUTE, PacketRefusal, PacketRefused
from queen.errors import Conflict
from queen.http.routing.call import Call
from queen.http.routing.context import Api, Shard
from queen.http.routing.placement import by_queue
from queen.http.routing.route import Media, RouteTable
from queen.http.server.message import Access, HttpError
from queen.wire.api.operations.cluster import QueueConfigCache, Received, ServerHealth, SharedState, Transport, Wake
from queen.wire.push import check_name

routes = RouteTable("System")

_REASONS = {
    PacketRefusal.MALFORMED: (400, "the body is not a packet of another Queen host"),
    PacketRefusal.UNSIGNED: (401, "the packet is not signed: set QUEEN_SYNC_SECRET on the sender, as it is set here"),
    PacketRefusal.FORGED: (401, "the signature is wrong: QUEEN_SYNC_SECRET must be the same on all hosts"),
    PacketRefusal.STALE: (401, "the packet is too old or from the future: synchronise the clocks of both hosts"),
    PacketRefusal.REPLAYED: (401, "the packet has been received before"),
    PacketRefusal.UNEXPECTED: (
        409,
        "this host has no peers: set QUEEN_SYNC_SECRET, or name them in QUEEN_PEERS or QUEEN_UDP_PEERS",
    ),
}


@routes.on_shard(
    "POST",
    "/internal/api/notify",
    access=Access.ADMIN,
    placement=by_queue(),
    summary="Wake waiting pops",
    description="Waiting pops of a queue, or of one partition, look for messages, on every host.",
    body=Wake,
    returns={200: Received},
    errors=(503,),
)
async def notify(shard: Shard, call: Call[None, Wake]) -> Received:
    queue, partition = call.body.queue, call.body.partition
    check_name(queue, "Queue", "queue")
    if partition is not None:
        check_name(partition, "Partition", "partition")
    await shard.broker.notify(queue, partition)
    return Received("ok")


# A signature proves that a packet comes from another host; without a secret, the sender needs the admin role.
@routes.on_worker(
    "POST",
    ROUTE,
    access=lambda api: Access.PUBLIC if api.brokers[0].peers.signed else Access.ADMIN,
    id="hostEvents",
    summary="Receive a packet of another host",
    description="Packets of other hosts, signed with QUEEN_SYNC_SECRET where it is set.",
    body=Media("application/octet-stream"),
    decode=bytes,
    returns={200: Received},
    errors=(401, 409),
)
async def events(api: Api, call: Call[None, bytes]) -> Received:
    peers = api.brokers[0].peers
    if not peers.enabled:
        raise Conflict("QUEEN_SYNC_ENABLED is false on this host: packets are refused")
    try:
        own = peers.receive(call.body)
    except PacketRefused as refused:
        raise HttpError(*_REASONS[refused.reason]) from refused
    return Received("ok", own)


@routes.on_worker(
    "GET",
    "/api/v1/system/shared-state",
    access=Access.ADMIN,
    id="sharedState",
    summary="The state shared with other hosts",
    returns={200: SharedState},
)
@routes.on_worker(
    "GET",
    "/internal/api/shared-state/stats",
    access=Access.ADMIN,
    id="sharedStateStats",
    summary="The state shared with other hosts",
    returns={200: SharedState},
)
@routes.on_worker(
    "GET",
    "/internal/api/inter-instance/stats",
    access=Access.ADMIN,
    id="interInstanceStats",
    summary="The state shared with other hosts",
    returns={200: SharedState},
)
async def show_shared_state(api: Api, call: Call[None, None]) -> SharedState:
    return shared_state(api.brokers[0])


def shared_state(broker: Broker) -> SharedState:
    """The state that this worker shares with other hosts, and their health."""
    stats, catalog = broker.peers.stats(), broker.catalog
    looked_up = catalog.hits + catalog.misses
    return SharedState(
        enabled=stats.enabled,
        running=stats.running,
        server_id=stats.server_id,
        transport=Transport(
            protocols=list(stats.transports),
            listening=stats.listening,
            messages_sent=stats.packets_sent + stats.requests_sent,
            messages_received=stats.packets_received + stats.packets_relayed,
            messages_dropped=sum(stats.dropped.values()),
            dropped_by_reason=dict(stats.dropped),
            own=stats.own,
            events_sent=stats.events_sent,
            events_received=stats.events_received,
            requests_failed=stats.requests_failed,
        ),
        queue_config_cache=QueueConfigCache(
            catalog.size, catalog.hits, catalog.misses, round(catalog.hits / looked_up, 4) if looked_up else 0.0
        ),
        server_health=ServerHealth(
            servers_tracked=stats.servers_tracked,
            servers_alive=stats.servers_alive,
            servers_dead=stats.servers_dead,
            heartbeats_received=stats.heartbeats_received,
            restarts_detected=stats.restarts_detected,
        ),
        maintenance_mode=broker.modes.push_maintenance,
        pop_maintenance_mode=broker.modes.pop_maintenance,
    )
