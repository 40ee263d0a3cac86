"""Descriptions of what concerns consumer groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import UNSET, Meta, UnsetType

from queen.http.openapi.operation import (
    DATABASE,
    FOUND,
    Answer,
    Body,
    Count,
    Operation,
    Parameter,
    SnakeAnswer,
    Time,
    Uuid,
    paging,
)

_TAG: Final = "Consumer groups"
_GROUP: Final = "/api/v1/consumer-groups/{group}"
_QUEUE: Final = f"{_GROUP}/queues/{{queue}}"


class GroupSummary(Answer):
    """A group on one queue; `members` counts the partitions it knows, `maxTimeLag` is in seconds."""

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


class SubscriptionMoved(Answer):
    """How many subscriptions the group has."""

    success: bool
    consumer_group: str
    new_timestamp: Time
    rows_updated: Count


class Seek(Body):
    """Where to go: to the end, or after the last message stored at or before a time."""

    to_end: bool | None = None
    timestamp: Time | None = None


class Sought(Answer):
    """On how many partitions the group was moved."""

    success: bool
    consumer_group: str
    queue_name: str
    seek_to_end: bool
    target_timestamp: Time | None
    partitions_updated: Count


class PartitionSought(Answer):
    """Whether the group was known there, and the time of the last message it skipped."""

    success: bool
    consumer_group: str
    queue_name: str
    partition_name: str
    updated: bool
    cursor_moved_to: Time | None


_DELETE_METADATA: Final = Parameter("deleteMetadata", "Forget subscriptions too.", bool, True)

OPERATIONS: Final[Mapping[str, Operation]] = {
    "GET /api/v1/consumer-groups": Operation(
        id="groups",
        summary="List consumer groups",
        description="One entry for each group and queue. Consumers that name no group are `__QUEUE_MODE__`.",
        tag=_TAG,
        answers={200: list[GroupSummary]},
        errors=DATABASE,
    ),
    "GET /api/v1/consumer-groups/lagging": Operation(
        id="laggingPartitions",
        summary="Partitions on which a group is behind",
        description="The furthest behind first.",
        tag=_TAG,
        parameters=(
            Parameter("minLagSeconds", "Behind by more than this.", Annotated[int, Meta(ge=0, lt=10**12)], 3600),
            *paging(1000),
        ),
        answers={200: list[LaggingPartition]},
        errors=DATABASE,
    ),
    f"GET {_GROUP}": Operation(
        id="group",
        summary="Where a group is, by queue",
        description="Empty when nobody knows the group.",
        tag=_TAG,
        answers={200: dict[str, GroupOnQueue]},
        errors=DATABASE,
    ),
    f"DELETE {_GROUP}": Operation(
        id="deleteGroup",
        summary="Forget where a group is, on all queues",
        tag=_TAG,
        parameters=(_DELETE_METADATA,),
        answers={200: GroupDeleted},
        errors=DATABASE,
    ),
    f"DELETE {_QUEUE}": Operation(
        id="deleteGroupForQueue",
        summary="Forget where a group is, on one queue",
        tag=_TAG,
        parameters=(_DELETE_METADATA,),
        answers={200: GroupDeleted},
        errors=DATABASE,
    ),
    f"POST {_GROUP}/subscription": Operation(
        id="moveSubscription",
        summary="Change when a group begins",
        description="Only on partitions it has not consumed from yet.",
        tag=_TAG,
        body=Subscription,
        body_example={"subscriptionTimestamp": "2026-04-26T10:59:28Z"},
        answers={200: SubscriptionMoved},
        errors=DATABASE,
    ),
    f"POST {_QUEUE}/seek": Operation(
        id="seek",
        summary="Move a group on a queue",
        description="Leases of the group end. One of `toEnd: true` and `timestamp` is needed.",
        tag=_TAG,
        body=Seek,
        body_example={"timestamp": "2026-04-26T10:59:28Z"},
        answers={200: Sought},
        errors=DATABASE,
    ),
    f"POST {_QUEUE}/partitions/{{partition}}/seek": Operation(
        id="seekPartition",
        summary="Have a group skip all there is on one partition",
        tag=_TAG,
        answers={200: PartitionSought},
        errors=FOUND,
    ),
}
