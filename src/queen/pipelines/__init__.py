"""Pipelines on Apache Spark: `from queen.pipelines import Pipeline`, and `queen pipeline run FILE`."""

from queen.pipelines.builder import Pipeline

__all__ = ["Pipeline"]
