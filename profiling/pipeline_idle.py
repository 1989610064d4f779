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
    """Which share of the time between the first stage's first pass and its last one stages run no pass, on average.

    Measured; by the table, for slots as long as they are on average; for each slot as long as it was; and with sends. A
    pass is under way from the first of its operations in a tick to the last one, whatever it waits for between.
    """
    own_stage, ticks = (box.rank() or 0) // EXPERT_RANKS, _ticks(operations, len(table.ticks))
    kinds = [["".join(direction for direction, _ in slot.tasks()) for slot in slots] for slots in table.ticks]
    spans = [_span(tick, kind[own_stage]) for tick, kind in zip(ticks, kinds, strict=True)]
    ran = [span for span in spans if span]
    busy_s = sum(end - start for start, end in joined(ran))
    own = [busy_s, ran[-1][1] - ran[0][0], *(span[1] - span[0] if span else 0.0 for span in spans)]
    found = multihost_utils.process_allgather(np.array(own, np.float32))
    busy_S, whole_S, *slot_TS = np.reshape(found, (STAGES, EXPERT_RANKS, -1)).mean(axis=1).T
    means = {
        kind: float(np.mean([slot_TS[t][s] for t, tick in enumerate(kinds) for s in range(STAGES) if tick[s] == kind]))
        for kind in sorted({kind for tick in kinds for kind in tick if kind})
    }
    slot_s = [[float(seconds) for seconds in slot_S] for slot_S in slot_TS]
    return {
        "measured": float(1 - busy_S.mean() / whole_S[0]),
        "formula": bubble(table, means["F"], means["B"], together_s=means.get("FB")),
        "own_slots": uneven_bubble(table, slot_s),
        "own_slots_and_sends": uneven_bubble(table, slot_s, send_s),
        **{f"{kind}_s": seconds for kind, seconds in means.items()},
    }


def _span(tick: Sequence[Operation], kind: str) -> tuple[float, float] | None:
    """Begin and end of a stage's passes in a tick."""
    passes = [each for each in tick if each.task[:1] in set(kind)]
    return (min(each.start_s for each in passes), max(each.end_s for each in passes)) if kind else None


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
