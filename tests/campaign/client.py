"""HTTP as the workloads speak it: every call is recorded with what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from tests.campaign.history import Call, History, Outcome

_CALL_SECONDS = 20.0
_NEVER_SENT = (aiohttp.ClientConnectorError,)

Digest = Callable[[Any], Any]


def as_it_is(body: Any) -> Any:
    return body


class Recorder:
    """One client of one host. A call ends as ok, as fail (nothing happened) or as unknown."""

    def __init__(self, history: History, name: str, url: str) -> None:
        self.history = history
        self.name = name
        self.url = url
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self,
        op: str,
        args: dict[str, Any],
        method: str,
        path: str,
        body: Any = None,
        *,
        query: dict[str, Any] | None = None,
        digest: Digest = as_it_is,
    ) -> Call:
        """Send a request; `args` and `digest` say what of it and of its answer the history keeps."""
        call = self.history.begin(self.name, op, args)
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CALL_SECONDS))
            # It would send a GET again whose connection ended, and a pop without an answer would not be in the history.
            self._session._retry_connection = False
        params = {
            key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in (query or {}).items()
        }
        try:
            async with self._session.request(method, self.url + path, json=body, params=params) as answer:
                content = await answer.json(content_type=None) if await answer.read() else None
                status = answer.status
        except _NEVER_SENT as error:
            return self.history.end(call, Outcome.FAIL, error=type(error).__name__)
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError) as error:
            return self.history.end(call, Outcome.UNKNOWN, error=type(error).__name__)
        except asyncio.CancelledError:
            self.history.end(call, Outcome.UNKNOWN, error="cancelled")
            raise
        if status < 300:
            return self.history.end(call, Outcome.OK, digest(content))
        said = content.get("error", "") if isinstance(content, dict) else str(content)
        refused = status < 500
        return self.history.end(call, Outcome.FAIL if refused else Outcome.UNKNOWN, error=f"{status} {said}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def status_of(call: Call) -> int | None:
    """The status of an answer that was an error; None when it was none or there was no answer."""
    first, _, _ = call.error.partition(" ")
    return int(first) if first.isdigit() else None
