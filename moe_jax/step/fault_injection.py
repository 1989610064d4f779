"""Faults put into training on purpose, to see that runs survive them. Without one, nothing is there of them.

`nan_at` is traced into steps. With FOLDER, a run in processes of its own can be asked to damage what is in its memory.
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

FOLDER = "MOE_JAX_FAULTS"  # environment variable: where a file `nan-RANK` asks for NaN in what that process holds


@dataclasses.dataclass(frozen=True)
class Nan:
    """One device computes with NaN in the place of a parameter, which itself stays as it is."""

    step: int  # the first such one; 1 is a run's first
    device: int  # its place in the mesh
    parameter: str  # path in the tree, e.g. segments.0.0.norm
    steps: int


_faults: list[Nan] = []  # of steps traced now, in whichever thread


@contextmanager
def nan_at(step: int, device: int, parameter: str = "norm", steps: int = 1) -> Iterator[None]:
    """Steps traced in this context have NaN on one device, in `steps` of them from `step` on."""
    fault = Nan(step, device, parameter, steps)
    _faults.append(fault)
    try:
        yield
    finally:
        _faults.remove(fault)


def inject_faults(params: Params, step: jax.Array | None) -> Params:
    """Parameters as this device computes with them behind `step` done steps; inside `shard_map`."""
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
    """The state with NaN for a parameter on this process's first device, if FOLDER asks for it, which it does once."""
    if FOLDER not in os.environ:
        return state
    with suppress(FileNotFoundError):
        (Path(os.environ[FOLDER]) / f"nan-{jax.process_index()}").unlink()
        return state | {"params": state["params"] | {"norm": _with_nan(state["params"]["norm"])}}
    return state


def _with_nan(x: jax.Array) -> jax.Array:
    first, *others = (shard.data for shard in x.addressable_shards)
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [first * jnp.nan, *others])
