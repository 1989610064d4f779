"""Where the time of the tests goes, file by file: python profiling/test_costs.py COSTS [OLDER]

COSTS is a file that `pytest --cost-to COSTS` wrote: CPU seconds of each test, the part of them in processes that it
started, seconds spent tracing and compiling, programs compiled, and processes started. OLDER is such a file of an older
suite. Writes their sums to results/test_costs.json and prints the files that cost most.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from results_file import write_result

from moe_jax.errors import CommandParser, run_command

SHOWN = 25


def main() -> None:
    """Read, add up and write."""
    parser = CommandParser(prog="python profiling/test_costs.py", description=__doc__)
    parser.add_argument("now", metavar="COSTS")
    parser.add_argument("older", metavar="OLDER", nargs="?")
    given = {name: path for name, path in vars(parser.parse_args()).items() if path}
    suites = {name: _suite(path) for name, path in given.items()}
    for name, suite in suites.items():
        print(f"{name}: {suite['tests']} tests, {suite['cpu_s']} CPU seconds")
        for file, costs in list(suite["files"].items())[:SHOWN]:
            print(f"  {costs['cpu_s']:7.0f} s  {costs['programs']:5.0f} programs  {file}")
    write_result("test_costs", suites)


def _suite(path: str) -> dict[str, Any]:
    """Return the sums of all tests, and of each file, most expensive first."""
    tests: dict[str, dict[str, float]] = json.loads(Path(path).read_text())
    files: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, costs in tests.items():
        own = files[name.partition("::")[0]]
        own["tests"] += 1
        for key, value in costs.items():
            own[key] += value
    in_order = sorted(files.items(), key=lambda item: -item[1]["cpu_s"])
    rounded = {file: {key: round(value) for key, value in costs.items()} for file, costs in in_order}
    sums = {key: round(sum(costs[key] for costs in files.values())) for key in next(iter(rounded.values()))}
    return {**sums, "files": rounded}


if __name__ == "__main__":
    run_command(main)
