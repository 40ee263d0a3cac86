"""Single messages: the list, one in detail, and what can be done to it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from queen.broker.broker import Broker
from queen.broker.catalog import QUEUE_MODE
from queen.broker.inspect.browse import MessageFilter, MessageStatus
from queen.errors import BadRequest, NotFound
from queen.http.api.params import read_page, read_time
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.storage.database import can_be_stored
from queen.wire.ack import decode_object, optional_str
from queen.wire.push import LONGEST_NAME

_BY_DEFAULT = 200
_OPERATOR = "Moved to DLQ by operator"


class MessageRoutes:
    """Looking at messages, and doing things to single ones."""

    def __init__(self, broker: Broker) -> None:
        self._browser = broker.message_browser
        self._messages = broker.messages

    def add_to(self, router: Router) -> None:
        one = "/api/v1/messages/{partition}/{transaction}"
        router.add("GET", "/api/v1/messages", self.list, Access.READ_ONLY)
        router.add("GET", one, self.get, Access.READ_ONLY)
        router.add("DELETE", one, self.delete, Access.READ_WRITE)
        router.add("POST", f"{one}/retry", self.retry, Access.READ_WRITE)
        router.add("POST", f"{one}/dlq", self.give_up, Access.READ_WRITE)

    async def list(self, request: Request) -> Response:
        limit, offset = read_page(request, _BY_DEFAULT)
        query = request.query
        wanted = MessageFilter(
            queue=query.get("queue") or None,
            partition=query.get("partition") or None,
            namespace=query.get("ns") or None,
            task=query.get("task") or None,
            status=_status(query.get("status", "")),
            since=read_time(request, "from"),
            before=_end_of_minute(read_time(request, "to")),
        )
        return json_response(200, await self._browser.page(wanted, limit, offset))

    async def get(self, request: Request) -> Response:
        return json_response(200, await self._browser.get(*_named(request)))

    async def delete(self, request: Request) -> Response:
        partition, transaction = _named(request)
        try:
            return json_response(200, await self._messages.delete(partition, transaction))
        except NotFound as error:
            # Deleting what is not there is no failure to the clients that were written for this route.
            answer = {"success": False, "partitionId": partition, "transactionId": transaction}
            return json_response(200, answer | {"message": str(error)})

    async def retry(self, request: Request) -> Response:
        return json_response(200, await self._messages.retry(*_named(request)))

    async def give_up(self, request: Request) -> Response:
        body = decode_object(request.body) if request.body else {}
        group = request.query.get("consumerGroup") or optional_str(body, "consumerGroup") or QUEUE_MODE
        if len(group) > LONGEST_NAME or not can_be_stored(group):
            raise BadRequest(f"consumerGroup must be at most {LONGEST_NAME} characters, none of them NUL")
        error = optional_str(body, "error") or _OPERATOR
        return json_response(200, await self._messages.give_up(*_named(request), group, error))


def _named(request: Request) -> tuple[str, str]:
    return request.params["partition"], request.params["transaction"]


def _status(text: str) -> MessageStatus | None:
    if not text:
        return None
    try:
        return MessageStatus(text)
    except ValueError:
        known = ", ".join(MessageStatus)
        raise BadRequest(f"status must be one of {known}, not {text!r}") from None


def _end_of_minute(moment: datetime | None) -> datetime | None:
    """A time on the list's clock face means all of its minute."""
    if moment is None:
        return None
    try:
        return moment.replace(second=0, microsecond=0) + timedelta(minutes=1)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)
