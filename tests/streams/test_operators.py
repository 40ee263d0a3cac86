"""What each operator makes of messages."""

from __future__ import annotations

from typing import Any

import pytest

from queen.streams import Stream, sliding_window_gate, token_bucket_gate
from queen.streams.chain import compile_chain
from queen.streams.gates import GateContext
from tests.streams.driving import PARTITION, Driven


def source() -> Stream:
    return Stream.from_("in")


async def twice(message: Any) -> Any:
    return {"n": message["data"]["n"] * 2}


async def test_map_is_given_the_message_and_makes_the_value() -> None:
    for function in (lambda message: {"n": message["data"]["n"] * 2}, twice, lambda m, ctx: {"n": m["data"]["n"] * 2}):
        driven = Driven(source().map(function).to("out"))
        await driven.run([{"n": 1}, {"n": 2}])
        assert driven.emitted == [{"n": 2}, {"n": 4}]


async def test_operators_before_a_reducer_all_see_the_message() -> None:
    driven = Driven(
        source().map(lambda message: message["data"]["n"]).filter(lambda message: message["data"]["n"] % 2).to("out")
    )
    await driven.run([{"n": n} for n in range(4)])
    assert driven.emitted == [{"value": 1}, {"value": 3}]


async def test_flat_map_makes_any_number_of_values() -> None:
    driven = Driven(source().flat_map(lambda message: [{"w": word} for word in message["data"].split()]).to("out"))
    await driven.run(["a b", "", "c"])
    assert driven.emitted == [{"w": "a"}, {"w": "b"}, {"w": "c"}]
    with pytest.raises(TypeError, match="must return a list"):
        await Driven(source().flat_map(lambda message: "ab")).run(["x"])


async def test_an_error_in_a_function_fails_the_cycle_and_nothing_is_committed() -> None:
    def broken(message: Any, context: Any = None) -> Any:
        raise TypeError("of its own")

    for stream in (source().map(broken).to("out"), source().filter(broken).to("out"), source().foreach(broken)):
        driven = Driven(stream)
        with pytest.raises(TypeError, match="of its own"):
            await driven.run([1])
        assert driven.broker.cycles == []


async def test_what_is_no_object_is_wrapped_for_the_sink() -> None:
    driven = Driven(source().to("out"))
    await driven.run([1, "a", None, [1], {"a": 1}])
    assert driven.emitted == [{"value": 1}, {"value": "a"}, {"value": None}, {"value": [1]}, {"a": 1}]


async def test_the_sink_partition_is_the_source_s_or_a_constant_or_a_function_of_the_value() -> None:
    for partition, expected in ((None, "Default"), ("fixed", "fixed"), (lambda value: value["n"] % 2, "1")):
        driven = Driven(source().to({"queueName": "out"}, partition=partition))
        await driven.run([{"n": 1}])
        assert [(item["queue"], item["partition"]) for item in driven.broker.pushed] == [("out", expected)]


async def test_foreach_is_given_the_value_and_the_context() -> None:
    seen: list[Any] = []
    stream = source().window_tumbling(seconds=1).reduce(lambda acc, value: acc + value, 0)
    driven = Driven(stream.foreach(lambda value, context: seen.append((value, context))))
    await driven.run([1, 2, 3], created_ms=[0, 500, 1000])
    assert seen == [
        (
            3,
            {
                "partition": "Default",
                "partitionId": PARTITION,
                "key": PARTITION,
                "windowKey": "1970-01-01T00:00:00.000Z",
                "windowStart": 0,
                "windowEnd": 1000,
            },
        )
    ]
    plain: list[Any] = []
    await Driven(source().foreach(plain.append)).run([1, 2])
    assert plain == [1, 2]


async def test_operators_after_a_reducer_are_given_the_value_and_the_context() -> None:
    driven = Driven(
        source()
        .key_by(lambda message: message["data"]["k"])
        .window_tumbling(seconds=1)
        .aggregate({"count": lambda value: 1})
        .filter(lambda value: value["count"] > 1)
        .map(lambda value, context: {"key": context["key"], **value})
        .flat_map(lambda value: [value, value])
        .to("out")
    )
    await driven.run([{"k": "a"}, {"k": "a"}, {"k": "b"}], created_ms=[0, 1, 5000])
    await driven.run([{"k": "b"}], created_ms=9000)
    assert driven.emitted == [{"key": "a", "count": 2}] * 2


async def test_aggregate_counts_sums_and_averages() -> None:
    fields = {name: (lambda value: value["n"]) for name in ("sum", "min", "max", "avg", "weight")} | {
        "count": lambda value: None
    }
    driven = Driven(source().window_tumbling(seconds=1).aggregate(fields).to("out"))
    await driven.run([{"n": 4}, {"n": 1}, {"n": "no number"}, {"n": 7}, {"n": 0}], created_ms=[0, 1, 2, 3, 1000])
    (total,) = driven.emitted
    assert {name: value for name, value in total.items() if not name.startswith("__")} == {
        "sum": 12,
        "min": 1,
        "max": 7,
        "avg": 4,
        "weight": 12,
        "count": 4,
    }


async def test_a_reducer_without_initial_begins_with_nothing_and_each_window_with_its_own() -> None:
    def collect(accumulator: list[Any] | None, value: Any) -> list[Any]:
        accumulator = [] if accumulator is None else accumulator
        accumulator.append(value)
        return accumulator

    initials: tuple[Any, ...] = (None, [])
    for initial in initials:
        driven = Driven(source().window_tumbling(seconds=1).reduce(collect, initial).to("out"))
        await driven.run([1, 2, 3], created_ms=[0, 1000, 1001])
        await driven.run([4], created_ms=5000)
        assert driven.emitted == [{"value": [1]}, {"value": [2, 3]}]


async def test_a_value_that_is_null_is_reduced_as_the_message() -> None:
    driven = Driven(source().window_tumbling(seconds=1).reduce(lambda acc, value: [*acc, value], []).to("out"))
    await driven.run([None, 1], created_ms=[0, 1000])
    ((message,),) = (item["value"] for item in driven.emitted)
    assert message["transactionId"] == "t-0"


async def test_a_window_without_a_reducer_lets_values_through() -> None:
    driven = Driven(source().window_sliding(size=2, slide=1).to("out"))
    await driven.run([{"n": 1}], created_ms=5000)
    assert driven.emitted == [{"n": 1}, {"n": 1}]


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda s: s.to("out").map(len), "must be last"),
        (lambda s: s.foreach(print).to("out"), "must be last"),
        (lambda s: s.key_by(str).key_by(str), "only one .key_by"),
        (lambda s: s.window_tumbling(seconds=1).window_tumbling(seconds=1), "only one window"),
        (lambda s: s.reduce(max), "require a window"),
        (lambda s: s.aggregate({"count": len}), "require a window"),
        (lambda s: s.window_tumbling(seconds=1).reduce(max).reduce(max), "only one .reduce"),
        (lambda s: s.window_tumbling(seconds=1).reduce(max).key_by(str), "must come before"),
        (lambda s: s.gate(bool).gate(bool), "only one .gate"),
        (lambda s: s.gate(bool).window_tumbling(seconds=1), "cannot be combined"),
        (lambda s: s.window_tumbling(seconds=1).gate(bool), "cannot be combined"),
        (lambda s: s.gate(bool).key_by(str), "must come before"),
        (lambda s: s.window_session(gap=1).to("out"), "requires a .reduce"),
    ],
)
def test_chains_that_cannot_work_are_refused(build: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        compile_chain(build(source())._operators)


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda s: s.map(1), TypeError),
        (lambda s: s.filter(None), TypeError),
        (lambda s: s.key_by("k"), TypeError),
        (lambda s: s.gate(True), TypeError),
        (lambda s: s.foreach("x"), TypeError),
        (lambda s: s.reduce(1), TypeError),
        (lambda s: s.aggregate({}), ValueError),
        (lambda s: s.aggregate([1]), TypeError),
        (lambda s: s.aggregate({"sum": 1}), TypeError),
        (lambda s: s.window_tumbling(seconds=0), ValueError),
        (lambda s: s.window_tumbling(seconds="1"), ValueError),
        (lambda s: s.window_tumbling(seconds=0.0001), ValueError),
        (lambda s: s.window_tumbling(seconds=1, on_late="ignore"), ValueError),
        (lambda s: s.window_tumbling(seconds=1, grace=1), TypeError),
        (lambda s: s.window_sliding(size=10, slide=3), ValueError),
        (lambda s: s.window_sliding(size=10, slide=-1), ValueError),
        (lambda s: s.window_session(gap=-1), ValueError),
        (lambda s: s.window_cron(every="month"), ValueError),
        (lambda s: s.to(7), ValueError),
        (lambda s: s.to({}), ValueError),
        (lambda s: s.gate(token_bucket_gate(capacity=0, refill_per_sec=1)), ValueError),
        (lambda s: s.gate(token_bucket_gate(capacity=1, refill_per_sec=float("inf"))), ValueError),
        (lambda s: s.gate(sliding_window_gate(limit=True, window_sec=1)), ValueError),
        (lambda s: s.gate(gate_with(cost_fn=s)), TypeError),
    ],
)
def test_arguments_that_cannot_work_are_refused(build: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        build(source())


def test_the_names_of_javascript_work_too() -> None:
    snake = (
        source()
        .flat_map(list)
        .key_by(str)
        .window_tumbling(
            seconds=1, grace_period=2, idle_flush_ms=3, event_time=len, allowed_lateness=4, on_late="include"
        )
    )
    camel: Any = source()
    camel = camel.flatMap(list).keyBy(str)
    camel = camel.windowTumbling(
        seconds=1, gracePeriod=2, idleFlushMs=3, eventTime=len, allowedLateness=4, onLate="include"
    )
    assert camel.config_hash == snake.config_hash


async def test_a_gate_lets_through_in_order_until_it_denies_and_keeps_the_lease() -> None:
    def three(value: Any, context: GateContext) -> bool:
        context.state["n"] = context.state.get("n", 0) + 1
        return bool(context.state["n"] <= 3)

    driven = Driven(source().gate(three).to("out"))
    await driven.run(list(range(5)))
    assert driven.emitted == [{"value": 0}, {"value": 1}, {"value": 2}]
    (cycle,) = driven.broker.cycles
    assert cycle["ack"] == {"transactionId": "t-2", "leaseId": "lease", "status": "completed", "count": 3}
    assert cycle["release_lease"] is False
    # What the denied message did to the state was not kept.
    assert driven.broker.values(PARTITION) == {PARTITION: {"n": 3}}
    await driven.run([9])
    assert len(driven.broker.cycles) == 1
    assert driven.metrics.snapshot()["gateAllowsTotal"] == 3
    assert driven.metrics.snapshot()["gateDenialsTotal"] == 3


async def test_a_gate_that_allows_all_acks_all_and_releases() -> None:
    driven = Driven(source().filter(lambda message: message["data"] < 2).gate(lambda value, context: True).to("out"))
    await driven.run(list(range(5)))
    (cycle,) = driven.broker.cycles
    assert (cycle["ack"]["transactionId"], cycle["ack"]["count"], cycle["release_lease"]) == ("t-4", 5, True)
    # A batch of which nothing reaches the gate is done as well.
    await driven.run([7, 8])
    assert driven.broker.acked[PARTITION] == 7


async def test_a_message_of_several_values_passes_a_gate_whole_or_not_at_all() -> None:
    def two(value: Any, context: GateContext) -> dict[str, bool]:
        context.state["n"] = context.state.get("n", 0) + 1
        return {"allow": context.state["n"] <= 3}

    driven = Driven(source().flat_map(lambda message: [message["data"]] * 2).gate(two).to("out"))
    await driven.run(["a", "b"])
    assert driven.emitted == [{"value": "a"}] * 2
    assert driven.broker.acked[PARTITION] == 1
    assert driven.broker.values(PARTITION) == {PARTITION: {"n": 2}}


async def test_a_gate_has_a_state_for_each_key() -> None:
    contexts: list[Any] = []

    def note(value: Any, context: Any) -> bool:
        contexts.append((context.key, context.partition, context.partitionId, context.streamTimeMs > 0))
        context.state["last"] = value
        return True

    driven = Driven(source().key_by(lambda message: message["data"]).gate(note).foreach(lambda value: None))
    await driven.run(["a", "b", "a"])
    assert driven.broker.values(PARTITION) == {"a": {"last": "a"}, "b": {"last": "b"}}
    assert contexts[0] == ("a", "Default", PARTITION, True)
    with pytest.raises(AttributeError):
        _ = GateContext({}, 0, "", "", "").nonsense


async def test_a_gate_must_answer_with_a_bool() -> None:
    driven = Driven(source().gate(lambda value, context: 1).to("out"))
    with pytest.raises(TypeError, match="must return a bool"):
        await driven.run([1])


def gate_with(**options: Any) -> Any:
    return sliding_window_gate(limit=1, window_sec=1, **options)


def at(gate: Any, state: dict[str, Any], ms: int, value: Any = None) -> bool:
    return bool(gate(value, GateContext(state, ms, "", "", "")))


def test_a_token_bucket_empties_and_fills_again() -> None:
    gate = token_bucket_gate(capacity=2, refill_per_sec=1)
    state: dict[str, Any] = {}
    assert [at(gate, state, 0) for _ in range(3)] == [True, True, False]
    assert [at(gate, state, 1000) for _ in range(2)] == [True, False]
    assert [at(gate, state, 60_000) for _ in range(3)] == [True, True, False]
    assert state["allowedTotal"] == state["consumedTotal"] == 5


def test_a_token_bucket_charges_what_a_message_costs() -> None:
    gate = token_bucket_gate(capacity=10, refill_per_sec=1, cost_fn=lambda value: value)
    state: dict[str, Any] = {}
    assert [at(gate, state, 0, cost) for cost in (6, 5, 4, 0, "free", 1)] == [True, False, True, True, False, False]
    strict = token_bucket_gate(capacity=10, refill_per_sec=1, cost_fn=lambda value: 0, allow_zero_cost=False)
    assert at(strict, {}, 0) is False


def test_a_sliding_window_gate_counts_part_of_the_window_before() -> None:
    gate = sliding_window_gate(limit=10, window_sec=1)
    state: dict[str, Any] = {}
    assert sum(at(gate, state, 0) for _ in range(20)) == 10
    # Half of the window before still counts: five of its ten.
    assert sum(at(gate, state, 1500) for _ in range(20)) == 5
    assert sum(at(gate, state, 9000) for _ in range(20)) == 10
