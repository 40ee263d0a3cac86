"""One request to an action: its parameters, its sender, and the queues it may use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from queen.http.auth.principal import Principal
from queen.http.server.message import Access, Request
from queen.http.sqs.attributes import ACCOUNT, arn_of, check_queue_name, queue_of_arn
from queen.http.sqs.errors import SqsError, invalid_parameter, invalid_value, missing_parameter, no_such_queue
from queen.http.sqs.fifo import FifoQueues
from queen.http.sqs.in_flight import InFlightLimit
from queen.http.sqs.moves import MoveTasks
from queen.http.sqs.queues import MessageStore, QueueCatalog, SqsQueue

PATH: Final = "/sqs"


@dataclass(frozen=True, slots=True)
class Backend:
    """What actions work on."""

    catalog: QueueCatalog
    standard: MessageStore
    fifo: FifoQueues
    moves: MoveTasks
    in_flight: InFlightLimit
    scheme: str
    """`https` where the server itself has TLS."""

    def store_of(self, queue: SqsQueue) -> MessageStore:
        return self.fifo if queue.is_fifo else self.standard


class Call:
    """A request. `principal` is None without authentication."""

    __slots__ = ("backend", "name", "params", "principal", "region", "request")

    def __init__(
        self,
        request: Request,
        name: str,
        params: Mapping[str, Any],
        principal: Principal | None,
        region: str,
        backend: Backend,
    ) -> None:
        self.request = request
        self.name = name
        self.params = params
        self.principal = principal
        self.region = region
        self.backend = backend

    @property
    def sender(self) -> str:
        return (self.principal.subject or "") if self.principal is not None else ""

    def require(self, needed: Access) -> None:
        """Raises `SqsError` where the role of the sender does not suffice."""
        if self.principal is not None and self.principal.access < needed:
            raise SqsError("AccessDeniedException", f"Access to the action sqs:{self.name} is denied.")

    def admits(self, queue: str) -> bool:
        """Whether the sender may use a queue."""
        limits = self.principal.queues if self.principal is not None else None
        return limits is None or limits.admits(queue)

    def check_admitted(self, queue: str) -> str:
        if not self.admits(queue):
            raise SqsError("AccessDeniedException", f"Access to the resource {arn_of(queue, self.region)} is denied.")
        return queue

    async def queue(self, *, fresh: bool = False) -> SqsQueue:
        """The queue of the request; `fresh`: not one that was looked up before."""
        return await self.find(self._queue_name(), fresh=fresh)

    async def queue_of_arn(self, parameter: str) -> SqsQueue:
        arn = self.params.get(parameter)
        if not arn:
            raise missing_parameter(parameter)
        queue = await self.backend.catalog.find(self.check_admitted(queue_of_arn(arn, parameter)))
        if queue is None:
            raise SqsError(
                "ResourceNotFoundException",
                f"The resource that you specified for the {parameter} parameter doesn't exist.",
            )
        return queue

    async def find(self, name: str, *, fresh: bool = False) -> SqsQueue:
        queue = await self.backend.catalog.find(self.check_admitted(name), fresh=fresh)
        if queue is None:
            raise no_such_queue()
        return queue

    def _queue_name(self) -> str:
        url = self.params.get("QueueUrl")
        if url is None and "queue" in self.request.params:
            # The query protocol may name it in the path.
            return check_queue_name(self.request.params["queue"])
        if not isinstance(url, str) or not url:
            raise missing_parameter("QueueUrl")
        try:
            parts = urlsplit(url)
            return check_queue_name((parts.path or parts.netloc).rstrip("/").rpartition("/")[2])
        except (ValueError, SqsError):
            raise no_such_queue() from None

    def url_of(self, name: str) -> str:
        """As the client reaches the server."""
        headers = self.request.headers
        host = headers.get(b"host", b"localhost").decode("latin-1")
        scheme = self.backend.scheme
        if headers.get(b"x-forwarded-proto") == b"https":
            scheme = "https"
        return f"{scheme}://{host}{PATH}/{ACCOUNT}/{name}"

    def text(self, name: str) -> str:
        """A parameter that has to be there."""
        value = self.params.get(name)
        if not isinstance(value, str) or not value:
            raise missing_parameter(name)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.params.get(name)
        if value is None or value == "":
            return {}
        if not isinstance(value, dict):
            raise invalid_parameter(f"{name} must be a map.")
        return value

    def texts(self, name: str) -> list[str]:
        value = self.params.get(name)
        if value is None or value == "":
            return []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise invalid_parameter(f"{name} must be a list of texts.")
        return value

    def entries(self) -> Sequence[Mapping[str, Any]]:
        """The entries of a batch, with distinct ids."""
        entries = self.params.get("Entries")
        if not entries or not isinstance(entries, list):
            raise SqsError("EmptyBatchRequest", f"There should be at least one {self.name}RequestEntry in the request.")
        if len(entries) > _MOST_ENTRIES:
            raise SqsError(
                "TooManyEntriesInBatchRequest",
                f"Maximum number of entries per request are {_MOST_ENTRIES}. You have sent {len(entries)}.",
            )
        seen: set[str] = set()
        for entry in entries:
            id = entry.get("Id") if isinstance(entry, dict) else None
            if not isinstance(id, str):
                raise missing_parameter(f"{self.name}RequestEntry.Id")
            if not _ENTRY_ID.fullmatch(id):
                raise SqsError(
                    "InvalidBatchEntryId",
                    "A batch entry id can only contain alphanumeric characters, hyphens and underscores. "
                    "It can be at most 80 letters long.",
                )
            if id in seen:
                raise SqsError("BatchEntryIdsNotDistinct", f"Id {id} repeated.")
            seen.add(id)
        return entries


_MOST_ENTRIES: Final = 10
_ENTRY_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")


def whole(params: Mapping[str, Any], name: str, smallest: int, largest: int) -> int | None:
    """A number among parameters, which older SDKs send as text; None when absent."""
    value = params.get(name)
    if value is None or value == "":
        return None
    text = str(value)
    if isinstance(value, bool) or not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise invalid_value(text[:80], name, f"Must be an integer from {smallest} to {largest}.")
    if not smallest <= int(text) <= largest:
        raise invalid_value(text, name, f"{name} must be >= {smallest} and <= {largest}.")
    return int(text)
