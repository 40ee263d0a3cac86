"""Kombu's and Celery's own integration tests, from their sdists, against this transport and backend."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.host import Host

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

_SUITE = Path(__file__).with_name("kombu_suite.py")

# Files of Celery's integration tests that are about another broker or backend, or need further services.
ABOUT_OTHERS = {
    "test_django_settings.py": "Django's settings, no broker",
    "test_native_delayed_delivery_binding.py": "RabbitMQ's delayed delivery",
    "test_quorum_queue_qos_cluster_simulation.py": "RabbitMQ's quorum queues",
    "test_rabbitmq_chord_unlock_routing.py": "RabbitMQ",
    "test_rabbitmq_default_queue_type_fallback.py": "RabbitMQ",
    "test_rabbitmq_quorum_queue_cycle_detection.py": "RabbitMQ",
    "test_mem_leak_in_exception_handling.py": "memory of Celery itself",
    "test_prefork_shutdown.py": "starts RabbitMQ",
    "test_dedup_chain_dispatch.py": "starts RabbitMQ",
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


def run(root: Path, *arguments: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run([*command, "-q", "--timeout", "120"], cwd=root, env=os.environ | variables, check=False)
    assert done.returncode == 0


def test_kombus_integration_tests_pass(celery_host: Host, tmp_path: Path) -> None:
    root = unpacked("kombu", tmp_path)
    shutil.copy(_SUITE, root / "t" / "integration" / "test_queen.py")
    run(root, "t/integration/test_queen.py", QUEEN_TEST_SERVER=f"queen://127.0.0.1:{celery_host.port}")
