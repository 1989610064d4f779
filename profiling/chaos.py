"""Does a run come through faults unharmed, and how soon? python profiling/chaos.py [--faults N] [--processes P]

Trains a small model under the launcher twice: undisturbed, and while random ranks are killed (SIGKILL), stopped
(SIGSTOP) and told to end (SIGTERM), one, two or all at a time, some of them while the run starts again. By hand nothing
is done but to give the same command again after a SIGTERM, which ends a run well. Compares all losses bit for bit, and
writes results/chaos.json and .png.
"""

import random
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos_picture import write_picture
from chaos_run import DisturbedRun
from count_argument import check_least
from results_file import quartiles, rounded, write_result

from moe_jax.errors import CommandParser, run_command
from moe_jax.train.metrics import read_metrics

STEPS_PER_FAULT = 30
CHECKPOINT_EVERY = 20
PROGRESS_TIMEOUT_S = 5
WHILE_STARTING = 0.2  # share of faults that come while the run recovers from the one before
KINDS = {signal.SIGKILL: 0.5, signal.SIGSTOP: 0.3, signal.SIGTERM: 0.2}


def main() -> None:
    """Train both and write the result."""
    parser = CommandParser(prog=f"python profiling/{Path(sys.argv[0]).name}", description=__doc__)
    parser.add_argument("--faults", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=4, metavar="P", help="default: %(default)s")
    parser.add_argument(
        "--seed", type=int, default=0, help="of kinds, ranks and times of faults (default: %(default)s)"
    )
    arguments = parser.parse_args()
    check_least(arguments, faults=1, processes=2)
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, disturbed = (_run(Path(folder) / name, arguments) for name in ("undisturbed", "disturbed"))
        try:
            undisturbed.start()
            undisturbed.finish()
            began = time.monotonic()
            faults = _disturb(disturbed, arguments)
            took_s = time.monotonic() - began
        finally:
            undisturbed.stop()
            disturbed.stop()
        judged = _judged(faults, read_metrics(undisturbed.folder), read_metrics(disturbed.folder))
    values = _settings(arguments) | {"disturbed_run_s": rounded(took_s)} | judged
    path = write_result("chaos", values)
    write_picture(values, path.with_suffix(".png"))


def _settings(arguments: Namespace) -> dict[str, Any]:
    return {
        "processes": arguments.processes,
        "seed": arguments.seed,
        "checkpoint_every": CHECKPOINT_EVERY,
        "progress_timeout_s": PROGRESS_TIMEOUT_S,
    }


def _run(folder: Path, arguments: Namespace) -> DisturbedRun:
    ranks = arguments.processes
    settings = [
        *("model.num_layers=2", "model.d_model=64", "model.hidden_dim=128", "model.moe.hidden_dim=64"),
        *(f"mesh.cpu_devices={ranks}", "mesh.data=1", f"mesh.expert={ranks}", f"model.moe.num_experts={2 * ranks}"),
        *(f"train.batch_size={2 * ranks}", "data.seq_len=128", "train.compute_dtype=float32"),
        *(f"train.steps={STEPS_PER_FAULT * (arguments.faults + 1)}", "train.eval_every=0"),
        *(f"checkpoint.every={CHECKPOINT_EVERY}", "log.every=1", "log.tensorboard=false"),
    ]
    timeouts = [f"--progress-timeout={PROGRESS_TIMEOUT_S}", "--start-timeout=120"]
    # faults that hit a start make no progress
    return DisturbedRun(folder, settings, [f"--processes={ranks}", f"--retries={arguments.faults}", *timeouts])


def _disturb(run: DisturbedRun, arguments: Namespace) -> list[dict[str, Any]]:
    """Train to the end through all faults; what was done and what came of it, in order."""
    rng = random.Random(arguments.seed)
    faults: list[dict[str, Any]] = []
    run.start()
    while len(faults) < arguments.faults:
        starting = bool(faults) and rng.random() < WHILE_STARTING
        if starting:
            time.sleep(rng.uniform(0, 8))
        else:
            run.wait_for_step(STEPS_PER_FAULT * (len(faults) + 1))
            time.sleep(rng.uniform(0, 0.5))
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        ranks = sorted(rng.sample(range(arguments.processes), rng.choice([1, 1, 2, arguments.processes])))
        at = run.hit(kind, ranks)
        fault = {"kind": kind.name, "ranks": ranks, "while_starting": starting, "at": at}
        if kind == signal.SIGTERM:
            code = run.wait(at_most_s=60)  # it may hit a process that is stopped
            fault |= {"exit_code": code, "exit_s": rounded(time.monotonic() - at)}
            if code is not None:
                run.start()
        faults.append(fault)
        print(f"fault {len(faults)}: {kind.name} of ranks {ranks}", flush=True)
    run.finish()
    return [fault | run.outcome(fault.pop("at")) for fault in faults]


def _judged(
    faults: Sequence[dict[str, Any]], undisturbed: Sequence[dict[str, Any]], disturbed: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What the faults did, against what is promised."""
    losses, expected = (
        [(record["step"], record["loss"]) for record in run if "loss" in record] for run in (disturbed, undisturbed)
    )
    ended = [fault for fault in faults if "exit_code" in fault and not fault["while_starting"]]
    names = ("SIGKILL", "SIGSTOP")
    return {
        "losses_equal_bit_for_bit": losses == expected,
        "steps_lost": _spread(faults, "steps_lost"),
        "first_new_step_s": _spread([fault for fault in faults if fault["kind"] in names], "first_new_step_s"),
        "restart_s": {
            name: _spread([fault for fault in faults if fault["kind"] == name], "restart_s") for name in names
        },
        "sigterm_exit_s": _spread(ended, "exit_s"),
        "sigterm_exit_codes": [fault["exit_code"] for fault in ended],
        "faults": faults,
        "loss": [rounded(loss) for _, loss in losses],
    }


def _spread(faults: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    values = [fault[name] for fault in faults if name in fault]
    return quartiles(values) | {"largest": max(values), "count": len(values)} if values else {}


if __name__ == "__main__":
    run_command(main)
