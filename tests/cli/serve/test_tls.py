"""`queen cert` and `queen serve` with what it made; new certificates while it serves."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from queen.embedded import EmbeddedPostgres
from tests.acceptance.served import environ_without_settings
from tests.cli.conftest import new_database
from tests.support.ageing import block_until
from tests.support.ports import free_port

QUEEN = str(Path(sys.executable).with_name("queen"))


@dataclass(frozen=True)
class Secure:
    """A server with two workers, and its certificate."""

    pid: int
    port: int
    directory: Path

    @property
    def certificate(self) -> Path:
        return self.directory / "cert.pem"

    def connect(self, trusted: Path | str | None = None) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=trusted or self.certificate)
        return http.client.HTTPSConnection("localhost", self.port, context=context, timeout=100)

    def shows_new_certificate(self) -> bool:
        """On twenty connections, which both workers accept."""
        try:
            return all(ask(self.connect()) == 200 for _ in range(20))
        except OSError:
            return False

    def renew(self) -> None:
        """Another certificate in place of the one there is."""
        for name in ("cert.pem", "key.pem"):
            (self.directory / name).rename(self.directory / f"old-{name}")
        make_certificate(self.directory)


def ask(connection: http.client.HTTPSConnection) -> int:
    connection.request("GET", "/livez")
    answer = connection.getresponse()
    answer.read()
    return answer.status


def make_certificate(directory: Path) -> str:
    done = subprocess.run([QUEEN, "cert", str(directory)], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def secure(postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[Secure]:
    said = make_certificate(tmp_path)
    variables = dict(word.split("=", 1) for word in said.split() if word.startswith("TLS_"))
    port = free_port()
    environment = environ_without_settings() | variables | {"DATABASE_URLS": asyncio.run(new_database(postgres))}
    command = [QUEEN, "serve", "--host", "127.0.0.1", "--port", str(port), "--workers", "2"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--data-dir", str(tmp_path / "data")], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    served = Secure(process.pid, port, tmp_path)
    try:
        block_until(lambda: process.poll() is not None or served.shows_new_certificate(), "the server")
        assert process.poll() is None, (tmp_path / "log").read_text()
        yield served
    finally:
        process.terminate()
        process.wait(100)


def test_new_certificates_are_taken_up_while_connections_stay(secure: Secure) -> None:
    open_before = secure.connect()
    assert ask(open_before) == 200
    secure.renew()
    os.kill(secure.pid, signal.SIGHUP)
    block_until(secure.shows_new_certificate, "the certificate after SIGHUP")
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(secure.connect(secure.directory / "old-cert.pem"))
    assert ask(open_before) == 200, "the connection from before goes on"
    # Without a signal, too.
    secure.renew()
    block_until(secure.shows_new_certificate, "the certificate that nobody spoke of")
    assert ask(open_before) == 200
    # One that cannot be used changes nothing.
    good = secure.certificate.read_bytes()
    log = secure.directory / "log"
    complaint = "the previous certificate stays in use"
    complaints = log.read_text().count(complaint)
    secure.certificate.write_text("rubbish")
    os.kill(secure.pid, signal.SIGHUP)
    block_until(lambda: log.read_text().count(complaint) >= complaints + 2, "the complaint")
    secure.certificate.write_bytes(good)
    assert secure.shows_new_certificate()
    open_before.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"JWT_ENABLED": "true"}, "there is no key to verify tokens with"),
        ({"JWT_ENABLED": "yes", "JWT_SECRET": "x"}, "JWT_ENABLED=yes: expected true, 1, false, 0"),
        ({"JWT_ENABLED": "true", "JWT_SECRET": "x", "JWT_ALGORITHM": "HS1"}, "JWT_ALGORITHM=HS1: expected one of"),
        ({"JWT_ENABLED": "true", "JWT_SECRET_FILE": "/nowhere"}, "JWT_SECRET_FILE=/nowhere: expected a readable file"),
        ({"JWT_ENABLED": "true", "JWT_PUBLIC_KEY": "no key"}, "JWT_PUBLIC_KEY: expected a public key in PEM"),
        ({"QUEEN_LOGIN": "true"}, "QUEEN_LOGIN is true, but JWT_SECRET is not set"),
        ({"QUEEN_LOGIN": "true", "JWT_SECRET": "x", "CORS_ORIGINS": "*"}, "exclude each other"),
        ({"QUEEN_LOGIN": "true", "JWT_SECRET": "x", "OIDC_CLIENT_ID": "queen"}, "belong together: one is missing"),
        (
            {"QUEEN_LOGIN": "true", "JWT_SECRET": "x", "INTERNAL_JWT_PRIVATE_KEY_PEM": "no key"},
            "INTERNAL_JWT_PRIVATE_KEY_PEM: expected an RSA",
        ),
        ({"TLS_CERT": "/nowhere", "TLS_KEY": "/nowhere"}, "TLS_CERT=/nowhere: expected a file that can be read"),
        ({"TLS_CLIENT_ROLES": "a:admin"}, "TLS_CLIENT_ROLES is set, but TLS_CLIENT_AUTH is off"),
        (
            {"JWT_ENABLED": "true", "JWT_SECRET": "x", "QUEEN_PEERS": "http://other:6632"},
            "QUEEN_PEERS needs QUEEN_SYNC_SECRET",
        ),
    ],
)
def test_a_server_that_would_be_open_by_mistake_does_not_start(
    settings: dict[str, str], said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [QUEEN, "serve", "--port", str(free_port()), "--data-dir", str(tmp_path)],
        env=environ_without_settings() | settings,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    assert said in done.stderr
    assert not (tmp_path / "postgres").exists(), "it has not begun to start"
