"""Who PostgreSQL and the workers run as when root starts the server, and what that account is given to reach."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import pytest

from queen.embedded.account import Account, _open_temporary
from queen.embedded.errors import EmbeddedPostgresError
from queen.settings import SYSTEM_DATA_DIR, Settings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may start processes of other users")

NOBODY = pwd.getpwnam("nobody")
ACCOUNT = Account(NOBODY.pw_name, NOBODY.pw_uid, NOBODY.pw_gid, switched=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private directory of root that is not in the temporary directory, as far as anybody can tell."""
    monkeypatch.setattr("queen.embedded.account._open_temporary", lambda directory: False)
    for directory in tmp_path.parents:
        if directory.stat().st_mode & stat.S_IXOTH == 0:
            directory.chmod(0o711)
    tmp_path.chmod(0o711)
    private = tmp_path / "home"
    private.mkdir(mode=0o700)
    return private


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_directory_in_a_private_home_is_refused_and_the_home_stays_private(home: Path) -> None:
    with pytest.raises(EmbeddedPostgresError, match=r"which the user nobody may not enter.*QUEEN_DATA_DIR"):
        ACCOUNT.check_reach(home / "data")
    assert mode(home) == 0o700
    ACCOUNT.check_reach(home.parent / "data")


def test_private_directories_of_root_that_are_temporary_are_opened(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir(mode=0o700)
    assert _open_temporary(inner)
    assert mode(inner) == 0o701
    assert not _open_temporary(Path("/root"))


def test_what_it_may_read_follows_from_modes_and_owners(home: Path) -> None:
    public, private = home.parent / "public", home.parent / "private"
    for path, bits in ((public, 0o644), (private, 0o600), (home / "inside", 0o644)):
        path.write_text("x")
        path.chmod(bits)
    assert ACCOUNT.can_read(public)
    assert not ACCOUNT.can_read(private)
    assert not ACCOUNT.can_read(home / "inside")
    ACCOUNT.chown(private)
    assert ACCOUNT.can_read(private)


def test_programs_that_it_cannot_reach_are_copied_where_it_can(home: Path) -> None:
    programs = home / "pg18" / "bin"
    programs.mkdir(parents=True)
    (programs / "postgres").write_text("#!/bin/sh\n")
    (programs / "postgres").chmod(0o755)
    data = home.parent / "data"
    data.mkdir()
    copy = ACCOUNT.reachable_programs(programs, data)
    assert copy == data / "pg18" / "bin"
    assert ACCOUNT.can_read(copy / "postgres")
    assert ACCOUNT.reachable_programs(programs, data) == copy
    (programs / "postgres").unlink()
    (data / "pg18" / "bin" / "postgres").chmod(0o755)
    assert ACCOUNT.reachable_programs(copy, data) == copy


def test_what_root_left_in_a_directory_becomes_its_own(home: Path) -> None:
    data = home.parent / "data"
    (data / "spool").mkdir(parents=True)
    (data / "spool" / "file").write_text("x")
    (home / "secret").write_text("x")
    os.link(home / "secret", data / "linked")
    (data / "symbolic").symlink_to(home / "secret")
    ACCOUNT.own(data)
    assert {path.lstat().st_uid for path in (data, data / "spool", data / "spool" / "file")} == {ACCOUNT.uid}
    assert (home / "secret").stat().st_uid == 0


def test_roots_data_directory_is_that_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Settings().queen_data_dir == SYSTEM_DATA_DIR
    (tmp_path / "queen" / "postgres").mkdir(parents=True)
    assert Settings().queen_data_dir == tmp_path / "queen"
