"""From the routes and their descriptions to the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from queen import __version__
from queen.http.openapi.operation import Error, Media, Name, Operation, Uuid
from queen.http.server.router import Access, Route

_REF: Final = "#/components/schemas/{name}"
_JSON: Final = "application/json"
_OTHER_TAG: Final = "Other"

# What stands in a path means the same wherever it stands.
PATH_PARAMETERS: Final[Mapping[str, tuple[Any, str]]] = {
    "queue": (Name, "Name of a queue."),
    "partition": (Name, "Name of a partition."),
    "group": (Name, "Name of a consumer group."),
    "lease": (Uuid, "The `leaseId` that came with the messages."),
    "transaction": (Name, "The `transactionId` of a message."),
    "name": (Name, "Name of a trace."),
}
# Where a message is addressed, its partition is named by id.
_PARTITION_IDS: Final = ("/api/v1/messages/", "/api/v1/traces/")

_DESCRIPTION: Final = """\
Queen is a message queue on PostgreSQL: ordered partitions, consumer groups, leases, dead letters, transactions.

Every failure is answered with `{"error": "what is wrong, where, and what to do"}`. A 503 carries `Retry-After`.
Fields and query parameters that the server does not know are ignored; a query parameter that cannot be read counts
as absent unless its route says otherwise.
"""

_SUCCESSES: Final = {
    101: "The connection speaks WebSocket from here on.",
    200: "Done.",
    201: "Stored.",
    202: "Begun.",
    204: "There is nothing.",
}
_REFUSALS: Final = {
    400: "The request is wrong; nothing was stored.",
    401: "A token is needed, or the one sent is not valid (only when JWT_ENABLED is set).",
    403: "The token does not give this access (only when JWT_ENABLED is set).",
    404: "What the request names does not exist.",
    409: "The request contradicts what is stored, or an encrypted message lacks its key.",
    413: "The body is larger than MAX_BODY_BYTES.",
    426: "This route takes WebSocket connections only.",
    429: "Too many requests, or a quota is used up; try again after `Retry-After`.",
    503: "PostgreSQL cannot be reached or is overloaded; try again after `Retry-After`.",
}


def missing_descriptions(routes: Iterable[Route], operations: Mapping[str, Operation]) -> list[str]:
    """The routes that nobody has described, as `METHOD /pattern`."""
    return [key for route in routes if (key := route_key(route)) not in operations]


def route_key(route: Route) -> str:
    """The name of a route in the table of descriptions."""
    return f"{route.method} {route.pattern}"


def build_document(
    routes: Sequence[Route], operations: Mapping[str, Operation], tags: Mapping[str, str]
) -> dict[str, Any]:
    """The document. A route without a description is in it too, with what its pattern and access tell."""
    described = [(route, operations.get(route_key(route)) or _undescribed(route)) for route in routes]
    schemas = _Schemas(_types(described))
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in described:
        paths.setdefault(route.pattern, {})[route.method.lower()] = _operation(route, operation, schemas)
    used = {operation.tag for _, operation in described}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Queen",
            "version": __version__,
            "summary": "The HTTP API of the Queen message queue.",
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": tag, "description": meaning} for tag, meaning in tags.items() if tag in used],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "JWT",
                    "description": "Needed only when the server runs with JWT_ENABLED=true.",
                }
            },
        },
    }


class _Schemas:
    """The JSON schemas of the types in use; those with a name are components."""

    def __init__(self, types: Sequence[Any]) -> None:
        schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
        self._found = list(zip(types, map(_open, schemas), strict=True))
        self.components = {name: _open(schema) for name, schema in sorted(components.items())}

    def of(self, wanted: Any) -> dict[str, Any]:
        return dict(next(schema for kind, schema in self._found if kind is wanted))


def _open(schema: Any) -> Any:
    """The schema without the ban on other fields, which holds for tests and not for later versions."""
    if isinstance(schema, dict):
        return {
            key: _open(value) for key, value in schema.items() if not (key == "additionalProperties" and value is False)
        }
    return [_open(one) for one in schema] if isinstance(schema, list) else schema


def _types(described: Iterable[tuple[Route, Operation]]) -> list[Any]:
    found: list[Any] = [str, Error, Uuid, *(kind for kind, _ in PATH_PARAMETERS.values())]
    for _, operation in described:
        found += [kind for kind in operation.answers.values() if kind is not None and not isinstance(kind, Media)]
        found += [parameter.type for parameter in operation.parameters]
        if operation.body is not None and not isinstance(operation.body, Media):
            found.append(operation.body)
    # By identity: equal types may differ in what they say of themselves.
    return list({id(kind): kind for kind in found}.values())


def _undescribed(route: Route) -> Operation:
    words = [word.strip("{}") for word in route.pattern.split("/") if word]
    return Operation(
        id="_".join((route.method.lower(), *words)),
        summary=f"{route.method} {route.pattern}",
        answers={200: None},
        tag=_OTHER_TAG,
    )


def _operation(route: Route, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    access = route.access.name.lower().replace("_", "-")
    made: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "description": f"{operation.description}\n\nAccess: {access}.".strip(),
        "tags": [operation.tag],
        "x-access": access,
        "security": [] if route.access is Access.PUBLIC else [{}, {"bearer": []}],
        "parameters": [*_path_parameters(route, schemas), *_query_parameters(operation, schemas)],
        "responses": _responses(route, operation, schemas),
    }
    if operation.body is not None:
        media = operation.body.media_type if isinstance(operation.body, Media) else _JSON
        content = {"schema": {} if isinstance(operation.body, Media) else schemas.of(operation.body)}
        if operation.body_example is not None:
            content["example"] = operation.body_example
        made["requestBody"] = {"required": operation.body_required, "content": {media: content}}
    return made


def _path_parameters(route: Route, schemas: _Schemas) -> Iterator[dict[str, Any]]:
    for name in route.parameters:
        kind, meaning = PATH_PARAMETERS.get(name, (str, f"The {name}."))
        if name == "partition" and route.pattern.startswith(_PARTITION_IDS):
            kind, meaning = Uuid, "The `partitionId` of a message."
        yield {"name": name, "in": "path", "required": True, "description": meaning, "schema": schemas.of(kind)}


def _query_parameters(operation: Operation, schemas: _Schemas) -> Iterator[dict[str, Any]]:
    for parameter in operation.parameters:
        schema = schemas.of(parameter.type)
        if parameter.default is not None:
            schema["default"] = parameter.default
        yield {
            "name": parameter.name,
            "in": "query",
            "required": parameter.required,
            "description": parameter.meaning,
            "schema": schema,
        }


def _responses(route: Route, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    made = {status: _answer(status, kind, operation, schemas) for status, kind in operation.answers.items()}
    made |= {status: _refusal(status, schemas) for status in refusals(route, operation)}
    return {str(status): made[status] for status in sorted(made)}


def _answer(status: int, kind: Any, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": _REFUSALS.get(status) or _SUCCESSES[status]}
    if isinstance(kind, Media):
        answer["content"] = {kind.media_type: {"schema": schemas.of(str)}}
    elif kind is not None:
        content = {"schema": schemas.of(kind)}
        if operation.example is not None and status < 300:
            content["example"] = operation.example
        answer["content"] = {_JSON: content}
    return answer


def _refusal(status: int, schemas: _Schemas) -> dict[str, Any]:
    refusal: dict[str, Any] = {
        "description": _REFUSALS[status],
        "content": {_JSON: {"schema": schemas.of(Error)}},
    }
    if status in (429, 503):
        wait = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
        refusal["headers"] = {"Retry-After": wait}
    return refusal


def refusals(route: Route, operation: Operation) -> list[int]:
    """The statuses of errors that a route can answer with."""
    statuses = {400, *operation.errors}
    if route.access is not Access.PUBLIC:
        statuses |= {401, 403, 429}
    if operation.body is not None:
        statuses.add(413)
    return sorted(statuses - operation.answers.keys())
