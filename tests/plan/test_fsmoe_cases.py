"""FSMoE's closed forms of one MoE layer against the simulator walking the same tasks.

a all-to-all, g AllGather, s ReduceScatter, e experts (seconds of one of r chunks), t gradient all-reduce.
"""

import random

import pytest
from scipy.optimize import minimize

from moe_jax.plan.simulate import simulate
from moe_jax.schedule.actions import Action
from moe_jax.schedule.build import make_schedule, make_shape


def simulated_layer_s(r: int, a: float, g: float, s: float, e: float, t: float) -> float:
    """The backward pass of the lower of two blocks while the upper block's gradients are summed."""
    shape = make_shape("expert_pipeline", ("moe", "moe"), r, grad_reduce="block", sharded_experts=True)
    # the transpose of a scattered sum is a gather, and the other way round
    layer = {"combine": a, "scatter": g, "expert": e, "gather": s, "dispatch": a}

    def seconds(action: Action) -> float:
        if action == Action("G", "reduce", 1, 0):
            return t
        return layer.get(action.op, 0.0) if action[::2] == ("B", 0) else 0.0

    return simulate(make_schedule("expert_pipeline", shape, seconds), seconds).makespan_s


def printed_case_s(r: int, a: float, g: float, s: float, e: float, t: float) -> tuple[int, float]:
    """FSMoE, section 4.2: the case that the predicates choose, and its time."""
    q1, q2, q3 = a > g, r * e > 2 * (r - 1) * a, r * e > (r - 1) * (g + s)
    q4, q6 = t > g + s, t > r * (g + s) - 2 * (r - 1) * a
    q5 = q7 = t > r * e - 2 * (r - 1) * a + g + s
    if (q1 and not q2 and q4) or (q1 and q2 and q5) or (not q1 and not q3 and q6) or (not q1 and q3 and q7):
        return 1, 2 * r * a + t
    if (q1 and q2) or (not q1 and q3):
        return 2, 2 * a + g + s + r * e
    return (3, 2 * r * a + g + s) if q1 else (4, 2 * a + r * (g + s))


def longest_path_s(r: int, a: float, g: float, s: float, e: float, t: float) -> float:
    """All ways through the layer's order D1…Dr [t] C1…Cr, AG1…AGr RS1…RSr, E1…Er that can be the longest."""
    cases = (2 * r * a + t, 2 * a + g + s + r * e, 2 * r * a + g + s, 2 * a + r * (g + s))
    if_g_differs_from_s = ((r + 1) * a + r * g + s, (r + 1) * a + g + r * s)
    corners = ((r + 1) * a + g + e + s, 2 * a + r * g + e + s, 2 * a + g + e + r * s)
    return max(*cases, *if_g_differs_from_s, *corners)


def _draws(seed: int, count: int = 150):
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.choice((1, 2, 3, 4, 8)), *(rng.uniform(0.05, 3.0) for _ in range(4)), rng.uniform(0.0, 12.0)


def test_the_printed_cases_are_exact_if_gather_and_scatter_take_the_same_time():
    met = set()
    for r, a, g, _, e, t in _draws(seed=0, count=300):
        case, expected = printed_case_s(r, a, g, g, e, t)
        met.add(case)
        assert simulated_layer_s(r, a, g, g, e, t) == pytest.approx(expected)
    assert met == {1, 2, 3, 4}


def test_the_longest_path_is_exact_for_any_times():
    for draw in _draws(seed=1):
        assert simulated_layer_s(*draw) == pytest.approx(longest_path_s(*draw))


def test_the_printed_cases_are_only_a_lower_bound_if_gather_and_scatter_differ():
    """FSMoE assumes equal times and then compares an all-to-all with a gather alone."""
    too_short = 0
    for draw in _draws(seed=2):
        simulated, (_, printed) = simulated_layer_s(*draw), printed_case_s(*draw)
        assert printed <= simulated * (1 + 1e-9)
        too_short += printed < simulated * (1 - 1e-9)
    assert too_short > 0


def _least_over_real_degrees(alphas: list[float], amounts: list[float], t: float) -> tuple[float, float]:
    """The degree r ≥ 1 and the time of the largest of the four cases, a chunk taking alpha + amount/r."""

    def slack(x: list[float]) -> list[float]:
        r, time_s = x
        a, g, e = (alpha + amount / r for alpha, amount in zip(alphas, amounts, strict=True))
        cases = (2 * r * a + t, 2 * a + 2 * g + r * e, 2 * r * a + 2 * g, 2 * a + 2 * r * g)
        return [time_s - case for case in cases]

    bounds, above = [(1.0, 64.0), (0.0, None)], {"type": "ineq", "fun": slack}
    start = (1.0, -min(slack([1.0, 0.0])))
    found = minimize(lambda x: x[1], start, method="SLSQP", bounds=bounds, constraints=above)
    assert found.success
    return tuple(found.x)


def test_the_best_whole_degree_is_next_to_the_best_real_one():
    """FSMoE, algorithm 1, takes SLSQP over r ≥ 1; the largest of four convex cases is convex, so degrees can be
    enumerated."""
    rng = random.Random(3)
    interior = 0
    for _ in range(40):
        alphas = [10 ** rng.uniform(-3, -0.5) for _ in range(3)]
        amounts = [rng.uniform(0.2, 4.0) for _ in range(3)]
        t = rng.choice((0.0, rng.uniform(0.0, 12.0)))
        whole_s = {}
        for r in range(1, 65):
            a, g, e = (alpha + amount / r for alpha, amount in zip(alphas, amounts, strict=True))
            whole_s[r] = printed_case_s(r, a, g, g, e, t)[1]
        real, least_s = _least_over_real_degrees(alphas, amounts, t)
        best_s = min(whole_s.values())
        assert least_s <= best_s * (1 + 1e-6)
        assert min(whole_s[int(real)], whole_s[min(int(real) + 1, 64)]) == pytest.approx(best_s, rel=1e-3)
        interior += 1.5 < real < 60
    assert interior > 10
