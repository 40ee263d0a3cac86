"""Structs of the routes about consumer groups."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from queen.errors import BadRequest
from queen.wire.decode import decode_fields
from queen.wire.fields import (
    LARGEST_BIGINT,
    Answer,
    Body,
    Count,
    Limit,
    Offset,
    OptionalName,
    Order,
    Page,
    Pagination,
    Query,
    SnakeAnswer,
    Time,
    Uuid,
)


class GroupSummary(Answer):
    """A group on one queue; `members` counts the partitions it knows, `maxTimeLag` is in seconds.

    Nothing is delivered to it while it is `paused`, or while its queue is (`queuePaused`). `leases` are the partitions
    that are leased to it now, `totalConsumed` the messages that it has acknowledged ever. `namespace` and `task` are
    those of the queue.
    """

    name: str
    topics: list[str]
    queue_name: str
    members: Count
    partitions_with_lag: Count
    total_lag: Count
    max_time_lag: Count
    state: str
    subscription_mode: str | None
    subscription_timestamp: Time | None
    subscription_created_at: Time | None
    paused: bool
    queue_paused: bool
    leases: Count
    total_consumed: Count
    namespace: str
    task: str


class LaggingPartition(SnakeAnswer):
    """A partition on which a group is behind."""

    consumer_group: str
    queue_name: str
    partition_name: str
    partition_id: Uuid
    worker_id: str | None
    offset_lag: Count
    time_lag_seconds: Count
    lag_hours: float
    oldest_unconsumed_at: Time | None
    last_consumed_at: Time | None


class GroupOnPartition(Answer):
    """Where a group is on one partition; `workerId` is the lease it was last given."""

    partition: str
    worker_id: str | None
    last_consumed_at: Time | None
    total_consumed: Count
    offset_lag: Count
    time_lag_seconds: Count
    lease_active: bool


class GroupOnQueue(Answer):
    """Where a group is on the partitions of a queue."""

    partitions: list[GroupOnPartition]


class GroupPartitions(Answer):
    """A page of the partitions of a queue that a group knows, and how many those are."""

    partitions: list[GroupOnPartition]
    total: Count
    pagination: Pagination


class GroupPartitionsQuery(Page):
    """Which partitions are listed, and in which order."""

    search: Annotated[OptionalName, Meta(description="Only partitions with this text in their names, in any case.")] = (
        ""
    )
    sort: Annotated[
        Literal["name", "behind", "consumed", "last"],
        Meta(description="What they are sorted by: names ascending, counts and the time last consumed descending."),
    ] = "name"
    order: Order = None


class GroupPaused(Answer):
    """Whether nothing is delivered to a group from a queue for now, and whether that is a change."""

    success: bool
    consumer_group: str
    queue_name: str
    paused: bool
    changed: bool


class GroupDeleted(Answer):
    """On how many partitions the group was forgotten."""

    success: bool
    consumer_group: str
    deleted_partitions: Count
    metadata_deleted: bool
    queue_name: str | UnsetType = UNSET


class Subscription(Body):
    """When a group is to begin on partitions it has not consumed from."""

    subscription_timestamp: Time


def decode_subscription(body: bytes) -> Subscription:
    timestamp = decode_fields(body, Subscription).get("subscriptionTimestamp")
    if timestamp is None:
        raise BadRequest("Missing subscriptionTimestamp in request body")
    if not isinstance(timestamp, str):
        raise BadRequest(
            f"subscriptionTimestamp must be an ISO-8601 time such as 2026-04-26T10:59:28Z, not {str(timestamp)[:40]}"
        )
    return Subscription(timestamp)


class SubscriptionMoved(Answer):
    """How many subscriptions the group has."""

    success: bool
    consumer_group: str
    new_timestamp: Time
    rows_updated: Count


SeekOffset: TypeAlias = Annotated[
    int,
    Meta(
        ge=0,
        le=LARGEST_BIGINT,
        description="The offset of the next message; on each partition the nearest that it holds.",
    ),
]


SeekPart: TypeAlias = Annotated[
    int, Meta(ge=1, le=100_000, description="Only so many partitions; `cursor` of the answer goes on with the next.")
]
SeekCursor: TypeAlias = Annotated[
    str, Meta(max_length=40, description="`cursor` of the answer to the part before this one.")
]


class Seek(Body):
    """Where to go: to the end, to the beginning, after the last message stored at or before a time, or to an offset."""

    to_end: bool | None = None
    to_beginning: bool | None = None
    timestamp: Time | None = None
    offset: SeekOffset | None = None
    limit: SeekPart | None = None
    cursor: SeekCursor = ""


class SeekUndo(Body):
    """Which seek is undone."""

    seek_id: Annotated[int, Meta(ge=1, le=LARGEST_BIGINT)]
    limit: SeekPart | None = None
    cursor: SeekCursor = ""


Within: TypeAlias = Annotated[
    int,
    Meta(
        ge=0,
        le=60_000,
        description="Milliseconds. If counting takes longer, an estimate; a later request gets the exact count.",
    ),
]


class SeekPreviewQuery(Query):
    """Where to go, as in the body of a seek."""

    to_end: Annotated[bool, Meta(description="To the end.")] = False
    to_beginning: Annotated[bool, Meta(description="To the beginning.")] = False
    timestamp: Annotated[datetime | None, Meta(description="After the last message stored at or before this time.")] = (
        None
    )
    offset: SeekOffset | None = None
    partition: Annotated[OptionalName, Meta(description="Only this partition.")] = ""
    limit: Limit = 100
    within: Within | None = None


class Sought(Answer):
    """On how many partitions the group was moved; `seekId` undoes it, `cursor` goes on where a part has ended."""

    success: bool
    consumer_group: str
    queue_name: str
    seek_to_end: bool
    target_timestamp: Time | None
    partitions_updated: Count
    seek_id: int | None
    cursor: str | None


class SeekUndone(Answer):
    """On how many partitions the group is back where it was; the undoing is a seek itself, and can be undone."""

    success: bool
    consumer_group: str
    queue_name: str
    partitions_updated: Count
    seek_id: int | None
    cursor: str | None


class KeptSeek(Answer):
    """A seek whose positions are kept: where it went, and on how many partitions the group was elsewhere before."""

    seek_id: int
    at: Time
    target: str
    partition: str | None
    partitions_changed: Count
    undone_by: int | None


class KeptSeeks(Answer):
    """Seeks of a group on a queue, the newest first."""

    seeks: list[KeptSeek]


class PartitionSought(Answer):
    """Whether the group was known there, the time of the partition's newest message, and where the group is now."""

    success: bool
    consumer_group: str
    queue_name: str
    partition_name: str
    updated: bool
    cursor_moved_to: Time | None
    offset: Count | None
    seek_id: int | None


class PartitionMove(Answer):
    """What a seek would do on a partition: from which offset to which, and how many messages that concerns."""

    partition: str
    partition_id: Uuid
    position: Count
    target: Count
    redelivered: Count
    skipped: Count
    leased: bool


class SeekPreview(Answer):
    """What a seek would do: messages that would come again, messages that would be skipped, leases that would end.

    `partitions` are those with the largest effect; the sums are over all. They are estimates of a sample, and
    `partitions` empty, unless `exact`.
    """

    consumer_group: str
    queue_name: str
    redelivered: Count
    skipped: Count
    leases: Count
    partitions_changed: Count
    partitions_known: Count
    exact: bool
    partitions: list[PartitionMove]


class Release(Body):
    """Which lease is meant; without an id, the one there is."""

    lease_id: Uuid | None = None


class LeaseReleased(Answer):
    """The lease that has ended, and how many messages the partition has for the group now."""

    success: bool
    consumer_group: str
    queue_name: str
    partition_name: str
    lease_id: Uuid
    available: Count


class GroupPage(Answer, rename=None):
    """A page of groups; `total` counts each with each of its queues, `groups` once."""

    consumer_groups: list[GroupSummary]
    total: Count
    groups: Count
    pagination: Pagination


class GroupsQuery(Query):
    """Which groups are listed; all of them, as a bare list, unless `limit` or `offset` is sent."""

    group: Annotated[OptionalName, Meta(description="Only this group.")] = ""
    queue: Annotated[OptionalName, Meta(description="Only on this queue.")] = ""
    search: Annotated[
        OptionalName, Meta(description="Only those with this text in the name of the group or queue, in any case.")
    ] = ""
    namespace: Annotated[OptionalName, Meta(description="Only on queues of this namespace.")] = ""
    task: Annotated[OptionalName, Meta(description="Only on queues of this task.")] = ""
    lagging: Annotated[bool, Meta(description="Only groups that have messages left to consume.")] = False
    sort: Annotated[
        Literal["name", "queue", "lag", "time"],
        Meta(description="What they are sorted by: names ascending, `lag` in messages and in `time` descending."),
    ] = "name"
    order: Order = None
    limit: Limit | None = None
    offset: Offset | None = None


class LaggingQuery(Page):
    """Which partitions are listed."""

    min_lag_seconds: Annotated[
        int, Meta(ge=0, le=10**12 - 1, description="Only partitions on which the lag is larger, in seconds.")
    ] = 3600


class DeleteGroupQuery(Query):
    """What is deleted."""

    delete_metadata: Annotated[bool, Meta(description="Whether subscriptions are deleted too.")] = True
