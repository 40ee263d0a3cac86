"""What tests stand on: a real PostgreSQL, a fresh database each, and a real server in front of it."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import uvloop
from hypothesis import settings

from queen.embedded import EmbeddedPostgres
from queen.server.worker import Worker
from queen.settings import Settings
from tests.redis.redis_server import RedisServer
from tests.support.api import Api
from tests.support.array_types import ask_once_for_array_types
from tests.support.databases import fresh_database, make_template
from tests.support.proxy import Proxy, proxied
from tests.support.together import SPARK, ByGroup, group_of, rank

# A busy machine is no fault of the code; how long things may take is for the benchmarks to say.
# The same examples in every run: whether a commit passes is not a matter of luck. `make soak` draws new ones, and many.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("soak", deadline=None, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
ask_once_for_array_types()

# Nothing lives long enough to need a vacuum, which would visit the database of each test every few seconds.
_QUICK = {"fsync": "off", "full_page_writes": "off", "checkpoint_timeout": "1h", "autovacuum_naptime": "1h"}
_MEMORY = Path("/dev/shm")
_MEMORY_NEEDED = 4 << 30
_TEST_SECONDS = 120
"""As pyproject.toml says, unless a test says otherwise."""

StartServer = Callable[..., Awaitable[Api]]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several processes, one has all tests that belong together."""
    return ByGroup(config, log) if config.getvalue("dist") == "loadgroup" else None


class FailuresAtOnce:
    """Says which test failed when it does: a run takes minutes, and may be cut off before its summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            # On a line of its own, also between the dots of several processes.
            self._terminal.write_line(f"\n! {report.nodeid} ({report.when})")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Keep temporary files of this run, and of all it starts, in memory: a sixth of a server's life was the disk."""
    if config.option.basetemp or "TMPDIR" in os.environ or not os.access(_MEMORY, os.W_OK | os.X_OK):
        return
    if shutil.disk_usage(_MEMORY).free < _MEMORY_NEEDED:
        return
    for left_behind in _MEMORY.glob("queen-tests-[0-9]*"):
        if not Path("/proc", left_behind.name.rpartition("-")[2]).exists():
            shutil.rmtree(left_behind, ignore_errors=True)
    directory = _MEMORY / f"queen-tests-{os.getpid()}"
    directory.mkdir()
    # PostgreSQL and workers of root run as another user, who has to pass through.
    directory.chmod(0o711)
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    config.option.basetemp = str(directory / "t")
    config.add_cleanup(functools.partial(shutil.rmtree, directory, ignore_errors=True))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_itemcollected(item: pytest.Item) -> None:
    if SPARK in getattr(item, "fixturenames", ()) and group_of(item.nodeid) != SPARK:
        raise pytest.UsageError(f"{item.nodeid} uses Spark: name its module in tests/support/together.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank(item.nodeid))
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _in_time(item.obj, item.get_closest_marker("timeout"))


def pytest_collection_finish() -> None:
    # As workers do: what is loaded by now stays, and need not be looked through for cycles again and again.
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what was captured, which may have lone surrogates: xdist sends reports as UTF-8, and would end the run."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def _in_time(test: Callable[..., Awaitable[None]], mark: pytest.Mark | None) -> Callable[..., Awaitable[None]]:
    """A test that hangs fails where it waits, before pytest-timeout ends the process with all tests it was to run."""
    limit = 0.9 * (mark.args[0] if mark is not None else _TEST_SECONDS)

    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(limit):
            await test(*args, **kwargs)

    return run


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the event loop that the server runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """One PostgreSQL for all tests that do not harm it; nobody pulls its plug, so nothing need survive that."""
    directory = tmp_path_factory.mktemp("postgres") / "pg"
    with EmbeddedPostgres(directory, settings=_QUICK) as server:
        asyncio.run(make_template(server))
        yield server


@pytest.fixture
async def dsn(postgres: EmbeddedPostgres) -> AsyncIterator[str]:
    """A fresh, migrated database of its own for each test."""
    async with fresh_database(postgres) as dsn:
        yield dsn


@pytest.fixture
async def connection(dsn: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A plain connection to the test's database."""
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


@pytest.fixture
async def proxy(dsn: str) -> AsyncIterator[Proxy]:
    """Stands between a server and the test's database, for those who want to come between them."""
    async with proxied(dsn) as proxy:
        yield proxy


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    """A Redis of the test's own."""
    server = RedisServer(tmp_path / "redis")
    await server.start()
    yield server
    await server.kill()


@pytest.fixture
async def start_server(dsn: str, tmp_path: Path) -> AsyncIterator[StartServer]:
    """Starts servers on the test's database; settings are given by field name. Stopped with the test.

    Servers with `num_workers=2` and worker ids 0 and 1 wake each other as the workers of one host do.
    """
    async with AsyncExitStack() as stack:

        async def start(worker_id: int = 0, **overrides: object) -> Api:
            values: dict[str, object] = {
                "num_workers": 1,
                "host": "127.0.0.1",
                "database_urls": (dsn,),
                "queen_data_dir": tmp_path / "data",
            }
            # What a test asks for is what it has just done, however long the answer takes.
            values["stats_cache_ms"] = 0
            # A pop that was not woken fails its test, and is not found by polling.
            values["pop_safety_poll_ms"] = 600_000
            settings = Settings.from_env({}, **(values | overrides))
            worker = Worker(settings, worker_id, tmp_path, port=0)
            await worker.start()
            stack.push_async_callback(worker.stop)
            api = Api(f"http://127.0.0.1:{worker.port}", worker)
            stack.push_async_callback(api.close)
            return api

        yield start


@pytest.fixture
async def api(start_server: StartServer) -> Api:
    """A server with default settings, and the calls to make to it."""
    return await start_server()
