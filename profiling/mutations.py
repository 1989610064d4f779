"""Do the tests notice faults? python profiling/mutations.py [NAMES…] [--suite COMMIT] [--clean]

Introduces the faults of `mutation_table.py` one after another, in a copy of the tracked files, and runs the tests that
each one names until the first test fails. NAMES: only these faults. --suite: the same faults in the code of a commit,
with its tests, to compare an older suite with the newer one. --clean: no faults; runs all these tests once, which must
pass. Writes results/mutations.json, which has a place for both suites; exit code 1 if a fault is not noticed.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mutation_table import MUTATIONS, Mutation
from results_file import RESULTS, write_result

from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.measure.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1200  # time limit of the tests of one fault
_A_TEST_FAILED = 1  # pytest's exit code; with 2 and more, it could not run the tests


class Ended(NamedTuple):
    """The result of a run of pytest."""

    code: int | None  # None: it was still running at the limit
    seconds: float
    output: str

    @property
    def first_failed(self) -> str:
        """The first failed test, as pytest names it; empty if none failed."""
        lines = [line for line in self.output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        found = lines[0].partition(" ")[2].partition(" - ")[0] if lines else ""
        return found if self.code == _A_TEST_FAILED else ""


def main() -> None:
    """Introduce all faults and write the result."""
    parser = CommandParser(prog="python profiling/mutations.py", description=__doc__)
    parser.add_argument("names", metavar="NAMES", nargs="*", help="of faults (default: all)")
    parser.add_argument("--suite", metavar="COMMIT", help="commit with the code and tests to use")
    parser.add_argument("--clean", action="store_true", help="run the tests without a fault")
    arguments = parser.parse_args()
    chosen = _chosen(arguments.names)
    is_older = arguments.suite is not None
    commit = _commit(arguments.suite) if is_older else provenance()["commit"]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        _copy_files(copy, commit if is_older else None)
        if arguments.clean:
            _run_clean(copy, chosen, is_older)
            return
        found: dict[str, dict[str, Any]] = {}
        for number, mutation in enumerate(chosen, start=1):
            found[mutation.name] = result = _try(mutation, copy, is_older)
            print(f"{number}/{len(chosen)} {mutation.name}: {_as_text(result)}", flush=True)
    column = {"commit": commit, "faults": found}
    write_result("mutations", _with_other_suite(column, is_older), quick=len(chosen) < len(MUTATIONS))
    counts = Counter(result["outcome"] for result in found.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    missed = [name for name, result in found.items() if result["outcome"] != "noticed"]
    if missed:
        sys.exit(f"not noticed, or not tried: {', '.join(missed)}")


def _chosen(names: Sequence[str]) -> list[Mutation]:
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"NAMES={name} is no fault: choose of {', '.join(by_name)}")
    return [by_name[name] for name in names] or list(MUTATIONS)


def _commit(name: str) -> str:
    found = subprocess.run(["git", "rev-parse", "--verify", f"{name}^{{commit}}"], cwd=ROOT, capture_output=True)
    if found.returncode:
        raise ConfigError(f"--suite={name} is no commit of this repository: name one")
    return found.stdout.decode().strip()


def _copy_files(copy: Path, commit: str | None) -> None:
    """Copy the tracked files, as they are here or in a commit."""
    if commit is None:
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        command = ["tar", "--create", "--null", "--files-from=-"]
        archive = subprocess.run(command, cwd=ROOT, input=files, capture_output=True, check=True).stdout
    else:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "--extract"], cwd=copy, input=archive, check=True)


def _tests_of(mutation: Mutation, is_older: bool) -> Sequence[str]:
    return mutation.older if is_older and mutation.older else mutation.tests


def _try(mutation: Mutation, copy: Path, is_older: bool) -> dict[str, Any]:
    """Return the outcome of a fault: noticed, not noticed, or why this is unknown."""
    about = {"package": mutation.package, "breaks": mutation.breaks, "tests": list(_tests_of(mutation, is_older))}
    file = copy / "moe_jax" / mutation.file
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if text.count(mutation.old) != 1:
        return about | {"outcome": f"its text stands {text.count(mutation.old)} times in the file"}
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        ended = _run_tests(["-x", *about["tests"]], copy, LIMIT_S)
    finally:
        file.write_text(text, encoding="utf-8")
    first, seconds = ended.first_failed, round(ended.seconds, 1)
    if first:
        return about | {"outcome": "noticed", "by": first, "seconds": seconds}
    if ended.code == 0:
        return about | {"outcome": "not noticed", "seconds": seconds}
    how = f"no end after {LIMIT_S} s" if ended.code is None else f"pytest ended with exit code {ended.code}"
    return about | {"outcome": how, "seconds": seconds, "said": ended.output.strip()[-300:]}


def _run_clean(copy: Path, chosen: Sequence[Mutation], is_older: bool) -> None:
    """Run every selection of tests once. Ends the command if a test fails."""
    selections = dict.fromkeys(tuple(_tests_of(mutation, is_older)) for mutation in chosen)
    failed = []
    for selection in selections:
        ended = _run_tests(selection, copy, LIMIT_S)
        print(f"{' '.join(selection)}: exit code {ended.code} after {ended.seconds:.0f} s", flush=True)
        failed += [] if ended.code == 0 else [ended.first_failed or " ".join(selection)]
    if failed:
        sys.exit(f"without a fault these fail: {', '.join(failed)}")


def _run_tests(arguments: Sequence[str], copy: Path, limit_s: float) -> Ended:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    # A file that changes twice within a second and keeps its size would not be compiled again.
    environ = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have started and left
            process.wait()
        seconds = time.monotonic() - began
        output.seek(0)
        return Ended(code, seconds, output.read().decode(errors="replace"))


def _as_text(result: dict[str, Any]) -> str:
    by = f" by {result['by']}" if "by" in result else ""
    return f"{result['outcome']}{by}" + (f" after {result['seconds']} s" if "seconds" in result else "")


def _with_other_suite(column: dict[str, Any], is_older: bool) -> dict[str, Any]:
    """Return the new values together with those of the other suite, if it was run before."""
    own, other = ("older_suite", "suite") if is_older else ("suite", "older_suite")
    try:
        before = json.loads((RESULTS / "mutations.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        before = {}
    columns = {own: column} | ({other: before[other]} if other in before else {})
    summary = {
        name: {
            "faults": len(each["faults"]),
            "noticed": sum(result["outcome"] == "noticed" for result in each["faults"].values()),
        }
        for name, each in sorted(columns.items(), reverse=True)
    }
    return {"summary": summary, **{name: columns[name] for name in summary}}


if __name__ == "__main__":
    run_command(main)
