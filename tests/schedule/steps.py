"""Steps with made-up costs, for tests of schedules and of the simulator."""

import random
from collections.abc import Sequence

from moe_jax.plan.simulate import Timeline, simulate
from moe_jax.plan.task_times import ComputeStage, Linear, TaskTimes, Transfer
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import StepShape

MIXED = (
    ("moe",),
    ("moe", "moe", "moe"),
    ("dense", "moe", "dense", "moe"),
    ("moe", "dense", "dense"),
    ("dense", "dense"),
)
POLICIES = (("vanilla", 1), ("expert_pipeline", 2), ("expert_pipeline", 4), ("unified", 2), ("unified", 4))


def nominal(shape: StepShape) -> TaskTimes:
    """An exchange takes as long as attention or experts, a second for the whole batch; sums of a block half of it."""
    unit = Linear(0.0, 1.0)
    full = ComputeStage(rate=unit, forward=1.0, backward=1.0, weight=1.0)
    free = ComputeStage(rate=unit, forward=0.0, backward=0.0)
    exchange = Transfer(link=unit, num_bytes=1.0)
    return TaskTimes(
        compute={"embed": free, "attend": full, "dense": full, "expert": full, "head": full},
        transfer=dict.fromkeys(("dispatch", "combine", "gather", "scatter"), exchange),
        reduce=unit,
        reduction_bytes=tuple((0.5 / max(count, 1),) * count for count in shape.reductions),
    )


def random_costs(seed: int, shape: StepShape, chunk_alpha_s: float = 0.0, reduce_scale: float = 1.0) -> TaskTimes:
    """Costs without start-up times but for chunks; the same for every cut of a model."""
    rng = random.Random(seed)
    unit = Linear(0.0, 1.0)

    def compute() -> ComputeStage:
        flops = rng.uniform(0.1, 2.0)
        return ComputeStage(rate=unit, forward=flops, backward=flops * rng.uniform(0.8, 1.5), weight=flops)

    free = ComputeStage(rate=unit, forward=0.05, backward=0.05)
    stages = {"embed": free} | {name: compute() for name in ("attend", "dense", "expert", "head")}
    inter = Transfer(link=unit, num_bytes=rng.uniform(0.1, 2.5))
    intra = Transfer(link=unit, num_bytes=rng.uniform(0.1, 2.0))
    totals = [reduce_scale * rng.uniform(0.1, 2.0) for _ in shape.reductions]
    return TaskTimes(
        compute=stages,
        transfer={"dispatch": inter, "combine": inter, "gather": intra, "scatter": intra},
        reduce=Linear(chunk_alpha_s, 1.0),
        reduction_bytes=tuple((total / max(n, 1),) * n for total, n in zip(totals, shape.reductions, strict=True)),
    )


def random_step(
    seed: int,
    policy: str,
    degree: int,
    kinds: Sequence[str],
    weight_grad: str = "inline",
    grad_reduce: str = "end",
    chunks: int = 1,
    **costs: float,
) -> Timeline:
    """The simulated timeline of a step with random costs."""
    reductions = (chunks,) * (len(kinds) + 2)
    shape = make_shape(policy, kinds, degree, weight_grad=weight_grad, grad_reduce=grad_reduce, reductions=reductions)
    seconds = random_costs(seed, shape, **costs).of(shape)
    return simulate(make_schedule(policy, shape, seconds), seconds)


def schedules(seed: int) -> list[Schedule]:
    """Every policy, placement and pattern of blocks; the details are drawn."""
    rng = random.Random(seed)
    made = []
    for policy, degree in POLICIES:
        for weight_grad in ("inline", "greedy"):
            for grad_reduce in ("end", "block", "bucketed"):
                kinds = rng.choice(MIXED)
                shape = make_shape(
                    policy,
                    kinds,
                    degree,
                    rng.choice([d for d in (1, 2, 4) if degree % d == 0]),
                    weight_grad=weight_grad,
                    grad_reduce=grad_reduce,
                    reductions=tuple(rng.choice((0, 1, 3)) for _ in range(len(kinds) + 2)),
                    sharded_experts=rng.random() < 0.5,
                    tied=rng.random() < 0.5,
                )
                made.append(make_schedule(policy, shape, random_costs(seed, shape).of(shape)))
    return made
