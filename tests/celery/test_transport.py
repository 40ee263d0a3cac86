"""The Kombu transport against a real server, through Kombu's own classes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.exceptions import ChannelError, OperationalError

from queen.client.errors import BadRequestError
from tests.celery.queues import Namespace
from tests.support.ageing import block_until
from tests.support.ports import free_port


@pytest.fixture
def connection(namespace: Namespace) -> Iterator[Connection]:
    with namespace.connect(visibility_timeout=20) as connection:
        yield connection


def publish(connection: Connection, *bodies: Any, queue: str = "jobs", **options: Any) -> None:
    producer = Producer(connection.default_channel, serializer="json")
    for body in bodies:
        producer.publish(body, routing_key=queue, **options)


class Sink:
    """A consumer that keeps what it gets."""

    def __init__(self, connection: Connection, *queues: Queue, **options: Any) -> None:
        self.messages: list[Any] = []
        self._connection = connection
        self.consumer = Consumer(
            connection.channel(), list(queues), on_message=self.messages.append, accept=["json"], **options
        )

    def drain(self, count: int) -> list[Any]:
        """The payloads of so many more messages."""
        wanted = len(self.messages) + count
        while len(self.messages) < wanted:
            self._connection.drain_events(timeout=30)
        return [message.payload for message in self.messages[-count:]]


def test_text_and_bytes_come_back_as_they_were_published(connection: Connection) -> None:
    queue = Queue("jobs")(connection.default_channel)
    publish(connection, {"order": "żółw\u0000"})
    publish(connection, b"\x00\xff", content_type="application/data", content_encoding="binary")

    first, second = queue.get(), queue.get()

    assert first.payload == {"order": "żółw\u0000"}
    assert second.body == b"\x00\xff"
    assert queue.get() is None


def test_the_highest_priority_is_delivered_first(connection: Connection) -> None:
    for priority in (0, 9, 3):
        publish(connection, priority, priority=priority)
    sink = Sink(connection, Queue("jobs"))
    with sink.consumer:
        assert sink.drain(3) == [9, 3, 0]


def test_a_message_with_an_eta_is_held_by_the_server(connection: Connection, namespace: Namespace) -> None:
    publish(connection, "later", headers={"eta": (datetime.now(UTC) + timedelta(hours=1)).isoformat()})
    assert Queue("jobs")(connection.default_channel).get() is None
    assert namespace.counts("jobs")["delayed"] == 1


def test_prefetch_limits_what_a_consumer_has_leased(connection: Connection, namespace: Namespace) -> None:
    publish(connection, *range(5))
    sink = Sink(connection, Queue("jobs"), prefetch_count=2)
    with sink.consumer:
        assert sink.drain(2) == [0, 1]
        with pytest.raises(socket.timeout):
            connection.drain_events(timeout=0.2)
        assert namespace.counts("jobs")["leased"] == 2
        sink.messages[0].ack()
        assert sink.drain(1) == [2]


def test_an_acknowledged_message_is_removed(connection: Connection, namespace: Namespace) -> None:
    publish(connection, "once")
    Queue("jobs")(connection.default_channel).get().ack()
    block_until(lambda: namespace.counts("jobs")["leased"] == 0, "the ack")
    assert namespace.counts("jobs")["ready"] == 0


def test_a_requeued_message_is_delivered_again_and_a_rejected_one_is_not(connection: Connection) -> None:
    publish(connection, "again", priority=5)
    sink = Sink(connection, Queue("jobs"))
    with sink.consumer:
        sink.drain(1)
        sink.messages[0].requeue()
        sink.drain(1)
        first, second = (message.delivery_info for message in sink.messages)
        assert second == {**first, "redelivered": True} and sink.messages[1].properties["priority"] == 5
        sink.messages[1].reject()
        with pytest.raises(socket.timeout):
            connection.drain_events(timeout=0.2)


def test_messages_that_are_not_settled_are_ready_when_their_connection_closes(namespace: Namespace) -> None:
    with namespace.connect() as connection:
        publish(connection, *range(3))
        sink = Sink(connection, Queue("jobs"), prefetch_count=2)
        sink.consumer.consume()
        sink.drain(2)
    counts = namespace.counts("jobs")
    assert (counts["ready"], counts["leased"]) == (3, 0)


def test_a_consumer_without_acks_settles_what_it_was_given(connection: Connection, namespace: Namespace) -> None:
    publish(connection, "fire and forget")
    sink = Sink(connection, Queue("jobs"), no_ack=True)
    with sink.consumer:
        sink.drain(1)
        block_until(lambda: namespace.counts("jobs")["leased"] == 0, "the ack on delivery")


def test_a_lease_is_renewed_until_its_message_is_settled(namespace: Namespace) -> None:
    with namespace.connect(visibility_timeout=1) as connection:
        publish(connection, "slow")
        message = Queue("jobs")(connection.default_channel).get()
        first = namespace.leased("jobs")[0]["lease_expires_at"]
        expiry = datetime.fromisoformat(first)
        block_until(
            lambda: (
                datetime.fromisoformat(namespace.leased("jobs")[0]["lease_expires_at"]) > expiry + timedelta(seconds=1)
            ),
            "renewals beyond the first lease",
        )
        message.ack()
        block_until(lambda: namespace.counts("jobs")["leased"] == 0, "the ack")


def test_every_listener_of_a_fanout_exchange_gets_every_message(connection: Connection) -> None:
    exchange = Exchange("news", type="fanout")
    first = Sink(connection, Queue("first", exchange, auto_delete=True))
    second = Sink(connection, Queue("second", exchange, auto_delete=True))
    kept = Queue("kept", exchange)(connection.default_channel)
    kept.declare()
    with first.consumer, second.consumer:
        Producer(connection.default_channel, serializer="json").publish("extra", exchange=exchange)
        while not (first.messages and second.messages):
            connection.drain_events(timeout=30)
    assert [message.payload for message in first.messages + second.messages] == ["extra"] * 2
    assert kept.get().payload == "extra"


def test_a_listener_gets_only_what_its_binding_selects_and_nothing_from_before(connection: Connection) -> None:
    events = Exchange("events", type="topic")
    producer = Producer(connection.default_channel, exchange=events, serializer="json")
    producer.publish("before", routing_key="worker.online")
    sink = Sink(connection, Queue("listener", events, routing_key="worker.#", auto_delete=True))
    with sink.consumer:
        producer.publish("task", routing_key="task.sent")
        producer.publish("worker", routing_key="worker.heartbeat")
        assert sink.drain(1) == ["worker"]


def test_topic_and_direct_exchanges_route_to_bound_queues(connection: Connection) -> None:
    media = Exchange("media", type="topic")
    video = Queue("video", media, routing_key="video.*")(connection.default_channel)
    everything = Queue("everything", media, routing_key="#")(connection.default_channel)
    video.declare()
    everything.declare()
    producer = Producer(connection.default_channel, exchange=media, serializer="json")
    producer.publish("clip", routing_key="video.cut")
    producer.publish("song", routing_key="audio.mix")
    assert video.get().payload == "clip"
    assert video.get() is None
    assert [everything.get().payload, everything.get().payload] == ["clip", "song"]


def test_a_publisher_need_not_know_the_queues_that_are_bound(connection: Connection, namespace: Namespace) -> None:
    media = Exchange("media", type="topic")
    video = Queue("video", media, routing_key="video.*")(connection.default_channel)
    video.declare()
    with namespace.connect() as other:
        Producer(other.default_channel, serializer="json").publish("clip", exchange="media", routing_key="video.cut")
        assert video.get().payload == "clip"
        video.unbind_from(media, "video.*")
    with namespace.connect() as third:
        Producer(third.default_channel, serializer="json").publish("late", exchange="media", routing_key="video.cut")
        assert video.get() is None


def test_a_queue_can_be_counted_purged_and_deleted(connection: Connection) -> None:
    queue = Queue("jobs")(connection.default_channel)
    publish(connection, *range(3))
    assert queue.queue_declare(passive=True).message_count == 3
    assert queue.purge() == 3
    publish(connection, "last")
    queue.delete()
    with pytest.raises(ChannelError, match="NOT_FOUND - no queue 'jobs'"):
        queue.queue_declare(passive=True)


def test_a_purge_leaves_what_a_consumer_has_and_has_not_acknowledged(connection: Connection) -> None:
    publish(connection, *range(3))
    queue = Queue("jobs")(connection.default_channel)
    first = queue.get()
    assert queue.purge() == 2
    first.requeue()
    again = queue.get()
    assert again.payload == 0
    again.ack()
    assert queue.purge() == 0


def test_messages_of_a_queue_with_a_ttl_expire(connection: Connection, namespace: Namespace) -> None:
    Queue("jobs", message_ttl=3600)(connection.default_channel).declare()
    Queue("others", queue_arguments={"x-max-length": 3})(connection.default_channel).declare()
    publish(connection, "soon stale")
    publish(connection, "kept", queue="others")
    (item,), (other,) = (namespace.queen.topic(namespace.name, topic).peek() for topic in ("jobs", "others"))
    assert (item["expires_at"] is not None, other["expires_at"]) == (True, None)


def test_an_expiration_becomes_the_time_to_live_of_the_item(connection: Connection, namespace: Namespace) -> None:
    publish(connection, "soon stale", expiration=3600)
    (item,) = namespace.queen.topic(namespace.name, "jobs").peek()
    assert item["expires_at"] is not None


def test_a_repeated_publish_is_stored_once_with_deduplication(namespace: Namespace) -> None:
    with namespace.connect(exactly_once_publish=True) as connection:
        channel = connection.channel()
        properties = {"delivery_mode": 2}
        for _ in range(2):
            message = channel.prepare_message('"one"', content_type="application/json", properties=properties)
            channel.basic_publish(message, "", "jobs")
    assert namespace.counts("jobs")["ready"] == 1


def test_an_item_that_is_no_message_of_kombu_does_not_stop_the_consumer(
    connection: Connection, namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    namespace.queen.topic(namespace.name, "jobs").enqueue({"data": "plain"})
    publish(connection, "kombu")
    sink = Sink(connection, Queue("jobs"))
    with sink.consumer:
        assert sink.drain(1) == ["kombu"]
    assert "is not a message of Kombu" in caplog.text
    block_until(lambda: namespace.counts("jobs")["dead"] == 1, "the item to be a dead letter")


def test_an_unreachable_server_is_an_operational_error() -> None:
    connection = Connection(f"queen://127.0.0.1:{free_port()}")
    with pytest.raises(OperationalError, match="connection failed"):
        connection.ensure_connection(max_retries=1, interval_start=0)


def test_a_name_that_the_server_refuses_is_an_error_of_the_channel(connection: Connection) -> None:
    with pytest.raises(BadRequestError, match="topic"):
        publish(connection, "x", queue="x" * 300)


def test_a_queue_added_while_consuming_is_consumed_too(connection: Connection) -> None:
    sink = Sink(connection, Queue("jobs"))
    with sink.consumer:
        sink.consumer.add_queue(Queue("more"))
        sink.consumer.consume()
        publish(connection, "1", queue="more")
        assert sink.drain(1) == ["1"]
        sink.consumer.cancel_by_queue("more")
        publish(connection, "2", queue="more")
        publish(connection, "3")
        assert sink.drain(1) == ["3"]
