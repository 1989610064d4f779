"""Choice of the all-to-all for `exchange.algorithm=auto`, by timing the algorithms on a run's devices.

They are timed once for the run's mesh and sizes, on real devices. Simulated devices and programs that are compiled for
absent hardware use the platform's default instead.

An algorithm is timed by one dispatch and one combine of a microbatch's rows, with experts loaded evenly: ragged
exchanges with their sizes, tensor forms and hooks as the step has them. First its rows are compared with those of the
flat exchange, bit by bit.

P expert ranks, L experts on each, c rows that a rank sends to each expert, R rows that it sends to another rank with
padding, D model width.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from moe_jax.config import Config
from moe_jax.config.registry import EXCHANGE_FACTS, OPEN_EXCHANGE
from moe_jax.distributed.processes import from_process, is_main_process, largest
from moe_jax.errors import ConfigError
from moe_jax.measure.interleaved_timing import Call, InterleavedTimes, time_interleaved
from moe_jax.models.dispatch import RaggedExchange, TokenExchange
from moe_jax.models.dispatchers.protocol import ExpertRows
from moe_jax.models.dispatchers.ragged import lane_widths
from moe_jax.models.hooks import hooks_of
from moe_jax.models.routing import expert_capacity
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.all_to_all.ragged import row_shape
from moe_jax.parallel.mesh import ALL_AXES
from moe_jax.plan.device_sizes import sizes_of
from moe_jax.run.timing_cache import TimingCache
from moe_jax.schedule.xla_flags import compiler_options
from moe_jax.telemetry.run_log import human_seconds

_TIMED = ("gpu", "tpu")  # platforms; CPUs' devices are simulated, or share a host
_CACHE = TimingCache("exchanges.json", "exchanges")
Rows = Float[Array, "P R D"]


class ExchangeSizes(NamedTuple):
    """The sizes of one exchange of a rank."""

    padded: int  # R
    experts: int  # L
    filled: int  # c
    slots: int  # of each expert for a device's whole batch
    tokens: int  # of a microbatch
    microbatches: int
    width: int
    dtype: str


class RoundTrip(NamedTuple):
    """Rows where their experts are, and the same rows back on the rank that sent them."""

    arrived: jax.Array
    returned: jax.Array


Timing = Callable[[Config, Mesh, Mapping[str, Config]], InterleavedTimes]


def with_fastest_exchange(config: Config, mesh: Mesh, timing: Timing | None = None) -> Config:
    """The config with auto replaced by the fastest algorithm, the same on all processes. Raises ConfigError."""
    if config.exchange.algorithm != OPEN_EXCHANGE or not config.model.moe.num_experts:
        return config
    if ComputeConfig.of(config, mesh).platform not in _TIMED or config.mesh.expert_ranks(mesh.shape) == 1:
        return config
    named = dict(_possible(config, mesh))
    if len(named) == 1:
        return config
    seconds, failed = _times(config, mesh, named, timing or time_exchanges)
    name = from_process(0, min(seconds, key=seconds.__getitem__, default=None))
    if is_main_process():
        print(_table(name, seconds, failed), flush=True)
    return config if name is None else named[name]


def _possible(config: Config, mesh: Mesh) -> Iterator[tuple[str, Config]]:
    """The algorithms that differ from each other on this mesh, with the config that names them.

    A plain step sends a ring's blocks while experts compute, so the time of its exchange alone does not predict that of
    the step: there a ring has to be named.
    """
    for name, facts in EXCHANGE_FACTS.items():
        if facts.in_background:
            continue
        try:
            named = dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, algorithm=name))
            compute = ComputeConfig.of(named, mesh)
        except ConfigError:
            continue
        if compute.exchange == name and (config.step_facts.orders_tasks or not compute.route.goes_by_hops):
            yield name, named


def _times(config: Config, mesh: Mesh, named: Mapping[str, Config], timing: Timing) -> InterleavedTimes:
    """The times of the algorithms, from the cache of process 0 or by timing them on all devices."""
    key = _key(config, mesh, named)
    cached = from_process(0, _CACHE.read(key, named) if is_main_process() else None)
    if cached is not None:
        return InterleavedTimes(cached, {})
    found = timing(config, mesh, named)
    if found.seconds and is_main_process():
        _CACHE.write(key, found.seconds)
    return found


def _key(config: Config, mesh: Mesh, named: Mapping[str, Config]) -> dict[str, Any]:
    """Everything that the times depend on."""
    compute = ComputeConfig.of(config, mesh)
    return sizes_of_exchange(config, mesh)._asdict() | {
        "mesh": {str(axis): size for axis, size in mesh.shape.items()},
        "expert_axes": list(config.mesh.expert_axes),
        "ranks_per_node": compute.ranks_per_node,
        "tensor": f"{compute.tensor_form} {compute.tensor_chunks}",
        "hooks": config.model.moe.hooks,
        "devices": f"{mesh.size} × {mesh.devices.flat[0].device_kind}, {jax.process_count()} process(es)",
        "jax": jax.__version__,
        "algorithms": list(named),
    }


def _table(name: str | None, seconds: Mapping[str, float], failed: Mapping[str, str]) -> str:
    title = f"exchange.algorithm={name or OPEN_EXCHANGE}; one dispatch and one combine:"
    times = [f"  {each:<8} {human_seconds(seconds[each])}" for each in sorted(seconds, key=seconds.__getitem__)]
    return "\n".join([title, *times, *(f"  {each:<8} left out: {reason}" for each, reason in failed.items())])


def sizes_of_exchange(config: Config, mesh: Mesh) -> ExchangeSizes:
    """The sizes of one microbatch's exchange."""
    compute, moe, schedule = ComputeConfig.of(config, mesh), config.model.moe, config.schedule
    flat = dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, algorithm="flat"))
    sizes, ranks = sizes_of(flat, compute.platform, mesh.shape), config.mesh.expert_ranks(mesh.shape)
    slots = expert_capacity(moe, int(sizes.local_tokens))
    tokens = int(sizes.local_tokens) // sizes.microbatches
    return ExchangeSizes(
        padded=max(int(sizes.rows.sent / (schedule.microbatches * schedule.expert_chunks)) // ranks, 1),
        experts=moe.num_experts // ranks,
        filled=max(min(tokens * moe.top_k // moe.num_experts, slots // sizes.microbatches), 1),
        slots=slots,
        tokens=tokens,
        microbatches=sizes.microbatches,
        width=config.model.hidden_size,
        dtype=config.train.compute_dtype,
    )


def time_exchanges(config: Config, mesh: Mesh, named: Mapping[str, Config]) -> InterleavedTimes:
    """Time each algorithm on all devices of the mesh. All processes call this."""
    sizes, drawn = sizes_of_exchange(config, mesh), dict[int, jax.Array]()
    programs = {name: partial(_call, sizes, each, mesh, drawn) for name, each in named.items()}
    return time_interleaved(programs, agree=largest)


def _call(sizes: ExchangeSizes, config: Config, mesh: Mesh, drawn: dict[int, jax.Array]) -> Call:
    """A compiled call of one algorithm, with its operand. Its first run compares the rows with those of `flat`.

    The call then raises ValueError if any differs. `drawn` keeps operands by their number of rows, for other calls.
    """
    compute = ComputeConfig.of(config, mesh)
    own, flat = (_round_trip(config, each) for each in (compute, dataclasses.replace(compute, exchange="flat")))
    if EXCHANGE_FACTS[compute.exchange].ragged:
        rows, own, flat = (
            sizes.experts * sizes.filled,
            _ragged_round_trip(sizes, compute),
            _even_round_trip(sizes, flat),
        )
    else:
        rows = sizes.padded
    spec, none = PartitionSpec(ALL_AXES), PartitionSpec()
    ranks = config.mesh.expert_ranks(mesh.shape)

    def draw() -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(ALL_AXES))
        return jax.random.normal(key, (ranks, rows, sizes.width), sizes.dtype)

    def differing(x: Rows) -> Int[Array, ""]:
        pairs = zip(own(x), flat(x), strict=True)
        return jax.lax.psum(sum(jnp.sum(one != other) for one, other in pairs), ALL_AXES)

    on_mesh = partial(jax.shard_map, mesh=mesh, check_vma=False)
    options: dict[str, Any] = {}
    if config.step_facts.orders_tasks:  # as in step/trainer.py
        options |= compiler_options(compute.platform, mesh.devices.flat[0].device_kind)
    if rows not in drawn:
        drawn[rows] = jax.jit(on_mesh(draw, in_specs=(), out_specs=spec))()
    x = drawn[rows]
    compare = jax.jit(on_mesh(differing, in_specs=spec, out_specs=none)).lower(x).compile(options)
    there_and_back = on_mesh(lambda x: own(x).returned, in_specs=spec, out_specs=spec)
    compiled = jax.jit(there_and_back).lower(x).compile(options)
    is_checked = False

    def call() -> jax.Array:
        nonlocal is_checked
        if not is_checked:
            wrong, is_checked = int(compare(x)), True
            if wrong:
                raise ValueError(f"{wrong} numbers differ from those that flat sends")
        return compiled(x)

    return call


def _round_trip(config: Config, compute: ComputeConfig) -> Callable[[Rows], RoundTrip]:
    """Both exchanges of full blocks."""
    hooks = hooks_of(config.model.moe)

    def trip(x_PRD: Rows) -> RoundTrip:
        arrived = TokenExchange("dispatch", compute.route, hooks).run(ExpertRows(x_PRD)).rows
        return RoundTrip(arrived, TokenExchange("combine", compute.route, hooks).run(ExpertRows(arrived)).rows)

    return trip


def _ragged_round_trip(sizes: ExchangeSizes, compute: ComputeConfig) -> Callable[[Rows], RoundTrip]:
    """Both ragged exchanges, of c rows for each expert: arrived [L, P·c, D], returned [P, L·c, D]."""

    def trip(x_PRD: Rows) -> RoundTrip:
        ranks = compute.route.ranks
        size, width = len(x_PRD), sizes.width
        widths = lane_widths(sizes.slots, sizes.microbatches, sizes.tokens, size)
        exchange = RaggedExchange(ranks, widths, size * sizes.experts * sizes.filled)
        count_PE = exchange.sizes(jnp.full(size * sizes.experts, sizes.filled, jnp.int32))
        lanes = exchange.dispatch(x_PRD.reshape(-1, *row_shape(width)), count_PE)
        returned = exchange.combine(lanes).rows
        return RoundTrip(lanes.main_LbD[:, : size * sizes.filled], returned.reshape(x_PRD.shape))

    return trip


def _even_round_trip(sizes: ExchangeSizes, flat: Callable[[Rows], RoundTrip]) -> Callable[[Rows], RoundTrip]:
    """The same rows by a flat exchange, in the layout of `_ragged_round_trip`."""

    def trip(x_PRD: Rows) -> RoundTrip:
        arrived, returned = flat(x_PRD)
        by_source = arrived.reshape(len(arrived), sizes.experts, sizes.filled, sizes.width)
        return RoundTrip(jnp.swapaxes(by_source, 0, 1).reshape(sizes.experts, -1, sizes.width), returned)

    return trip
