"""Matrix products of a block: their sizes, and how long a device takes for them and for the op that they belong to.

A device computes the tiles of a result in waves, as many tiles at once as it has units (NVIDIA, *Matrix Multiplication
Background User's Guide*). Small results leave units idle, tiles reach beyond results of other sizes, and short inner
sizes are spent on starting and finishing tiles. No product is faster than memory delivers its operands and stores its
result (the roofline model). If a machine has measured curves, the product with the most similar sizes counts instead.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from moe_jax.config import Config, ModelConfig
from moe_jax.plan.clusters.hardware import Device, MatrixUnits
from moe_jax.plan.curves import Curve
from moe_jax.plan.recurrent import recurrent_layer, recurrent_share
from moe_jax.plan.resources import gate_matrices, mean_mlp_width
from moe_jax.plan.task_times import task_seconds
from moe_jax.plan.work import busiest_rows
from moe_jax.schedule.actions import Action
from moe_jax.schedule.shape import StepShape

Point = tuple[float, float, float, float]  # rows, inner size, columns, and operations per second


def measured_rate(curves: Sequence[Curve], rows: float, inner: float, columns: float) -> float | None:
    """Operations per second of the measured product with the most similar sizes, by their ratios; None without any."""
    points = list(_points(curves))
    if not points:
        return None
    sizes = [max(size, 1.0) for size in (rows, inner, columns)]

    def apart(point: Point) -> float:
        return sum(abs(math.log(known / size)) for known, size in zip(point, sizes, strict=False))

    return min(points, key=apart)[3]


def _points(curves: Sequence[Curve]) -> Iterator[Point]:
    """The points of square products, and of skinny ones: each run of these is two products, counted as equally long."""
    for curve in curves:
        if curve.name not in ("matmul", "matmul.skinny"):
            continue
        width = curve.settings["width"]
        columns = curve.settings.get("columns", width)
        for flops, seconds in zip(curve.amounts, curve.median_s, strict=True):
            rows = flops / (2 * width * columns * (2 if "columns" in curve.settings else 1))
            yield rows, width, columns, flops / seconds
            if columns != width:
                yield rows, columns, width, flops / seconds


def measured_attention(curves: Sequence[Curve], length: int, head_dim: int) -> float | None:
    """Operations per second of measured attention, masked pairs counted; None if it was not measured."""
    known = [curve for curve in curves if curve.name == "attention"]
    if not known:
        return None
    nearest = min(known, key=lambda curve: abs(math.log(curve.settings["head_dim"] / head_dim)))
    flops = 4.0 * length**2 * nearest.settings["heads"] * nearest.settings["head_dim"]
    return flops / nearest.seconds(flops)


Kind = Literal["bfloat16", "float32", "exact", "fp8"]  # exact: float32 without rounding of the operands
Direction = Literal["F", "B", "W"]  # the product itself; the gradients of its rows, and of its weights

_SPLITS = (1, 2, 4, 8)  # of the inner size over units, if there are fewer tiles than units
_KIND_BYTES = {"bfloat16": 2, "float32": 4, "exact": 4, "fp8": 1}
_RESULT_BYTES = {"bfloat16": 2, "float32": 4, "exact": 4, "fp8": 2}


class Product(NamedTuple):
    """The product of rows × inner numbers with a matrix of inner × columns, for each of several groups of rows."""

    rows: float  # of a group
    inner: float
    columns: float
    groups: float = 1.0
    kind: Kind = "bfloat16"

    @property
    def flops(self) -> float:
        """Floating-point operations of all groups."""
        return 2 * self.groups * self.rows * self.inner * self.columns

    def part(self, parts: float) -> "Product":
        """One of equal parts of the rows."""
        return self._replace(rows=self.rows / parts)

    def towards(self, direction: Direction) -> "Product":
        """The product that this direction of a training step computes."""
        rows, inner, columns = self[:3]
        if direction == "B":
            return self._replace(inner=columns, columns=inner)
        return self._replace(rows=inner, inner=rows) if direction == "W" else self


def block_products(
    config: Config,
    tokens: float,
    tensor: int,
    expert_ranks: int,
    platform: str,
    local_experts: float | None = None,
) -> dict[str, tuple[Product, ...]]:
    """The products of each op of a block with weights, on a device with `tokens` tokens of its own.

    Its `tensor` ranks gather their tokens for the matrices that they share. Experts have the rows of the busiest rank,
    the same number each; this device has `local_experts` of them, by default an equal share.
    """
    model, moe, rows = config.model, config.model.moe, tokens * tensor
    kind: Kind = config.train.compute_dtype

    def mlp(
        width: float, rows: float, groups: float = 1.0, kind: Kind = kind, shared_by: int = tensor
    ) -> Iterator[Product]:
        if width and groups:
            inputs = 2 if model.is_gated else 1
            yield Product(rows, model.hidden_size, inputs * width / shared_by, groups, kind)
            yield Product(rows, width / shared_by, model.hidden_size, groups, kind)

    attention = tuple(_attention(model, tokens, tensor, kind))
    shared = mlp(moe.intermediate_size * moe.num_shared_experts + model.intermediate_size * moe.dense_residual, rows)
    gate = Product(tokens, model.hidden_size, gate_matrices(model) / model.hidden_size, kind="exact")
    equal = moe.num_experts / expert_ranks
    local = equal if local_experts is None else local_experts
    shared_by = 1 if config.mesh.experts_over_tensor else tensor
    of_expert = busiest_rows(config, tokens, platform) * shared_by / equal if equal else 0.0
    head = Product(tokens, model.hidden_size, model.vocab_size, kind=kind)
    mtp_input = Product(tokens, 2 * model.hidden_size, model.hidden_size, kind=kind)
    expert_kind: Kind = "fp8" if moe.expert_matmuls == "fp8" else kind
    return {
        "embed": (),
        "attend": (*attention, *shared, *([gate] if gate.columns else [])),
        "dense": (*attention, *mlp(mean_mlp_width(model), rows)),
        "expert": tuple(mlp(moe.intermediate_size, of_expert, local, expert_kind, shared_by)),
        "head": (*[head] * (1 + model.num_nextn_predict_layers), *([mtp_input] if model.has_mtp else [])),
    }


def _attention(model: ModelConfig, tokens: float, tensor: int, kind: Kind) -> Iterator[Product]:
    """Yield the products of a block's attention; of several kinds of blocks, each as often as it occurs on average."""
    share, layer = recurrent_share(model), recurrent_layer(model)
    if share:
        rows = tokens * tensor
        yield Product(rows, model.hidden_size, layer.projected_numbers(tensor), share, kind)
        yield Product(rows, layer.values / tensor, model.hidden_size, share, kind)
    if share < 1:
        yield from (each._replace(groups=1 - share) for each in _softmax_attention(model, tokens, tensor, kind))


def _softmax_attention(model: ModelConfig, tokens: float, tensor: int, kind: Kind) -> Iterator[Product]:
    d, heads, latent, rows = model.hidden_size, model.num_attention_heads / tensor, model.latent, tokens * tensor
    if latent.kv_lora_rank is None:
        of_queries = heads * (2 if model.attention.output_gate else 1)
        yield Product(rows, d, (of_queries + 2 * model.kv_heads / tensor) * model.head_width, kind=kind)
        yield Product(rows, heads * model.head_width, d, kind=kind)
        return
    rank, q_rank = latent.kv_lora_rank, latent.q_lora_rank
    yield Product(tokens, d, rank + latent.qk_rope_head_dim + (q_rank or 0), kind=kind)
    yield Product(rows, q_rank or d, heads * model.qk_width, kind=kind)
    yield Product(rows, rank, heads * (latent.qk_nope_head_dim + model.v_width), kind=kind)
    yield Product(rows, heads * model.v_width, d, kind=kind)


@functools.lru_cache(maxsize=2**14)
def products_seconds(device: Device, products: tuple[Product, ...], direction: Direction, parts: float) -> float:
    """Seconds of one of equal parts of these products, one after another."""
    return sum(product_seconds(device, each.part(parts).towards(direction)) for each in products)


def product_seconds(device: Device, product: Product) -> float:
    """Seconds of one product on a device."""
    share = device.rate_shares.of(product.kind)
    rows, inner, columns = product[:3]
    measured = measured_rate(device.curves, rows, inner, columns)
    if measured is not None:
        return product.flops / (measured * share)
    rate = share * device.matrix_flops_per_s * device.matrix_efficiency
    operands, results = _KIND_BYTES[product.kind], _RESULT_BYTES[product.kind]
    moved = product.groups * (operands * inner * (rows + columns) + results * rows * columns)
    return max(_tiled_seconds(device.units, rate, product), moved / device.copied_bytes_per_s)


@functools.lru_cache(maxsize=2**14)
def _tiled_seconds(units: MatrixUnits, rate: float, product: Product) -> float:
    """Seconds of the best way to cut the result into tiles, without the limit of memory."""
    rows, inner, columns, groups, _ = product
    best = math.inf
    for tile in units.tiles:
        for height, width in {(tile.rows, tile.columns), (tile.columns, tile.rows)}:
            tiles = groups * math.ceil(rows / height) * math.ceil(columns / width)
            for splits in _SPLITS if tiles < units.at_once else _SPLITS[:1]:
                waves = math.ceil(tiles * splits / units.at_once)
                flops = 2 * waves * units.at_once * height * width * (inner / splits + units.start)
                best = min(best, flops / (rate * tile.share))
    return best


@dataclass(frozen=True, kw_only=True)
class OpTimes:
    """The durations of the tasks of one op.

    A part of the batch has fewer rows, so its products may be less efficient than those of the whole batch.
    """

    device: Device
    products: tuple[Product, ...]
    weights_s: float  # to read the weights, for each part
    whole_s: Mapping[Direction, float]  # of the whole batch, shared by its parts
    kernels: Mapping[Direction, int]  # of each part
    recomputes: bool = False  # the backward pass repeats the forward products
    at_once: bool = False  # gradients are computed in the forward pass

    def of(self, direction: Direction, parts: float) -> float:
        """Seconds of one of equal parts of the batch, without start-up times of tasks."""
        if self.at_once:
            directions: tuple[Direction, ...] = ("F", "B", "W") if direction == "F" else ()
        else:
            directions = ("F", "B") if direction == "B" and self.recomputes else (direction,)
        each_part_s = sum(
            products_seconds(self.device, self.products, each, parts) + self.kernels.get(each, 0) * self.device.kernel_s
            for each in directions
        )
        shared: tuple[Direction, ...] = directions if self.at_once else (direction,)
        return each_part_s + sum(self.whole_s.get(each, 0.0) for each in shared) / parts

    def seconds(self, action: Action, shape: StepShape) -> float:
        """Seconds of one task."""
        return task_seconds(action, shape, self._of_task)

    def _of_task(self, direction: str, parts: int) -> float:
        if direction == "W" and not self.products:
            return 0.0
        return self.weights_s + self.of(cast(Direction, direction), parts)
