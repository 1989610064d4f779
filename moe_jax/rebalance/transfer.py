"""The programs that move experts between ranks: one for each stack of blocks, compiled once for all moves.

Shape suffix: M blocks with experts.
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
from moe_jax.rebalance.moves import Move, TransferRound, transfer_rounds
from moe_jax.step.compile_cache import compiled
from moe_jax.step.context import State
from moe_jax.step.moving_average import AVERAGE
from moe_jax.step.trainer import Trainer

_MAX_ROUNDS = 32  # of one call of a program; more rounds take several calls
_PARTS = ("params", "optimizer", AVERAGE)  # entries of a state, as far as it has them, with arrays of experts

Group = tuple[int, int]  # a stack of blocks: its segment of the model, and the position in the segment's period


class TransferCost(NamedTuple):
    """What is sent to move experts."""

    rounds: int
    sends: int  # sequential sends of an expert: one or two in a round
    num_bytes: int  # sent by each device


class Mover:
    """Moves the experts of a trainer's state. Making one starts to compile its programs in the background."""

    def __init__(self, config: Config, trainer: Trainer):
        self._config, self._mesh, self._stages = config, trainer.mesh, Stages.of(config)
        self.ranks = config.mesh.expert_ranks(trainer.mesh.shape)
        self._per_rank = config.expert_slots(trainer.mesh.shape) // self.ranks
        self._shapes = {group: [leaf for _, leaf in found] for group, found in _leaves(trainer.state_shapes).items()}
        pool = ThreadPoolExecutor(max_workers=1)
        self._programs: dict[Group, Future[Compiled]] = {
            group: pool.submit(self._compiled, group) for group in self._shapes
        }
        pool.shutdown(wait=False)

    @property
    def groups(self) -> list[Group]:
        """The stacks of blocks with experts."""
        return list(self._shapes)

    def lowered(self, group: Group) -> Lowered:
        """Lower the program of a stack: (arrays of the stack, rounds) → arrays. The arrays are donated."""
        shapes = self._shapes[group]
        specs = [shape.sharding.spec for shape in shapes]
        body = jax.shard_map(
            partial(migrate, axis=expert_axis(self._config.mesh)),
            mesh=self._mesh,
            in_specs=(specs, REPLICATED),
            out_specs=specs,
            check_vma=False,
        )
        replicated = NamedSharding(self._mesh, REPLICATED)
        rounds = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), self._encoded([]))
        return jax.jit(body, donate_argnums=0).lower(shapes, rounds)

    def _compiled(self, group: Group) -> Compiled:
        return compiled(self.lowered(group))

    def expert_bytes(self, group: Group) -> int:
        """Return the bytes that one expert on one device is sent as, moments and average included."""
        local = [shape.sharding.shard_shape(shape.shape) for shape in self._shapes[group]]
        largest = max(shape.dtype.itemsize for shape in self._shapes[group])
        return largest * sum(int(np.prod(x[2:])) for x in local)

    def rounds(self, moves_M: Sequence[Sequence[Move]]) -> dict[Group, tuple[TransferRound, ...]]:
        """Return the rounds in which the moves of all blocks are made, for each stack."""
        of_group: defaultdict[Group, list[tuple[int, int, Move]]] = defaultdict(list)
        for (segment, place, row), moves in zip(moe_blocks(self._stages), moves_M, strict=True):
            stage, own = divmod(row, self._stages.layout[segment][0] // self._stages.stages)
            of_group[segment, place] += [(stage, own, move) for move in moves]
        return {group: transfer_rounds(moves, self._per_rank, self.ranks) for group, moves in of_group.items()}

    def cost(self, moves_M: Sequence[Sequence[Move]]) -> TransferCost:
        """Return the cost of the moves of all blocks."""
        rounds = self.rounds(moves_M)
        sends = {group: sum(one.sent_experts(self.ranks) for one in each) for group, each in rounds.items()}
        return TransferCost(
            rounds=sum(map(len, rounds.values())),
            sends=sum(sends.values()),
            num_bytes=sum(count * self.expert_bytes(group) for group, count in sends.items()),
        )

    def move(self, state: State, moves_M: Sequence[Sequence[Move]]) -> State:
        """Return the state after the moves, except its placement, which is not updated. `state` is donated in part."""
        for group, rounds in self.rounds(moves_M).items():
            program = self._programs[group].result()
            for first in range(0, len(rounds), _MAX_ROUNDS):
                found = _leaves(state)[group]
                encoded = jax.tree.map(self.replicated, self._encoded(rounds[first : first + _MAX_ROUNDS]))
                moved = program([leaf for _, leaf in found], encoded)
                new = {path: leaf for (path, _), leaf in zip(found, moved, strict=True)}
                moved_parts = jax.tree.map_with_path(lambda path, leaf, new=new: new.get(path, leaf), _parts(state))
                state = state | moved_parts
        return state

    def replicated(self, x: Any) -> jax.Array:
        """Place an array of the host on all devices."""
        return jax.make_array_from_process_local_data(NamedSharding(self._mesh, REPLICATED), np.asarray(x))

    def _encoded(self, rounds: Sequence[TransferRound]) -> TransferRounds:
        return encode(rounds, _MAX_ROUNDS, self._stages.stages, self.ranks, self._per_rank)


def _parts(state: State) -> State:
    return {name: state[name] for name in _PARTS if name in state}


def _leaves(state: State) -> dict[Group, list[tuple[Any, Any]]]:
    """Return (path, array) of all parameters, moments and averages of experts, for each stack of blocks."""
    found: defaultdict[Group, list[tuple[Any, Any]]] = defaultdict(list)
    for path, leaf in jax.tree.leaves_with_path(_parts(state)):
        group = expert_group(path)
        if group is not None:
            found[group].append((path, leaf))
    return dict(found)
