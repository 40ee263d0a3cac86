"""The image and the compose files, as far as that goes without a container engine."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import stat
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import queen
from queen.settings import describe_settings
from tests.acceptance.served import served
from tests.deploy.tools import DEPLOY, ROOT, attempt, run, tool

DOCKER: Final = DEPLOY / "docker"
COMPOSE: Final = ("compose.yaml", "compose.production.yaml")


def compose(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())
    return found


def test_the_dockerfile_passes_hadolint() -> None:
    run(tool("hadolint"), DOCKER / "Dockerfile")


def test_shell_scripts_pass_shellcheck() -> None:
    scripts = list(DEPLOY.rglob("*.sh"))
    assert scripts
    run(tool("shellcheck"), *scripts)
    assert [script for script in scripts if not os.access(script, os.X_OK)] == []


def test_yaml_files_pass_yamllint() -> None:
    files = [path for kind in ("*.yaml", "*.yml") for path in DEPLOY.rglob(kind) if "templates" not in path.parts]
    own = [path for path in files if not path.read_text().startswith("# Made by render.sh")]
    assert len(own) > 10
    rules = (
        "{extends: default, rules: {document-start: disable, line-length: {max: 140}, truthy: {check-keys: false}, "
        "comments: {min-spaces-from-content: 1}}}"
    )
    run(tool("yamllint"), "--strict", "--config-data", rules, *own)


def test_the_builder_is_sent_what_the_dockerfile_copies() -> None:
    """Patterns that begin with ! are all that .dockerignore lets through."""
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied: set[str] = set()
    for line in (DOCKER / "Dockerfile").read_text().splitlines():
        if (found := re.match(r"COPY (?!--from)(.+) \S+$", line)) is not None:
            copied |= set(found[1].split())
    assert copied == sent
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_the_image_installs_what_the_extras_need() -> None:
    listed = run(sys.executable, DOCKER / "requirements.py", ROOT / "pyproject.toml", "server", "redis", "otel").split(
        "\n"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["dependencies"]) <= set(listed)
    assert set(project["optional-dependencies"]["server"]) <= set(listed)
    assert not any("pyspark" in line for line in listed)


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for chart in ("queen", "queen-proxy"):
        assert yaml.safe_load((DEPLOY / "helm" / chart / "Chart.yaml").read_text())["appVersion"] == version
    for name in COMPOSE:
        images = {service["image"] for service in compose(name)["services"].values()}
        assert f"queen-mq:{version}" in images


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_files_are_what_compose_takes(name: str) -> None:
    # Merge keys are resolved first: the checker knows no nested ones, Compose does.
    from compose_spec import PyCompose

    PyCompose.from_yaml(yaml.safe_dump(compose(name))).validate()


@pytest.mark.parametrize("name", COMPOSE)
def test_files_that_a_compose_file_mounts_exist(name: str) -> None:
    declared = compose(name)
    for service in declared["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DOCKER / source).exists(), source
        if "build" in service:
            context = DOCKER / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).exists()


@pytest.mark.parametrize("name", COMPOSE)
def test_variables_of_servers_are_settings_that_exist(name: str) -> None:
    known = {setting.variable for setting in describe_settings()}
    servers = [service for title, service in compose(name)["services"].items() if title.startswith("queen")]
    assert servers
    for server in servers:
        assert {variable.removesuffix("_FILE") for variable in server["environment"]} <= known


def test_every_secret_is_made_once(tmp_path: Path) -> None:
    script = tmp_path / "make-secrets.sh"
    shutil.copy(DOCKER / "make-secrets.sh", script)
    run(script)
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    declared = compose("compose.production.yaml")
    assert {f"./secrets/{name}" for name in made} == {secret["file"] for secret in declared["secrets"].values()}
    assert len(set(made.values())) == len(made)
    assert re.fullmatch("[0-9a-f]{64}", made["sync_secret"])
    assert made["pg_password"] in made["database_url"]
    run(script)
    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == made


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A directory on the file system of the root, which temporary files need not be on."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@pytest.mark.timeout(120)
def test_it_runs_as_the_image_runs_it(on_disk: Path) -> None:
    """As the user of the image, on a root that cannot be written to, with a data directory and a /tmp of its own."""
    script = Path(__file__).with_name("read_only_root.sh")
    if os.geteuid() != 0 or attempt("unshare", "--mount", "true").returncode != 0:
        pytest.skip("making the root read-only needs root and mount namespaces")
    data = on_disk / "data"
    data.mkdir(mode=0o700)
    os.chown(data, 10001, 10001)
    check = DOCKER / "healthcheck.py"
    prefix = ["env", *programs_for_everybody(data), str(script), str(data)]
    with served(on_disk, prefix=prefix) as server:
        port = server.url.rpartition(":")[2]
        environment = {"PORT": port, "HOST": "0.0.0.0", "PATH": os.environ["PATH"]}
        assert "/livez: 200" in run(sys.executable, check, "/livez", env=environment)
        assert "/readyz: 200" in run(sys.executable, check, "/readyz", env=environment)
        owners = {path.stat().st_uid for path in data.iterdir()}
        assert owners == {10001}
    gone = attempt(sys.executable, check, "/livez", env=environment)
    assert gone.returncode == 1
    assert "/livez: " in gone.stderr


def programs_for_everybody(data: Path) -> list[str]:
    """Where this Python is in the home of root, say: what has to be opened to the user of the image."""
    source = Path(inspect.getfile(queen)).parents[1]
    needed = {Path(sys.base_prefix), Path(sys.prefix), ROOT, source}
    closed = {
        parent
        for path in (*needed, data)
        for parent in path.resolve().parents
        if not parent.stat().st_mode & stat.S_IXOTH
    }
    tops = {path for path in closed if not closed & set(path.parents)}
    exposed = [path.resolve() for path in needed if tops & set(path.resolve().parents)]
    return ["CLOSED=" + "\n".join(map(str, tops)), "EXPOSED=" + "\n".join(map(str, exposed))]


@pytest.mark.parametrize("arguments", [("version",), ("settings",), ("serve", "--help")])
def test_commands_of_the_server_need_no_spark(arguments: tuple[str, ...]) -> None:
    run(sys.executable, Path(__file__).with_name("without_extras.py"), *arguments)
