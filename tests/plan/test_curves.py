"""Alpha-beta fits and what is read off measured curves."""

import numpy as np
import pytest

from moe_jax.plan.curves import Curve, curve, fit_linear

AMOUNTS = [2.0**n for n in range(12, 24)]


def made(amounts: list[float], seconds: list[float]) -> Curve:
    return curve("copy", {}, "bytes", amounts, [(s, s, s) for s in seconds])


def test_known_alpha_and_beta_are_recovered() -> None:
    fit = fit_linear(AMOUNTS, [3e-5 + x * 2e-9 for x in AMOUNTS])
    assert fit.line.alpha_s == pytest.approx(3e-5, rel=1e-9)
    assert fit.line.beta_s == pytest.approx(2e-9, rel=1e-9)
    assert fit.r_squared == pytest.approx(1.0)


def test_noise_in_proportion_to_the_time_leaves_alpha_and_beta() -> None:
    noise = 1 + 0.03 * np.random.default_rng(0).standard_normal(len(AMOUNTS))
    fit = fit_linear(AMOUNTS, [f * (3e-5 + x * 2e-9) for f, x in zip(noise, AMOUNTS, strict=True)])
    assert fit.line.alpha_s == pytest.approx(3e-5, rel=0.1), "the largest amounts decide alone"
    assert fit.line.beta_s == pytest.approx(2e-9, rel=0.05)


def test_r_squared_by_hand() -> None:
    """Times 1, 2, 4 at 0, 1, 2 with weights 16, 4, 1.

    Means 2/7 and 4/3, Σw(x − x̄)(t − t̄) = 8, Σw(x − x̄)² = 44/7: the line 32/33 + 14/11 x. It leaves 1/33, -8/33 and
    16/33: Σ = 528/33² = 16/33 of 32/3.
    """
    fit = fit_linear([0.0, 1.0, 2.0], [1.0, 2.0, 4.0])
    assert (fit.line.alpha_s, fit.line.beta_s) == pytest.approx((32 / 33, 14 / 11))
    assert fit.r_squared == pytest.approx(21 / 22)


@pytest.mark.parametrize("seconds", [[5.0, 4.0, 3.0], [0.1, 2.0, 4.0]])
def test_neither_alpha_nor_beta_is_negative(seconds: list[float]) -> None:
    fit = fit_linear([1.0, 2.0, 3.0], seconds)
    assert min(fit.line.alpha_s, fit.line.beta_s) == 0.0
    assert max(fit.line.alpha_s, fit.line.beta_s) > 0.0


@pytest.mark.parametrize(("amounts", "seconds"), [([1.0], [1.0]), ([2.0, 2.0], [1.0, 1.0]), ([1.0, 2.0], [0.0, 1.0])])
def test_what_has_no_line_is_refused(amounts: list[float], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="a line needs times above 0 of two different amounts"):
        fit_linear(amounts, seconds)


def test_between_measured_amounts_a_curve_is_what_was_measured() -> None:
    bent = made([1.0, 2.0, 10.0], [1.0, 4.0, 5.0])
    assert [bent.seconds(x) for x in (1.0, 2.0, 10.0)] == [1.0, 4.0, 5.0]
    assert bent.seconds(6.0) == pytest.approx(4.5)


def test_beyond_it_grows_like_its_line_and_without_a_jump() -> None:
    exact = made(AMOUNTS, [1e-3 + x * 1e-9 for x in AMOUNTS])
    for x in (1.0, 1e12):
        assert exact.seconds(x) == pytest.approx(1e-3 + x * 1e-9)
    bent = made([1.0, 2.0, 10.0], [1.0, 4.0, 5.0])
    assert bent.seconds(10.0 + 1e-9) == pytest.approx(5.0)
    assert bent.seconds(1e6) == pytest.approx(5.0 * bent.line.seconds(1e6) / bent.line.seconds(10.0))


def test_efficiency_is_the_rate_over_the_best() -> None:
    assert made([1.0, 2.0, 10.0], [1.0, 4.0, 5.0]).efficiency == pytest.approx((0.5, 0.25, 1.0))
