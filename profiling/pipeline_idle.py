"""When stages of a pipeline in a box are idle, measured and by formula; what each of them did, on one clock."""

import json
from collections.abc import Sequence

import box
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from stand import seconds_per_step

from moe_jax.config import Config
from moe_jax.measure.trace import Operation, joined
from moe_jax.parallel import background
from moe_jax.parallel.pipeline import arriving, post, stage
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.schedule.pipelines.bubble import bubble, uneven_bubble
from moe_jax.schedule.pipelines.table import Table

STAGES, EXPERT_RANKS = 2, 2  # ranks of a stage are neighbours
_SENDS = 9  # there and back, that a send's time is the median of


def seconds_of_send(mesh: Mesh, config: Config) -> float:
    """Of a microbatch's activations from stage to stage, when nothing else is sent: half a way there and back."""
    tokens = config.train.batch_size // (EXPERT_RANKS * config.train.grad_accumulation) * config.data.seq_len
    background.connect(mesh)

    def there_and_back(x: jax.Array) -> jax.Array:
        background.new_program()
        first, both = stage() == 0, jax.ShapeDtypeStruct(x.shape, x.dtype)
        came = arriving(post(x, "to_next", jnp.stack([first, ~first])), both)(x)
        return arriving(post(jnp.where(first, x, came), "to_previous", jnp.stack([~first, first])), both)(came)

    on_mesh = jax.shard_map(there_and_back, mesh=mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False)
    way, x = jax.jit(on_mesh), np.ones((tokens, config.model.d_model), np.float32)
    jax.block_until_ready(way(x))
    return float(np.median([seconds_per_step(lambda: way(x), 1) for _ in range(_SENDS)])) / 2


def of_stages(operations: Sequence[Operation]) -> list[list[Operation]]:
    """What a rank of each stage did. Clocks are those of the end, where all wait for each other."""
    own = _shifted(operations, operations[-1].end_s)
    text = np.frombuffer(json.dumps(own).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    texts = multihost_utils.process_allgather(np.pad(text, (0, sizes.max() - len(text))))
    ranks = range(0, STAGES * EXPERT_RANKS, EXPERT_RANKS)
    found = [[Operation(*each) for each in json.loads(texts[rank][: sizes[rank]].tobytes())] for rank in ranks]
    begin_s = min(each.start_s for rank in found for each in rank)
    return [
        [each._replace(start_s=each.start_s - begin_s, end_s=each.end_s - begin_s) for each in rank] for rank in found
    ]


def _shifted(operations: Sequence[Operation], zero_s: float) -> list[Operation]:
    return [each._replace(start_s=each.start_s - zero_s, end_s=each.end_s - zero_s) for each in operations]


def bubble_of(operations: Sequence[Operation], table: Table, send_s: float) -> dict[str, float]:
    """Which share of the time between the first stage's first pass and its last one stages are idle, on average.

    Measured; by the table, for slots as long as they are on average; for each slot as long as it was; and with sends.
    """
    own_stage = (box.rank() or 0) // EXPERT_RANKS
    whole_s, busy_s = busy_in_ticks(operations, table, own_stage)
    found = multihost_utils.process_allgather(np.array([whole_s, *busy_s], np.float32))
    (whole_s, *_), *busy_TS = np.reshape(found, (STAGES, EXPERT_RANKS, -1)).mean(axis=1).T.tolist()
    kinds = [["".join(direction for direction, _ in slot.tasks()) for slot in slots] for slots in table.ticks]
    seconds: dict[str, list[float]] = {}
    for slots, busy_S in zip(kinds, busy_TS, strict=True):
        for kind, own_s in zip(slots, busy_S, strict=True):
            seconds.setdefault(kind, []).append(own_s)
    means = {kind: float(np.mean(seconds[kind])) for kind in sorted(seconds) if kind}
    return {
        "measured": float(1 - np.sum(busy_TS) / (STAGES * whole_s)),
        "formula": bubble(table, means["F"], means["B"], together_s=means.get("FB")),
        "own_slots": uneven_bubble(table, busy_TS),
        "own_slots_and_sends": uneven_bubble(table, busy_TS, send_s),
        **{f"{kind}_s": own_s for kind, own_s in means.items()},
    }


def busy_in_ticks(operations: Sequence[Operation], table: Table, own_stage: int) -> tuple[float, list[float]]:
    """From a stage's first pass to its last: seconds altogether, and those of each tick in which it is busy.

    It is while a pass is under way, from the first of its operations to the last, whatever it waits for between, and
    while it computes anything else, as what a pass reads of earlier ones.
    """
    busy: list[list[tuple[float, float]]] = []
    for slots, tick in zip(table.ticks, _ticks(operations, len(table.ticks)), strict=True):
        directions = {direction for direction, _ in slots[own_stage].tasks()}
        passes = [each for each in tick if each.task[:1] in directions]
        spans = [(min(each.start_s for each in passes), max(each.end_s for each in passes))] if passes else []
        busy.append(spans + [(each.start_s, each.end_s) for each in tick if not each.communicates])
        if passes:
            last, end_s = len(busy) - 1, spans[0][1]
    busy[last] = [(start, min(end, end_s)) for start, end in busy[last] if start < end_s]  # behind it is the optimizer
    first = next(tick for tick, slots in enumerate(table.ticks) if slots[own_stage].tasks())
    joined_T = [joined(busy[tick]) if first <= tick <= last else [] for tick in range(len(busy))]
    whole_s = joined_T[last][-1][1] - joined_T[first][0][0]
    return whole_s, [sum(end - start for start, end in spans) for spans in joined_T]


def _ticks(operations: Sequence[Operation], count: int) -> list[list[Operation]]:
    """Operations of each tick: an instruction that ran once in each of them begins it."""
    runs: dict[str, list[float]] = {}
    for each in operations:
        runs.setdefault(each.name, []).append(each.start_s)
    begins = min((sorted(starts) for starts in runs.values() if len(starts) == count), key=lambda starts: starts[0])
    ends = [*begins[1:], float("inf")]
    return [
        [each for each in operations if begin <= each.start_s < end] for begin, end in zip(begins, ends, strict=True)
    ]
