"""Router replay: the experts of all tokens of each step in files, and steps that take their experts from such files.

A folder has `routing.json`, with the sizes of the model and of the batch, and a file for each step: `00000001.npy` has
the experts [M, G, k] of step 1, as 32-bit integers; E stands for no expert. M blocks with experts, G = B·N tokens of
the global batch in the order of its sequences, k choices, best first.
"""

import json
import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from moe_jax.config import Config
from moe_jax.distributed.processes import is_main_process
from moe_jax.errors import ConfigError, DataError
from moe_jax.files.atomic import write_atomically, write_together
from moe_jax.files.untrusted import read_json
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.step.plain import ROUTED
from moe_jax.step.trainer import Trainer

_FACTS = "routing.json"
_TEXTS, _RUN = "texts", "log.dir"  # in it, besides settings: checksums of the tokens, and the folder of the run


class RoutingRecords:
    """The record that a run writes, and the one that it replays; either may be missing."""

    def __init__(self, config: Config, trainer: Trainer, first_step: int, texts: Sequence[int]):
        """`first_step` is the number of steps done before, `texts` has the checksum of each source of tokens.

        Raises ConfigError if a record to replay lacks later steps or is of other sizes or tokens, and if the folder of
        one to write has the record of another run.
        """
        self._config, self._mesh, self._first_step = config, trainer.mesh, first_step
        self._facts = {**facts_of(config), _TEXTS: list(texts), _RUN: os.path.abspath(config.log.dir)}
        self._record, self._replay = (
            None if name is None else Path(name) for name in (config.train.record_routing, config.train.replay_routing)
        )
        if self._replay is not None:
            _check_facts(self._replay, self._facts, "train.replay_routing")
            _check_steps(self._replay, range(first_step + 1, config.train.steps + 1))
        if self._record is not None and (self._record / _FACTS).exists():
            saved = _check_facts(self._record, self._facts, "train.record_routing")
            if not first_step and saved.get(_RUN) != self._facts[_RUN]:
                raise ConfigError(
                    f"train.record_routing={self._record} has the record of log.dir={saved.get(_RUN)}: name another "
                    "folder"
                )

    def inputs(self, step: int, others: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a step's last inputs: `others`, and the experts that it replays.

        Raises DataError if these are missing or damaged.
        """
        if self._replay is None:
            return others
        found = np.full(self._shape, self._experts, np.int32)
        found[self._blocks] = self._read(step)
        replayed = jax.make_array_from_callback(
            found.shape, NamedSharding(self._mesh, REPLICATED), lambda index: found[index]
        )
        return *(others or (None,)), replayed

    def take(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Write the experts of a step, if they are recorded, and return its other metrics. Raises ConfigError."""
        rest = dict(metrics)
        found = rest.pop(ROUTED, None)
        if found is None or self._record is None or not is_main_process():
            return rest
        content = BytesIO()
        np.save(content, np.asarray(found), allow_pickle=False)
        try:
            if not (self._record / _FACTS).exists():
                self._record.mkdir(parents=True, exist_ok=True)
                write_atomically(self._record / _FACTS, json.dumps(self._facts) + "\n")
            if step == self._first_step + 1:
                self._remove_after(step)
            write_together({_file(self._record, step): content.getvalue()})
        except OSError as error:
            raise ConfigError(
                f"train.record_routing={self._record} cannot be written ({error.strerror}): name another folder"
            ) from None
        return rest

    def _remove_after(self, step: int) -> None:
        """Remove later steps of an earlier start of this run, which trains them again."""
        assert self._record is not None
        newest = _file(self._record, step).name
        later = [path for path in self._record.glob("*.npy") if path.name > newest]
        for path in later:
            path.unlink()
        if later:
            print(f"train.record_routing={self._record}: removed {len(later)} steps of an earlier start", flush=True)

    @property
    def _blocks(self) -> list[int]:
        """The numbers of the blocks with experts."""
        return [block for block, kind in enumerate(self._config.model.block_kinds) if kind == "moe"]

    @property
    def _experts(self) -> int:
        return self._config.model.moe.num_experts

    @property
    def _shape(self) -> tuple[int, int, int]:
        config = self._config
        return config.model.num_layers, config.train.batch_size * config.data.seq_len, config.model.moe.top_k

    def _read(self, step: int) -> NDArray[np.int32]:
        """The experts of a step [M, G, k]. Raises DataError."""
        assert self._replay is not None
        file, (_, tokens, choices) = _file(self._replay, step), self._shape
        try:
            with file.open("rb") as opened:
                found = np.load(opened, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{file} cannot be read ({error}): record the step again") from None
        wanted = (len(self._blocks), tokens, choices)
        if found.shape != wanted or found.dtype != np.int32:
            raise DataError(
                f"{file} has {found.dtype}{list(found.shape)}, not experts in int32{list(wanted)}: record it again"
            )
        if not 0 <= found.min() <= found.max() <= self._experts:
            wrong = found[(found < 0) | (found > self._experts)][0]
            raise DataError(f"{file} has expert {wrong}, and model.moe.num_experts={self._experts}: record it again")
        ordered = np.sort(found, axis=-1)
        if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] < self._experts)).any():
            raise DataError(f"{file} has a token with one expert twice, which no gate chooses: record it again")
        return found


def facts_of(config: Config) -> dict[str, int]:
    """Return what two runs need to have in common to route the same tokens to the same experts."""
    moe = config.model.moe
    return {
        "model.num_layers": config.model.num_layers,
        "model.moe.num_experts": moe.num_experts,
        "model.moe.top_k": moe.top_k,
        "model.moe.moe_layer_freq": moe.moe_layer_freq,
        "model.moe.first_k_dense_replace": moe.first_k_dense_replace,
        "data.seq_len": config.data.seq_len,
        "train.batch_size": config.train.batch_size,
        "train.seed": config.train.seed,
    }


def _check_facts(folder: Path, facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the facts of a record. Raises ConfigError if it is of other sizes or of other tokens."""
    try:
        saved = read_json(folder / _FACTS)
    except FileNotFoundError:
        raise ConfigError(
            f"{name}={folder} has no {_FACTS}: name a folder that a run with train.record_routing has written"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}={folder}: {_FACTS} cannot be read ({error}): record it again") from None
    if not isinstance(saved, dict):
        raise ConfigError(f"{name}={folder}: {_FACTS} has no settings: record it again")
    for setting, own in facts.items():
        recorded = saved.get(setting)
        if setting == _TEXTS and recorded != own:
            raise ConfigError(
                f"{name}={folder} was recorded on other text than that of data.path: use the text of the record, or "
                "another folder"
            )
        if setting != _RUN and recorded != own:
            raise ConfigError(
                f"{name}={folder} was recorded with {setting}={recorded}, and this run has {setting}={own}: use "
                f"{setting}={recorded}, or another folder"
            )
    return saved


def _check_steps(folder: Path, steps: range) -> None:
    here = {path.name for path in folder.iterdir()}
    for step in steps:
        if _file(folder, step).name not in here:
            raise ConfigError(
                f"train.replay_routing={folder} has no step {step}: set train.steps={step - 1}, or record more"
            )


def _file(folder: Path, step: int) -> Path:
    return folder / f"{step:08}.npy"
