"""Training runs of benchmarks: their settings and their records."""

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
    """Return settings of a small model on `ranks` expert ranks that records each step.

    Losses do not depend on train.steps.
    """
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
    """Raised for a training run that a signal ended before its last step."""


def train_config(settings: Sequence[str], steps: int) -> Config:
    """Return the config of the small model, to be trained from scratch in a folder that `records_of` creates."""
    return load_config(CONFIG, [*settings, f"train.steps={steps}", *_QUIET])


def losses_of(settings: Sequence[str], steps: int, name: str) -> dict[int, float]:
    """Train and return the metric `name` (`loss`, `validation_loss`) of each step that logged it.

    Raises StoppedError.
    """
    return {record["step"]: record[name] for record in records_of(settings, steps) if name in record}


def records_of(settings: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Train to the last step and return all records. Raises StoppedError."""
    with tempfile.TemporaryDirectory() as folder:
        train(train_config([*settings, f"log.dir={folder}"], steps))
        records = read_metrics(Path(folder))
    if not records or max(record["step"] for record in records) < steps:
        raise StoppedError(f"stopped before step {steps}: nothing written, start the benchmark again")
    return records
