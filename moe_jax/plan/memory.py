"""How much memory of each device a training step takes, as XLA's buffer assignment counts it.

The state (float32 parameters and AdamW's two moments) is there all the time and is exact; a step writes the new one
over the old one. What else is needed differs between the moments of a step, and the one that needs most counts:
- head: all that blocks keep for their backward pass (`plan/kept.py`), logits and their gradient, the head's cast and
  gradient;
- backward: the same, all gradients but the embedding's, which comes last, and what one block works on;
- update: all gradients.

XLA's `memory_analysis()` says argument + temporary + result − aliased bytes for the sum of it. What a compiler keeps of
its own accord is not derived: `_WORKING` says what was seen (`profiling/memory_check.py`), jax 0.10.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from moe_jax.config import Config
from moe_jax.errors import ConfigError
from moe_jax.plan.kept import Mode, Sizes, kept_bytes, sizes_of
from moe_jax.plan.resources import count_parameters

Moment = Literal["head", "backward", "update"]


class _Working(NamedTuple):
    """Of a platform's compiler, calibrated on its programs."""

    pair_bytes: float  # for each query and key of a block that goes backward, beside two numbers of the compute type
    turned_heads: bool  # it copies all blocks' queries, keys and values into another layout before the backward loop
    rare_copies: float  # of the room for rows beyond a ragged exchange's lanes, for each microbatch
    overhead: float  # of temporaries: gaps between buffers, and copies that no formula has


_WORKING = {
    # two float32 squares (gradients of probabilities and of scores) and a mask
    "gpu": _Working(pair_bytes=9, turned_heads=True, rare_copies=3, overhead=1.0),
    "tpu": _Working(pair_bytes=9, turned_heads=False, rare_copies=3, overhead=1.0),
    "cpu": _Working(pair_bytes=9, turned_heads=False, rare_copies=3, overhead=1.0),
}


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
    shared, experts, rest = _parameters(config, mesh)
    count, matrix = shared + experts + rest, model.vocab_size * model.d_model  # the head's
    kept = _kept(config, sizes, platform, shared + experts)
    calibrated = _WORKING[platform]
    logits = 4 * sizes.own_tokens * model.vocab_size  # of all microbatches; the gradient is that of one
    moments: dict[Moment, dict[str, float]] = {
        "head": {
            "activations": kept,
            "gradients": 4 * matrix,
            "head": logits * (1 + 1 / sizes.microbatches) + sizes.item * matrix,
        },
        "backward": {
            "activations": kept,
            "gradients": 4 * (count - (0 if model.tie_embeddings else matrix)),
            "working": _working(config, sizes, calibrated, platform, shared + experts),
        },
        "update": {"gradients": 4 * count},
    }
    moment: Moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {name: int(calibrated.overhead * moments[moment].get(name, 0)) for name in _TEMPORARIES}
    return StepMemory(
        moment=moment,
        parameters=int(4 * count),
        optimizer=int(8 * count),
        batch=int(4 * sizes.sequences * config.train.grad_accumulation * (sizes.length + 1)),
        **parts,
    )


_TEMPORARIES = ("activations", "gradients", "head", "working")


def _parameters(config: Config, mesh: Mapping[str, int]) -> tuple[float, float, float]:
    """Of a device: those that tensor ranks share, routed experts, and those that are whole everywhere."""
    counts = count_parameters(config.model)
    rest = counts.total - counts.expert - counts.heads_and_hidden
    return counts.heads_and_hidden / mesh["tensor"], counts.expert / (mesh["expert"] * mesh["tensor"]), rest


def _mode(config: Config, platform: str) -> Mode:
    if config.schedule.remat != "none":
        return config.schedule.remat
    return "least" if platform == "tpu" and not config.is_plain else "all"


def _kept(config: Config, sizes: Sizes, platform: str, matrices: float) -> float:
    """By all blocks; `matrices` are the parameters in products of blocks."""
    model, mode = config.model, _mode(config, platform)
    total = sum(kept_bytes(sizes, model, kind, mode, not config.is_plain) for kind in model.block_kinds)
    if config.is_plain and mode == "all":
        total += sizes.item * matrices  # their casts, stacked like activations
    return total / _period(config) if config.is_plain and mode == "full" else total


def _period(config: Config) -> int:
    """Blocks that a plain step computes again at once."""
    return max(config.model.moe.every, 1) if config.model.moe.num_experts else 1


def _working(config: Config, sizes: Sizes, calibrated: _Working, platform: str, matrices: float) -> float:
    """Of a block that goes backward: attention's squares or the experts' rows, and what it computes again."""
    model, mode, rows = config.model, _mode(config, platform), sizes.rows
    squares = sizes.pairs * (calibrated.pair_bytes + 2 * sizes.item)
    hidden = rows.computed * model.moe.hidden_dim / sizes.tensor
    flowing = 4 * sizes.item * (rows.sent * model.d_model + hidden)
    total = max(squares, flowing) / sizes.microbatches
    if rows.ragged:
        total += sizes.item * model.d_model * (calibrated.rare_copies * sizes.microbatches * rows.rare + 2 * rows.sent)
    if mode == "all" and calibrated.turned_heads:
        heads = sizes.tokens * (sizes.heads + 2 * sizes.kv_heads) * model.head_width
        total += sizes.item * heads * model.num_layers
    if mode in ("dots", "full"):
        blocks, kinds = _period(config) if config.is_plain else 1, model.block_kinds
        of_kind = {kind: kept_bytes(sizes, model, kind, "all", scheduled=False) for kind in set(kinds)}
        again = max(sum(of_kind[kind] for kind in kinds[i : i + blocks]) for i in range(len(kinds)))
        total += again / sizes.microbatches + sizes.item * matrices * blocks / len(kinds)
    return total
