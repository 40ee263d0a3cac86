"""Pipelines on the one Spark that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from queen.pipelines.session import settings_for
from tests.pipelines.running import Runner
from tests.spark.conftest import dsn, is_alive, spark, spark_directory

__all__ = ["dsn", "spark", "spark_directory"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first of them starts a JVM, which takes its time where others are at work."""
    for item in items:
        if HERE in item.path.parents and "runner" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture
def runner(spark: SparkSession, tmp_path: Path) -> Iterator[Runner]:
    """Runs pipelines, with the settings of Spark that `queen pipeline` would give it."""
    wanted = {"spark.sql.streaming.noDataMicroBatches.enabled": "true"}
    wanted |= {key: value for key, value in settings_for("local[2]").items() if spark.conf.isModifiable(key)}
    before = {key: spark.conf.get(key) for key in wanted}
    for key, value in wanted.items():
        spark.conf.set(key, value)
    yield Runner(spark, tmp_path)
    for key, old in before.items():
        if old is not None and is_alive():
            spark.conf.set(key, old)
