"""Administration and observation: what there is, how it does, and how to change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Self, TypeVar
from urllib.parse import urlencode

from queen.client.config import ClientLog
from queen.client.errors import QueenError
from queen.client.http import HttpClient
from queen.client.types import DEFAULT_PARTITION, DLQResponse
from queen.wire.paths import path_of


class DlqOptions:
    """Which dead letters to get: of one queue, narrowed down by group, partition and time of failure."""

    def __init__(self, http: HttpClient, log: ClientLog, strict: bool, queue: str, group: str | None, partition: str):
        self._http = http
        self._log = log
        self._strict = strict
        self._parameters: dict[str, str | int] = {"queue": queue, "limit": 100, "offset": 0}
        if group:
            self._parameters["consumerGroup"] = group
        if partition != DEFAULT_PARTITION:
            self._parameters["partition"] = partition

    def limit(self, count: int) -> Self:
        """At most `count`."""
        self._parameters["limit"] = max(1, count)
        return self

    def offset(self, count: int) -> Self:
        """Leave out the first."""
        self._parameters["offset"] = max(0, count)
        return self

    def from_(self, timestamp: str) -> Self:
        """Those that failed at this time (ISO 8601) or later."""
        self._parameters["from"] = timestamp
        return self

    def to(self, timestamp: str) -> Self:
        """Those that failed at this time (ISO 8601) or before."""
        self._parameters["to"] = timestamp
        return self

    async def _get(self) -> DLQResponse:
        try:
            answer = await self._http.request("GET", f"/api/v1/dlq?{urlencode(self._parameters)}")
        except QueenError as error:
            if self._strict:
                raise
            self._log.warning("DlqQuery.get", f"the dead letters cannot be read: {error}")
            answer = None
        nothing: DLQResponse = {"messages": [], "total": 0}
        found: DLQResponse = nothing if answer is None else answer
        return found


class DlqQuery(DlqOptions):
    """`queue(...).dlq()`: a query, and `get()` makes it."""

    async def get(self) -> DLQResponse:
        """The dead letters, the latest first; empty (and a warning) on failure, unless the client is strict."""
        return await self._get()


Answer = TypeVar("Answer")


class AdminCalls(Generic[Answer]):
    """Every administrative call. `send` makes an awaitable of a request, or waits for its answer: see `Admin`.

    Parameters of queries are those of the server (`limit`, `offset`, `queue`, …); those that are None are left out.
    """

    def __init__(self, send: Callable[[str, str, Any], Answer]) -> None:
        self._send = send

    def get_overview(self) -> Answer:
        """Counts of everything, lag and throughput."""
        return self._get("/api/v1/resources/overview")

    def get_namespaces(self) -> Answer:
        """The namespaces, with their queues and messages."""
        return self._get("/api/v1/resources/namespaces")

    def get_tasks(self) -> Answer:
        """The tasks, with their queues and messages."""
        return self._get("/api/v1/resources/tasks")

    def list_queues(self, **params: Any) -> Answer:
        """The queues, the newest first."""
        return self._get("/api/v1/resources/queues", params)

    def get_queue(self, name: str) -> Answer:
        """A queue with its partitions and their counters."""
        return self._get(path_of("/api/v1/resources/queues", name))

    def configure_queue(
        self, name: str, options: Mapping[str, Any], namespace: str | None = None, task: str | None = None
    ) -> Answer:
        """Make a queue, or replace all of its options: those that are absent get their defaults."""
        body = {"queue": name, "namespace": namespace, "task": task, "options": dict(options)}
        return self._send("POST", "/api/v1/configure", body)

    def delete_queue(self, name: str) -> Answer:
        """Remove a queue with everything in it."""
        return self._send("DELETE", path_of("/api/v1/resources/queues", name), None)

    def pause_queue(self, name: str) -> Answer:
        """Stop delivering messages of a queue; pushes are stored as before."""
        return self._send("POST", path_of("/api/v1/resources/queues", name, "pause"), None)

    def resume_queue(self, name: str) -> Answer:
        """Deliver messages of a queue again."""
        return self._send("POST", path_of("/api/v1/resources/queues", name, "resume"), None)

    def pause_consumer_group(self, consumer_group: str, queue_name: str) -> Answer:
        """Stop delivering messages of a queue to one group."""
        path = path_of("/api/v1/consumer-groups", consumer_group, "queues", queue_name, "pause")
        return self._send("POST", path, None)

    def resume_consumer_group(self, consumer_group: str, queue_name: str) -> Answer:
        """Deliver messages of a queue to a group again."""
        path = path_of("/api/v1/consumer-groups", consumer_group, "queues", queue_name, "resume")
        return self._send("POST", path, None)

    def get_log_positions(self, name: str, at: str | None = None) -> Answer:
        """The offsets that each partition of a queue holds, and the first that was stored at a time or later."""
        return self._get(path_of("/api/v1/read", name), {"at": at})

    def clear_queue(self, name: str, partition: str | None = None) -> Answer:
        """Remove the messages of a queue or of one of its partitions."""
        return self._send("DELETE", path_of("/api/v1/queues", name) + "/clear" + _query({"partition": partition}), None)

    def get_partitions(self, **params: Any) -> Answer:
        """The partitions, of one `queue` or of all."""
        return self._get("/api/v1/resources/partitions", params)

    def list_messages(self, **params: Any) -> Answer:
        """Messages by `queue`, `partition`, `status`, `from` and `to`; the newest first, without payloads."""
        return self._get("/api/v1/messages", params)

    def search_messages(self, queue: str, **params: Any) -> Answer:
        """Messages of a queue by `partition`, `from`, `to`, `status`, `text` and `where`; `cursor` goes on."""
        return self._get("/api/v1/messages/search", {"queue": queue, **params})

    def delete_messages(self, queue: str, **selection: Any) -> Answer:
        """Remove messages: `messages` that are named, or those of a `filter`, up to a `limit`, from a `cursor` on."""
        return self._send("POST", "/api/v1/messages/delete", {"queue": queue, **_given(selection)})

    def retry_messages(self, queue: str, **selection: Any) -> Answer:
        """Store copies of messages at the ends of their partitions, by the same fields."""
        return self._send("POST", "/api/v1/messages/retry", {"queue": queue, **_given(selection)})

    def dead_letter_messages(self, queue: str, **selection: Any) -> Answer:
        """Make messages dead letters, by the same fields, of a `consumerGroup` with an `error`."""
        return self._send("POST", "/api/v1/messages/dlq", {"queue": queue, **_given(selection)})

    def get_message(self, partition_id: str, transaction_id: str) -> Answer:
        """A message with its payload and where each group is with it."""
        return self._get(path_of("/api/v1/messages", partition_id, transaction_id))

    def delete_message(self, partition_id: str, transaction_id: str) -> Answer:
        """Remove a message, its dead letters and its traces."""
        return self._send("DELETE", path_of("/api/v1/messages", partition_id, transaction_id), None)

    def retry_message(self, partition_id: str, transaction_id: str) -> Answer:
        """Queue a dead letter again."""
        return self._send("POST", path_of("/api/v1/messages", partition_id, transaction_id, "retry"), {})

    def move_message_to_dlq(self, partition_id: str, transaction_id: str, **about: Any) -> Answer:
        """Make a message a dead letter, of a `consumerGroup` and with an `error`."""
        return self._send("POST", path_of("/api/v1/messages", partition_id, transaction_id, "dlq"), about)

    def list_dead_letters(self, **params: Any) -> Answer:
        """Dead letters by `queue`, `consumerGroup`, `partition`, `from` and `to`; the latest failure first."""
        return self._get("/api/v1/dlq", params)

    def get_dead_letter_report(self, **params: Any) -> Answer:
        """The errors of dead letters, by the same parameters; the most frequent first."""
        return self._get("/api/v1/dlq/report", params)

    def retry_dead_letters(self, queue: str, **selection: Any) -> Answer:
        """Redrive dead letters by `consumerGroup`, `partition`, `from`, `to`, `transactionIds`, up to a `limit`."""
        return self._send("POST", "/api/v1/dlq/retry", {"queue": queue, **_given(selection)})

    def purge_dead_letters(self, queue: str, **selection: Any) -> Answer:
        """Delete dead letters of a queue, by the same fields."""
        return self._send("DELETE", "/api/v1/dlq", {"queue": queue, **_given(selection)})

    def get_traces_by_name(self, trace_name: str, **params: Any) -> Answer:
        """The traces under a name, over all messages; the oldest first."""
        return self._get(path_of("/api/v1/traces/by-name", trace_name), params)

    def get_trace_names(self, **params: Any) -> Answer:
        """The names of traces, the latest first."""
        return self._get("/api/v1/traces/names", params)

    def get_traces_for_message(self, partition_id: str, transaction_id: str) -> Answer:
        """The traces of a message, the oldest first."""
        return self._get(path_of("/api/v1/traces", partition_id, transaction_id))

    def get_status(self, **params: Any) -> Answer:
        """Throughput, queues, leases and errors over a time."""
        return self._get("/api/v1/status", params)

    def get_queue_stats(self, **params: Any) -> Answer:
        """The queues with their statistics."""
        return self._get("/api/v1/status/queues", params)

    def get_queue_detail(self, name: str, **params: Any) -> Answer:
        """The statistics and options of a queue."""
        return self._get(path_of("/api/v1/status/queues", name), params)

    def get_analytics(self, **params: Any) -> Answer:
        """Messages over time."""
        return self._get("/api/v1/status/analytics", params)

    def list_consumer_groups(self) -> Answer:
        """The groups with their lag, one row for each queue."""
        return self._get("/api/v1/consumer-groups")

    def refresh_consumer_stats(self) -> Answer:
        """Compute the statistics now."""
        return self._send("POST", "/api/v1/stats/refresh", {})

    def get_consumer_group(self, name: str) -> Answer:
        """Where a group is in each partition, by queue."""
        return self._get(path_of("/api/v1/consumer-groups", name))

    def get_lagging_consumers(self, min_lag_seconds: int = 60) -> Answer:
        """The partitions where a group is behind by more than this."""
        return self._get("/api/v1/consumer-groups/lagging", {"minLagSeconds": min_lag_seconds})

    def delete_consumer_group(self, consumer_group: str, delete_metadata: bool = True) -> Answer:
        """Forget where a group is, everywhere; with its metadata, also where it once began."""
        return self._send(
            "DELETE", path_of("/api/v1/consumer-groups", consumer_group) + _metadata(delete_metadata), None
        )

    def delete_consumer_group_for_queue(
        self, consumer_group: str, queue_name: str, delete_metadata: bool = True
    ) -> Answer:
        """Forget where a group is in one queue."""
        path = path_of("/api/v1/consumer-groups", consumer_group, "queues", queue_name)
        return self._send("DELETE", path + _metadata(delete_metadata), None)

    def update_consumer_group_timestamp(self, consumer_group: str, timestamp: str) -> Answer:
        """Move the time from which a group gets messages of partitions it has not begun."""
        path = path_of("/api/v1/consumer-groups", consumer_group, "subscription")
        return self._send("POST", path, {"subscriptionTimestamp": timestamp})

    def seek_consumer_group(
        self, consumer_group: str, queue_name: str, options: Mapping[str, Any] | None = None
    ) -> Answer:
        """Move a group in a queue: `timestamp`, `offset`, `toEnd` or `toBeginning`."""
        path = path_of("/api/v1/consumer-groups", consumer_group, "queues", queue_name, "seek")
        return self._send("POST", path, dict(options or {}))

    def preview_seek(self, consumer_group: str, queue_name: str, **params: Any) -> Answer:
        """What a seek would do, by the same fields, and `partition` for one alone."""
        path = path_of("/api/v1/consumer-groups", consumer_group, "queues", queue_name, "seek", "preview")
        return self._get(path, params)

    def undo_seek(self, consumer_group: str, queue_name: str, seek_id: int) -> Answer:
        """Put a group back where it was before a seek of the last day; `seekId` is in the answer to the seek."""
        path = path_of("/api/v1/consumer-groups", consumer_group, "queues", queue_name, "seek", "undo")
        return self._send("POST", path, {"seekId": seek_id})

    def list_seeks(self, consumer_group: str, queue_name: str) -> Answer:
        """The seeks of a group in a queue within the last day, the newest first."""
        return self._get(path_of("/api/v1/consumer-groups", consumer_group, "queues", queue_name, "seeks"), {})

    def seek_partition(
        self, consumer_group: str, queue_name: str, partition: str, options: Mapping[str, Any] | None = None
    ) -> Answer:
        """Move a group on one partition, by the same fields; to its end by default."""
        path = path_of("/api/v1/consumer-groups", consumer_group, "queues", queue_name, "partitions", partition, "seek")
        return self._send("POST", path, dict(options or {}))

    def seek_partition_to_end(self, consumer_group: str, queue_name: str, partition: str) -> Answer:
        """Have a group skip all there is on one partition."""
        return self.seek_partition(consumer_group, queue_name, partition)

    def release_lease(
        self, consumer_group: str, queue_name: str, partition: str, lease_id: str | None = None
    ) -> Answer:
        """End the lease of a group on a partition: its messages come again at once."""
        path = path_of(
            "/api/v1/consumer-groups", consumer_group, "queues", queue_name, "partitions", partition, "release"
        )
        return self._send("POST", path, _given({"leaseId": lease_id}))

    def health(self) -> Answer:
        """Whether the server and its database are well."""
        return self._get("/health")

    def ready(self) -> Answer:
        """Whether the server can take requests; raises when it cannot."""
        return self._get("/readyz")

    def metrics(self) -> Answer:
        """The server's metrics as JSON."""
        return self._get("/metrics")

    def prometheus_metrics(self) -> Answer:
        """The server's metrics as Prometheus reads them."""
        return self._get("/metrics/prometheus")

    def list_streams(self) -> Answer:
        """The streaming queries, by name."""
        return self._get("/streams/v1/queries")

    def delete_stream(self, name: str) -> Answer:
        """Forget a streaming query and its state; its consumer group stays."""
        return self._send("DELETE", path_of("/streams/v1/queries", name), None)

    def list_topic_namespaces(self) -> Answer:
        """The namespaces that have topics or a quota, by name."""
        return self._get("/api/v1/topics/namespaces")

    def list_pipeline_declarations(self) -> Answer:
        """The pipelines that were declared, by name."""
        return self._get("/api/v1/pipeline-declarations")

    def declare_pipeline(self, name: str, declaration: Mapping[str, Any]) -> Answer:
        """Declare a pipeline: its `sources`, `steps`, `sinks`, `trigger` and `dead_letters`, as in a YAML file."""
        return self._send("PUT", "/api/v1/pipeline-declarations", {"name": name, "declaration": dict(declaration)})

    def forget_pipeline(self, name: str) -> Answer:
        """Forget the declaration of a pipeline."""
        return self._send("DELETE", path_of("/api/v1/pipeline-declarations", name), None)

    def get_topic_counts(self, namespace: str, topic: str | None = None) -> Answer:
        """Items of the topics of a namespace by state, and the options of each."""
        return self._get("/api/v1/topics/counts", {"namespace": namespace, "topic": topic})

    def configure_topic(self, namespace: str, topic: str, options: Mapping[str, Any]) -> Answer:
        """Set options of a topic; those that are absent stay, null is the default."""
        body = {"namespace": namespace, "topic": topic, "options": dict(options)}
        return self._send("POST", "/api/v1/topics/configure", body)

    def pause_topic(self, namespace: str, topic: str) -> Answer:
        """Stop delivering items of a topic; items are enqueued as before."""
        return self._send("POST", "/api/v1/topics/pause", {"namespace": namespace, "topic": topic})

    def resume_topic(self, namespace: str, topic: str) -> Answer:
        """Deliver items of a topic again."""
        return self._send("POST", "/api/v1/topics/resume", {"namespace": namespace, "topic": topic})

    def get_quotas(self) -> Answer:
        """The quotas of namespaces."""
        return self._get("/api/v1/topics/quotas")

    def set_quota(self, namespace: str, per_minute: int | None) -> Answer:
        """Limit what a namespace may enqueue in a minute; None is what the server's settings say."""
        return self._send("PUT", "/api/v1/topics/quotas", {"namespace": namespace, "per_minute": per_minute})

    def get_write_modes(self) -> Answer:
        """The namespaces that are not written `sync`."""
        return self._get("/api/v1/topics/modes")

    def set_write_mode(self, namespace: str, mode: str | None) -> Answer:
        """`sync` or `buffered`; None is what the server's settings say."""
        return self._send("PUT", "/api/v1/topics/modes", {"namespace": namespace, "mode": mode})

    def move_to_shard(self, to: int, **name: str) -> Answer:
        """Move a `queue`, or a `topic` of a `namespace`, to another shard."""
        return self._send("POST", "/api/v1/shards/move", {**name, "to": to})

    def list_shard_moves(self) -> Answer:
        """Moves to other shards that have not ended."""
        return self._get("/api/v1/shards/moves")

    def test_migration_target(self, **target: Any) -> Answer:
        """Whether a PostgreSQL (`host`, `port`, `database`, `user`, `password`, `ssl`) can be reached."""
        return self._send("POST", "/api/v1/migration/test-connection", target)

    def start_migration(self, **target: Any) -> Answer:
        """Copy everything to another PostgreSQL, but for what `excludeTableData` names."""
        return self._send("POST", "/api/v1/migration/start", target)

    def get_migration_status(self) -> Answer:
        """How far the last copy to another PostgreSQL is."""
        return self._get("/api/v1/migration/status")

    def validate_migration(self, **target: Any) -> Answer:
        """Compare the rows of every table with those of another PostgreSQL."""
        return self._send("POST", "/api/v1/migration/validate", target)

    def reset_migration(self) -> Answer:
        """Forget the last copy to another PostgreSQL."""
        return self._send("POST", "/api/v1/migration/reset", None)

    def get_maintenance_mode(self) -> Answer:
        """Whether pushes are being spooled."""
        return self._get("/api/v1/system/maintenance")

    def set_maintenance_mode(self, enabled: bool) -> Answer:
        """Spool pushes, or stop doing so."""
        return self._send("POST", "/api/v1/system/maintenance", {"enabled": enabled})

    def get_pop_maintenance_mode(self) -> Answer:
        """Whether pops are being answered empty."""
        return self._get("/api/v1/system/maintenance/pop")

    def set_pop_maintenance_mode(self, enabled: bool) -> Answer:
        """Answer pops empty, or stop doing so."""
        return self._send("POST", "/api/v1/system/maintenance/pop", {"enabled": enabled})

    def get_system_metrics(self, **params: Any) -> Answer:
        """CPU, memory and connections of the servers over time."""
        return self._get("/api/v1/analytics/system-metrics", params)

    def get_worker_metrics(self, **params: Any) -> Answer:
        """What the workers did over time."""
        return self._get("/api/v1/analytics/worker-metrics", params)

    def get_queue_lag(self, **params: Any) -> Answer:
        """How long messages waited, by queue and minute."""
        return self._get("/api/v1/analytics/queue-lag", params)

    def get_queue_operations(self, **params: Any) -> Answer:
        """What was done with each queue over time."""
        return self._get("/api/v1/analytics/queue-ops", params)

    def get_parked_consumers(self, **params: Any) -> Answer:
        """How many pops waited, by queue and worker."""
        return self._get("/api/v1/analytics/queue-parked-replicas", params)

    def get_retention(self, **params: Any) -> Answer:
        """What retention, expiry and eviction removed over time."""
        return self._get("/api/v1/analytics/retention", params)

    def get_postgres_stats(self) -> Answer:
        """Statistics of PostgreSQL."""
        return self._get("/api/v1/analytics/postgres-stats")

    def _get(self, path: str, params: Mapping[str, Any] | None = None) -> Answer:
        return self._send("GET", path + _query(params or {}), None)


def _given(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def _query(params: Mapping[str, Any]) -> str:
    given = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in params.items()
        if value is not None
    }
    return f"?{urlencode(given)}" if given else ""


def _metadata(delete: bool) -> str:
    return _query({"deleteMetadata": delete})
