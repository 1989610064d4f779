"""What some gates read besides features: the id of a token, its place in the batch, and the random numbers of the step.

A token's random numbers depend only on train.seed, the step, the block and the token's place in the global batch, so
they are the same on every mesh and however a batch is split. B sequences of this device, N tokens of each, of which
this device has n, T = B·n.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, UInt32

from moe_jax.config import MoEConfig
from moe_jax.parallel.mesh import BATCH_AXES
from moe_jax.parallel.sequence_shards import local_shard


class RouterInputs(NamedTuple):
    """What gates read about some tokens: [B, n] for a part of the batch, [T] for one call of a gate."""

    id: Int[Array, "..."]  # index in the vocabulary
    place: Int[Array, "..."]  # index in the global batch
    key: UInt32[Array, " 2"] | None  # derived from the seed and the step; None: evaluation, without noise
    block: Int[Array, ""]  # the number of the block in the model

    def above(self, blocks: int | jax.Array) -> "RouterInputs":
        """Return the inputs for the same tokens, this many blocks higher."""
        return self._replace(block=self.block + blocks)

    def flat(self) -> "RouterInputs":
        """Return the inputs with tokens along one dimension, [T]."""
        return self._replace(id=self.id.ravel(), place=self.place.ravel())

    def parts(self, count: int) -> list["RouterInputs"]:
        """Split the sequences into `count` equal parts."""
        pieces = (jnp.split(x_Bn, count) for x_Bn in (self.id, self.place))
        return [self._replace(id=id_bn, place=place_bn) for id_bn, place_bn in zip(*pieces, strict=True)]

    def keys(self) -> Key[Array, " T"]:
        """Return a random key for each token in this block. In evaluation it depends on neither seed nor step."""
        key = jax.random.key(0) if self.key is None else jax.random.wrap_key_data(self.key)
        key = jax.random.fold_in(key, self.block)
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, self.place)


@dataclasses.dataclass(frozen=True)
class BatchPart:
    """The part of a device's batch that some tokens belong to, and the step."""

    step: jax.Array | None = None  # None: evaluation
    part: int | jax.Array = 0
    parts: int = 1

    def router_inputs(self, id_BN: Int[Array, "B N"], moe: MoEConfig, seed: int) -> RouterInputs | None:
        """Return the inputs for the tokens of these sequences that this device has.

        Returns None if no gate reads them. Runs inside `shard_map`.
        """
        if moe.num_experts == 0 or not moe.gate_facts.sees_tokens:
            return None
        sequences, length = id_BN.shape
        first = (jax.lax.axis_index(BATCH_AXES) * self.parts + self.part) * sequences
        sequence_B1 = first + jnp.arange(sequences, dtype=jnp.int32)[:, None]
        place_BN = sequence_B1 * length + jnp.arange(length, dtype=jnp.int32)
        key = None if self.step is None else jax.random.key_data(jax.random.fold_in(jax.random.key(seed), self.step))
        return RouterInputs(local_shard(id_BN), local_shard(place_BN), key, jnp.int32(0))


EVALUATION = BatchPart()
