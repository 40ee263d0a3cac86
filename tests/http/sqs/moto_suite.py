"""The `conftest.py` of moto's own tests when they run against a server of ours; copied into its sdist."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import boto3
import moto
import moto.core
import moto.core.models
import pytest
from moto import settings

ACCOUNT = "000000000000"


class Mock:
    """In the place of moto's own: a test begins without queues. A decorator and a context manager, as that is."""

    def __enter__(self) -> Mock:
        sqs = boto3.client("sqs", region_name="us-east-1")
        for url in sqs.list_queues().get("QueueUrls", []):
            sqs.delete_queue(QueueUrl=url)
        return self

    def __exit__(self, *error: object) -> None:
        return

    def __call__(self, test: Any) -> Any:
        if inspect.isclass(test):
            for name, member in list(vars(test).items()):
                if name.startswith("test"):
                    setattr(test, name, self(member))
            return test

        @functools.wraps(test)
        def run(*args: Any, **named: Any) -> Any:
            with self:
                return test(*args, **named)

        return run


def mock_aws(test: Callable[..., Any] | None = None, **options: Any) -> Any:
    return Mock() if test is None else Mock()(test)


@pytest.fixture
def account_id() -> str:
    return ACCOUNT


# Tests that look into moto itself are skipped where it is a server.
settings.TEST_SERVER_MODE = True
moto.mock_aws = sys.modules["tests"].__dict__["mock_aws"] = mock_aws
moto.core.DEFAULT_ACCOUNT_ID = moto.core.models.DEFAULT_ACCOUNT_ID = ACCOUNT
