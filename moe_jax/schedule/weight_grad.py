"""Placement of weight gradients that are tasks of their own."""

from collections.abc import Sequence

from moe_jax.schedule.actions import Action, Seconds, Stream, StreamOf
from moe_jax.schedule.dependencies import Needs
from moe_jax.schedule.shape import StepShape, weight_gradient

_MAX_DEFERRED = 8  # weight gradients that run at the end


def greedy(
    issued: Sequence[Action], shape: StepShape, needs: Needs, seconds: Seconds, stream_of: StreamOf
) -> list[list[Action]]:
    """Candidate compute orders in which W tasks fill the waits for exchanges. The caller takes the fastest one.

    This is Lancet, algorithm 1: walk over the exchanges; while one has uncovered time t_u left, take the candidate with
    the duration closest to t_u. The uncovered time of an exchange is the wait of the next compute task in `issued` (all
    tasks but W and reductions, in issue order), so time that other microbatches cover already counts as covered. The
    candidates are the W tasks with a B task before that compute task: they do not depend on the running exchange, nor
    it on them.

    W tasks that no exchange needs follow their B task (order 1, least memory), except for the last few, which run at
    the end and hide the last reductions, such as the embedding's (order 2): those without a reduction, if there are
    any. Or all run last, oldest first, those without a reduction after the others (order 3).

    Without reductions, none of these is slower than the order in which every W follows its B (order 4), however long
    the chosen W tasks are. With reductions it can be, because a W task that waits for an exchange delays its block's
    reductions. Therefore, if there are W tasks without a reduction, the first orders returned move only those, and the
    other W tasks follow their B.
    """
    every_w = {w for b in issued if (w := weight_gradient(b, shape))}
    local = {w for w in every_w if shape.local_experts and w.op == "expert"}
    chosen = [local, every_w] if local and shape.reductions else [every_w]
    orders = [
        order for movable in chosen for order in _filled(issued, shape, needs, seconds, stream_of, movable, local)
    ]
    return [*orders, _after_their_b([task for task in issued if stream_of(task) == Stream.COMPUTE], shape, every_w)]


def _filled(
    issued: Sequence[Action],
    shape: StepShape,
    needs: Needs,
    seconds: Seconds,
    stream_of: StreamOf,
    movable: set[Action],
    local: set[Action],
) -> list[list[Action]]:
    """Orders 1 to 3, in which only the `movable` W tasks move; other W tasks follow their B."""
    compute: list[Action] = []
    candidates: list[Action] = []
    free_s = dict.fromkeys(Stream, 0.0)
    end_s: dict[Action, float] = {}
    for action in issued:
        stream = stream_of(action)
        ready_s = max((end_s[need] for need in needs[action]), default=0.0)
        if stream == Stream.COMPUTE:
            while candidates and free_s[stream] < ready_s:
                chosen = _closest(candidates, ready_s - free_s[stream], seconds)
                candidates.remove(chosen)
                compute.append(chosen)
                free_s[stream] += seconds(chosen)
            compute.append(action)
        end_s[action] = free_s[stream] = max(free_s[stream], ready_s) + seconds(action)
        if weight := weight_gradient(action, shape):
            if weight in movable:
                candidates.append(weight)
            else:
                compute.append(weight)
                free_s[stream] += seconds(weight)
    ends = [task for task in candidates if task in local] if local else candidates
    deferred = [ends[-count:] for count in range(1, min(_MAX_DEFERRED, len(ends)) + 1)]
    return [
        _after_their_b(compute, shape, set(candidates)),
        *(_after_their_b(compute, shape, set(candidates) - set(last)) + last for last in deferred),
        compute + sorted(candidates, key=lambda w: w in local),
    ]


def _closest(candidates: Sequence[Action], wanted_s: float, seconds: Seconds) -> Action:
    return min(candidates, key=lambda task: abs(seconds(task) - wanted_s))


def _after_their_b(compute: Sequence[Action], shape: StepShape, left: set[Action]) -> list[Action]:
    pairs = ((task, weight_gradient(task, shape)) for task in compute)
    return [task for b, w in pairs for task in ((b, w) if w in left else (b,)) if task]
