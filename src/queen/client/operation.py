"""A request that is made when it is awaited: `create()` and `delete()`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any

from queen.client.errors import BadRequestError, QueenError
from queen.client.http import HttpClient


class Operation:
    """Callbacks may be hung on before it is awaited; with `on_error` it does not raise."""

    def __init__(self, http: HttpClient, method: str, path: str, body: Any = None) -> None:
        self._http = http
        self._method = method
        self._path = path
        self._body = body
        self._on_success: Callable[[Any], Awaitable[object]] | None = None
        self._on_error: Callable[[Exception], Awaitable[object]] | None = None

    def on_success(self, callback: Callable[[Any], Awaitable[object]]) -> Operation:
        """Await `callback(answer)` when it worked."""
        self._on_success = callback
        return self

    def on_error(self, callback: Callable[[Exception], Awaitable[object]]) -> Operation:
        """Await `callback(error)` when it did not, instead of raising."""
        self._on_error = callback
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        """The answer of the server."""
        return self._run().__await__()

    async def _run(self) -> Any:
        try:
            answer = await self._http.request(self._method, self._path, self._body)
            if isinstance(answer, dict) and answer.get("error"):
                raise BadRequestError(str(answer["error"]), self._method, self._path)
        except QueenError as error:
            if self._on_error is None:
                raise
            await self._on_error(error)
            return {"success": False, "error": str(error)}
        if self._on_success is not None:
            await self._on_success(answer)
        return answer
