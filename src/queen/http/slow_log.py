"""Logs the requests that take long. Names and times alone: never a body, never a header, never a query."""

from __future__ import annotations

import logging
import time

from queen.http.message import Request, Response
from queen.http.watching import Ended, status_in

log = logging.getLogger(__name__)


class SlowLog:
    """Watches requests, and logs those that took `slow_ms` or longer."""

    def __init__(self, slow_ms: int) -> None:
        self._slow_ms = slow_ms

    def begin(self, request: Request) -> Ended | None:
        # A pop that waits takes long because it was asked to.
        if request.query_bool("wait", False):
            return None
        begun, size = time.perf_counter(), len(request.body)

        def ended(response: Response | None, error: BaseException | None) -> None:
            took = (time.perf_counter() - begun) * 1000
            if took >= self._slow_ms:
                self._log(request, size, status_in(response, error), took)

        return ended

    def _log(self, request: Request, size: int, status: int, took: float) -> None:
        log.warning(
            "slow request: %s %s took %.0f ms and was answered %d",
            request.method,
            request.path,
            took,
            status,
            extra={
                "fields": {
                    "method": request.method,
                    "path": request.path,
                    "status": status,
                    "duration_ms": round(took, 1),
                    "request_bytes": size,
                    "peer": request.peer,
                }
            },
        )
