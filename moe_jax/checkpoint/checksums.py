"""Digests of arrays: two numbers for each, computed on the devices, and independent of how the arrays are sharded.

Shape suffixes: L arrays, P processes.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.stages import Wrapped
from jaxtyping import Array, UInt32

from moe_jax.distributed.processes import allgather, allgather_rows
from moe_jax.errors import EXIT_TRY_AGAIN, UserError
from moe_jax.parallel.host_memory import to_device
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.parallel.word_hash import index_of, mix

Digest = tuple[int, int]

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by the bytes of an element; 8 are two words


class ReplicasError(UserError):
    """Replicas of an array differ between devices. They were equal at the step of the newest checkpoint."""

    exit_code = EXIT_TRY_AGAIN


def digests(tree: Any) -> UInt32[Array, "L 2"]:
    """Compute two digests of each array, in the order of the tree's leaves. Arrays of the host are read by devices.

    Both are sums modulo 2³², which do not depend on the order of addition. The first is Σ word · (2·index + 1) over the
    array's 32-bit words and their global indices: as the weights are odd, flipping any one bit changes it. Two flipped
    sign bits do not change it (they add 2³¹ times the sum of two odd numbers), so the second digest is
    Σ mix(word ⊕ mix(index)), in which every bit of a word affects all bits of its term.
    """
    return jnp.stack([_digest(to_device(leaf)) for leaf in jax.tree.leaves(tree)])


def digest_program(like: Any) -> Wrapped:
    """Make a program of `digests` for trees with the shardings of `like`; every device gets all digests."""
    sharding = jax.tree.leaves(like)[0].sharding
    replicated = NamedSharding(sharding.mesh, REPLICATED) if isinstance(sharding, NamedSharding) else None
    return jax.jit(digests, out_shardings=replicated)


def agreed_digests(found: Any, step: int, state: Any) -> UInt32[np.ndarray, "L 2"]:
    """Return the digests of a state if all devices agree on them; `found` is the output of `digest_program`.

    All processes call it. Raises ReplicasError on all of them if any two replicas of an array differ.
    """
    shards = getattr(found, "addressable_shards", None)
    rows = np.stack([np.asarray(shard.data) for shard in shards]) if shards else np.asarray(found)[None]
    codes = set(allgather(zlib.crc32(rows[0].tobytes()) | 1 if (rows == rows[0]).all() else 0))
    if len(codes) == 1 and 0 not in codes:
        return rows[0]
    ends_P2L2 = allgather_rows(np.stack([rows.min(axis=0), rows.max(axis=0)]))
    differs_L = (ends_P2L2 != ends_P2L2[:1, :1]).any(axis=(0, 1, 3))
    number = int(np.argmax(differs_L))
    raise ReplicasError(
        f"replicas of {names_of(state)[number]} are not the same after step {step} ({_where(ends_P2L2[:, :, number])}; "
        f"{differs_L.sum()} of {len(differs_L)} arrays differ), so this state is not saved: run the same command to "
        "resume from the newest checkpoint; if it happens again, check the memory of these devices"
    )


def _where(ends_P22: UInt32[np.ndarray, "P 2 2"]) -> str:
    """Name the processes on which replicas of an array differ, from its least and largest digests on each process."""
    differing = [process for process, (least, largest) in enumerate(ends_P22) if (least != largest).any()]
    if differing:
        return f"devices of process {', '.join(map(str, differing))} differ"
    of_process = [ends.tobytes() for ends in ends_P22]
    most, count = Counter(of_process).most_common(1)[0]
    others = [process for process, each in enumerate(of_process) if each != most]
    if count > len(others):
        return f"process {', '.join(map(str, others))} differs from the others"
    return f"processes {', '.join(map(str, range(len(of_process))))} differ"


def names_of(tree: Any) -> list[str]:
    """Return the path of each leaf of a tree, e.g. `params.head`."""
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(tree)]


def _digest(x: jax.Array) -> UInt32[Array, " 2"]:
    bits = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])
    word = bits.astype(jnp.uint32)
    index, zero = index_of(word.shape), jnp.uint32(0)
    terms = word * (2 * index + 1), mix(word ^ mix(index))
    # one reduction of both sums needs no temporary array; two would share terms as large as the array
    return jnp.stack(jax.lax.reduce(terms, (zero, zero), _add, tuple(range(word.ndim))))


def _add(some: Sequence[jax.Array], others: Sequence[jax.Array]) -> list[jax.Array]:
    return [x + y for x, y in zip(some, others, strict=True)]
