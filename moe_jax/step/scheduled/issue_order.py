"""Enforce the order of a schedule in a compiled program.

Compilers may run independent operations in any order. So each task gets a dependency on the task before it on its
queue: `after_*` adds it to the input of a task, and `record_*` notes the result for the next one.

| queue | tasks |
|---|---|
| compute | compute tasks, and starts of collectives that end in another task (`only_starts`) |
| comm | exchanges, and all other collectives that use the same links |
| network | gathers and sums between nodes, where exchanges stay inside nodes (`uses_network`) |
| tensor | gathers and sums of rows over tensor ranks; on CPUs they are on comm |
"""

from collections import deque

import jax
import jax.numpy as jnp

from moe_jax.parallel.ordering import depend_on

_TASKS_TO_HIDE = 2  # compute tasks that a bounded collective may overlap with


class IssueOrder:
    """The order of the tasks of a step, or of one iteration of a loop over blocks.

    Some collectives are *bounded*: a compute task waits for those that were issued before the task before the previous
    one, although it does not need them. If TPUs gather weights, these are the exchanges and sums: XLA:TPU starts
    collectives as late as possible, one at a time, and those that nothing in a loop's iteration reads would all be at
    its end. Gathers are there: the memory is in use until then. With `uses_network` they are the gathers and sums,
    which XLA:GPU would place anywhere in an iteration, next to each other.
    """

    def __init__(self, platform: str, gathers: bool = False, uses_network: bool = False):
        """`gathers`: the weights of blocks are gathered by tasks. `uses_network`: on GPUs, gathers and sums are between
        nodes, and exchanges inside them.
        """
        self._platform, self._bounds_comm, self.uses_network = platform, gathers and platform == "tpu", uses_network
        # the result of the last task on each queue
        self._last_compute: jax.Array | None = None
        self._last_comm: jax.Array | None = None
        self._last_network: jax.Array | None = None
        self._last_over_tensor: jax.Array | None = None
        self._last_bounded: jax.Array | None = None  # of the last bounded collective, on comm or network
        # the same when each of the latest compute tasks was recorded: the next task waits for the first
        self._bounded_before: deque[jax.Array | None] = deque(maxlen=_TASKS_TO_HIDE)

    def after(self, x: jax.Array, earlier: jax.Array | None) -> jax.Array:
        """Return `x` unchanged, but only available after `earlier` exists; None: at once."""
        return x if earlier is None else depend_on(x, earlier, self._platform)

    # compute

    def after_compute(self, x: jax.Array) -> jax.Array:
        """Return `x`, the input of a compute task, ordered after the previous one and after bounded collectives."""
        x = self.after(x, self._last_compute)
        return self.after(x, self._bounded_before[0]) if self._bounded_before else x

    def record_compute(self, result: jax.Array, *others: jax.Array) -> None:
        """Record the result of a compute task; a result without elements is ignored, since nothing can depend on it.

        With `uses_network` the next task waits for `others`, too: what is left of a task cannot hide what follows.
        """
        for other in others if self.uses_network else ():
            result = self.after(result, other)
        self._last_compute = result if result.size else self._last_compute
        self._bounded_before.append(self._last_bounded)

    def arrived_late(self, result: jax.Array) -> jax.Array:
        """Return the result of a sum, on CPUs read after the compute tasks so far, so that these do not wait for it."""
        return self.after_compute(result) if self._platform == "cpu" else result

    # comm

    def after_comm(self, x: jax.Array, only_starts: bool = False) -> jax.Array:
        """Return `x`, the input of a collective, ordered after the previous collective.

        `only_starts`: the collective is only started here, and its start is ordered like a compute task, too.
        """
        x = self.after(x, self._last_comm)
        return self.after_compute(x) if only_starts else x

    def record_comm(self, result: jax.Array, only_starts: bool = False, is_bounded: bool = True) -> None:
        """Record the result of a collective, or of its start.

        `is_bounded`: this one is bounded where collectives of this queue are.
        """
        self._last_comm = result
        self._last_bounded = result if is_bounded and self._bounds_comm else self._last_bounded
        if only_starts:
            self._last_compute = result

    # network

    def after_network(self, x: jax.Array) -> jax.Array:
        """Return `x`, the input of a gather or sum between nodes, ordered after the previous one and after the previous
        compute task. Exchanges do not wait for it.
        """
        return self.after(self.after(x, self._last_compute), self._last_network)

    def record_network(self, result: jax.Array) -> None:
        """Record the result of a gather or sum between nodes."""
        self._last_network = self._last_bounded = result

    def after_gather(self, x: jax.Array) -> jax.Array:
        """Return `x`, the input of a gather of parameters, ordered after the previous collective on its links."""
        return self.after_network(x) if self.uses_network else self.after_comm(x)

    def record_gather(self, result: jax.Array) -> None:
        """Record the result of a gather of parameters."""
        if self.uses_network:
            self.record_network(result)
        else:
            self.record_comm(result, is_bounded=False)

    # tensor

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

    # loops

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
