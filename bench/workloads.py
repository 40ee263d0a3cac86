"""The workloads: what is prepared, what is measured, and in which company.

Workloads of one group share a fresh server, because their numbers are compared with each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.generator import OptionValue
from bench.settings import Settings

PUSH_SIZES = (1, 10, 100, 1000)
PARTITION_COUNTS = (1, 100, 10_000)
POP_PER_SECOND = 300_000  # messages prepared per second of popping; a faster server drains them early
POP_SINGLE_PER_SECOND = 20_000
LATENCY_PER_SECOND = 10_000
STORED_MESSAGES = 200_000
PREPARE_AT_MOST = 3_000_000
POP_WARMUP_SECONDS = 0.3  # short, because it uses up what was prepared
PREPARE_REQUEST = 1000


@dataclass(frozen=True)
class Load:
    """One call of the generator."""

    mode: str
    options: dict[str, OptionValue]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every workload has; `once` ones are not repeated, `needs` names one that must run before."""

    name: str
    group: str
    title: str
    once: bool = False
    needs: str = ""


@dataclass(frozen=True, kw_only=True)
class LoadWorkload(Workload):
    """Driven by the generator; `latency` names the histogram that is shown."""

    measure: Load
    latency: str
    prepare: tuple[Load, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LimitWorkload(Workload):
    """The bare asyncpg loop on the same PostgreSQL."""

    segment_size: int


@dataclass(frozen=True, kw_only=True)
class CommitWorkload(Workload):
    """One fsynced single-row commit on the same PostgreSQL."""


@dataclass(frozen=True, kw_only=True)
class StorageWorkload(Workload):
    """Bytes on disk per message."""

    fill: Load


def all_workloads(s: Settings) -> list[Workload]:
    """Every workload, in the order in which a run does them."""
    return [
        *push_workloads(s),
        *pop_workloads(s),
        *partition_workloads(s),
        *group_workloads(s),
        *latency_workloads(s),
        storage_workload(),
        mixed_workload(s),
    ]


def chosen(workloads: Sequence[Workload], only: Sequence[str]) -> list[Workload]:
    """Those that `--only` names, by workload or by group; all when it names none."""
    known = {each.name for each in workloads} | {each.group for each in workloads}
    unknown = [name for name in only if name not in known]
    if unknown:
        names = ", ".join(sorted(known))
        raise ValueError(f"--only: no workload or group {', '.join(unknown)}; there are: {names}")
    wanted = [each for each in workloads if not only or each.name in only or each.group in only]
    needed = {each.needs for each in wanted}
    return [each for each in workloads if each in wanted or each.name in needed]


def push_workloads(s: Settings) -> list[Workload]:
    """Each push next to the limit for segments of its size, so that a noisy minute hits both."""
    workloads: list[Workload] = []
    for size in PUSH_SIZES:
        limit = LimitWorkload(name=f"limit{size}", group="push", title=f"limit: segments of {size}", segment_size=size)
        workloads += [limit, push_workload(s, f"push{size}", "push", f"push {size}", size, s.partitions)]
    return workloads


def push_workload(s: Settings, name: str, group: str, title: str, size: int, partitions: int) -> Workload:
    return LoadWorkload(
        name=name,
        group=group,
        title=title,
        measure=load("push", queue=name, messages=size, partitions=partitions, **timing(s)),
        latency="push_ms",
        # Every partition exists before the clock starts: creating them is not what is measured.
        prepare=(fill(name, partitions, partitions, per_request=1),),
    )


def pop_workloads(s: Settings) -> list[Workload]:
    many, few = prepared(s, POP_PER_SECOND), prepared(s, POP_SINGLE_PER_SECOND)
    consumers = pop_timing(s) | {"connections": 16}
    return [
        pop_workload(s, "pop1", "pop", "pop 1 autoAck", few, s.partitions, batch=1),
        pop_workload(s, "pop100", "pop", "pop 100 autoAck", many, s.partitions),
        pop_workload(s, "pop1000", "pop", "pop 1000 autoAck", many, s.partitions, batch=1000),
        LoadWorkload(
            name="pop-ack",
            group="pop",
            title="pop 100 + batch ack, 16 connections",
            measure=load("pop-ack", queue="pop-ack", batch=100, expect=many, **consumers),
            latency="pop_ms",
            prepare=(fill("pop-ack", many, s.partitions),),
        ),
    ]


def pop_workload(
    s: Settings,
    name: str,
    group: str,
    title: str,
    total: int,
    partitions: int,
    *,
    batch: int = 100,
    groups: int = 0,
    prepare_request: int = PREPARE_REQUEST,
) -> Workload:
    return LoadWorkload(
        name=name,
        group=group,
        title=title,
        measure=load("pop", queue=name, batch=batch, expect=total, groups=groups, **pop_timing(s)),
        latency="pop_ms",
        prepare=(fill(name, total, partitions, prepare_request),),
    )


def partition_workloads(s: Settings) -> list[Workload]:
    """100 at a time; to be popped, every partition holds whole batches, or pops would return less."""
    pushes = [
        push_workload(s, f"push100-p{count}", "partitions", f"push 100, {count:,} partitions", 100, count)
        for count in PARTITION_COUNTS
    ]
    enough = min(prepared(s, POP_PER_SECOND), 1_000_000)
    pops = [
        pop_workload(
            s,
            f"pop100-p{count}",
            "partitions",
            f"pop 100, {count:,} partitions",
            max(enough, 100 * count),
            count,
            prepare_request=100,
        )
        for count in PARTITION_COUNTS
    ]
    return [*pushes, *pops]


def group_workloads(s: Settings) -> list[Workload]:
    total = prepared(s, POP_PER_SECOND)
    return [
        pop_workload(s, "pop100-g1", "groups", "pop 100, 1 group", total, s.partitions, groups=1),
        pop_workload(s, "pop100-g10", "groups", "pop 100, 10 groups", total // 4, s.partitions, groups=10),
    ]


def latency_workloads(s: Settings) -> list[Workload]:
    """One connection each; the commit comes first because the push is measured in commits."""
    total = int(LATENCY_PER_SECOND * (s.seconds + s.warmup))
    single = {"seconds": s.seconds, "warmup": s.warmup}
    push = load("latency-push", queue="latency-push", **single)
    pop = load("latency-pop", queue="latency-pop", expect=total, **single)
    ack = load("latency-ack", queue="latency-ack", expect=total, **single)
    park = load("park", queue="park", seconds=s.seconds)
    idle = load("park", queue="park-idle", seconds=s.park_idle_seconds, idle=3, pairs=8)
    fill_pop, fill_ack = (fill("latency-pop", total, 1),), (fill("latency-ack", total, 1),)
    return [
        CommitWorkload(name="commit", group="latency", title="one fsynced single-row commit"),
        latency_workload("latency-push", "push 1, one connection", push, "push_ms", needs="commit"),
        latency_workload("latency-pop", "pop 1 autoAck, one connection", pop, "pop_ms", fill_pop),
        latency_workload("latency-ack", "ack 1, one connection", ack, "ack_ms", fill_ack),
        latency_workload("park", "push to parked pop", park, "pop_ms"),
        latency_workload("park-idle", "push to parked pop, after 3 s idle", idle, "pop_ms"),
    ]


def latency_workload(
    name: str, title: str, measure: Load, latency: str, prepare: tuple[Load, ...] = (), needs: str = ""
) -> Workload:
    return LoadWorkload(
        name=name,
        group="latency",
        title=title,
        needs=needs,
        measure=measure,
        latency=latency,
        prepare=prepare,
    )


def storage_workload() -> Workload:
    return StorageWorkload(
        name="storage",
        group="storage",
        title="stored bytes, push 100, 1 partition",
        fill=fill("storage", STORED_MESSAGES, 1, per_request=100),
    )


def mixed_workload(s: Settings) -> Workload:
    """Paced: without a pace, producers and consumers only fight over the CPU and the backlog says nothing."""
    return LoadWorkload(
        name="mixed",
        group="mixed",
        title=f"push 100 and pop 100 + ack at once, {s.mixed_seconds:g} s",
        measure=load(
            "mixed",
            queue="mixed",
            messages=100,
            batch=100,
            partitions=s.partitions,
            connections=s.connections,
            rate=s.mixed_rate,
            seconds=s.mixed_seconds,
            warmup=2,
        ),
        latency="push_ms",
        once=True,
    )


def load(mode: str, **options: OptionValue) -> Load:
    return Load(mode, options)


def fill(queue: str, total: int, partitions: int, per_request: int = PREPARE_REQUEST) -> Load:
    """Puts messages evenly into the partitions, as fast as it goes."""
    return load(
        "push",
        queue=queue,
        total=total,
        messages=per_request,
        partitions=partitions,
        round_robin=True,
        warmup=0,
        seconds=600,
    )


def timing(s: Settings) -> dict[str, OptionValue]:
    return {"connections": s.connections, "seconds": s.seconds, "warmup": s.warmup}


def pop_timing(s: Settings) -> dict[str, OptionValue]:
    return timing(s) | {"warmup": POP_WARMUP_SECONDS}


def prepared(s: Settings, per_second: int) -> int:
    """How many messages a pop of this speed could take in the time, in whole thousands."""
    return min(PREPARE_AT_MOST, int(per_second * (s.seconds + POP_WARMUP_SECONDS)) // 1000 * 1000)
