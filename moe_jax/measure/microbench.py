"""Measure operations on the available devices: repeated, warmed up, and in interleaved rounds."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled

from moe_jax import config
from moe_jax.measure.interleaved_timing import Quartiles
from moe_jax.measure.operations import BenchmarkOperation
from moe_jax.parallel import background
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC, REPLICATED
from moe_jax.plan.curves import Curve, curve

MOST_REPEATS = 1000
Times = list[list[float]]  # by operation: seconds of one run in each round


class BenchmarkProgram(NamedTuple):
    """An operation, compiled to run a given number of times, each time on the result of the previous run."""

    operation: BenchmarkOperation
    compiled: Compiled
    mesh: Mesh


def compile_all(operations: Iterable[BenchmarkOperation], dtype: jnp.dtype) -> list[BenchmarkProgram]:
    """Compile each operation on a mesh for its group."""
    meshes: dict[int, Mesh] = {}
    programs = []
    for operation in operations:
        expert = operation.group.expert() if operation.group else 1
        mesh = meshes.setdefault(expert, make_mesh(config.MeshConfig(expert=expert)))
        programs.append(BenchmarkProgram(operation, _compile(operation, mesh, dtype), mesh))
    return programs


def _compile(operation: BenchmarkOperation, mesh: Mesh, dtype: jnp.dtype) -> Compiled:
    def run(repeats: jax.Array, x: jax.Array, *weights: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, repeats, lambda _, x: operation.run(x, *weights), x)

    in_specs = (REPLICATED, BATCH_SPEC, *(REPLICATED for _ in operation.weights))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=BATCH_SPEC, check_vma=False)
    whole, alike = NamedSharding(mesh, BATCH_SPEC), NamedSharding(mesh, REPLICATED)
    x = jax.ShapeDtypeStruct((mesh.size * operation.shape[0], *operation.shape[1:]), dtype, sharding=whole)
    weights = [jax.ShapeDtypeStruct(shape, dtype, sharding=alike) for shape in operation.weights]
    repeats = jax.ShapeDtypeStruct((), jnp.int32, sharding=alike)
    return jax.jit(mapped, donate_argnums=1).lower(repeats, x, *weights).compile()


class DeviceOperands:
    """The arrays on the devices while programs run: one operand of each shape, passed on from run to run."""

    def __init__(self, dtype: jnp.dtype):
        self._dtype = dtype
        self.operands: dict[tuple[Mesh, tuple[int, ...]], jax.Array] = {}
        self._weights: dict[tuple[Mesh, tuple[int, int]], jax.Array] = {}

    def seconds(self, program: BenchmarkProgram, repeats: int) -> float:
        """Return the time of one run, averaged over `repeats` consecutive runs; all processes start together."""
        key = (program.mesh, program.operation.shape)
        x = self.operands.pop(key) if key in self.operands else self._operand(*key)
        weights = [self._weight(program.mesh, shape) for shape in program.operation.weights]
        count = _on_all(program.mesh, np.array(repeats, np.int32))
        background.connect(program.mesh)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("measure")
        start = time.perf_counter()
        x = jax.block_until_ready(program.compiled(count, x, *weights))
        elapsed = time.perf_counter() - start
        self.operands[key] = x
        return elapsed / repeats

    def _operand(self, mesh: Mesh, shape: tuple[int, ...]) -> jax.Array:
        sharding = NamedSharding(mesh, BATCH_SPEC)
        part = np.random.default_rng(0).random(shape, np.float32).astype(self._dtype)
        return jax.make_array_from_callback((mesh.size * shape[0], *shape[1:]), sharding, lambda _: part)

    def _weight(self, mesh: Mesh, shape: tuple[int, int]) -> jax.Array:
        """Return weights whose rows sum to 1, so that repeated products neither overflow nor vanish."""
        if (mesh, shape) not in self._weights:
            part = np.random.default_rng(1).random(shape, np.float32)
            self._weights[mesh, shape] = _on_all(mesh, (part / part.sum(1, keepdims=True)).astype(self._dtype))
        return self._weights[mesh, shape]


def _on_all(mesh: Mesh, x: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, REPLICATED), lambda _: x)


def times_of(
    programs: Sequence[BenchmarkProgram], dtype: jnp.dtype, rounds: int, round_s: float, report: Callable[[str], None]
) -> Times:
    """Run every program for about `round_s` seconds, or once, in each round; rounds alternate between both orders.

    So changes on the machine affect all programs alike. If processes differ, the slowest one counts.
    """
    operands = DeviceOperands(dtype)
    for program in programs:
        operands.seconds(program, 1)
    single = _of_slowest([[operands.seconds(program, 1)] for program in programs])
    repeats = [min(MOST_REPEATS, max(1, round(round_s / seconds))) for (seconds,) in single]
    times: Times = [[] for _ in programs]
    for number in range(rounds):
        order = range(len(programs))
        for i in order if number % 2 else reversed(order):
            times[i].append(operands.seconds(programs[i], repeats[i]))
        report(f"round {number + 1} of {rounds}")
    return _of_slowest(times)


def _of_slowest(times: Times) -> Times:
    if jax.process_count() == 1:
        return times
    found: list[list[float]] = np.max(multihost_utils.process_allgather(np.array(times, np.float32)), axis=0).tolist()
    return found


def curves_of(operations: Sequence[BenchmarkOperation], times: Times) -> tuple[Curve, ...]:
    """Return one curve of time over amount for each name and settings."""
    found: dict[tuple, dict[float, Quartiles]] = defaultdict(dict)
    for operation, seconds in zip(operations, times, strict=True):
        found[operation.name, operation.settings, operation.unit][operation.amount] = Quartiles.of(seconds)
    return tuple(
        curve(name, dict(settings), unit, sorted(points), [points[amount] for amount in sorted(points)])
        for (name, settings, unit), points in found.items()
    )


def memory_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Return the smallest memory limit of jax over the devices; None if devices do not report it, such as CPUs."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    known = [limit for limit in limits if limit is not None]
    return min(known) if len(known) == len(limits) else None
