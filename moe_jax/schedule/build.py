"""Build a schedule from a policy's name: split, order, place weight gradients and reductions, merge the streams."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from moe_jax.config.plugins import guarded, load_part
from moe_jax.errors import ConfigError
from moe_jax.schedule.actions import (
    Action,
    ScheduleError,
    Seconds,
    Stream,
    StreamOf,
    is_param_gather,
    is_reduction,
    three_streams,
)
from moe_jax.schedule.dependencies import task_graph
from moe_jax.schedule.grad_buckets import by_readiness, exchanges_first
from moe_jax.schedule.link_order import Priority
from moe_jax.schedule.param_gathers import needs_with_release
from moe_jax.schedule.policies import POLICIES, by_phase
from moe_jax.schedule.policies.protocol import Orders, Policy
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import Parts, StepShape
from moe_jax.schedule.simulation import interleave, simulate_streams
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
    whole, shape = shape, replace(shape, param_gather="none")  # which does not change the order of compute tasks
    orders, needs = _orders(policy, shape), task_graph(shape)

    def step_s(issued: list[Action]) -> float:
        return max(span.end_s for span in simulate_streams(issued, needs, seconds, stream_of).values())

    computes = [orders[Stream.COMPUTE]]
    if shape.split_weight_grad:
        issued = interleave(computes[0], _exchanges(orders), needs)
        computes = greedy(issued, shape, needs, seconds, stream_of)
    shape, needs = whole, task_graph(whole)
    lists = [_merge(compute, orders, shape, seconds, stream_of) for compute in computes]
    if len(lists) == 1:
        return Schedule(policy, shape, tuple(lists[0]))
    times_s = [step_s(issued) for issued in lists]
    # earlier orders need less memory
    best = next(issued for issued, time_s in zip(lists, times_s, strict=True) if time_s <= _TOLERANCE * min(times_s))
    return Schedule(policy, shape, tuple(best))


_TOLERANCE = 1.002  # orders that are at most this much slower than the fastest one count as equally fast


def _merge(
    compute: list[Action], orders: Orders, shape: StepShape, seconds: Seconds, stream_of: StreamOf
) -> list[Action]:
    """Merge all streams into one issue order and place the gathers of parameters and the reductions."""
    needs = needs_with_release(shape, compute)
    lanes = [*_exchanges(orders), list(shape.param_gathers), by_readiness(compute, shape, needs)]
    issued = interleave(compute, lanes, needs)
    if shape.grad_reduce != "bucketed" and shape.param_gather != "prefetch":
        return issued

    def rank_of(action: Action) -> int:
        placed = is_reduction(action) and shape.grad_reduce == "bucketed"
        placed |= is_param_gather(action) and shape.param_gather == "prefetch"
        return exchanges_first(action) if placed else Priority.EXPERT

    filled = list(simulate_streams(issued, needs, seconds, stream_of, rank_of))
    lanes = [[task for task in filled if stream_of(task) == stream] for stream in _LANES]
    return interleave(compute, lanes, needs)


# intra-node collectives first: experts wait for them. Like exchanges, they are issued one by one
_LANES = (Stream.INTRA_NODE, Stream.COMMUNICATION)


def _exchanges(orders: Orders) -> list[list[Action]]:
    return [orders[stream] for stream in _LANES]


def _orders(name: str, shape: StepShape) -> Orders:
    orders = _policy(name).orders(shape)
    if name in POLICIES:
        return orders
    lists = orders.values() if isinstance(orders, Mapping) else [None]
    if not all(isinstance(tasks, list) and all(isinstance(task, Action) for task in tasks) for tasks in lists):
        raise ConfigError(f"schedule.policy={name}: orders returns no lists of tasks by stream: {_ORDERS}")
    for stream, tasks in by_phase.orders(shape).items():
        listed = orders.get(stream, [])
        if wrong := set(tasks) ^ set(listed):
            task = min(wrong)
            cure = "leaves out {}: list it" if task in tasks else "lists {}, which is none of its tasks: leave it out"
            raise ScheduleError(f"schedule.policy={name}: the {stream} stream {cure.format(task)}")
        if len(listed) > len(tasks):
            raise ScheduleError(f"schedule.policy={name}: the {stream} stream lists a task twice: list each once")
    return orders


def _policy(name: str) -> Policy:
    if name not in POLICIES and ":" not in name:
        raise ScheduleError(f"policy={name!r} is unknown: use {', '.join(POLICIES)}")
    policy = load_part("schedule.policy", name, POLICIES)
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"schedule.policy={name} is of type {type(policy).__name__}: "
            "name a moe_jax.schedule.policies.protocol.Policy"
        )
    return policy if name in POLICIES else _guarded(name, policy)


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
