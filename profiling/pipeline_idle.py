"""Idle time of pipeline stages in a testbed, measured and by formula, from the operations of all ranks on one clock."""

import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_harness import seconds_per_step
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from moe_jax.config import Config
from moe_jax.measure.trace import TracedOperation, joined
from moe_jax.parallel import background
from moe_jax.parallel.pipeline import receive_transfer, stage, start_transfer
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.schedule.pipelines.bubble import bubble, uneven_bubble
from moe_jax.schedule.pipelines.table import Table

STAGES, EXPERT_RANKS = 2, 2  # ranks of a stage are consecutive
_SENDS = 9  # round trips; the time of a send is half their median


def seconds_of_send(mesh: Mesh, config: Config) -> float:
    """Return seconds to send a microbatch's activations to the next stage on an idle link: half a round trip."""
    tokens = config.train.batch_size // (EXPERT_RANKS * config.train.grad_accumulation) * config.data.seq_len
    background.connect(mesh)

    def there_and_back(x: jax.Array) -> jax.Array:
        background.new_program()
        first, both = stage() == 0, jax.ShapeDtypeStruct(x.shape, x.dtype)
        arrived = receive_transfer(start_transfer(x, "to_next", jnp.stack([first, ~first])), both)(x)
        sent = start_transfer(jnp.where(first, x, arrived), "to_previous", jnp.stack([~first, first]))
        return receive_transfer(sent, both)(arrived)

    on_mesh = jax.shard_map(there_and_back, mesh=mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False)
    program, x = jax.jit(on_mesh), np.ones((tokens, config.model.hidden_size), np.float32)
    jax.block_until_ready(program(x))
    return float(np.median([seconds_per_step(lambda: program(x), 1) for _ in range(_SENDS)])) / 2


def operations_by_rank(operations: Sequence[TracedOperation]) -> list[list[TracedOperation]]:
    """Return the operations of each rank in its step, with clocks aligned at the end, where all ranks synchronise."""
    own = _shifted(operations, operations[-1].end_s)
    text = np.frombuffer(json.dumps(own).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    texts = multihost_utils.process_allgather(np.pad(text, (0, sizes.max() - len(text))))
    found = [
        [TracedOperation(*each) for each in json.loads(text[:size].tobytes())]
        for text, size in zip(texts, sizes, strict=True)
    ]
    begin_s = min(each.start_s for rank in found for each in rank)
    return [_shifted(rank, begin_s) for rank in found]


def ranks_by_stage(ranks: Sequence[Sequence[TracedOperation]]) -> list[Sequence[Sequence[TracedOperation]]]:
    """Group the ranks by stage."""
    return [ranks[first : first + EXPERT_RANKS] for first in range(0, len(ranks), EXPERT_RANKS)]


def _shifted(operations: Sequence[TracedOperation], zero_s: float) -> list[TracedOperation]:
    return [each._replace(start_s=each.start_s - zero_s, end_s=each.end_s - zero_s) for each in operations]


def bubble_of(ranks: Sequence[Sequence[TracedOperation]], table: Table, send_s: float) -> dict[str, float]:
    """Return the share of the time from the first stage's first pass to its last in which stages are idle, on average.

    Returns it measured; by the table, with slots of average length; with each slot's own length; and with sends.
    """
    busy_ST = [busy_in_ticks(stage_ranks, table, number) for number, stage_ranks in enumerate(ranks_by_stage(ranks))]
    spans = [span for tick in busy_ST[0] for span in tick]
    whole_s = spans[-1][1] - spans[0][0]
    busy_TS = [[sum(end - start for start, end in tick) for tick in slots] for slots in zip(*busy_ST, strict=True)]
    seconds: dict[str, list[float]] = {}
    for slots, busy_S in zip(table.ticks, busy_TS, strict=True):
        for slot, own_s in zip(slots, busy_S, strict=True):
            seconds.setdefault("".join(direction for direction, _ in slot.tasks()), []).append(own_s)
    means = {kind: float(np.mean(seconds[kind])) for kind in sorted(seconds) if kind}
    return {
        "measured": float(1 - np.sum(busy_TS) / (len(busy_ST) * whole_s)),
        "formula": bubble(table, means["F"], means["B"], together_s=means.get("FB")),
        "own_slots": uneven_bubble(table, busy_TS),
        "own_slots_and_sends": uneven_bubble(table, busy_TS, send_s),
        **{f"{kind}_s": own_s for kind, own_s in means.items()},
    }


def busy_in_ticks(
    ranks: Sequence[Sequence[TracedOperation]], table: Table, number: int
) -> list[list[tuple[float, float]]]:
    """Return the intervals in which a stage is busy in each tick, from its first pass to its last.

    A stage is busy while one of its ranks is in a pass, from the first of its operations to the last, whatever it waits
    for in between, and while one computes anything else, such as values of earlier passes that a pass reads. The ranks
    of a stage share a core.
    """
    busy_T: list[list[tuple[float, float]]] = [[] for _ in table.ticks]
    with_passes = [tick for tick, slots in enumerate(table.ticks) if slots[number].tasks()]
    end_s = 0.0
    for operations in ranks:
        for tick, found in enumerate(_ticks(operations, len(table.ticks))):
            directions = {direction for direction, _ in table.ticks[tick][number].tasks()}
            passes = [each for each in found if each.task[:1] in directions]
            if passes:
                busy_T[tick].append((min(each.start_s for each in passes), max(each.end_s for each in passes)))
                end_s = max(end_s, busy_T[tick][-1][1])
            busy_T[tick] += [(each.start_s, each.end_s) for each in found if not each.communicates]
    result: list[list[tuple[float, float]]] = []
    done_s = 0.0  # a rank may begin its next tick before the other one ends this one
    for tick, spans in enumerate(busy_T):
        inside = with_passes[0] <= tick <= with_passes[-1]
        cut = [(max(start, done_s), min(end, end_s)) for start, end in spans] if inside else []  # the optimizer follows
        result.append(joined((start, end) for start, end in cut if start < end))
        done_s = max([done_s, *(end for _, end in result[-1])])
    return result


def _ticks(operations: Sequence[TracedOperation], count: int) -> list[list[TracedOperation]]:
    """Return the operations of each tick: an instruction that runs exactly once per tick begins it."""
    runs: dict[str, list[float]] = {}
    for each in operations:
        runs.setdefault(each.name, []).append(each.start_s)
    begins = min((sorted(starts) for starts in runs.values() if len(starts) == count), key=lambda starts: starts[0])
    ends = [*begins[1:], float("inf")]
    return [
        [each for each in operations if begin <= each.start_s < end] for begin, end in zip(begins, ends, strict=True)
    ]
