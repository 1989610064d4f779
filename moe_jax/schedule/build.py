"""Build a schedule from a policy's name: split, order, place weight gradients and reductions, merge the streams.

The tasks of a config's step, before they have an order.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moe_jax.config import Config
from moe_jax.config.plugins import guarded, load_part
from moe_jax.errors import ConfigError
from moe_jax.schedule.actions import (
    Action,
    ScheduleError,
    Seconds,
    Stream,
    StreamOf,
    by_reach,
    is_param_gather,
    is_reduction,
    three_streams,
    two_streams,
)
from moe_jax.schedule.dependencies import task_graph
from moe_jax.schedule.grad_buckets import by_readiness, exchanges_first
from moe_jax.schedule.link_order import Priority
from moe_jax.schedule.param_gathers import releases
from moe_jax.schedule.policies import POLICIES
from moe_jax.schedule.policies.protocol import Orders, Policy, breadth_first
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import Parts, StepShape
from moe_jax.schedule.simulation import (
    NumberedTasks,
    interleave,
    makespan_s,
    numbered_tasks,
    simulate_numbered,
)
from moe_jax.schedule.weight_grad import greedy


def make_shape(
    policy: str,
    kinds: Sequence[str],
    forward: int = 1,
    backward: int | None = None,
    expert_chunks: int = 1,
    **rest: object,
) -> StepShape:
    """The shape of a policy's step, with `forward` and `backward` microbatches (`backward=None`: as many as forward).

    Exchanges and experts are split into `expert_chunks` times more parts than the policy asks for. `rest` are other
    fields of StepShape. Raises ScheduleError.
    """

    def parts(degree: int) -> Parts:
        microbatches, chunks = _policy(policy).parts(degree)
        return Parts(microbatches, chunks * expert_chunks)

    degree = forward if backward is None else backward
    return StepShape(kinds=tuple(kinds), forward=parts(forward), backward=parts(degree), **rest)  # type: ignore[arg-type]


def make_schedule(policy: str, shape: StepShape, seconds: Seconds, stream_of: StreamOf = three_streams) -> Schedule:
    """Order the tasks of a step.

    The task durations `seconds` affect only where weight gradients and bucketed reductions are placed. Raises
    ScheduleError.
    """
    times_s = tuple(map(seconds, numbered_tasks(shape).tasks))
    make = _make_known if policy in POLICIES else _make_schedule
    return make(policy, shape, times_s, stream_of)


_TOLERANCE = 1.002  # orders that are at most this much slower than the fastest one count as equally fast


def _make_schedule(policy: str, shape: StepShape, times_s: tuple[float, ...], stream_of: StreamOf) -> Schedule:
    """The schedule for these durations of all tasks, by number."""
    tasks, streams = numbered_tasks(shape), streams_of(shape, stream_of)
    ungathered = replace(shape, param_gather="none")  # gathers do not change compute, and neither do reductions
    before = ungathered.unreduced
    orders = _known_orders(policy, before) if policy in POLICIES else _orders(policy, ungathered)
    computes = [orders[Stream.COMPUTE]]
    if shape.split_weight_grad:
        seconds, numbered = dict(zip(tasks.tasks, times_s, strict=True)).__getitem__, numbered_tasks(before)
        compute, *lanes = map(numbered.numbers, (computes[0], *_exchanges(orders)))
        issued = numbered.actions(interleave(compute, lanes, numbered))
        computes = greedy(issued, before, task_graph(before), seconds, stream_of)
    computes = list(map(list, dict.fromkeys(map(tuple, computes))))  # each order once
    lists = [_merge(compute, orders, shape, times_s, streams) for compute in computes]
    best = lists[0]
    if len(lists) > 1:
        steps_s = [_step_s(issued, tasks, times_s, streams) for issued in lists]
        # earlier orders need less memory
        best = lists[next(i for i, step_s in enumerate(steps_s) if step_s <= _TOLERANCE * min(steps_s))]
    return Schedule(policy, shape, tuple(tasks.actions(best)))


# A search asks for the same ones many times; parts of a user's own may change.
_make_known = functools.lru_cache(maxsize=256)(_make_schedule)


def _step_s(issued: list[int], tasks: NumberedTasks, times_s: Sequence[float], streams: Sequence[Stream]) -> float:
    if (found := makespan_s(issued, tasks, times_s, streams)) == math.inf:
        simulate_numbered(issued, tasks, times_s, streams, [0] * len(streams))  # which says what waits
    return found


def _merge(
    compute: list[Action], orders: Orders, shape: StepShape, times_s: Sequence[float], streams: Sequence[Stream]
) -> list[int]:
    """Merge all streams into one issue order and place the gathers of parameters and the reductions.

    Tasks are numbered as in `numbered_tasks`.
    """
    tasks = numbered_tasks(shape)
    waits = {tasks.number[gather]: tasks.number[task] for gather, task in releases(shape, compute).items()}
    tasks, numbers = tasks.with_needs(waits), tasks.numbers(compute)
    others = [*_exchanges(orders), shape.param_gathers]
    lanes = [*map(tasks.numbers, others), by_readiness(numbers, shape, tasks)]
    issued = interleave(numbers, lanes, tasks)
    if shape.grad_reduce != "bucketed" and shape.param_gather != "prefetch":
        return issued
    filled, *_ = simulate_numbered(issued, tasks, times_s, streams, _ranks(shape))
    lanes = [[task for task in filled if streams[task] == stream] for stream in _LANES]
    return interleave(numbers, lanes, tasks)


@functools.lru_cache(maxsize=64)
def _ranks(shape: StepShape) -> tuple[int, ...]:
    """Priorities of all tasks by number: gathers and reductions have their own if their place is open."""

    def rank_of(action: Action) -> int:
        placed = is_reduction(action) and shape.grad_reduce == "bucketed"
        placed |= is_param_gather(action) and shape.param_gather == "prefetch"
        return exchanges_first(action) if placed else Priority.EXPERT

    return tuple(map(rank_of, numbered_tasks(shape).tasks))


@functools.lru_cache(maxsize=64)
def ranks_of(shape: StepShape, rank_of: Callable[[Action], int]) -> tuple[int, ...]:
    """The priorities of all tasks, by number."""
    return tuple(map(rank_of, numbered_tasks(shape).tasks))


@functools.lru_cache(maxsize=64)
def streams_of(shape: StepShape, stream_of: StreamOf) -> tuple[Stream, ...]:
    """The streams of all tasks, by number."""
    return tuple(map(stream_of, numbered_tasks(shape).tasks))


# intra-node collectives first: experts wait for them. Like exchanges, they are issued one by one
_LANES = (Stream.INTRA_NODE, Stream.COMMUNICATION)


def _exchanges(orders: Orders) -> list[list[Action]]:
    return [orders[stream] for stream in _LANES]


def _orders(name: str, shape: StepShape) -> Orders:
    orders = _policy(name).orders(shape)
    lists = orders.values() if isinstance(orders, Mapping) else [None]
    if not all(isinstance(tasks, list) and all(isinstance(task, Action) for task in tasks) for tasks in lists):
        raise ConfigError(f"schedule.policy={name}: orders returns no lists of tasks by stream: {_ORDERS}")
    for stream, tasks in breadth_first(shape).items():
        listed = orders.get(stream, [])
        if wrong := set(tasks) ^ set(listed):
            task = min(wrong)
            cure = "leaves out {}: list it" if task in tasks else "lists {}, which is none of its tasks: leave it out"
            parts = shape.backward if task.direction == "B" else shape.forward
            of = f"{task} ({parts.microbatches} microbatches, {parts.chunks} chunks)"
            raise ScheduleError(f"schedule.policy={name}: the {stream} stream {cure.format(of)}")
        if len(listed) > len(tasks):
            raise ScheduleError(f"schedule.policy={name}: the {stream} stream lists a task twice: list each once")
    _check_order(name, shape, orders)
    return orders


_known_orders = functools.lru_cache(maxsize=64)(_orders)


def _check_order(name: str, shape: StepShape, orders: Orders) -> None:
    """Raise ScheduleError if a stream lists a task before one that it needs, directly or through other streams."""
    graph, lanes = task_graph(shape), [deque(tasks) for tasks in orders.values()]
    listed = {task for lane in lanes for task in lane}

    @functools.cache
    def needed(task: Action) -> frozenset[Action]:
        """The listed tasks that it needs; others, such as weight gradients, are placed later."""
        direct = graph[task]
        return (direct & listed).union(*(needed(need) for need in direct - listed))

    done: set[Action] = set()
    while any(lanes):
        ready = [lane for lane in lanes if lane and needed(lane[0]) <= done]
        if not ready:
            heads = [(lane[0], needed(lane[0]) - done, lane) for lane in lanes if lane]
            early = [(task, need) for task, needs, lane in heads for need in needs & set(lane)]
            if early:
                task, need = min(early)
                raise ScheduleError(f"schedule.policy={name}: {task} is before {need}, which it needs: move it after")
            waits = ", ".join(f"{task} for {min(needs)}" for task, needs, _ in heads)
            raise ScheduleError(f"schedule.policy={name}: tasks wait for each other for ever ({waits}): reorder them")
        for lane in ready:
            done.add(lane.popleft())


def _policy(name: str) -> Policy:
    if name not in POLICIES and ":" not in name:
        raise ScheduleError(f"policy={name!r} is unknown: use {', '.join(POLICIES)}")
    policy = load_part("schedule.policy", name, POLICIES)
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"schedule.policy={name} is of type {type(policy).__name__}: "
            "name a moe_jax.schedule.policies.protocol.Policy"
        )
    return _guarded(name, policy)


_MOST_PARTS = 2**16
_PARTS = "it must take a whole number and return moe_jax.schedule.shape.Parts of two whole numbers from 1 to 65536"
_ORDERS = "it must take a moe_jax.schedule.shape.StepShape and return a list of tasks for each stream"


def _guarded(name: str, policy: Policy) -> Policy:
    """Wrap a policy's functions so that wrong argument or return types raise a ConfigError that names the policy."""
    part = f"schedule.policy={name}"

    def parts(degree: int) -> Parts:
        found = guarded(f"{part}: parts", _PARTS, policy.parts)(degree)
        numbers = found if isinstance(found, tuple) and len(found) == len(Parts._fields) else (0,)
        if not all(isinstance(each, int) and 1 <= each <= _MOST_PARTS for each in numbers):
            raise ConfigError(f"{part}: parts returns {str(found)[:80]} for {degree}: {_PARTS}")
        return Parts(*numbers)

    return Policy(parts, guarded(f"{part}: orders", _ORDERS, policy.orders))


def has_tensor_tasks(config: Config, mesh: Mapping[str, int]) -> bool:
    """Whether gathers and sums over the tensor ranks that share an expert are tasks, on a mesh of these sizes."""
    return config.exchange.tensor_form == "sharded_scheduled" and config.mesh.expert_tensor_ranks(mesh) > 1


def step_streams(
    config: Config, mesh: Mapping[str, int], platform: str, exchanges_inside_nodes: bool = False
) -> StreamOf:
    """The streams of a step's tasks.

    Gathers and sums over tensor ranks have a stream of their own on TPUs, where each axis of the mesh has its own
    links, and on CPUs if exchanges run in the background. XLA:GPU runs one collective at a time on the links of a node,
    and another one between nodes (`exchanges_inside_nodes`: there are several, and no exchange leaves one).
    """
    if exchanges_inside_nodes:
        return by_reach
    of_their_own = platform == "tpu" or (platform == "cpu" and config.exchange.facts.only_starts)
    return three_streams if has_tensor_tasks(config, mesh) and of_their_own else two_streams


def step_shape(config: Config, mesh: Mapping[str, int], reductions: Sequence[int]) -> StepShape:
    """The shape of a step on a mesh of these sizes, with `reductions` buckets per owner. Raises ScheduleError."""
    settings, model = config.schedule, config.model
    copies = math.prod(mesh[axis] for axis in ("data", "context") if axis not in config.mesh.expert_axes)
    return make_shape(
        settings.policy,
        model.block_kinds,
        settings.microbatches,
        settings.backward_microbatches,
        settings.expert_chunks,
        weight_grad=settings.weight_grad,
        grad_reduce=settings.grad_reduce,
        param_gather=config.param_gather,
        reductions=tuple(reductions),
        sharded_experts=has_tensor_tasks(config, mesh),
        tied=model.tie_word_embeddings,
        mtp=model.has_mtp,
        # all tensor ranks have the bias vectors of an expert that they share
        local_experts=copies == 1 and not (model.moe.bias and config.mesh.expert_tensor_ranks(mesh) > 1),
    )
