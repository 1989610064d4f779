"""Collective-permutes: the one place that calls `jax.lax.ppermute`.

It numbers the ranks of several axes in the order of the mesh, whatever the order of the axes that it is given.
`axis_index`, `PartitionSpec` and all other collectives number them in the order of the axes.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Shaped


def permuted(
    x: Shaped[Array, "..."], axes: str | tuple[str, ...], pairs: Sequence[tuple[int, int]]
) -> Shaped[Array, "..."]:
    """`x` of the first rank of each pair on its second one; zeros on a rank that is second in none.

    Ranks are numbered as `jax.lax.axis_index(axes)` does. Runs inside `shard_map`.
    """
    names = axes if isinstance(axes, tuple) else (axes,)
    along_mesh = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in names)
    sizes = [jax.lax.axis_size(name) for name in along_mesh]
    # of each rank as `axes` count it, its number along the mesh
    number_P = np.arange(np.prod(sizes)).reshape(sizes).transpose([along_mesh.index(name) for name in names]).ravel()
    along = [(int(number_P[source]), int(number_P[target])) for source, target in pairs]
    return jax.lax.ppermute(x, along_mesh, along)  # noqa: TID251
