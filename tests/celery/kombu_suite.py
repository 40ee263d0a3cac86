"""Kombu's own integration tests on this transport; copied into the `t/integration` of its sdist and run there."""

from __future__ import annotations

import os
import uuid
from typing import Any

import kombu
import pytest

import queen.celery  # noqa: F401 (It registers the transport; Celery does so by itself.)

from .common import (  # type: ignore[import-not-found]
    BaseEventLoop,
    BaseExchangeTypes,
    BaseFailover,
    BaseMessage,
    BasePriority,
    BaseTimeToLive,
    BasicFunctionality,
)

_URL = os.environ.get("QUEEN_TEST_SERVER", "queen://127.0.0.1:6632")


@pytest.fixture
def connection() -> Any:
    return kombu.Connection(f"{_URL}/kombu-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def invalid_connection() -> Any:
    return kombu.Connection("queen://localhost:12345")


@pytest.fixture
def failover_connection() -> Any:
    return kombu.Connection(f"queen://localhost:12345;{_URL}/kombu-{uuid.uuid4().hex[:12]}", connect_timeout=10)


class TestBasicFunctionality(BasicFunctionality):
    pass


class TestExchangeTypes(BaseExchangeTypes):
    pass


class TestTimeToLive(BaseTimeToLive):
    pass


class TestPriority(BasePriority):
    pass


class TestMessage(BaseMessage):
    pass


class TestEventLoop(BaseEventLoop):
    pass


class TestFailover(BaseFailover):
    pass
