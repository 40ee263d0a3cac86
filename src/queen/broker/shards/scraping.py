"""A scrape of metrics over several shards."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import asyncpg

from queen.broker.watching.scrape import Cluster, Scraper
from queen.errors import QueenError
from queen.metrics.report import Report

log = logging.getLogger(__name__)


class ShardsScraper(Scraper):
    """Shard 0 keeps what was counted; every shard tells what its queues hold."""

    def __init__(self, first: Scraper, others: Sequence[Scraper]) -> None:
        super().__init__(
            first._database, first._groups, first._history, first._recorder, first._standings, first._most_queues
        )
        self._others = others

    async def _cluster(self, reports: Sequence[Report]) -> Cluster:
        whole = await super()._cluster(reports)
        for other in self._others:
            try:
                part = await other._cluster(reports)
            except (QueenError, asyncpg.PostgresError) as error:
                log.warning("metrics without one of the shards: %s", error)
                continue
            whole = dataclasses.replace(
                whole,
                queues=sorted({*whole.queues, *part.queues}),
                queues_left_out=whole.queues_left_out + part.queues_left_out,
                pending={**whole.pending, **part.pending},
                lags=[*whole.lags, *part.lags],
                lags_left_out=whole.lags_left_out + part.lags_left_out,
                dead_letters={**whole.dead_letters, **part.dead_letters},
            )
        return whole
