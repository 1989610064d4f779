"""Measurements of the links of a testbed: durations of exchanges between two processes and of gathers between two
neighbours, and the compute that exchanges cost.
"""

import functools
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import box
import jax
import numpy as np
from benchmark_harness import Harness, Profile, Step, seconds_per_step
from jax.experimental import multihost_utils
from predicted_cases import LineTimes, LinkTimes

from moe_jax.parallel import background
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.plan.curves import fit_linear
from moe_jax.plan.task_times import Linear

_SIZES = (2**18, 2**20, 2**22)  # bytes that each process owns
_REPEATS = 9
_IN_A_ROW = 5  # collectives that one program starts
_ARRIVED_S = 0.02  # seconds to wait between start and finish, longer than an exchange takes
_SLOWED = 5  # compute steps that run concurrently with transfers
_LONGER = 2  # factor by which the transfers take longer than compute alone
_UNTHROTTLED = 10e9  # bits per second
Wait = Callable[[], None]


class Link:
    """Exchanges over the link of a harness's mesh, and gathers over its tensor ranks."""

    def __init__(self, harness: Harness, profile: Profile, share: float = 1.0):
        """`share` of a core is what each process has."""
        self._share, self._profile = share, profile
        self._tensor = harness.config.mesh.sizes["tensor"]
        self._on_mesh = functools.partial(jax.shard_map, mesh=harness.mesh, out_specs=REPLICATED, check_vma=False)
        box.set_data_rate(_UNTHROTTLED)
        self._start_times, self._finish_times = self._handling()
        self._in_node = self._line("gather_rows", jax.process_index() ^ 1) if self._tensor > 1 else None

    def times(self, rate: float) -> LinkTimes:
        """Measure at this number of bits per second; the result is the same on all processes."""
        box.set_data_rate(rate)
        other = (jax.process_index() + self._tensor) % (2 * self._tensor)
        between = self._line("exchange", other)
        return LinkTimes(between=between, in_node=self._in_node, start=self._start_times, finish=self._finish_times)

    def _line(self, kind: background.Kind, other: int) -> LineTimes:
        """Measure collectives with another process: alone, next to compute, and what compute loses."""
        alone_s, busy_s = self._transfers_s(kind, other), self._transfers_s(kind, other, self._profile.step)
        line = fit_linear([size / 2 for size in _SIZES], alone_s).line
        line = Linear(same(line.alpha_s), same(line.beta_s))
        return LineTimes(
            alpha_s=line.alpha_s,
            bytes_per_s=1 / line.beta_s,
            busy_s=max(same(statistics.mean(busy_s) - statistics.mean(alone_s)), 0.0),
            slowdown=same(self._slowdown(kind, line)),
        )

    def _transfers_s(self, kind: background.Kind, other: int, step: Step | None = None) -> list[float]:
        """Return seconds of a collective of each size; if there is a step, while all processes repeat it."""
        engine, device, found = background.engine(), jax.process_index(), list[float]()
        group = (min(device, other), max(device, other))

        def exchange() -> None:
            for size in _SIZES:
                x = np.zeros((2, size // 8) if kind == "exchange" else size // 8, np.float32)
                taken = []
                for _ in range(_REPEATS + 1):
                    begin = time.perf_counter()
                    engine.finish(engine.start(kind, device, group, size, x, background.CollectiveShare()))
                    taken.append(time.perf_counter() - begin)
                found.append(statistics.mean(taken[1:]))

        multihost_utils.sync_global_devices("transfers")
        thread = threading.Thread(target=exchange)
        thread.start()
        while step and thread.is_alive():
            jax.block_until_ready(step())
        thread.join()
        return found

    def _slowdown(self, kind: background.Kind, line: Linear) -> float:
        """Return the slowdown of compute during longer collectives, relative to compute alone right before."""
        size, profile = _SIZES[-1], self._profile
        enough = math.ceil(_LONGER * profile.step_s / line.seconds(size / 2))
        found = []
        for _ in range(_SLOWED + 1):
            alone_s = seconds_per_step(profile.step, 1)
            multihost_utils.sync_global_devices("slowed")
            under_way = [self._start(size, kind=kind) for _ in range(enough)]
            begin = time.perf_counter()
            jax.block_until_ready(profile.step())
            found.append((time.perf_counter() - begin) / alone_s)
            for finish in under_way:
                finish()
        return statistics.median(found[1:])  # the first one is the warm-up

    def _handling(self) -> list[tuple[float, float]]:
        """Measure the compute that starting and finishing takes, on an unthrottled link.

        Half of what threads of the process compute for each collective, whatever its size, counts as starting, and half
        as finishing. What they compute for each byte is in the slowdown of concurrent compute. Counted is the time of a
        core: a process that computes all the time takes as long for it as for any other work, by its share of a core.
        """
        times = [self._handled_s(size) for size in _SIZES]
        start, finish, threads = (fit_linear(_SIZES, own).line for own in zip(*times, strict=True))
        ends = [(line.alpha_s + threads.alpha_s / 2, line.beta_s) for line in (start, finish)]
        return [(same(alpha_s / self._share), same(beta_s / self._share)) for alpha_s, beta_s in ends]

    def _handled_s(self, num_bytes: int) -> tuple[float, ...]:
        """Return seconds of a core for starting one exchange, for finishing it, and for the threads in between.

        Several exchanges in a row are compared with one.
        """
        found = []
        for count in (1, _IN_A_ROW):
            started, finished, threads = list[float](), list[float](), list[float]()
            for _ in range(_REPEATS + 1):
                multihost_utils.sync_global_devices("start")
                moments = [time.process_time()]
                finish = self._start(num_bytes, count)
                moments.append(time.process_time())
                time.sleep(count * _ARRIVED_S)
                moments.append(time.process_time())
                finish()
                moments.append(time.process_time())
                for taken, (begin, end) in zip((started, threads, finished), itertools.pairwise(moments), strict=True):
                    taken.append(end - begin)
            found.append([statistics.median(times[1:]) for times in (started, finished, threads)])
        each_s = ((many - one) / (_IN_A_ROW - 1) for one, many in zip(*found, strict=True))
        return tuple(max(seconds, 1e-6) for seconds in each_s)

    def _start(self, num_bytes: int, count: int = 1, kind: background.Kind = "exchange") -> Wait:
        """Start exchanges of this many bytes, including each process's own half, or gathers of half as many; return a
        function that waits.
        """
        begin, end, x = self._programs(num_bytes, count, kind)
        handles = jax.block_until_ready(begin(x))

        def finish() -> None:
            jax.block_until_ready(end(handles))

        return finish

    @functools.cache  # noqa: B019 - a link lives as long as its process
    def _programs(self, num_bytes: int, count: int, kind: background.Kind) -> tuple[Any, Any, Any]:
        rows = jax.ShapeDtypeStruct((2, num_bytes // 8), np.float32)
        axes, own = (
            ((Axis.DATA, Axis.EXPERT), rows.shape) if kind == "exchange" else ((Axis.TENSOR,), (1, num_bytes // 8))
        )

        def begin(x: Any) -> list[Any]:
            return [background.start(x + i, kind, axes) for i in range(count)]

        def end(handles: Sequence[Any]) -> list[Any]:
            return [background.finish(handle, rows)[0, 0] for handle in handles]

        first, last = (jax.jit(self._on_mesh(each, in_specs=REPLICATED)) for each in (begin, end))
        return first, last, np.zeros(own, rows.dtype)


def same(value: float) -> float:
    """Return the mean of the values of all processes, on all."""
    return float(np.mean(multihost_utils.process_allgather(np.float32(value))))


def slowest(value: float) -> float:
    """Return the value of the slowest process, on all."""
    return float(np.max(multihost_utils.process_allgather(np.float32(value))))
