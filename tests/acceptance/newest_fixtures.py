"""The fixtures that the newest client's own tests expect: copied beside them as conftest.py, run with that client."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest_asyncio

from queen import Queen


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Queen]:
    async with Queen(os.environ["QUEEN_SERVER_URL"]) as queen:
        yield queen
