"""The Celery result backend `queen://`: results, groups and the counters of chords are keys with an expiry."""

from __future__ import annotations

import base64
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec
from celery import states
from celery.backends.base import KeyValueStoreBackend
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import GroupResult, ResultSet
from kombu.log import get_logger
from kombu.utils.encoding import bytes_to_str
from kombu.utils.functional import retry_over_time
from kombu.utils.url import maybe_sanitize_url

from queen.celery.link import Address, Link
from queen.chunks import chunks
from queen.client.errors import TRANSIENT, text_of_error

_KV = "/api/v1/kv"
_KEYS_AT_ONCE = 200
_LARGEST_VALUE = 1 << 20
"""Bytes of JSON that a key takes."""
_LONGEST_ESCAPE = 6
_LONGEST_TEXT = 20_000
# Waiting begins with short pauses, because most results come soon.
_FIRST_PAUSE_SECONDS = 0.002

logger = get_logger("queen.celery")

T = TypeVar("T")

_results = msgspec.json.Decoder(dict[str, Any])


class QueenBackend(KeyValueStoreBackend):
    """`queen://[:token@]host[:port][/namespace]`, or `queens://` with TLS."""

    key_t = staticmethod(bytes_to_str)
    supports_native_join = True
    implements_incr = True
    persistent = True
    # Workers wait out an outage as long as leases last: so do results.
    retry_policy: ClassVar[dict[str, Any]] = {
        "timeout": 30.0,
        "interval_start": 0.0,
        "interval_step": 0.1,
        "interval_max": 0.5,
    }

    def __init__(self, app: Any = None, url: str | None = None, expires: Any = None, **options: Any) -> None:
        # Celery hands over what stands in `result_backend`; the scheme decides about TLS.
        self._address = Address.of_url(url or "queen://")
        self._link = Link(self._address)
        self._parents = threading.local()
        super().__init__(app, url=url, expires=expires, **options)

    def as_uri(self, include_password: bool = False) -> str:
        """The URL, by default without the token."""
        uri: str = self.url or "queen://"
        return uri if include_password else str(maybe_sanitize_url(uri))

    def exception_safe_to_retry(self, exc: BaseException) -> bool:
        """With `result_backend_always_retry`, requests that an unavailable server did not answer are retried."""
        return isinstance(exc, TRANSIENT)

    def get(self, key: str) -> Any:
        found = self._one({"op": "get", "key": key})
        return _restored(found["value"]) if found["found"] else None

    def mget(self, keys: Sequence[str]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for wanted in chunks(keys, _KEYS_AT_ONCE):
            while wanted:
                found = self._one({"op": "getMany", "keys": wanted})
                values.update((row["key"], _restored(row["value"])) for row in found["rows"])
                # An answer has a limit of bytes; what it left out is asked for again.
                answered = {*values, *found["missing"]}
                left = [key for key in wanted if key not in answered]
                if len(left) == len(wanted):
                    break
                wanted = left
        return values

    def set(self, key: str, value: str | bytes) -> None:
        self._until_available(self._one, {"op": "put", "key": key, "value": _stored(value), **self._expiry()})

    def delete(self, key: str) -> None:
        self._until_available(self._one, {"op": "delete", "key": key})

    def incr(self, key: str) -> int:
        # Not retried: it may have been counted.
        return int(self._one({"op": "incr", "key": key, "delta": 1, **self._expiry()})["value"])

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """How many tasks a chord waits for: more than its header has entries, if they are groups themselves."""
        self.set(self.get_key_for_group(group_id, ".size"), str(chord_size))

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        """A task of the header adds another, whose result goes to the body as well."""
        self._until_available(self._add_to_chord, self.get_key_for_group(chord_id, ".added"), result.id)

    def _add_to_chord(self, key: str, task_id: str) -> None:
        while True:
            found = self._one({"op": "get", "key": key})
            ids: list[str] = found["value"] if found["found"] else []
            put = {"op": "put", "key": key, "value": [*ids, task_id], **self._expiry()}
            if task_id in ids or self._one({**put, "expect": found["version"] if found["found"] else 0})["applied"]:
                return

    def mark_as_done(
        self,
        task_id: str,
        result: Any,
        request: Any = None,
        store_result: bool = True,
        state: str = states.SUCCESS,
    ) -> None:
        """Store what a task has returned; that of a chord's task is stored and counted in one request."""
        in_chord = request is not None and request.chord and request.group
        if not in_chord or not store_result or request.ignore_result or state != states.SUCCESS or self.always_retry:
            super().mark_as_done(task_id, result, request=request, store_result=store_result, state=state)
            return
        put = self._put_of_meta(task_id, self.encode_result(result, state), state, None, request)
        self._count_part(put, request=request, state=state, result=result)

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        """Count a task of a chord, once however often it runs; the last one calls the body."""
        if request.group and request.chord:
            self._count_part(request=request, state=state, result=result, **kwargs)

    def _count_part(self, *stored: dict[str, Any], request: Any, state: str, result: Any, **kwargs: Any) -> None:
        """Count a task of a chord, and store what is given together with it."""
        group = request.group
        parts = (f".part-{request.id}", ".done", ".size", ".added")
        part, done, size, added = (str(self.get_key_for_group(group, name)) for name in parts)
        sizes = {"op": "getMany", "keys": [size, added]}
        counted = self._until_available(
            self._run,
            *stored,
            {"op": "putIfAbsent", "key": part, "value": True, "required": True, **self._expiry()},
            {"op": "incr", "key": done, "delta": 1, **self._expiry()},
            sizes,
        )
        if not counted["success"]:
            # It ran before. Should its process have died after counting it and before calling the body, this one does.
            counted = self._until_available(self._run, *stored, sizes, {"op": "get", "key": done}, sizes)
        _, parts_done, found = counted["results"][len(stored) :]
        known = {row["key"]: row["value"] for row in found["rows"]}
        more: list[str] = known.get(added, [])
        # The size is stored before the last task of the header is published: that one sees it.
        if size not in known or int(parts_done.get("value") or 0) != int(known[size]) + len(more):
            return
        header = GroupResult.restore(group, backend=self) if more else None
        if header is not None:
            for task_id in more:
                header.add(self.app.AsyncResult(task_id))
            header.save(backend=self)
        # What is left is Celery's own: with one part, which is the last.
        self.delete(self.get_key_for_chord(group))
        request.chord["chord_size"] = 1
        super().on_chord_part_return(request, state, result, **kwargs)
        self._until_available(self._run, *({"op": "delete", "key": key} for key in (done, size, added)))

    def wait_for_pending(
        self, result: Any, timeout: float | None = None, on_interval: Any = None, **options: Any
    ) -> Any:
        """Wait for a task; what Celery does between two looks at it is to ask whether one before it has failed."""
        check = on_interval and partial(self._check_parents, result, on_interval)
        return super().wait_for_pending(result, timeout=timeout, on_interval=check, **options)

    def _check_parents(self, result: Any, check: Callable[[], Any]) -> None:
        """Read the metas of all that a result comes after in a few requests: the header of a chord can be large."""
        left = _unready_parents(result)
        keys = {str(self.get_key_for_task(task_id)): task_id for task_id in left}
        values = self._until_available(self.mget, list(keys))
        self._parents.metas = {
            task_id: self.decode_result(values[key]) if key in values else {"status": states.PENDING, "result": None}
            for key, task_id in keys.items()
        }
        try:
            check()
        finally:
            self._parents.metas = {}

    def _get_task_meta_for(self, task_id: str) -> Any:
        meta = getattr(self._parents, "metas", {}).get(task_id)
        return super()._get_task_meta_for(task_id) if meta is None else meta

    def wait_for(
        self,
        task_id: str,
        timeout: float | None = None,
        interval: float | None = 0.5,
        no_ack: bool = True,
        on_interval: Any = None,
    ) -> Any:
        """The meta of a task once it is ready; raises Celery's `TimeoutError`."""
        self._ensure_not_eager()
        for left in _pauses(timeout, interval):
            meta = self._until_available(self.get_task_meta, task_id, seconds=left)
            if meta["status"] in states.READY_STATES:
                return meta
            if on_interval:
                on_interval()
        raise CeleryTimeoutError("The operation timed out.")

    def iter_native(self, result: Any, timeout: float | None = None, **options: Any) -> Iterator[Any]:
        """The metas of a group's tasks; if what was to start them has failed, raises its error."""
        on_interval = options.pop("on_interval", None)

        def throw() -> None:
            parent = getattr(result, "parent", None)
            while parent is not None:
                parent.maybe_throw()
                parent = parent.parent

        def check_parents() -> None:
            if on_interval:
                on_interval()
            self._check_parents(result, throw)

        yield from super().iter_native(result, timeout=timeout, on_interval=check_parents, **options)

    def get_many(
        self,
        task_ids: Any,
        timeout: float | None = None,
        interval: float | None = 0.5,
        no_ack: bool = True,
        on_message: Any = None,
        on_interval: Any = None,
        max_iterations: int | None = None,
        READY_STATES: Any = states.READY_STATES,  # noqa: N803 (Celery's name)
    ) -> Iterator[tuple[str, Any]]:
        """The metas of tasks, as they become ready."""
        left = {str(bytes_to_str(task_id)) for task_id in task_ids}
        for iteration, seconds in enumerate(_pauses(timeout, interval), start=1):
            keys = {str(self.get_key_for_task(task_id)): task_id for task_id in left}
            values = self._until_available(self.mget, list(keys), seconds=seconds)
            for task_id, meta in self._mget_to_results(values, list(keys), READY_STATES).items():
                left.discard(task_id)
                self._cache[task_id] = meta
                if on_message is not None:
                    on_message(meta)
                yield task_id, meta
            if not left or (max_iterations and iteration >= max_iterations):
                return
            if on_interval:
                on_interval()
        raise CeleryTimeoutError(f"Operation timed out ({timeout})")

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        """Store a state, unless the task has succeeded: what a slower process says of an earlier attempt is dropped."""
        put = self._put_of_meta(task_id, result, state, traceback, request)
        self._until_available(self._one if state == states.SUCCESS else self._put_unless_succeeded, put)
        return result

    def _put_unless_succeeded(self, put: dict[str, Any]) -> None:
        while True:
            found = self._one({"op": "get", "key": put["key"]})
            if found["found"] and self.decode_result(_restored(found["value"]))["status"] == states.SUCCESS:
                return
            if self._one({**put, "expect": found["version"] if found["found"] else 0})["applied"]:
                return

    def _put_of_meta(self, task_id: str, result: Any, state: str, traceback: Any, request: Any) -> dict[str, Any]:
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        meta["task_id"] = bytes_to_str(task_id)
        encoded = self.encode(meta)
        if not _fits(encoded):
            encoded = self.encode(_shortened(meta))
            if not _fits(encoded):
                size = len(msgspec.json.encode(_stored(encoded)))
                raise ValueError(f"the result of a task may have {_LARGEST_VALUE} bytes with its meta data, not {size}")
        return {"op": "put", "key": self.get_key_for_task(task_id), "value": _stored(encoded), **self._expiry()}

    def __reduce__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "expires": self.expires, "url": self.url})

    def _expiry(self) -> dict[str, Any]:
        return {"ttlSeconds": max(1, math.ceil(self.expires))} if self.expires else {"forever": True}

    def _until_available(self, call: Callable[..., T], *arguments: Any, seconds: float = math.inf) -> T:
        """Call what may be done twice, until a server answers, or the time of the policy or `seconds` are over."""
        policy = self.retry_policy | self.app.conf.result_backend_transport_options.get("retry_policy", {})
        longest = min(seconds, policy.pop("timeout", None) or math.inf)
        if longest <= 0:
            return call(*arguments)

        def report(error: Exception, pauses: Iterator[float], retries: int) -> float:
            if not retries:
                logger.warning("%s failed, retrying: %s", self._address.url, error)
            return next(pauses)

        result: T = retry_over_time(
            call, TRANSIENT, arguments, errback=report, timeout=None if longest == math.inf else longest, **policy
        )
        return result

    def _one(self, operation: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = self._run(operation)["results"][0]
        return result

    def _run(self, *operations: dict[str, Any]) -> dict[str, Any]:
        """Operations that happen together, or not at all."""
        placed = [{**operation, "ns": self._address.namespace} for operation in operations]
        return _results.decode(self._link.post(_KV, {"operations": placed}))


def _unready_parents(result: Any) -> set[str]:
    """The ids of the tasks before a result whose end is not known here yet."""
    left: set[str] = set()
    parent = getattr(result, "parent", None)
    while parent is not None:
        nodes = [parent]
        while nodes:
            node = nodes.pop()
            if isinstance(node, ResultSet):
                nodes += node.results
            elif node._cache is None:
                left.add(node.id)
        parent = getattr(parent, "parent", None)
    return left


def _pauses(timeout: float | None, interval: float | None) -> Iterator[float]:
    """Come back with the seconds left, after longer and longer pauses, at most `interval`, until the time is up."""
    longest = 0.5 if interval is None else interval
    deadline = None if timeout is None else time.monotonic() + timeout
    left = math.inf if timeout is None else timeout
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield left
        left = math.inf if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, longest, left))
        pause *= 1.5


def _fits(value: str | bytes) -> bool:
    """Whether a value is small enough for a key; most are far from the limit, and need not be encoded to know."""
    return len(value) * _LONGEST_ESCAPE <= _LARGEST_VALUE or len(msgspec.json.encode(_stored(value))) <= _LARGEST_VALUE


def _shortened(meta: dict[str, Any]) -> dict[str, Any]:
    """A meta without what can be spared: an error that cannot be stored would end the worker."""
    spared: dict[str, Any] = {name: None for name in ("args", "kwargs") if name in meta}
    if meta["status"] in states.EXCEPTION_STATES:
        spared["result"] = _shortened_error(meta["result"])
        spared["traceback"] = (meta["traceback"] or "")[-_LONGEST_TEXT:]
    return meta | spared


def _shortened_error(error: Any) -> Any:
    if not isinstance(error, dict):
        return RuntimeError(text_of_error(error))
    arguments = error["exc_message"]
    if not isinstance(arguments, list | tuple):
        arguments = (arguments,)
    # As many as before: the class of the error is called with them.
    longest = _LONGEST_TEXT // max(1, len(arguments))
    return error | {"exc_message": [(one if isinstance(one, str) else repr(one))[:longest] for one in arguments]}


def _stored(value: str | bytes) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _restored(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value
