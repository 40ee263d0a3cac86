"""What passwords are hashed with where no test has made it cheap."""

from __future__ import annotations

import argon2
import pytest

from queen.proxy import passwords


@pytest.fixture(autouse=True)
def _cheap_hashes() -> None:
    """Not here."""


async def test_hashes_take_the_memory_and_time_that_make_guessing_expensive() -> None:
    stored = passwords.hash_password("correct horse battery")
    assert stored.startswith("$argon2id$v=19$m=65536,t=3,p=4$")
    assert not passwords.is_outdated(stored)
    one = passwords.Passwords(1)
    assert await one.verify("correct horse battery", stored)
    assert not await one.verify("correct horse", stored)


async def test_a_name_that_does_not_exist_takes_as_long_as_one_that_does() -> None:
    assert passwords._DECOY.startswith("$argon2id$")
    assert not passwords.is_outdated(passwords._DECOY)
    # It is computed to the end, and not refused as malformed.
    with pytest.raises(argon2.exceptions.VerifyMismatchError):
        argon2.PasswordHasher().verify(passwords._DECOY, "")
    assert not await passwords.Passwords(1).verify("", None)


def test_weaker_hashes_are_outdated() -> None:
    assert passwords.is_outdated("$argon2id$v=19$m=8,t=1,p=1$AAAAAAAAAAAAAAAAAAAAAA$AAAAAAAAAAAAAAAAAAAAAA")
    assert passwords.is_outdated("$2b$10$abcdefghijklmnopqrstuv")
