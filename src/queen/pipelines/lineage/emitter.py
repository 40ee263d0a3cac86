"""Sends OpenLineage events in a thread of its own: a backend that fails or is slow does not affect the run."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from queen.pipelines.errors import cause_of

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import RunEvent

log = logging.getLogger(__name__)

_CONFIG_FILE: Final = "openlineage.yml"
# What a run waits at its end for events that are still to be sent.
_CLOSE_SECONDS: Final = 5.0
# A backend that does not answer holds events back; no more are kept than these.
_MOST_WAITING: Final = 1000
_THREAD: Final = "openlineage"


def is_configured(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a variable or a file says where events go; looks where OpenLineage's client does."""
    if environ.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get("OPENLINEAGE_URL") or environ.get("OPENLINEAGE_CONFIG"):
        return True
    if any(name.startswith("OPENLINEAGE__TRANSPORT") for name in environ):
        return True
    return any((place / _CONFIG_FILE).is_file() for place in (Path.cwd(), Path("~/.openlineage").expanduser()))


def open_emitter(environ: Mapping[str, str] = os.environ) -> Emitter | None:
    """None where lineage is not configured, or cannot be had as it is; the log says why then."""
    if not is_configured(environ):
        return None
    try:
        from openlineage.client import OpenLineageClient
    except ImportError:
        log.warning("OpenLineage is configured, but not installed: pip install '.[lineage]' in a clone")
        return None
    file = environ.get("OPENLINEAGE_CONFIG")
    if file and not os.access(file, os.R_OK):
        log.warning("OPENLINEAGE_CONFIG: %s cannot be read; no lineage events are sent", file)
        return None
    try:
        return Emitter(OpenLineageClient())
    # A transport may be of any class, and raise anything about its settings.
    except Exception as error:
        log.warning("OpenLineage cannot be used as it is configured; no lineage events are sent: %s", cause_of(error))
        return None


class Emitter:
    """Events go out in order, one at a time. A failure is logged once, until one is sent again."""

    def __init__(self, client: OpenLineageClient) -> None:
        self._client = client
        self._waiting: queue.SimpleQueue[RunEvent | None] = queue.SimpleQueue()
        self._failing = False
        self._lost = 0
        # Each of the client's retries would be a line of its own.
        logging.getLogger("urllib3.connectionpool").addFilter(_is_not_ours)
        self._thread = threading.Thread(target=self._send_all, name=_THREAD, daemon=True)
        self._thread.start()

    def emit(self, event: RunEvent) -> None:
        """Does not block; an event is dropped when a thousand are queued."""
        if self._waiting.qsize() < _MOST_WAITING:
            self._waiting.put(event)
        else:
            self._lost += 1

    def close(self) -> None:
        """Wait for what is still to be sent, for a few seconds at most."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._fail(f"the backend has not taken them within {_CLOSE_SECONDS:.0f} s")

    def _send_all(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                self._client.emit(event)
            # A transport may be of any class, and raise anything.
            except Exception as error:
                self._lost += 1
                self._fail(cause_of(error))
            else:
                if self._failing:
                    log.warning("lineage events are sent again; %d were lost", self._lost)
                    self._failing, self._lost = False, 0
        self._client.close(_CLOSE_SECONDS)

    def _fail(self, why: str) -> None:
        if not self._failing:
            self._failing = True
            log.warning("lineage events cannot be sent, which does not affect the run: %s", why)


def _is_not_ours(record: logging.LogRecord) -> bool:
    return record.threadName != _THREAD
