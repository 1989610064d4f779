"""Training runs of benchmarks: their settings, and what one logged."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import UserError
from moe_jax.run.loop import train
from moe_jax.telemetry.run_log import read_metrics

CONFIG = "configs/shakespeare_cpu.yaml"
_QUIET = ("checkpoint.every=0", "log.sample_tokens=0", "log.tensorboard=false")


def tiny(ranks: int, *, batch_size: int, seq_len: int, experts: int) -> list[str]:
    """Settings of a small model on `ranks` expert ranks, each step recorded. Losses do not depend on train.steps."""
    return [
        *(
            "model.num_layers=2",
            "model.hidden_size=64",
            "model.intermediate_size=128",
            "model.moe.intermediate_size=64",
        ),
        *(f"model.moe.num_experts={experts}", f"mesh.cpu_devices={ranks}", "mesh.data=1", f"mesh.expert={ranks}"),
        *(f"train.batch_size={batch_size}", f"data.seq_len={seq_len}", "train.compute_dtype=float32"),
        *("optimizer.schedule=constant", "train.eval_every=0"),
        *("log.every=1", "log.tensorboard=false", "log.sample_tokens=0"),
    ]


class StoppedError(UserError):
    """A training that a signal ended before its last step."""


def train_config(settings: Sequence[str], steps: int) -> Config:
    """The small model, to be trained from its start in a folder that `records_of` makes."""
    return load_config(CONFIG, [*settings, f"train.steps={steps}", *_QUIET])


def losses_of(settings: Sequence[str], steps: int, name: str) -> dict[int, float]:
    """By step, of the metric `name` (`loss`, `validation_loss`), wherever it was logged. Raises StoppedError."""
    return {record["step"]: record[name] for record in records_of(settings, steps) if name in record}


def records_of(settings: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """All that was logged of a run that reached its last step. Raises StoppedError."""
    with tempfile.TemporaryDirectory() as folder:
        train(train_config([*settings, f"log.dir={folder}"], steps))
        records = read_metrics(Path(folder))
    if not records or max(record["step"] for record in records) < steps:
        raise StoppedError(f"stopped before step {steps}: nothing written, start the benchmark again")
    return records
