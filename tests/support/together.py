"""Which tests run in one process, one after the other, while others run beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

SPARK: Final = "spark"
"""Tests on one session. Spark gives the process of a stream ten seconds to start, which a second JVM would take."""

_SPARK_MODULES: Final = (
    *(f"tests/pipelines/test_{name}.py" for name in ("archive", "jobs", "kills", "late_rows", "lineage", "queries")),
    *(f"tests/pipelines/test_{name}.py" for name in ("queues", "remedies", "steps", "table_readers", "tables")),
    "tests/spark/sink/test_writers.py",
    *(f"tests/spark/source/test_{name}.py" for name in ("batch", "server_log", "stream", "tables")),
    "tests/spark/test_documentation.py",
    "tests/spark/test_kill_driver.py",
    # It starts a JVM of its own, beside which the shared one would be slow.
    "tests/pipelines/test_commands.py",
)

TOGETHER: Final = {
    **dict.fromkeys(_SPARK_MODULES, SPARK),
    # It waits for what it has killed, most of its two minutes.
    "tests/campaign/test_campaign.py": "campaign",
    # All scenarios of a client are one run.
    "tests/acceptance/": "acceptance",
    # One server and one Prometheus.
    "tests/deploy/test_prometheus.py": "prometheus",
    # One server and one browser.
    "tests/dashboard/": "dashboard",
    # One server, and few workers of Celery.
    "tests/celery/": "celery",
    # All pages are walked on one server.
    "tests/docs/": "docs",
    # One server.
    "tests/http/sqs/": "sqs",
    # One server on one copy of the old data.
    "tests/compat/": "compat",
    # What they prepare takes longer than the tests themselves.
    "tests/storage/test_plans.py": "plans",
    "tests/storage/test_postgres_versions.py": "versions",
    "tests/embedded/test_postgres.py": "embedded",
}
"""Groups by the paths of their tests. The longest come first: what is begun last, others have to be waited for."""

_GROUPS: Final = list(dict.fromkeys(TOGETHER.values()))

LONG: Final = (
    "tests/campaign/test_fuzz.py",
    "tests/deploy/",
    "tests/faults/",
    "tests/http/api/test_contract.py",
    "tests/cli/serve/",
    "tests/bus/test_processes.py",
    "tests/streams/",
    "tests/broker/sharding/test_clients.py",
    "tests/broker/sharding/test_commands.py",
)
"""Tests of many seconds each come before the thousands of short ones: else one of them would be the last of a run."""


def rank(nodeid: str) -> int:
    """Where a test stands in a run: groups in their order, then long tests, then all others."""
    group = group_of(nodeid)
    if group in _GROUPS:
        return _GROUPS.index(group)
    return len(_GROUPS) + (not nodeid.startswith(LONG))


def group_of(nodeid: str) -> str:
    """The group of a test; one that is in none is its own."""
    return next((group for prefix, group in TOGETHER.items() if nodeid.startswith(prefix)), nodeid)


class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
    """Gives groups of tests to processes. A test that took its process with it has failed, and is not tried again.

    Groups and long tests wait for what they started, short ones compute. Every other process begins with the short
    ones, at the end of the queue, so that there is always work for each core; they meet in the middle.
    """

    def __init__(self, config: Any, log: Any) -> None:
        super().__init__(config, log)
        # The order is ours, and not by the number of tests in a group.
        config.option.loadscopereorder = False

    def _assign_work_unit(self, node: WorkerController) -> None:
        if int(node.gateway.id.removeprefix("gw")) % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        work = self.assigned_work.pop(node)
        unfinished = [(tests, nodeid) for tests in work.values() for nodeid, done in tests.items() if not done]
        if not unfinished:
            return None
        tests: dict[str, bool]
        fatal: str
        tests, fatal = unfinished[0]
        tests[fatal] = True
        self.workqueue.update({group: tests for group, tests in work.items() if not all(tests.values())})
        for other in self.nodes:
            self._reschedule(other)
        return fatal

    def schedule(self) -> None:
        super().schedule()
        if not self.workqueue:
            # Before its last test a process waits for what comes after it: it must be told that nothing does.
            for node in self.nodes:
                node.shutdown()
