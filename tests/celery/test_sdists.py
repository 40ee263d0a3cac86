"""Kombu's and Celery's own integration tests, from their sdists, against this transport and backend."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.redis.redis_server import RedisServer
from tests.support.host import Host

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

_SUITE = Path(__file__).with_name("kombu_suite.py")

# The files of Celery's integration tests that apply; the others are about RabbitMQ, Django or Celery's own memory.
CELERY_FILES = ("test_tasks.py", "test_canvas.py", "test_inspect.py", "test_loader.py", "test_worker.py")
NOT_APPLICABLE = {
    "test_scheduled": "expects tasks with an ETA in the memory of the worker: here the server holds them",
    "test_chord_header_id_duplicated_on_rabbitmq_msg_duplication": "about RabbitMQ and the keys of the Redis backend",
    "test_chord_on_error": "reads the keys of the Redis backend",
    "test_generator": "expects a header to be published while a generator makes it: here its ids are stored first",
    "test_nested_group_chord_body_chain": "expects a bug of the Redis backend: the result of a group that never comes",
    "test_revoked_by_headers_complex_canvas": "wants two dozen sleeping tasks in 20 seconds of wall time",
    "test_trace_log_arguments": "about log records, at the level of Celery's own pytest configuration",
}


def unpacked(distribution: str, directory: Path) -> Path:
    """The sdist of the installed version, without the package itself, so that the installed one is tested."""
    version = importlib.metadata.version(distribution)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", str(directory)]
    subprocess.run([*command, f"{distribution}=={version}"], check=True, capture_output=True)
    (archive,) = directory.glob(f"{distribution}-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    root = directory / f"{distribution}-{version}"
    shutil.rmtree(root / distribution)
    return root


def name_this_backend(root: Path) -> None:
    """Have the canvas tests run that ask for the Redis backend: what they need is a Redis that their tasks write to."""
    canvas = root / "t" / "integration" / "test_canvas.py"
    asked = re.compile(r"result_backend\.startswith\(['\"]redis['\"]\)")
    text, named = asked.subn("result_backend.startswith('queen')", canvas.read_text())
    assert named > 40
    canvas.write_text(text)


def let_redis_wait(root: Path) -> None:
    """Have their Redis client wait as long as the tests ask for: since version 8 it gives up after 5 seconds."""
    tasks = root / "t" / "integration" / "tasks.py"
    text = tasks.read_text()
    assert "StrictRedis(host=host, port=port)" in text
    tasks.write_text(text.replace("port=port)", "port=port, socket_timeout=None)"))


def wait_for_each_errback(root: Path) -> None:
    """Have each error callback waited for: on a busy machine those after the first come later, also with Redis."""
    canvas = root / "t" / "integration" / "test_canvas.py"
    text = canvas.read_text()
    assert "timeout=TIMEOUT if i == 0 else 0" in text
    canvas.write_text(text.replace("timeout=TIMEOUT if i == 0 else 0", "timeout=TIMEOUT"))


def run(root: Path, *arguments: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", *arguments]
    # In the directory that runs share by default it would take the right to enter away from PostgreSQL's user.
    command.append(f"--basetemp={root.parent / 'basetemp'}")
    # One of Celery's waits 20 seconds, seven times, for what must not come.
    done = subprocess.run([*command, "-q", "--timeout", "300"], cwd=root, env=os.environ | variables, check=False)
    assert done.returncode == 0


def test_kombus_integration_tests_pass(celery_host: Host, tmp_path: Path) -> None:
    root = unpacked("kombu", tmp_path)
    shutil.copy(_SUITE, root / "t" / "integration" / "test_queen.py")
    run(root, "t/integration/test_queen.py", QUEEN_TEST_SERVER=f"queen://127.0.0.1:{celery_host.port}")


async def test_celerys_integration_tests_pass(celery_host: Host, tmp_path: Path) -> None:
    root = unpacked("celery", tmp_path)
    name_this_backend(root)
    let_redis_wait(root)
    wait_for_each_errback(root)
    url = f"queen://127.0.0.1:{celery_host.port}/celery-suite"
    left_out = " and ".join(f"not {name}" for name in NOT_APPLICABLE)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    redis = RedisServer(tmp_path / "redis")
    await redis.start()
    try:
        await asyncio.to_thread(
            run,
            root,
            *(f"t/integration/{name}" for name in CELERY_FILES),
            *("-p", "celery.contrib.pytest", "-o", "python_classes=test_*", "-k", left_out),
            TEST_BROKER=url,
            TEST_BACKEND=url,
            REDIS_HOST="127.0.0.1",
            REDIS_PORT=str(redis.port),
            PATH=path,
        )
    finally:
        await redis.kill()
