"""The grouped products of all platforms against a loop over groups: values and gradients."""

import dataclasses
import functools
import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import Config, ModelConfig, MoEConfig, TrainConfig
from moe_jax.config.grouped_products import KERNELS, PassKernels
from moe_jax.errors import ConfigError
from moe_jax.measure.hlo import Instruction
from moe_jax.models import grouped_kernel, grouped_tokamax
from moe_jax.models.dispatchers.protocol import balanced_fill
from moe_jax.models.grouped_matmul import blocks_dgrad, blocks_wgrad, group_of_tiles
from moe_jax.models.grouped_products import GROUPED_PRODUCTS, GroupedProduct, available, product_name, product_of
from moe_jax.plan.device_sizes import TILES, _tile_range

# Widths of several blocks of the kernel, as 48 and 32 are cut by 16 and 32.
ROWS, GROUPS, D, F, TILE = 192, 4, 48, 32, 16


INTERPRETED = ("pallas", "megablox")  # kernels that are interpreted, since their devices are absent
HARDWARE = ("hopper", "blackwell", "tokamax")  # not interpreted here; their lowering is tested below


def interpreted(name: str, product: GroupedProduct) -> GroupedProduct:
    """The product with kernels that run without its device."""
    if name not in INTERPRETED:
        return product
    passes = {each: functools.partial(getattr(product, each), interpret=True) for each in PassKernels._fields}
    return product._replace(**passes)


PRODUCTS = {
    f"{platform}-{name}": interpreted(name, product)
    for platform, products in GROUPED_PRODUCTS.items()
    for name, product in products.items()
    if name not in HARDWARE
}
# different from each other, whatever their tiles
DIFFERENT = {name.partition("-")[2]: product.multiply for name, product in PRODUCTS.items()}
each_product = pytest.mark.parametrize("multiply", DIFFERENT.values(), ids=DIFFERENT)


def loop(x_SD, w_LDF, sizes):
    out, start = [], 0
    for w_DF, size in zip(w_LDF, sizes, strict=True):
        out.append(x_SD[start : start + size] @ w_DF)
        start += size
    return jnp.concatenate([*out, jnp.zeros((x_SD.shape[0] - start, w_LDF.shape[2]))])


@each_product
@pytest.mark.parametrize("sizes", [(32, 0, 128, 16), (0, 0, 0, 0), (192, 0, 0, 0), (0, 0, 0, 16), (48, 64, 16, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_a_loop_over_groups(multiply, sizes, dtype):
    x_SD, w_LDF, dy_SF = (
        jax.random.normal(jax.random.key(i), shape).astype(dtype)
        for i, shape in enumerate([(ROWS, D), (GROUPS, D, F), (ROWS, F)])
    )
    dy_SF = jnp.where(jnp.arange(ROWS)[:, None] < sum(sizes), dy_SF, 0)

    @jax.jit
    def results(x_SD, w_LDF, size_L, dy_SF):
        y_SF, pull = jax.vjp(lambda x, w: multiply(x, w, size_L, TILE), x_SD, w_LDF)
        return y_SF, *pull(dy_SF)

    found = results(x_SD, w_LDF, jnp.array(sizes, jnp.int32), dy_SF)
    assert {each.dtype for each in found} == {jnp.dtype(dtype)}
    wide = (each.astype(jnp.float32) for each in (x_SD, w_LDF))
    expected, pull_expected = jax.vjp(lambda x, w: loop(x, w, sizes), *wide)
    wanted = [expected, *pull_expected(dy_SF.astype(jnp.float32))]
    found = [each.astype(jnp.float32) for each in found]
    # one rounding of a float32 sum
    chex.assert_trees_all_close(found, wanted, rtol=1e-5 if dtype == "float32" else 2**-8, atol=2e-5)


@each_product
def test_rows_beyond_the_groups_count_for_nothing(multiply):
    x_SD, w_LDF = jnp.ones((ROWS, D)), jnp.ones((GROUPS, D, F))
    x_SD = x_SD.at[80:].set(jnp.nan)
    sizes = jnp.array([32, 16, 0, 32], jnp.int32)
    actual, pull = jax.vjp(lambda w: multiply(x_SD, w, sizes, TILE), w_LDF)
    np.testing.assert_array_equal(actual[:80], D)
    (dw_LDF,) = pull(jnp.ones((ROWS, F)))
    np.testing.assert_array_equal(dw_LDF[:, 0, 0], sizes)


@pytest.mark.parametrize(("tile", "sizes"), [(64, (64, 0, 128, 0)), (256, (256, 0, 0, 256))])
def test_the_kernel_cuts_tiles_and_widths_into_blocks(tile, sizes):
    """Tiles of several blocks of rows, and widths of several blocks of columns and of what is summed over."""
    x_SD, w_LDF, size_L = jnp.ones((512, 192)), jnp.ones((4, 192, 256)), jnp.array(sizes, jnp.int32)
    w_LDF *= jnp.arange(1, 5)[:, None, None]
    kernel = DIFFERENT["pallas"]
    y_SF, pull = jax.vjp(lambda x, w: kernel(x, w, size_L, tile), x_SD, w_LDF)
    factor_S = np.repeat([1, 2, 3, 4, 0], [*sizes, 512 - sum(sizes)])
    np.testing.assert_array_equal(y_SF, np.outer(192 * factor_S, np.ones(256)))
    dx_SD, dw_LDF = pull(jnp.ones_like(y_SF))
    np.testing.assert_array_equal(dx_SD, np.outer(256 * factor_S, np.ones(192)))
    np.testing.assert_array_equal(dw_LDF, np.broadcast_to(np.array(sizes)[:, None, None], w_LDF.shape))


@pytest.mark.parametrize(("width", "hidden"), [(24, 32), (32, 40)])
def test_the_kernel_refuses_widths_that_it_cannot_cut(width, hidden):
    operands = jnp.ones((64, width)), jnp.ones((2, width, hidden)), jnp.array([32, 32], jnp.int32)
    with pytest.raises(ValueError, match="is no multiple of 16"):
        grouped_kernel.pallas(*operands, 32, True)


def test_tiles_fit_the_rows_of_a_group():
    """Padding never exceeds the rows, but where a platform has no smaller tile."""
    product = GROUPED_PRODUCTS["cpu"]["blocks"]
    assert (product.min_tile, product.max_tile) == (8, 64)
    assert [product.tile(rows, groups=4) for rows in (0, 31, 64, 250, 10**6)] == [8, 8, 16, 32, 64]


def test_plans_know_the_tiles():
    """What a plan takes for the rows of experts is what they are computed with."""
    tiles = {
        platform: {name: (product.min_tile, product.max_tile) for name, product in products.items()}
        for platform, products in GROUPED_PRODUCTS.items()
    }
    assert tiles == TILES
    assert [list(products) for products in tiles.values()] == [list(products) for products in TILES.values()]


def test_each_tile_knows_its_group():
    group_of = group_of_tiles(jnp.array([16, 0, 32], jnp.int32), tiles=5, tile=16)
    assert group_of.tolist() == [0, 2, 2, 3, 3]


@pytest.mark.parametrize(("factor", "ranks", "filled"), [(None, 1, 1.0), (3.0, 256, 1 / 3), (None, 256, 1 / 256)])
def test_the_share_of_rows_that_exist_is_read_from_the_scope_of_a_product(factor, ranks, filled):
    """With balanced routing of one choice per token to 256 expert ranks, a worst-case buffer is filled to 0.4 %."""
    moe = MoEConfig(num_experts=256, top_k=1, capacity_factor=None)
    assert balanced_fill(moe, factor, ranks) == pytest.approx(filled)
    product = PRODUCTS["cpu-blocks"]._replace(filled=filled).of(jnp.array([8]), rows=8, tile=8)
    traced = jax.make_jaxpr(product.multiply)(jnp.ones((8, 4)), jnp.ones((1, 4, 4)), *product.groups)
    scope = traced.eqns[-1].source_info.name_stack
    line = Instruction("y", "dot", "f32[8,4]", (), f'metadata={{op_name="jit(step)/{scope}/dot_general"}}')
    assert line.filled == pytest.approx(filled, rel=0.005)


def config_with(name: str, hidden: int = 128) -> Config:
    moe = MoEConfig(num_experts=4, top_k=2, intermediate_size=hidden, capacity_factor=None)
    return Config(
        model=ModelConfig(hidden_size=128, num_attention_heads=4, moe=moe), train=TrainConfig(grouped_product=name)
    )


def test_auto_is_the_first_of_a_platform_and_a_name_is_itself():
    found = {platform: product_name(config_with("auto"), platform, tensor_ranks=1) for platform in GROUPED_PRODUCTS}
    assert found == {"cpu": "blocks", "gpu": "blocks", "tpu": "ragged"}
    for platform, products in GROUPED_PRODUCTS.items():
        whole = [name for name in products if name != "blackwell"]  # it has a forward pass only
        assert [product_name(config_with(name), platform, 1) for name in whole] == whole
    assert product_name(config_with("ragged+pallas+blocks"), "gpu", 1) == "ragged+pallas+blocks"


def test_passes_of_several_kernels_have_a_tile_that_all_take():
    """Each pass is computed by the kernel that it names, and plans have the same tile."""
    products = {
        "a": GROUPED_PRODUCTS["cpu"]["blocks"]._replace(min_tile=8, max_tile=32, width_multiple=4),
        "b": GROUPED_PRODUCTS["cpu"]["blocks"]._replace(min_tile=16, max_tile=64),
    }
    names = {"blocks": products["a"], "ragged": products["b"], "pallas": products["b"]._replace(dgrad=None)}
    mixed = product_of("blocks+ragged+pallas", names)
    assert mixed is not None
    assert (mixed.min_tile, mixed.max_tile, mixed.width_multiple) == (16, 32, 4)
    assert (mixed.forward, mixed.dgrad, mixed.wgrad) == (names["blocks"].forward, blocks_dgrad, blocks_wgrad)
    assert product_of("blocks+pallas+blocks", names) is None, "a pass without a kernel"
    assert product_of("hopper", names) is None
    for platform, name in (("gpu", "blocks+hopper+blackwell"), ("tpu", "megablox+ragged+blocks")):
        parts = [GROUPED_PRODUCTS[platform][each] for each in name.split("+")]
        most = min(each.max_tile for each in parts)
        assert _tile_range(name, platform) == (max(each.min_tile for each in parts), most)
    assert _tile_range("megablox", "cpu") == _tile_range("auto", "cpu") == (8, 64)


def test_products_of_other_gpus_and_types_are_left_out():
    on_gpu = GROUPED_PRODUCTS["gpu"]
    assert {"hopper", "blackwell"} - available(on_gpu, (9, 0), "bfloat16").keys() == {"blackwell"}
    assert {"hopper", "blackwell"} - available(on_gpu, (10, 3), "bfloat16").keys() == {"hopper"}
    assert list(available(on_gpu, None, "float32")) == ["blocks", "ragged", "pallas"]


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "message"),
    [
        ("hopper", (10, 0), "bfloat16", "hopper is for compute capability 9, and these devices have 10.0: use "),
        ("hopper", (9, 0), "float32", "hopper multiplies bfloat16, and train.compute_dtype=float32: use "),
        ("blackwell", (10, 0), "bfloat16", "has no kernel for its gradients: name one for each pass, as in blackwell+"),
        ("hopper", None, "bfloat16", "hopper needs widths that are multiples of 128, and model.moe.in.*=96 is not: "),
    ],
)
def test_a_kernel_that_does_not_fit_is_refused(name, capability, dtype, message):
    config = config_with(name, hidden=96)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compute_dtype=dtype))
    with pytest.raises(ConfigError, match=message):
        product_name(config, "gpu", 1, capability)


S, WIDE, WIDER = 384, 256, 512


def lowered(own: Any, *shapes: tuple[int, ...]) -> str:
    """The program of a pass for NVIDIA's GPUs, up to what their compiler gets."""
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    traced = jax.jit(lambda *arrays: own(*arrays, 64)).trace(*operands, jax.ShapeDtypeStruct((4,), jnp.int32))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", ["hopper", "blackwell"])
def test_kernels_are_lowered_for_gpus(name, monkeypatch):
    """On GPUs, profiling/gpu_kernels.py compares their values."""
    product, (x, w, dy) = GROUPED_PRODUCTS["gpu"][name], ((S, WIDE), (4, WIDE, WIDER), (S, WIDER))
    devices = [SimpleNamespace(core_count=132, platform="gpu")]  # a kernel asks the device for it
    passes = ((product.forward, x, w), (product.dgrad, dy, w), (product.wgrad, x, dy))
    for own, *shapes in passes:
        if own is not None:
            with monkeypatch.context() as patched:
                for name_of_devices in ("devices", "local_devices"):
                    patched.setattr(jax, name_of_devices, lambda *_: devices)
                assert "mosaic_gpu" in lowered(own, *shapes)


def test_tokamax_is_called_as_jax_defines_ragged_products(monkeypatch):
    """With XLA's product in its place: values and gradients are those of a loop."""
    package = ModuleType("tokamax")

    def ragged_dot_general(left, right, sizes, dims, implementation, preferred_element_type):
        return jax.lax.ragged_dot_general(left, right, sizes, dims, preferred_element_type=preferred_element_type)

    monkeypatch.setattr(package, "ragged_dot_general", ragged_dot_general, raising=False)
    monkeypatch.setitem(sys.modules, "tokamax", package)
    sizes, keys = (32, 0, 128, 16), jax.random.split(jax.random.key(0), 3)
    x, w, dy = (
        jax.random.normal(key, each) for key, each in zip(keys, [(ROWS, D), (GROUPS, D, F), (ROWS, F)], strict=True)
    )
    size_L, dy = jnp.array(sizes, jnp.int32), jnp.where(jnp.arange(ROWS)[:, None] < sum(sizes), dy, 0)
    found, pull = jax.vjp(lambda x, w: GROUPED_PRODUCTS["gpu"]["tokamax"].multiply(x, w, size_L, TILE), x, w)
    expected, pull_expected = jax.vjp(lambda x, w: loop(x, w, sizes), x, w)
    chex.assert_trees_all_close((found, *pull(dy)), (expected, *pull_expected(dy)), rtol=1e-5, atol=2e-5)


def test_without_tokamax_its_products_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    operands = jnp.ones((64, 16)), jnp.ones((2, 16, 16)), jnp.array([32, 32], jnp.int32)
    message = r"train.grouped_product names tokamax, which cannot be imported .*: pip install -e '.\[kernels\]', or "
    with pytest.raises(ConfigError, match=message):
        grouped_tokamax.tokamax(*operands, 32)


@pytest.mark.parametrize(
    ("platform", "name"),
    [
        (platform, name)
        for platform, name in itertools.product(GROUPED_PRODUCTS, KERNELS)
        if name not in GROUPED_PRODUCTS[platform]
    ],
)
def test_a_product_of_other_devices_is_refused(platform, name):
    message = f"train.grouped_product={name} is not for these devices, which are {platform}: use .*=auto, or "
    with pytest.raises(ConfigError, match=message) as error:
        product_name(config_with(name), platform, tensor_ranks=1)
    for cure in str(error.value).split("=auto, or ")[1].split(" or "):
        assert product_name(config_with(cure), platform, tensor_ranks=1) == cure


def test_widths_that_the_kernel_cannot_cut_are_refused_where_it_would_be_used():
    config = config_with("pallas", hidden=96)
    assert product_name(config, "gpu", tensor_ranks=2) == "pallas"
    with pytest.raises(
        ConfigError, match=r"model.moe.intermediate_size=96 / mesh.tensor=4 is not: use another width, or"
    ):
        product_name(config, "gpu", tensor_ranks=4)
    capacity = dataclasses.replace(config.model.moe, capacity_factor=1.0)
    slots = dataclasses.replace(config, model=dataclasses.replace(config.model, moe=capacity))
    assert product_name(slots, "gpu", tensor_ranks=4) == "pallas", "which has no groups of any size"
