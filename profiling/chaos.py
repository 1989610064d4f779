"""Does a run recover from faults, and how soon? python profiling/chaos.py [--faults N] [--kinds K,K,…]

Trains a small model under the launcher twice: while faults hit it, and undisturbed. The kinds of faults are

    kill, stop, term   random ranks get SIGKILL, SIGSTOP or SIGTERM, one, two or all, some while the run restarts
    bit, cut           the latest checkpoint has a flipped bit or a truncated file when ranks are killed
    nan                one device's copy of a parameter becomes NaN
    full               the run's disk is full, before a save or in the middle of one (a tmpfs: left out if not root)
    slow               ranks are stopped half of the time, for five seconds
    poke               strangers connect to all ports of all processes, send nothing, garbage or half a message, and
                       leave or stay; not drawn, but injected before each fault of the other kinds
    second             a second run is started in the same folder, which has to be refused with exit code 2; not
                       drawn, but injected before every fourth fault of the other kinds

The only manual action is to start the same command again after a SIGTERM, which ends a run successfully. Compares all
losses bit for bit, and writes results/chaos.json and .png; with --kinds, e.g. results/chaos_kill_stop.json (for kill,
poke and second: chaos_poked.json). Exit code 1 if losses differ, if more steps were lost than the latest checkpoints
may cost, if a SIGTERM did not end the run, if strangers or a second run did, or if a second run was not refused.
lost_peer.py tests network links that fail.
"""

import random
import sys
import tempfile
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos_disk import small_disk
from chaos_faults import KINDS
from chaos_picture import write_picture
from chaos_run import DisturbedRun
from count_argument import check_least
from results_file import quartiles, rounded, write_result
from training_run import tiny

from moe_jax.errors import EXIT_BAD_INPUT, CommandParser, ConfigError, run_command
from moe_jax.telemetry.run_log import read_metrics

LONGEST_START_S = 8  # within this time of a start, faults hit the starting run
DISK_BYTES = 256 * 10**6
# Checkpoints that a fault may cost: the next one, and one whose save is running; a damaged one; and any that the disk
# had no space for.
MOST_LOST = {"kill": 2, "stop": 2, "term": 0, "bit": 3, "cut": 3, "nan": 2, "full": 0, "slow": 0}
MOST_LOST |= {"poke": 0, "second": 0}
NAMES = {frozenset(KINDS): "chaos", frozenset({"kill", "poke", "second"}): "chaos_poked"}  # names of result files
TIMES = ("restart_s", "first_new_step_s", "exit_s")


@dataclass(frozen=True)
class Chaos:
    """The faults to inject, in order, and the run that they hit."""

    kinds: Sequence[str]
    processes: int
    seed: int = 0  # of the random ranks and times
    while_starting: float = 0.2  # share of faults (of kinds that allow it) during recovery from the previous one
    checkpoint_every: int = 20
    steps_between: int = 30  # least number of steps between two faults
    progress_timeout_s: int = 5


def main() -> None:
    """Train both runs and write the result."""
    parser = CommandParser(
        prog=f"python profiling/{Path(sys.argv[0]).name}",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=4, metavar="P", help="default: %(default)s")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="K,K,…", help="default: %(default)s")
    parser.add_argument(
        "--seed", type=int, default=0, help="of kinds, ranks and times of faults (default: %(default)s)"
    )
    arguments = parser.parse_args()
    check_least(arguments, faults=1, processes=2)
    kinds = arguments.kinds.split(",")
    if unknown := sorted(set(kinds) - KINDS.keys()):
        raise ConfigError(f"--kinds={unknown[0]} is unknown: choose of {', '.join(KINDS)}")
    values = disturbed_run(Chaos(_drawn(kinds, arguments.faults, arguments.seed), arguments.processes, arguments.seed))
    path = write_result(NAMES.get(frozenset(kinds), f"chaos_{'_'.join(kinds)}"), values)
    write_picture(values, path.with_suffix(".png"))
    if values["broken"]:
        sys.exit(f"{len(values['broken'])} promises were broken: {values['broken'][0]}")


def _drawn(kinds: Sequence[str], count: int, seed: int) -> list[str]:
    """Draw this number of faults and insert those that come before others.

    Without drawn kinds, return the inserted ones alone.
    """
    others = [kind for kind in kinds if KINDS[kind].before_every]
    main = [kind for kind in kinds if kind not in others] or others
    found = []
    for number, kind in enumerate(random.Random(seed).choices(main, [KINDS[each].weight for each in main], k=count)):
        found += [each for each in others if main != others and number % (KINDS[each].before_every or 1) == 0]
        found.append(kind)
    return found


def disturbed_run(chaos: Chaos) -> dict[str, Any]:
    """Run through the faults and compare with an undisturbed run. Raises ChaosError if the run did not recover."""
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        folder, quiet = Path(home) / "disturbed", Path(home) / "undisturbed"
        folder.mkdir()
        disk = stack.enter_context(small_disk(folder, DISK_BYTES)) if "full" in chaos.kinds else None
        kinds = [kind for kind in chaos.kinds if kind != "full" or disk]
        if len(kinds) < len(chaos.kinds):
            print(f"{len(chaos.kinds) - len(kinds)} full disks are left out: mounting a tmpfs needs root", flush=True)
        run = DisturbedRun(folder, [*_settings(chaos), "train.steps=1000000"], _launcher(chaos), disk)
        stack.callback(run.stop)
        began = time.monotonic()
        faults = _disturb(run, chaos, kinds)
        took_s = time.monotonic() - began
        disturbed = read_metrics(folder)
        steps = disturbed[-1]["step"]
        other = DisturbedRun(quiet, [*_settings(chaos), f"train.steps={steps}"], _launcher(chaos))
        stack.callback(other.stop)
        other.start()
        other.finish()
        judged = _summary(faults, disturbed, read_metrics(quiet))
    broken = _broken_guarantees(judged, chaos.checkpoint_every)
    facts = {"kinds": sorted(set(kinds)), "disturbed_run_s": rounded(took_s), "broken": broken}
    return asdict(chaos) | facts | judged


def _settings(chaos: Chaos) -> list[str]:
    size = 2 * chaos.processes
    small = tiny(chaos.processes, batch_size=size, seq_len=128, experts=size)
    return [*small, f"checkpoint.every={chaos.checkpoint_every}"]


def _launcher(chaos: Chaos) -> list[str]:
    # faults that hit a starting run make no progress
    retries, timeout_s = len(chaos.kinds), chaos.progress_timeout_s
    flags = [f"--processes={chaos.processes}", f"--retries={retries}", f"--progress-timeout={timeout_s}"]
    return [*flags, "--start-timeout=600"]


def _disturb(run: DisturbedRun, chaos: Chaos, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Train through all faults, and a little further; return each fault and its outcome, in order."""
    rng = random.Random(chaos.seed)
    faults: list[dict[str, Any]] = []
    reached = 0
    run.start()
    for name in kinds:
        kind = KINDS[name]
        starts = bool(faults) and ("at" in faults[-1] or faults[-1]["while_starting"])
        share = chaos.while_starting * (3 if kind.before_every else 1)  # faults that end nothing may come more often
        starting = starts and kind.at_starts and rng.random() < share
        if starting:
            time.sleep(rng.uniform(0, LONGEST_START_S))
        else:
            run.wait_for_step(reached + chaos.steps_between)
            time.sleep(rng.uniform(0, 0.5))
        reached = max(reached, run.step)
        ranks = sorted(rng.sample(range(chaos.processes), rng.choice([1, 1, 2, chaos.processes])))
        found = kind.strike(run, rng, ranks)
        faults.append({"kind": name, "ranks": ranks, "while_starting": starting} | found)
        reached = max(reached, run.step)
        print(f"fault {len(faults)} of {len(kinds)}: {name} of ranks {ranks}", flush=True)
    run.wait_for_step(reached + chaos.steps_between)
    run.stop()
    run.finish()
    return [fault | (run.outcome(fault.pop("at")) if "at" in fault else {}) for fault in faults]


def _summary(
    faults: Sequence[dict[str, Any]], disturbed: Sequence[dict[str, Any]], undisturbed: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Summarise the effects of the faults for a comparison with the guarantees."""
    losses, expected = (
        [(record["step"], record["loss"]) for record in run if "loss" in record] for run in (disturbed, undisturbed)
    )
    by_kind: dict[str, Any] = {}
    for kind in KINDS:
        if of_kind := [fault for fault in faults if fault["kind"] == kind]:
            calm = [fault for fault in of_kind if not fault["while_starting"]]
            spreads = {name: _spread(calm, name) for name in ("steps_lost", *TIMES)}
            by_kind[kind] = {"faults": len(of_kind)} | {name: spread for name, spread in spreads.items() if spread}
    return {
        "steps": len(losses),
        "losses_equal_bit_for_bit": losses == expected,
        "checkpoints_put_aside": sum("quarantined" in fault for fault in faults),
        "by_kind": by_kind,
        "faults": list(faults),
        "loss": [rounded(loss) for _, loss in losses],
    }


def _broken_guarantees(judged: dict[str, Any], checkpoint_every: int) -> list[str]:
    """List the guarantees that do not hold."""
    broken = [] if judged["losses_equal_bit_for_bit"] else ["losses differ from those of the undisturbed run"]
    for number, fault in enumerate(judged["faults"], 1):
        kind, lost, code = fault["kind"], fault.get("steps_lost", 0), fault.get("exit_code", 0)
        if lost > (MOST_LOST[kind] + len(fault.get("not_saved", []))) * checkpoint_every:
            broken.append(f"fault {number}, {kind}: {lost} steps lost")
        if code and not fault["while_starting"]:  # a run that ends before it can save exits with the signal's code
            broken.append(f"fault {number}, {kind}: exit code {code}")
        if not fault.get("replaced", True):
            broken.append(f"fault {number}, {kind}: the run continues")
        if fault.get("restarted"):
            broken.append(f"fault {number}, {kind}: the run started again")
        if fault.get("second_exit_code", EXIT_BAD_INPUT) != EXIT_BAD_INPUT:
            broken.append(f"fault {number}, {kind}: the second run ended with {fault['second_exit_code']}")
    return broken


def _spread(faults: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    values = [fault[name] for fault in faults if name in fault]
    return quartiles(values) | {"largest": max(values), "count": len(values)} if values else {}


if __name__ == "__main__":
    run_command(main)
