"""What web pages may do, and by which names a server may be called."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.http.test_dashboard_files import STATIC
from tests.support.api import Api

PUSH = b'{"items":[{"queue":"q","payload":1}]}'


async def send(
    api: Api, method: str, path: str, body: bytes = b"", **headers: str | None
) -> tuple[int, dict[str, str], bytes]:
    """One request with just these headers (`_` stands for `-`); `Host` is right unless it is given."""
    place = urlsplit(api.url)
    lines = {"Host": place.netloc, "Content-Length": str(len(body)), "Connection": "close"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    top, _, rest = answer.partition(b"\r\n\r\n")
    first, *fields = top.decode().split("\r\n")
    return int(first.split()[1]), {k.lower(): v for k, _, v in (field.partition(": ") for field in fields)}, rest


async def test_security_headers_are_on_every_answer(start_server: StartServer) -> None:
    api = await start_server(jwt_enabled=True, jwt_secret=SECRET, max_body_bytes=10_000)
    script = next(STATIC.glob("assets/*.js")).relative_to(STATIC).as_posix()
    token = f"Bearer {issue()}"
    asked: list[tuple[int, str, str, dict[str, str | None]]] = [
        (200, "GET", "/health", {}),
        (200, "GET", "/", {"Accept": "text/html"}),
        (200, "GET", f"/{script}", {}),
        (200, "GET", "/docs", {}),
        (200, "GET", "/openapi.json", {}),
        (200, "GET", "/metrics/prometheus", {}),
        (200, "GET", "/api/v1/status", {"Authorization": token}),
        (204, "GET", "/api/v1/pop/queue/q", {"Authorization": token}),
        (204, "OPTIONS", "/api/v1/push", {}),
        (400, "POST", "/api/v1/push", {"Authorization": token}),
        (401, "GET", "/api/v1/status", {}),
        (403, "DELETE", "/api/v1/resources/queues/q", {"Authorization": f"Bearer {issue('read-only')}"}),
        (404, "GET", "/api/v1/nothing", {"Authorization": token}),
        (405, "PATCH", "/api/v1/push", {"Authorization": token}),
        (413, "POST", "/api/v1/push", {"Content_Length": "99999"}),
        (400, "GET", "/health", {"Host": None}),
        (421, "GET", "/health", {"Host": "evil.example"}),
    ]
    for expected, method, path, headers in asked:
        status, fields, _ = await send(api, method, path, b"", **headers)
        assert status == expected, (method, path)
        assert fields["x-content-type-options"] == "nosniff", path
        assert fields["x-frame-options"] == "DENY", path
        assert fields["referrer-policy"] == "no-referrer", path
        assert "frame-ancestors 'none'" in fields["content-security-policy"], path
        assert "strict-transport-security" not in fields, "there is no TLS"


async def test_a_page_of_another_origin_takes_no_message_with_a_session(start_server: StartServer) -> None:
    api = await start_server(jwt_enabled=True, jwt_secret=SECRET, cors_origins="https://app.example")
    token = f"Bearer {issue()}"
    for origin, status in (("https://evil.example", 403), ("https://app.example", 204)):
        answered, _, _ = await send(api, "GET", "/api/v1/pop/queue/q", Origin=origin, Authorization=token)
        assert answered == status, origin
        path = "/api/v1/ephemeral/pop?queue=q"
        answered, _, _ = await send(api, "GET", path, Origin=origin, Authorization=token)
        assert answered == (403 if status == 403 else 200), origin
        assert (await send(api, "GET", "/api/v1/status", Origin=origin, Authorization=token))[0] == 200


async def test_without_authentication_any_page_may_read(api: Api) -> None:
    _, fields, _ = await send(api, "GET", "/health", Origin="https://elsewhere.example")
    assert fields["access-control-allow-origin"] == "*"


async def test_with_authentication_pages_need_to_be_listed(start_server: StartServer) -> None:
    api = await start_server(jwt_enabled=True, jwt_secret=SECRET, cors_origins="https://app.example")
    token = f"Bearer {issue()}"
    _, fields, _ = await send(api, "GET", "/health", Origin="https://app.example")
    assert fields["access-control-allow-origin"] == "https://app.example"
    assert fields["vary"] == "Origin"
    status, fields, _ = await send(api, "OPTIONS", "/api/v1/push", Origin="https://evil.example")
    assert "access-control-allow-origin" not in fields
    status, fields, _ = await send(
        api, "POST", "/api/v1/push", PUSH, Origin="https://evil.example", Authorization=token
    )
    assert status == 403
    status, _, _ = await send(api, "POST", "/api/v1/push", PUSH, Origin="https://app.example", Authorization=token)
    assert status == 201
    status, _, _ = await send(api, "POST", "/api/v1/push", PUSH, Authorization=token)
    assert status == 201
    assert (await send(api, "GET", "/health"))[1].get("access-control-allow-origin") is None


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 201),
        ("application/json; charset=utf-8", 201),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        (None, 415),
    ],
)
async def test_a_page_has_to_send_json(api: Api, kind: str | None, status: int) -> None:
    """Other types need no preflight: any page could send them with a form."""
    answered, _, _ = await send(
        api, "POST", "/api/v1/push", PUSH, Origin="https://elsewhere.example", Content_Type=kind
    )
    assert answered == status
    # Who is no browser may send whatever it likes, as it always could.
    assert (await send(api, "POST", "/api/v1/push", PUSH, Content_Type=kind))[0] == 201


async def test_a_picture_of_another_site_takes_no_message(api: Api) -> None:
    await api.push("q", 1)
    status, _, _ = await send(
        api, "GET", "/api/v1/pop/queue/q?autoAck=true", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors"
    )
    assert status == 403
    assert len(await api.pop("q")) == 1


async def test_a_form_of_another_site_calls_no_action_of_sqs(start_server: StartServer) -> None:
    api = await start_server(queen_sqs=True)
    created = b"Action=CreateQueue&QueueName=made"
    page: dict[str, Any] = {"Origin": "https://elsewhere.example", "Content_Type": "application/x-www-form-urlencoded"}
    picture: dict[str, Any] = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}
    for path in ("/sqs", "/"):
        assert (await send(api, "POST", path, created, **page))[0] == 415, path
    target = "/sqs?Action=CreateQueue&QueueName=made"
    assert (await send(api, "GET", target, **picture))[0] == 403
    assert (await send(api, "HEAD", target))[0] == 405
    assert (await api.call("GET", "/api/v1/resources/queues/made")).status == 404
    # Programs, and pages that sign what they send, go on as before.
    kind = "application/x-www-form-urlencoded"
    assert (await send(api, "POST", "/sqs", created, **page | {"Authorization": "AWS4-HMAC-SHA256 x"}))[0] == 200
    assert (await send(api, "POST", "/sqs", created, Content_Type=kind))[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1234", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1", 200),
        ("[::1]:6632", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("evil.example:6632", 421),
        ("localhost, evil.example", 400),
        (None, 400),
    ],
)
async def test_a_local_server_is_called_by_its_own_names_alone(api: Api, host: str | None, status: int) -> None:
    """Else a page whose name leads to 127.0.0.1 would be of the same origin as the server."""
    assert (await send(api, "GET", "/livez", Host=host))[0] == status


async def test_other_names_can_be_allowed(start_server: StartServer) -> None:
    api = await start_server(allowed_hosts="queen.example,[::1]")
    assert (await send(api, "GET", "/livez", Host="Queen.example:443"))[0] == 200
    assert (await send(api, "GET", "/livez", Host="localhost"))[0] == 421
    # A target may name the host as well, and then counts.
    place = urlsplit(api.url)
    for target, status in (("http://queen.example:1/livez", b"200"), ("http://evil.example?x=/", b"421")):
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(f"GET {target} HTTP/1.1\r\nHost: queen.example\r\n\r\n".encode())
        assert (await asyncio.wait_for(reader.readline(), 100)).split()[1] == status, target
        writer.close()
    everywhere = await start_server(worker_id=1, allowed_hosts="*")
    assert (await send(everywhere, "GET", "/livez", Host="whatever"))[0] == 200


async def test_two_host_headers_are_refused(api: Api) -> None:
    place = urlsplit(api.url)
    for head in (
        f"GET /livez HTTP/1.1\r\nHost: {place.netloc}\r\nHost: {place.netloc}\r\n\r\n",
        "GET /livez HTTP/2.0\r\nHost: localhost\r\n\r\n",
        f"POST /api/v1/push HTTP/1.1\r\nHost: localhost\r\nContent-Length: {'0' * 5000}\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(head.encode())
        status = int((await reader.readline()).split()[1])
        assert status in (400, 413, 505), head
        writer.close()
