"""Whole runs of a few steps, whose programs are compiled once for runs that have the same ones."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.run import describe, loop
from moe_jax.run.setup import Programs, Run, compile_programs


def config_of(folder: Path, settings: Mapping[str, Any], *overrides: str) -> Config:
    """The config of a run in its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "experiment.yaml").write_text(json.dumps(settings))
    return load_config(folder / "experiment.yaml", [f"log.dir={folder}", *overrides])


@contextmanager
def compiled_once() -> Iterator[None]:
    """Runs that differ in what is computed have programs of their own, lengths apart; no peak is measured."""
    done: dict[Any, Programs] = {}

    def compile_first(run: Run) -> Programs:
        config = run.config
        what = (config.model, config.mesh, config.exchange, config.schedule, config.optimizer, config.replicas)
        key = (what, config.migration.enabled, config.train.skip_spikes, config.train.batch_size)
        done[key] = done.get(key) or compile_programs(run)
        return done[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "compile_programs", compile_first)
        for module in (loop, describe):
            patch.setattr(module, "matrix_flops_per_s", lambda dtype: 1e12)
        yield
