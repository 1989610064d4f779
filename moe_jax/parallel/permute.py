"""Collective-permutes. Only this module calls `jax.lax.ppermute`.

`ppermute` numbers the ranks of several axes in the order of the mesh, whatever the order of its axes argument.
`axis_index`, `PartitionSpec` and all other collectives number them in the order of the axes argument.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Shaped


def permuted(
    x: Shaped[Array, "..."], axes: str | tuple[str, ...], pairs: Sequence[tuple[int, int]]
) -> Shaped[Array, "..."]:
    """Send `x` from the first rank of each pair to the second. A rank that is second in no pair gets zeros.

    Ranks are numbered as by `jax.lax.axis_index(axes)`. Runs inside `shard_map`.
    """
    names = axes if isinstance(axes, tuple) else (axes,)
    along_mesh = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in names)
    sizes = [jax.lax.axis_size(name) for name in along_mesh]
    # maps the number of a rank in the order of `axes` to its number in the order of the mesh
    number_P = np.arange(np.prod(sizes)).reshape(sizes).transpose([along_mesh.index(name) for name in names]).ravel()
    along = [(int(number_P[source]), int(number_P[target])) for source, target in pairs]
    return jax.lax.ppermute(x, along_mesh, along)  # noqa: TID251
