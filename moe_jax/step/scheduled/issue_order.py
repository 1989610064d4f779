"""The order of a schedule inside a program: compute tasks behind compute tasks, collectives behind collectives."""

import jax
import jax.numpy as jnp

from moe_jax.parallel.ordering import depend_on


class IssueOrder:
    """Ties each task to the one before it on its stream."""

    def __init__(self, platform: str):
        self._platform = platform
        self._last_compute: jax.Array | None = None  # result of the compute task before
        self._last_comm: jax.Array | None = None  # result of the collective before

    def after_compute(self, x: jax.Array) -> jax.Array:
        """`x`, which a compute task starts with."""
        return self._depend(x, self._last_compute)

    def record_compute(self, result: jax.Array) -> None:
        """Note what a compute task came to; a result without elements cannot be waited for."""
        self._last_compute = result if result.size else self._last_compute

    def after_comm(self, x: jax.Array, only_starts: bool = False) -> jax.Array:
        """`x`, which a collective sends.

        `only_starts`: the collective only starts here, and its start is a compute task like others.
        """
        x = self._depend(x, self._last_comm)
        return self.after_compute(x) if only_starts else x

    def record_comm(self, result: jax.Array, only_starts: bool = False) -> None:
        """Note what a collective, or its start, came to."""
        self._last_comm = result
        if only_starts:
            self._last_compute = result

    def into_loop(self, number_n: jax.Array) -> jax.Array:
        """The numbers of a loop's turns, so that it begins after the collective before it.

        XLA:CPU orders collectives of one computation by itself, but those of a loop run concurrently with all that does
        not wait for the loop (`measure/races.py`). Compilers for other platforms order all of them.
        """
        return self.after_comm(number_n) if self._platform == "cpu" else number_n

    def end_of_iteration(self) -> jax.Array | None:
        """What a turn of the loop hands out for `out_of_loop`: an element of its last collective's result."""
        if self._platform != "cpu" or self._last_comm is None:
            return None
        return self._last_comm.ravel()[0].astype(jnp.float32)

    def out_of_loop(self, end_n: jax.Array | None) -> None:
        """Note that a loop has ended: the next collective begins after it."""
        self._last_comm = self._last_comm if end_n is None else end_n

    def _depend(self, x: jax.Array, earlier: jax.Array | None) -> jax.Array:
        return x if earlier is None or not x.size else depend_on(x, earlier, self._platform)
