"""The page about pushing from SQL: its SQL, Django and SQLAlchemy run as they stand there, and messages arrive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg

from tests.docs.snippets import BLOCK, Walk
from tests.docs.test_pages import DOCS, SQL_PAGE
from tests.support.ageing import is_inbox_empty, until
from tests.support.api import Api, payloads
from tests.support.topic_api import TopicApi, values

PAGE = DOCS / SQL_PAGE


async def test_the_sql_of_the_page_runs_and_its_messages_arrive(api: Api, dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    blocks = [block[2] for block in BLOCK.finditer(PAGE.read_text()) if block[1] == "sql"]
    # Roles belong to the cluster, which other tests share: tests/broker/transactions/test_inbox.py.
    ran = [block for block in blocks if "CREATE ROLE" not in block]
    assert len(blocks) - len(ran) == 2
    try:
        for block in ran:
            await connection.execute(block)
        await until(lambda: is_inbox_empty(connection))
    finally:
        await connection.close()
    (order,) = await api.pop("sql-orders")
    assert (order["data"], order["partition"], order["transactionId"]) == ({"order": 1}, "customer-7", "order-1")
    assert payloads(await api.pop("sql-readings", batch=5000)) == [{"n": number} for number in range(1, 5001)]
    assert payloads(await api.pop("sql-reminders", batch=5)) == [{"order": 1}]
    assert payloads(await api.pop("sql-audit")) == [{"who": "ann"}]
    assert payloads(await api.pop("sql-mail")) == ["hello"]
    assert payloads(await api.pop("sql-order-changes")) == [{"id": 1, "customer": "customer-7", "total": 43}]
    assert values(await TopicApi(api).dequeue(namespace="sql-shop", topic="invoices")) == []


async def test_django_and_sqlalchemy_push_in_their_transactions(api: Api, dsn: str, tmp_path: Path) -> None:
    parts = urlsplit(dsn)
    where = {key: found[0] for key, found in parse_qs(parts.query).items()}
    name = parts.path.lstrip("/")
    django = f'"NAME": "{name}", "USER": "postgres", "HOST": "{where["host"]}", "PORT": "{where["port"]}"'
    walk = Walk(
        api.url,
        tmp_path,
        replaced={
            '"NAME": "shop", "USER": "app"': django,
            "postgresql+psycopg://app@/shop": dsn.replace("postgresql://", "postgresql+psycopg://"),
        },
    )
    assert await asyncio.to_thread(walk.page, PAGE) == []
    (parcel,) = await api.pop("sql-parcels", batch=5, wait=True)
    assert (parcel["data"], parcel["transactionId"]) == ({"parcel": 1}, "parcel-1")
    (shipment,) = await api.pop("sql-shipments", batch=5, wait=True)
    assert (shipment["data"], shipment["partition"]) == ({"shipment": 1}, "customer-7")
