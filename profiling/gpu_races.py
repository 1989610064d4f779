"""A part of `bench_gpu.py`: the times of all grouped products at the sizes of a model's step, as a run takes them."""

from collections.abc import Mapping

import jax
from parts import Put, Values
from results_file import rounded

from moe_jax.config import Config
from moe_jax.models.grouped_products import GROUPED_PRODUCTS
from moe_jax.parallel.mesh import make_mesh
from moe_jax.run.choose_grouped_matmul import shape_of, time_products


def measure(put: Put, configs: Mapping[str, Config], rates: Values) -> None:
    """Time each product at the sizes of each model; `share_of_rate` compares it with one large matrix product."""
    for name, config in configs.items():
        mesh = make_mesh(config.mesh, jax.devices()[:1])
        shape = shape_of(config, mesh, rates["platform"])
        found = time_products(shape, GROUPED_PRODUCTS[rates["platform"]])
        # two products, each with three passes: forward and both gradients
        flops = 2 * 3 * 2 * shape.filled * shape.groups * shape.width * shape.hidden
        put(
            {
                name: {
                    "shape": shape._asdict(),
                    "seconds": {each: rounded(seconds) for each, seconds in found.seconds.items()},
                    "share_of_rate": {
                        each: rounded(flops / seconds / rates["matrix_flops_per_s"])
                        for each, seconds in found.seconds.items()
                    },
                    "left_out": found.failed,
                }
            }
        )
