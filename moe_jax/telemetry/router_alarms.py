"""Says when experts collapse: some of a block unused for many steps, or its load far from even.

M blocks with experts, E experts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

from moe_jax.config import Config
from moe_jax.telemetry.run_log import RunLog

_LISTED = 8  # unused experts that are named


class Alarms:
    """Counts unused steps on the host: a program on the devices would wait behind the step that was begun meanwhile.

    An alarm is told once, and again only after the block has recovered, which is told as well.
    """

    def __init__(self, config: Config, log: RunLog):
        self._config, self._log = config, log
        self._blocks = [block for block, kind in enumerate(config.model.block_kinds) if kind == "moe"]
        shape = len(self._blocks), config.model.moe.num_experts
        self._unused_ME = np.zeros(shape, np.int64)  # steps since each expert was chosen
        self._raised: set[tuple[str, int]] = set()  # which alarm, of which block

    def count(self, load_ME: Float[Array, "M E"]) -> None:
        """Take in the shares of pairs of a step that is done."""
        if self._config.log.alarm_unused_steps is not None:
            self._unused_ME = np.where(jax.device_get(load_ME) > 0, 0, self._unused_ME + 1)

    def look(self, step: int, statistics: Mapping[str, Any]) -> None:
        """Tell and record what is wrong and was not, and the other way round."""
        wrong = dict(self._unused()) | dict(self._uneven(statistics["block_load_entropy"]))
        for alarm, text in wrong.items():
            if alarm not in self._raised:
                self._log.write({"step": step, "alarm": text})
                self._log.warn(f"step {step}: {text}")
        for kind, block in sorted(self._raised - wrong.keys()):
            text = f"block {block} has recovered: {_RECOVERED[kind]}"
            self._log.write({"step": step, "alarm_over": text})
            self._log.tell(f"step {step}: {text}")
        self._raised = {*wrong}

    def _unused(self) -> Iterator[tuple[tuple[str, int], str]]:
        bound = self._config.log.alarm_unused_steps
        if bound is None:
            return
        for block, unused_E in zip(self._blocks, self._unused_ME >= bound, strict=True):
            if unused_E.any():
                experts = np.flatnonzero(unused_E).tolist()
                named = ", ".join(map(str, experts[:_LISTED])) + (", …" if len(experts) > _LISTED else "")
                yield (
                    ("unused", block),
                    f"block {block}: no token has chosen {len(experts)} of {len(unused_E)} experts ({named}) for "
                    f"log.alarm_unused_steps={bound} steps",
                )

    def _uneven(self, entropies: list[float]) -> Iterator[tuple[tuple[str, int], str]]:
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
    """What a record says of each block's shares of pairs, and of the worst block. Entropy is 1 of an even load."""
    experts = load_ME.shape[-1]
    share_ME = load_ME.astype(np.float64)
    log_ME = np.log(share_ME, where=share_ME > 0, out=np.zeros_like(share_ME))
    entropy_M = 0 - (share_ME * log_ME).sum(axis=-1) / np.log(experts) if experts > 1 else np.ones(len(share_ME))
    return {
        "block_load_max_over_mean": np.round(share_ME.max(axis=-1) * experts, 6).tolist(),
        "block_load_entropy": np.round(entropy_M, 6).tolist(),
        "load_entropy": round(float(entropy_M.min()), 6),
    }
