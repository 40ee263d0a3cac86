"""The Python snippets of the pages about Spark run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pyspark.sql import SparkSession

from tests.docs.snippets import Walk
from tests.spark.conftest import in_thread
from tests.support.api import Api

DOCS = Path(__file__).parents[2] / "docs"


async def test_reading_page_runs(spark: SparkSession, api: Api, dsn: str, tmp_path: Path) -> None:
    await api.push("orders", *({"id": n, "customer": "ann", "amount": 2.5} for n in range(4)))
    walk = Walk(api.url, tmp_path, {"postgresql://queen@db/queen": dsn, "/archive": str(tmp_path / "archive")})
    walk.replaced['.option("queue", "orders")\n    .option("starting'] = (
        f'.option("databaseUrls", "{dsn}")\n    .option("queue", "orders")\n    .option("starting'
    )
    await asyncio.to_thread(walk.page, DOCS / "spark.md")
    (query,) = spark.streams.active
    await asyncio.to_thread(query.processAllAvailable)
    await asyncio.to_thread(query.stop)
    archived = await asyncio.to_thread(lambda: spark.read.parquet(str(tmp_path / "archive" / "orders")).count())
    assert archived == 4


async def test_writing_page_runs(spark: SparkSession, api: Api, dsn: str, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(1,), (2,)], "total INT")
    stream = spark.readStream.format("rate").load().selectExpr("value AS total")
    walk = Walk(api.url, tmp_path, {"postgresql://…": dsn, "/data": str(tmp_path / "data")})
    walk.names = {"df": frame, "stream": stream, "totals": stream.groupBy().sum("total")}
    await in_thread(spark, lambda: walk.page(DOCS / "spark-writing.md"))
    queries = spark.streams.active
    assert len(queries) == 2
    try:
        written = await api.pop("orders", batch=10, wait=True)
        assert [message["data"] for message in written] == [{"total": 1}, {"total": 2}]
        assert await api.pop("totals", wait=True, timeout=60_000)
        assert await api.pop("changes", wait=True, timeout=60_000)
    finally:
        for query in queries:
            await asyncio.to_thread(query.stop)
