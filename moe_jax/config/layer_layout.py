"""The layout of blocks: which pipeline stage has which blocks, and which rows of the stacked arrays store them.

Parameters of blocks are stacked in segments. A segment is a run of equal periods, and a period is the shortest run of
blocks that repeats. With S stages, model chunk c of stage s is group c·S + s of the blocks, as in the tables of
`schedule.pipelines`. A group is a run of whole periods. The rows of a stacked array are ordered by stage and then by
chunk, so that splitting the leading dimension over the stages gives each stage its own rows. Where groups differ in
size, the smaller ones leave rows unused.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moe_jax.config import AttentionView, ModelConfig, Sections
from moe_jax.errors import ConfigError

# of the scans of a scheduled step; the highest one, and the backward pass of the lowest one, are outside of them
MIN_ITERATIONS = 3
_LONGEST = 64  # blocks that a repetition may have


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of `repeats` equal periods; `kinds` and `views` describe the blocks of one period."""

    kinds: tuple[str, ...]
    views: tuple[AttentionView, ...]
    repeats: int

    @classmethod
    def of(cls, blocks: Sequence[tuple[str, AttentionView]], repeats: int) -> "Segment":
        """Return the segment that repeats these blocks."""
        return cls(tuple(kind for kind, _ in blocks), tuple(view for _, view in blocks), repeats)


@functools.lru_cache(maxsize=64)
def segments(model: ModelConfig) -> tuple[Segment, ...]:
    """Return the model's blocks as segments, from the bottom up.

    These are the dense blocks at the bottom, the whole periods above them, the remaining blocks, and the block of
    multi-token prediction, which has parameters of its own and is a segment by itself. Blocks that repeat only in
    places, as in Nemotron 3, are segments of the longest repetitions instead.
    """
    blocks, moe, attention = list(zip(model.block_kinds, model.views, strict=True)), model.moe, model.attention
    view_period = math.lcm(attention.full_every or 1, attention.nope_every or 1, model.recurrent_period)
    bottom, top = moe.first_k_dense_replace if moe.num_experts else model.num_layers, model.num_layers
    if model.mamba.mixer_only_offsets and 2 * view_period > model.num_layers:
        return (*_repetitions(blocks[:top]), *(Segment.of([block], 1) for block in blocks[top:]))
    return (
        *_runs(blocks[:bottom], view_period),
        *_runs(blocks[bottom:top], math.lcm(view_period, moe.moe_layer_freq)),
        *(Segment.of([block], 1) for block in blocks[top:]),
    )


def decoder_segments(model: ModelConfig) -> tuple[Segment, ...]:
    """Return the segments without that of multi-token prediction."""
    return segments(model)[: -1 if model.has_mtp else None]


def _runs(blocks: Sequence[tuple[str, AttentionView]], period: int) -> Iterator[Segment]:
    """Yield a segment of whole periods, then the remaining blocks as segments of equal blocks."""
    repeats = len(blocks) // period
    if repeats:
        yield Segment.of(blocks[:period], repeats)
    for block, run in itertools.groupby(blocks[repeats * period :]):
        yield Segment.of([block], len(list(run)))


def _repetitions(blocks: Sequence[tuple[str, AttentionView]]) -> Iterator[Segment]:
    """Yield segments of blocks that follow no pattern throughout: in turn the longest repetition that begins there."""
    while blocks:
        size, repeats = max(
            ((size, _repeats(blocks, size)) for size in range(1, min(len(blocks) // 2, _LONGEST) + 1)),
            key=lambda found: (found[0] * found[1] if found[1] > 1 else 1, -found[0]),
            default=(1, 1),
        )
        size = size if repeats > 1 else 1
        yield Segment.of(blocks[:size], repeats)
        blocks = blocks[size * repeats :]


def _repeats(blocks: Sequence[tuple[str, AttentionView]], size: int) -> int:
    """Return how often the first `size` blocks stand one after the other at the beginning of blocks."""
    starts = range(0, len(blocks), size)
    return sum(1 for _ in itertools.takewhile(lambda start: blocks[start : start + size] == blocks[:size], starts))


def check_blocks(model: ModelConfig, stages: int, chunks: int = 1) -> None:
    """Raise ConfigError if a model has too few blocks for this number of stages and of chunks in each stage."""
    periods = sum(segment.repeats for segment in decoder_segments(model))
    if periods < stages * chunks:
        cut = f" × schedule.virtual_stages={chunks} = {stages * chunks}" if chunks > 1 else ""
        most = periods // chunks
        if chunks == 1:
            cure = f"mesh.pipeline={most}{' or less' if most > 1 else ''}"
        elif most > 1:
            cure = f"mesh.pipeline={most}"
        else:  # several chunks need several stages
            fewer = "" if periods >= stages else f"mesh.pipeline={periods} "
            cure = f"{fewer}schedule.virtual_stages=1 schedule.pipeline=1f1b"
        raise ConfigError(
            f"mesh.pipeline={stages}{cut} needs as many groups of blocks, and model.num_layers="
            f"{model.num_layers} has {periods} (whole periods of kinds of blocks): use {cure}, or more blocks"
        )


class GroupBlock(NamedTuple):
    """A block of a group, described so that groups of the same structure are equal."""

    kind: str
    view: AttentionView
    segment: int
    place: int  # its index in the period
    row: int  # the index of its period among the segment's periods in the group


@dataclasses.dataclass(frozen=True)
class Stages:
    """The assignment of a model's blocks to pipeline stages, as groups from the bottom up.

    The block of multi-token prediction belongs to no group. It runs with the head, and is stored above the last group.
    """

    model: ModelConfig
    stages: int
    chunks: int  # model chunks of a stage
    head_blocks: int = 0  # the head costs as much as this many periods, without multi-token prediction

    @staticmethod
    def of(config: Sections) -> "Stages":
        """Return the stages of a config. Raises ConfigError if the model has too few blocks."""
        stages, chunks = config.mesh.pipeline, config.schedule.virtual_stages
        check_blocks(config.model, stages, chunks)
        return _stages(config.model, stages, chunks, config.schedule.head_blocks)

    @functools.cached_property
    def groups(self) -> tuple[tuple[GroupBlock, ...], ...]:
        """The blocks of every group."""
        decoder = enumerate(decoder_segments(self.model))
        periods = [(number, segment) for number, segment in decoder for _ in range(segment.repeats)]
        sizes = _sizes(len(periods), self.stages * self.chunks, self.head_blocks + self.model.has_mtp)
        ends = list(itertools.accumulate(sizes))
        return tuple(_group_blocks(periods[end - size : end]) for size, end in zip(sizes, ends, strict=True))

    @functools.cached_property
    def mtp(self) -> tuple[GroupBlock, ...]:
        """The block of multi-token prediction, if the model has it."""
        if not self.model.has_mtp:
            return ()
        return _group_blocks([(len(segments(self.model)) - 1, segments(self.model)[-1])])

    @functools.cached_property
    def _stored(self) -> tuple[tuple[GroupBlock, ...], ...]:
        """The blocks that are stored with each group."""
        return (*self.groups[:-1], self.groups[-1] + self.mtp)

    @functools.cached_property
    def most_of_kind(self) -> dict[str, int]:
        """The most blocks of each kind that a group has."""
        groups = [[block.kind for block in group] for group in self.groups]
        return {kind: max(group.count(kind) for group in groups) for kind in ("dense", "moe")}

    @functools.cached_property
    def alike(self) -> tuple[int, ...]:
        """For each group, the index of the first one with the same blocks; the two ends are like no other."""
        last = len(self.groups) - 1
        first = {group: index for index, group in reversed(list(enumerate(self.groups))) if 0 < index < last}
        return tuple(first[group] if 0 < index < last else index for index, group in enumerate(self.groups))

    def group(self, stage: int, chunk: int) -> int:
        """Return the index of the group that is a stage's chunk."""
        return chunk * self.stages + stage

    @functools.cached_property
    def first_block(self) -> tuple[int, ...]:
        """The index in the model of each group's first block."""
        return tuple(itertools.accumulate(map(len, self.groups[:-1]), initial=0))

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """The number of rows of each segment that the stacked arrays reserve for a group."""
        return tuple(
            max(
                1 + max((block.row for block in group if block.segment == number), default=-1) for group in self._stored
            )
            for number in range(len(segments(self.model)))
        )

    def chunks_with(self, segment: int) -> int:
        """Return how many model chunks of a stage have rows of a segment: 1 if it is that of multi-token prediction."""
        return 1 if any(block.segment == segment for block in self.mtp) else self.chunks

    def stored_row(self, segment: int) -> tuple[int, ...]:
        """Return the row of the stacked arrays that stores each period of a segment."""
        per_chunk, chunks = self.rows[segment], self.chunks_with(segment)
        return tuple(
            (group % self.stages * chunks + group // self.stages % chunks) * per_chunk + block.row
            for group, blocks in enumerate(self._stored)
            for block in blocks
            if block.segment == segment and block.place == 0
        )

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        """For each segment, the number of rows and the indices of the rows that are used.

        Two configs with the same layout store parameters in the same rows.
        """
        return tuple(
            (rows * self.stages * self.chunks_with(number), *self.stored_row(number))
            for number, rows in enumerate(self.rows)
        )


@functools.lru_cache(maxsize=64)
def _stages(model: ModelConfig, stages: int, chunks: int, head_blocks: int) -> Stages:
    return Stages(model, stages, chunks, head_blocks)


def _sizes(periods: int, groups: int, head: int) -> list[int]:
    """Return the number of periods in each group, at least 1: as equal as possible, with `head` added to the last."""
    if groups == 1:
        return [periods]
    last = max((periods + head) // groups - head, 1)
    least, more = divmod(periods - last, groups - 1)
    # the first groups get fewer periods, since the first stage stores the most activations
    return [*(least + (group >= groups - 1 - more) for group in range(groups - 1)), last]


def _group_blocks(periods: list[tuple[int, Segment]]) -> tuple[GroupBlock, ...]:
    """Return the blocks of a group from its periods: the index of each one's segment, and the segment."""

    def blocks() -> Iterator[GroupBlock]:
        last_row: dict[int, int] = {}
        for number, segment in periods:
            row = last_row[number] = last_row.get(number, -1) + 1
            for place, (kind, view) in enumerate(zip(segment.kinds, segment.views, strict=True)):
                yield GroupBlock(kind, view, number, place, row)

    return tuple(blocks())
