"""What routers read besides features: the id of a token, its place in the batch, and the random numbers of the step,
which some gates need, and which tokens are padding.

A token's random numbers depend only on train.seed, the step, the block and the token's place in the global batch, so
they are the same on every mesh and however a batch is split. B sequences of this device, N tokens of each, of which
this device has n, T = B·n. G tokens of the global batch, L blocks of the model, k choices, E experts.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from moe_jax.config import MoEConfig
from moe_jax.parallel.mesh import BATCH_AXES
from moe_jax.parallel.sequence_shards import local_shard

_FORCED = 16.0  # more than any score with its bias differs from another one


class RouterInputs(NamedTuple):
    """What routers read about some tokens: [B, n] for a part of the batch, [T] for one call of a gate."""

    id: Int[Array, "..."]  # index in the vocabulary
    place: Int[Array, "..."]  # index in the global batch
    key: UInt32[Array, " 2"] | None  # derived from the seed and the step; None: evaluation, without noise
    block: Int[Array, ""]  # the number of the block in the model
    is_padding: Bool[Array, "..."] | None = None  # tokens that only fill a sequence; None: there are none
    replayed_LGk: Int[Array, "L G k"] | None = None  # the experts of each token; None: the gate chooses them
    blank_Gk: Int[Array, "G k"] | None = None  # zeros, to record experts in; None: they are not recorded

    def above(self, blocks: int | jax.Array) -> "RouterInputs":
        """Return the inputs for the same tokens, this many blocks higher."""
        return self._replace(block=self.block + blocks)

    def flat(self) -> "RouterInputs":
        """Return the inputs with tokens along one dimension, [T]."""
        return self.with_tokens(jnp.ravel)

    def parts(self, count: int) -> list["RouterInputs"]:
        """Split the sequences into `count` equal parts."""

        def part(number: int) -> RouterInputs:
            return self.with_tokens(lambda x_Bn: jnp.split(x_Bn, count)[number])

        return [part(number) for number in range(count)]

    def with_tokens(self, change: Callable[[jax.Array], jax.Array]) -> "RouterInputs":
        """Return the inputs with each array of tokens changed alike."""
        is_padding = None if self.is_padding is None else change(self.is_padding)
        return self._replace(id=change(self.id), place=change(self.place), is_padding=is_padding)

    def replaying_bias(self, num_experts: int) -> Float[Array, "T E"] | None:
        """Return a bias on scores of at most 1 with which the experts of a record are chosen, in its order.

        Returns None if the gate is to choose.
        """
        if self.replayed_LGk is None:
            return None
        expert_Tk = self.replayed_LGk[self.block][self.place]
        level_k = _FORCED * jnp.arange(expert_Tk.shape[1], 0, -1, dtype=jnp.float32)
        return (jax.nn.one_hot(expert_Tk, num_experts) * level_k[:, None]).sum(axis=1)

    def recorded(self, expert_Tk: Int[Array, "T k"]) -> Int[Array, "G k"] | None:
        """Return expert + 1 of these tokens and 0 of all others, so that the records of all tokens add up to a whole.

        Returns None if nothing is recorded.
        """
        return None if self.blank_Gk is None else self.blank_Gk.at[self.place].set(expert_Tk + 1, unique_indices=True)

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

    def router_inputs(
        self,
        id_BN: Int[Array, "B N"],
        moe: MoEConfig,
        seed: int,
        is_padding_BN: Bool[Array, "B N"] | None = None,
        replayed_LGk: Int[Array, "L G k"] | None = None,
        records: bool = False,
    ) -> RouterInputs | None:
        """Return the inputs for the tokens of these sequences that this device has.

        `records`: the experts of training steps are recorded. Returns None if no router reads them. Runs inside
        `shard_map`.
        """
        records = records and self.step is not None
        sees_tokens = moe.gate_facts.sees_tokens or records or replayed_LGk is not None
        if moe.num_experts == 0 or not (sees_tokens or is_padding_BN is not None):
            return None
        sequences, length = id_BN.shape
        first = (jax.lax.axis_index(BATCH_AXES) * self.parts + self.part) * sequences
        sequence_B1 = first + jnp.arange(sequences, dtype=jnp.int32)[:, None]
        place_BN = sequence_B1 * length + jnp.arange(length, dtype=jnp.int32)
        key = None if self.step is None else jax.random.key_data(jax.random.fold_in(jax.random.key(seed), self.step))
        is_padding_Bn = None if is_padding_BN is None else local_shard(is_padding_BN)
        tokens = jax.lax.axis_size(BATCH_AXES) * self.parts * sequences * length
        blank_Gk = jnp.zeros((tokens, moe.top_k), jnp.int32) if records else None
        return RouterInputs(
            local_shard(id_BN), local_shard(place_BN), key, jnp.int32(0), is_padding_Bn, replayed_LGk, blank_Gk
        )


EVALUATION = BatchPart()
