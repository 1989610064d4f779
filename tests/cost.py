"""A pytest plugin: what each test costs, in CPU seconds of this process and of those that it started and waited for.

A process that holds thousands of compiled programs spends more time in the garbage collector and in malloc than in
tests: after every MOST_PROGRAMS, those that no test holds are dropped.

`--cost-to FILE` writes all as JSON and prints the slowest 20; `--budget FILE` prints them, too, and fails the run if
all come to more than a quarter above the sum committed there. A shared machine can be half as fast as an hour before,
in CPU time, too. Each process therefore times a fixed loop every half minute. Where its median is above the budget's,
the budget grows as much.
"""

import gc
import json
import resource
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import pytest

MOST_PROGRAMS = 500
SLOWEST = 20
ALLOWED = 1.25  # times the budget
COMPILING = "/jax/core/compile/backend_compile_duration"
TRACING = ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration")
COST, PACE = "cost", "pace"
PACE_EVERY_S = 30
FIELDS = ("cpu_s", "cpu_s_of_children", "trace_s", "compile_s", "programs", "processes")


class Spent:
    """What this process has spent so far."""

    def __init__(self) -> None:
        self._events = dict.fromkeys(FIELDS[2:], 0.0)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        sys.addaudithook(self._on_audit)
        self._before = self._now()
        self._next_pace_s = 0.0
        self._next_drop = MOST_PROGRAMS

    def drop_programs(self) -> None:
        """Those that jax alone holds, if there are many new ones; the garbage collector skips all that is left."""
        if self._events["programs"] >= self._next_drop:
            self._next_drop = self._events["programs"] + MOST_PROGRAMS
            jax.clear_caches()
            gc.collect()
            gc.freeze()

    def paces(self) -> list[float]:
        """CPU seconds of a fixed loop, if it has not been timed for half a minute."""
        if time.monotonic() < self._next_pace_s:
            return []
        before = time.process_time()
        sum(i * i for i in range(200_000))
        self._next_pace_s = time.monotonic() + PACE_EVERY_S
        return [time.process_time() - before]

    def since(self) -> list[float]:
        """By FIELDS, since the call before this one."""
        now = self._now()
        found = [round(one - other, 3) for one, other in zip(now, self._before, strict=True)]
        self._before = now
        return found

    def _now(self) -> list[float]:
        own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        of_children = children.ru_utime + children.ru_stime
        return [own.ru_utime + own.ru_stime + of_children, of_children, *self._events.values()]

    def _on_duration(self, event: str, seconds: float, **_: Any) -> None:
        if event == COMPILING:
            self._events["compile_s"] += seconds
            self._events["programs"] += 1
        elif event in TRACING:
            self._events["trace_s"] += seconds

    def _on_audit(self, event: str, _: Any) -> None:
        self._events["processes"] += event in ("subprocess.Popen", "os.fork", "os.posix_spawn")


class Costs:
    """Gathers what workers report."""

    def __init__(self, config: pytest.Config):
        self._cost_to: str | None = config.getoption("--cost-to")
        self._budget: str | None = config.getoption("--budget")
        self._of_test: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(FIELDS))
        self._paces: list[float] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, found in report.user_properties:
            if name == COST:
                so_far = self._of_test[report.nodeid]
                self._of_test[report.nodeid] = [a + b for a, b in zip(so_far, found, strict=True)]
            if name == PACE:
                self._paces += found

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._is_above():
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._cost_to and not self._budget:
            return
        terminalreporter.section(
            f"slowest of {len(self._of_test)} tests: {self._total:.0f} CPU seconds in all, {1e3 * self._pace_s:.1f} ms "
            "for a loop"
        )
        for name, cost in sorted(self._of_test.items(), key=lambda item: -item[1][0])[:SLOWEST]:
            terminalreporter.line(f"{cost[0]:7.1f} s  {name}")
        if self._cost_to:
            tests = {name: dict(zip(FIELDS, cost, strict=True)) for name, cost in sorted(self._of_test.items())}
            Path(self._cost_to).write_text(json.dumps(tests, indent=1) + "\n")
        if self._is_above():
            terminalreporter.line(
                f"over budget: {self._total:.0f} CPU seconds are more than {ALLOWED} times the "
                f"{self._most / ALLOWED:.0f} of {self._budget} at this speed: make tests cheaper, or say why they may "
                "cost more there",
                red=True,
            )

    @property
    def _total(self) -> float:
        return sum(cost[0] for cost in self._of_test.values())

    @property
    def _pace_s(self) -> float:
        return statistics.median(self._paces or [0.0])

    @property
    def _most(self) -> float:
        """The CPU seconds allowed on a machine as slow as this one was."""
        assert self._budget is not None
        budget = json.loads(Path(self._budget).read_text())
        slower = max(1.0, self._pace_s / float(budget["loop_s"]))
        return ALLOWED * float(budget["cpu_s"]) * slower

    def _is_above(self) -> bool:
        return self._budget is not None and self._total > self._most


SPENT = pytest.StashKey[Spent]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cost-to", metavar="FILE", help="write what each test costs, as JSON")
    parser.addoption(
        "--budget",
        metavar="FILE",
        help="JSON: cpu_s that all may come to, and a quarter, where a fixed loop takes loop_s",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(config), "costs")
    config.stash[SPENT] = Spent()


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[SPENT].since()  # imports are no test's


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    spent = item.config.stash[SPENT]
    if report.when == "teardown":
        spent.drop_programs()
    report.user_properties += [(COST, spent.since()), (PACE, spent.paces())]
    return report
