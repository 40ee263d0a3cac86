"""The endpoint of SQS: authenticates requests, dispatches them to actions, and renders the answers."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

import asyncpg

from queen.broker.broker import Broker
from queen.concurrency import BackgroundTask
from queen.errors import BadRequest, DatabaseUnavailable, Overloaded, QueenError, QuotaExceeded
from queen.http.auth.audit import Audit
from queen.http.auth.browser import BrowserRules
from queen.http.auth.guard import check_sqs_keys
from queen.http.auth.principal import Principal
from queen.http.routing.context import Shard
from queen.http.server.message import Access, Handler, Request, Response, Route, error_response
from queen.http.server.router import Router
from queen.http.sqs.call import PATH, Backend, Call
from queen.http.sqs.errors import SqsError
from queen.http.sqs.fifo import FifoQueues
from queen.http.sqs.in_flight import InFlightLimit
from queen.http.sqs.message_actions import MESSAGE_ACTIONS
from queen.http.sqs.moves import MoveTasks
from queen.http.sqs.protocol import Action, answer, is_json, is_sqs, read_action, refusal
from queen.http.sqs.queue_actions import QUEUE_ACTIONS, create_queue
from queen.http.sqs.queues import QueueCatalog, Shards, SqsQueue
from queen.http.sqs.signature import AccessKey, SignatureVerifier, region_of
from queen.http.sqs.standard import StandardQueues
from queen.settings import Settings

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from queen.broker.sharding.shard_router import ShardRouter
    from queen.broker.sharding.sharded_broker import ShardedBroker

log = logging.getLogger(__name__)

ACTIONS: Final = {**QUEUE_ACTIONS, **MESSAGE_ACTIONS}
_CLEANING_SECONDS: Final = 60.0


class SqsEndpoint:
    """Serves both protocols at one path."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker | ShardedBroker,
        shards: Sequence[Shard],
        router: ShardRouter | None,
        audit: Audit,
        refused: MutableMapping[str, int],
        browsers: BrowserRules,
        around: Callable[[Handler], Handler],
    ) -> None:
        """`refused` counts requests by the reason why they were not admitted; `around` is what stands around handlers.

        Raises `SettingsError`.
        """
        self._handler = around(self.serve)
        check_sqs_keys(settings)
        keys = [AccessKey(*key) for key in settings.queen_sqs_keys]
        self._verifier = SignatureVerifier(keys) if keys else None
        self._refused = refused
        self._browsers = browsers
        places = Shards(shards, router)
        self._database = places.first
        standard, fifo = StandardQueues(broker, places), FifoQueues(broker, places)
        catalog = QueueCatalog(places.brokers)

        def store_of(queue: SqsQueue) -> StandardQueues | FifoQueues:
            return fifo if queue.is_fifo else standard

        scheme = "https" if settings.tls_cert else "http"
        self._backend = Backend(
            catalog,
            standard,
            fifo,
            MoveTasks(self._database, catalog, store_of),
            InFlightLimit(settings.queen_sqs_in_flight),
            scheme,
        )
        self._audit = audit
        self._cleaning = BackgroundTask()
        self.requests: Counter[tuple[str, str]] = Counter()
        """How many requests were answered, by action and error (empty: none)."""

    def add_to(self, router: Router) -> None:
        """Serve at `/sqs`, and at the addresses of queues, which the query protocol posts to."""
        for pattern in (PATH, f"{PATH}/{{account}}/{{queue}}"):
            for method in ("GET", "POST"):
                # Who sends a request is found out here: the answer has to be one that SDKs understand.
                router.add(method, pattern, self._handler, Access.PUBLIC)

    def before(self, fallback: Handler) -> Handler:
        """The handler of unknown paths, after clients that know a host and a port alone, such as Kombu's."""

        def serve(request: Request) -> Response | Awaitable[Response]:
            if request.method == "POST" and request.path == "/" and is_sqs(request):
                return self._handler(request)
            return fallback(request)

        return serve

    def start(self) -> None:
        self._cleaning.start(self._clean())

    async def stop(self) -> None:
        await self._cleaning.stop()
        await self._backend.moves.stop()

    async def serve(self, request: Request) -> Response:
        if request.method == "HEAD":
            return error_response(405, "HEAD changes nothing, and actions do", ((b"Allow", b"GET, POST, OPTIONS"),))
        # The body names the action, and most actions change something.
        if (foreign := self._browsers.check_page(request, reads=False)) is not None:
            self._refused["browser"] += 1
            return foreign
        request_id = str(uuid.uuid4())
        name = ""
        try:
            principal = self._admit(request)
            action = read_action(request)
            if action.name in ACTIONS:
                name = action.name
            response = await self._run(request, action, principal, request_id)
        except Exception as error:
            failure = _as_sqs_error(error)
            if failure is None:
                raise
            self.requests[name, failure.code] += 1
            return refusal(failure, request_id, as_json=is_json(request))
        self.requests[name, ""] += 1
        return response

    def _admit(self, request: Request) -> Principal | None:
        if self._verifier is None:
            return None
        try:
            principal = self._verifier.verify(request)
        except SqsError as error:
            self._refused["missing" if error.name == "MissingAuthenticationToken" else "signature"] += 1
            log.info("%s %s from %s refused: %s", request.method, request.path, request.peer, error.message)
            raise
        request.principal, request.subject = principal, principal.subject
        return principal

    async def _run(self, request: Request, action: Action, principal: Principal | None, request_id: str) -> Response:
        found = ACTIONS.get(action.name)
        if found is None:
            near = get_close_matches(action.name, ACTIONS, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise SqsError("UnknownOperationException", f"The action {action.name[:80]} is not valid here.{hint}")
        needed, perform = found
        call = Call(request, action.name, action.params, principal, region_of(request), self._backend)
        try:
            call.require(needed)
            if needed is not Access.ADMIN and perform is not create_queue:
                return answer(action, await perform(call), request_id)
        except SqsError as error:
            if error.name == "AccessDeniedException":
                self._refused["role"] += 1
            raise

        async def serve(request: Request) -> Response:
            return answer(action, await perform(call), request_id)

        route = Route("SQS", action.name, serve, Access.ADMIN)
        audited = self._audit.around(route, serve, sent=action.params)(request)
        return audited if isinstance(audited, Response) else await audited

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(_CLEANING_SECONDS)
            try:
                await self._database.fetch("sqs_clean")
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("SQS: old deduplication ids and deliveries were not removed: %s", error)

    def families(self) -> Iterable[Metric]:
        """Metrics of this worker."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(
            "queen_sqs_requests", "Requests of SQS clients, by action and error code.", labels=("action", "error")
        )
        for (action, error), count in sorted(self.requests.items()):
            family.add_metric((action, error), count)
        yield family


def _as_sqs_error(error: Exception) -> SqsError | None:
    """What SDKs receive of an error; None for a fault of the server that nothing is known of."""
    if isinstance(error, SqsError):
        return error
    if isinstance(error, QuotaExceeded):
        return SqsError("RequestThrottled", str(error))
    if isinstance(error, Overloaded | DatabaseUnavailable):
        return SqsError("ServiceUnavailable", str(error))
    if isinstance(error, BadRequest):
        return SqsError("InvalidParameterValueException", str(error))
    return SqsError("InternalError", str(error)) if isinstance(error, QueenError) else None
