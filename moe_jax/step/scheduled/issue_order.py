"""Enforce the order of a schedule in a compiled program: compute tasks after compute tasks, collectives after
collectives.
"""

from collections import deque

import jax
import jax.numpy as jnp

from moe_jax.parallel.ordering import depend_on

_TASKS_TO_HIDE = 2  # compute tasks that a collective may run beside


class IssueOrder:
    """Adds a dependency from each task to the previous one on its stream."""

    def __init__(self, platform: str, gathers: bool = False, links_apart: bool = False):
        """`gathers`: the weights of blocks are gathered by tasks. `links_apart`: on GPUs, gathers and sums use other
        links than exchanges.
        """
        self._platform, self._awaits_comm, self.links_apart = platform, gathers and platform == "tpu", links_apart
        self._last_compute: jax.Array | None = None  # result of the previous compute task
        self._last_comm: jax.Array | None = None  # result of the previous collective
        self._last_beside: jax.Array | None = None  # the same of gathers and sums on links of their own
        self._last_over_tensor: jax.Array | None = None  # the same of gathers and sums of rows over tensor ranks
        # result of the last collective that later compute tasks wait for: on TPUs of all but gathers of parameters
        self._last_awaited: jax.Array | None = None
        # the same before each of the latest compute tasks
        self._comm_before: deque[jax.Array | None] = deque(maxlen=_TASKS_TO_HIDE)

    def after_compute(self, x: jax.Array) -> jax.Array:
        """Return `x`, the input of a compute task, ordered after the previous compute task.

        If TPUs gather weights, also after the exchanges and sums that were issued before the task before that one:
        XLA:TPU starts collectives as late as possible, one at a time, and those that nothing in a loop's iteration
        reads would all be at its end. Gathers are there: the memory is in use until then. On GPUs with `links_apart`,
        the same holds for gathers and sums, which XLA:GPU would place anywhere in an iteration, next to each other.
        """
        x = self.after(x, self._last_compute)
        return self.after(x, self._comm_before[0]) if self._comm_before else x

    def record_compute(self, result: jax.Array, *others: jax.Array) -> None:
        """Record the result of a compute task; a result without elements is ignored, since nothing can depend on it.

        With `links_apart` the next task waits for `others`, too: what is left of a task cannot hide what follows.
        """
        for other in others if self.links_apart else ():
            result = self.after(result, other)
        self._last_compute = result if result.size else self._last_compute
        self._comm_before.append(self._last_awaited)

    def after_comm(self, x: jax.Array, only_starts: bool = False) -> jax.Array:
        """Return `x`, the input of a collective, ordered after the previous collective.

        `only_starts`: the collective is only started here, and its start is ordered like a compute task, too.
        """
        x = self.after(x, self._last_comm)
        return self.after_compute(x) if only_starts else x

    def after_beside(self, x: jax.Array) -> jax.Array:
        """Return `x`, the input of a gather or sum on links of its own, ordered after the previous one and after the
        previous compute task. Exchanges do not wait for it.
        """
        return self.after(self.after(x, self._last_compute), self._last_beside)

    def record_beside(self, result: jax.Array) -> None:
        """Record the result of a gather or sum on links of its own."""
        self._last_beside = self._last_awaited = result

    def after_gather(self, x: jax.Array) -> jax.Array:
        """Return `x`, the input of a gather of parameters, ordered after the previous collective on its links."""
        return self.after_beside(x) if self.links_apart else self.after_comm(x)

    def record_gather(self, result: jax.Array) -> None:
        """Record the result of a gather of parameters."""
        if self.links_apart:
            self.record_beside(result)
        else:
            self.record_comm(result, is_awaited=False)

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

    def record_comm(self, result: jax.Array, only_starts: bool = False, is_awaited: bool = True) -> None:
        """Record the result of a collective, or of its start.

        `is_awaited`: later compute tasks wait for it, although they do not need it (see `after_compute`).
        """
        self._last_comm = result
        self._last_awaited = result if is_awaited and self._awaits_comm else self._last_awaited
        if only_starts:
            self._last_compute = result

    def arrived_late(self, result: jax.Array) -> jax.Array:
        """Return the result of a sum, on CPUs read after the compute tasks so far, so that these do not wait for it."""
        return self.after_compute(result) if self._platform == "cpu" else result

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
