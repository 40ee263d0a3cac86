"""The Kombu transport `queen://`: queues are topics, and what exchanges broadcast is a log that listeners read.

A message to a queue is an item of a topic: it has a priority, is held back until its ETA, and is leased to one
consumer, which renews the lease until it acknowledges. Queues that live as long as their consumer (`auto_delete`,
`exclusive` or with `expires`: events, remote control and its replies) hold no messages of their own: they are consumer
groups on the log of the exchange that they are bound to.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import msgspec
from kombu.exceptions import ChannelError
from kombu.log import get_logger
from kombu.transport import virtual

from queen import __version__
from queen.celery.bindings import Binding, SharedBindings
from queen.celery.leases import Lease, Leases
from queen.celery.link import DEFAULT_NAMESPACE, DEFAULT_PORT, Address, Link
from queen.celery.sources import ExchangeLog, Inbox, Item, LogSource, Source, TopicSource, decode_items, dequeue_query
from queen.client.errors import (
    AuthError,
    BadRequestError,
    NotFoundError,
    OverloadedError,
    QueenConnectionError,
    RequestError,
    ServerError,
)

_TOPICS = "/api/v1/topics"
_MOST_UNDELIVERED = 100
"""Messages that wait for their consumer where it has not set a prefetch count."""

logger = get_logger("queen.celery")

_counts = msgspec.json.Decoder(list[dict[str, Any]])
_removed = msgspec.json.Decoder(dict[str, Any])


class Arrived(NamedTuple):
    """A message that waits for its consumer."""

    channel: Channel
    queue: str
    raw: dict[str, Any]

    @property
    def tag(self) -> str:
        tag: str = self.raw["properties"]["delivery_tag"]
        return tag


class QoS(virtual.QoS):
    """The messages that a channel has delivered and that are not settled."""

    def append(self, message: Any, delivery_tag: str) -> None:
        self._delivered[delivery_tag] = message

    def can_consume(self) -> bool:
        return self.room() > 0

    def room(self) -> int:
        """How many more messages the consumer takes."""
        undelivered: int = self.channel.undelivered
        if not self.prefetch_count:
            return _MOST_UNDELIVERED - undelivered
        return int(self.prefetch_count) - len(self._delivered) - undelivered

    def ack(self, delivery_tag: str) -> None:
        self._delivered.pop(delivery_tag, None)
        self.channel.settle(delivery_tag, Leases.ack)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        message = self._delivered.pop(delivery_tag, None)
        if requeue and message is not None:
            self.channel.requeue(delivery_tag, message)
        else:
            self.channel.settle(delivery_tag, Leases.release if requeue else Leases.ack)

    def restore_unacked(self) -> list[Any]:
        """Give back what was not settled: the server delivers it to the next consumer."""
        tags = list(self._delivered)
        self._delivered.clear()
        for tag in tags:
            self.channel.settle(tag, Leases.release)
        return []


class Channel(virtual.Channel):
    """A channel: publishes over one connection, and consumes what its sources bring."""

    QoS = QoS
    supports_fanout = True
    body_encoding = None

    visibility_timeout: float = 30.0
    """Seconds of a lease, which is renewed while the message is not settled."""
    fanout_retention: int = 600
    """Seconds for which the log of an exchange keeps messages for its listeners."""
    exactly_once_publish: bool = False
    """Whether a publish that Kombu repeats after a lost connection is recognized by the server."""

    from_transport_options = (
        *virtual.Channel.from_transport_options,
        "visibility_timeout",
        "fanout_retention",
        "exactly_once_publish",
    )

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.undelivered = 0
        self._address = connection.address
        self._link = Link(self._address)
        self._bindings = SharedBindings(self._link)
        self._inbox = connection.inbox
        self._held: dict[str, Lease] = {}
        self._leases = Leases(self._address, float(self.visibility_timeout))
        self._room = threading.Condition()
        self._no_ack: set[str] = set()
        self._topics: tuple[str, ...] = ()
        self._topic_source: TopicSource | None = None
        self._log_sources: dict[tuple[str, str], LogSource] = {}
        self._logs: dict[str, ExchangeLog] = {}
        self._listeners: set[tuple[str, str]] = set()

    # Publishing

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> None:
        """Publish a message: it is stored when this returns.

        It goes to the queues that are bound, and to the log of the exchange for listeners: always with a fanout
        exchange, otherwise where no queue is bound, as with events and replies.
        """
        self._inplace_augment_message(message, exchange, routing_key)
        headers = message["headers"]
        for name, value in headers.items():
            if isinstance(value, str) and not value.isascii():
                # Lone surrogates, as names of files have, are no text; Celery shows arguments in headers.
                headers[name] = value.encode(errors="backslashreplace").decode()
        if not exchange:
            self._enqueue([routing_key], message)
            return
        kind = self.typeof(exchange).type
        queues = self._bound_here(kind, exchange, routing_key)
        if not queues or kind != "direct":
            queues |= self._bound_elsewhere(exchange, routing_key)
        if queues:
            self._enqueue(queues, message)
        if not queues or kind == "fanout":
            self._log(exchange).push(self._link, message)

    def _bound_here(self, kind: str, exchange: str, routing_key: str) -> set[str]:
        """The queues that this process has bound; those of listeners only where there is no other of that name."""
        queues = {queue for queue in self._lookup(exchange, routing_key) if queue}
        return queues if kind == "direct" else {queue for queue in queues if not self._is_listener(queue)}

    def _bound_elsewhere(self, exchange: str, routing_key: str) -> set[str]:
        queues: set[str] = set()
        for one in self._bindings.of_exchange(exchange):
            kind = self.exchange_types[one.kind]
            table = [kind.prepare_bind(one.queue, exchange, one.routing_key, None)]
            queues |= kind.lookup(table, exchange, routing_key, None)
        return queues

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        self._enqueue([queue], message)

    def _enqueue(self, queues: Iterable[str], message: dict[str, Any]) -> None:
        properties = message["properties"]
        items = [self._item(message, queue) for queue in queues]
        if self.exactly_once_publish:
            # Kombu repeats a publish with the same properties.
            key = properties.setdefault("publish_id", properties["delivery_tag"])
            for one in items:
                one["idempotency_key"] = key if len(items) == 1 else f"{key} {one['topic']}"
        self._link.post(f"{_TOPICS}/enqueue", items)

    def _item(self, message: dict[str, Any], queue: str) -> dict[str, Any]:
        """The item of a topic that a message is."""
        item: dict[str, Any] = {"namespace": self._address.namespace, "topic": queue, "data": message}
        priority = self._get_message_priority(message)
        if priority:
            # Kombu serves the highest priority first, as RabbitMQ does; a topic the lowest.
            item["priority"] = -priority
        eta = message["headers"].get("eta")
        if eta:
            item["deliver_after"] = eta if isinstance(eta, str) else eta.isoformat()
        ttl = message["properties"].get("expiration") or self.connection.queue_ttls.get(queue)
        if ttl:
            item["ttl"] = float(ttl) / 1000
        return item

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Text is stored as it is, and can be read in the dashboard; bytes in base64."""
        if isinstance(body, bytes | bytearray | memoryview):
            body, encoding = bytes(body), "base64"
        encoded: tuple[Any, str | None] = super().encode_body(body, encoding)
        return encoded

    # Declaring

    def prepare_queue_arguments(self, arguments: Any, message_ttl: float | None = None, **kwargs: Any) -> Any:
        """The arguments of a queue: what Kombu has as an option of its own and is supported becomes one of them."""
        if message_ttl is None:
            return arguments
        return {**(arguments or {}), "x-message-ttl": round(message_ttl * 1000)}

    def _new_queue(self, queue: str, **options: Any) -> None:
        arguments: Mapping[str, Any] = options.get("arguments") or {}
        connection: Transport = self.connection
        if options.get("auto_delete") or options.get("exclusive") or arguments.get("x-expires"):
            connection.listener_queues.add(queue)
        if arguments.get("x-message-ttl"):
            connection.queue_ttls[queue] = float(arguments["x-message-ttl"])
        connection.declared.add(queue)

    def _has_queue(self, queue: str, **options: Any) -> bool:
        return queue in self.connection.declared or self._topic_counts(queue) is not None

    def queue_declare(self, queue: str | None = None, passive: bool = False, **options: Any) -> Any:
        """Declare a queue; with `passive` the answer has the number of its messages."""
        if not passive:
            # A topic is created by its first message, so a declaration needs no request.
            return super().queue_declare(queue, passive=False, **options)
        counts = self._topic_counts(str(queue))
        if counts is None and queue not in self.connection.declared:
            text = f"NOT_FOUND - no queue {queue!r} in namespace {self._address.namespace!r}"
            raise ChannelError(text, (50, 10), "Channel.queue_declare", "404")
        return virtual.base.queue_declare_ok_t(queue, counts["ready"] if counts else 0, 0)

    def _size(self, queue: str) -> int:
        if queue in self.connection.declared:
            return 0
        counts = self._topic_counts(queue)
        return int(counts["ready"]) if counts else 0

    def _topic_counts(self, queue: str) -> dict[str, Any] | None:
        where = urlencode({"namespace": self._address.namespace, "topic": queue}, quote_via=quote)
        found = _counts.decode(self._link.get(f"{_TOPICS}/counts?{where}"))
        return found[0] if found else None

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        if not self._is_listener(queue):
            self._bindings.add(Binding(exchange, self.typeof(exchange).type, routing_key, queue))
        elif (exchange, queue) not in self._listeners:
            self._log(exchange).subscribe(self._link, queue)
            self._listeners.add((exchange, queue))

    def queue_unbind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **kwargs: Any,
    ) -> None:
        super().queue_unbind(queue, exchange, routing_key, arguments, **kwargs)
        if exchange and not self._is_listener(queue):
            self._bindings.remove([Binding(exchange, self.typeof(exchange).type, routing_key, queue)])

    def _purge(self, queue: str) -> int:
        # What consumers have got and not acknowledged stays, as with AMQP: should they die, it is delivered again.
        body = {"namespace": self._address.namespace, "topic": queue, "leased": False}
        return int(_removed.decode(self._link.post(f"{_TOPICS}/purge", body))["removed"])

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:
        """Delete a queue with its messages and bindings."""
        if if_empty and (self._topic_counts(queue) or {"ready": 0})["ready"]:
            return
        bound = list(self.state.queue_bindings(queue))
        if self._is_listener(queue):
            for exchange, _, _ in bound:
                self._unsubscribe(exchange, queue)
        else:
            self._bindings.remove(
                Binding(exchange, self.typeof(exchange).type, routing_key, queue) for exchange, routing_key, _ in bound
            )
            where = urlencode({"namespace": self._address.namespace, "topic": queue}, quote_via=quote)
            self._link.delete(f"{_TOPICS}?{where}")
        for declared in self.state.exchanges.values():
            declared["table"][:] = [row for row in declared["table"] if row[2] != queue]
        self.state.queue_bindings_delete(queue)
        self.connection.forget(queue)

    def after_reply_message_received(self, queue: str) -> None:
        """Keep the queue of replies for the next command; it goes with the channel."""

    def _is_listener(self, queue: str) -> bool:
        return queue in self.connection.listener_queues

    def _log(self, exchange: str) -> ExchangeLog:
        log = self._logs.get(exchange)
        if log is None:
            log = ExchangeLog(self._address.namespace, exchange)
            log.create(self._link, int(self.fanout_retention))
            self._logs[exchange] = log
        return log

    def _unsubscribe(self, exchange: str, queue: str) -> None:
        self._listeners.discard((exchange, queue))
        # A token that may not delete groups leaves it behind, without messages.
        with contextlib.suppress(AuthError, NotFoundError):
            ExchangeLog(self._address.namespace, exchange).unsubscribe(self._link, queue)

    # Consuming

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any) -> None:
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        (self._no_ack.add if no_ack else self._no_ack.discard)(queue)
        self._update_sources()

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        self._update_sources()
        # What was fetched for the consumer and not delivered is for the next one.
        for arrived in self._inbox.remove(lambda one: one.channel is self and one.queue == queue):
            self._count_undelivered(-1)
            self.settle(arrived.tag, Leases.release)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """The next message, or None."""
        # What this channel has just given back may be the next.
        self._leases.flush()
        path = f"{dequeue_query(self._address.namespace, (queue,), self._leases.seconds)}&limit=1"
        for item in decode_items(self._link.get(path)):
            raw = self._lease(item)
            if raw is not None:
                message = self.Message(raw, channel=self)
                if no_ack:
                    self.settle(message.delivery_tag, Leases.ack)
                else:
                    self.qos.append(message, message.delivery_tag)
                return message
        return None

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self._notify_room()

    def settle(self, delivery_tag: str, how: Any) -> None:
        """Acknowledge or release the message of a delivery; what came from an exchange's log has no lease."""
        lease = self._held.pop(delivery_tag, None)
        if lease is not None:
            how(self._leases, lease)
        self._notify_room()

    def requeue(self, delivery_tag: str, message: Any) -> None:
        """Have a message delivered again, which then says so: tasks and deduplication ask for that."""
        lease = self._held.pop(delivery_tag, None)
        if lease is not None:
            raw: dict[str, Any] = message._raw
            raw["properties"].setdefault("delivery_info", {})["redelivered"] = True
            self._leases.replace(lease, self._item(raw, lease.topic))
        self._notify_room()

    def deliver(self, arrived: Arrived) -> None:
        """Hand a message from the inbox to its consumer."""
        self._count_undelivered(-1)
        callback = None if self.closed else self.connection._callbacks.get(arrived.queue)
        if callback is None:
            self.settle(arrived.tag, Leases.release)
            return
        callback(arrived.raw)
        if arrived.queue in self._no_ack:
            self.settle(arrived.tag, Leases.ack)

    def drain_events(self, timeout: float | None = None, callback: Any = None) -> None:
        self.connection.drain_events(self.connection, timeout)

    def close(self) -> None:
        """Stop consuming; messages that are not settled go back to their queues."""
        if self.closed:
            return
        inbox_empty = self.undelivered <= 0
        for source in (self._topic_source, *self._log_sources.values()):
            if source is not None:
                source.stop()
        self._notify_room()
        try:
            super().close()
            if not inbox_empty:
                for tag in list(self._held):
                    self.settle(tag, Leases.release)
            self._leases.close()
            for exchange, queue in list(self._listeners):
                self._unsubscribe(exchange, queue)
        except (QueenConnectionError, OverloadedError, ServerError) as error:
            logger.warning("channel closed without the server, its leases end by themselves: %s", error)
        finally:
            self._link.close()

    def _update_sources(self) -> None:
        """Poll for exactly the queues that are consumed now."""
        if self.closed:
            return
        active = dict.fromkeys(self._active_queues)
        bound = {queue: [key.exchange for key in self.state.queue_index.get(queue, ())] for queue in active}
        logs = {(exchange, queue) for queue in active if self._is_listener(queue) for exchange in bound[queue]}
        only_logs = {queue for exchange, queue in logs if self.typeof(exchange).type != "direct"}
        topics = tuple(queue for queue in active if queue not in only_logs)
        if topics != self._topics:
            if self._topic_source is not None:
                self._topic_source.stop()
                self._notify_room()
            self._topics = topics
            self._topic_source = self._start(self._make_topic_source(topics)) if topics else None
        for key in [key for key in self._log_sources if key not in logs]:
            self._log_sources.pop(key).stop()
        for exchange, queue in logs - self._log_sources.keys():
            self._log_sources[exchange, queue] = self._start(self._make_log_source(exchange, queue))

    def _start(self, source: Any) -> Any:
        source.start()
        return source

    def _make_topic_source(self, topics: tuple[str, ...]) -> TopicSource:
        return TopicSource(
            self._address, topics, self._leases.seconds, self._wait_for_room, self._receive_items, self._inbox.put
        )

    def _make_log_source(self, exchange: str, queue: str) -> LogSource:
        kind = self.typeof(exchange)

        def receive(listener: str, messages: list[Any]) -> None:
            for raw in messages:
                self._receive_broadcast(kind, exchange, listener, raw)

        return LogSource(self._address, self._log(exchange), queue, self._leases.seconds, receive, self._inbox.put)

    def _wait_for_room(self, source: Source) -> int:
        with self._room:
            while not source.stopped:
                room: int = self.qos.room()
                if room > 0:
                    return min(room, _MOST_UNDELIVERED)
                self._room.wait()
        return 0

    def _notify_room(self) -> None:
        with self._room:
            self._room.notify_all()

    def _receive_items(self, items: list[Item]) -> None:
        leased = [(item.topic, self._lease(item)) for item in items]
        self._arrive([Arrived(self, topic, raw) for topic, raw in leased if raw is not None])
        if self.closed:
            for tag in list(self._held):
                self.settle(tag, Leases.release)

    def _receive_broadcast(self, kind: Any, exchange: str, listener: str, raw: Any) -> None:
        """Deliver what the bindings of a listener select."""
        if not _is_message(raw):
            return
        routing_key = raw["properties"].get("delivery_info", {}).get("routing_key") or ""
        if listener in kind.lookup(self.get_table(exchange), exchange, routing_key, None):
            self._arrive([Arrived(self, listener, raw)])

    def _arrive(self, messages: list[Arrived]) -> None:
        self._count_undelivered(len(messages))
        self._inbox.put(messages)

    def _count_undelivered(self, change: int) -> None:
        with self._room:
            self.undelivered += change

    def _lease(self, item: Item) -> dict[str, Any] | None:
        """The message in an item, with the delivery tag under which its lease is known."""
        lease = Lease(item.id, self._address.namespace, item.topic, item.lease_owner)
        if not _is_message(item.data):
            logger.error("item %d of topic %s is not a message of Kombu: dead-lettered", item.id, item.topic)
            self._leases.hold([lease])
            self._leases.refuse(lease, "not a message of Kombu")
            return None
        raw: dict[str, Any] = item.data
        tag = f"{item.id}-{item.lease_owner}"
        raw["properties"]["delivery_tag"] = tag
        if item.retries:
            raw["properties"].setdefault("delivery_info", {})["redelivered"] = True
        self._held[tag] = lease
        self._leases.hold([lease])
        return raw


def _is_message(raw: Any) -> bool:
    return isinstance(raw, dict) and isinstance(raw.get("properties"), dict) and "body" in raw


class Transport(virtual.Transport):
    """`queen://[:token@]host[:port][/namespace]`."""

    Channel = Channel

    default_port = DEFAULT_PORT
    driver_type = "queen"
    driver_name = "queen"
    secure = False
    polling_interval = None

    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )

    connection_errors = (*virtual.Transport.connection_errors, QueenConnectionError, OverloadedError, ServerError)
    channel_errors = (*virtual.Transport.channel_errors, BadRequestError, NotFoundError)

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.inbox = Inbox()
        self.declared: set[str] = set()
        self.listener_queues: set[str] = set()
        self.queue_ttls: dict[str, float] = {}
        tls = client.ssl
        # Out of `broker_use_ssl`, or with a prefix out of the URL.
        given = {name.removeprefix("ssl_"): value for name, value in tls.items()} if isinstance(tls, dict) else {}
        self.address = Address(
            host=client.hostname or "localhost",
            port=int(client.port or DEFAULT_PORT),
            namespace=(client.virtual_host or "").strip("/") or DEFAULT_NAMESPACE,
            token=client.password or None,
            secure=self.secure or bool(tls),
            verify=given.get("cert_reqs") not in (ssl.CERT_NONE, "none", "CERT_NONE"),
            ca_file=given.get("ca_certs"),
        )

    def driver_version(self) -> str:
        return __version__

    def establish_connection(self) -> Any:
        link = Link(self.address)
        try:
            link.get("/livez")
        finally:
            link.close()
        return super().establish_connection()

    def verify_connection(self, connection: Any) -> bool:
        try:
            Link(self.address).get("/livez")
        except RequestError:
            return False
        return True

    def close_connection(self, connection: Any) -> None:
        super().close_connection(connection)
        self.inbox.close()

    def forget(self, queue: str) -> None:
        """A queue was deleted."""
        self.declared.discard(queue)
        self.listener_queues.discard(queue)
        self.queue_ttls.pop(queue, None)

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver what has arrived, or the next to arrive; raises `TimeoutError` if nothing comes in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._deliver_batch():
            if not self.inbox.wait(None if deadline is None else deadline - time.monotonic()):
                raise TimeoutError

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        loop.add_reader(self.inbox.fileno(), self.on_readable, self.inbox.fileno())

    def on_readable(self, fileno: int) -> None:
        """Deliver what has arrived."""
        self._deliver_batch()

    def _deliver_batch(self) -> bool:
        """Deliver what one request has brought; False if nothing has arrived."""
        self.inbox.clear_wakeup()
        batch = self.inbox.take()
        # Also when a consumer fails: the others are not to wait for the next message.
        self.inbox.rearm()
        if isinstance(batch, Exception):
            raise batch
        for arrived in batch or ():
            arrived.channel.deliver(arrived)
        return batch is not None


class SecureTransport(Transport):
    """`queens://`: the same with TLS."""

    secure = True
