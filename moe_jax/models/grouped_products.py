"""The grouped products of each platform, and the one that a config asks for. S rows, L groups, D and F widths."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import Config
from moe_jax.config.attention_kernels import Capability
from moe_jax.config.grouped_products import AUTO, passes_of
from moe_jax.errors import ConfigError
from moe_jax.models.grouped_blackwell import PAIR_MULTIPLE, blackwell
from moe_jax.models.grouped_hopper import WIDTH_MULTIPLE, hopper, hopper_dgrad, hopper_wgrad
from moe_jax.models.grouped_kernel import MIN_WIDTH, pallas, pallas_dgrad, pallas_wgrad
from moe_jax.models.grouped_matmul import blocks, blocks_dgrad, blocks_wgrad, group_of_tiles, ragged, ragged_dgrad
from moe_jax.models.grouped_megablox import megablox, megablox_dgrad, megablox_wgrad
from moe_jax.models.grouped_tokamax import tokamax, tokamax_dgrad, tokamax_wgrad
from moe_jax.models.layers import MatrixProduct

Pass = Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array]  # two operands, size_L, tile → result


class GroupedProduct(NamedTuple):
    """The three passes of a product, and the range of tiles that suit it on a platform: powers of 2.

    `jax.grad` of `multiply` uses the other two passes. A pass that is None has no kernel, so another product's must be
    used.
    """

    forward: Pass  # x [S, D], w [L, D, F] → [S, F]
    dgrad: Pass | None  # dy [S, F], w [L, D, F] → [S, D]
    wgrad: Pass | None  # x [S, D], dy [S, F] → [L, D, F]
    min_tile: int
    max_tile: int
    width_multiple: int = 1  # widths must be multiples of it
    major: int | None = None  # major compute capability of the GPUs that it supports; None: all
    needs_bfloat16: bool = False
    filled: float = 1.0  # the share of a buffer's rows that exist if routing is balanced

    def multiply(
        self, x_SD: Float[Array, "S D"], w_LDF: Float[Array, "L D F"], size_L: Int[Array, " L"], tile: int
    ) -> Float[Array, "S F"]:
        """Multiply rows by the matrix of their group. Differentiable in rows and matrices."""
        return _multiply(self, tile, x_SD, w_LDF, size_L)

    def tile(self, rows: int, groups: int) -> int:
        """Return the tile for this many rows and groups.

        It is at most an even share of the rows, so that padding adds fewer rows than there are.
        """
        share = max(rows // groups, 1)
        return min(max(1 << (share.bit_length() - 1), self.min_tile), self.max_tile)

    def of(self, size_L: Int[Array, " L"], rows: int, tile: int) -> MatrixProduct:
        """Return the product as experts call it, for buffers of `rows` rows.

        A scope gives the share of them that balanced routing fills, for estimates from compiled programs.
        """
        in_scope = jax.named_scope(f"filled_{100 * self.filled:.3g}_percent")

        @in_scope
        def multiply(x: jax.Array, w: jax.Array, size_L: jax.Array) -> jax.Array:
            return self.multiply(x, w.astype(x.dtype), size_L, tile)

        def of_rows(vector: jax.Array, size_L: jax.Array) -> jax.Array:
            group = jnp.minimum(group_of_tiles(size_L, rows // tile, tile), len(vector) - 1)
            return jnp.repeat(vector[group], tile, axis=0)

        @in_scope
        def weight_gradient(x: jax.Array, dy: jax.Array, size_L: jax.Array) -> jax.Array:
            assert self.wgrad is not None, "checked by product_of"
            return _named(_WEIGHTS, self.wgrad, x, dy, size_L, tile)

        return MatrixProduct(multiply, of_rows, weight_gradient, (size_L,))


# Scopes by which `measure/costs.py` recognises custom calls as matrix products.
_ROWS, _WEIGHTS = "grouped_rows", "grouped_weights"


def _named(scope: str, own: Pass, left: jax.Array, right: jax.Array, size_L: jax.Array, tile: int) -> jax.Array:
    with jax.named_scope(scope):
        return own(left, right, size_L, tile)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(product: GroupedProduct, tile: int, x: jax.Array, w: jax.Array, size_L: jax.Array) -> jax.Array:
    return _named(_ROWS, product.forward, x, w, size_L, tile)


def _forward(
    product: GroupedProduct, tile: int, x: jax.Array, w: jax.Array, size_L: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _multiply(product, tile, x, w, size_L), (x, w, size_L)


def _backward(
    product: GroupedProduct, tile: int, saved: tuple[jax.Array, ...], dy_SF: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, w, size_L = saved
    assert product.dgrad is not None
    assert product.wgrad is not None
    dx_SD = _named(_ROWS, product.dgrad, dy_SF, w, size_L, tile)
    return dx_SD, _named(_WEIGHTS, product.wgrad, x, dy_SF, size_L, tile), None


_multiply.defvjp(_forward, _backward)

_BLOCKS = partial(GroupedProduct, blocks, blocks_dgrad, blocks_wgrad)
_RAGGED = partial(GroupedProduct, ragged, ragged_dgrad, blocks_wgrad)
_TOKAMAX = partial(GroupedProduct, tokamax, tokamax_dgrad, tokamax_wgrad)
_MOSAIC = partial(GroupedProduct, max_tile=128, needs_bfloat16=True)

# By the names of train.grouped_product. The first of a platform is the one for `auto`, unless products are timed.
GROUPED_PRODUCTS: dict[str, dict[str, GroupedProduct]] = {
    "cpu": {"blocks": _BLOCKS(min_tile=8, max_tile=64)},
    "gpu": {
        "blocks": _BLOCKS(min_tile=64, max_tile=512),
        "ragged": _RAGGED(min_tile=64, max_tile=128),
        # Pallas' Triton backend is deprecated: this kernel will be removed once another is as fast
        "pallas": GroupedProduct(
            pallas, pallas_dgrad, pallas_wgrad, min_tile=64, max_tile=128, width_multiple=MIN_WIDTH
        ),
        "hopper": _MOSAIC(hopper, hopper_dgrad, hopper_wgrad, min_tile=64, width_multiple=WIDTH_MULTIPLE, major=9),
        "blackwell": _MOSAIC(blackwell, None, None, min_tile=128, width_multiple=PAIR_MULTIPLE, major=10),
        "tokamax": _TOKAMAX(min_tile=64, max_tile=128, needs_bfloat16=True),
    },
    "tpu": {
        "ragged": _RAGGED(min_tile=128, max_tile=512),
        "blocks": _BLOCKS(min_tile=128, max_tile=512),
        "megablox": GroupedProduct(megablox, megablox_dgrad, megablox_wgrad, min_tile=128, max_tile=512),
        "tokamax": _TOKAMAX(min_tile=128, max_tile=512),
    },
}


def product_of(name: str, products: Mapping[str, GroupedProduct]) -> GroupedProduct | None:
    """Return the product with this name, of the passes that it names; None if a pass has no kernel in `products`."""
    kernels = passes_of(name)
    if kernels is None or not set(kernels) <= products.keys():
        return None
    forward, backward, weights = (products[kernel] for kernel in kernels)
    if backward.dgrad is None or weights.wgrad is None:
        return None
    if len(set(kernels)) == 1:
        return forward
    parts = (forward, backward, weights)
    return GroupedProduct(
        forward.forward,
        backward.dgrad,
        weights.wgrad,
        min_tile=max(each.min_tile for each in parts),
        max_tile=min(each.max_tile for each in parts),
        width_multiple=max(each.width_multiple for each in parts),  # all are powers of 2
    )


def available(
    products: Mapping[str, GroupedProduct], capability: Capability | None, dtype: str
) -> dict[str, GroupedProduct]:
    """Return the products for a dtype on GPUs of a compute capability (None: unknown, or no GPU)."""
    return {
        name: product
        for name, product in products.items()
        if product.major is None or (capability is not None and product.major == capability[0])
        if dtype == "bfloat16" or not product.needs_bfloat16
    }


def product_name(config: Config, platform: str, tensor_ranks: int, capability: Capability | None = None) -> str:
    """Return the name that `train.grouped_product` stands for if nothing is timed. Raises ConfigError."""
    products, name = GROUPED_PRODUCTS[platform], config.train.grouped_product
    if name == AUTO:
        if "hopper" in available(products, capability, config.train.compute_dtype):  # the fastest wherever it was timed
            own = dataclasses.replace(config, train=dataclasses.replace(config.train, grouped_product="hopper"))
            with suppress(ConfigError):
                return product_name(own, platform, tensor_ranks, capability)
        return next(iter(products))
    kernels = passes_of(name)
    if kernels is None or not set(kernels) <= products.keys():
        whole = (each for each in products if product_of(each, products) is not None)
        raise ConfigError(
            f"train.grouped_product={name} is not for these devices, which are {platform}: "
            f"use train.grouped_product=auto, or {' or '.join(whole)}"
        )
    if product_of(name, products) is None:
        raise ConfigError(
            f"train.grouped_product={name} has no kernel for its gradients: name one for each pass, as in "
            f"{kernels.forward}+pallas+pallas, or use train.grouped_product=auto"
        )
    _check_device(config, name, {kernel: products[kernel] for kernel in kernels}, capability)
    if config.model.moe.num_experts and config.model.moe.sends_sized_rows:
        multiple = max(products[kernel].width_multiple for kernel in kernels)
        _check_width("model.hidden_size", config.model.hidden_size, 1, name, multiple)
        _check_width("model.moe.intermediate_size", config.model.moe.intermediate_size, tensor_ranks, name, multiple)
    return name


def _check_device(
    config: Config, name: str, kernels: Mapping[str, GroupedProduct], capability: Capability | None
) -> None:
    for kernel, product in kernels.items():
        if product.major is not None and capability is not None and capability[0] != product.major:
            raise ConfigError(
                f"train.grouped_product={name}: {kernel} is for compute capability {product.major}, and these devices "
                f"have {capability[0]}.{capability[1]}: use train.grouped_product=auto"
            )
        if product.needs_bfloat16 and config.train.compute_dtype != "bfloat16":
            raise ConfigError(
                f"train.grouped_product={name} multiplies bfloat16, and train.compute_dtype="
                f"{config.train.compute_dtype}: use train.compute_dtype=bfloat16, or train.grouped_product=auto"
            )


def _check_width(setting: str, width: int, tensor_ranks: int, name: str, multiple: int) -> None:
    if width // tensor_ranks % multiple:
        division = f" / mesh.tensor={tensor_ranks}" if tensor_ranks > 1 else ""
        raise ConfigError(
            f"train.grouped_product={name} needs widths that are multiples of {multiple}, and {setting}="
            f"{width}{division} is not: use another width, or train.grouped_product=auto"
        )
