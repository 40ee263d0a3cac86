"""Acknowledgments and renewals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from queen.client.config import ClientLog
from queen.client.errors import LeaseLostError, NotFoundError, QueenError
from queen.client.http import HttpClient, decode_as, decode_json, encode_json
from queen.client.types import AckResponse, MessageRef, MessageRefs, RenewResponse
from queen.wire.paths import path_of

LEASE_LOST = "Invalid or expired lease"
COMPLETED = "completed"
FAILED = "failed"
RETRY = "retry"
DEAD = "dlq"

RENEWAL_SECONDS = 60


class Ack(msgspec.Struct, omit_defaults=True):
    """One acknowledgment of a request; the status defaults to `completed`."""

    transaction_id: str = msgspec.field(name="transactionId")
    partition_id: str = msgspec.field(name="partitionId")
    lease_id: str = msgspec.field(name="leaseId", default="")
    status: str = COMPLETED
    error: str | None = None


class AckResult(msgspec.Struct):
    """The fields of the result of an acknowledgment that a consumer uses."""

    success: bool = False
    error: str | None = None
    dlq: bool = False
    released: bool | None = msgspec.field(name="leaseReleased", default=None)


class _AckBatch(msgspec.Struct):
    acknowledgments: list[Ack]
    consumer_group: str | None = msgspec.field(name="consumerGroup", default=None)


_ack_results = msgspec.json.Decoder(list[AckResult])


class Acker:
    """Acknowledges messages and renews their leases."""

    def __init__(self, http: HttpClient, log: ClientLog, strict: bool) -> None:
        self._http = http
        self._log = log
        self._strict = strict

    async def ack(
        self, given: MessageRef | MessageRefs, status: bool | str, context: Mapping[str, Any] | None
    ) -> AckResponse:
        """Acknowledge one or several messages; see `Queen.ack`."""
        messages = as_list(given)
        several = not isinstance(given, str | Mapping)
        if not messages:
            return {"success": True, "results": []}
        if self._log.enabled:
            self._log.info("Queen.ack", count=len(messages), status=status)
        context = context or {}
        try:
            acks = [_ack(one, status, context) for one in messages]
            if several:
                return await self._ack_many(acks, context.get("group"))
            return await self._ack_one(acks[0], context.get("group"))
        except (QueenError, ValueError) as error:
            if self._strict or (several and isinstance(error, ValueError)):
                raise
            self._log.warning("Queen.ack", f"ack failed: {error}")
            return {"success": False, "error": str(error)}

    async def ack_batch(
        self, acks: list[Ack], group: str | None, affinity_key: str | None = None, attempts: int | None = None
    ) -> list[AckResult]:
        """Acknowledge in one request; the results are in the order of the acknowledgments."""
        body = encode_json(_AckBatch(acks, group))
        response = await self._http.send(
            "POST", "/api/v1/ack/batch", body, affinity_key=affinity_key, attempts=attempts
        )
        return decode_as(_ack_results, response.body)

    async def renew(
        self, given: MessageRef | MessageRefs, seconds: float | None
    ) -> RenewResponse | list[RenewResponse]:
        """Renew the leases of messages; see `Queen.renew`."""
        leases = lease_ids(as_list(given))
        if not leases:
            if self._strict:
                raise ValueError("no lease to renew: neither a lease id nor a message with a leaseId was given")
            self._log.warning("Queen.renew", "No valid lease IDs found for renewal")
            return {"success": False, "error": "No valid lease IDs found for renewal"}
        responses = [await self._renew_one(lease, RENEWAL_SECONDS if seconds is None else seconds) for lease in leases]
        return responses[0] if isinstance(given, str | Mapping) else responses

    async def extend(self, lease: str, seconds: float, affinity_key: str | None = None) -> str:
        """Extend a lease to at least `seconds` from now; returns its expiry. Raises `LeaseLostError`."""
        path = path_of("/api/v1/lease", lease, "extend")
        try:
            response = await self._http.send("POST", path, encode_json({"seconds": seconds}), affinity_key=affinity_key)
        except NotFoundError as error:
            raise LeaseLostError(str(error), error.method, error.url, error.status) from error
        # Other server implementations respond with a list of one.
        renewed = decode_json(response.body)
        renewed = renewed[0] if isinstance(renewed, list) else renewed
        until = renewed.get("newExpiresAt") or renewed.get("lease_expires_at") or renewed.get("expiresAt")
        if not until:
            raise LeaseLostError(renewed.get("error") or "Lease not found", "POST", path)
        return str(until)

    async def _renew_one(self, lease: str, seconds: float) -> RenewResponse:
        try:
            return {"leaseId": lease, "success": True, "newExpiresAt": await self.extend(lease, seconds)}
        except QueenError as error:
            if self._strict:
                raise
            self._log.warning("Queen.renew", f"renewal of lease {lease} failed: {error}")
            return {"leaseId": lease, "success": False, "error": str(error)}

    async def _ack_many(self, acks: list[Ack], group: str | None) -> AckResponse:
        response = await self._http.send("POST", "/api/v1/ack/batch", encode_json(_AckBatch(acks, group)))
        results = decode_json(response.body)
        if isinstance(results, dict) and results.get("error"):
            return self._rejected(results["error"])
        rejected = next((result for result in results if not result.get("success")), None)
        if rejected and self._strict:
            return self._rejected(rejected.get("error"))
        return {"success": True, "results": results}

    async def _ack_one(self, ack: Ack, group: str | None) -> AckResponse:
        body = {**msgspec.to_builtins(ack), "consumerGroup": group}
        response = await self._http.send("POST", "/api/v1/ack", encode_json(body))
        result = decode_json(response.body)
        result = result[0] if isinstance(result, list) and result else result
        if isinstance(result, dict) and result.get("success") is not True:
            return self._rejected(result.get("error"))
        outcome: AckResponse = {"success": True} if result is None else result
        return outcome

    def _rejected(self, error: str | None) -> AckResponse:
        text = error or "ACK failed"
        if self._strict:
            raise LeaseLostError(text) if text == LEASE_LOST else NotFoundError(text)
        return {"success": False, "error": text}


def as_list(given: MessageRef | MessageRefs) -> list[MessageRef]:
    """One or several messages as a list."""
    return [given] if isinstance(given, str | Mapping) else list(given)


def lease_ids(given: Sequence[MessageRef]) -> list[str]:
    """The distinct lease ids of messages; messages popped together share one."""
    found = (one if isinstance(one, str) else one.get("leaseId") for one in given)
    return list(dict.fromkeys(str(lease) for lease in found if lease))


def status_text(status: bool | str) -> str:
    """The status as text: True is `completed`, False is `failed`."""
    if isinstance(status, str):
        return status
    if isinstance(status, Mapping):
        raise TypeError("the context of an ack comes after its status: ack(message, True, {'group': …})")
    return COMPLETED if status else FAILED


def message_key(given: MessageRef) -> tuple[str, str, str]:
    """(transaction id, partition id, lease id or "") of a message; ValueError if one of the ids is missing."""
    message: Mapping[str, Any] = {"transactionId": given} if isinstance(given, str) else given
    transaction_id = message.get("transactionId") or message.get("id")
    if not transaction_id:
        raise ValueError("Message must have transactionId or id property")
    partition_id = message.get("partitionId")
    if not partition_id:
        raise ValueError("Message must have partitionId property to ensure message uniqueness")
    return transaction_id, partition_id, message.get("leaseId") or ""


def _ack(given: MessageRef, status: bool | str, context: Mapping[str, Any]) -> Ack:
    transaction_id, partition_id, lease_id = message_key(given)
    error = context.get("error")
    if isinstance(given, Mapping) and ("_status" in given or "_error" in given):
        status, error = given.get("_status", status), given.get("_error") or error
    return Ack(transaction_id, partition_id, lease_id, status_text(status), error)
