"""The candidates of a plan: on which links context ranks and expert ranks are placed."""

import pytest

from moe_jax.plan.candidates import place


@pytest.mark.parametrize(
    ("sizes", "shared", "reason"),
    [
        ((4, 8, 1, 64), False, "context=4 is less than expert=8"),
        ((4, 8, 2, 64), False, "fast links join 64"),
        ((4, 8, 4, 64), True, "tensor × expert × context = 128"),
        ((8, 8, 1, 64), True, "context=8 is at least expert=8"),
        ((16, 8, 1, 512), True, "hold all experts"),
        ((1, 8, 1, 8), False, "context=1"),
        ((12, 8, 1, 8), False, "do not divide each other"),
    ],
)
def test_context_and_expert_ranks_share_an_axis_unless_fewer_and_fast(sizes: tuple, shared: bool, reason: str) -> None:
    found = place(*sizes)
    assert found.shared == shared
    assert reason in found.reason
    assert found.axes[0] == "tensor"
    assert ("expert+context" in found.axes) == shared
    if not shared:
        assert found.axes.index("expert") + 1 == found.axes.index("context")
