"""Who may do what: requests signed by botocore with keys of QUEEN_SQS_KEYS."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import asyncpg
import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from queen.errors import SettingsError
from queen.http.server.message import Request
from queen.http.sqs.errors import SqsError
from queen.http.sqs.signature import AccessKey, SignatureVerifier, region_of
from queen.settings import Settings
from tests.conftest import StartServer
from tests.http.sqs.conftest import Client, receive, sqs_client
from tests.http.sqs.test_standard_queues import code_of

_KEY = AccessKey("AKIATEST", "se/cr+et", "read-write", ("mail-*",))


def signed(auth: type = SigV4Auth, *, region: str = "us-west-2", body: bytes = b"{}", **credentials: str) -> Request:
    """A request as the server sees it, signed by botocore."""
    request = AWSRequest("POST", "http://queen:6632/sqs/a%20b/?z=1&a=%C3%A4", {"X-Amz-Target": "x"}, body)
    keys = {"access_key": _KEY.id, "secret_key": _KEY.secret} | credentials
    auth(Credentials(**keys), "sqs", region).add_auth(request)
    prepared = request.prepare()
    headers = {name.lower().encode(): str(value).encode() for name, value in prepared.headers.items()}
    for name, value in list(headers.items()):
        headers[name] = value.decode().removeprefix("b'").removesuffix("'").encode()
    headers[b"host"] = b"queen:6632"
    query = {"z": "1", "a": "ä"}
    if auth is SigV4QueryAuth:
        query = dict(parse_qsl(urlsplit(prepared.url).query))
    return Request("POST", "/sqs/a%20b/", {}, query, headers, body)


@pytest.mark.parametrize("auth", [SigV4Auth, SigV4QueryAuth])
def test_a_signature_of_botocore_is_verified(auth: type) -> None:
    verifier = SignatureVerifier([_KEY])
    # A presigned request has its parameters in the query, and no body.
    request = signed(auth, body=b"" if auth is SigV4QueryAuth else b"{}")
    principal = verifier.verify(request)
    assert principal.subject == "AKIATEST"
    assert region_of(request) == "us-west-2"
    request.body = b"{ }"
    with pytest.raises(SqsError, match="does not match"):
        verifier.verify(request)


def test_what_is_not_signed_with_a_known_key_now_is_refused() -> None:
    verifier = SignatureVerifier([_KEY])
    refused: list[tuple[SignatureVerifier, Request, str]] = [
        (verifier, signed(secret_key="wrong"), "SignatureDoesNotMatch"),
        (verifier, signed(access_key="AKIAOTHER"), "InvalidClientTokenId"),
        (verifier, Request("POST", "/sqs", {}, {}, {}, b""), "MissingAuthenticationToken"),
        (
            verifier,
            Request("POST", "/sqs", {}, {}, {b"authorization": b"AWS4-HMAC-SHA256 Credential=x"}, b""),
            "IncompleteSignature",
        ),
        (SignatureVerifier([_KEY], lambda: time.time() + 1000), signed(), "SignatureDoesNotMatch"),
        (SignatureVerifier([_KEY], lambda: time.time() - 1000), signed(), "SignatureDoesNotMatch"),
    ]
    names = []
    for own, request, _ in refused:
        with pytest.raises(SqsError) as caught:
            own.verify(request)
        names.append(caught.value.name)
    assert names == [name for *_, name in refused]


async def test_keys_have_the_rights_of_their_roles_and_queues(
    start_server: StartServer, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    keys = (
        ("ADMIN", "a", "admin", ()),
        ("MAIL", "m", "read-write", ("mail-*",)),
        ("READER", "r", "read-only", ()),
    )
    api = await start_server(queen_sqs=True, queen_sqs_keys=keys, jwt_enabled=True, jwt_secret="s" * 32)
    await asyncio.to_thread(_use_keys, *(sqs_client(api.url, id, secret) for id, secret, *_ in keys))
    wrong = sqs_client(api.url, "MAIL", "wrong")
    assert await asyncio.to_thread(code_of, wrong.list_queues) == "SignatureDoesNotMatch"
    assert api.worker is not None
    assert api.worker.guard.refused == {"role": 6, "signature": 1}
    rows = await connection.fetch("SELECT actor, action FROM queen.audit")
    assert ("ADMIN", "SQS CreateQueue") in [tuple(row) for row in rows]


def _use_keys(admin: Client, mail: Client, reader: Client) -> None:
    assert code_of(lambda: mail.create_queue(QueueName="mail-in")) == "AccessDenied"
    url = admin.create_queue(QueueName="mail-in")["QueueUrl"]
    other = admin.create_queue(QueueName="orders")["QueueUrl"]
    # A queue that exists may be "created" by everyone who may use it, as clients do when they start.
    assert mail.create_queue(QueueName="mail-in")["QueueUrl"] == url
    mail.send_message(QueueUrl=url, MessageBody="x")
    (message,) = receive(mail, url)
    assert message["Attributes"]["SenderId"] == "MAIL"
    calls: list[Any] = [
        lambda: mail.send_message(QueueUrl=other, MessageBody="x"),
        lambda: mail.get_queue_url(QueueName="orders"),
        lambda: mail.delete_queue(QueueUrl=url),
        lambda: reader.send_message(QueueUrl=url, MessageBody="x"),
        lambda: reader.receive_message(QueueUrl=url),
        lambda: reader.purge_queue(QueueUrl=url),
    ]
    assert [code_of(call) for call in calls] == ["AccessDenied"] * len(calls)
    assert mail.list_queues()["QueueUrls"] == [url]
    assert len(reader.list_queues()["QueueUrls"]) == 2


async def test_a_server_that_asks_who_clients_are_needs_keys_for_them(start_server: StartServer) -> None:
    with pytest.raises(SettingsError, match="QUEEN_SQS_KEYS"):
        await start_server(queen_sqs=True, jwt_enabled=True, jwt_secret="s" * 32)


def test_keys_are_read_as_they_are_written() -> None:
    text = "A:x/+=:admin,B:y:read-write:mail-*;orders"
    settings = Settings.from_env({"QUEEN_SQS_KEYS": text})
    assert settings.queen_sqs_keys == (("A", "x/+=", "admin", ()), ("B", "y", "read-write", ("mail-*", "orders")))
    assert settings.to_env()["QUEEN_SQS_KEYS"] == text
    for wrong in ("A", "A:x", "A:x:boss", "A:x:admin,A:y:admin", "A:x:admin:", "A:x:admin:q:r"):
        with pytest.raises(SettingsError):
            Settings.from_env({"QUEEN_SQS_KEYS": wrong})
