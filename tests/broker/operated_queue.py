"""One queue with its consumers and operators: each step is made on the servers and on the model, and both compared."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from queen.broker.maintenance.election import Session
from queen.broker.maintenance.retention import Eviction, Retention, Trimmer
from queen.broker.maintenance.schedule import PushListener
from queen.wire.ids import partition_uuid
from tests.broker.operations import (
    CONFLATED,
    GROUPS,
    OLD,
    QUEUE_MODE,
    Age,
    Bulk,
    Clear,
    Configure,
    DeadLetters,
    Forget,
    Look,
    Pause,
    Recreate,
    Release,
    Retain,
    Seek,
    Single,
    Undo,
)
from tests.broker.test_model import (
    PARTITIONS,
    AckAll,
    AckSome,
    Expire,
    Message,
    Nothing,
    Pop,
    Push,
    Renew,
    Transaction,
    naming,
)
from tests.support.ageing import age
from tests.support.api import Answer, Api
from tests.support.database import Connection, stored_log
from tests.support.model import Ack, Outcome
from tests.support.operated_model import Log, OperatedModel
from tests.support.queue_facts import queue_facts

NAMES = itertools.count()
UNRESOLVABLE = "Message not found: the transactionId is unresolvable in this partition"
AGE = 55
"""Seconds, once in a history: what a worker remembers of transaction ids does not age, and allows for a minute."""
NO_OPTIONS: dict[str, Any] = {"retryLimit": 1, "retryDelay": 0}


@dataclass
class Sought:
    id: int
    group: str
    before: dict[str, int]
    undone: bool = False


class OperatedQueue:
    """One history on a queue of its own."""

    def __init__(self, servers: list[Api], connection: Connection, session: Session) -> None:
        self.queue = f"operated-{next(NAMES)}"
        self.servers = servers
        self.connection = connection
        self.session = session
        self.model = OperatedModel()
        self.deliveries: list[tuple[str, list[Message]]] = []
        self.seeks: list[Sought] = []
        self.options: dict[str, Any] = {}
        self.aged = False

    async def call(self, worker: int, method: str, path: str, body: Any = None, **query: Any) -> Answer:
        answer = await self.servers[worker % len(self.servers)].call(method, path, body, **query)
        assert answer.status < 500, (method, path, body, answer)
        return answer

    async def good(self, worker: int, method: str, path: str, body: Any = None, **query: Any) -> Any:
        answer = await self.call(worker, method, path, body, **query)
        assert answer.status in (200, 201), (method, path, body, answer)
        return answer.body

    async def begin(self) -> None:
        await self.configure(Configure(0, {}))
        await self.compare()

    async def step(self, operation: Any) -> None:
        handlers: dict[type, Callable[[Any], Awaitable[None]]] = {
            Nothing: self.nothing,
            Push: self.push,
            Pop: self.pop,
            AckSome: self.ack_some,
            AckAll: self.ack_all,
            Transaction: self.transaction,
            Expire: self.expire,
            Renew: self.renew,
            Single: self.single,
            Bulk: self.bulk,
            DeadLetters: self.dead_letters,
            Seek: self.seek,
            Undo: self.undo,
            Release: self.release,
            Pause: self.pause,
            Configure: self.configure,
            Age: self.age,
            Retain: self.retain,
            Clear: self.clear,
            Recreate: self.recreate,
            Forget: self.forget,
            Look: self.look,
        }
        await handlers[type(operation)](operation)
        await self.compare(popped=isinstance(operation, Pop))

    async def nothing(self, _: Nothing) -> None:
        pass

    def log(self, partition: str) -> Log:
        return self.model.partitions[partition]

    async def push(self, push: Push) -> None:
        results = await self.good(push.worker, "POST", "/api/v1/push", {"items": self._items(push.items)})
        for (partition, number), result in zip(push.items, results, strict=True):
            log, name = self.log(partition), f"t{number}"
            if name in log.ids:
                assert result["status"] == "duplicate", result
                assert log.ids[name] == result["message_id"]
            else:
                assert result["status"] == "queued", result
                log.append(name, result["message_id"], number)

    async def pop(self, pop: Pop) -> None:
        model, group = self.model, pop.group
        auto_ack = pop.auto_ack and group != CONFLATED
        conflation = {"conflation": True, "subscriptionMode": "all"} if group == CONFLATED else {}
        if group == CONFLATED and group not in model.conflated:
            # An ack without a lease makes a deleted group known again, which is then one like the others.
            facts = await queue_facts(self.connection, self.queue)
            if not any(known == group for _, known in facts.cursors):
                model.conflated.add(group)
        available = {name: model.available_offsets(name, group) for name in PARTITIONS}
        path = f"/api/v1/pop/queue/{self.queue}" + (f"/partition/{pop.partition}" if pop.partition else "")
        answer = await self.call(
            pop.worker,
            "GET",
            path,
            batch=pop.batch,
            partitions=pop.partitions,
            autoAck=auto_ack,
            consumerGroup=group,
            **conflation,
        )
        messages = answer.body["messages"] if answer.body else []
        assert len(messages) <= max(pop.batch, pop.partitions if group == CONFLATED else 0)
        assert bool(messages) == any(available[name] for name in PARTITIONS if pop.partition in (None, name)), (
            "something came, or nothing did",
            available,
            messages,
        )
        if not messages:
            return
        assert bool(messages[0]["leaseId"]) != auto_ack
        assert len({message["leaseId"] for message in messages}) == 1
        served = itertools.groupby(messages, key=lambda message: str(message["partition"]))
        claimed = 0
        for name, some in served:
            claimed += 1
            several = list(some)
            log = self.log(name)
            offsets = available[name][: len(several)]
            delivered = [message["id"] for message in several]
            assert delivered == [log.messages[offset] for offset in offsets], (pop, name, offsets, delivered, log)
            assert [message["transactionId"] for message in several] == [log.log[offset] for offset in offsets]
            assert [message["data"]["n"] for message in several] == [log.payloads[offset] for offset in offsets]
            assert {message["partitionId"] for message in several} == {log.id}
            if pop.partition is not None:
                assert offsets == model.batch(name, group, pop.batch)
            model.take(name, group, offsets, messages[0]["leaseId"] or None)
        assert claimed <= pop.partitions
        self.deliveries.append((group, messages))

    def delivery(self, back: int) -> tuple[str, list[Message]] | None:
        return self.deliveries[-1 - back] if back < len(self.deliveries) else None

    async def ack_some(self, ack: AckSome) -> None:
        found = self.delivery(ack.delivery)
        if found is None:
            return
        group, messages = found
        chosen = [(messages[index % len(messages)], status) for index, status in ack.items]
        await self._ack(ack.worker, group, chosen[:1] if ack.single else chosen, ack.with_lease, ack.single)

    async def ack_all(self, ack: AckAll) -> None:
        found = self.delivery(ack.delivery)
        if found is not None:
            group, messages = found
            await self._ack(ack.worker, group, [(message, ack.status) for message in messages], True, False)

    async def _ack(
        self, worker: int, group: str, chosen: list[tuple[Message, str]], with_lease: bool, single: bool
    ) -> None:
        chosen = [one for one in chosen if self._is_clear(group, one[0], with_lease)]
        if not chosen:
            return
        bodies = [naming(message, with_lease) | {"status": status} for message, status in chosen]
        if single:
            results = await self.good(worker, "POST", "/api/v1/ack", bodies[0] | {"consumerGroup": group})
        else:
            body = {"acknowledgments": bodies, "consumerGroup": group}
            results = await self.good(worker, "POST", "/api/v1/ack/batch", body)
        applied = []
        for index, (message, status) in enumerate(chosen):
            offset = self._offset(message)
            if offset is None or not offset >= self.log(message["partition"]).stored:
                # Of what is stored no more, only who delivered it knows where it was.
                if results[index]["error"] == UNRESOLVABLE:
                    continue
                assert offset is not None, results[index]
            applied.append((index, message, status))
        answered = [Outcome(results[i]["success"], results[i]["error"], results[i]["dlq"]) for i, _, _ in applied]
        assert answered == self._apply(group, [(message, status) for _, message, status in applied], with_lease)

    def _apply(self, group: str, chosen: Sequence[tuple[Message, str]], with_lease: bool) -> list[Outcome]:
        outcomes = [Outcome(False)] * len(chosen)
        for name, indexes, acks in self._by_partition(chosen, with_lease):
            for index, outcome in zip(indexes, self.model.ack(name, group, acks), strict=True):
                outcomes[index] = outcome
        return outcomes

    def _by_partition(
        self, chosen: Sequence[tuple[Message, str]], with_lease: bool
    ) -> list[tuple[str, list[int], list[Ack]]]:
        by_partition: dict[str, list[int]] = {}
        for index, (message, _) in enumerate(chosen):
            by_partition.setdefault(message["partition"], []).append(index)
        result = []
        for name, indexes in by_partition.items():
            acks = []
            for index in indexes:
                message, status = chosen[index]
                offset = self._offset(message)
                assert offset is not None
                acks.append(Ack(offset, status, message["leaseId"] if with_lease else None))
            result.append((name, indexes, acks))
        return result

    def _offset(self, message: Message) -> int | None:
        """None: its partition was deleted with the queue."""
        log = self.log(message["partition"])
        return log.messages.index(message["id"]) if log.id == message["partitionId"] else None

    def _is_clear(self, group: str, message: Message, with_lease: bool) -> bool:
        """Whether the name alone says which message is meant: one may have been deleted, and pushed again."""
        log = self.log(message["partition"])
        if log.id != message["partitionId"] or log.log.count(message["transactionId"]) == 1:
            return True
        cursor = self.model.cursors[message["partition"], group]
        if not (with_lease and cursor.leased and cursor.lease == message["leaseId"]):
            return False
        return log.log[cursor.committed : cursor.lease_end].count(message["transactionId"]) == 1

    async def transaction(self, transaction: Transaction) -> None:
        found = self.delivery(transaction.delivery)
        acks: list[tuple[Message, str]] = []
        group = QUEUE_MODE
        if found is not None:
            group, messages = found
            acks = [(messages[index % len(messages)], status) for index, status in transaction.acks]
        acks = [one for one in acks if self._is_clear(group, one[0], transaction.with_lease)]
        body: list[dict[str, Any]] = [
            {"type": "ack", "consumerGroup": group, "status": status} | naming(message, transaction.with_lease)
            for message, status in acks
        ]
        if transaction.items:
            body.insert(len(body) // 2, {"type": "push", "items": self._items(transaction.items)})
        if not body:
            return
        answer = await self.good(transaction.worker, "POST", "/api/v1/transaction", {"operations": body})
        gone = [message for message, _ in acks if self._offset(message) is None]
        lost = [m for m, _ in acks if m not in gone and (self._offset(m) or 0) < self.log(m["partition"]).stored]
        if gone or (lost and not answer["success"]):
            assert answer["success"] is False
            return
        wanted = [(partition, f"t{number}") for partition, number in transaction.items]
        possible = len(set(wanted)) == len(wanted) and not any(id in self.log(name).ids for name, id in wanted)
        parts = [(name, group, several) for name, _, several in self._by_partition(acks, transaction.with_lease)]
        assert answer["success"] == (possible and self.model.transact(parts)), answer
        if answer["success"]:
            pushed = [result for result in answer["results"] if result["type"] == "push"]
            for (partition, number), result in zip(transaction.items, pushed, strict=True):
                self.log(partition).append(f"t{number}", result["messageId"], number)

    async def renew(self, renew: Renew) -> None:
        found = self.delivery(renew.delivery)
        if found is None or not found[1][0]["leaseId"]:
            return
        lease = found[1][0]["leaseId"]
        answer = await self.call(renew.worker, "POST", f"/api/v1/lease/{lease}/extend", {"seconds": 500})
        assert answer.status == (200 if self.model.holds(lease) else 404)

    async def expire(self, _: Expire) -> None:
        """Leases end, and the retries of what failed are due."""
        await self.connection.execute(
            "UPDATE queen.cursors c SET lease_until = clock_timestamp() - interval '1 ms'"
            " FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id"
            " WHERE q.name = $1 AND c.partition_id = p.id AND c.lease_until IS NOT NULL",
            self.queue,
        )
        self.model.expire()

    async def single(self, single: Single) -> None:
        log = self.log(single.partition)
        if not log.log:
            return
        name = log.log[-1 - single.which % len(log.log)]
        path = f"/api/v1/messages/{log.id}/{name}"
        newest, dead = self.model.found(single.partition, name)
        if single.action == "delete":
            answer = await self.good(single.worker, "DELETE", path)
            offsets = dead or ([newest] if newest is not None else [])
            assert answer["success"] == bool(self.model.delete(single.partition, offsets)), answer
        elif single.action == "retry":
            status = (await self.call(single.worker, "POST", f"{path}/retry")).status
            offsets = dead or ([newest] if newest is not None else [])
            assert status == (200 if offsets else 404)
            await self._redriven([(single.partition, offset) for offset in offsets])
        else:
            answer = await self.call(single.worker, "POST", f"{path}/dlq", {"consumerGroup": single.group})
            assert answer.status == (200 if newest is not None else 404), answer
            if newest is not None:
                self.model.bury(single.partition, newest, single.group)

    async def bulk(self, bulk: Bulk) -> None:
        model = self.model
        body: dict[str, Any] = {"queue": self.queue}
        if bulk.refs is not None:
            pairs = [(name, self.log(name)) for name, _ in bulk.refs]
            named = [
                (name, log.log[-1 - which % len(log.log)])
                for (name, log), (_, which) in zip(pairs, bulk.refs, strict=True)
                if log.log
            ]
            body["messages"] = [{"partitionId": self.log(p).id, "transactionId": id} for p, id in named]
            chosen = [(p, offset) for p, id in dict.fromkeys(named) for offset in model.named(p, id)]
        else:
            partition, only_dead, least = bulk.filter
            body["filter"] = {
                **({"partition": partition} if partition else {}),
                **({"status": "dead_letter"} if only_dead else {}),
                **({"where": [f"n>{least}"]} if least is not None else {}),
            }
            chosen = [
                (name, offset)
                for name in PARTITIONS
                if partition in (None, name)
                for offset in self.log(name).living(0, len(self.log(name).log))
                if least is None or self.log(name).payloads[offset] > least
                if not only_dead or any((p, o) == (name, offset) for p, o, _ in model.letters)
            ]
        if bulk.action == "dlq":
            body["consumerGroup"] = bulk.group
        answer = await self.good(bulk.worker, "POST", f"/api/v1/messages/{bulk.action}", body)
        # Of those named, what was deleted before is matched, and then not found.
        assert answer["matched"] == len(chosen) or (bulk.refs is not None and answer["matched"] > len(chosen)), answer
        assert answer["failed"] == 0 and answer["cursor"] is None
        if bulk.action == "delete":
            by_partition = [(name, [o for p, o in chosen if p == name]) for name in PARTITIONS]
            assert answer["done"] == sum(model.delete(name, offsets) for name, offsets in by_partition)
        elif bulk.action == "dlq":
            alive = [(name, offset) for name, offset in chosen if self.log(name).alive(offset)]
            assert answer["done"] == len(alive)
            for name, offset in alive:
                model.bury(name, offset, bulk.group)
        else:
            dead = {(p, o) for p, o, _ in model.letters}
            chosen.sort()
            await self._redriven([one for one in chosen if one in dead] + [one for one in chosen if one not in dead])
            assert answer["done"] == len(chosen)

    async def dead_letters(self, asked: DeadLetters) -> None:
        model = self.model
        chosen = {
            (p, o, g)
            for p, o, g in model.letters
            if asked.group in (None, g)
            and asked.partition in (None, p)
            and (asked.names is None or model.names[p, o][0] in [f"t{number}" for number in asked.names])
        }
        body = {
            "queue": self.queue,
            "consumerGroup": asked.group,
            "partition": asked.partition,
            "transactionIds": None if asked.names is None else [f"t{number}" for number in asked.names],
        }
        if asked.action == "purge":
            answer = await self.good(asked.worker, "DELETE", "/api/v1/dlq", body)
            assert answer["deleted"] == len(chosen)
            model.letters -= chosen
            return
        answer = await self.good(asked.worker, "POST", "/api/v1/dlq/retry", body)
        redriven = sorted({(p, o) for p, o, _ in chosen})
        assert answer["retried"] == len(redriven), answer
        await self._redriven(redriven, asked.group)

    async def _redriven(self, chosen: Sequence[tuple[str, int]], group: str | None = None) -> None:
        """Each of the messages has exactly one copy at the end of its partition, and its dead letters are gone."""
        model = self.model
        sources = {one: model.names.get(one) or self._name(*one) for one in chosen}
        model.letters = {
            letter for letter in model.letters if letter[:2] not in sources or group not in (None, letter[2])
        }
        stored = await stored_log(self.connection, self.queue)
        for name in PARTITIONS:
            log = self.log(name)
            expected = [source for (partition, _), source in sources.items() if partition == name]
            copies = [message for message in stored.get(name, []) if message.offset >= len(log.log)]
            assert len(copies) == len(expected), (name, copies, expected)
            for one, (source, payload) in zip(copies, expected, strict=True):
                base = re.sub(r":retry-\d+$", "", source)
                assert re.fullmatch(re.escape(base) + r":retry-\d+", one.transaction_id), (one, source)
                assert one.transaction_id not in log.ids and one.id not in log.messages
                assert json.loads(one.payload) == {"n": payload}, (one, payload)
                log.append(one.transaction_id, one.id, payload)

    def _name(self, partition: str, offset: int) -> tuple[str, int]:
        log = self.log(partition)
        return log.log[offset], log.payloads[offset]

    async def seek(self, seek: Seek) -> None:
        body: dict[str, Any]
        moment: datetime | None = None
        if seek.where == "offset":
            body = {"offset": seek.number}
        elif seek.where == "time":
            moment = await self.connection.fetchval(
                "SELECT s.created_at FROM queen.segments s JOIN queen.partitions p ON p.id = s.partition_id"
                " JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = $1 ORDER BY 1 OFFSET $2 LIMIT 1",
                self.queue,
                seek.number % 5,
            )
            body = {"timestamp": (moment or datetime.fromisoformat("2020-01-01T00:00:00Z")).isoformat()}
        else:
            body = {seek.where: True}
        path = f"/api/v1/consumer-groups/{seek.group}/queues/{self.queue}"
        if seek.partition is not None:
            path += f"/partitions/{seek.partition}"
        answer = await self.call(seek.worker, "POST", f"{path}/seek", body)
        if answer.status == 404:
            assert seek.partition is not None and not self.log(seek.partition).id
            return
        assert answer.status == 200, answer
        facts = await queue_facts(self.connection, self.queue)
        moved = [name for name, g in facts.cursors if g == seek.group and seek.partition in (None, name)]
        if seek.partition is None:
            assert answer.body["partitionsUpdated"] == len(moved)
        else:
            assert answer.body["updated"] == bool(moved)
        before = {}
        for name in moved:
            log, cursor = self.log(name), self.model.cursors[name, seek.group]
            target = {"toEnd": len(log.log), "toBeginning": 0}.get(seek.where, seek.number)
            if seek.where == "time":
                target = 0
                for row in facts.partitions[name]["segments"]:
                    if moment is not None and row["created_at"] <= moment:
                        target = row["base_offset"] + row["count"]
            target = min(max(target, log.floor), len(log.log))
            if target != cursor.committed:
                before[name] = cursor.committed
            self._move(name, seek.group, target)
        if answer.body["seekId"] is not None:
            self.seeks.append(Sought(answer.body["seekId"], seek.group, before))

    def _move(self, partition: str, group: str, target: int) -> None:
        cursor = self.model.cursors[partition, group]
        cursor.release()
        cursor.delayed = False
        cursor.committed, cursor.lease_end = target, 0

    async def undo(self, undo: Undo) -> None:
        if undo.which >= len(self.seeks):
            return
        sought = self.seeks[-1 - undo.which]
        path = f"/api/v1/consumer-groups/{sought.group}/queues/{self.queue}/seek/undo"
        answer = await self.call(undo.worker, "POST", path, {"seekId": sought.id})
        assert answer.status == (409 if sought.undone else 200), answer
        if sought.undone:
            return
        sought.undone = True
        before = {}
        assert answer.body["partitionsUpdated"] == len(sought.before)
        for name, committed in sought.before.items():
            log, cursor = self.log(name), self.model.cursors[name, sought.group]
            target = min(max(committed, log.floor), len(log.log))
            if target != cursor.committed:
                before[name] = cursor.committed
            self._move(name, sought.group, target)
        self.seeks.append(Sought(answer.body["seekId"], sought.group, before))

    async def release(self, release: Release) -> None:
        path = f"/api/v1/consumer-groups/{release.group}/queues/{self.queue}/partitions/{release.partition}/release"
        answer = await self.call(release.worker, "POST", path)
        cursor = self.model.cursors.get((release.partition, release.group))
        if cursor is None or not cursor.leased:
            assert answer.status == 404, answer
            return
        assert answer.status == 200, answer
        assert answer.body["leaseId"] == cursor.lease
        cursor.release()

    async def pause(self, pause: Pause) -> None:
        path = f"/api/v1/consumer-groups/{pause.group}/queues/{self.queue}" if pause.group else ""
        path = path or f"/api/v1/resources/queues/{self.queue}"
        answer = await self.call(pause.worker, "POST", f"{path}/{pause.action}")
        if answer.status == 404:
            assert not await self.connection.fetchval("SELECT 1 FROM queen.groups WHERE name = $1", pause.group)
            return
        was = pause.group in self.model.paused
        assert answer.body["changed"] == (was != (pause.action == "pause"))
        (self.model.paused.add if pause.action == "pause" else self.model.paused.discard)(pause.group)

    async def configure(self, configure: Configure) -> None:
        self.options = NO_OPTIONS | configure.options
        body = {"queue": self.queue, "options": self.options}
        await self.good(configure.worker, "POST", "/api/v1/configure", body)
        self.model.retry_limit = self.options["retryLimit"]
        self.model.retry_delay = self.options["retryDelay"] > 0
        self.model.delay = "delayedProcessing" in self.options
        self.model.ttl = "ttl" in self.options

    async def age(self, _: Age) -> None:
        if not self.aged:
            self.aged = True
            await age(self.connection, AGE, *PARTITIONS)
            for name in PARTITIONS:
                self.log(name).old = len(self.log(name).log)

    async def retain(self, retain: Retain) -> None:
        options = self.options
        await self.configure(Configure(retain.worker, options | {retain.option: OLD, "retentionEnabled": True}))
        facts = await queue_facts(self.connection, self.queue)
        for name in PARTITIONS:
            log = self.log(name)
            committed = [row["committed"] for (p, _), row in facts.cursors.items() if p == name]
            upto = log.old
            if retain.option == "completedRetentionSeconds":
                segments = facts.partitions[name]["segments"] if name in facts.partitions else []
                ends = [0, *[row["base_offset"] + row["count"] for row in segments]]
                upto = max(end for end in ends if end <= min(log.old, min(committed, default=0)))
            elif retain.option == "maxWaitTimeSeconds" and max(log.floor, min(committed, default=0)) >= log.old:
                upto = 0
            log.floor = max(log.floor, upto)
            if "ttl" in options:
                log.floor = max(log.floor, log.old)
        for job in (Retention(Trimmer(1000, PushListener())), Eviction(Trimmer(1000, PushListener()))):
            await job.run(self.session)
        await self.configure(Configure(retain.worker, options))

    async def clear(self, clear: Clear) -> None:
        query = {"partition": clear.partition} if clear.partition else {}
        answer = await self.call(clear.worker, "DELETE", f"/api/v1/queues/{self.queue}/clear", **query)
        if clear.partition and not self.log(clear.partition).id:
            assert answer.status == 404
            return
        messages = 0
        for name in [clear.partition] if clear.partition else PARTITIONS:
            log = self.log(name)
            messages += len(log.log) - log.floor
            log.floor = len(log.log)
        assert answer.body["messages"] == messages

    async def recreate(self, recreate: Recreate) -> None:
        answer = await self.good(recreate.worker, "DELETE", f"/api/v1/resources/queues/{self.queue}")
        assert answer["existed"] is True
        conflated = self.model.conflated
        self.model, self.seeks = OperatedModel(), []
        self.model.conflated = conflated
        await self.configure(Configure(recreate.worker, {}))

    async def forget(self, forget: Forget) -> None:
        facts = await queue_facts(self.connection, self.queue)
        path = f"/api/v1/consumer-groups/{forget.group}/queues/{self.queue}"
        answer = await self.good(forget.worker, "DELETE", path)
        assert answer["deletedPartitions"] == sum(group == forget.group for _, group in facts.cursors)
        for key in [key for key in self.model.cursors if key[1] == forget.group]:
            del self.model.cursors[key]
        self.model.paused.discard(forget.group)
        self.model.conflated.discard(forget.group)
        self.seeks = [sought for sought in self.seeks if sought.group != forget.group]

    async def look(self, look: Look) -> None:
        facts, model = await queue_facts(self.connection, self.queue), self.model
        depth = await self.good(look.worker, "GET", f"/api/v1/resources/queues/{self.queue}/depth")
        assert depth["depth"] == sum(len(log.log) - log.floor for log in model.partitions.values())
        path = f"/api/v1/consumer-groups/{look.group}/queues/{self.queue}/partitions"
        listed = (await self.good(look.worker, "GET", path))["partitions"]
        known = {name for name, group in facts.cursors if group == look.group}
        assert {one["partition"] for one in listed} >= known
        lag = 0
        for one in listed:
            log = self.log(one["partition"])
            behind = len(log.log) - model.start(one["partition"], look.group)
            assert one["offsetLag"] == behind, one
            assert one["leaseActive"] == model.cursors[one["partition"], look.group].leased
            lag += behind
        if listed:
            assert depth["groups"][look.group] == lag
        dead = await self.good(look.worker, "GET", "/api/v1/dlq", queue=self.queue, limit=1000)
        assert dead["total"] == len(dead["messages"]) == len(model.letters)
        entries = [{"queue": self.queue, "partition": name, "offset": self.log(name).floor} for name in PARTITIONS]
        fetched = (await self.good(look.worker, "POST", "/api/v1/fetch", {"entries": entries}))["entries"]
        for name, entry in zip(PARTITIONS, fetched, strict=True):
            log = self.log(name)
            if log.id:
                assert (entry["logStartOffset"], entry["highWatermark"]) == (log.floor, len(log.log))
                read = [(record["offset"], record["payload"]["n"]) for record in entry["records"]]
                assert read == [(offset, log.payloads[offset]) for offset in log.living(0, len(log.log))]

    async def compare(self, *, popped: bool = False) -> None:
        """What is stored is what the model says."""
        facts, model = await queue_facts(self.connection, self.queue), self.model
        for name, row in facts.partitions.items():
            log = self.log(name)
            log.id = partition_uuid(row["id"])
            assert row["next_offset"] == len(log.log)
            if model.ttl and row["floor_offset"] == max(log.floor, log.old):
                log.floor = row["floor_offset"]
            assert row["floor_offset"] == log.floor
            stored = row["segments"][0]["base_offset"] if row["segments"] else row["next_offset"]
            assert log.stored <= stored
            # The first segment may hold both what is cut off and what is not.
            assert max(stored, log.floor) == log.floor
            assert sum(segment["count"] for segment in row["segments"]) == row["next_offset"] - stored
            log.stored = stored
            log.forget()
        for (name, group), row in facts.cursors.items():
            log, cursor = self.log(name), model.cursors[name, group]
            if popped or model.ttl:
                # What was deleted is passed over when it is met, and a pop that meets it may give nothing.
                assert log.living(cursor.committed, len(log.log)) == log.living(row["committed"], len(log.log))
                cursor.committed, cursor.finished = row["committed"], row["finished"]
                if row["attempts"] != cursor.attempts:
                    assert row["attempts"] == 0
                    cursor.attempts = 0
            assert (row["committed"], row["finished"], row["attempts"]) == (
                cursor.committed,
                cursor.finished,
                cursor.attempts,
            ), (name, group)
            assert row["lease"] == (cursor.lease if cursor.leased else None), (name, group)
            assert not cursor.leased or row["lease_end"] == cursor.lease_end, (name, group)
        for key, cursor in model.cursors.items():
            assert key in facts.cursors or (cursor.committed == 0 and not cursor.leased), key
        letters = await self.connection.fetch(
            "SELECT d.partition_id, d.message_offset, g.name, d.transaction_id FROM queen.dead_letters d"
            " JOIN queen.groups g ON g.id = d.group_id JOIN queen.queues q ON q.id = d.queue_id WHERE q.name = $1",
            self.queue,
        )
        names = {row["id"]: name for name, row in facts.partitions.items()}
        assert {(names[row["partition_id"]], row["message_offset"], row["name"]) for row in letters} == model.letters
        for row in letters:
            assert model.names[names[row["partition_id"]], row["message_offset"]][0] == row["transaction_id"]

    async def check(self) -> None:
        """What is left comes out in order for every group, and then there is nothing."""
        for group in ("", *GROUPS):
            await self.step(Pause(0, group, "resume"))
        await self.step(Configure(0, {}))
        await self.step(Expire())
        for group in GROUPS:
            await self.step(Look(1, group))
            for _ in range(2):
                for name in PARTITIONS:
                    await self.step(Pop(0, group, name, 1000, 1, True))
                    await self.step(AckAll(1, 0, "completed"))
            await self.step(Pop(1, group, None, 1000, 3, True))
            await self.step(Look(0, group))
        for name in PARTITIONS:
            for group in GROUPS:
                assert not self.model.available_offsets(name, group)
        await self.good(0, "DELETE", f"/api/v1/resources/queues/{self.queue}")

    def _items(self, several: list[tuple[str, int]]) -> list[dict[str, Any]]:
        return [
            {"queue": self.queue, "partition": partition, "transactionId": f"t{number}", "payload": {"n": number}}
            for partition, number in several
        ]
