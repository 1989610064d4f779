"""A pytest plugin: what each test costs, in CPU seconds of this process and of those it started and waited for.

Prints the slowest 20. `--cost-to FILE` writes all as JSON; `--budget FILE` fails the run if they come to more than a
quarter above the committed sum. CPU time hardly depends on what else a machine does, unlike time on a clock.
"""

import json
import resource
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import pytest

SLOWEST = 20
ALLOWED = 1.25  # times the budget
COMPILING = "/jax/core/compile/backend_compile_duration"
TRACING = ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration")
COST = "cost"


class Spent:
    """What this process has spent so far: CPU seconds, seconds of tracing and compiling, programs, processes started."""

    def __init__(self) -> None:
        self.trace_s, self.compile_s, self.programs, self.processes = 0.0, 0.0, 0, 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        sys.addaudithook(self._on_audit)
        self._before = self._now()

    def since(self) -> list[float]:
        """Since the call before this one."""
        now = self._now()
        found = [round(one - other, 3) for one, other in zip(now, self._before, strict=True)]
        self._before = now
        return found

    def _now(self) -> list[float]:
        own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime
        return [sum(cpu_s), cpu_s[1], self.trace_s, self.compile_s, self.programs, self.processes]

    def _on_duration(self, event: str, seconds: float, **_: Any) -> None:
        if event == COMPILING:
            self.compile_s += seconds
            self.programs += 1
        elif event in TRACING:
            self.trace_s += seconds

    def _on_audit(self, event: str, _: Any) -> None:
        self.processes += event in ("subprocess.Popen", "os.fork", "os.posix_spawn")


FIELDS = ("cpu_s", "cpu_s_of_children", "trace_s", "compile_s", "programs", "processes")


class Costs:
    """Gathers what workers report."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._of_test: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(FIELDS))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, found in report.user_properties:
            if name == COST:
                self._of_test[report.nodeid] = [a + b for a, b in zip(self._of_test[report.nodeid], found, strict=True)]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        total = sum(cost[0] for cost in self._of_test.values())
        terminalreporter.section(f"slowest of {len(self._of_test)} tests: {total:.0f} CPU seconds in all")
        for name, cost in sorted(self._of_test.items(), key=lambda item: -item[1][0])[:SLOWEST]:
            terminalreporter.line(f"{cost[0]:7.1f} s  {name}")
        if path := self._config.getoption("--cost-to"):
            tests = {name: dict(zip(FIELDS, cost, strict=True)) for name, cost in sorted(self._of_test.items())}
            Path(path).write_text(json.dumps(tests, indent=1) + "\n")
        if (path := self._config.getoption("--budget")) and total > ALLOWED * (most := _budget(path)):
            terminalreporter.line(
                f"over budget: {total:.0f} CPU seconds, where {path} has {most:.0f}: make tests cheaper, or raise it", red=True
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        path, total = self._config.getoption("--budget"), sum(cost[0] for cost in self._of_test.values())
        if path and total > ALLOWED * _budget(path):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def _budget(path: str) -> float:
    return float(json.loads(Path(path).read_text())["cpu_s"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cost-to", help="file for the cost of each test, as JSON")
    parser.addoption("--budget", help="JSON file with the CPU seconds (cpu_s) that the tests may come to, plus a quarter")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(config), "costs")
    config.stash[SPENT] = Spent()


SPENT = pytest.StashKey[Spent]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    report.user_properties.append((COST, item.config.stash[SPENT].since()))
    return report
