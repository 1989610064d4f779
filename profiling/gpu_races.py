"""A part of `bench_gpu.py`: times of all grouped products at the sizes of a model's step, pass by pass, as runs do."""

from collections.abc import Mapping

import jax
from parts import Put, Values
from results_file import rounded

from moe_jax.config import Config
from moe_jax.parallel.mesh import make_mesh
from moe_jax.run.choose_grouped_matmul import candidates, fastest_of, time_products, times_of


def measure(put: Put, configs: Mapping[str, Config], rates: Values) -> None:
    """Time each product at the sizes of each model; `share_of_rate` compares it with one large matrix product."""
    for name, config in configs.items():
        shape, products = candidates(config, make_mesh(config.mesh, jax.devices()[:1]))
        found = times_of(shape, products, time_products)
        flops = 2 * 2 * shape.filled * shape.groups * shape.width * shape.hidden  # there and back
        put(
            {
                name: {
                    "shape": shape._asdict(),
                    "fastest": fastest_of(found.seconds, shape, products),
                    "seconds": {each: rounded(seconds) for each, seconds in found.seconds.items()},
                    "share_of_rate": {
                        each: rounded(flops / seconds / rates["matrix_flops_per_s"])
                        for each, seconds in found.seconds.items()
                    },
                    "left_out": found.failed,
                }
            }
        )
