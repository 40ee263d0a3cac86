"""Ephemeral queues."""

from __future__ import annotations

import asyncio
from typing import Final

from queen.http.auth import names
from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import FIRST_SHARD
from queen.http.routing.route import DATABASE, FOUND, RouteTable
from queen.http.server.message import Access
from queen.wire.state.ephemeral import (
    EphemeralAckBody,
    EphemeralAcked,
    EphemeralConfigureBody,
    EphemeralConfigured,
    EphemeralDeleted,
    EphemeralDepth,
    EphemeralPopped,
    EphemeralPopQuery,
    EphemeralPushBody,
    EphemeralPushed,
    EphemeralQueueBody,
    EphemeralQueues,
    EphemeralQueuesQuery,
    EphemeralReset,
)

routes = RouteTable("Ephemeral")

_ROOT: Final = "/api/v1/ephemeral"


@routes.on_shard(
    "POST",
    f"{_ROOT}/configure",
    access=Access.READ_WRITE,
    names=names.queue_and_group,
    audited=True,
    placement=FIRST_SHARD,
    id="configureEphemeral",
    summary="Declare an ephemeral queue",
    description="Its messages are lost when PostgreSQL crashes or fails over, what it is declared with is not. A queue "
    "that is not declared is made by the first push, and forgotten an hour after the last.",
    body=EphemeralConfigureBody,
    body_example={"queue": "presence", "options": {"maxLength": 1000, "policy": "dropOldest", "ttlSeconds": 30}},
    returns={200: EphemeralConfigured},
    errors=DATABASE,
)
async def configure(shard: Shard, call: Call[None, EphemeralConfigureBody]) -> EphemeralConfigured:
    return await shard.broker.ephemeral.configure(call.body.queue, call.body.options)


@routes.on_shard(
    "POST",
    f"{_ROOT}/push",
    access=Access.READ_WRITE,
    names=names.queue_and_group,
    of_groups=False,
    placement=FIRST_SHARD,
    id="pushEphemeral",
    summary="Push messages to an ephemeral queue",
    description="All of them, or with 429 none: the queue is full, and its `policy` is `reject`.",
    body=EphemeralPushBody,
    body_example={"queue": "presence", "partition": "room-7", "messages": [{"payload": {"user": "a"}}]},
    returns={201: EphemeralPushed},
    errors=(429, 503),
)
async def push(shard: Shard, call: Call[None, EphemeralPushBody]) -> EphemeralPushed:
    return await shard.broker.ephemeral.push(call.body)


@routes.on_shard(
    "GET",
    f"{_ROOT}/pop",
    access=Access.READ_WRITE,
    names=names.by_query("queue", "group"),
    placement=FIRST_SHARD,
    id="popEphemeral",
    summary="Pop from an ephemeral queue",
    description="Every group gets every message, and each once unless it fails. Without a group, all share one.",
    query=EphemeralPopQuery,
    returns={200: EphemeralPopped},
    errors=DATABASE,
)
async def pop(shard: Shard, call: Call[EphemeralPopQuery, None]) -> EphemeralPopped:
    popping = asyncio.ensure_future(shard.broker.ephemeral.pop(call.query))
    call.request.on_disconnect(popping.cancel)
    return await popping


@routes.on_shard(
    "POST",
    f"{_ROOT}/ack",
    access=Access.READ_WRITE,
    names=names.queue_and_group,
    placement=FIRST_SHARD,
    id="ackEphemeral",
    summary="Acknowledge messages of an ephemeral queue",
    body=EphemeralAckBody,
    body_example={"queue": "presence", "acks": [{"id": "e:9f1:room-7:12", "status": "completed"}]},
    returns={200: EphemeralAcked},
    errors=DATABASE,
)
async def ack(shard: Shard, call: Call[None, EphemeralAckBody]) -> EphemeralAcked:
    return await shard.broker.ephemeral.ack(call.body)


@routes.on_shard(
    "POST",
    f"{_ROOT}/reset",
    access=Access.READ_WRITE,
    names=names.queue_and_group,
    audited=True,
    placement=FIRST_SHARD,
    id="resetEphemeral",
    summary="Drop all messages of an ephemeral queue",
    body=EphemeralQueueBody,
    body_example={"queue": "presence"},
    returns={200: EphemeralReset},
    errors=DATABASE,
)
async def reset(shard: Shard, call: Call[None, EphemeralQueueBody]) -> EphemeralReset:
    return await shard.broker.ephemeral.reset(call.body.queue)


@routes.on_shard(
    "DELETE",
    f"{_ROOT}/queue/{{queue}}",
    access=Access.READ_WRITE,
    audited=True,
    placement=FIRST_SHARD,
    id="deleteEphemeral",
    summary="Delete an ephemeral queue",
    returns={200: EphemeralDeleted},
    errors=DATABASE,
)
async def delete(shard: Shard, call: Call[None, None]) -> EphemeralDeleted:
    return await shard.broker.ephemeral.delete(call.name("queue"))


@routes.on_shard(
    "GET",
    f"{_ROOT}/queues",
    access=Access.READ_ONLY,
    placement=FIRST_SHARD,
    id="ephemeralQueues",
    summary="The ephemeral queues",
    query=EphemeralQueuesQuery,
    returns={200: EphemeralQueues},
    errors=DATABASE,
)
async def queues(shard: Shard, call: Call[EphemeralQueuesQuery, None]) -> EphemeralQueues:
    return await shard.broker.ephemeral.queues(call.query.search, call.query.limit, call.query.offset)


@routes.on_shard(
    "GET",
    f"{_ROOT}/queues/{{queue}}/depth",
    access=Access.READ_ONLY,
    placement=FIRST_SHARD,
    id="ephemeralDepth",
    summary="How many messages an ephemeral queue holds, by partition and group",
    returns={200: EphemeralDepth},
    errors=FOUND,
)
async def depth(shard: Shard, call: Call[None, None]) -> EphemeralDepth:
    return await shard.broker.ephemeral.depth(call.name("queue"))
