"""Every two settings of a training step meet in some program, and each is what the slow reference computes.

A case that fails is tried again with one setting after another as it usually is, and the message names those that are
needed to break it.
"""

import numpy as np
import pytest

from tests.pairwise import Case
from tests.step.arrays import name_of
from tests.step.step_settings import ARRAY


@pytest.mark.parametrize("case", ARRAY.cases, ids=name_of)
def test_a_step_is_the_references(case: Case) -> None:
    ARRAY.check_or_search(case)


def test_all_settings_meet() -> None:
    ARRAY.assert_all_meet()


def test_what_is_left_out_is_refused() -> None:
    ARRAY.assert_left_out_is_refused()


def test_four_devices_are_enough() -> None:
    assert {int(np.prod(list(ARRAY.config_of(case).mesh.sizes.values()))) for case in ARRAY.cases} == {4}
