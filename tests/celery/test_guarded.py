"""Celery with `queens://`: TLS, a token for one namespace, and a server with two shards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chord
from kombu import Connection

from queen.embedded import EmbeddedPostgres
from tests.celery.worker import celery_worker, load_tasks
from tests.http.auth.issuer import SECRET, issue
from tests.http.auth.test_tls import write_pair
from tests.support.databases import create_database
from tests.support.host import Host, host

_SECONDS = 100


@pytest.fixture(scope="module")
def guarded(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Path]]:
    """A server with TLS, tokens and two shards, and its certificate."""
    directory = tmp_path_factory.mktemp("guarded")
    pair = write_pair(directory)
    dsn = ",".join(postgres.dsn(asyncio.run(create_database(postgres))) for _ in range(2))
    with host(dsn, directory / "data") as served:
        served.workers = 1
        served.settings = {
            "JWT_ENABLED": "true",
            "JWT_ALGORITHM": "HS256",
            "JWT_SECRET": SECRET,
            "TLS_CERT": pair["tls_cert"],
            "TLS_KEY": pair["tls_key"],
        }
        served.start()
        _until_listening(f"queens://127.0.0.1:{served.port}/?ssl_ca_certs={pair['tls_cert']}")
        yield served, Path(pair["tls_cert"])


def _until_listening(url: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            with Connection(url) as connection:
                connection.ensure_connection(max_retries=1, interval_start=0)
                return
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@pytest.mark.parametrize(
    "limits", [{"namespaces": ["shop", "shop/*"]}, {"queues": ["shop", "shop/*", "celery", "*.reply.celery.pidbox"]}]
)
def test_a_worker_runs_tasks_with_a_limited_token(
    guarded: tuple[Host, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]
) -> None:
    served, certificate = guarded
    token = issue("read-write", **limits)
    url = f"queens://:{token}@127.0.0.1:{served.port}/shop?ssl_ca_certs={certificate}"
    tasks = load_tasks(url, tmp_path, monkeypatch)
    with celery_worker(url, tmp_path, "guarded", "-P", "solo"):
        assert tasks.add.delay(2, 3).get(timeout=_SECONDS) == 5
        assert chord((tasks.add.s(i, i) for i in range(3)), tasks.total.s())().get(timeout=_SECONDS) == 6
        assert tasks.app.control.ping(timeout=_SECONDS, limit=1) == [{"guarded@test": {"ok": "pong"}}]
    tasks.app.close()


def test_an_admin_with_a_limited_token_purges_a_queue(guarded: tuple[Host, Path]) -> None:
    served, certificate = guarded
    token = issue("admin", namespaces=["shop", "shop/*"])
    url = f"queens://:{token}@127.0.0.1:{served.port}/shop?ssl_ca_certs={certificate}"
    with Connection(url) as connection:
        queue = connection.SimpleQueue("purged")
        queue.put(1)
        assert queue.clear() == 1


def test_an_untrusted_certificate_is_refused(guarded: tuple[Host, Path]) -> None:
    served, _ = guarded
    with pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
        Connection(f"queens://127.0.0.1:{served.port}").ensure_connection(max_retries=1, interval_start=0)
    with Connection(f"queens://127.0.0.1:{served.port}/?ssl_cert_reqs=CERT_NONE") as trusting:
        trusting.ensure_connection(max_retries=1, interval_start=0)
