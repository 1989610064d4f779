"""How fast are we compared with others on one machine? python profiling/bench_peers.py [--maxtext PYTHON] [ROUNDS]

Trains the model of `configs/bench/peers.yaml` on eight simulated devices, with experts sharded over all of them, by our
command and by MaxText's, alternately. Each run has its own process and is timed from outside by what it writes: seconds
from the command to its first step, and tokens/s after the first quarter of its steps. PYTHON is the interpreter of a
virtual environment with MaxText (docs/measure.md); without it, only our command runs. A round takes a minute or two for
each command. Both compile their programs again in each round. Writes results/bench_peers.json.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from count_argument import check_least
from results_file import quartiles, rounded, write_result

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, UserError, run_command

CONFIG = "configs/bench/peers.yaml"
_POLL_S, _LIMIT_S = 0.01, 600.0


class StoppedError(UserError):
    """Raised for a command that ended before its last step."""


class Peer(NamedTuple):
    """A training command, its environment, and a file that gets a line containing `step` for each step."""

    command: Sequence[str]
    environment: dict[str, str]
    file: str  # in the working directory; "output" for standard output
    step: str


def main() -> None:
    """Measure, compare and write results/bench_peers.json."""
    parser = CommandParser(prog="python profiling/bench_peers.py", description=__doc__)
    parser.add_argument("--maxtext", type=Path, metavar="PYTHON", help="interpreter of an environment with MaxText")
    parser.add_argument("--steps", type=int, default=40, help="of each run (default: %(default)s)")
    parser.add_argument("rounds", metavar="ROUNDS", nargs="?", type=int, default=3, help="default: %(default)s")
    arguments = parser.parse_args()
    check_least(arguments, rounds=1, steps=8)
    config = load_config(CONFIG, [f"train.steps={arguments.steps}"])
    peers = {"ours": ours(config)}
    if arguments.maxtext is None:
        print("--maxtext names no environment with MaxText: we run alone")
    else:
        peers["maxtext"] = maxtext(arguments.maxtext, config)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    for _ in range(arguments.rounds):
        for name, peer in peers.items():
            found[name].append(timed(peer, config))
            print(name, found[name][-1], flush=True)
    write_result("bench_peers", {"config": CONFIG, "rounds": arguments.rounds} | summary(found))


def ours(config: Config) -> Peer:
    """Return our training command, as a user starts it."""
    root = Path(__file__).parents[1]
    settings = [f"train.steps={config.train.steps}", "log.dir=run", f"data.path={root / config.data.mixture[0].path}"]
    command = [sys.executable, "-m", "moe_jax.train", "--config", str(root / CONFIG), *settings]
    return Peer(command, {"PYTHONPATH": str(root)}, "run/metrics.jsonl", '"step_s"')


def maxtext(python: Path, config: Config) -> Peer:
    """Return MaxText's training command for the same model, on synthetic tokens."""
    model, devices = config.model, config.mesh.cpu_devices
    settings = {
        "run_name": "peers",
        "base_output_directory": "run",
        "hardware": "cpu",
        "steps": config.train.steps,
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "jax_cache_dir": "run/programs",  # a new folder: by default programs of earlier rounds stay in the home folder
        "decoder_block": "mixtral",
        "attention": "dot_product",
        "dtype": config.train.compute_dtype,
        "weight_dtype": "float32",
        "per_device_batch_size": config.train.batch_size // (devices or 1),
        "max_target_length": config.data.seq_len,
        "vocab_size": model.vocab_size,
        "base_emb_dim": model.hidden_size,
        "base_num_decoder_layers": model.num_layers,
        "base_num_query_heads": model.num_attention_heads,
        "base_num_kv_heads": model.kv_heads,
        "head_dim": model.head_width,
        "base_mlp_dim": model.moe.intermediate_size,
        "base_moe_mlp_dim": model.moe.intermediate_size,
        "num_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "capacity_factor": model.moe.capacity_factor,
        "sparse_matmul": False,
        "megablox": False,
        "load_balance_loss_weight": model.moe.aux_loss_coeff,
        "logits_via_embedding": False,
        "remat_policy": _REMAT[config.schedule.remat],
        "ici_fsdp_parallelism": 1,
        "ici_expert_parallelism": devices,
        "opt_type": "adamw",
        "skip_jax_distributed_system": True,
    }
    base = _output([str(python), "-c", _FIND_MAXTEXT]).strip()
    words = [f"{name}={value}" for name, value in settings.items()]
    flags = f"--xla_force_host_platform_device_count={devices}"
    module, _, file = base.partition(" ")
    return Peer(
        [str(python), "-m", module, file, *words],
        {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1"},
        "output",
        "completed step: ",
    )


_REMAT = {"none": "minimal_with_context", "dots": "minimal", "full": "full"}  # MaxText always recomputes

_FIND_MAXTEXT = """
import importlib.util, pathlib
for package, module in (("maxtext", "maxtext.trainers.pre_train.train"), ("MaxText", "MaxText.train")):
    if found := importlib.util.find_spec(package):
        files = sorted(pathlib.Path(found.submodule_search_locations[0]).rglob("base.yml"))
        if files:
            print(module, files[0])
            break
"""


def _output(command: Sequence[str]) -> str:
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise StoppedError(
            f"--maxtext {command[0]} does not run ({error}): name the python of an environment"
        ) from None
    if not text.strip():
        raise StoppedError(f"--maxtext {command[0]} has no MaxText: see docs/measure.md for how it is installed")
    return text


def timed(peer: Peer, config: Config) -> dict[str, float]:
    """Measure seconds to the first step, tokens/s, and the load of the machine at the start. Raises StoppedError."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("wb") as output:
        start = time.perf_counter()
        inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}
        with subprocess.Popen(
            peer.command, cwd=folder, env=inherited | peer.environment, stdout=output, stderr=subprocess.STDOUT
        ) as process:
            times = _step_times(process, Path(folder) / peer.file, peer.step, config.train.steps)
            process.terminate()
        if len(times) < config.train.steps:
            last_line = (Path(folder) / "output").read_text(errors="replace").strip().splitlines()[-1:]
            raise StoppedError(f"ended with step {len(times)}: {' '.join(last_line)}")
    first = config.train.steps // 4
    tokens = config.train.batch_size * config.data.seq_len * (len(times) - 1 - first)
    return {
        "first_step_s": rounded(times[0] - start),
        "tokens_per_s": rounded(tokens / (times[-1] - times[first])),
        "load_average": rounded(load),
    }


def _step_times(process: subprocess.Popen[bytes], file: Path, word: str, steps: int) -> list[float]:
    """Return the time at which each step appeared in the file."""
    times: list[float] = []
    end = time.perf_counter() + _LIMIT_S
    while len(times) < steps and time.perf_counter() < end:
        has_ended = process.poll() is not None
        count = len(re.findall(re.escape(word), file.read_text(errors="replace"))) if file.exists() else 0
        times += [time.perf_counter()] * (count - len(times))
        if has_ended:
            break
        time.sleep(_POLL_S)
    return times[:steps]


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return medians and quartiles of each command, and the ratios of ours to theirs, round by round."""
    values: dict[str, Any] = {
        name: {key: quartiles([run[key] for run in runs]) for key in runs[0]} for name, runs in found.items()
    }
    if theirs := found.get("maxtext"):
        for key in ("first_step_s", "tokens_per_s"):
            ratios = [own[key] / other[key] for own, other in zip(found["ours"], theirs, strict=True)]
            values[f"{key}_over_maxtext"] = quartiles(ratios)
    return values


if __name__ == "__main__":
    run_command(main)
