"""Bad input: the error says what is wrong and where, nothing is stored, and other clients are not affected.

`_SURFACES` has an entry for every route, so a new route is not served before its bad input was thought of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from tests.conftest import StartServer
from tests.support.api import Answer, Api
from tests.support.database import Connection, stored_ids
from tests.support.raw_http import exchange, push_body, raw_payloads

_SOON_SECONDS = 60.0
_LONG = "x" * 256
_BINARY = "/api/v1/read/"
_NO_UUID = "51756565-0000-8000-8000-00000000beef"
_CONTROLS = ("a%00b", "%00", "a%0Ab", "%1B", "%7F")
_NOT_TEXT = ("%FF", "%ED%A0%80", "a%C3")
_ABSURD = ("9" * 30, "-" + "9" * 30, "9223372036854775807", "-5", "1.5", "1e400", "NaN", "Infinity", "many", "%00", "")
_DEEP = 100_000
_TIMES = ("yesterday", "9" * 30, "-5", "NaN", "a%00b", _LONG, "2026-13-45T00:00:00Z")


@dataclass(frozen=True)
class Surface:
    """Where bad input can get into one route, and what it answers.

    `PARTITION`, `LEASE` and `MESSAGE` in a body stand for ones that exist.
    """

    reads_body: bool = False
    needs_body: bool = True
    refused: Mapping[str, str] = field(default_factory=dict)
    """Bodies that are answered with 400, and what the error says."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """For each parameter of the path: the status when there is nothing of that name."""
    unnamable: int = 400
    """The status when a parameter of the path is too long, or holds control characters."""
    too_long: str = _LONG
    """What is too long for a parameter of the path."""
    body: str = ""
    """A good body, for bad paths."""
    query: str = ""
    """What has to be in the query."""
    numbers: tuple[str, ...] = ()
    """Parameters of the query that fall back to the nearest or the default number."""
    names: tuple[str, ...] = ()
    """Parameters of the query that are refused when nothing can be called so."""
    words: tuple[str, ...] = ()
    """Parameters of the query that match nothing when nothing can be called so."""
    refused_query: Mapping[str, str] = field(default_factory=dict)


_PUSH_ITEM_FAULTS = {
    "{}": ".queue",
    '{"queue": 1}': ".queue",
    '{"queue": null}': ".queue",
    '{"queue": ""}': ".queue",
    f'{{"queue": "{_LONG}"}}': ".queue",
    r'{"queue": "a\u0000b"}': ".queue",
    r'{"queue": "a\nb"}': ".queue",
    '{"queue": "q", "partition": 1}': ".partition",
    '{"queue": "q", "partition": ""}': ".partition",
    f'{{"queue": "q", "partition": "{_LONG}"}}': ".partition",
    r'{"queue": "q", "partition": "\u0000"}': ".partition",
    '{"queue": "q", "transactionId": 1}': ".transactionId",
    f'{{"queue": "q", "transactionId": "{_LONG}"}}': ".transactionId",
    '{"queue": "q", "traceId": []}': ".traceId",
    '{"queue": "q", "traceId": "no uuid"}': ".traceId",
}
_TIMER = '"queue": "q", "timerKey": "t"'
_ACK = '"transactionId": "t", "partitionId": "PARTITION", "leaseId": "LEASE"'
_TRACE = '"transactionId": "MESSAGE", "partitionId": "PARTITION"'
_CYCLE = f'"query_id": "{_NO_UUID}", "partition_id": "PARTITION"'
_POP_NUMBERS = ("batch", "partitions", "timeout", "leaseSeconds")
_PAGE = ("limit", "offset")
_BAD_TIMES = {f"{key}={text}": key for key in ("from", "to") for text in _TIMES}
_BAD_RANGES = _BAD_TIMES | {"from=2026-02-01&to=2026-01-01": "must be before", "from=9999-12-31": "must be before"}
_BAD_WORKERS = {f"workerId={text}": "workerId" for text in _ABSURD if text}
_DEAD_LETTER_FAULTS = {
    "{}": "queue is required",
    '{"queue": null}': "queue is required",
    '{"queue": 1}': "queue must be",
    '{"queue": "q", "consumerGroup": 1}': "consumerGroup must be",
    '{"queue": "q", "partition": []}': "partition must be",
    '{"queue": "q", "from": 5}': "from must be",
    '{"queue": "q", "from": "yesterday"}': "from must be",
    '{"queue": "q", "to": "9999999999"}': "to must be",
    '{"queue": "q", "transactionIds": 1}': "transactionIds must be",
    '{"queue": "q", "transactionIds": [1]}': "transactionIds must be",
}
_TARGET = '"host": "h", "database": "d", "user": "u"'
_TARGET_FAULTS = {
    "{}": "host, database, and user are required",
    '{"host": "h", "database": "d"}': "host, database, and user are required",
    '{"host": "", "database": "d", "user": "u"}': "host, database, and user are required",
    '{"host": null, "database": "d", "user": "u"}': "host must be",
    '{"host": "-h", "database": "d", "user": "u"}': "host must be",
    '{"host": "h,other", "database": "d", "user": "u"}': "host must be",
    r'{"host": "h\n", "database": "d", "user": "u"}': "host must be",
    '{"host": "h", "database": "--clean", "user": "u"}': "database must have",
    r'{"host": "h", "database": "d\u0000", "user": "u"}': "database must have",
    r'{"host": "h", "database": "d", "user": "u\u001b"}': "user must have",
    f'{{"host": "h", "database": "{_LONG}", "user": "u"}}': "database must have",
    rf'{{{_TARGET}, "password": "\u0000"}}': "password must",
    f'{{{_TARGET}, "password": 1}}': "password must",
    f'{{{_TARGET}, "ssl": "yes"}}': "ssl must be",
    **{f'{{{_TARGET}, "port": {port}}}': "port must be" for port in ('"0"', '"x"', '"65536"', "-1", '"5432 "', "1.5")},
}
_NO_TOPIC = "namespace=nowhere&topic=nowhere"
_TOPIC_QUERY = {
    "": "namespace is required",
    "namespace=n": "topic is required",
    "topic=t": "namespace is required",
    "namespace=&topic=t": "namespace is required",
}
_TOPIC_NAMES = ("namespace", "topic")
_ITEM_FAULTS = {
    "{}": "namespace",
    '{"namespace": "n"}': "topic",
    '{"namespace": 1, "topic": "t"}': "namespace",
    '{"namespace": "n", "topic": null}': "topic",
    '{"namespace": "", "topic": "t"}': "namespace",
    '{"namespace": "n", "topic": ""}': "topic",
    f'{{"namespace": "{_LONG}", "topic": "t"}}': "namespace",
    f'{{"namespace": "n", "topic": "{_LONG}"}}': "topic",
    r'{"namespace": "a\u0000b", "topic": "t"}': "namespace",
    r'{"namespace": "n", "topic": "a\nb"}': "topic",
}
_ITEM = '"namespace": "n", "topic": "t"'
_ENQUEUE_FAULTS = _ITEM_FAULTS | {
    f"{{{_ITEM}, {field}}}": where
    for field, where in {
        '"payload": 1': "payload",
        '"payload": "no base64!"': "payload",
        '"payload": "YQ==", "data": 1': "data",
        '"idempotency_key": 1': "idempotency_key",
        f'"idempotency_key": "{_LONG}"': "idempotency_key",
        r'"idempotency_key": "a\u0000"': "idempotency_key",
        '"priority": 1.5': "priority",
        '"priority": "high"': "priority",
        '"priority": 2147483648': "priority",
        '"priority": -2147483649': "priority",
        '"metadata": []': "metadata",
        '"metadata": "text"': "metadata",
        f'"metadata": {{"a": "{_LONG * 256}"}}': "metadata",
        '"deliver_after": "yesterday"': "deliver_after",
        '"deliver_after": 5': "deliver_after",
        '"deliver_after": "9999-12-31T23:59:59-14:00"': "deliver_after",
        '"deliver_after": "2026-01-01T00:00:00Z", "delay": 1': "delay",
        '"delay": -1': "delay",
        '"delay": "1"': "delay",
        '"delay": 1e300': "delay",
        '"ttl": -1': "ttl",
        '"ttl": 1e300': "ttl",
    }.items()
}
_REF_FAULTS = {
    "{}": "id",
    f"{{{_ITEM}}}": "id",
    f'{{{_ITEM}, "id": 1.5}}': "id",
    f'{{{_ITEM}, "id": null}}': "id",
    f'{{{_ITEM}, "id": []}}': "id",
    '{"id": 1, "namespace": "n"}': "topic",
    '{"id": 1, "topic": "t"}': "namespace",
    f'{{"id": 1, "namespace": "{_LONG}", "topic": "t"}}': "namespace",
    r'{"id": 1, "namespace": "n", "topic": "\u0000"}': "topic",
    f'{{{_ITEM}, "id": 1, "lease_owner": 1}}': "lease_owner",
}
_ACK_ITEM = '{"type": "ackItem", '
_BATCH = '"run": "r", "batch": 1'
_ATTEMPT = f'{_BATCH}, "attempt": "{_NO_UUID}"'
_NOTHING_STAGED = f'{{"attempt": "{_NO_UUID}", "messages": 0}}'
_BATCH_FAULTS = {
    '{"batch": 1}': "run",
    '{"run": "r"}': "batch",
    '{"run": 1, "batch": 1}': "run",
    '{"run": "", "batch": 1}': "run",
    f'{{"run": "{_LONG}", "batch": 1}}': "run",
    r'{"run": "a\u0000", "batch": 1}': "run",
    '{"run": "r", "batch": -1}': "batch",
    '{"run": "r", "batch": 1.5}': "batch",
    '{"run": "r", "batch": "1"}': "batch",
    f'{{"run": "r", "batch": {"9" * 30}}}': "batch",
}

_NO_FLAGS = dict.fromkeys(
    ('{"enabled": 1}', '{"enabled": "true"}', '{"enabled": null}'), "enabled (boolean) is required"
)


def _or_in_an_array(good: str, faults: Mapping[str, str]) -> dict[str, str]:
    """The same faults where an array is sent: the place is said too."""
    return {**faults, **{f"[{good}, {fault}]": "[1]" for fault in faults}}


_TOPIC_SURFACES = {
    "POST /enqueue": Surface(reads_body=True, refused=_or_in_an_array(f"{{{_ITEM}}}", _ENQUEUE_FAULTS)),
    "GET /dequeue": Surface(
        query=_NO_TOPIC,
        numbers=("limit", "timeout"),
        names=_TOPIC_NAMES,
        words=("ids",),
        refused_query=_TOPIC_QUERY
        | {f"{_NO_TOPIC}&lease={text}": "lease" for text in ("0", "-1", "soon", "NaN", "1e9", "Infinity", "%00")},
    ),
    "POST /ack": Surface(reads_body=True, refused=_or_in_an_array(f'{{{_ITEM}, "id": 1}}', _REF_FAULTS)),
    "POST /nack": Surface(
        reads_body=True,
        refused=_or_in_an_array(f'{{{_ITEM}, "id": 1}}', _REF_FAULTS | {f'{{{_ITEM}, "id": 1, "error": 1}}': "error"}),
    ),
    "GET /topics": Surface(
        query="namespace=nowhere", names=("namespace",), refused_query={"": "namespace is required"}
    ),
    "GET /dlq": Surface(query=_NO_TOPIC, numbers=_PAGE, names=_TOPIC_NAMES, refused_query=_TOPIC_QUERY),
    "POST /dlq/delete": Surface(reads_body=True, refused=_or_in_an_array(f'{{{_ITEM}, "id": 1}}', _REF_FAULTS)),
    "POST /dlq/retry": Surface(reads_body=True, refused=_or_in_an_array(f'{{{_ITEM}, "id": 1}}', _REF_FAULTS)),
}
_LONG_TOPIC_PATHS = {
    route.replace(" /topics", " /").replace(" /", " /api/v1/topics/").removesuffix("/"): surface
    for route, surface in _TOPIC_SURFACES.items()
}
_SURFACES: dict[str, Surface] = {
    **_TOPIC_SURFACES,
    **_LONG_TOPIC_PATHS,
    "GET /api/v1/topics/dequeue/many": Surface(
        query="namespace=nowhere",
        numbers=("limit", "timeout"),
        names=("namespace",),
        refused_query={
            "": "namespace is required",
            **{
                f"namespace=n&topics={text}": "topics"
                for text in ("{}", "[1]", '[""]', f'["{_LONG}"]', r'["a\u0000b"]', f"[{','.join(['%22t%22'] * 1001)}]")
            },
            "namespace=n&topics=t": "Invalid JSON",
            "namespace=n&lease=0": "lease",
        },
    ),
    "POST /api/v1/topics/extend": Surface(
        reads_body=True,
        refused=_or_in_an_array(
            f'{{{_ITEM}, "id": 1}}',
            _REF_FAULTS
            | {
                f'{{{_ITEM}, "id": 1, "seconds": {seconds}}}': "seconds"
                for seconds in ("0", "-1", "604801", '"60"', "true", "[]", "9" * 400)
            },
        ),
    ),
    "POST /api/v1/topics/release": _TOPIC_SURFACES["POST /ack"],
    "GET /api/v1/topics/peek": Surface(
        query=_NO_TOPIC, numbers=("limit",), names=_TOPIC_NAMES, refused_query=_TOPIC_QUERY
    ),
    "GET /api/v1/topics/counts": Surface(
        query="namespace=nowhere", names=_TOPIC_NAMES, refused_query={"": "namespace is required"}
    ),
    "GET /api/v1/topics/priorities": Surface(
        query=_NO_TOPIC, numbers=("limit",), names=_TOPIC_NAMES, refused_query=_TOPIC_QUERY
    ),
    "POST /api/v1/topics/configure": Surface(
        reads_body=True,
        refused=_ITEM_FAULTS
        | {
            f'{{{_ITEM}, "options": {options}}}': "options"
            for options in (
                "[]",
                '{"colour": 1}',
                '{"max_retries": -1}',
                '{"max_retries": 1.5}',
                '{"max_retries": "many"}',
                '{"at_most_once": 1}',
                '{"lease_seconds": 0}',
                '{"lease_seconds": 604801}',
                '{"ttl_seconds": 9999999999}',
            )
        },
    ),
    "POST /api/v1/topics/pause": Surface(reads_body=True, refused=_ITEM_FAULTS),
    "POST /api/v1/topics/resume": Surface(reads_body=True, refused=_ITEM_FAULTS),
    "POST /api/v1/topics/purge": Surface(reads_body=True, refused=_ITEM_FAULTS),
    "DELETE /api/v1/topics": Surface(query=_NO_TOPIC, names=_TOPIC_NAMES, refused_query=_TOPIC_QUERY),
    "GET /api/v1/topics/quotas": Surface(),
    "PUT /api/v1/topics/quotas": Surface(
        reads_body=True,
        refused={
            "{}": "namespace",
            '{"namespace": "n"}': "per_minute",
            '{"namespace": 1, "per_minute": 1}': "namespace",
            f'{{"namespace": "{_LONG}", "per_minute": 1}}': "namespace",
        }
        | {
            f'{{"namespace": "n", "per_minute": {number}}}': "per_minute"
            for number in ("-1", "1.5", '"5"', "true", "[]", "2147483648")
        },
    ),
    "GET /api/v1/topics/modes": Surface(),
    "PUT /api/v1/topics/modes": Surface(
        reads_body=True,
        refused={
            "{}": "namespace",
            '{"namespace": "n"}': "mode",
            '{"namespace": 1, "mode": "sync"}': "namespace",
            f'{{"namespace": "{_LONG}", "mode": "sync"}}': "namespace",
        }
        | {f'{{"namespace": "n", "mode": {mode}}}': "mode" for mode in ('"fast"', "1", "true", "[]", '""', '"SYNC"')},
    ),
    "GET /health": Surface(),
    "GET /livez": Surface(),
    "GET /readyz": Surface(),
    "GET /openapi.json": Surface(),
    "GET /docs": Surface(),
    "POST /api/v1/push": Surface(
        reads_body=True,
        refused={
            "{}": "items array",
            '{"items": null}': "items array",
            '{"items": {}}': "items array",
            '{"items": [1]}': "items[0]",
            '{"items": [{"queue": "q", "payload": 1}, null]}': "items[1]",
        }
        | {f'{{"items": [{item}]}}': f"items[0]{where}" for item, where in _PUSH_ITEM_FAULTS.items()}
        | {
            f'{{"items": [{{"queue": "q", "payload": 1}}, {item}]}}': f"items[1]{where}"
            for item, where in _PUSH_ITEM_FAULTS.items()
        },
    ),
    # What it refuses once it is a WebSocket is in test_websocket.py.
    "GET /ws/v1/consume": Surface(),
    "GET /api/v1/pop": Surface(
        query="namespace=nowhere",
        numbers=_POP_NUMBERS,
        names=("consumerGroup",),
        words=("namespace", "task", "subscriptionMode", "subscriptionFrom"),
        refused_query={"": "namespace or task", "namespace=&task=": "namespace or task"},
    ),
    "GET /api/v1/pop/queue/{queue}": Surface(
        unknown={"queue": 204},
        numbers=_POP_NUMBERS,
        names=("consumerGroup",),
        words=("subscriptionMode", "subscriptionFrom"),
    ),
    "GET /api/v1/pop/queue/{queue}/partition/{partition}": Surface(
        unknown={"queue": 204, "partition": 204},
        numbers=_POP_NUMBERS,
        names=("consumerGroup",),
        words=("subscriptionMode", "subscriptionFrom"),
    ),
    "POST /api/v1/ack": Surface(
        reads_body=True,
        refused={
            "{}": "transactionId",
            '{"transactionId": 1, "partitionId": "PARTITION"}': "transactionId",
            '{"transactionId": "", "partitionId": "PARTITION"}': "transactionId",
            '{"transactionId": "t"}': "partitionId",
            '{"transactionId": "t", "partitionId": null}': "partitionId",
            '{"transactionId": "t", "partitionId": ""}': "partitionId",
            f'{{{_ACK}, "consumerGroup": "{_LONG}"}}': "consumerGroup",
            f'{{{_ACK}, "consumerGroup": "a\\u0000b"}}': "consumerGroup",
        },
    ),
    "POST /api/v1/ack/batch": Surface(
        reads_body=True,
        refused={
            "{}": "acknowledgments array",
            '{"acknowledgments": {}}': "acknowledgments array",
            '{"acknowledgments": [1]}': "acknowledgments[0]",
            f'{{"acknowledgments": [{{{_ACK}}}, {{}}]}}': "acknowledgments[1]",
            f'{{"acknowledgments": [{{{_ACK}}}, {{"transactionId": "t"}}]}}': "acknowledgments[1]",
            f'{{"acknowledgments": [{{{_ACK}}}, {{"transactionId": "t", "partitionId": 1}}]}}': "acknowledgments[1]",
            f'{{"acknowledgments": [{{{_ACK}}}], "consumerGroup": "{_LONG}"}}': "consumerGroup",
            f'{{"acknowledgments": [{{{_ACK}}}], "consumerGroup": "\\n"}}': "consumerGroup",
        },
    ),
    "POST /api/v1/transaction": Surface(
        reads_body=True,
        refused={
            "{}": "operations array",
            '{"operations": {}}': "operations array",
            '{"operations": []}': "operations array",
            '{"operations": [], "kv": []}': "operations array",
            '{"operations": [], "kv": {}}': "kv",
            '{"operations": [], "kv": [{"op": "get", "ns": "a b", "key": "k"}]}': "kv[0].ns",
            '{"operations": [], "kv": [{"op": "getPrefix", "ns": "n", "prefix": "k"}]}': "kv[0]",
            '{"operations": [], "timers": [1]}': "timers",
            '{"operations": [], "timers": [{"op": "cancel", "queue": "q", "timerKey": ""}]}': "timers[0].timerKey",
            '{"operations": [], "locks": []}': "unknown field 'locks'",
            '{"operations": [1]}': "operations[0]",
            '{"operations": [{"type": "push"}]}': "operations[0].items",
            '{"operations": [{"type": "push", "items": 1}]}': "operations[0].items",
            '{"operations": [{"type": "push", "items": [1]}]}': "operations[0].items[0]",
            '{"operations": [{"type": "ack", "transactionId": "t"}]}': "operations[0].partitionId",
            '{"operations": [{"type": "ack", "partitionId": "PARTITION"}]}': "operations[0].transactionId",
            f'{{"operations": [{{"type": "ack", {_ACK}, "consumerGroup": "{_LONG}"}}]}}': "operations[0].consumerGroup",
        }
        | {
            f'{{"operations": [{{"type": "ack", {_ACK}}}, {{"type": "enqueue", "items": [{item}]}}]}}': (
                "operations[1].items[0]"
            )
            for item in _ENQUEUE_FAULTS
        }
        | {
            f'{{"operations": [{{"type": "enqueue"{items}}}]}}': "operations[0].items"
            for items in ("", ', "items": null', ', "items": {}', ', "items": [1]')
        }
        | {
            f'{{"operations": [{ref.replace("{", _ACK_ITEM, 1).replace(", }", "}")}]}}': "operations[0]"
            for ref in _REF_FAULTS
        }
        | {
            f'{{"operations": [{{"type": "ack", {_ACK}}}, {{"type": "push", "items": [{item}]}}]}}': (
                f"operations[1].items[0]{where}"
            )
            for item, where in _PUSH_ITEM_FAULTS.items()
        },
    ),
    "POST /api/v1/lease/{lease}/extend": Surface(
        reads_body=True,
        needs_body=False,
        unknown={"lease": 404},
        unnamable=404,
        refused={
            f'{{"seconds": {seconds}}}': "seconds must be"
            for seconds in ("0", "-1", "604801", '"60"', "true", "null", "[]")
        }
        | {f'{{"seconds": {"9" * 400}}}': "number out of range (at seconds)"},
    ),
    "POST /api/v1/configure": Surface(
        reads_body=True,
        refused={
            "{}": "queue is required",
            '{"queue": 1}': "queue is required",
            f'{{"queue": "{_LONG}"}}': "(at queue)",
            r'{"queue": "\u0000"}': "(at queue)",
            '{"queue": "made", "namespace": 1}': "(at namespace)",
            f'{{"queue": "made", "task": "{_LONG}"}}': "(at task)",
            r'{"queue": "made", "task": "a\u0000"}': "(at task)",
            '{"queue": "made", "options": []}': "(at options)",
        }
        | {
            f'{{"queue": "made", "options": {{"leaseTime": {value}}}}}': "(at options.leaseTime)"
            for value in ("-1", "1.5", "9" * 30, '"soon"', "true", "[]", "2147483648")
        }
        | {
            f'{{"queue": "made", "options": {{"retentionEnabled": {value}}}}}': "(at options.retentionEnabled)"
            for value in ("1", '"perhaps"', "{}")
        },
    ),
    "DELETE /api/v1/resources/queues/{queue}": Surface(unknown={"queue": 200}),
    "DELETE /api/v1/queues/{queue}/clear": Surface(unknown={"queue": 404}, names=("partition",)),
    "POST /api/v1/resources/queues/{queue}/pause": Surface(unknown={"queue": 404}),
    "POST /api/v1/resources/queues/{queue}/resume": Surface(unknown={"queue": 404}),
    "GET /api/v1/resources/queues": Surface(numbers=_PAGE, names=("namespace", "task", "search")),
    "GET /api/v1/resources/queues/{queue}": Surface(unknown={"queue": 404}),
    "GET /api/v1/resources/queues/{queue}/depth": Surface(unknown={"queue": 404}, names=("group",)),
    "GET /api/v1/system/settings": Surface(),
    "GET /api/v1/system/connections": Surface(),
    "GET /api/v1/live": Surface(),
    "GET /api/v1/events": Surface(query="limit=1"),
    "GET /api/v1/shards": Surface(),
    "GET /api/v1/streams": Surface(),
    "GET /streams/v1/queries": Surface(),
    "DELETE /streams/v1/queries/{stream}": Surface(unknown={"stream": 404}),
    "GET /api/v1/audit": Surface(
        numbers=("limit",),
        words=("actor", "action"),
        refused_query={"before=9223372036854775808": "before must be a whole number"},
    ),
    "GET /api/v1/pipelines": Surface(),
    "GET /api/v1/pipeline-declarations": Surface(),
    "DELETE /api/v1/pipeline-declarations/{pipeline}": Surface(unknown={"pipeline": 404}),
    "GET /api/v1/topics/namespaces": Surface(),
    "GET /api/v1/resources/partitions": Surface(numbers=_PAGE, names=("queue", "search")),
    "GET /api/v1/resources/namespaces": Surface(),
    "GET /api/v1/resources/tasks": Surface(),
    "GET /api/v1/resources/overview": Surface(),
    "POST /api/v1/stats/refresh": Surface(),
    "GET /api/v1/system/shared-state": Surface(),
    "GET /internal/api/shared-state/stats": Surface(),
    "GET /internal/api/inter-instance/stats": Surface(),
    "POST /internal/api/events": Surface(
        reads_body=True, refused={"qp1\x00": "packet", "qp1\x01": "packet", "qp1\x02": "packet"}
    ),
    "POST /internal/api/notify": Surface(
        reads_body=True,
        refused={
            "{}": "queue is required",
            '{"queue": 1}': "queue must be a string",
            f'{{"queue": "{_LONG}"}}': "(at queue)",
            r'{"queue": "\u0000"}': "(at queue)",
            '{"queue": "q", "partition": 1}': "(at partition)",
            f'{{"queue": "q", "partition": "{_LONG}"}}': "(at partition)",
            r'{"queue": "q", "partition": "a\u0000"}': "(at partition)",
        },
    ),
    "GET /api/v1/status/buffers": Surface(),
    "GET /api/v1/system/maintenance": Surface(),
    "GET /api/v1/system/maintenance/pop": Surface(),
    "POST /api/v1/system/maintenance": Surface(reads_body=True, refused=_NO_FLAGS),
    "POST /api/v1/system/maintenance/pop": Surface(reads_body=True, refused=_NO_FLAGS),
    "GET /api/v1/consumer-groups": Surface(names=("group", "namespace", "queue", "search", "task")),
    "GET /api/v1/consumer-groups/lagging": Surface(
        numbers=_PAGE,
        refused_query={
            f"minLagSeconds={text}": "minLagSeconds" for text in ("9" * 30, "-5", "1.5", "1e400", "NaN", "many", "%00")
        },
    ),
    "GET /api/v1/consumer-groups/{group}": Surface(unknown={"group": 200}),
    "GET /api/v1/consumer-groups/{group}/queues/{queue}/partitions": Surface(
        numbers=_PAGE, unknown={"group": 200, "queue": 404}
    ),
    "DELETE /api/v1/consumer-groups/{group}": Surface(unknown={"group": 200}),
    "DELETE /api/v1/consumer-groups/{group}/queues/{queue}": Surface(unknown={"group": 200, "queue": 200}),
    "POST /api/v1/consumer-groups/{group}/subscription": Surface(
        reads_body=True,
        body='{"subscriptionTimestamp": "2026-04-26T10:59:28Z"}',
        unknown={"group": 200},
        refused={
            "{}": "subscriptionTimestamp",
            '{"subscriptionTimestamp": 5}': "subscriptionTimestamp must be",
            '{"subscriptionTimestamp": "yesterday"}': "subscriptionTimestamp must be",
            r'{"subscriptionTimestamp": "a\u0000"}': "subscriptionTimestamp must be",
        },
    ),
    "POST /api/v1/consumer-groups/{group}/queues/{queue}/pause": Surface(unknown={"group": 404, "queue": 404}),
    "POST /api/v1/consumer-groups/{group}/queues/{queue}/resume": Surface(unknown={"group": 404, "queue": 404}),
    "POST /api/v1/consumer-groups/{group}/queues/{queue}/seek": Surface(
        reads_body=True,
        body='{"toEnd": true}',
        unknown={"group": 200, "queue": 200},
        refused={
            "{}": "toEnd",
            '{"toEnd": "yes"}': "toEnd",
            '{"toEnd": false}': "toEnd",
            '{"timestamp": 5}': "timestamp must be",
            '{"timestamp": "0000-00-00"}': "timestamp must be",
            '{"offset": -1}': "offset",
            '{"offset": "1"}': "offset",
            '{"toEnd": true, "offset": 1}': "only one of",
            '{"toBeginning": true, "timestamp": "2026-01-01T00:00:00Z"}': "only one of",
            '{"toEnd": true, "limit": 0}': "limit",
            '{"toEnd": true, "limit": 5, "cursor": "x"}': "cursor must be",
        },
    ),
    "POST /api/v1/consumer-groups/{group}/queues/{queue}/seek/undo": Surface(
        reads_body=True,
        body='{"seekId": 1}',
        unknown={"group": 404, "queue": 404},
        refused={
            "{}": "seekId",
            '{"seekId": "1"}': "seekId",
            '{"seekId": 0}': "seekId",
            '{"seekId": 1, "limit": 0}': "limit",
            '{"seekId": 1, "cursor": "1:x"}': "cursor must be",
        },
    ),
    "GET /api/v1/consumer-groups/{group}/queues/{queue}/seeks": Surface(unknown={"group": 200, "queue": 404}),
    "GET /api/v1/consumer-groups/{group}/queues/{queue}/seek/preview": Surface(
        query="toEnd=true",
        unknown={"group": 200, "queue": 404},
        numbers=("limit",),
        names=("partition",),
        refused_query={
            "toEnd=false": "Must specify",
            "toEnd=true&offset=1": "only one of",
            "offset=many": "offset",
            "offset=-1": "offset",
            "toEnd=true&within=soon": "within",
            **{f"timestamp={text}": "timestamp" for text in _TIMES},
        },
    ),
    "POST /api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek": Surface(
        reads_body=True,
        needs_body=False,
        unknown={"group": 200, "queue": 404, "partition": 404},
        refused={
            '{"offset": -1}': "offset",
            '{"toEnd": true, "toBeginning": true}': "only one of",
            '{"toEnd": true, "limit": 1}': "for a seek on all partitions",
        },
    ),
    "POST /api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/release": Surface(
        reads_body=True,
        needs_body=False,
        unknown={"group": 404, "queue": 404, "partition": 404},
        refused={'{"leaseId": 1}': "leaseId"},
    ),
    "POST /api/v1/fetch": Surface(
        reads_body=True,
        refused={
            "{}": "entries is required",
            '{"entries": {}}': "entries",
            '{"entries": [1]}': "entries",
            '{"entries": [{}]}': "queue is required",
            f'{{"entries": [{{"queue": "{_LONG}"}}]}}': "entries[0].queue",
            r'{"entries": [{"queue": "q"}, {"queue": "a\u0000b"}]}': "entries[1].queue",
            '{"entries": [{"queue": "q", "partition": ""}]}': "entries[0].partition",
            '{"entries": [{"queue": "q", "offset": -1}]}': "offset",
            '{"entries": [{"queue": "q", "offset": 9223372036854775808}]}': "offset",
            '{"entries": [{"queue": "q", "maxBytes": 0}]}': "maxBytes",
            '{"entries": [{"queue": "q", "max": 1}]}': "unknown field 'max'",
            '{"entries": [' + ",".join(['{"queue": "q"}'] * 1025) + "]}": "at most 1024 entries",
        },
    ),
    "POST /api/v1/partitions/changed": Surface(
        reads_body=True,
        refused={
            "{}": "entries is required",
            '{"entries": [{}]}': "queue is required",
            '{"entries": [{"queue": ""}]}': "entries[0].queue",
            '{"entries": [{"queue": "q", "since": "yesterday"}]}': "since",
            '{"entries": [{"queue": "q", "after": "x"}]}': "entries[0].after",
            f'{{"entries": [{{"queue": "q", "after": "{"9" * 30}"}}]}}': "entries[0].after",
            '{"entries": [{"queue": "q", "limit": 0}]}': "limit",
        },
    ),
    "POST /api/v1/kv": Surface(
        reads_body=True,
        refused={
            "{}": "operations is required",
            '{"operations": {}}': "operations",
            '{"operations": [1]}': "operations[0]",
            '{"operations": [{}]}': "op",
            '{"operations": [{"op": "burn", "ns": "n", "key": "k"}]}': "op",
            '{"operations": [{"op": "get", "key": "k"}]}': "ns is required",
            '{"operations": [{"op": "get", "ns": "a b", "key": "k"}]}': "operations[0].ns",
            '{"operations": [{"op": "get", "ns": "n", "key": ""}]}': "operations[0].key",
            r'{"operations": [{"op": "get", "ns": "n", "key": "a\u0000"}]}': "operations[0].key",
            f'{{"operations": [{{"op": "get", "ns": "n", "key": "{"x" * 513}"}}]}}': "operations[0].key",
            '{"operations": [{"op": "get", "ns": "n", "keys": ["k"]}]}': "keys",
            '{"operations": [{"op": "getMany", "ns": "n", "keys": [""]}]}': "operations[0].keys[0]",
            '{"operations": [{"op": "getPrefix", "ns": "n", "prefix": ""}]}': "operations[0].prefix",
            '{"operations": [{"op": "put", "ns": "n", "key": "k", "ttlSeconds": 1}]}': "value is required",
            '{"operations": [{"op": "put", "ns": "n", "key": "k", "value": 1}]}': "ttlSeconds and forever",
            '{"operations": [{"op": "put", "ns": "n", "key": "k", "value": 1, "ttlSeconds": 1, "forever": true}]}': (
                "ttlSeconds and forever"
            ),
            '{"operations": [{"op": "put", "ns": "n", "key": "k", "value": 1, "ttlSeconds": 0}]}': "ttlSeconds",
            '{"operations": [{"op": "delete", "ns": "n", "key": "k", "expect": null}]}': "expect",
            '{"operations": [{"op": "check", "ns": "n", "key": "k"}]}': "expect is required",
            '{"operations": [{"op": "incr", "ns": "n", "key": "k", "delta": "1", "forever": true}]}': "delta",
            '{"operations": [{"op": "incr", "ns": "n", "key": "k", "delta": 1e30, "forever": true}]}': "delta",
        },
    ),
    "GET /api/v1/kv": Surface(numbers=_PAGE, names=("search",)),
    "GET /api/v1/kv/{namespace}": Surface(unknown={"namespace": 200}, numbers=_PAGE, names=("prefix",)),
    "GET /api/v1/kv/{namespace}/{key}": Surface(unknown={"namespace": 404, "key": 404}, too_long=_LONG * 3),
    "POST /api/v1/ephemeral/configure": Surface(
        reads_body=True,
        refused={
            "{}": "queue is required",
            '{"queue": ""}': "queue",
            '{"queue": "a\\u0000b"}': "control characters (at queue)",
            '{"queue": "q", "options": {"maxLength": 0}}': "maxLength",
            '{"queue": "q", "options": {"ttlSecond": 1}}': "ttlSecond",
            '{"queue": "q", "options": {"policy": "never"}}': "policy",
        },
    ),
    "POST /api/v1/ephemeral/push": Surface(
        reads_body=True,
        refused={
            "{}": "queue is required",
            '{"queue": "q"}': "messages is required",
            '{"queue": "q", "messages": [1]}': "messages[0]",
            '{"queue": "q", "messages": [{}]}': "payload is required",
            '{"queue": "q", "messages": [{"payload": 1, "id": 2}]}': "id",
            '{"queue": "q", "messages": [], "partition": ""}': "partition",
            '{"queue": "\\u0000", "messages": [{"payload": 1}]}': "control characters (at queue)",
            '{"queue": "q", "messages": [{"payload": 1}], "partition": "\\u0000"}': "control characters (at partition)",
        },
    ),
    "POST /api/v1/ephemeral/ack": Surface(
        reads_body=True,
        refused={
            "{}": "queue is required",
            '{"queue": "q", "acks": {}}': "acks",
            '{"queue": "q", "acks": [], "group": "\\u0000"}': "control characters (at group)",
            '{"queue": "q", "acks": [{}]}': "id is required",
            '{"queue": "q", "acks": [{"id": "e:1:p:1", "status": "perhaps"}]}': "status",
        },
    ),
    "POST /api/v1/ephemeral/reset": Surface(
        reads_body=True, refused={"{}": "queue is required", '{"queue": 1}': "queue"}
    ),
    "GET /api/v1/ephemeral/pop": Surface(query="queue=q", numbers=("batch",), names=("partition", "group")),
    "DELETE /api/v1/ephemeral/queue/{queue}": Surface(unknown={"queue": 200}),
    "GET /api/v1/ephemeral/queues": Surface(numbers=_PAGE, names=("search",)),
    "GET /api/v1/ephemeral/queues/{queue}/depth": Surface(unknown={"queue": 404}),
    "POST /api/v1/locks": Surface(
        reads_body=True,
        refused={
            "{}": "operations is required",
            '{"operations": [{"op": "steal", "name": "n"}]}': "op",
            '{"operations": [{"op": "acquire", "name": "n"}]}': "ttlSeconds is required",
            '{"operations": [{"op": "acquire", "name": "n", "ttlSeconds": 0}]}': "ttlSeconds",
            '{"operations": [{"op": "acquire", "name": "n", "ttlSeconds": 1, "limit": 1025}]}': "limit",
            '{"operations": [{"op": "acquire", "name": "n", "ttlSeconds": 1, "owner": ""}]}': "operations[0].owner",
            '{"operations": [{"op": "get", "name": "a#1"}]}': "operations[0].name",
            f'{{"operations": [{{"op": "get", "name": "{"x" * 257}"}}]}}': "operations[0].name",
            '{"operations": [{"op": "get", "name": "n"}, {"op": "get", "name": "n"}]}': "operations[1].name",
            '{"operations": [{"op": "release", "name": "n", "token": 0}]}': "token",
            '{"operations": [{"op": "renew", "name": "n", "token": 1}]}': "ttlSeconds is required",
        },
    ),
    "GET /api/v1/locks": Surface(numbers=_PAGE, names=("prefix",)),
    "GET /api/v1/timers": Surface(numbers=_PAGE, names=("queue", "prefix")),
    "POST /api/v1/timers": Surface(
        reads_body=True,
        refused={
            "{}": "operations is required",
            f'{{"operations": [{{"op": "fire", {_TIMER}}}]}}': "op",
            f'{{"operations": [{{"op": "schedule", {_TIMER}, "delayMs": 1}}]}}': "payload is required",
            f'{{"operations": [{{"op": "schedule", {_TIMER}, "payload": "MQ=="}}]}}': "delayMs is required",
            f'{{"operations": [{{"op": "schedule", {_TIMER}, "payload": "MQ", "delayMs": 1}}]}}': "payload must be",
            f'{{"operations": [{{"op": "schedule", {_TIMER}, "payload": "ew==", "delayMs": 1}}]}}': (
                "operations[0].payload"
            ),
            f'{{"operations": [{{"op": "schedule", {_TIMER}, "payload": "MQ==", "delayMs": 1e300}}]}}': "delayMs",
            f'{{"operations": [{{"op": "schedule", {_TIMER}, "payload": "MQ==", "delayMs": 1, "deliverAt": 1}}]}}': (
                "unknown field 'deliverAt'"
            ),
            f'{{"operations": [{{"op": "schedule", {_TIMER}, "payload": "", "delayMs": 1, "payloadZstd": true}}]}}': (
                "payloadZstd"
            ),
            '{"operations": [{"op": "cancel", "queue": "q", "timerKey": "a/b"}]}': "operations[0].timerKey",
            '{"operations": [{"op": "cancel", "queue": "", "timerKey": "a"}]}': "operations[0].queue",
            f'{{"operations": [{{"op": "cancel", {_TIMER}}}, {{"op": "cancel", {_TIMER}}}]}}': "named twice",
        },
    ),
    "GET /api/v1/tasks": Surface(names=("namespace",)),
    "GET /api/v1/timers/{queue}": Surface(unknown={"queue": 200}, numbers=("limit",), words=("after",)),
    "GET /api/v1/timers/{queue}/{timer}": Surface(unknown={"queue": 200, "timer": 200}),
    "DELETE /api/v1/timers/{queue}/{timer}": Surface(unknown={"queue": 200, "timer": 200}),
    "GET /api/v1/read/{queue}": Surface(unknown={"queue": 404}, refused_query={f"at={text}": "at" for text in _TIMES}),
    "GET /api/v1/read/{queue}/partition/{partition}": Surface(
        unknown={"queue": 404, "partition": 404}, numbers=("from", "to")
    ),
    "GET /api/v1/messages": Surface(
        numbers=_PAGE,
        words=("queue", "partition", "ns", "task"),
        refused_query=_BAD_TIMES | {f"status={text}": "status" for text in ("lost", "-5", "%00", _LONG)},
    ),
    "GET /api/v1/messages/{partition}/{transaction}": Surface(
        unknown={"partition": 404, "transaction": 404}, unnamable=404
    ),
    "DELETE /api/v1/messages/{partition}/{transaction}": Surface(
        unknown={"partition": 200, "transaction": 200}, unnamable=200
    ),
    "POST /api/v1/messages/{partition}/{transaction}/retry": Surface(
        unknown={"partition": 404, "transaction": 404}, unnamable=404
    ),
    "POST /api/v1/messages/{partition}/{transaction}/dlq": Surface(
        reads_body=True,
        needs_body=False,
        unknown={"partition": 404, "transaction": 404},
        unnamable=404,
        refused={
            f'{{"consumerGroup": "{_LONG}"}}': "consumerGroup",
            r'{"consumerGroup": "a\u0000b"}': "consumerGroup",
        },
        refused_query={f"consumerGroup={text}": "consumerGroup" for text in (_LONG, "%00")},
    ),
    "GET /api/v1/messages/search": Surface(
        query="queue=q",
        numbers=("limit",),
        names=("queue", "partition"),
        refused_query={
            "": "queue is required",
            "queue=q&status=lost": "status",
            "queue=q&where=nothing": "where must be",
            "queue=q&where=a~b": "where must be",
            "queue=q&where=[1]": "where must be",
            "queue=q&cursor=x": "cursor must be",
            'queue=q&cursor=["a"]': "cursor must be",
            **{f"queue=q&{query}": key for query, key in _BAD_TIMES.items()},
        },
    ),
    **{
        f"POST /api/v1/messages/{what}": Surface(
            reads_body=True,
            refused={
                "{}": "queue",
                '{"queue": 1}': "queue",
                f'{{"queue": "{_LONG}", "filter": {{}}}}': "queue",
                '{"queue": "q"}': "either 'messages' or 'filter'",
                '{"queue": "q", "messages": [], "filter": {}}': "either 'messages' or 'filter'",
                '{"queue": "q", "messages": [{}]}': "partitionId",
                '{"queue": "q", "messages": [{"partitionId": 1, "transactionId": "t"}]}': "partitionId",
                '{"queue": "q", "filter": {"colour": 1}}': "colour",
                '{"queue": "q", "filter": {"status": "lost"}}': "status",
                '{"queue": "q", "filter": {"from": "yesterday"}}': "filter.from",
                '{"queue": "q", "filter": {"where": "a=1"}}': "where",
                '{"queue": "q", "filter": {"where": ["nothing"]}}': "where must be",
                '{"queue": "q", "filter": {"partition": ""}}': "partition",
                '{"queue": "q", "filter": {}, "limit": 0}': "limit",
                '{"queue": "q", "filter": {}, "limit": 10001}': "limit",
            },
        )
        for what in ("delete", "retry", "dlq")
    },
    "GET /api/v1/dlq": Surface(
        numbers=_PAGE, words=("queue", "consumerGroup", "partition"), refused_query=dict(_BAD_TIMES)
    ),
    "GET /api/v1/dlq/report": Surface(
        numbers=("limit",), words=("queue", "consumerGroup", "partition"), refused_query=dict(_BAD_TIMES)
    ),
    "POST /api/v1/shards/move": Surface(
        reads_body=True,
        refused={
            "{}": "to",
            '{"to": 1}': "either 'queue' or",
            '{"to": 1, "queue": "q", "topic": "t"}': "either 'queue' or",
            '{"to": 1, "topic": "t"}': "either 'queue' or",
            '{"to": -1, "queue": "q"}': "to",
            '{"to": "1", "queue": "q"}': "to",
            f'{{"to": 1, "queue": "{_LONG}"}}': "queue",
        },
    ),
    "GET /api/v1/shards/moves": Surface(),
    "POST /api/v1/migration/test-connection": Surface(reads_body=True, refused=_TARGET_FAULTS),
    "POST /api/v1/migration/validate": Surface(reads_body=True, refused=_TARGET_FAULTS),
    "POST /api/v1/migration/start": Surface(
        reads_body=True,
        refused=_TARGET_FAULTS
        | {
            f'{{{_TARGET}, "schema": "public"}}': "schema",
            f'{{{_TARGET}, "excludeTableData": "traces"}}': "excludeTableData must be",
            f'{{{_TARGET}, "excludeTableData": ["messages"]}}': "allowed: traces, metrics, history",
        },
    ),
    "GET /api/v1/migration/status": Surface(),
    "POST /api/v1/migration/reset": Surface(),
    "PUT /api/v1/pipeline-declarations": Surface(
        reads_body=True,
        refused={
            "{}": "name",
            '{"name": "", "declaration": {"sources": {}, "sinks": {}}}': "name",
            f'{{"name": "{_LONG}", "declaration": {{"sources": {{}}, "sinks": {{}}}}}}': "name",
            '{"name": "n"}': "declaration",
            '{"name": "n", "declaration": {"sources": []}}': "sources",
            '{"name": "n", "declaration": {"sources": {"a": 1}, "sinks": {}}}': "sources",
            '{"name": "n", "declaration": {"sources": {}, "sinks": {}, "sinkz": {}}}': "sinkz",
            '{"name": "n", "declaration": {"sources": {}, "sinks": {}, "trigger": 1}}': "trigger",
        },
    ),
    "POST /api/v1/pipelines/replay": Surface(
        reads_body=True,
        refused={
            "{}": "archive",
            '{"archive": ""}': "archive",
            '{"archive": 1}': "archive",
            f'{{"archive": "a", "queue": "{_LONG}"}}': "queue",
            '{"archive": "a", "from": "yesterday"}': "from must be",
        },
    ),
    "POST /api/v1/dlq/retry": Surface(
        reads_body=True,
        refused=_DEAD_LETTER_FAULTS
        | {f'{{"queue": "q", "limit": {limit}}}': "limit must be" for limit in ("1.5", '"5"', "true", "[]")},
    ),
    "DELETE /api/v1/dlq": Surface(
        reads_body=True,
        needs_body=False,
        query="queue=nowhere",
        refused=_DEAD_LETTER_FAULTS,
        words=("queue", "consumerGroup", "partition", "transactionIds"),
        refused_query={"": "queue is required"} | {f"queue=q&{query}": key for query, key in _BAD_TIMES.items()},
    ),
    "POST /api/v1/traces": Surface(
        reads_body=True,
        refused={
            "{}": "transactionId and partitionId",
            '{"transactionId": "t", "data": 1}': "transactionId and partitionId",
            '{"transactionId": 1, "partitionId": "PARTITION", "data": 1}': "transactionId and partitionId",
            f"{{{_TRACE}}}": "data is required",
            f'{{{_TRACE}, "data": 1, "consumerGroup": 1}}': "consumerGroup",
            f'{{{_TRACE}, "data": 1, "consumerGroup": "{_LONG}"}}': "consumerGroup",
            f'{{{_TRACE}, "data": 1, "eventType": "{_LONG}"}}': "eventType",
            f'{{{_TRACE}, "data": 1, "eventType": "\\u0000"}}': "eventType",
            f'{{{_TRACE}, "data": 1, "traceNames": 1}}': "traceNames",
            f'{{{_TRACE}, "data": 1, "traceNames": ["good", ""]}}': "traceNames[1]",
            f'{{{_TRACE}, "data": 1, "traceNames": ["good", "\\u0000"]}}': "traceNames[1]",
            f'{{{_TRACE}, "data": 1, "traceNames": {msgspec.json.encode([str(n) for n in range(51)]).decode()}}}': (
                "traceNames"
            ),
        },
    ),
    "GET /api/v1/traces/names": Surface(numbers=_PAGE, names=("search",)),
    "GET /api/v1/traces/by-name/{name}": Surface(unknown={"name": 200}, unnamable=200, numbers=_PAGE),
    "GET /api/v1/traces/{partition}/{transaction}": Surface(
        unknown={"partition": 200, "transaction": 200}, unnamable=200, numbers=_PAGE
    ),
    "GET /metrics": Surface(),
    "GET /metrics/prometheus": Surface(),
    "GET /api/v1/status": Surface(names=("queue", "namespace", "task"), refused_query=_BAD_RANGES),
    "GET /api/v1/status/queues": Surface(numbers=_PAGE, names=("namespace", "task", "search")),
    "GET /api/v1/status/queues/{queue}": Surface(unknown={"queue": 404}),
    "GET /api/v1/status/queues/{queue}/messages": Surface(unknown={"queue": 404}, numbers=_PAGE),
    "GET /api/v1/status/analytics": Surface(
        names=("queue", "namespace", "task"),
        refused_query=_BAD_RANGES
        | {f"interval={text}": "interval" for text in _ABSURD if text}
        | {"interval=minute&from=0001-01-01T00:00:00Z": "more than 10000"},
    ),
    "GET /api/v1/analytics/system-metrics": Surface(names=("hostname",), refused_query=_BAD_RANGES | _BAD_WORKERS),
    "GET /api/v1/analytics/worker-metrics": Surface(names=("hostname",), refused_query=_BAD_RANGES | _BAD_WORKERS),
    "GET /api/v1/analytics/queue-lag": Surface(names=("queue",), refused_query=_BAD_RANGES),
    "GET /api/v1/analytics/queue-ops": Surface(names=("queue",), refused_query=_BAD_RANGES),
    "GET /api/v1/analytics/queue-parked-replicas": Surface(names=("queue",), refused_query=_BAD_RANGES),
    "GET /api/v1/analytics/retention": Surface(names=("queue",), refused_query=_BAD_RANGES),
    "GET /api/v1/analytics/rollup": Surface(names=("queue", "group"), refused_query=_BAD_RANGES),
    "GET /api/v1/analytics/postgres-stats": Surface(),
    "POST /streams/v1/queries": Surface(
        reads_body=True,
        refused={
            "{}": "name is required",
            '{"name": 1, "source_queue": "q", "config_hash": "h"}': "name is required",
            '{"name": "n", "config_hash": "h"}': "source_queue is required",
            '{"name": "n", "source_queue": "q"}': "config_hash is required",
            '{"name": "n", "source_queue": "q", "config_hash": ""}': "config_hash is required",
            f'{{"name": "{_LONG}", "source_queue": "q", "config_hash": "h"}}': "(at name)",
            r'{"name": "\u0000", "source_queue": "q", "config_hash": "h"}': "(at name)",
            r'{"name": "n", "source_queue": "\n", "config_hash": "h"}': "(at source_queue)",
            f'{{"name": "n", "source_queue": "q", "config_hash": "{_LONG}"}}': "config_hash must be",
            r'{"name": "n", "source_queue": "q", "config_hash": "h", "sink_queue": "\n"}': "(at sink_queue)",
        },
    ),
    "POST /streams/v1/cycle": Surface(
        reads_body=True,
        refused={
            "{}": "query_id is required",
            '{"query_id": "x"}': "partition_id is required",
            '{"query_id": "x", "partition_id": 7}': "partition_id is required",
        }
        | {
            f'{{{_CYCLE}, "state_ops": {operations}}}': said
            for operations, said in {
                "{}": "state_ops must be an array",
                "[1]": "state_ops[0]",
                '[{"type": "delete"}]': "state_ops[0].key",
                '[{"type": "upsert", "key": "a"}, {"type": "upsert", "key": 1}]': "state_ops[1].key",
                r'[{"type": "delete", "key": "a\u0000"}]': "NUL",
                f'[{{"type": "delete", "key": "{"x" * 2001}"}}]': "at most 2000 bytes",
                f'[{{"type": "delete", "key": "{"ü" * 1001}"}}]': "at most 2000 bytes",
                '[{"type": "delete", "key": "a", "if_version": "1"}]': "if_version",
                '[{"type": "upsert", "key": "a", "value": NaN}]': "Invalid JSON",
            }.items()
        }
        | {
            f'{{{_CYCLE}, "push_items": 1}}': "push_items must be an array",
            f'{{{_CYCLE}, "push_items": [null]}}': "push_items[0]",
            f'{{{_CYCLE}, "ack": []}}': "(at ack)",
            f'{{{_CYCLE}, "consumer_group": "{_LONG}"}}': "(at consumer_group)",
            f'{{{_CYCLE}, "consumer_group": "\\n"}}': "(at consumer_group)",
        }
        | {
            f'{{{_CYCLE}, "push_items": [{{"queue": "q"}}, {item}]}}': f"push_items[1]{where}"
            for item, where in _PUSH_ITEM_FAULTS.items()
        },
    ),
    "POST /api/v1/stages": Surface(
        reads_body=True,
        refused={f"{{{_BATCH}}}": "attempt", f"{{{_ATTEMPT}}}": "items array"}
        | {
            f"{{{fields}}}": said
            for fields, said in {
                f'{_BATCH}, "attempt": "nonsense", "items": [{{"queue": "q"}}]': "attempt",
                f'{_ATTEMPT}, "piece": -1': "piece",
                f'{_ATTEMPT}, "items": 1': "items",
                f'{_ATTEMPT}, "topicItems": 1': "topicItems",
            }.items()
        }
        | {
            f'{{{_ATTEMPT}, "items": [{{"queue": "q"}}, {item}]}}': "items[1]" if item == "{}" else f"items[1]{where}"
            for item, where in _PUSH_ITEM_FAULTS.items()
        }
        | {f'{{{_ATTEMPT}, "topicItems": [{item}]}}': "topicItems[0]" for item in _ENQUEUE_FAULTS},
    ),
    "POST /api/v1/stages/publish": Surface(
        reads_body=True,
        refused={
            f"{{{_BATCH}}}": "attempts",
            f'{{{_BATCH}, "attempts": [1]}}': "attempts[0]",
            f'{{{_BATCH}, "attempts": [{_NOTHING_STAGED}, {_NOTHING_STAGED}]}}': "twice",
        }
        | {body.replace("}", ', "attempts": []}'): said for body, said in _BATCH_FAULTS.items()}
        | {
            f'{{{_BATCH}, "attempts": [{_NOTHING_STAGED.replace("0}", f"{number}}}")}]}}': "messages"
            for number in ("-1", "1.5", '"5"', "true", "null", "9" * 30)
        },
    ),
    "POST /api/v1/stages/abandon": Surface(reads_body=True, refused=_BATCH_FAULTS),
    "POST /streams/v1/state/get": Surface(
        reads_body=True,
        refused={
            "{}": "query_id is required",
            '{"query_id": "x"}': "partition_id is required",
            '{"query_id": "x", "partition_id": "PARTITION"}': "query_id must be a UUID",
            f'{{"query_id": "{_NO_UUID}", "partition_id": "nonsense"}}': "partition_id must be a UUID",
            f'{{{_CYCLE}, "keys": [1]}}': "keys[0]",
            f'{{{_CYCLE}, "ripe_at_or_before": "now"}}': "ripe_at_or_before",
            f'{{{_CYCLE}, "ripe_at_or_before": true}}': "ripe_at_or_before",
            f'{{{_CYCLE}, "limit": 0}}': "limit must be",
            f'{{{_CYCLE}, "limit": "9"}}': "limit must be",
        },
    ),
}
_ROUTES = list(_SURFACES)
_WITH_BODY = [route for route, surface in _SURFACES.items() if surface.reads_body]
_WITH_QUERY = [
    route for route, at in _SURFACES.items() if at.numbers or at.names or at.words or at.refused_query or at.query
]
_WITH_PATH = [route for route in _ROUTES if "{" in route]
_PAGED = (
    "GET /api/v1/resources/queues",
    "GET /api/v1/resources/partitions",
    "GET /api/v1/dlq",
    "GET /api/v1/traces/names",
    "GET /api/v1/traces/by-name/{name}",
    "GET /api/v1/traces/{partition}/{transaction}",
    "GET /api/v1/status/queues",
)
_MALFORMED = {
    "cut off": b'{"items": [',
    "no JSON": b"nonsense",
    "two values": b"{} {}",
    "not UTF-8": b'{"queue": "\xff\xfe", "items": ["\xff"]}',
    "NaN": b'{"queue": NaN}',
    "Infinity": b'{"queue": -Infinity}',
    "a number that is too large": b'{"seconds": 1e400}',
    "half a surrogate pair": rb'{"queue": "\ud800 alone"}',
    "an array": b"[]",
    "a number": b"1",
    "a text": b'"text"',
    "null": b"null",
    "too deep": b'{"queue": ' + b"[" * _DEEP + b"]" * _DEEP + b"}",
    "too deep and cut off": b'{"items": ' + b'{"a":' * _DEEP,
}


@dataclass(frozen=True)
class Site:
    """A server with one leased message and one that waits; the group `g` consumes them too."""

    api: Api
    connection: Connection
    message: dict[str, Any]

    async def ask(self, method: str, target: str, body: bytes | str = b"") -> Answer:
        """Any bytes to the server; fails when they make it fail or hang."""
        body = self.fill(body) if isinstance(body, str) else body
        async with asyncio.timeout(_SOON_SECONDS):
            status, answer = await exchange(self.api.url, method, target, body)
        shown = f"{method} {target[:200]} {body[:200]!r}: {status} {answer[:300]!r}"
        assert status < 500, shown
        decoded: Any = None
        if answer and (status >= 400 or not target.startswith(_BINARY)):
            decoded = msgspec.json.decode(answer)
        if status >= 400:
            assert isinstance(decoded["error"], str), shown
            assert len(decoded["error"]) > 5, shown
            assert len(answer) < 2000, shown
        return Answer(status, decoded, {})

    async def refuses(self, method: str, target: str, body: bytes | str, said: str = "") -> None:
        answer = await self.ask(method, target, body)
        assert answer.status == 400, (method, target, body[:300], answer)
        assert said in answer.body["error"], (method, target, body[:300], answer)

    def fill(self, text: str) -> bytes:
        for word, key in (("PARTITION", "partitionId"), ("LEASE", "leaseId"), ("MESSAGE", "transactionId")):
            text = text.replace(word, self.message[key])
        return text.encode()

    def target(self, route: str, query: str = "", **bad: str) -> str:
        """The path of a route; where a parameter is not given, it names what exists."""
        path = route.partition(" ")[2]
        by_id = "/messages/" in path or "/traces/" in path
        values = {
            "queue": "q",
            "partition": self.message["partitionId"] if by_id else "Default",
            "group": "g",
            "lease": self.message["leaseId"],
            "transaction": self.message["transactionId"],
            "name": "n",
        } | bad
        for key, value in values.items():
            path = path.replace(f"{{{key}}}", value)
        return f"{path}?{query}" if query else path

    async def contents(self) -> dict[str, str]:
        """Every table, in a form that differs when a row does."""
        # What workers count goes on whatever is asked of them, and so does the audit log.
        tables = await self.connection.fetch(
            "SELECT tablename AS name FROM pg_tables WHERE schemaname = 'queen' AND tablename NOT LIKE 'metric%'"
            " AND tablename <> 'audit'"
        )
        return {
            table["name"]: await self.connection.fetchval(
                f"SELECT count(*) || ' ' || coalesce(md5(string_agg(t::text, '|' ORDER BY t::text)), '')"
                f" FROM queen.{table['name']} t"
            )
            for table in tables
        }


@pytest.fixture
async def site(start_server: StartServer, connection: Connection) -> Site:
    # Without a peer, packets of other hosts are refused whatever they hold.
    return await _site(await start_server(queen_peers=("http://127.0.0.1:9",)), connection)


async def test_every_route_has_its_bad_input_here(api: Api) -> None:
    assert api.worker is not None
    assert {f"{route.method} {route.pattern}" for route in api.worker.http.router.routes} == set(_SURFACES)
    for route in api.worker.http.router.routes:
        surface = _SURFACES[f"{route.method} {route.pattern}"]
        assert set(surface.unknown) == set(route.parameters), route
    # None is left out of the tests below that go through the routes of a kind.
    routes = {f"{route.method} {route.pattern}": route for route in api.worker.http.router.routes}
    assert {name for name, route in routes.items() if route.declaration.body is not None} <= set(_WITH_BODY)
    assert {name for name, route in routes.items() if route.parameters} == set(_WITH_PATH)
    assert len(_WITH_QUERY) > 50


async def test_every_route_refuses_a_bad_body_and_changes_nothing(site: Site) -> None:
    for route in _WITH_BODY:
        surface, method = _SURFACES[route], route.partition(" ")[0]
        before = await site.contents()
        for body in _MALFORMED.values():
            await site.refuses(method, site.target(route), body)
        if surface.needs_body:
            await site.refuses(method, site.target(route), b"")
        for text, said in surface.refused.items():
            await site.refuses(method, site.target(route), text, said)
        assert await site.contents() == before


async def test_a_body_beyond_the_limit_is_refused_by_every_route_and_changes_nothing(
    start_server: StartServer, connection: Connection
) -> None:
    site = await _site(await start_server(max_body_bytes=2000), connection)
    before = await site.contents()
    for route, surface in _SURFACES.items():
        target = site.target(route, surface.query)
        answer = await site.ask(route.partition(" ")[0], target, b'{"items": [' + b" " * 2000 + b"]}")
        assert answer.status == 413, (route, answer)
        assert "2000 bytes" in answer.body["error"]
    assert await site.contents() == before


async def test_a_bad_path_is_refused_or_finds_nothing_and_changes_nothing(site: Site) -> None:
    for route in _WITH_PATH:
        surface, method = _SURFACES[route], route.partition(" ")[0]
        before = await site.contents()
        for key, unknown in surface.unknown.items():
            cases = {"nobody": unknown, _NO_UUID: unknown, "-1": unknown, "9" * 200: unknown}
            cases |= dict.fromkeys((surface.too_long, *_CONTROLS), surface.unnamable) | dict.fromkeys(_NOT_TEXT, 400)
            for value, status in cases.items():
                answer = await site.ask(method, site.target(route, surface.query, **{key: value}), surface.body)
                assert answer.status == status, (route, key, value, answer)
                # What is refused with 400 is named with its place: the parameter, or the text that cannot be read.
                assert status != 400 or key in answer.body["error"] or value in answer.body["error"], (
                    key,
                    value,
                    answer,
                )
        assert await site.contents() == before


async def test_a_bad_query_is_refused_or_read_leniently_and_changes_nothing(site: Site) -> None:
    before = await site.contents()
    for route in _WITH_QUERY:
        await _ask_badly(site, route)
        assert await site.contents() == before, route


async def _ask_badly(site: Site, route: str) -> None:
    """Every query of a route that makes no sense."""
    surface, method = _SURFACES[route], route.partition(" ")[0]
    here = {"queue": "nobody"} if "/pop/" in route else {}

    async def ask(query: str) -> Answer:
        return await site.ask(method, site.target(route, query, **here))

    for key in surface.numbers:
        for text in _ABSURD:
            answer = await ask(f"{key}={text}&{surface.query}")
            assert answer.status in (200, 204), (key, text, answer)
    for key in (*surface.names, *surface.words):
        status = {400} if key in surface.names else {200, 204, 404}
        for text in (_LONG, *_CONTROLS):
            # The first of two counts.
            answer = await ask(f"{key}={text}&{surface.query}")
            assert answer.status in status, (key, text, answer)
            assert answer.status != 400 or key in answer.body["error"], (key, text, answer)
    for query, said in surface.refused_query.items():
        await site.refuses(method, site.target(route, query, **here), b"", said)
    for text in _NOT_TEXT:
        await site.refuses(method, site.target(route, f"queue={text}", **here), b"", text)
        await site.refuses(method, site.target(route, f"{text}=1", **here), b"", text)


async def test_names_of_255_characters_are_not_too_long(site: Site) -> None:
    name = _LONG[1:]
    await site.api.push(name, 1, partition=name, ids=[name])
    (message,) = await site.api.pop(name, name, consumerGroup=name)
    assert message["transactionId"] == name


async def test_absurd_numbers_in_a_pop_mean_the_default_or_the_nearest(
    start_server: StartServer, connection: Connection
) -> None:
    site = await _site(await start_server(default_batch_size=7), connection)
    await site.api.push("numbers", *range(20))
    path = "/api/v1/pop/queue/numbers"
    for text, count in (("-5", 1), ("0", 1), ("99999", 20), ("1.5", 7), ("many", 7), ("9" * 30, 7), ("%00", 7)):
        numbers = f"batch={text}&partitions={text}&timeout={text}"
        answer = await site.ask("GET", f"{path}?{numbers}&consumerGroup=group{text.replace('%', '')}")
        assert len(answer.body["messages"]) == count, text
    for text in ("-5", "0"):
        # A wait of no time is over at once.
        answer = await site.ask("GET", f"/api/v1/pop/queue/nobody?wait=true&timeout={text}")
        assert answer.status == 204


@pytest.mark.parametrize("route", _PAGED)
async def test_pages_of_absurd_size_and_place_are_the_nearest_there_are(site: Site, route: str) -> None:
    for query, limit, offset in (("limit=-5&offset=-5", 1, 0), (f"limit={10**15}&offset={10**18}", 1000, 1 << 53)):
        page = (await site.ask("GET", site.target(route, query))).body["pagination"]
        assert (page["limit"], page["offset"]) == (limit, offset)


async def test_unknown_ids_in_acks_are_not_found_one_by_one(site: Site) -> None:
    before = await site.contents()
    strange = [
        _NO_UUID,
        "nobody",
        "\x00",
        _LONG,
        "51756565-0000-8000-8fff-ffffffffffff",
        "51756565-0009-8000-8000-000000000001",
    ]
    acks = [{"transactionId": "t", "partitionId": id, "leaseId": site.message["leaseId"]} for id in strange]
    acks += [
        {"transactionId": id, "partitionId": site.message["partitionId"], "leaseId": site.message["leaseId"]}
        for id in ("nobody", "\x00", _LONG)
    ]
    acks += [
        {"transactionId": site.message["transactionId"], "partitionId": site.message["partitionId"], "leaseId": id}
        for id in ("nobody", "\x00", _LONG, _NO_UUID)
    ]
    body = msgspec.json.encode({"acknowledgments": acks})
    answer = await site.ask("POST", "/api/v1/ack/batch", body)
    assert answer.status == 200
    assert [result["success"] for result in answer.body] == [False] * len(acks)
    assert all(result["error"] for result in answer.body)
    for ack in acks:
        answer = await site.ask("POST", "/api/v1/ack", msgspec.json.encode(ack))
        assert answer.status == 200
        assert not answer.body[0]["success"] and answer.body[0]["error"], answer
        operation = {"type": "ack"} | ack
        push = {"type": "push", "items": [{"queue": "q", "payload": 1}]}
        answer = await site.ask("POST", "/api/v1/transaction", msgspec.json.encode({"operations": [push, operation]}))
        assert answer.status == 200 and answer.body["success"] is False and answer.body["error"], answer
    assert await site.contents() == before


async def test_unknown_operations_and_messages_change_nothing(site: Site) -> None:
    before = await site.contents()
    push = '{"type": "push", "items": [{"queue": "q", "payload": 1}]}'
    for kind in ('"steal"', "1", "null", '"\\u0000"'):
        answer = await site.ask("POST", "/api/v1/transaction", f'{{"operations": [{push}, {{"type": {kind}}}]}}')
        assert answer.status == 200 and answer.body["success"] is False, answer
        assert "Unknown operation" in answer.body["error"]
    for partition, transaction in ((_NO_UUID, "t"), ("\x00", "t"), (site.message["partitionId"], "\x00")):
        body = msgspec.json.encode({"transactionId": transaction, "partitionId": partition, "data": {}})
        answer = await site.ask("POST", "/api/v1/traces", body)
        assert answer.status == 404, answer
    assert await site.contents() == before


async def test_half_a_surrogate_pair_is_no_text_anywhere(site: Site) -> None:
    before = await site.contents()
    for body in (
        rb'{"items": [{"queue": "\ud800", "payload": 1}]}',
        rb'{"items": [{"queue": "q", "partition": "\udfff", "payload": 1}]}',
        rb'{"items": [{"queue": "q", "transactionId": "a\ud800b", "payload": 1}]}',
    ):
        await site.refuses("POST", "/api/v1/push", body)
    await site.refuses("POST", "/api/v1/configure", rb'{"queue": "\ud800"}')
    await site.refuses("POST", "/api/v1/ack", site.fill(rf'{{{_ACK}, "error": "\ud800"}}'))
    await site.refuses("POST", "/api/v1/push", push_body("q", rb'"\ud800"'), "Invalid JSON")
    await site.refuses("POST", "/api/v1/push", push_body("q", rb'{"\udfff": 1}'), "Invalid JSON")
    await site.refuses("POST", "/api/v1/push", push_body("q", b'"\xed\xa0\x80"'), "UTF-8")
    ephemeral = b'{"queue": "q", "messages": [{"payload": {"\xf5": 1}}]}'
    await site.refuses("POST", "/api/v1/ephemeral/push", ephemeral, "UTF-8")
    value = b'{"operations": [{"op": "put", "ns": "n", "key": "k", "value": "\xd2", "forever": true}]}'
    await site.refuses("POST", "/api/v1/kv", value, "UTF-8")
    assert await site.contents() == before


@pytest.mark.parametrize("payload", [b"NaN", b"Infinity", b"-Infinity", b"01", b"'x'", b'"a\nb"', b"[1,]", b"{1: 2}"])
async def test_a_payload_that_is_no_json_is_refused(site: Site, payload: bytes) -> None:
    before = await site.contents()
    await site.refuses("POST", "/api/v1/push", push_body("q", payload), "Invalid JSON")
    transaction = b'{"operations": [{"type": "push", "items": [{"queue": "q", "payload": %b}]}]}' % payload
    await site.refuses("POST", "/api/v1/transaction", transaction, "Invalid JSON")
    assert await site.contents() == before


@pytest.mark.parametrize("payload", [b"[" * 500 + b"]" * 500, b'{"a":' * 500 + b"1" + b"}" * 500], ids=["[", "{"])
async def test_500_levels_come_back_unchanged(site: Site, payload: bytes) -> None:
    answer = await site.ask("POST", "/api/v1/push", push_body("deep", payload))
    assert answer.status == 201
    status, popped = await exchange(site.api.url, "GET", "/api/v1/pop/queue/deep")
    assert status == 200
    assert raw_payloads(popped) == [payload]


@pytest.mark.parametrize(
    "payload", [b"[" * _DEEP + b"]" * _DEEP, b'{"a":' * _DEEP + b"1" + b"}" * _DEEP], ids=["[", "{"]
)
async def test_100_000_levels_are_refused_quickly(site: Site, payload: bytes) -> None:
    before = await site.contents()
    async with asyncio.timeout(100):
        await site.refuses("POST", "/api/v1/push", push_body("deep", payload), "nested too deeply")
        transaction = b'{"operations": [{"type": "push", "items": [{"queue": "deep", "payload": %b}]}]}' % payload
        await site.refuses("POST", "/api/v1/transaction", transaction, "nested too deeply")
        trace = site.fill(f"{{{_TRACE}, ") + b'"data": %b}' % payload
        await site.refuses("POST", "/api/v1/traces", trace, "nested too deeply")
    assert await site.contents() == before


async def test_good_pushes_are_stored_beside_bad_ones(site: Site) -> None:
    bad = [text for text in _SURFACES["POST /api/v1/push"].refused if text.startswith('{"items": [{')]
    good = [push_body("busy", b"%d" % number, f"id{number}") for number in range(len(bad))]
    asked = [site.ask("POST", "/api/v1/push", body) for pair in zip(good, bad, strict=True) for body in pair]
    statuses = [answer.status for answer in await asyncio.gather(*asked)]
    assert statuses == [201, 400] * len(good)
    stored = await stored_ids(site.connection, "busy")
    assert sorted(stored) == sorted(f"id{number}" for number in range(len(good)))


async def test_good_acks_renewals_and_pops_succeed_beside_bad_ones(site: Site) -> None:
    partitions = [f"p{number}" for number in range(10)]
    for partition in partitions:
        await site.api.push("busy", 1, 2, partition=partition)
    pops = [
        site.ask("GET", f"/api/v1/pop/queue/{target}")
        for partition in partitions
        for target in (f"busy/partition/{partition}?batch=1", "a%00b", "nobody?batch=many", f"q?consumerGroup={_LONG}")
    ]
    popped = await asyncio.gather(*pops)
    assert [answer.status for answer in popped] == [200, 400, 204, 400] * 10
    leased = [message for answer in popped[::4] for message in answer.body["messages"]]
    strange = [
        "nobody",
        "\x00",
        _NO_UUID,
        "01890000-0000-7000-bfff-ffffffffffff",
        "01890000-0000-7000-8fff-ffffffffffff",
    ]
    renewals = [
        site.ask("POST", f"/api/v1/lease/{lease}/extend", '{"seconds": 600}')
        for message, lease in zip(leased, ["%00" if id == "\x00" else id for id in strange] * 2, strict=True)
        for lease in (message["leaseId"], lease)
    ]
    assert [answer.status for answer in await asyncio.gather(*renewals)] == [200, 404] * 10
    acks = []
    for message, lease in zip(leased, strange * 2, strict=True):
        good = {key: message[key] for key in ("transactionId", "partitionId", "leaseId")} | {"status": "completed"}
        acks += [good | {"leaseId": lease}, good | {"status": "\x00"}, good | {"partitionId": _NO_UUID}, good]
    answers = await asyncio.gather(*(site.ask("POST", "/api/v1/ack", msgspec.json.encode(ack)) for ack in acks))
    assert [answer.body[0]["success"] for answer in answers] == [False, False, False, True] * 10
    for partition in partitions:
        (message,) = await site.api.pop("busy", partition)
        assert message["data"] == 2


async def _site(api: Api, connection: Connection) -> Site:
    await api.push("q", 1, 2, ids=["t", "later"])
    (message,) = await api.pop("q", batch=1)
    assert await api.pop("q", batch=1, consumerGroup="g", subscriptionMode="all")
    return Site(api, connection, message)
