"""The grouped products of each platform, and the one that a config asks for."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moe_jax.config import Config
from moe_jax.errors import ConfigError
from moe_jax.models import grouped_kernel
from moe_jax.models.grouped_matmul import blocks, group_of_tiles, ragged, weight_gradient
from moe_jax.models.layers import Product


class GroupedProduct(NamedTuple):
    """A product (rows, matrices, sizes, tile) and the range of tiles that suit it on a platform: powers of 2."""

    multiply: Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array]
    min_tile: int
    max_tile: int
    width_multiple: int = 1  # widths must be multiples of it
    # rows, cotangents, sizes, tile → one matrix per group
    weight_gradient: Callable[..., jax.Array] = weight_gradient
    filled: float = 1.0  # the share of a buffer's rows that exist if routing is balanced

    def tile(self, rows: int, groups: int) -> int:
        """Return the tile for this many rows and groups.

        It is at most an even share of the rows, so that padding adds fewer rows than there are.
        """
        share = max(rows // groups, 1)
        return min(max(1 << (share.bit_length() - 1), self.min_tile), self.max_tile)

    def of(self, size_L: Int[Array, " L"], rows: int, tile: int) -> Product:
        """Return the product as experts call it, for buffers of `rows` rows.

        A scope tells which share of them balanced routing fills, for estimates from compiled programs.
        """
        in_scope = jax.named_scope(f"filled_{round(100 * self.filled)}_percent")

        @in_scope
        def multiply(x: jax.Array, w: jax.Array, size_L: jax.Array) -> jax.Array:
            return self.multiply(x, w.astype(x.dtype), size_L, tile)

        def of_rows(vector: jax.Array, size_L: jax.Array) -> jax.Array:
            group = jnp.minimum(group_of_tiles(size_L, rows // tile, tile), len(vector) - 1)
            return jnp.repeat(vector[group], tile, axis=0)

        return Product(multiply, of_rows, in_scope(partial(self.weight_gradient, tile=tile)), (size_L,))


# By the names of train.grouped_product. The first of a platform is the one for `auto`, unless products are timed.
GROUPED_PRODUCTS = {
    "cpu": {"blocks": GroupedProduct(blocks, min_tile=8, max_tile=64)},
    "gpu": {
        "blocks": GroupedProduct(blocks, min_tile=64, max_tile=512),
        "ragged": GroupedProduct(ragged, min_tile=64, max_tile=512),
        "pallas": GroupedProduct(
            grouped_kernel.pallas,
            min_tile=64,
            max_tile=128,
            width_multiple=grouped_kernel.MIN_WIDTH,
            weight_gradient=grouped_kernel.weight_gradient,
        ),
    },
    "tpu": {
        "ragged": GroupedProduct(ragged, min_tile=128, max_tile=512),
        "blocks": GroupedProduct(blocks, min_tile=128, max_tile=512),
    },
}


def product_name(config: Config, platform: str, tensor_ranks: int) -> str:
    """Return the name in `GROUPED_PRODUCTS` that `train.grouped_product` stands for. Raises ConfigError."""
    products, name = GROUPED_PRODUCTS[platform], config.train.grouped_product
    if name == "auto":
        return next(iter(products))
    if name not in products:
        raise ConfigError(
            f"train.grouped_product={name} is not for these devices, which are {platform}: "
            f"use train.grouped_product=auto, or {' or '.join(products)}"
        )
    if config.model.moe.num_experts and config.model.moe.sends_sized_rows:
        _check_width("model.hidden_size", config.model.hidden_size, 1, name, products[name])
        _check_width(
            "model.moe.intermediate_size", config.model.moe.intermediate_size, tensor_ranks, name, products[name]
        )
    return name


def _check_width(setting: str, width: int, tensor_ranks: int, name: str, product: GroupedProduct) -> None:
    if width // tensor_ranks % product.width_multiple:
        division = f" / mesh.tensor={tensor_ranks}" if tensor_ranks > 1 else ""
        raise ConfigError(
            f"train.grouped_product={name} cuts widths into multiples of {product.width_multiple}, and {setting}="
            f"{width}{division} is none: use another width, or train.grouped_product=auto"
        )
