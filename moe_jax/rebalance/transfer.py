"""The programs that move experts between ranks: one for each stack of blocks, compiled once for all moves.

M blocks with experts, E experts.
"""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.stages import Compiled, Lowered

from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.models.placement import expert_group, moe_blocks
from moe_jax.parallel.expert_transfer import TransferRounds, encode, migrate
from moe_jax.parallel.mesh import expert_axis
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.rebalance.moves import Move, Trip, trips_of
from moe_jax.step.compile_cache import compiled
from moe_jax.step.context import State
from moe_jax.step.trainer import Trainer

_MOST_TRIPS = 32  # of a call; more take several
_PARTS = ("params", "optimizer")

Group = tuple[int, int]  # segment and place in its period


class Moved(NamedTuple):
    """What a move of experts sends."""

    trips: int
    sends: int  # one after another: two in a trip, or one
    num_bytes: int  # that leave each device


class Mover:
    """Moves experts of a state with the trainer's shapes. Compiles in the background from its making on."""

    def __init__(self, config: Config, trainer: Trainer):
        self._config, self._mesh, self._stages = config, trainer.mesh, Stages.of(config)
        self.ranks = config.mesh.expert_ranks(trainer.mesh.shape)
        self._held = config.expert_slots(trainer.mesh.shape) // self.ranks
        self._shapes = {group: [leaf for _, leaf in found] for group, found in _leaves(trainer.state_shapes).items()}
        pool = ThreadPoolExecutor(max_workers=1)
        self._programs: dict[Group, Future[Compiled]] = {
            group: pool.submit(self._compiled, group) for group in self._shapes
        }
        pool.shutdown(wait=False)

    @property
    def groups(self) -> list[Group]:
        """The stacks of blocks."""
        return list(self._shapes)

    def lowered(self, group: Group) -> Lowered:
        """The program of a stack: its arrays, which it changes in place, and trips → the arrays."""
        shapes = self._shapes[group]
        specs = [shape.sharding.spec for shape in shapes]
        body = jax.shard_map(
            partial(migrate, axis=expert_axis(self._config.mesh)),
            mesh=self._mesh,
            in_specs=(specs, REPLICATED),
            out_specs=specs,
            check_vma=False,
        )
        whole = NamedSharding(self._mesh, REPLICATED)
        trips = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), self._encoded([]))
        return jax.jit(body, donate_argnums=0).lower(shapes, trips)

    def _compiled(self, group: Group) -> Compiled:
        return compiled(self.lowered(group))

    def expert_bytes(self, group: Group) -> int:
        """Of one expert on one device, moments included."""
        local = [shape.sharding.shard_shape(shape.shape) for shape in self._shapes[group]]
        return sum(
            int(np.prod(x[2:])) * shape.dtype.itemsize for x, shape in zip(local, self._shapes[group], strict=True)
        )

    def trips(self, moves_M: Sequence[Sequence[Move]]) -> dict[Group, tuple[Trip, ...]]:
        """In which the moves of all blocks are made."""
        of_group: defaultdict[Group, list[tuple[int, int, Move]]] = defaultdict(list)
        for (segment, place, row), moves in zip(moe_blocks(self._stages), moves_M, strict=True):
            stage, own = divmod(row, self._stages.layout[segment][0] // self._stages.stages)
            of_group[segment, place] += [(stage, own, move) for move in moves]
        return {group: trips_of(moves, self._held, self.ranks) for group, moves in of_group.items()}

    def cost(self, moves_M: Sequence[Sequence[Move]]) -> Moved:
        """Of making the moves of all blocks."""
        trips = self.trips(moves_M)
        sends = {group: sum(trip.sent_experts(self.ranks) for trip in each) for group, each in trips.items()}
        return Moved(
            trips=sum(map(len, trips.values())),
            sends=sum(sends.values()),
            num_bytes=sum(count * self.expert_bytes(group) for group, count in sends.items()),
        )

    def move(self, state: State, moves_M: Sequence[Sequence[Move]]) -> State:
        """The state with experts in other slots, which its placement does not know yet. `state` is donated in part."""
        for group, trips in self.trips(moves_M).items():
            program = self._programs[group].result()
            for first in range(0, len(trips), _MOST_TRIPS):
                found = _leaves(state)[group]
                encoded = jax.tree.map(self.replicated, self._encoded(trips[first : first + _MOST_TRIPS]))
                moved = program([leaf for _, leaf in found], encoded)
                new = {path: leaf for (path, _), leaf in zip(found, moved, strict=True)}
                parts = {name: state[name] for name in _PARTS}
                state = state | jax.tree.map_with_path(lambda path, leaf, new=new: new.get(path, leaf), parts)
        return state

    def replicated(self, x: Any) -> jax.Array:
        """The same on all devices."""
        return jax.make_array_from_process_local_data(NamedSharding(self._mesh, REPLICATED), np.asarray(x))

    def _encoded(self, trips: Sequence[Trip]) -> TransferRounds:
        return encode(trips, _MOST_TRIPS, self._stages.stages, self.ranks, self._held)


def _leaves(state: State) -> dict[Group, list[tuple[Any, Any]]]:
    """What the experts of each stack of blocks are made of, parameters and moments, with its path."""
    found: defaultdict[Group, list[tuple[Any, Any]]] = defaultdict(list)
    for path, leaf in jax.tree.leaves_with_path({name: state[name] for name in _PARTS}):
        group = expert_group(path)
        if group is not None:
            found[group].append((path, leaf))
    return dict(found)
