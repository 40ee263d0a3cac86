"""Settings are read from the environment once, and a wrong one is refused by name."""

from pathlib import Path

import pytest

from queen.cli.commands.server import settings_page
from queen.errors import SettingsError
from queen.setting_kinds import split_host_port
from queen.settings import Settings, describe_settings

KEY = "0123456789abcdef" * 4


def test_without_variables_every_setting_has_its_default() -> None:
    settings = Settings.from_env({})
    assert (settings.port, settings.host, settings.listen_host) == (6632, "", "127.0.0.1")
    assert 1 <= settings.num_workers <= 8
    assert settings.queen_data_dir.name == "queen"
    assert settings.embedded
    assert settings.database_dsns == ()
    assert (settings.db_statement_timeout, settings.dedup_window_seconds) == (30000, 3600)
    assert settings.pg_ssl_reject_unauthorized is True


def test_a_variable_replaces_the_default_and_an_override_replaces_the_variable() -> None:
    environ = {"PORT": "7000", "HOST": "127.0.0.1", "UNKNOWN_VARIABLE": "ignored"}
    assert Settings.from_env(environ).port == 7000
    settings = Settings.from_env(environ, port=7001, host=None)
    assert (settings.port, settings.host) == (7001, "127.0.0.1")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PORT", "abc", "PORT=abc: expected an integer from 1 to 65535"),
        ("DEFAULT_BATCH_SIZE", "10001", "DEFAULT_BATCH_SIZE=10001: expected an integer from 1 to 10000"),
        ("PORT", "0", "PORT=0: expected an integer from 1 to 65535"),
        ("PORT", "6_632", "PORT=6_632: expected an integer from 1 to 65535"),
        ("PG_USE_SSL", "yes", "PG_USE_SSL=yes: expected true, 1, false, 0 or empty"),
        ("LOG_LEVEL", "loud", "LOG_LEVEL=loud: expected one of trace, debug, info, warn, error"),
        (
            "DEFAULT_SUBSCRIPTION_MODE",
            "old",
            "DEFAULT_SUBSCRIPTION_MODE=old: expected one of (empty), all, new, new-only",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_what_was_expected(variable: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.from_env({variable: value})
    assert str(refused.value) == message


def test_a_wrong_override_is_refused_too() -> None:
    with pytest.raises(SettingsError, match=r"^port=99999: expected an integer from 1 to 65535$"):
        Settings.from_env({}, port=99999)
    with pytest.raises(SettingsError, match="unknown setting: porte"):
        Settings.from_env({}, porte=1)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False), ("", False)])
def test_flags_know_five_words(text: str, value: bool) -> None:
    assert Settings.from_env({"PG_SSL_REJECT_UNAUTHORIZED": text}).pg_ssl_reject_unauthorized is value


def test_an_empty_variable_counts_as_unset() -> None:
    assert Settings.from_env({"PORT": "", "PG_USER": ""}) == Settings.from_env({})


def test_a_value_may_stand_in_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("hush \n")
    assert Settings.from_env({"PG_PASSWORD_FILE": str(secret)}).pg_password == "hush "


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"PG_PASSWORD_FILE=.*/absent: .*No such file"):
        Settings.from_env({"PG_PASSWORD_FILE": str(tmp_path / "absent")})


def test_a_value_and_its_file_contradict_each_other(tmp_path: Path) -> None:
    (tmp_path / "port").write_text("7000")
    with pytest.raises(SettingsError, match="PORT and PORT_FILE are both set"):
        Settings.from_env({"PORT": "7000", "PORT_FILE": str(tmp_path / "port")})


def test_pg_variables_make_a_connection_url_with_awkward_characters_quoted() -> None:
    settings = Settings.from_env({"PG_HOST": "db.example", "PG_USER": "a@b", "PG_PASSWORD": "p/w:d?", "PG_DB": "my db"})
    assert not settings.embedded
    assert settings.database_dsns == ("postgresql://a%40b:p%2Fw%3Ad%3F@db.example:5432/my%20db?sslmode=disable",)


def test_tls_is_verified_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGSSLROOTCERT", str(tmp_path / "root.crt"))
    environ = {"PG_HOST": "db", "PG_USE_SSL": "true"}
    assert Settings.from_env(environ).database_dsns[0].endswith("?sslmode=verify-full")
    lenient = Settings.from_env(environ | {"PG_SSL_REJECT_UNAUTHORIZED": "false"})
    assert lenient.database_dsns[0].endswith("?sslmode=require")


def test_a_socket_directory_and_an_ipv6_address_are_hosts_too() -> None:
    by_socket = Settings.from_env({"PG_HOST": "/run/postgresql", "PG_PORT": "5433"})
    assert by_socket.database_dsns == ("postgresql://postgres@/postgres?host=%2Frun%2Fpostgresql&port=5433",)
    by_ipv6 = Settings.from_env({"PG_HOST": "::1"})
    assert by_ipv6.database_dsns == ("postgresql://postgres@[::1]:5432/postgres?sslmode=disable",)


def test_database_urls_win_and_may_each_name_several_hosts() -> None:
    one, two = "postgresql://u@a:1,b:2/db", "postgres://v@c/db"
    settings = Settings.from_env({"DATABASE_URLS": f"{one}, {two}", "PG_HOST": "elsewhere"})
    assert settings.database_dsns == (one, two)
    with pytest.raises(SettingsError, match="expected postgresql:// URLs"):
        Settings.from_env({"DATABASE_URLS": "mysql://u@a/db"})


def test_several_encryption_keys_are_kept_in_order() -> None:
    settings = Settings.from_env({"QUEEN_ENCRYPTION_KEY": f"{KEY}, {KEY.upper()}"})
    assert settings.queen_encryption_key == (KEY, KEY.upper())


@pytest.mark.parametrize("wrong", ["short", "z" * 64, f"{KEY},short", " ".join("0123456789abcdef" * 4)])
def test_a_wrong_encryption_key_is_refused_without_showing_it(wrong: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.from_env({"QUEEN_ENCRYPTION_KEY": wrong})
    assert "expected keys of 64 hexadecimal digits" in str(refused.value)
    assert wrong not in str(refused.value)


def test_secrets_are_not_printed_with_the_settings() -> None:
    settings = Settings.from_env(
        {"PG_PASSWORD": "hush", "QUEEN_ENCRYPTION_KEY": KEY, "DATABASE_URLS": "postgresql://u:hush@h/d"}
    )
    assert "hush" not in repr(settings)
    assert KEY not in repr(settings)
    assert "port=6632" in repr(settings)


def test_settings_go_through_variables_unchanged() -> None:
    settings = Settings.from_env(
        {
            "PORT": "7000",
            "PG_USE_SSL": "true",
            "PG_PASSWORD": "hush",
            "DATABASE_URLS": "postgresql://u@a:1,b:2/db,postgresql://v@c/db",
            "QUEEN_ENCRYPTION_KEY": f"{KEY},{KEY}",
            "QUEEN_DATA_DIR": "~/somewhere",
            "NUM_WORKERS": "3",
        }
    )
    assert settings.queen_data_dir == Path.home() / "somewhere"
    assert Settings.from_env(settings.to_env()) == settings


def test_settings_cannot_be_changed() -> None:
    name = "port"
    with pytest.raises(AttributeError):
        setattr(Settings.from_env({}), name, 1)


def test_every_setting_is_described() -> None:
    for item in describe_settings():
        assert item.meaning.endswith("."), item.field
        assert "|" not in item.meaning + item.default_text + item.kind.name, item.field


def test_the_settings_page_is_up_to_date() -> None:
    page = Path(__file__).parents[1] / "docs" / "settings.md"
    assert page.read_text() == settings_page(), "run `make docs`"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("queen-b", ("queen-b", None)),
        ("queen-b:7000", ("queen-b", 7000)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("fd00::1", ("fd00::1", None)),
        ("[fd00::1]", ("fd00::1", None)),
        ("[fd00::1]:65535", ("fd00::1", 65535)),
    ],
)
def test_a_peer_is_a_host_with_or_without_a_port(text: str, parts: tuple[str, int | None]) -> None:
    assert split_host_port(text) == parts
    settings = Settings.from_env({"QUEEN_UDP_PEERS": f"other, {text}"})
    assert settings.queen_udp_peers == ("other", text)
    assert Settings.from_env(settings.to_env()) == settings


@pytest.mark.parametrize("text", [",", "a.example:6632", "https://a.example", "*.example", "::1", "[::1]:6632", "a/b"])
def test_what_is_in_no_host_header_is_refused_as_an_allowed_host(text: str) -> None:
    with pytest.raises(SettingsError, match="ALLOWED_HOSTS="):
        Settings.from_env({"ALLOWED_HOSTS": text})
    assert Settings.from_env({"ALLOWED_HOSTS": "a.example, [::1],*"}).allowed_hosts == ("a.example", "[::1]", "*")


@pytest.mark.parametrize(
    "text", [",", "a,,b", "host:", "host:0", "host:65536", "host:port", ":6633", "[fd00::1", "[fd00::1]x", "a b", "u@h"]
)
def test_what_is_not_a_host_is_refused_as_a_peer(text: str) -> None:
    with pytest.raises(SettingsError, match="QUEEN_UDP_PEERS="):
        Settings.from_env({"QUEEN_UDP_PEERS": text})


def test_peers_over_http_are_urls() -> None:
    settings = Settings.from_env({"QUEEN_PEERS": "http://a:6632/, https://b/queen"})
    assert settings.queen_peers == ("http://a:6632", "https://b/queen")
    for wrong in ("a:6632", "ftp://a", "http://", "http://a?x=1", "http://a,"):
        with pytest.raises(SettingsError, match="QUEEN_PEERS="):
            Settings.from_env({"QUEEN_PEERS": wrong})


def test_write_modes_and_how_long_a_log_is_kept() -> None:
    environ = {"NAMESPACE_MODES": "payments:buffered, a:b:sync", "WAL_RETENTION": "1h30m", "WAL_DIR": "/wal"}
    settings = Settings.from_env(environ)
    assert settings.namespace_modes == (("payments", "buffered"), ("a:b", "sync"))
    assert (settings.wal_retention, settings.wal_path) == (5400, Path("/wal"))
    assert Settings.from_env({"WAL_RETENTION": "90"}).wal_retention == 90
    assert Settings.from_env({"FILE_BUFFER_DIR": "/spool"}).wal_path == Path("/spool/topics")
    for variable, wrong in (("NAMESPACE_MODES", "payments:fast"), ("WAL_RETENTION", "soon"), ("WAL_RETENTION", "-1")):
        with pytest.raises(SettingsError, match=variable):
            Settings.from_env({variable: wrong})
