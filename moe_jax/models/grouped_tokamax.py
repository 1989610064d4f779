"""Grouped products by the kernels of tokamax, a package of its own: `pip install -e '.[kernels]'`.

S rows, L groups, D and F widths. tokamax itself chooses a kernel for the device and its block sizes. It is imported
where a product is called, since it is optional.
"""

from types import ModuleType

import jax
from jax.lax import RaggedDotDimensionNumbers
from jaxtyping import Array, Float, Int

from moe_jax.errors import ConfigError
from moe_jax.models.grouped_matmul import mask_beyond

_KERNELS = "mosaic"  # without it, tokamax would fall back to XLA's ragged product
_FORWARD = RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
_DGRAD = RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
_WGRAD = RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def tokamax(
    x_SD: Float[Array, "S D"], w_LDF: Float[Array, "L D F"], size_L: Int[Array, " L"], tile: int
) -> Float[Array, "S F"]:
    """Multiply rows by the matrix of their group. Raises ConfigError without the package."""
    return mask_beyond(_product(x_SD, w_LDF, size_L, _FORWARD), size_L)


def tokamax_dgrad(
    dy_SF: Float[Array, "S F"], w_LDF: Float[Array, "L D F"], size_L: Int[Array, " L"], tile: int
) -> Float[Array, "S D"]:
    """Return the gradient of the rows."""
    return mask_beyond(_product(dy_SF, w_LDF, size_L, _DGRAD), size_L)


def tokamax_wgrad(
    x_SD: Float[Array, "S D"], dy_SF: Float[Array, "S F"], size_L: Int[Array, " L"], tile: int
) -> Float[Array, "L D F"]:
    """Return the gradient of the matrix of each group."""
    return _product(x_SD, dy_SF, size_L, _WGRAD)


def _product(left: jax.Array, right: jax.Array, size_L: jax.Array, dims: RaggedDotDimensionNumbers) -> jax.Array:
    options = {"preferred_element_type": left.dtype, "implementation": _KERNELS}
    y: jax.Array = _package().ragged_dot_general(left, right, size_L, dims, **options)
    return y


def _package() -> ModuleType:
    """Import the package. It would read its options from this program's command line, and refuse that."""
    try:
        import tokamax as package  # type: ignore[import-not-found]
        from absl import flags
    except ImportError as error:
        raise ConfigError(
            f"train.grouped_product names tokamax, which cannot be imported ({error}): pip install -e '.[kernels]', or "
            "use train.grouped_product=auto"
        ) from None
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    return package
