"""The two protocols of SQS: JSON (X-Amz-Target) and the older query protocol (Action=, answered in XML).

Actions see the parameters of both as the JSON protocol has them, and answer with dictionaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

import msgspec

from queen.http.server.message import Request, Response
from queen.http.sqs.errors import SqsError

PREFIX: Final = "AmazonSQS."
_JSON: Final = b"application/x-amz-json-1.0"
_XML: Final = b"text/xml"
_NAMESPACE: Final = "http://queue.amazonaws.com/doc/2012-11-05/"
_MOST_FIELDS: Final = 2000

# What the query protocol calls the members of lists, and of maps with the names of their keys and values.
_LISTS: Final = {
    "ActionName": "Actions",
    "AttributeName": "AttributeNames",
    "AWSAccountId": "AWSAccountIds",
    "ChangeMessageVisibilityBatchRequestEntry": "Entries",
    "DeleteMessageBatchRequestEntry": "Entries",
    "MessageAttributeName": "MessageAttributeNames",
    "MessageSystemAttributeName": "MessageSystemAttributeNames",
    "SendMessageBatchRequestEntry": "Entries",
    "TagKey": "TagKeys",
}
_MAPS: Final = {
    "Attribute": ("Attributes", "Name", "Value"),
    "MessageAttribute": ("MessageAttributes", "Name", "Value"),
    "MessageSystemAttribute": ("MessageSystemAttributes", "Name", "Value"),
    "Tag": ("Tags", "Key", "Value"),
}
_LIST_ELEMENTS: Final = {
    "QueueUrls": "QueueUrl",
    "queueUrls": "QueueUrl",
    "Messages": "Message",
    "Failed": "BatchResultErrorEntry",
    "Results": "Result",
}
_MAP_ELEMENTS: Final = {name: (element, key, value) for element, (name, key, value) in _MAPS.items()}
# All others have a result in XML, though it may be empty: parsers of older SDKs look for it.
_WITHOUT_RESULT: Final = frozenset(
    {
        "AddPermission",
        "ChangeMessageVisibility",
        "DeleteMessage",
        "DeleteQueue",
        "PurgeQueue",
        "RemovePermission",
        "SetQueueAttributes",
        "TagQueue",
        "UntagQueue",
    }
)
_encode: Final = msgspec.json.Encoder().encode
_decoder: Final = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Action:
    """The action of a request, its parameters, and the protocol."""

    name: str
    params: dict[str, Any]
    is_json: bool


def is_json(request: Request) -> bool:
    """Whether a request is of the JSON protocol."""
    return b"x-amz-target" in request.headers


def is_sqs(request: Request) -> bool:
    """Whether a request at a path that is not SQS' own may be meant for it."""
    if is_json(request):
        return True
    return request.headers.get(b"content-type", b"").startswith(b"application/x-www-form-urlencoded")


def read_action(request: Request) -> Action:
    """Raises `SqsError` for what is of neither protocol."""
    target = request.headers.get(b"x-amz-target")
    if target is None:
        return _read_query(request)
    name = target.decode("latin-1")
    if not name.startswith(PREFIX):
        raise SqsError("UnknownOperationException", f"The target {name[:80]!r} is not one of {PREFIX}*")
    try:
        params = _decoder.decode(request.body) if request.body.strip() else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SqsError("SerializationException", f"The request is no JSON object: {error}") from None
    return Action(name.removeprefix(PREFIX), params, True)


def _read_query(request: Request) -> Action:
    fields = dict(request.query)
    if request.method == "POST":
        try:
            pairs = parse_qsl(
                request.body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS
            )
        except ValueError as error:
            raise SqsError("MalformedInput", f"The body is not a form: {error}") from None
        fields |= dict(pairs)
    name = fields.pop("Action", "")
    if not name:
        raise SqsError("MissingAction", "The request must contain the parameter Action, or the header X-Amz-Target.")
    return Action(name, _params(fields), False)


def _params(fields: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in fields.items():
        *above, last = path.split(".")
        node = tree
        for step in above:
            below = node.setdefault(step, {})
            if not isinstance(below, dict):
                raise SqsError("MalformedInput", f"The parameter {path[:80]} stands below a value")
            node = below
        node[last] = value
    return _members(tree)


def _members(tree: Mapping[str, Any]) -> dict[str, Any]:
    """From the names of the query protocol to those of JSON."""
    params: dict[str, Any] = {}
    for name, value in tree.items():
        if name in _LISTS and isinstance(value, dict):
            params[_LISTS[name]] = [_members(one) if isinstance(one, dict) else one for one in _numbered(value)]
        elif name in _MAPS and isinstance(value, dict):
            target, key, content = _MAPS[name]
            entries = [one for one in _numbered(value) if isinstance(one, dict)]
            params[target] = {str(one.get(key, "")): one.get(content, "") for one in entries}
        else:
            params[name] = value
    return params


def _numbered(members: Mapping[str, Any]) -> list[Any]:
    return [members[number] for number in sorted(members, key=lambda text: int(text) if text.isdecimal() else 0)]


def answer(action: Action, result: Mapping[str, Any], request_id: str) -> Response:
    """The response to an action that succeeded."""
    headers = ((b"x-amzn-RequestId", request_id.encode()),)
    if action.is_json:
        return Response(200, _encode(result), _JSON, headers)
    result_element = ""
    if action.name not in _WITHOUT_RESULT:
        result_element = f"<{action.name}Result>{''.join(_elements(action.name, result))}</{action.name}Result>"
    body = (
        f'<?xml version="1.0"?><{action.name}Response xmlns="{_NAMESPACE}">{result_element}'
        f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata></{action.name}Response>"
    )
    return Response(200, body.encode(), _XML, headers)


def refusal(error: SqsError, request_id: str, *, as_json: bool) -> Response:
    """The response to an action that failed, with the code that older SDKs know."""
    fault = "Receiver" if error.is_server_fault else "Sender"
    if as_json:
        headers = (
            (b"x-amzn-RequestId", request_id.encode()),
            (b"x-amzn-query-error", f"{error.code};{fault}".encode()),
        )
        body = _encode({"__type": f"com.amazonaws.sqs#{error.name}", "message": error.message})
        return Response(error.status, body, _JSON, headers)
    text = (
        f'<?xml version="1.0"?><ErrorResponse xmlns="{_NAMESPACE}"><Error><Type>{fault}</Type>'
        f"<Code>{escape(error.code)}</Code><Message>{_text(error.message)}</Message><Detail/></Error>"
        f"<RequestId>{request_id}</RequestId></ErrorResponse>"
    )
    return Response(error.status, text.encode(), _XML, ((b"x-amzn-RequestId", request_id.encode()),))


def _elements(action: str, members: Mapping[str, Any]) -> Iterator[str]:
    for name, value in members.items():
        if name in _MAP_ELEMENTS:
            element, key, content = _MAP_ELEMENTS[name]
            for one, held in value.items():
                yield f"<{element}><{key}>{_text(one)}</{key}>{_element(action, content, held)}</{element}>"
        elif isinstance(value, list):
            element = f"{action}ResultEntry" if name == "Successful" else _LIST_ELEMENTS.get(name, name)
            for one in value:
                yield _element(action, element, one)
        else:
            yield _element(action, name, value)


def _element(action: str, name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"<{name}>{''.join(_elements(action, value))}</{name}>"
    if isinstance(value, bool):
        value = "true" if value else "false"
    return f"<{name}>{_text(str(value))}</{name}>"


def _text(text: str) -> str:
    # A parser would make a line feed of a carriage return that is not escaped.
    return escape(text, {"\r": "&#13;"})
