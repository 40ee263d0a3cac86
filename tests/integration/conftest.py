"""What several integration tests stand on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.faults.proxy import Proxy


@pytest.fixture
async def proxy(dsn: str) -> AsyncIterator[Proxy]:
    """A way to the test's database that can be cut, stalled and slowed down."""
    proxy = Proxy(dsn)
    await proxy.start()
    yield proxy
    await proxy.stop()
