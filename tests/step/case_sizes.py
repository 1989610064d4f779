"""How large the programs of an array's cases are, and what each setting adds to that."""

from collections.abc import Sequence

import numpy as np

from moe_jax.step.trainer import make_trainer
from tests.pairwise import Case
from tests.step.arrays import Array
from tests.step.gradients import mesh_of
from tests.step.one_step import batch_of, first_state

RIDGE = 1.0  # of the fit: each value is in few cases


def size_of(array: Array, case: Case) -> int:
    """Lines of the program of a case, which is not compiled: times of tracing and compilation grow with them."""
    config = array.config_of(case)
    trainer = make_trainer(config, mesh_of(config))
    return trainer.step.lower(first_state(config, trainer), batch_of(config)).as_text().count("\n")


def log_factors(items: Sequence[tuple[str, str]], cases: Sequence[Case], sizes: Sequence[int]) -> list[float]:
    """The logarithm of what each (factor, value) multiplies the size of a program by, as it fits the cases best."""
    has = np.array([[case[factor] == value for factor, value in items] for case in cases], float)
    logs = np.log(sizes)
    inverse = np.linalg.inv(has.T @ has + RIDGE * np.eye(len(items)))
    return [float(each) for each in inverse @ has.T @ (logs - logs.mean())]
