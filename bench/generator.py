"""Builds and runs the load generator, and reads its output."""

import asyncio
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

HERE = Path(__file__).resolve().parent
BINARY = HERE / "bin" / "load"

OptionValue = str | int | float | bool


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds; quantiles are exact to 0.8 %."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Errors(msgspec.Struct, frozen=True):
    """What the server did wrong while it was driven."""

    http: int
    unexpected: int
    connection: int
    first: str

    @property
    def total(self) -> int:
        return self.http + self.unexpected + self.connection


class Second(msgspec.Struct, frozen=True, rename={"pushed": "in", "acked": "out"}):
    """One second of a mixed run: messages in, out, and pushed but not yet acknowledged at its end."""

    pushed: int
    acked: int
    backlog: int


class LoadResult(msgspec.Struct, frozen=True):
    """What the generator counted in the measured time."""

    mode: str
    connections: int
    partitions: int
    seconds: float
    drained: bool
    requests: int
    requests_per_s: float
    messages: int
    messages_per_s: float
    pushed: int
    popped: int
    acked: int
    empty: int
    total_pushed: int
    total_popped: int
    total_acked: int
    cpu_s: float
    errors: Errors
    push_ms: Latency
    pop_ms: Latency
    ack_ms: Latency
    series: list[Second]


class LoadError(Exception):
    """The generator could not be built or run, or the server sent unexpected responses."""


def nothing() -> None:
    """Default for the two events of a run."""


class Generator:
    """Drives the server at one address."""

    def __init__(self, host: str, port: int) -> None:
        self._address = ["--host", host, "--port", str(port)]
        build()

    async def run(
        self,
        mode: str,
        options: Mapping[str, OptionValue],
        on_start: Callable[[], None] = nothing,
        on_stop: Callable[[], None] = nothing,
    ) -> LoadResult:
        """Runs one load to its end; the two callbacks enclose the measured time."""
        arguments = [mode, *self._address, *as_flags(options)]
        process = await asyncio.create_subprocess_exec(
            str(BINARY), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            complaints, output = await asyncio.gather(
                watch_events(process.stderr, on_start, on_stop), read_all(process.stdout)
            )
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == 2 or not output:
            raise LoadError(f"`load {' '.join(arguments)}` failed: {complaints or 'no output'}")
        return msgspec.json.decode(output, type=LoadResult)


def as_flags(options: Mapping[str, OptionValue]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not False:
            flags += [flag, str(value)]
    return flags


async def watch_events(
    stream: asyncio.StreamReader | None, on_start: Callable[[], None], on_stop: Callable[[], None]
) -> str:
    """Calls back at `start` and `stop`; anything else on stderr is a complaint, and is returned."""
    complaints: list[str] = []
    if stream is None:
        return ""
    async for raw in stream:
        line = raw.decode().strip()
        if line == "start":
            on_start()
        elif line == "stop":
            on_stop()
        else:
            complaints.append(line)
    return "\n".join(complaints[:3])


async def read_all(stream: asyncio.StreamReader | None) -> bytes:
    return await stream.read() if stream is not None else b""


def build() -> Path:
    """Compiles the generator when its binary is missing or older than a source."""
    sources = [HERE / "load.c", *HERE.glob("load/*.h")]
    if BINARY.exists() and BINARY.stat().st_mtime >= max(source.stat().st_mtime for source in sources):
        return BINARY
    BINARY.parent.mkdir(exist_ok=True)
    command = ["cc", "-O2", "-Wall", "-Wextra", "-pthread", "-o", str(BINARY), str(HERE / "load.c")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LoadError("the load generator needs a C compiler: install one that is called `cc`") from error
    if done.returncode != 0:
        raise LoadError(f"`{' '.join(command)}` failed:\n{done.stderr}")
    return BINARY


class SampleMessage(msgspec.Struct, frozen=True):
    """A message as the generator sends it."""

    transaction_id: str = msgspec.field(name="transactionId")
    payload: msgspec.Raw = msgspec.Raw()


def sample_messages(count: int) -> list[SampleMessage]:
    """Messages of the same kind that the load modes send."""
    lines = subprocess.run(
        [str(build()), "sample", "--total", str(count)], capture_output=True, check=True
    ).stdout.splitlines()
    decoder = msgspec.json.Decoder(SampleMessage)
    return [decoder.decode(line) for line in lines]
