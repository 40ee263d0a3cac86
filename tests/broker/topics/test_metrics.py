"""Metrics of topics for Prometheus."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from queen.metrics.meter import Meter
from tests.support.api import Api
from tests.support.topic_api import TopicApi, item, named

_LABELS = ("op", "namespace", "topic", "shard")


async def samples(api: Api, family: str) -> dict[tuple[str, ...], float]:
    """The values of a family by its name and labels."""
    text = (await api.call("GET", "/metrics/prometheus")).body
    return {
        (sample.name, *(sample.labels[name] for name in _LABELS if name in sample.labels)): sample.value
        for found in text_string_to_metric_families(text)
        if found.name == family
        for sample in found.samples
    }


async def test_requests_are_counted_and_timed_by_topic(api: Api) -> None:
    topics = TopicApi(api)
    await topics.enqueue(item(1, "a"), item(2, "a"), item(3, "b"))
    one, two = await topics.dequeue(topic="a")
    await topics.ack(one)
    await topics.nack(two)
    [three] = await topics.good("GET", "/dequeue/many", namespace="ns", limit=1)
    await topics.good("POST", "/ack", [named(three)])

    name = "queen_topic_request_duration_seconds"
    found = await samples(api, name)
    counts = {labels[1:]: value for labels, value in found.items() if labels[0] == f"{name}_count"}
    assert counts == {
        ("enqueue", "ns", "a"): 1,
        ("enqueue", "ns", "b"): 1,
        ("dequeue", "ns", "a"): 1,
        ("dequeue", "ns", "b"): 1,
        ("ack", "ns", "a"): 1,
        ("ack", "ns", "b"): 1,
        ("nack", "ns", "a"): 1,
    }
    assert all(value > 0 for value in found.values())
    items = await samples(api, "queen_topic_items")
    assert items["queen_topic_items_total", "enqueued", "ns", "a"] == 2
    assert items["queen_topic_items_total", "dequeued", "ns", "b"] == 1


async def test_what_a_quota_refuses_is_counted_by_namespace(api: Api) -> None:
    topics = TopicApi(api)
    await topics.good("PUT", "/quotas", {"namespace": "ns", "per_minute": 1})
    await topics.enqueue(item(1))
    assert (await topics.call("POST", "/enqueue", [item(2)])).status == 429
    assert (await samples(api, "queen_topic_items"))["queen_topic_items_total", "refused", "ns", ""] == 1


async def test_shard_that_answers_is_up(api: Api) -> None:
    assert await samples(api, "queen_shard_up") == {("queen_shard_up", "0"): 1.0}


def test_topics_beyond_a_number_share_one_label() -> None:
    meter = Meter()
    meter.topic_request("ack", [("ns", str(n)) for n in range(10_005)], 0.5)
    assert len(meter.topic_requests) == 10_001
    assert meter.topic_requests["ack\n\n"].count == 5
