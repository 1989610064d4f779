"""Where weight gradients run, once they are tasks of their own."""

from collections.abc import Sequence

from moe_jax.schedule.actions import Action, Seconds, Stream, StreamOf
from moe_jax.schedule.dependencies import Needs
from moe_jax.schedule.shape import StepShape, weight_gradient

_MOST_HELD = 8  # weight gradients kept for the end


def greedy(
    issued: Sequence[Action], shape: StepShape, needs: Needs, seconds: Seconds, stream_of: StreamOf
) -> list[list[Action]]:
    """Orders of compute in which W tasks run while compute would wait for an exchange; the fastest is to be chosen.

    Lancet, alg. 1: walk the exchanges; while one has uncovered time t_u left, take the candidate whose time is closest
    to t_u. An exchange's uncovered time is the wait of the next compute task of `issued` (all tasks but W and
    reductions, in order of issue), so that what other microbatches cover already counts as covered. Candidates are the
    W whose B stands before that task: no path leads from or to an exchange that is under way.
    W that no exchange needs stay behind their B (1: least memory), but for the last few without a reduction: they
    run at the end and hide the last reductions (2). Or all run last (3), oldest first, those again behind the others.
    Without reductions none is slower than every W behind its B (4), however long the chosen W are; with them it can
    be, because a W that waits for an exchange holds up its block's reductions. So where there are W without a
    reduction, first come orders in which the others stay behind their B.
    """
    every_w = {w for b in issued if (w := weight_gradient(b, shape))}
    local = {w for w in every_w if shape.local_experts and w.op == "expert"}
    chosen = [local, every_w] if local and shape.reductions else [every_w]
    orders = [
        order for movable in chosen for order in _filled(issued, shape, needs, seconds, stream_of, movable, local)
    ]
    return [*orders, _behind_their_b([task for task in issued if stream_of(task) == Stream.COMPUTE], shape, every_w)]


def _filled(
    issued: Sequence[Action],
    shape: StepShape,
    needs: Needs,
    seconds: Seconds,
    stream_of: StreamOf,
    movable: set[Action],
    local: set[Action],
) -> list[list[Action]]:
    """Orders 1 to 3 with the `movable` W; others stay behind their B."""
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
    last_local = [task for task in candidates if task in local][-_MOST_HELD:]
    held = [last_local[-count:] for count in range(1, len(last_local) + 1)]
    return [
        _behind_their_b(compute, shape, set(candidates)),
        *(_behind_their_b(compute, shape, set(candidates) - set(last)) + last for last in held),
        compute + sorted(candidates, key=lambda w: w in local),
    ]


def _closest(candidates: Sequence[Action], wanted_s: float, seconds: Seconds) -> Action:
    return min(candidates, key=lambda task: abs(seconds(task) - wanted_s))


def _behind_their_b(compute: Sequence[Action], shape: StepShape, left: set[Action]) -> list[Action]:
    pairs = ((task, weight_gradient(task, shape)) for task in compute)
    return [task for b, w in pairs for task in ((b, w) if w in left else (b,)) if task]
