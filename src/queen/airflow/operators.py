"""Operators that push and consume messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from airflow.sdk import BaseOperator

from queen.airflow.hook import DEFAULT_CONNECTION, QueenHook
from queen.client.errors import text_of_error
from queen.client.http import encode_json
from queen.errors import QueenError

_AT_ONCE: Final = 1000
# Messages may be so large that few of them are what a server takes in a request (MAX_BODY_BYTES).
_BYTES_AT_ONCE: Final = 4 << 20
_BATCH: Final = 100


class QueenPushOperator(BaseOperator):
    """Pushes messages, each once per run of the task, also when the task is retried.

        QueenPushOperator(task_id="push", queue_name="orders", messages=[{"order": 1}, {"order": 2}])
        QueenPushOperator(task_id="push", queue_name="orders", messages=read(), partition_by="shop")

    `messages` is a list of payloads, or the result of another task. All go to `partition`, or each to the one that
    `partition_by` says: a field of payloads, or a function of one. The result is `{"queued": …, "duplicates": …}`.

    The transaction id of a message is made of the run, the task and its place in the list, which is how the server
    knows it again. With `deduplicate=False` each try has new ones.
    """

    template_fields = ("queue_name", "partition", "messages", "queen_conn_id")
    ui_color = "#d7e3f4"

    def __init__(
        self,
        *,
        queue_name: str,
        messages: Any,
        partition: str | None = None,
        partition_by: str | Callable[[Any], object] | None = None,
        deduplicate: bool = True,
        queen_conn_id: str = DEFAULT_CONNECTION,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if partition is not None and partition_by is not None:
            raise QueenError("messages go to one partition, or to those of partition_by; give one of the two")
        self.queue_name = queue_name
        self.messages = messages
        self.partition = partition
        self.partition_by = partition_by
        self.deduplicate = deduplicate
        self.queen_conn_id = queen_conn_id

    def execute(self, context: Any) -> dict[str, int]:
        payloads = _listed(self.messages)
        identity = _identity(context) if self.deduplicate else None
        done = {"queued": 0, "duplicates": 0}
        with QueenHook(self.queen_conn_id).get_conn() as queen:
            for partition, numbered in self._by_partition(payloads).items():
                builder = queen.queue(self.queue_name)
                if partition is not None:
                    builder = builder.partition(partition)
                for some in _in_requests(numbered):
                    items = [
                        {"data": payload} | ({"transactionId": f"{identity}/{number}"} if identity else {})
                        for number, payload in some
                    ]
                    for result in builder.push(items):
                        done["duplicates" if result["status"] == "duplicate" else "queued"] += 1
        self.log.info(
            "%d messages were pushed to queue '%s'; %d were there already",
            done["queued"],
            self.queue_name,
            done["duplicates"],
        )
        return done

    def _by_partition(self, payloads: list[Any]) -> dict[str | None, list[tuple[int, Any]]]:
        """Payloads with their place in the whole, by partition; those of one in order."""
        found: dict[str | None, list[tuple[int, Any]]] = {}
        for number, payload in enumerate(payloads):
            found.setdefault(self._partition_of(payload), []).append((number, payload))
        return found

    def _partition_of(self, payload: Any) -> str | None:
        if self.partition_by is None:
            return self.partition
        if callable(self.partition_by):
            return str(self.partition_by(payload))
        if not isinstance(payload, dict) or self.partition_by not in payload:
            raise QueenError(f"partition_by '{self.partition_by}' is not a field of {payload!r}")
        return str(payload[self.partition_by])


class QueenConsumeOperator(BaseOperator):
    """Consumes up to `max_messages` messages of a queue, as a consumer group.

        QueenConsumeOperator(task_id="load", queue_name="orders", consumer_group="etl", handler=load_orders)

    `handler` is called with lists of messages, whose payloads are under `data`; a list is acknowledged when it
    returns, and comes again when it raises, which fails the task. The result is the number of messages then. Without
    a handler the result is the list of the payloads, for other tasks to take.

    Ends when the queue is empty, or has been for `wait_seconds`.
    """

    template_fields = ("queue_name", "consumer_group", "partition", "queen_conn_id")
    ui_color = "#d7e3f4"

    def __init__(
        self,
        *,
        queue_name: str,
        consumer_group: str,
        handler: Callable[[list[Any]], object] | None = None,
        max_messages: int = 1000,
        batch: int = _BATCH,
        partition: str | None = None,
        wait_seconds: float = 0,
        queen_conn_id: str = DEFAULT_CONNECTION,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        for name, value in (("max_messages", max_messages), ("batch", batch)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise QueenError(f"{name} must be a number from 1 on, not {value!r}")
        self.queue_name = queue_name
        self.consumer_group = consumer_group
        self.handler = handler
        self.max_messages = max_messages
        self.batch = batch
        self.partition = partition
        self.wait_seconds = wait_seconds
        self.queen_conn_id = queen_conn_id

    def execute(self, context: Any) -> int | list[Any]:
        count = 0
        payloads: list[Any] = []
        with QueenHook(self.queen_conn_id).get_conn() as queen:
            while count < self.max_messages:
                messages = self._pop(queen, min(self.batch, self.max_messages - count))
                if not messages:
                    break
                if self.handler is not None:
                    self._handle(queen, self.handler, messages)
                else:
                    payloads += [message["data"] for message in messages]
                queen.ack(messages, True, {"group": self.consumer_group})
                count += len(messages)
        self.log.info("%d messages of queue '%s' were consumed", count, self.queue_name)
        return payloads if self.handler is None else count

    def _pop(self, queen: Any, size: int) -> list[Any]:
        builder = queen.queue(self.queue_name).group(self.consumer_group).batch(size)
        if self.partition is not None:
            builder = builder.partition(self.partition)
        if self.wait_seconds > 0:
            builder = builder.wait(True).timeout_millis(int(self.wait_seconds * 1000))
        else:
            builder = builder.wait(False)
        found: list[Any] = builder.pop()
        return found

    def _handle(self, queen: Any, handler: Callable[[list[Any]], object], messages: list[Any]) -> None:
        try:
            handler(messages)
        except BaseException as error:
            # Whatever it was, also the end of the task: the messages are for the next one.
            queen.ack(messages, False, {"group": self.consumer_group, "error": text_of_error(error)})
            raise


def _in_requests(numbered: list[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
    """Payloads in order, as many at a time as a server takes in a request."""
    some: list[tuple[int, Any]] = []
    size = 0
    for number, payload in numbered:
        added = len(encode_json(payload))
        if some and (len(some) >= _AT_ONCE or size + added > _BYTES_AT_ONCE):
            yield some
            some, size = [], 0
        some.append((number, payload))
        size += added
    if some:
        yield some


def _listed(messages: Any) -> list[Any]:
    # The result of a task comes as a sequence of Airflow's own.
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes):
        return list(messages)
    hint = ""
    if isinstance(messages, str):
        hint = "; for the result of a task give the task itself, or set render_template_as_native_obj=True on the DAG"
    raise QueenError(f"messages must be a list, not {type(messages).__name__}{hint}")


def _identity(context: Any) -> str:
    """The same for each try of a task in a run."""
    task = context["ti"]
    place = f"{task.dag_id}/{task.run_id}/{task.task_id}"
    return f"airflow/{place}" + (f"/{task.map_index}" if task.map_index >= 0 else "")
