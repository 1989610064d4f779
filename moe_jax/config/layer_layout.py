"""Which blocks each pipeline stage holds, and in which rows of the stacked arrays their parameters lie.

Blocks are stacked in segments: runs of equal periods. Model chunk c of stage s is group c·S + s of the blocks, as the
tables of `schedule.pipelines` have it. Groups are runs of whole periods of the model's segments. Stage s holds its own
rows of every stacked array, chunk by chunk, so that cutting the leading dimension over the stages gives each its own;
where groups differ, the shorter ones leave rows unused.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moe_jax.config import AttentionView, Config, ModelConfig
from moe_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Segment:
    """`repeats` periods, each of blocks of these `kinds` whose attention has these `views`."""

    kinds: tuple[str, ...]
    views: tuple[AttentionView, ...]
    repeats: int

    @classmethod
    def of(cls, blocks: Sequence[tuple[str, AttentionView]], repeats: int) -> "Segment":
        """Of the blocks of one period."""
        return cls(tuple(kind for kind, _ in blocks), tuple(view for _, view in blocks), repeats)


@functools.lru_cache(maxsize=64)
def segments(model: ModelConfig) -> tuple[Segment, ...]:
    """The model's blocks as few runs of equal periods: dense blocks at the bottom, whole periods, what is left."""
    blocks, moe, attention = list(zip(model.block_kinds, model.views, strict=True)), model.moe, model.attention
    of_views = math.lcm(attention.full_every or 1, attention.nope_every or 1)
    bottom = moe.first_k_dense_replace if moe.num_experts else model.num_layers
    return (*_runs(blocks[:bottom], of_views), *_runs(blocks[bottom:], math.lcm(of_views, moe.moe_layer_freq)))


def _runs(blocks: Sequence[tuple[str, AttentionView]], period: int) -> Iterator[Segment]:
    """Whole periods, and what is left as runs of equal blocks."""
    repeats = len(blocks) // period
    if repeats:
        yield Segment.of(blocks[:period], repeats)
    for block, run in itertools.groupby(blocks[repeats * period :]):
        yield Segment.of([block], len(list(run)))


def check_blocks(model: ModelConfig, stages: int, chunks: int = 1) -> None:
    """Raise ConfigError if a model has too few blocks for so many stages of so many chunks."""
    periods = sum(segment.repeats for segment in segments(model))
    if periods < stages * chunks:
        cut = f" × schedule.virtual_stages={chunks} = {stages * chunks}" if chunks > 1 else ""
        raise ConfigError(
            f"mesh.pipeline={stages}{cut} needs as many groups of blocks, and model.num_layers="
            f"{model.num_layers} has {periods} (whole periods of kinds of blocks): "
            f"use mesh.pipeline={max(periods // chunks, 1)} or less, or more blocks"
        )


class GroupBlock(NamedTuple):
    """A block of a group, as every group of the same structure has it, whichever blocks these are."""

    kind: str
    view: AttentionView
    segment: int
    place: int  # in the segment's period
    row: int  # of the segment's periods in the group


@dataclasses.dataclass(frozen=True)
class Stages:
    """The groups of a model's blocks, from the bottom up."""

    model: ModelConfig
    stages: int
    chunks: int  # model chunks of a stage
    head_blocks: int = 0  # periods that the head counts as

    @staticmethod
    def of(config: Config) -> "Stages":
        """As a config says. Raises ConfigError if it has too few blocks."""
        stages, chunks = config.mesh.pipeline, config.schedule.virtual_stages
        check_blocks(config.model, stages, chunks)
        return _stages(config.model, stages, chunks, config.schedule.head_blocks)

    @functools.cached_property
    def groups(self) -> tuple[tuple[GroupBlock, ...], ...]:
        """The blocks of every group."""
        periods = [
            (number, segment) for number, segment in enumerate(segments(self.model)) for _ in range(segment.repeats)
        ]
        sizes = _sizes(len(periods), self.stages * self.chunks, self.head_blocks)
        ends = list(itertools.accumulate(sizes))
        return tuple(_held(periods[end - size : end]) for size, end in zip(sizes, ends, strict=True))

    def group(self, stage: int, chunk: int) -> int:
        """The number of a stage's group."""
        return chunk * self.stages + stage

    @functools.cached_property
    def first_block(self) -> tuple[int, ...]:
        """The number of each group's first block in the model."""
        return tuple(itertools.accumulate(map(len, self.groups[:-1]), initial=0))

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows of each segment that every group has room for."""
        return tuple(
            max(1 + max((held.row for held in group if held.segment == number), default=-1) for group in self.groups)
            for number in range(len(segments(self.model)))
        )

    def stored_row(self, segment: int) -> tuple[int, ...]:
        """Where each period of a segment lies in the stacked arrays."""
        per_chunk = self.rows[segment]
        return tuple(
            (group % self.stages * self.chunks + group // self.stages) * per_chunk + held.row
            for group, blocks in enumerate(self.groups)
            for held in blocks
            if held.segment == segment and held.place == 0
        )

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        """Of each segment, how many rows there are and which are used: the same for all stages that divide it."""
        groups = self.stages * self.chunks
        return tuple((rows * groups, *self.stored_row(number)) for number, rows in enumerate(self.rows))


@functools.lru_cache(maxsize=64)
def _stages(model: ModelConfig, stages: int, chunks: int, head_blocks: int) -> Stages:
    return Stages(model, stages, chunks, head_blocks)


def _sizes(periods: int, groups: int, head: int) -> list[int]:
    """As equal as can be, if the last group's head counts as so many periods; none is empty."""
    if groups == 1:
        return [periods]
    last = max((periods + head) // groups - head, 1)
    least, more = divmod(periods - last, groups - 1)
    # the first group keeps most activations
    return [*(least + (group >= groups - 1 - more) for group in range(groups - 1)), last]


def _held(periods: list[tuple[int, Segment]]) -> tuple[GroupBlock, ...]:
    def blocks() -> Iterator[GroupBlock]:
        seen: dict[int, int] = {}
        for number, segment in periods:
            row = seen[number] = seen.get(number, -1) + 1
            for place, (kind, view) in enumerate(zip(segment.kinds, segment.views, strict=True)):
                yield GroupBlock(kind, view, number, place, row)

    return tuple(blocks())
