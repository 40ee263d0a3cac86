"""Databases that fail while they are prepared: a server waits for them, as for one that is not there."""

from __future__ import annotations

import pytest

from queen.errors import DatabaseUnavailable
from queen.storage.migrate import migrate
from queen.storage.shard_setup import set_up_shards
from tests.support.proxy import proxied


async def test_a_connection_that_is_lost_during_the_migration_is_an_outage(dsn: str) -> None:
    async with proxied(dsn) as proxy:
        proxy.lose_answers(1, of=lambda sent: b"pg_advisory_lock" in sent)
        with pytest.raises(DatabaseUnavailable, match="connection lost"):
            await migrate(proxy.dsn)
        assert proxy.lost_answers == 1
        await migrate(proxy.dsn)


async def test_a_connection_that_is_lost_while_shards_are_set_up_is_an_outage(dsn: str) -> None:
    async with proxied(dsn) as proxy:
        proxy.lose_answers(1, of=lambda sent: b"queen.shard" in sent)
        with pytest.raises(DatabaseUnavailable, match="connection lost"):
            await set_up_shards([proxy.dsn])
        assert proxy.lost_answers == 1
