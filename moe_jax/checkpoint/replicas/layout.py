"""The layout of safety copies: which process stores which pieces of the training state. Plain numbers: no arrays.

A piece is one device's shard of an array, e.g. `params.head[0:16,0:256]`; several devices may have the same piece.
Devices are numbered along the mesh. A node is a set of processes that are lost together. Shape suffixes: D devices,
P processes, N pieces.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

Index = tuple[tuple[int, int], ...]  # start and stop along each dimension


class ShardedArray(NamedTuple):
    """An array and its sharding: the slice of it that each device has."""

    name: str
    itemsize: int
    index_D: Sequence[Index]


class Piece(NamedTuple):
    """A piece of the array with the number `array`, and the devices and processes that have it."""

    name: str
    array: int
    num_bytes: int
    devices: tuple[int, ...]
    processes: tuple[int, ...]


class StoredPiece(NamedTuple):
    """A piece that a process stores in its slots, and the device of the process from which it is read."""

    piece: Piece
    device: int


class ReplicaTransfer(NamedTuple):
    """A piece that is sent from device `source` to device `target`, which belongs to the process `receiver`."""

    piece: Piece
    source: int
    target: int
    receiver: int


@dataclass(frozen=True)
class ReplicaLayout:
    """All pieces and the processes that store them.

    Every piece is stored on two nodes, if there are two: on those of its devices or, if all are on one node, also on
    the next node.
    """

    groups: tuple[
        tuple[int, ...], ...
    ]  # arrays (numbers) that together take no more memory on a device than the largest array
    pieces: tuple[Piece, ...]
    own: tuple[tuple[StoredPiece, ...], ...]  # for each process, the pieces of its own devices that it stores
    sent: tuple[ReplicaTransfer, ...]

    def pairs(self, array: int) -> list[tuple[int, int]]:
        """List (source, target) devices of the transfers of an array's pieces."""
        return [(each.source, each.target) for each in self.sent if each.piece.array == array]

    def received(self, process: int) -> list[StoredPiece]:
        """List the pieces of another node that a process stores."""
        return [StoredPiece(each.piece, each.target) for each in self.sent if each.receiver == process]


def piece_name(array: str, index: Index) -> str:
    """Return the name of a piece: the array's name and the slice."""
    return f"{array}[{','.join(f'{start}:{stop}' for start, stop in index)}]"


def layout_of(arrays: Sequence[ShardedArray], process_D: Sequence[int], node_P: Sequence[int]) -> ReplicaLayout:
    """Choose what every process stores and sends. Raises ValueError if nodes differ in processes or devices."""
    target_D = _targets(process_D, node_P)
    pieces: list[Piece] = []
    own: list[list[StoredPiece]] = [[] for _ in node_P]
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
                own[process_D[device]].append(StoredPiece(piece, device))
            if len(nodes) == 1 < len(set(node_P)):
                source, target = devices[0], target_D[devices[0]]
                sent.append(ReplicaTransfer(piece, source, target, process_D[target]))
    return ReplicaLayout(_groups(pieces), tuple(pieces), tuple(map(tuple, own)), tuple(sent))


def _targets(process_D: Sequence[int], node_P: Sequence[int]) -> list[int]:
    """Return for each device the corresponding device of the next node."""
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


def piece_sources(stored_PN: Bool[np.ndarray, "P N"], layout: ReplicaLayout) -> list[int | None]:
    """Return the process that sends each piece to those that lack it; None if no process has it.

    `stored_PN` is whether each process has each piece. The source is the first process that has it, counted from the
    piece's owner.
    """
    count = len(stored_PN)
    order = ([(piece.processes[0] + ahead) % count for ahead in range(count)] for piece in layout.pieces)
    return [next((p for p in ranks if stored_PN[p, n]), None) for n, ranks in enumerate(order)]


def lost_owners(sources: Sequence[int | None], layout: ReplicaLayout) -> list[int]:
    """Return the processes of which pieces are lost, i.e. have no source."""
    lost = [piece for piece, source in zip(layout.pieces, sources, strict=True) if source is None]
    return sorted({process for piece in lost for process in piece.processes})


def replacements(
    stored_PN: Bool[np.ndarray, "P N"], sources: Sequence[int | None], layout: ReplicaLayout
) -> Mapping[int, list[int]]:
    """Map each process that lacks pieces of its devices to the processes that send them.

    If it lacks pieces that no other process shares, only the sources of those are listed.
    """
    found: dict[int, list[int]] = {}
    for process in range(len(stored_PN)):
        missing = [n for n, x in enumerate(layout.pieces) if process in x.processes and not stored_PN[process, n]]
        unshared = [n for n in missing if len(layout.pieces[n].processes) == 1]
        if missing:
            found[process] = sorted({source for n in unshared or missing if (source := sources[n]) is not None})
    return found
