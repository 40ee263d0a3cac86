"""What the server makes of the directories it is given."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from queen.cli.serve.privileges import prepare_user
from queen.errors import QueenError
from queen.settings import Settings


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """That of the tests is not changed."""
    before = os.umask(0)
    yield
    os.umask(before)


def prepare(data: Path) -> None:
    prepare_user(Settings.from_env({"DATABASE_URLS": "postgresql://nowhere/queen"}, queen_data_dir=str(data)), ())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("inside", [(), ("lost+found", "queen.log"), ("spool", "users.lock", "notes.txt")])
def test_a_data_directory_becomes_private_whoever_made_it(tmp_path: Path, inside: tuple[str, ...]) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o777)
    for name in inside:
        (data / name).touch()
    prepare(data)
    assert mode(data) == 0o700


def test_a_directory_of_others_keeps_its_files_and_its_mode(tmp_path: Path) -> None:
    data = tmp_path / "etc"
    data.mkdir(mode=0o755)
    (data / "hosts").write_text("127.0.0.1 localhost")
    (data / "spool").mkdir()
    if os.geteuid() == 0:
        with pytest.raises(QueenError, match=r"QUEEN_DATA_DIR=.*there are other files than Queen's in it \(hosts\)"):
            prepare(data)
    else:
        prepare(data)
    assert mode(data) == 0o755
    assert (data / "hosts").stat().st_uid == os.geteuid()
