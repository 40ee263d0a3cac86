"""moto's tests of SQS, from its sdist, against this server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.acceptance.served import served

_VERSION = "5.2.5"
# What it needs beside what boto3's clients and the tests here need anyway.
_NEEDS = (
    f"moto=={_VERSION}",
    "freezegun==1.5.5",
    "py-partiql-parser==0.6.3",
    "responses==0.26.3",
    "xmltodict==1.0.4",
)
_FILES = ("test_sqs.py", "test_sqs_message_attributes.py")
_PAGE = Path(__file__).parents[3] / "docs" / "sqs.md"


def not_applicable() -> list[str]:
    """The tests that the table in the docs leaves out, each with its reason."""
    return re.findall(r"^\| `(test_\w+)` \|", _PAGE.read_text(), re.MULTILINE)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_motos_tests_pass(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    packages, sdist = tmp_path / "packages", tmp_path / "sdist"
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--target", str(packages), *_NEEDS], check=True)
    subprocess.run([*pip, "download", "--no-deps", "--no-binary", ":all:", "--dest", str(sdist), _NEEDS[0]], check=True)
    with tarfile.open(sdist / f"moto-{_VERSION}.tar.gz") as tar:
        tar.extractall(sdist, filter="data")
    root = sdist / f"moto-{_VERSION}"
    shutil.rmtree(root / "moto")
    shutil.copy(Path(__file__).with_name("moto_suite.py"), root / "tests" / "conftest.py")
    for name in _FILES:
        file = root / "tests" / "test_sqs" / name
        # An attribute with a blank at the end of its name is one that SQS does not know.
        file.write_text(file.read_text().replace('"VisibilityTimeout "', '"VisibilityTimeout"'))
    names = not_applicable()
    assert set(names) <= set(re.findall(r"def (test_\w+)", (root / "tests" / "test_sqs" / _FILES[0]).read_text()))
    with served(tmp_path_factory.mktemp("server"), QUEEN_SQS="true") as server:
        variables = {
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_SQS": f"{server.url}/sqs",
            "PYTHONPATH": f"{root}:{packages}",
        }
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-q"]
        command += [f"tests/test_sqs/{name}" for name in _FILES]
        command += [f"--deselect=tests/test_sqs/{_FILES[0]}::{name}" for name in names]
        command += [f"--basetemp={tmp_path / 'basetemp'}", "--timeout=60"]
        done = subprocess.run(command, cwd=root, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
