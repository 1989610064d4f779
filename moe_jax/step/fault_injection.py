"""Faults that tests inject into training to check that runs survive them. Programs traced without a fault contain none
of this.

`nan_at` is traced into steps. With the environment variable in FOLDER set, a run in its own processes can be asked to
corrupt its state in memory.
"""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.parallel.mesh import ALL_AXES
from moe_jax.parallel.trees import Params

FOLDER = "MOE_JAX_FAULTS"  # environment variable: a folder in which a file `nan-RANK` requests NaN in that process


@dataclasses.dataclass(frozen=True)
class Nan:
    """A fault: one device computes with NaN in place of a parameter, while the stored parameter stays as it is."""

    step: int  # the first faulty step; a run begins with 1
    device: int  # index in the mesh
    parameter: str  # path in the tree, e.g. segments.0.0.norm
    steps: int


_faults: list[Nan] = []  # active faults, for steps traced in any thread


@contextmanager
def nan_at(step: int, device: int, parameter: str = "norm", steps: int = 1) -> Iterator[None]:
    """Trace steps in this context with NaN on one device, in `steps` steps starting with `step`."""
    fault = Nan(step, device, parameter, steps)
    _faults.append(fault)
    try:
        yield
    finally:
        _faults.remove(fault)


def inject_faults(params: Params, step: jax.Array | None) -> Params:
    """Return the parameters that this device computes with after `step` completed steps. Runs inside `shard_map`."""
    if step is None or not _faults:
        return params

    def inject(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        for fault in _faults:
            if jax.tree_util.keystr(path, simple=True, separator=".") == fault.parameter:
                since = step + 1 - fault.step
                here = (jax.lax.axis_index(ALL_AXES) == fault.device) & (since >= 0) & (since < fault.steps)
                leaf = jnp.where(here, jnp.nan, leaf)
        return leaf

    return jax.tree.map_with_path(inject, params)


def inject_requested_fault(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state, with a parameter set to NaN on this process's first device if a file in FOLDER requests it. The
    file is deleted.
    """
    if FOLDER not in os.environ:
        return state
    with suppress(FileNotFoundError):
        (Path(os.environ[FOLDER]) / f"nan-{jax.process_index()}").unlink()
        return state | {"params": state["params"] | {"norm": _with_nan(state["params"]["norm"])}}
    return state


def _with_nan(x: jax.Array) -> jax.Array:
    first, *others = (shard.data for shard in x.addressable_shards)
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [first * jnp.nan, *others])
