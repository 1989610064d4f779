"""Which process keeps which pieces of the training state, and which go to another node. Plain numbers: no arrays.

A piece is what a device holds of an array, e.g. `params.head[0:16,0:256]`; several devices may hold the same. Devices
are numbered along the mesh, and nodes are what is lost at once. D devices, P processes, N pieces.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

Index = tuple[tuple[int, int], ...]  # first and behind the last, along each dimension


class ShardedArray(NamedTuple):
    """An array that is cut over devices."""

    name: str
    itemsize: int
    index_D: Sequence[Index]


class Piece(NamedTuple):
    """A part of the array with this number, and who has it."""

    name: str
    array: int
    num_bytes: int
    devices: tuple[int, ...]
    processes: tuple[int, ...]


class Kept(NamedTuple):
    """A piece that a process keeps, which comes to it on one of its devices."""

    piece: Piece
    device: int


class ReplicaTransfer(NamedTuple):
    """A piece that goes from one device to another, and the process of that."""

    piece: Piece
    source: int
    target: int
    receiver: int


@dataclass(frozen=True)
class ReplicaLayout:
    """Every piece lies on two nodes, if there are two: the devices' own or, if all of them are of one, the next one."""

    groups: tuple[tuple[int, ...], ...]  # of arrays that together take a device no more than the largest one
    pieces: tuple[Piece, ...]
    own: tuple[tuple[Kept, ...], ...]  # of each process, of what its devices hold
    sent: tuple[ReplicaTransfer, ...]

    def pairs(self, array: int) -> list[tuple[int, int]]:
        """The devices between which an array's pieces go."""
        return [(each.source, each.target) for each in self.sent if each.piece.array == array]

    def received(self, process: int) -> list[Kept]:
        """What a process keeps of another node's."""
        return [Kept(each.piece, each.target) for each in self.sent if each.receiver == process]


def piece_name(array: str, index: Index) -> str:
    """Of the part of an array."""
    return f"{array}[{','.join(f'{start}:{stop}' for start, stop in index)}]"


def layout_of(arrays: Sequence[ShardedArray], process_D: Sequence[int], node_P: Sequence[int]) -> ReplicaLayout:
    """What every process keeps and sends. Raises ValueError if nodes have unlike numbers of processes or devices."""
    target_D = _targets(process_D, node_P)
    pieces: list[Piece] = []
    own: list[list[Kept]] = [[] for _ in node_P]
    sent: list[ReplicaTransfer] = []
    for number, array in enumerate(arrays):
        for index in sorted(set(array.index_D)):
            devices = tuple(device for device, other in enumerate(array.index_D) if other == index)
            processes = tuple(sorted({process_D[device] for device in devices}))
            num_bytes = array.itemsize * math.prod(stop - start for start, stop in index)
            piece = Piece(piece_name(array.name, index), number, num_bytes, devices, processes)
            pieces.append(piece)
            nodes = {node_P[process] for process in processes}
            for node in nodes:  # one of its processes is enough
                device = next(device for device in devices if node_P[process_D[device]] == node)
                own[process_D[device]].append(Kept(piece, device))
            if len(nodes) == 1 < len(set(node_P)):
                source, target = devices[0], target_D[devices[0]]
                sent.append(ReplicaTransfer(piece, source, target, process_D[target]))
    return ReplicaLayout(_groups(pieces), tuple(pieces), tuple(map(tuple, own)), tuple(sent))


def _targets(process_D: Sequence[int], node_P: Sequence[int]) -> list[int]:
    """Of each device, the one in the same place of the next node."""
    nodes = [[p for p, node in enumerate(node_P) if node == each] for each in dict.fromkeys(node_P)]
    devices = [[d for d, process in enumerate(process_D) if process == p] for p in range(len(node_P))]
    for groups in (nodes, devices):
        if len({len(group) for group in groups}) > 1:
            raise ValueError("nodes are not alike")
    target_D = [0] * len(process_D)
    for node, following in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        for process, partner in zip(node, following, strict=True):
            for source, target in zip(devices[process], devices[partner], strict=True):
                target_D[source] = target
    return target_D


def _groups(pieces: Sequence[Piece]) -> tuple[tuple[int, ...], ...]:
    size = {piece.array: 0 for piece in pieces}
    for piece in pieces:
        size[piece.array] = max(size[piece.array], piece.num_bytes)
    groups: list[list[int]] = []
    left = 0
    for array, num_bytes in size.items():
        if not groups or num_bytes > left:
            groups.append([])
            left = max(size.values())
        groups[-1].append(array)
        left -= num_bytes
    return tuple(map(tuple, groups))


def givers(held_PN: Bool[np.ndarray, "P N"], layout: ReplicaLayout) -> list[int | None]:
    """The process that gives each piece to those that lack it, the first behind its owner; None: nobody has it."""
    count = len(held_PN)
    order = ([(piece.processes[0] + ahead) % count for ahead in range(count)] for piece in layout.pieces)
    return [next((p for p in ranks if held_PN[p, n]), None) for n, ranks in enumerate(order)]


def lost_owners(given: Sequence[int | None], layout: ReplicaLayout) -> list[int]:
    """The processes whose pieces nobody has any more."""
    lost = [piece for piece, giver in zip(layout.pieces, given, strict=True) if giver is None]
    return sorted({process for piece in lost for process in piece.processes})


def replaced(
    held_PN: Bool[np.ndarray, "P N"], given: Sequence[int | None], layout: ReplicaLayout
) -> Mapping[int, list[int]]:
    """The processes that lack a piece which was theirs alone, or else any, and those that have it for them."""
    found: dict[int, list[int]] = {}
    for process in range(len(held_PN)):
        lacked = [n for n, piece in enumerate(layout.pieces) if process in piece.processes and not held_PN[process, n]]
        alone = [n for n in lacked if len(layout.pieces[n].processes) == 1]
        if lacked:
            found[process] = sorted({giver for n in alone or lacked if (giver := given[n]) is not None})
    return found
