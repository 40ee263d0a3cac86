"""`Stream`: the builder of a chain of operators on a queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from queen.streams.broker import Broker, HttpBroker, source_of
from queen.streams.chain import compile_chain, config_hash_of
from queen.streams.gates import Gate
from queen.streams.operators import (
    Aggregate,
    Filter,
    FlatMap,
    Foreach,
    KeyBy,
    Map,
    Operator,
    Reduce,
    Sink,
    UserFunction,
)
from queen.streams.records import queue_name_of
from queen.streams.runner import Runner, RunOptions
from queen.streams.windows import Cron, Session, Sliding, Tumbling


class Stream:
    """A chain of operators on the messages of a queue. Every method returns a new stream; `run` starts it.

        runner = await (
            Stream.from_("orders")
            .key_by(lambda message: message["data"]["customer"])
            .window_tumbling(seconds=60)
            .aggregate({"count": lambda order: 1, "sum": lambda order: order["total"]})
            .to("totals")
            .run("totals-per-minute", "http://localhost:6632")
        )

    Before a window or a gate, functions are given the whole message; after it, the value and a context. All may be
    coroutine functions.
    """

    def __init__(self, source: Any, operators: Sequence[Operator] = ()) -> None:
        self._source = source
        self._operators = tuple(operators)

    @classmethod
    def from_(cls, queue: Any, **options: Any) -> Stream:
        """A stream of a queue: its name, or `queen.queue("name")` of a client, which then pops for it."""
        queue_name_of(queue)
        return cls(queue)

    @classmethod
    def from_queue(cls, queue: Any, **options: Any) -> Stream:
        """The same as `from_`."""
        return cls.from_(queue, **options)

    @property
    def config_hash(self) -> str:
        """The hash of the chain; state of another hash is not used."""
        return config_hash_of(self._operators)

    def map(self, function: UserFunction) -> Stream:
        """Transform each value."""
        return self._append(Map(function))

    def filter(self, predicate: UserFunction) -> Stream:
        """Keep values for which the function returns a true value."""
        return self._append(Filter(predicate))

    def flat_map(self, function: UserFunction) -> Stream:
        """Transform each value into a list of values."""
        return self._append(FlatMap(function))

    def key_by(self, function: UserFunction) -> Stream:
        """Key of windows and gates; the default is the partition."""
        return self._append(KeyBy(function))

    def window_tumbling(self, seconds: float, **options: Any) -> Stream:
        """Consecutive windows of equal length. Options: see `WindowOptions`."""
        return self._append(Tumbling(seconds, **options))

    def window_sliding(self, size: float, slide: float, **options: Any) -> Stream:
        """Windows of `size` seconds, one starting every `slide` seconds. Options: see `WindowOptions`."""
        return self._append(Sliding(size, slide, **options))

    def window_session(self, gap: float, **options: Any) -> Stream:
        """Windows that end after `gap` seconds of inactivity of a key. Options: see `WindowOptions`."""
        return self._append(Session(gap, **options))

    def window_cron(self, every: str, **options: Any) -> Stream:
        """Windows aligned to the clock, in UTC: second, minute, hour, day or week. Options: see `WindowOptions`."""
        return self._append(Cron(every, **options))

    def reduce(self, function: UserFunction, initial: Any = None) -> Stream:
        """Fold a window: `function(accumulator, value)`, from `initial` on."""
        return self._append(Reduce(function, initial))

    def aggregate(self, extractors: Mapping[str, UserFunction]) -> Stream:
        """Fold a window into named numbers: count, sum, min, max, avg; any other name is a sum."""
        return self._append(Aggregate(extractors))

    def gate(self, function: UserFunction) -> Stream:
        """Admit messages while `function(value, context)` is true; the rest of a batch is redelivered."""
        return self._append(Gate(function))

    def to(self, queue: Any, partition: str | UserFunction | None = None) -> Stream:
        """Push to a queue, exactly once; `partition`: a name, a function of the value, or by default the source's."""
        return self._append(Sink(queue, partition))

    def foreach(self, function: UserFunction) -> Stream:
        """Call a function for each value, at least once."""
        return self._append(Foreach(function))

    async def run(
        self,
        query_id: str,
        url: str | None = None,
        *,
        batch_size: int | None = None,
        max_partitions: int | None = None,
        max_wait_millis: int | None = None,
        subscription_mode: str | None = None,
        subscription_from: str | None = None,
        reset: bool = False,
        consumer_group: str | None = None,
        on_error: Callable[[Exception, dict[str, Any]], Awaitable[None] | None] | None = None,
        bearer_token: str | None = None,
        broker: Broker | None = None,
    ) -> Runner:
        """Start the stream on the server at `url` (or through a `broker`), and return its runner.

        `query_id` is the persistent name of state and position. Each pop takes up to `batch_size` (200) messages of up
        to `max_partitions` (4), with a long poll of `max_wait_millis` (1000). `reset` deletes the state of a chain that
        has changed. `on_error(error, context)` is called for every failure; the batch is then retried.
        """
        if not query_id:
            raise ValueError("run() requires a query_id")
        chain = compile_chain(self._operators)
        connection = broker or HttpBroker(url or "", bearer_token)
        defaults = RunOptions(query_id, queue_name_of(self._source))
        options = RunOptions(
            query_id,
            defaults.source_queue,
            batch_size or defaults.batch_size,
            max_partitions or defaults.max_partitions,
            defaults.max_wait_millis if max_wait_millis is None else max_wait_millis,
            subscription_mode,
            subscription_from,
            bool(reset),
            consumer_group,
            on_error,
        )
        source = source_of(self._source, connection)
        return await Runner(chain, connection, source, options, owns_broker=broker is None).start()

    def _append(self, operator: Operator) -> Stream:
        return Stream(self._source, (*self._operators, operator))


# camelCase aliases, as in the JavaScript SDK.
for _camel, _snake in (
    ("flatMap", "flat_map"),
    ("keyBy", "key_by"),
    ("windowTumbling", "window_tumbling"),
    ("windowSliding", "window_sliding"),
    ("windowSession", "window_session"),
    ("windowCron", "window_cron"),
):
    setattr(Stream, _camel, getattr(Stream, _snake))
