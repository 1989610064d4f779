"""First parameters do not depend on which devices draw them."""

from typing import Any

import jax
import numpy as np
import pytest

from moe_jax.models.parameters import init_params
from moe_jax.models.stages import stored
from moe_jax.parallel.mesh import make_mesh
from moe_jax.stages import Stages
from moe_jax.train.step import INIT_OPTIONS, make_trainer
from tests.small import small_config


@pytest.mark.parametrize(("data", "expert"), [(8, 1), (2, 4)])
def test_devices_that_draw_parts_get_the_same_numbers(data: int, expert: int) -> None:
    config = small_config(data, expert)
    found = make_trainer(config, make_mesh(config.mesh)).init()["params"]

    def draw() -> Any:
        return stored(init_params(config.model, config.train.seed), Stages.of(config))

    alone = jax.jit(draw, compiler_options=INIT_OPTIONS["cpu"])()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(alone))
