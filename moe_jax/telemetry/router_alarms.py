"""Alarms for collapsed routing: experts of a block that are unused for many steps, or a very uneven load.

M is the number of blocks with experts, E the number of experts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

from moe_jax.config import Config
from moe_jax.telemetry.run_log import RunLog

_MAX_LISTED = 8  # unused experts named in a message


class Alarms:
    """Counts on the host for how many steps each expert is unused, and reports alarms.

    A program on the devices would have to wait for the step that was started in the meantime. An alarm is reported
    once, and again only after the block has recovered, which is reported as well.
    """

    def __init__(self, config: Config, log: RunLog):
        self._config, self._log = config, log
        self._blocks = [block for block, kind in enumerate(config.model.block_kinds) if kind == "moe"]
        shape = len(self._blocks), config.model.moe.num_experts
        self._unused_ME = np.zeros(shape, np.int64)  # steps since each expert was chosen
        self._raised: set[tuple[str, int]] = set()  # kind of alarm, block

    def count(self, load_ME: Float[Array, "M E"]) -> None:
        """Take the share of (token, choice) pairs of each expert in a finished step."""
        if self._config.log.alarm_unused_steps is not None:
            self._unused_ME = np.where(jax.device_get(load_ME) > 0, 0, self._unused_ME + 1)

    def check(self, step: int, statistics: Mapping[str, Any]) -> None:
        """Report and record new alarms, and blocks that have recovered. `statistics` are from `load_statistics`."""
        wrong = dict(self._unused()) | dict(self._uneven(statistics["block_load_entropy"]))
        for alarm, text in wrong.items():
            if alarm not in self._raised:
                self._log.write({"step": step, "alarm": text})
                self._log.warn(f"step {step}: {text}")
        for kind, block in sorted(self._raised - wrong.keys()):
            text = f"block {block} has recovered: {_RECOVERED[kind]}"
            self._log.write({"step": step, "alarm_over": text})
            self._log.info(f"step {step}: {text}")
        self._raised = {*wrong}

    def _unused(self) -> Iterator[tuple[tuple[str, int], str]]:
        """Alarms for experts unused for `log.alarm_unused_steps` steps, each with its text."""
        bound = self._config.log.alarm_unused_steps
        if bound is None:
            return
        for block, unused_E in zip(self._blocks, self._unused_ME >= bound, strict=True):
            if unused_E.any():
                experts = np.flatnonzero(unused_E).tolist()
                named = ", ".join(map(str, experts[:_MAX_LISTED])) + (", …" if len(experts) > _MAX_LISTED else "")
                yield (
                    ("unused", block),
                    f"block {block}: no token has chosen {len(experts)} of {len(unused_E)} experts ({named}) for "
                    f"log.alarm_unused_steps={bound} steps",
                )

    def _uneven(self, entropies: list[float]) -> Iterator[tuple[tuple[str, int], str]]:
        """Alarms for blocks whose load has an entropy below `log.alarm_entropy`, each with its text."""
        bound = self._config.log.alarm_entropy
        if bound is None:
            return
        for block, entropy in zip(self._blocks, entropies, strict=True):
            if entropy < bound:
                yield (
                    ("uneven", block),
                    f"block {block}: the load's entropy is {entropy:.2f} of an even one's, below "
                    f"log.alarm_entropy={bound}",
                )


_RECOVERED = {"unused": "all of its experts are used", "uneven": "its load is more even"}


def load_statistics(load_ME: NDArray[np.float32]) -> dict[str, float | list[float]]:
    """Statistics for a record: of each block's load and of the worst block.

    `load_ME` has the share of (token, choice) pairs of each expert. Entropies are relative to that of an even load.
    """
    experts = load_ME.shape[-1]
    share_ME = load_ME.astype(np.float64)
    log_ME = np.log(share_ME, where=share_ME > 0, out=np.zeros_like(share_ME))
    entropy_M = 0 - (share_ME * log_ME).sum(axis=-1) / np.log(experts) if experts > 1 else np.ones(len(share_ME))
    return {
        "block_load_max_over_mean": np.round(share_ME.max(axis=-1) * experts, 6).tolist(),
        "block_load_entropy": np.round(entropy_M, 6).tolist(),
        "load_entropy": round(float(entropy_M.min()), 6),
    }
