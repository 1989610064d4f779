"""First parameters do not depend on which devices draw them."""

from typing import Any

import jax
import numpy as np

from moe_jax.config.layer_layout import Stages
from moe_jax.models.parameters import init_params, stored
from moe_jax.parallel.mesh import make_mesh
from moe_jax.step.trainer import INIT_OPTIONS, make_trainer
from tests.compiled import NEWER_EMITTERS
from tests.small import small_config


def test_devices_that_draw_parts_get_the_same_numbers() -> None:
    config = small_config(2, 4)
    found = make_trainer(config, make_mesh(config.mesh)).init()["params"]

    def draw() -> Any:
        return stored(init_params(config.model, config.train.seed), Stages.of(config))

    alone = jax.jit(draw, compiler_options=INIT_OPTIONS["cpu"])()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(alone))


def test_numbers_are_the_same_with_all_optimisations() -> None:
    """Checked for one block: LLVM compiles the generator once for each array. With a run's own emitters."""
    few_arrays = {"num_layers": 1, "activation": "gelu", "tie_word_embeddings": True}
    model = small_config(1, 1, model=few_arrays, moe_layer_freq=1).model
    few, all_of_them = (
        jax.jit(lambda: init_params(model, 0), compiler_options=options)()
        for options in (INIT_OPTIONS["cpu"], {"xla_backend_optimization_level": 3, **NEWER_EMITTERS})
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(few), jax.device_get(all_of_them))
