"""Enforce the order of a schedule in a compiled program: compute tasks after compute tasks, collectives after
collectives.
"""

import jax
import jax.numpy as jnp

from moe_jax.parallel.ordering import depend_on


class IssueOrder:
    """Adds a dependency from each task to the previous one on its stream."""

    def __init__(self, platform: str):
        self._platform = platform
        self._last_compute: jax.Array | None = None  # result of the previous compute task
        self._last_comm: jax.Array | None = None  # result of the previous collective
        self._last_over_tensor: jax.Array | None = None  # the same of gathers and sums of rows over tensor ranks

    def after_compute(self, x: jax.Array) -> jax.Array:
        """Return `x`, the input of a compute task, ordered after the previous compute task."""
        return self.after(x, self._last_compute)

    def record_compute(self, result: jax.Array) -> None:
        """Record the result of a compute task; a result without elements is ignored, since nothing can depend on it."""
        self._last_compute = result if result.size else self._last_compute

    def after_comm(self, x: jax.Array, only_starts: bool = False) -> jax.Array:
        """Return `x`, the input of a collective, ordered after the previous collective.

        `only_starts`: the collective is only started here, and its start is ordered like a compute task, too.
        """
        x = self.after(x, self._last_comm)
        return self.after_compute(x) if only_starts else x

    def after_over_tensor(self, x: jax.Array) -> jax.Array:
        """Return `x`, the input of a gather or sum over tensor ranks, ordered after the previous one.

        They may overlap with exchanges, which have other links; XLA:CPU overlaps no collectives.
        """
        return self.after_comm(x) if self._platform == "cpu" else self.after(x, self._last_over_tensor)

    def record_over_tensor(self, result: jax.Array) -> None:
        """Record the result of a gather or sum over tensor ranks; one without elements is ignored."""
        if not result.size:
            return
        if self._platform == "cpu":
            self.record_comm(result)
        self._last_over_tensor = result

    def record_comm(self, result: jax.Array, only_starts: bool = False) -> None:
        """Record the result of a collective, or of its start."""
        self._last_comm = result
        if only_starts:
            self._last_compute = result

    def into_loop(self, number_n: jax.Array) -> jax.Array:
        """Return the iteration numbers of a loop, ordered after the previous collective and the previous compute task.

        Compute tasks have collectives, too, if attention sends keys and values around a ring. XLA:CPU orders the
        collectives of one computation by itself, but those of a loop run concurrently with everything that does not
        wait for the loop (`measure/races.py`). Compilers for other platforms order all collectives.
        """
        return self.after_compute(self.after_comm(number_n)) if self._platform == "cpu" else number_n

    def end_of_iteration(self) -> jax.Array | None:
        """Return an element of the last collective's result, which each loop iteration outputs for `out_of_loop`; None
        if not needed.
        """
        if self._platform != "cpu" or self._last_comm is None:
            return None
        return self._last_comm.ravel()[0].astype(jnp.float32)

    def out_of_loop(self, end_n: jax.Array | None) -> None:
        """Record the end of a loop: the next collective starts after it."""
        self._last_comm = self._last_comm if end_n is None else end_n

    def after(self, x: jax.Array, earlier: jax.Array | None) -> jax.Array:
        """Return `x` unchanged, but only available after `earlier` exists; arrays without elements are ignored."""
        return x if earlier is None or not x.size or not earlier.size else depend_on(x, earlier, self._platform)
