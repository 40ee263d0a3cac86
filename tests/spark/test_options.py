"""Options are checked before anything is read."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import pytest

from queen.errors import SettingsError
from queen.spark.options import BatchLimits, EdgeKind, ReadOptions, parse_access, parse_read_options

URL = "postgresql://localhost/queen"


def parse(**options: str) -> ReadOptions:
    return parse_read_options({"databaseUrls": URL, "queue": "orders"} | options, {})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"queue": ""}, "which queue"),
        ({"queue": "a,b,a"}, "twice"),
        ({"colums": "offset"}, "no option 'colums' here; did you mean 'columns'?"),
        ({"queue": '["a", 1]'}, "JSON list such as"),
        ({"subscribePattern": "orders.*"}, "either queue or subscribePattern"),
        ({"queue": "", "subscribePattern": "orders["}, "not a regular expression"),
        ({"outageGraceSeconds": "-1"}, "seconds from 0 to 86400"),
        ({"maxReadShare": "0"}, "a share of the machine from 0.01 to 1"),
        ({"maxReadShare": "half"}, "a share of the machine from 0.01 to 1"),
        ({"maxReadShar": "0.5"}, "maxReadShare"),
        ({"table": "lag", "maxReadShare": "0.5"}, "for messages"),
        ({"table": "lag", "maxRowsPerBatch": "5"}, "for messages"),
        ({"table": "dlq", "mirrorGroup": "g"}, "for messages"),
        ({"queue": "orders", "topic": "mail"}, "option topic is for items of topics"),
        ({"queue": "orders", "partitions": "[]"}, "names none"),
        ({"queue": "orders", "columns": "offset,offset"}, "names a column twice"),
        (
            {"queue": "orders", "startingTimestamp": "2026-01-02", "endingTimestamp": "2026-01-01"},
            "endingTimestamp is before startingTimestamp",
        ),
        ({"parsedColumn": "order"}, "give option schema"),
        ({"table": "messges"}, "messages, dlq, traces, topic, lag"),
        ({"mode": "DROPMALFORMED"}, "PERMISSIVE, FAILFAST"),
        ({"startingOffsets": "soon"}, 'earliest, latest, or JSON such as {"Default": 12}'),
        ({"startingOffsets": '{"Default": -1}'}, "offset -1 for Default"),
        ({"startingOffsets": '{"Default": "1"}'}, "earliest, latest, or JSON"),
        ({"queue": "a,b", "startingOffsets": '{"Default": 1}'}, "name the queue"),
        ({"startingOffsets": "earliest", "startingTimestamp": "2026-01-01"}, "either"),
        ({"startingTimestamp": "yesterday"}, "2026-04-26T10:59:28Z"),
        ({"endingOffsets": "earliest"}, "nothing would be read"),
        ({"maxRowsPerBatch": "0"}, "above 0"),
        ({"maxOffsetsPerTrigger": "-5"}, "maxOffsetsPerTrigger must be a whole number above 0"),
        ({"maxOffsetPerTrigger": "5"}, "did you mean 'maxOffsetsPerTrigger'?"),
        ({"maxRowsPerBatch": "5", "maxOffsetsPerTrigger": "6"}, "two names of one limit"),
        ({"minOffsetsPerTrigger": "6", "maxRowsPerBatch": "5"}, "minOffsetsPerTrigger (6) must not be above"),
        ({"minBytesPerTrigger": "60", "maxBytesPerTrigger": "50"}, "minBytesPerTrigger (60) must not be above"),
        ({"maxTriggerDelay": "1m"}, "give that option as well"),
        ({"minOffsetsPerTrigger": "6", "maxTriggerDelay": "soon"}, "such as '30 seconds', '5 minutes' or '1h'"),
        ({"maxBytesPerTrigger": "1m"}, "maxBytesPerTrigger must be a whole number above 0"),
        ({"maxTasks": "many"}, "above 0"),
        ({"failOnDataLoss": "perhaps"}, "true or false"),
        ({"databaseUrls": "mysql://localhost"}, "postgresql://"),
        ({"encryptionKey": "abc"}, "64 hexadecimal digits"),
        ({"table": "lag", "startingOffsets": "earliest"}, "for messages"),
        ({"table": "topic"}, "namespace and topic"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError) as raised:
        parse(**options)
    assert said in str(raised.value)


def test_without_a_place_to_read_from_the_ways_to_name_one_are_said() -> None:
    with pytest.raises(SettingsError) as raised:
        parse_access({}, {})
    assert all(name in str(raised.value) for name in ("databaseUrls", "DATABASE_URLS", "server"))


def test_the_environment_stands_in_for_options_that_are_absent() -> None:
    environment = {"DATABASE_URLS": f"{URL}1, {URL}2", "QUEEN_ENCRYPTION_KEY": "0f" * 32}
    access = parse_access({}, environment)
    assert access.database_urls == (f"{URL}1", f"{URL}2")
    assert access.encryption_keys == (b"\x0f" * 32,)
    assert parse_access({"server": "http://localhost:6632/"}, environment).server == "http://localhost:6632"
    both = parse_access({"server": "http://localhost:6632", "databaseUrls": URL}, {})
    assert (both.server, both.database_urls) == (None, (URL,))


def test_edges_are_words_times_and_offsets() -> None:
    assert parse(startingOffsets="Latest").starting == parse(startingOffsets="latest").starting
    given = parse(startingOffsets='{"Default": 12, "eu": 3}').starting
    assert given is not None
    assert (given.offset("orders", "eu"), given.offset("orders", "us")) == (3, None)
    both = parse(queue="a,b", startingOffsets='{"a": {"Default": 1}, "b": {"Default": 2}}').starting
    assert both is not None
    assert (both.kind, both.offset("a", "Default"), both.offset("b", "Default")) == (EdgeKind.OFFSETS, 1, 2)
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    for text in ("2026-01-01T00:00:00Z", "2026-01-01", str(int(moment.timestamp() * 1000))):
        edge = parse(startingTimestamp=text).starting
        assert edge is not None and edge.time == moment


def test_without_pyspark_it_is_said_what_to_install() -> None:
    code = "import sys; sys.modules['pyspark'] = None; import queen, queen.client; import queen.spark"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install '.[spark]' in a clone" in done.stderr.splitlines()[-1]
    assert "Java 17" in done.stderr.splitlines()[-1]


def test_limits_of_a_batch_have_the_names_that_sources_of_spark_have() -> None:
    given = {"maxOffsetsPerTrigger": "9", "minOffsetsPerTrigger": "2", "maxBytesPerTrigger": "70"}
    given["minBytesPerTrigger"] = "60"
    assert parse(**given, maxTriggerDelay="1m 30s").limits == BatchLimits(9, 2, 70, 60, 90.0)
    assert parse(**given).limits.delay == 900.0
    assert parse().limits == BatchLimits() and not parse().limits


def test_names_of_options_are_compared_without_regard_to_case() -> None:
    assert parse(maxrowsperbatch="5").limits.max_rows == 5
    assert parse(queue="", path="invoices").queues == ("invoices",)
