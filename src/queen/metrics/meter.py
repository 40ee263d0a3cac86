"""The counters of one worker. Plain numbers, fed once per request or batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from queen.metrics.counters import BATCH_SIZES, LATENCY_SECONDS, Durations, Histogram, Tally, WorkerTally
from queen.metrics.report import Report

clock: Final = time.perf_counter
"""The clock that latencies are measured with."""

_MOST_QUEUES: Final = 10_000
_FEWEST_KEPT: Final = 2000


def topic_label(done: str, namespace: str, topic: str) -> str:
    """The key of a counter: names hold no control characters, so lines separate them."""
    return f"{done}\n{namespace}\n{topic}"


class Meter:
    """Counts what a worker does, in all and for each queue."""

    def __init__(self) -> None:
        self.total = WorkerTally()
        self.queues: dict[str, Tally] = {}
        self.topics: dict[str, int] = {}
        """Items of topics by what was done with them: see `topic_label`."""
        self.topic_requests: dict[str, Durations] = {}
        """Requests about topics by what they asked for, and how long they took."""
        self.notification_errors: dict[str, int] = {}
        """Notifications that could not be handled, by the kind of their event."""
        self.done: dict[str, int] = {}
        """Operations other than on messages, counted by name and label values, one per line."""
        self.sources: list[Callable[[], Mapping[str, int]]] = []
        """Where others count such things since the worker began, by the same labels."""
        self.push_latency = Histogram.of(LATENCY_SECONDS)
        self.pop_latency = Histogram.of(LATENCY_SECONDS)
        self.ack_latency = Histogram.of(LATENCY_SECONDS)
        self.push_batches = Histogram.of(BATCH_SIZES)
        self.pop_batches = Histogram.of(BATCH_SIZES)
        self.ack_batches = Histogram.of(BATCH_SIZES)

    def histograms(self) -> Iterator[tuple[str, Histogram]]:
        for name in ("push_latency", "pop_latency", "ack_latency", "push_batches", "pop_batches", "ack_batches"):
            yield name, getattr(self, name)

    def queue(self, name: str) -> Tally:
        """The counters of a queue. Beyond a maximum number of queues, the others share one."""
        tally = self.queues.get(name)
        if tally is None:
            if len(self.queues) >= _MOST_QUEUES:
                name = ""
            tally = self.queues.setdefault(name, Tally())
        return tally

    def topic_items(self, done: str, namespace: str, topic: str, items: int) -> None:
        """Count `items` of a topic with which something was `done`. Beyond a number of topics, all others share one."""
        label = topic_label(done, namespace, topic)
        if label not in self.topics and len(self.topics) >= _MOST_QUEUES:
            label = topic_label(done, "", "")
        self.topics[label] = self.topics.get(label, 0) + items

    def topic_request(self, asked: str, topics: Iterable[tuple[str, str]], seconds: float) -> None:
        """A request about topics was answered after `seconds`; it counts for each of them."""
        for namespace, topic in topics:
            label = topic_label(asked, namespace, topic)
            took = self.topic_requests.get(label)
            if took is None:
                if len(self.topic_requests) >= _MOST_QUEUES:
                    label = topic_label(asked, "", "")
                took = self.topic_requests.setdefault(label, Durations())
            took.count += 1
            took.seconds += seconds

    def push_requested(self, queues: Sequence[str]) -> None:
        """A push request names these queues (one of them perhaps several times)."""
        self.total.push_requests += 1
        if len(queues) == 1:
            self.queue(queues[0]).push_requests += 1
            return
        for name in set(queues):
            self.queue(name).push_requests += 1

    def stored(self, queue: str, messages: int) -> None:
        self.total.push_messages += messages
        self.queue(queue).push_messages += messages

    def pop_requested(self, queues: Iterable[str]) -> None:
        self.total.pop_requests += 1
        for name in queues:
            self.queue(name).pop_requests += 1

    def pop_found_nothing(self, queues: Iterable[str]) -> None:
        self.total.pop_empty += 1
        for name in queues:
            self.queue(name).pop_empty += 1

    def popped(self, queue: str, segments: Sequence[tuple[int, datetime]], now: float, *, auto_ack: bool) -> None:
        """Messages were delivered: for each segment they came from, how many and when it was stored."""
        total, own = self.total, self.queue(queue)
        messages = 0
        for count, stored_at in segments:
            messages += count
            lag_ms = max(0.0, (now - stored_at.timestamp()) * 1000)
            total.lagged(count, lag_ms)
            own.lagged(count, lag_ms)
        total.pop_messages += messages
        own.pop_messages += messages
        if auto_ack:
            total.auto_acked += messages
            own.auto_acked += messages

    def acked(self, queue: str | None, success: int, failed: int = 0, dead: int = 0, requests: int = 1) -> None:
        """Messages of a queue (None: an unknown one) were acknowledged, by a number of `requests`."""
        total = self.total
        total.ack_success += success
        total.ack_failed += failed
        total.dead_letters += dead
        if queue is None:
            return
        own = self.queue(queue)
        own.ack_requests += requests
        own.ack_success += success
        own.ack_failed += failed
        own.dead_letters += dead

    def transacted(self, queues: Iterable[str]) -> None:
        """A transaction on these queues was committed."""
        self.total.transactions += 1
        for name in set(queues):
            self.queue(name).transactions += 1

    def partitions_made(self, queue: str, count: int) -> None:
        self.total.partitions_created += count
        self.queue(queue).partitions_created += count

    def partitions_removed(self, queue: str, count: int) -> None:
        self.total.partitions_deleted += count
        self.queue(queue).partitions_deleted += count

    def count(self, what: str, kind: str, outcome: str, times: int = 1) -> None:
        """Something was done beside messages."""
        label = f"{what}\n{kind}\n{outcome}"
        self.done[label] = self.done.get(label, 0) + times

    def all_done(self) -> dict[str, int]:
        """Operations other than messages, of all sources."""
        done = dict(self.done)
        for source in self.sources:
            for label, times in source().items():
                done[label] = done.get(label, 0) + times
        return done

    def conflated(self, queue: str, messages: int) -> None:
        """A group passed over `messages` of a queue, since there was a newer one."""
        label = f"conflated\n{queue}\n"
        if label not in self.done and len(self.done) >= _MOST_QUEUES:
            label = "conflated\n\n"
        self.done[label] = self.done.get(label, 0) + messages

    def notification_failed(self, kind: str) -> None:
        self.notification_errors[kind] = self.notification_errors.get(kind, 0) + 1

    def resume(self, report: Report) -> None:
        """Continue the counters of the predecessor of this worker."""
        self.total.add(report.total)
        for name, tally in report.queues.items():
            self.queue(name).add(tally)
        for label, items in report.topics.items():
            self.topics[label] = self.topics.get(label, 0) + items
        for label, before in report.topic_requests.items():
            self.topic_requests.setdefault(label, Durations()).add(before)
        for label, times in report.done.items():
            self.done[label] = self.done.get(label, 0) + times
        for kind, errors in report.notification_errors.items():
            self.notification_errors[kind] = self.notification_errors.get(kind, 0) + errors
        for name, histogram in self.histograms():
            counted = report.histograms.get(name)
            if counted is not None and counted.bounds == histogram.bounds:
                histogram.add(counted)

    def forget_idle(self, idle: Iterable[str]) -> None:
        """Remove queues that are idle, when there are many."""
        for name in idle:
            if len(self.queues) <= _FEWEST_KEPT:
                return
            self.queues.pop(name, None)
