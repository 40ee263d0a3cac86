"""TLS: what is served, to whom, and new certificates without a restart."""

from __future__ import annotations

import asyncio
import datetime
import random
import socket
import ssl
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from queen.cli.cert import self_signed
from queen.errors import SettingsError
from queen.http.auth.guard import check_security
from queen.settings import Settings
from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.support.ageing import until
from tests.support.api import Api


def write_pair(directory: Path, name: str = "server") -> dict[str, str]:
    certificate, key = self_signed(["localhost", "127.0.0.1"], 1)
    (directory / f"{name}.pem").write_bytes(certificate)
    (directory / f"{name}.key").write_bytes(key)
    return {"tls_cert": str(directory / f"{name}.pem"), "tls_key": str(directory / f"{name}.key")}


class Authority:
    """A certificate authority for clients."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "clients")])
        self.path = directory / "clients.pem"
        self.path.write_bytes(self._sign(self._name, self._key, ca=True).public_bytes(serialization.Encoding.PEM))

    def client(self, name: str) -> tuple[str, str]:
        """Files with a certificate for `name` and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate, file = self._directory / f"{name}.crt", self._directory / f"{name}.key"
        certificate.write_bytes(self._sign(subject, key, ca=False).public_bytes(serialization.Encoding.PEM))
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return str(certificate), str(file)

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )


async def get(
    api: Api, path: str, trusted: str, client: tuple[str, str] | None = None, **headers: str
) -> tuple[int, dict[str, str]]:
    context = ssl.create_default_context(cafile=trusted)
    if client is not None:
        context.load_cert_chain(*client)
    url = api.url.replace("http://", "https://") + path
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
        session.get(url, headers=headers) as answer,
    ):
        await answer.read()
        return answer.status, dict(answer.headers)


async def test_the_server_speaks_tls(start_server: StartServer, tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    api = await start_server(**pair)
    status, headers = await get(api, "/livez", pair["tls_cert"])
    assert status == 200
    assert headers["Strict-Transport-Security"].startswith("max-age=")
    # Refused while its body still comes: the answer arrives although TLS has no half-closed connections.
    context = ssl.create_default_context(cafile=pair["tls_cert"])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
        url = api.url.replace("http://", "https://") + "/api/v1/push"
        async with session.post(url, data=b"x" * 100) as answer:
            assert answer.status == 400
        body = {"items": [{"queue": "q", "payload": "x" * 300_000}]}
        async with session.post(url, json=body) as answer:
            assert answer.status == 201
        async with session.get(url.replace("/push", "/pop/queue/q")) as answer:
            assert (await answer.json())["messages"][0]["data"] == "x" * 300_000


async def test_clients_that_begin_no_handshake_are_few_at_a_time(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queen.http.server.handshakes.MOST_HANDSHAKES", 8)
    pair = write_pair(tmp_path)
    api = await start_server(**pair)
    assert api.worker is not None
    place = urlsplit(api.url)
    elsewhere = await asyncio.open_connection(place.hostname, place.port, local_addr=("127.0.0.2", 0))
    silent = [await asyncio.open_connection(place.hostname, place.port) for _ in range(20)]
    async with asyncio.timeout(8):
        # The oldest are closed, of the address that has most of them.
        assert {await reader.read() for reader, _ in silent[:13]} == {b""}
        status, _ = await get(api, "/livez", pair["tls_cert"])
    assert status == 200
    assert not elsewhere[0].at_eof()
    assert not silent[-1][0].at_eof()
    assert api.worker.http.budget.refused["connections"] == 14
    for _, writer in (*silent, elsewhere):
        writer.close()


async def test_unread_answers_have_a_budget_over_tls_too(start_server: StartServer, tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    api = await start_server(queen_memory_mb=256, **pair)
    assert api.worker is not None
    budget = api.worker.http.budget
    context = ssl.create_default_context(cafile=pair["tls_cert"])
    place = urlsplit(api.url)
    opened = []
    async with (
        asyncio.timeout(60),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
    ):
        items = [{"queue": "q", "payload": "x" * 100_000}] * 20
        url = api.url.replace("http://", "https://")
        for _ in range(5):
            async with session.post(f"{url}/api/v1/push", json={"items": items}) as answer:
                assert answer.status == 201
        while budget.outgoing <= budget.alarm:
            small = socket.socket()
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            small.setblocking(False)
            await asyncio.get_running_loop().sock_connect(small, (place.hostname, place.port))
            _, writer = await asyncio.open_connection(sock=small, ssl=context, server_hostname="localhost")
            opened.append(writer)
            cast(asyncio.Transport, writer.transport).pause_reading()
            path = f"/api/v1/pop/queue/q?batch=100&consumerGroup=g{len(opened)}"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await asyncio.sleep(0.05)
        assert budget.outgoing < 20_000_000 * len(opened)
        # Those who read nothing are cut, and then there is room again.
        await until(lambda: budget.outgoing <= budget.alarm)
        async with session.get(f"{url}/api/v1/pop/queue/q?batch=100") as answer:
            assert len((await answer.json())["messages"]) > 50
    for writer in opened:
        writer.transport.abort()


async def test_connections_do_not_mix_what_they_send(start_server: StartServer, tmp_path: Path) -> None:
    """Bodies of several records, larger than the buffer that connections decrypt into, all at the same time."""
    pair = write_pair(tmp_path)
    api = await start_server(**pair)
    url = api.url.replace("http://", "https://")
    context = ssl.create_default_context(cafile=pair["tls_cert"])
    dice = random.Random(5)
    sent = {f"q{number}": dice.randbytes(60_000 + 80_000 * number).hex() for number in range(6)}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:

        async def push(queue: str, payload: str) -> None:
            body = {"items": [{"queue": queue, "payload": payload}]}
            async with session.post(f"{url}/api/v1/push", json=body) as answer:
                assert answer.status == 201, await answer.text()

        await asyncio.gather(*(push(queue, payload) for queue, payload in sent.items()))
        async with session.ws_connect(f"{url}/ws/v1/consume", max_msg_size=0) as socket:
            for queue in sent:
                await socket.send_json({"type": "subscribe", "id": queue, "queue": queue, "autoAck": True})
            received: dict[str, str] = {}
            while len(received) < len(sent):
                frame = await socket.receive_json(timeout=100)
                if frame["type"] == "batch":
                    received[frame["id"]] = frame["messages"][0]["data"]
    assert received == sent


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_versions_are_spoken(start_server: StartServer, tmp_path: Path, version: ssl.TLSVersion) -> None:
    pair = write_pair(tmp_path)
    api = await start_server(**pair)
    context = ssl.create_default_context(cafile=pair["tls_cert"])
    context.minimum_version = context.maximum_version = version
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
        session.get(api.url.replace("http://", "https://") + "/livez") as answer,
    ):
        assert answer.status == 200


async def test_a_new_certificate_is_taken_up_and_a_bad_one_is_not(start_server: StartServer, tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    api = await start_server(**pair)
    assert api.worker is not None
    assert api.worker.tls is not None
    old, current = tmp_path / "old.pem", tmp_path / "server.pem"
    old.write_bytes(current.read_bytes())
    context = ssl.create_default_context(cafile=old)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=1)) as session:
        url = api.url.replace("http://", "https://") + "/livez"
        async with session.get(url) as answer:
            await answer.read()
        current.write_text("rubbish")
        assert not api.worker.tls.reload()
        assert (await get(api, "/livez", str(old)))[0] == 200
        write_pair(tmp_path)
        assert api.worker.tls.reload()
        assert (await get(api, "/livez", pair["tls_cert"]))[0] == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await get(api, "/livez", str(old))
        async with session.get(url) as answer:
            assert answer.status == 200, "the connection that was open goes on"


async def test_certificates_of_clients_say_who_they_are(start_server: StartServer, tmp_path: Path) -> None:
    pair, authority = write_pair(tmp_path), Authority(tmp_path)
    api = await start_server(
        **pair,
        tls_client_ca=str(authority.path),
        tls_client_auth="required",
        tls_client_roles="reader:read-only,ops-*:admin",
    )
    trusted = pair["tls_cert"]
    reader, operator, nobody = (authority.client(name) for name in ("reader", "ops-eva", "nobody"))
    assert (await get(api, "/api/v1/status", trusted, reader))[0] == 200
    assert (await get(api, "/api/v1/pop/queue/q", trusted, reader))[0] == 403
    assert (await get(api, "/api/v1/system/maintenance", trusted, operator))[0] == 200
    assert (await get(api, "/api/v1/status", trusted, nobody))[0] == 403
    context = ssl.create_default_context(cafile=trusted)
    context.load_cert_chain(*operator)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
        url = api.url.replace("http://", "https://")
        item = {"queue": "q", "payload": 1, "producerSub": "somebody else"}
        async with session.post(f"{url}/api/v1/push", json={"items": [item]}) as answer:
            assert answer.status == 201
        async with session.get(f"{url}/api/v1/pop/queue/q") as answer:
            assert (await answer.json())["messages"][0]["producerSub"] == "ops-eva"
        async with session.delete(f"{url}/api/v1/resources/queues/q") as answer:
            assert answer.status == 200
        async with session.get(f"{url}/api/v1/audit") as answer:
            assert (await answer.json())["entries"][0]["actor"] == "ops-eva"
    with pytest.raises(aiohttp.ClientError):
        await get(api, "/livez", trusted)
    (tmp_path / "elsewhere").mkdir()
    stranger = Authority(tmp_path / "elsewhere").client("ops-eva")
    with pytest.raises(aiohttp.ClientError):
        await get(api, "/livez", trusted, stranger)


async def test_with_optional_certificates_a_token_will_do(start_server: StartServer, tmp_path: Path) -> None:
    pair, authority = write_pair(tmp_path), Authority(tmp_path)
    api = await start_server(
        **pair,
        jwt_enabled=True,
        jwt_secret=SECRET,
        tls_client_ca=str(authority.path),
        tls_client_auth="optional",
        tls_client_roles="reader:read-only",
    )
    trusted, path = pair["tls_cert"], "/api/v1/status"
    bearer = {"Authorization": f"Bearer {issue('read-write')}"}
    assert (await get(api, path, trusted))[0] == 401
    assert (await get(api, path, trusted, None, **bearer))[0] == 200
    assert (await get(api, path, trusted, authority.client("reader")))[0] == 200
    assert (await get(api, "/api/v1/pop/queue/q", trusted, authority.client("reader")))[0] == 403
    assert (await get(api, "/api/v1/pop/queue/q", trusted, authority.client("reader"), **bearer))[0] == 204, "it counts"
    assert (await get(api, path, trusted, authority.client("reader"), Authorization="Bearer a.b.c"))[0] == 401
    assert (await get(api, path, trusted, authority.client("nobody")))[0] == 403, "a name without a role"
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(aiohttp.ClientError):
        # Also where a client need not show one, it may show none of a stranger's.
        await get(api, "/livez", trusted, Authority(tmp_path / "elsewhere").client("reader"), **bearer)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tls_cert": "/nowhere"}, "TLS_CERT is set, but TLS_KEY is not"),
        ({"tls_key": "/nowhere"}, "TLS_KEY is set, but TLS_CERT is not"),
        ({"tls_cert": "/nowhere", "tls_key": "/nowhere"}, "TLS_CERT=/nowhere: expected a file that can be read"),
        ({"tls_client_auth": "required"}, "needs TLS_CERT and TLS_KEY"),
        ({"tls_client_auth": "sometimes"}, "expected one of off, optional, required"),
        ({"tls_client_roles": "eva:king"}, "expected names, each with admin, read-write or read-only"),
        ({"tls_client_ca": "/nowhere"}, "TLS_CLIENT_CA is set, but TLS_CLIENT_AUTH is off"),
        ({"tls_client_roles": "eva:admin"}, "TLS_CLIENT_ROLES is set, but TLS_CLIENT_AUTH is off"),
    ],
)
def test_a_server_without_usable_files_does_not_start(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        check_security(Settings.from_env({}, **settings))
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tls_client_auth": "required"}, "TLS_CLIENT_AUTH=required needs TLS_CLIENT_CA"),
        ({"tls_client_auth": "optional"}, "TLS_CLIENT_AUTH=optional needs TLS_CLIENT_CA"),
        ({"tls_client_auth": "required", "tls_client_ca": "/nowhere"}, "TLS_CLIENT_CA=/nowhere: expected a file"),
        ({"tls_client_auth": "required", "tls_client_ca": "key"}, "expected certificates in PEM"),
        ({"tls_client_auth": "optional", "tls_client_ca": "ca"}, "needs JWT_ENABLED=true or QUEEN_LOGIN=true"),
        ({"tls_client_auth": "required", "tls_client_ca": "ca", "cors_origins": "*"}, "CORS_ORIGINS=* and TLS_CLIENT"),
        ({"tls_client_auth": "off", "tls_client_ca": "ca"}, "TLS_CLIENT_CA is set, but TLS_CLIENT_AUTH is off"),
        (
            {"tls_client_auth": "off", "tls_client_ca": "ca", "jwt_enabled": True, "jwt_secret": SECRET},
            "TLS_CLIENT_CA is set, but TLS_CLIENT_AUTH is off",
        ),
    ],
)
def test_client_certificate_settings_without_effect_refuse_the_start(
    tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    pair = write_pair(tmp_path)
    files = {"ca": str(Authority(tmp_path).path), "key": pair["tls_key"]}
    given = {name: files.get(str(value), value) for name, value in settings.items()}
    with pytest.raises(SettingsError) as refused:
        check_security(Settings.from_env({}, **pair, **given))
    assert text in str(refused.value)


def test_required_certificates_alone_guard_the_server(tmp_path: Path) -> None:
    settings = Settings.from_env(
        {}, **write_pair(tmp_path), tls_client_auth="required", tls_client_ca=str(Authority(tmp_path).path)
    )
    check_security(settings)
    assert settings.is_guarded


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    one, other = write_pair(tmp_path, "one"), write_pair(tmp_path, "other")
    with pytest.raises(SettingsError, match="KEY_VALUES_MISMATCH"):
        check_security(Settings.from_env({}, tls_cert=one["tls_cert"], tls_key=other["tls_key"]))
