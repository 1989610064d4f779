"""How much memory of each device a training step takes, as XLA's buffer assignment counts it.

The state (float32 parameters and AdamW's two moments) is there all the time and is exact; a step writes the new one
over the old one. What else is needed differs between the moments of a step, and the one that needs most counts:
- head: all that blocks keep for their backward pass (`plan/kept.py`), logits and their gradient, the head's cast and
  gradient;
- backward: the same, all gradients but the embedding's, which comes last, and what one block works on;
- update: all gradients.

XLA's `memory_analysis()` says argument + temporary + result − aliased bytes for the sum of it. What a compiler keeps of
its own accord is not derived: `_COMPILERS` says what was seen (`profiling/memory_check.py`), jax 0.10.2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from moe_jax.config import Config, Model
from moe_jax.errors import ConfigError
from moe_jax.plan.kept import Mode, Sizes, kept_bytes, sizes_of
from moe_jax.plan.resources import count_parameters, state_bytes_per_device

Moment = Literal["head", "backward", "update"]


class _Compiler(NamedTuple):
    """What a platform's compiler does of its own accord, read off its programs."""

    pair_bytes: float  # for each query and key of a block that goes backward, beside two numbers of the compute type
    logit_gradients: bool  # beside the logits; else in their place
    head_again: bool  # the head is cast twice, and its input in float32, unless activations leave no room
    turned_heads: bool  # all blocks' queries, keys and values are copied into another layout before the backward loop
    flat_copies: int  # of the head's gradient where a schedule sums it as a flat vector
    rare_copies: int  # of the room for rows beyond a ragged exchange's lanes, for each microbatch
    scheduled_gradients: bool  # of a block are beside those of all blocks, and so are casts of its weights
    gaps: float  # temporaries over what is in use at once, in a plain step
    scheduled_gaps: float  # the same in a scheduled one
    reserved_bytes: int  # counted with temporaries


_GPU = _Compiler(
    pair_bytes=9,  # gradients of probabilities and of scores in float32, and a mask
    logit_gradients=True,
    head_again=True,
    turned_heads=True,
    flat_copies=0,  # the same bytes
    rare_copies=3,
    scheduled_gradients=False,
    gaps=1.0,
    scheduled_gaps=1.0,
    reserved_bytes=0,
)
_TPU = _Compiler(
    pair_bytes=9,
    logit_gradients=False,
    head_again=False,
    turned_heads=False,
    flat_copies=1,  # arrays lie in tiles, vectors do not
    rare_copies=3,
    scheduled_gradients=True,
    gaps=1.14,
    scheduled_gaps=1.3,
    reserved_bytes=2**27,  # its vector memory
)
_COMPILERS = {"gpu": _GPU, "tpu": _TPU, "cpu": _GPU._replace(turned_heads=False)}


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one device at the moment of a step that needs most."""

    moment: Moment
    parameters: int
    optimizer: int  # both moments
    batch: int
    activations: int  # kept for the backward pass
    gradients: int
    head: int  # logits and what is made of them
    working: int  # of the block that goes backward, its exchanges included
    lost: int  # gaps between buffers, and what the compiler reserves

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "moment"}

    @property
    def total(self) -> int:
        """What XLA allocates: arguments, temporaries, and results that take no argument's place."""
        return sum(self.parts.values())

    @property
    def state(self) -> int:
        """What is there between steps."""
        return self.parameters + self.optimizer


def step_memory(config: Config, platform: str, mesh: Mapping[str, int] | None = None) -> StepMemory:
    """For devices of tpu, gpu or cpu; `mesh` says how many are along each axis (None: what the config says).

    Raises ConfigError if a config leaves that open.
    """
    mesh = config.mesh.sizes if mesh is None else mesh
    for axis, size in mesh.items():
        if size < 1:
            raise ConfigError(f"mesh.{axis}={size} leaves memory open: say how many devices there are along this axis")
    model, sizes = config.model, sizes_of(config, platform, mesh)
    count = state_bytes_per_device(model, mesh["expert"], mesh["tensor"]) // 12
    matrix, in_blocks = model.vocab_size * model.d_model, _in_blocks(config, mesh)
    mode = _mode(config, platform)
    kept = _kept(config, sizes, mode, in_blocks)
    compiler = _COMPILERS[platform]
    logits = 4 * sizes.own_tokens * model.vocab_size  # of all microbatches; the gradient is that of one
    if compiler.logit_gradients:
        logits *= 1 + 1 / sizes.microbatches
    head = logits + sizes.item * matrix
    if compiler.head_again and mode in ("dots", "full"):
        head += sizes.item * matrix + 3 * 4 * sizes.own_tokens * model.d_model
    earlier = 4 * count if config.train.grad_accumulation > 1 else 0  # sums over the parts of the batch before
    flat = 0 if config.is_plain or math.prod(mesh.values()) == 1 else compiler.flat_copies
    moments: dict[Moment, dict[str, float]] = {
        "head": {
            "activations": kept,
            "gradients": earlier + 4 * matrix * (1 + flat),
            "head": head,
        },
        "backward": {
            "activations": kept,
            "gradients": earlier + 4 * (count - (0 if model.tie_embeddings else matrix)),
            "working": _working(config, sizes, compiler, mode, mesh),
        },
        "update": {"gradients": earlier + 4 * count},
    }
    moment: Moment = max(moments, key=lambda name: sum(moments[name].values()))
    gaps = compiler.gaps if config.is_plain else compiler.scheduled_gaps
    parts = {name: int(moments[moment].get(name, 0)) for name in _TEMPORARIES}
    return StepMemory(
        moment=moment,
        parameters=4 * count,
        optimizer=int(8 * _with_moments(config, mesh)),
        batch=int(4 * sizes.sequences * config.train.grad_accumulation * (config.data.seq_len + 1)),
        **parts,
        lost=int((gaps - 1) * sum(parts.values())) + compiler.reserved_bytes,
    )


_TEMPORARIES = ("activations", "gradients", "head", "working")


def _in_blocks(config: Config, mesh: Mapping[str, int]) -> float:
    """Parameters of a device in products of blocks, which are cast to the compute type."""
    counts = count_parameters(config.model)
    return (counts.heads_and_hidden + counts.expert / mesh["expert"]) / mesh["tensor"]


def _with_moments(config: Config, mesh: Mapping[str, int]) -> float:
    """Parameters whose moments a device has; cut over devices that hold the same ones, if they are `sharded`."""
    model, expert, tensor = config.model, mesh["expert"], mesh["tensor"]
    if not config.optimizer.sharded:
        return state_bytes_per_device(model, expert, tensor) / 12
    counts, copies = count_parameters(model), mesh["data"] * mesh["context"] * expert
    experts = counts.expert / (copies * tensor)
    return experts + (counts.total - counts.expert) / (copies * tensor)


def _mode(config: Config, platform: str) -> Mode:
    if config.schedule.remat != "none":
        return config.schedule.remat
    return "least" if platform == "tpu" and not config.is_plain else "all"


def _kept(config: Config, sizes: Sizes, mode: Mode, in_blocks: float) -> float:
    """By all blocks."""
    model = config.model
    total = sum(kept_bytes(sizes, model, kind, mode, not config.is_plain) for kind in model.block_kinds)
    if config.is_plain and mode == "all":
        total += sizes.item * in_blocks  # casts of weights, stacked like activations
    return total / _period(config) if config.is_plain and mode == "full" else total


def _period(config: Config) -> int:
    """Blocks that a plain step computes again at once."""
    return max(config.model.moe.every, 1) if config.model.moe.num_experts else 1


def _working(config: Config, sizes: Sizes, compiler: _Compiler, mode: Mode, mesh: Mapping[str, int]) -> float:
    """Of a block that goes backward: attention's squares, or the experts' rows, and what it computes again."""
    model, rows, item = config.model, sizes.rows, sizes.item
    in_block = _in_blocks(config, mesh) / model.num_layers
    squares = sizes.pairs * (compiler.pair_bytes + 2 * item)
    if sizes.ring:
        squares += _ring_bytes(sizes, model)
    hidden = rows.computed * model.moe.hidden_dim / sizes.tensor
    flowing = 4 * item * (rows.sent * model.d_model + hidden)
    if mode in ("dots", "full"):
        blocks = _period(config) if config.is_plain else 1
        of_kind = {kind: kept_bytes(sizes, model, kind, "all", scheduled=True) for kind in set(model.block_kinds)}
        kinds = model.block_kinds[-blocks:]
        again = sum(of_kind[kind] for kind in kinds)
        again -= 0 if sizes.ring else len(kinds) * sizes.pairs * item  # quotients are made anew
        # experts go backward with all that was computed again in memory, attention when their part is gone
        of_rows = item * (model.d_model * (rows.sent + rows.computed) + 6 * hidden) if "moe" in kinds else 0
        total = max(again + flowing, again - of_rows - 4 * sizes.pairs + squares + item * sizes.pairs)
        total = total / sizes.microbatches + item * in_block * blocks
    else:
        total = max(squares, flowing) / sizes.microbatches
    if rows.ragged:
        total += item * model.d_model * (compiler.rare_copies * sizes.microbatches * rows.rare + 2 * rows.sent)
    if not config.is_plain:
        total += _gradients_under_way(config, mesh)
        total += (4 + item) * in_block if compiler.scheduled_gradients else 0
    if mode == "all" and compiler.turned_heads:
        heads = sizes.tokens * (sizes.heads * model.qk_width + sizes.kv_heads * (model.qk_width + model.v_width))
        total += item * heads * model.num_layers
    return total


def _ring_bytes(sizes: Sizes, model: Model) -> float:
    """Of a block's backward pass: gradients of queries and of the keys of three ranks in float32, keys of two ranks."""
    query, keys = sizes.heads * model.qk_width, sizes.kv_heads * (model.qk_width + model.v_width)
    return sizes.tokens * (4 * (query + 3 * keys) + 2 * sizes.item * keys)


def _gradients_under_way(config: Config, mesh: Mapping[str, int]) -> float:
    """Of a turn of a schedule's loop, as chunks that are summed over devices and put together again."""
    counts, schedule = count_parameters(config.model), config.schedule
    if schedule.grad_reduce == "end":
        return 0.0
    data = mesh["data"] * mesh["context"]
    summed = counts.heads_and_hidden / mesh["tensor"] * (data * mesh["expert"] > 1)
    summed += counts.expert / (mesh["expert"] * mesh["tensor"]) * (data > 1)
    return 2 * 4 * summed * min(schedule.unroll * _period(config) / config.model.num_layers, 1)
