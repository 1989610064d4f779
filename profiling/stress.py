"""Does any run crash, or come out otherwise the next time? python profiling/stress.py [CASES]

Trains every committed config, narrowed, 30 steps by the real command, with policies, exchanges and meshes of simulated
devices such that every two of these settings meet: three times each, the second time while two other processes keep the
cores busy. Programs are compiled the first time. Losses of all steps must be the same, bit for bit. CASES: only so
many, spread over all. Writes results/stress.json; exit code 1 if a run failed or was different. Takes about two hours
on two cores.
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from count_argument import count_argument
from results_file import write_result

from moe_jax.config import Config
from moe_jax.config_files import load_config
from moe_jax.errors import EXIT_BAD_INPUT, run_command
from moe_jax.train.metrics import read_metrics
from moe_jax.train.progress import PROGRAMS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.pairwise import all_pairs  # noqa: E402

STEPS, TIMES, LIMIT_S = 30, 3, 600
TEXT = "configs/text/shakespeare.txt"
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))
POLICIES = [
    "schedule.policy=vanilla",
    "schedule.policy=vanilla schedule.weight_grad=greedy schedule.grad_reduce=block",
    "schedule.policy=expert_pipeline schedule.microbatches=2",
    "schedule.policy=unified schedule.microbatches=2 schedule.grad_reduce=end",
    "schedule.policy=unified schedule.microbatches=2 exchange.algorithm=ragged",
    "schedule.policy=unified schedule.microbatches=4 schedule.weight_grad=greedy schedule.grad_reduce=chunked",
]
PLACES = [  # exchanges on meshes that have them
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
    """What became of the runs of a case."""

    settings: list[str]
    refused: str = ""
    failures: list[str] = field(default_factory=list)
    runs: int = 0
    is_same: bool = True


def main() -> None:
    """Run all and write the result."""
    cases = all_pairs([{"config": path} for path in CONFIGS], {"policy": POLICIES, "place": PLACES})
    wanted = count_argument("CASES", len(cases), __doc__)
    cases = cases[:: max(1, len(cases) // wanted)][:wanted]
    began, all_found = time.monotonic(), []
    with ThreadPoolExecutor(2) as pool, tempfile.TemporaryDirectory() as folder:
        for number, found in enumerate(pool.map(lambda case: _try(case, Path(folder)), cases), start=1):
            all_found.append(found)
            outcome = found.refused or "; ".join(found.failures) or ("same" if found.is_same else "DIFFERENT")
            print(f"{number}/{len(cases)} {' '.join(found.settings)}: {outcome}", flush=True)
    ran = [found for found in all_found if not found.refused]
    wrong = [vars(found) for found in ran if found.failures or not found.is_same]
    values: dict[str, Any] = {
        "cases": len(ran),
        "runs": sum(found.runs for found in ran),
        "steps_of_a_run": STEPS,
        "failed_runs": sum(len(found.failures) for found in ran),
        "cases_with_other_losses": sum(not found.is_same for found in ran),
        "refused": dict(Counter(found.refused for found in all_found if found.refused)),
        "wrong": wrong,
        "minutes": round((time.monotonic() - began) / 60),
    }
    write_result("stress", values, quick=wanted < 150)
    if wrong:
        sys.exit(f"{len(wrong)} cases went wrong")


def narrowed(config: Config) -> list[str]:
    """Settings that make a model of the same kind small, and let it read a text of bytes."""
    model, moe, attention = config.model, config.model.moe, config.model.attention
    every = (moe.every, attention.full_every, attention.nope_every)
    period = math.lcm(*(each for each in every if each))
    settings = {
        "model.vocab_size": 256,
        "model.d_model": 32,
        "model.num_layers": moe.first_dense_blocks + max(3, period + 1) if moe.num_experts else 3,
        "model.num_heads": 4,
        "model.hidden_dim": 48,
        "model.num_kv_heads": 2 if (model.num_kv_heads or model.num_heads) < model.num_heads else None,
        "model.head_dim": 8 if model.head_dim else None,
        "data.path": TEXT,
        "data.seq_len": 16,
        "train.batch_size": 32,
        "train.compute_dtype": "float32",
        "schedule.policy": "vanilla",
        "schedule.microbatches": 1,
        "schedule.weight_grad": "inline",
        "schedule.grad_reduce": "end",
        "schedule.chunk_mb": None,
        "schedule.unroll": 1,
        "exchange.algorithm": "flat",
        "exchange.reduction": "all_reduce",
    }
    if model.has_latents:
        settings |= {"model.latent.kv_lora_rank": 16, "model.latent.qk_nope_head_dim": 8}
        settings |= {"model.latent.qk_rope_head_dim": 4, "model.latent.v_head_dim": 8}
        settings |= {"model.latent.q_lora_rank": 24} if model.latent.q_lora_rank else {}
    if attention.window:
        settings["model.attention.window"] = 8
    if moe.num_experts:
        settings |= {"model.moe.num_experts": 8, "model.moe.top_k": min(moe.top_k, 3), "model.moe.hidden_dim": 24}
        settings |= {"model.moe.num_groups": 4, "model.moe.top_groups": 2} if moe.num_groups > 1 else {}
    return [f"{name}={'null' if value is None else value}" for name, value in settings.items()]


def _try(case: dict[str, Any], folder: Path) -> Found:
    """Three runs of a case."""
    settings = " ".join(value for name, value in case.items() if name != "config").split()
    found = Found([case["config"], *settings])
    with tempfile.TemporaryDirectory(dir=folder) as own:
        command = [sys.executable, "-m", "moe_jax.train", "--config", case["config"]]
        command += [*narrowed(load_config(ROOT / case["config"])), f"train.steps={STEPS}", "train.eval_every=0"]
        command += ["train.eval_batches=1", "checkpoint.every=0", "log.every=1", "log.tensorboard=false"]
        command += ["log.sample_tokens=0", *settings]
        losses = []
        for number in range(TIMES):
            log = Path(own) / str(number)
            with _busy_cores() if number == 1 else _nothing():
                ended = _run([*command, f"log.dir={log}"], own)
            if ended.returncode == EXIT_BAD_INPUT and not number:
                found.refused = ended.stderr.strip().splitlines()[-1]
                return found
            found.runs += 1
            if ended.returncode:
                found.failures.append(f"exit code {ended.returncode}: {ended.stderr.strip()[-300:]}")
                continue
            losses.append([record["loss"] for record in read_metrics(log) if "loss" in record])
        found.is_same = all(each == losses[0] and len(each) == STEPS for each in losses)
    return found


def _run(command: list[str], programs: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {PROGRAMS: f"{programs}/programs"}
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", f"no end after {LIMIT_S} s")


@contextmanager
def _busy_cores() -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


if __name__ == "__main__":
    run_command(main)
