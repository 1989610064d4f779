"""The order of a schedule inside a program: compute tasks behind compute tasks, collectives behind collectives."""

import jax

from moe_jax.parallel.ordering import after


class Ties:
    """Ties each task to the one before it on its stream."""

    def __init__(self, platform: str):
        self._platform = platform
        self._computed: jax.Array | None = None  # result of the compute task before
        self._issued: jax.Array | None = None  # result of the collective before

    def in_turn(self, x: jax.Array) -> jax.Array:
        """`x`, which a compute task starts with."""
        return self._behind(x, self._computed)

    def computed(self, result: jax.Array) -> None:
        """Note what a compute task came to; a result without elements cannot be waited for."""
        self._computed = result if result.size else self._computed

    def in_order(self, x: jax.Array, only_starts: bool = False) -> jax.Array:
        """`x`, which a collective sends.

        `only_starts`: the collective only starts here, and its start is a compute task like others.
        """
        x = self._behind(x, self._issued)
        return self.in_turn(x) if only_starts else x

    def issued(self, result: jax.Array, only_starts: bool = False) -> None:
        """Note what a collective, or its start, came to."""
        self._issued = result
        if only_starts:
            self._computed = result

    def _behind(self, x: jax.Array, earlier: jax.Array | None) -> jax.Array:
        return x if earlier is None or not x.size else after(x, earlier, self._platform)
