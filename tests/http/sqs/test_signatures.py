"""Who may do what: requests signed by botocore with keys of QUEEN_SQS_KEYS."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import aiohttp
import asyncpg
import msgspec
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
from tests.http.auth.issuer import SECRET, issue
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
    if issubclass(auth, SigV4QueryAuth):
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


class _ForAMinute(SigV4QueryAuth):  # type: ignore[misc]
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, expires=60)


@pytest.mark.parametrize(("auth", "lasts"), [(SigV4QueryAuth, 3600), (_ForAMinute, 60)])
def test_a_presigned_address_is_valid_as_long_as_it_says(auth: type, lasts: int) -> None:
    request = signed(auth, body=b"")
    now = time.time()
    assert SignatureVerifier([_KEY], lambda: now + lasts - 10).verify(request).subject == "AKIATEST"
    with pytest.raises(SqsError, match="expired"):
        SignatureVerifier([_KEY], lambda: now + lasts + 10).verify(request)


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


def test_the_action_of_a_signed_request_is_signed_too() -> None:
    body = b"{}"
    unsigned = AWSRequest("POST", "http://queen:6632/sqs", {}, body)
    SigV4Auth(Credentials(_KEY.id, _KEY.secret), "sqs", "us-west-2").add_auth(unsigned)
    headers = {name.lower().encode(): str(value).encode() for name, value in unsigned.prepare().headers.items()}
    request = Request("POST", "/sqs", {}, {}, headers | {b"host": b"queen:6632"}, body)
    assert SignatureVerifier([_KEY]).verify(request).subject == "AKIATEST"
    request.headers[b"x-amz-target"] = b"AmazonSQS.PurgeQueue"
    with pytest.raises(SqsError, match="x-amz-target"):
        SignatureVerifier([_KEY]).verify(request)


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
    rows = await connection.fetch("SELECT actor, action, before, after FROM queen.audit ORDER BY id")
    made, deleted = rows[0], rows[-1]
    # That of the key without the right to it has changed nothing.
    assert tuple(made) == ("ADMIN", "SQS CreateQueue", None, '{"QueueName": "mail-in"}')
    assert tuple(deleted)[:2] == ("ADMIN", "SQS DeleteQueue")
    assert msgspec.json.decode(deleted["before"])["attributes"] == {"VisibilityTimeout": "33"}


def _use_keys(admin: Client, mail: Client, reader: Client) -> None:
    assert code_of(lambda: mail.create_queue(QueueName="mail-in")) == "AccessDenied"
    url = admin.create_queue(QueueName="mail-in")["QueueUrl"]
    other = admin.create_queue(QueueName="orders", Attributes={"VisibilityTimeout": "33"})["QueueUrl"]
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
    admin.delete_queue(QueueUrl=other)


async def test_a_message_of_a_fifo_queue_has_the_key_that_sent_it_as_its_producer(start_server: StartServer) -> None:
    keys = (("ADMIN", "a", "admin", ()),)
    api = await start_server(queen_sqs=True, queen_sqs_keys=keys, jwt_enabled=True, jwt_secret=SECRET)
    admin = sqs_client(api.url, "ADMIN", "a")

    def send() -> None:
        url = admin.create_queue(QueueName="mail.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
        admin.send_message(QueueUrl=url, MessageBody="x", MessageGroupId="g", MessageDeduplicationId="d")

    await asyncio.to_thread(send)
    bob = api.bearing(issue("admin", sub="bob"))
    listed = (await bob.call("GET", "/api/v1/messages", queue="mail.fifo")).body["messages"]
    assert [message["producerSub"] for message in listed] == ["ADMIN"]
    await bob.close()


async def test_a_key_for_some_queues_reaches_no_others_by_way_of_its_own(start_server: StartServer) -> None:
    """Not as the dead-letter queue of its own, not as where messages came from, and not in lists."""
    keys = (("ADMIN", "a", "admin", ()), ("MAIL", "m", "admin", ("mail-*",)))
    api = await start_server(queen_sqs=True, queen_sqs_keys=keys, jwt_enabled=True, jwt_secret="s" * 32)
    admin, mail = (sqs_client(api.url, id, secret) for id, secret, *_ in keys)
    await asyncio.to_thread(_reach_out, admin, mail)


def _reach_out(admin: Client, mail: Client) -> None:
    def arn(queue: str) -> str:
        return f"arn:aws:sqs:eu-central-1:000000000000:{queue}"

    def policy(queue: str) -> dict[str, str]:
        sent = {"deadLetterTargetArn": arn(queue), "maxReceiveCount": 1}
        return {"RedrivePolicy": msgspec.json.encode(sent).decode()}

    url = {name: admin.create_queue(QueueName=name)["QueueUrl"] for name in ("mail-in", "mail-dead", "orders")}
    admin.set_queue_attributes(QueueUrl=url["orders"], Attributes=policy("mail-dead"))
    refused: list[Any] = [
        lambda: mail.set_queue_attributes(QueueUrl=url["mail-in"], Attributes=policy("orders")),
        lambda: mail.create_queue(QueueName="mail-new", Attributes=policy("orders")),
    ]
    assert [code_of(call) for call in refused] == ["AccessDenied"] * 2
    mail.set_queue_attributes(QueueUrl=url["mail-in"], Attributes=policy("mail-dead"))
    sources = mail.list_dead_letter_source_queues(QueueUrl=url["mail-dead"])
    assert sources["queueUrls"] == [url["mail-in"]]
    # What died in `orders` lies among its own, and is not sent there by it.
    admin.send_message(QueueUrl=url["orders"], MessageBody="x")
    for _ in range(2):
        admin.receive_message(QueueUrl=url["orders"], VisibilityTimeout=0)
    mail.start_message_move_task(SourceArn=arn("mail-dead"))
    for _ in range(100):
        (task,) = mail.list_message_move_tasks(SourceArn=arn("mail-dead"))["Results"]
        if task["Status"] != "RUNNING":
            break
        time.sleep(0.1)
    assert (task["Status"], "denied" in task["FailureReason"]) == ("FAILED", True)
    assert "Messages" not in admin.receive_message(QueueUrl=url["orders"])


async def test_clients_of_sqs_count_for_the_limit_of_an_address(start_server: StartServer) -> None:
    api = await start_server(queen_sqs=True, ip_limit_per_minute=3)
    async with aiohttp.ClientSession(api.url) as client:
        for path, status in (("/sqs", 200), ("/sqs/000000000000/q", 200), ("/", 200), ("/", 429), ("/sqs", 429)):
            async with client.post(path, data={"Action": "ListQueues"}) as answer:
                assert answer.status == status, path


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
