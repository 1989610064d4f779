"""Runs per-device code on a mesh of the eight devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax.stages import Wrapped

from moe_jax.config import MeshConfig
from moe_jax.parallel import background
from moe_jax.parallel.mesh import make_mesh


def on_mesh(
    function: Callable[..., Any], in_specs: Any, out_specs: Any, *, data: int, expert: int, tensor: int = 1
) -> Wrapped:
    """`function` as a jitted program over data × expert × tensor = 8 devices."""
    mesh = make_mesh(MeshConfig(data=data, expert=expert, tensor=tensor))
    background.connect(mesh)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
