"""Does any run crash, or give other losses the next time? python profiling/stress.py [CASES] [--resume]

Trains every committed config, narrowed, for 30 steps by the real command, with policies, exchanges and meshes of
simulated devices such that every pair of these settings occurs. Each case runs three times, the second time with six
runs on two cores at once. Programs are compiled the first time. Losses of all steps must be equal, bit for bit. CASES:
run only this number, spread over all. Writes results/stress.json after every few cases, each with the commit that it
ran at; --resume leaves out cases that the file has. Exit code 1 if a run failed or differed. Takes an hour or two.
"""

import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from count_argument import check_least
from results_file import RESULTS

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.distributed.heartbeat import PROGRAMS
from moe_jax.errors import EXIT_BAD_INPUT, CommandParser, run_command
from moe_jax.measure.provenance import origin, provenance
from moe_jax.telemetry.run_log import read_metrics

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.pairwise import covering  # noqa: E402

STEPS, LIMIT_S = 30, 600
AT_ONCE = (2, 6, 2)  # concurrent runs, the first, the second and the third time
GROUP = 12  # cases with programs stored at a time
RESULT = RESULTS / "stress.json"
TEXT = "configs/text/shakespeare.txt"
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))
POLICIES = [
    "schedule.policy=vanilla",
    "schedule.policy=vanilla schedule.weight_grad=greedy schedule.grad_reduce=block",
    "schedule.policy=expert_pipeline schedule.microbatches=2",
    "schedule.policy=unified schedule.microbatches=2 schedule.grad_reduce=end",
    "schedule.policy=unified schedule.microbatches=2 exchange.algorithm=ragged",
    "schedule.policy=unified schedule.microbatches=4 schedule.weight_grad=greedy schedule.grad_reduce=bucketed",
]
PLACES = [  # exchanges on meshes that support them
    "mesh.cpu_devices=8 mesh.data=2 mesh.expert=4 exchange.algorithm=hier_2d exchange.ranks_per_node=2",
    "mesh.cpu_devices=4 mesh.data=1 mesh.expert=4 exchange.algorithm=ring exchange.reduction=ring",
    "mesh.cpu_devices=4 mesh.data=1 mesh.expert=4 exchange.algorithm=halo exchange.ranks_per_node=2",
    "mesh.cpu_devices=4 mesh.data=1 mesh.expert=4 exchange.algorithm=hier_1d exchange.ranks_per_node=2",
    "mesh.cpu_devices=4 mesh.data=1 mesh.context=2 mesh.expert=2 train.grad_accumulation=2",
    "mesh.cpu_devices=4 mesh.data=1 mesh.expert=2 mesh.tensor=2 exchange.reduction=scatter_gather",
    "mesh.cpu_devices=4 mesh.data=1 mesh.expert=2 mesh.pipeline=2 train.grad_accumulation=2",
]


@dataclass
class Found:
    """The outcomes of the runs of a case."""

    settings: list[str]
    folder: str
    refused: str = ""
    failures: list[str] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)  # of each run that succeeded

    @property
    def is_same(self) -> bool:
        """Whether all runs that succeeded have the same losses, of all steps."""
        return all(each == self.losses[0] and len(each) == STEPS for each in self.losses)

    def as_record(self) -> dict[str, Any]:
        """Return what the results file says of the case."""
        different = [] if self.is_same else ["losses differ"]
        return {
            "settings": " ".join(self.settings),
            "runs": len(self.losses) + len(self.failures),
            "wrong": self.failures + different,
            **({"refused": self.refused} if self.refused else {}),
            "commit": origin()["commit"],
        }


def main() -> None:
    """Run all cases and write the results."""
    cases = covering({"config": CONFIGS, "policy": POLICIES, "place": PLACES}, refuses=lambda pair: False)
    parser = CommandParser(prog="python profiling/stress.py", description=__doc__)
    parser.add_argument("cases", metavar="CASES", nargs="?", type=int, default=len(cases), help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="leave out cases that results/stress.json has")
    given = parser.parse_args()
    check_least(given, cases=1)
    cases = cases[:: max(1, len(cases) // given.cases)][: given.cases]
    records: list[dict[str, Any]] = json.loads(RESULT.read_text())["found"] if given.resume and RESULT.exists() else []
    done = {record["settings"] for record in records}
    left = [case for case in cases if " ".join(_settings(case)) not in done]
    for first in range(0, len(left), GROUP):
        records += [found.as_record() for found in _try(left[first : first + GROUP])]
        _write(records)
    if wrong := sum(bool(record["wrong"]) for record in records):
        sys.exit(f"{wrong} cases went wrong")


def _write(records: list[dict[str, Any]]) -> None:
    ran = [record for record in records if "refused" not in record]
    values = {
        "cases": len(ran),
        "runs": sum(record["runs"] for record in ran),
        "steps_of_a_run": STEPS,
        "wrong": sum(bool(record["wrong"]) for record in ran),
        "refused": len(records) - len(ran),
    }
    print(values, flush=True)
    RESULT.write_text(json.dumps(values | {"found": records, "provenance": provenance()}, indent=2) + "\n")


def _settings(case: dict[str, str]) -> list[str]:
    """Return a case as arguments: a config and settings."""
    return [case["config"], *(" ".join(value for name, value in case.items() if name != "config").split())]


def narrowed(config: Config) -> list[str]:
    """Return settings that make a model of the same kind small, and let it read a text of bytes."""
    model, moe, attention = config.model, config.model.moe, config.model.attention
    has_mixers = bool(model.mamba.mixer_only_offsets)
    recurrent_period = 4 if has_mixers else model.recurrent_period
    every = (moe.moe_layer_freq, attention.full_every, attention.nope_every, recurrent_period)
    period = math.lcm(*(each for each in every if each))
    settings = {
        "model.vocab_size": 256,
        "model.hidden_size": 32,
        "model.num_layers": moe.first_k_dense_replace + max(3, period + 1) if moe.num_experts else 3,
        "model.num_attention_heads": 4,
        "model.intermediate_size": 48,
        "model.num_key_value_heads": 2
        if (model.num_key_value_heads or model.num_attention_heads) < model.num_attention_heads
        else None,
        "model.head_dim": 8 if model.head_dim else None,
        "data.path": TEXT,
        "data.mask_documents": False,
        "data.seq_len": 16,
        "train.batch_size": 32,
        "train.compute_dtype": "float32",
        "schedule.policy": "vanilla",
        "schedule.microbatches": 1,
        "schedule.weight_grad": "inline",
        "schedule.grad_reduce": "end",
        "schedule.bucket_cap_mb": None,
        "schedule.unroll": 1,
        "exchange.algorithm": "flat",
        "exchange.reduction": "all_reduce",
    }
    if model.has_latents:
        settings |= {"model.latent.kv_lora_rank": 16, "model.latent.qk_nope_head_dim": 8}
        settings |= {"model.latent.qk_rope_head_dim": 4, "model.latent.v_head_dim": 8}
        settings |= {"model.latent.q_lora_rank": 24} if model.latent.q_lora_rank else {}
    if model.has_delta_nets:
        settings |= {"model.delta_net.num_value_heads": 8, "model.delta_net.num_key_heads": 4}
        settings |= {"model.delta_net.key_head_dim": 8, "model.delta_net.value_head_dim": 8}
    if model.has_mamba:
        settings |= {"model.mamba.num_heads": 8, "model.mamba.n_groups": min(model.mamba.n_groups, 4)}
        settings |= {"model.mamba.head_dim": 8, "model.mamba.d_state": 8}
    if has_mixers:  # the four lowest blocks of Nemotron 3
        settings |= {"model.mamba.attn_layer_period": recurrent_period, "model.mamba.attn_layer_offsets": "[3]"}
        settings |= {"model.mamba.mixer_only_offsets": "[2]"}
    if attention.sliding_window:
        settings["model.attention.sliding_window"] = 8
    if moe.num_experts:
        settings |= {
            "model.moe.num_experts": 8,
            "model.moe.top_k": min(moe.top_k, 3),
            "model.moe.intermediate_size": 24,
        }
        settings |= {"model.moe.n_group": 4, "model.moe.topk_group": 2} if moe.n_group > 1 else {}
    return [
        f"{name}={json.dumps(value) if value is None or isinstance(value, bool) else value}"
        for name, value in settings.items()
    ]


def _try(cases: list[dict[str, str]]) -> list[Found]:
    """Run each of these cases three times."""
    with tempfile.TemporaryDirectory() as folder:
        all_found = [Found(_settings(case), f"{folder}/{number}") for number, case in enumerate(cases)]
        for number, at_once in enumerate(AT_ONCE):
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(functools.partial(_again, number), all_found))
    for found in all_found:
        outcome = found.refused or "; ".join(found.failures) or ("same" if found.is_same else "DIFFERENT")
        print(f"{' '.join(found.settings)}: {outcome}", flush=True)
    return all_found


def _again(number: int, found: Found) -> None:
    """Run a case once more."""
    if found.refused:
        return
    config, *settings = found.settings
    log = f"{found.folder}/{number}"
    command = [sys.executable, "-m", "moe_jax.train", "--config", config]
    command += [*narrowed(load_config(ROOT / config)), f"train.steps={STEPS}", "train.eval_every=0"]
    command += ["train.eval_batches=1", "checkpoint.every=0", "log.every=1", "log.tensorboard=false"]
    command += ["log.sample_tokens=0", *settings]
    ended = _run([*command, f"log.dir={log}"], found.folder)
    if ended.returncode == EXIT_BAD_INPUT and not number:
        found.refused = ended.stderr.strip().splitlines()[-1]
    elif ended.returncode:
        found.failures.append(f"exit code {ended.returncode}: {ended.stderr.strip()[-300:]}")
    else:
        found.losses.append([record["loss"] for record in read_metrics(Path(log)) if "loss" in record])


def _run(command: list[str], programs: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {PROGRAMS: f"{programs}/programs"}
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", f"no end after {LIMIT_S} s")


if __name__ == "__main__":
    run_command(main)
