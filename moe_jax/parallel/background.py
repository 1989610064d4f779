"""Collectives of a CPU cluster that run beside the program: on threads of their own, over TCP.

A collective of XLA:CPU keeps the thread that runs it, and the memory that XLA plans around it makes other work wait.
Here `start` hands an operand over and `finish` waits for what came, like the start and done of an accelerator's
collective. What a device sends leaves in the order in which its collectives were started, but what is urgent comes
first (`schedule/link_order.py`).

D devices, in the order of the mesh; P devices of a group.
"""

import functools
import itertools
import math
import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Shaped

from moe_jax.parallel.host_call import call
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.p2p_transport import MessageTag, P2PTransport
from moe_jax.parallel.trace_names import FINISH_SCOPE, START_SCOPE, STARTED
from moe_jax.schedule.link_order import Priority

Kind = Literal["exchange", "to_next", "to_previous", "sum", "scatter"]
_TRAFFIC: dict[Kind, Priority] = {
    "exchange": Priority.EXPERT,
    "to_next": Priority.PIPELINE,
    "to_previous": Priority.PIPELINE,
    "sum": Priority.DATA,
    "scatter": Priority.DATA,
}

NOTHING = -1  # ticket of a collective from which this device receives nothing


class Member(NamedTuple):
    """A device's part in one collective."""

    kind: Kind
    device: int
    group_P: tuple[int, ...]
    channel: int  # of the place in a program that starts it
    number: int  # of the times that this place was passed

    @property
    def place(self) -> int:
        """Of this device in its group."""
        return self.group_P.index(self.device)

    def others(self) -> Iterator[tuple[int, int]]:
        """Places and devices of the others, the next one first: not all send to the same device at once."""
        for step in range(1, len(self.group_P)):
            place = (self.place + step) % len(self.group_P)
            yield place, self.group_P[place]


class CollectiveShare(NamedTuple):
    """What a device does of a collective. Who sends and who receives must agree."""

    sends: bool = True
    receives: bool = True


class JobThread:
    """A thread that runs jobs one after another, urgent ones first: 0 before 1."""

    def __init__(self) -> None:
        self._jobs: queue.PriorityQueue[tuple[float, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], urgency: int = 0) -> None:
        """Run `job` behind all others that are as urgent."""
        self._jobs.put((urgency, next(self._count), job))

    def close(self) -> None:
        """End the thread, once it has run all jobs."""
        self._jobs.put((math.inf, next(self._count), None))
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()[-1]) is not None:
            job()


class Engine:
    """Runs the collectives of this process's devices. `owner_D` is the process of each device of the mesh."""

    def __init__(self, owner_D: tuple[int, ...]):
        self.owner_D = owner_D
        self._post = P2PTransport(owner_D)
        self._sending = {d: JobThread() for d, process in enumerate(owner_D) if process == jax.process_index()}
        self._adding = {device: JobThread() for device in self._sending}
        self._results: dict[int, Callable[[], np.ndarray]] = {}
        self._numbers: dict[tuple[int, int], Iterator[int]] = {}
        self._tickets = itertools.count()

    def start(
        self, kind: Kind, device: int, group_P: tuple[int, ...], channel: int, x: np.ndarray, part: CollectiveShare
    ) -> int:
        """Start a collective of `x`, which may change later; returns its ticket."""
        number = next(self._numbers.setdefault((device, channel), itertools.count()))
        member, ticket = Member(kind, device, group_P, channel, number % 2**31), next(self._tickets) % 2**31
        with jax.profiler.TraceAnnotation(STARTED, collective=_key(member, "block", device, device).trace):
            result = self._started(member, x, part)
        if not part.receives:
            return NOTHING
        self._results[ticket] = result
        return ticket

    def finish(self, ticket: int) -> np.ndarray:
        """Wait for a collective. Raises ConnectionError if another process is gone."""
        return self._results.pop(ticket)()

    def close(self) -> None:
        """End all threads and connections, once everything handed over is sent; who still waits is told."""
        for sender in self._sending.values():
            sender.close()
        self._post.close()
        for adder in self._adding.values():
            adder.close()

    def _started(self, member: Member, x: np.ndarray, part: CollectiveShare) -> Callable[[], np.ndarray]:
        match member.kind:
            case "exchange":
                return self._exchange(member, x)
            case "sum":
                return self._sum(member, x)
            case "scatter":
                return self._scatter(member, x)
            case "to_next":
                return self._moved(member, x, 1, part)
            case "to_previous":
                return self._moved(member, x, -1, part)

    def _moved(self, member: Member, x: np.ndarray, distance: int, part: CollectiveShare) -> Callable[[], np.ndarray]:
        """All of x goes that many places on in the group, round and round."""
        group_P, moved = member.group_P, np.empty_like(x)
        target, source = (group_P[(member.place + steps) % len(group_P)] for steps in (distance, -distance))
        if part.receives:
            self._expect(member, "block", {source: moved})
        if part.sends:
            self._send(member, "block", {target: x.copy()})

        def result() -> np.ndarray:
            self._post.receive(_key(member, "block", source, member.device))
            return moved

        return result

    def _exchange(self, member: Member, x_P: np.ndarray) -> Callable[[], np.ndarray]:
        """Block p goes to member p, and the result's comes from it."""
        result_P = np.empty_like(x_P)
        self._expect(member, "block", {other: result_P[place : place + 1] for place, other in member.others()})
        self._send(member, "block", {other: x_P[place : place + 1].copy() for place, other in member.others()})
        result_P[member.place] = x_P[member.place]

        def result() -> np.ndarray:
            self._receive(member, "block")
            return result_P

        return result

    def _sum(self, member: Member, x_n: np.ndarray) -> Callable[[], np.ndarray]:
        """Each member sums its share, in the order of the group, and sends it to all: the same bits everywhere."""
        total_n = x_n.copy()
        shares = np.array_split(total_n, len(member.group_P))
        own = shares[member.place]
        parts = {other: np.empty_like(own) for _, other in member.others()}
        self._expect(member, "block", parts)
        self._send(member, "block", {other: shares[place].copy() for place, other in member.others()})
        added: Future[None] = Future()

        def add() -> None:
            try:
                self._receive(member, "block")
                own[:] = functools.reduce(np.add, (parts.get(device, own) for device in member.group_P))
                self._send(member, "total", {other: own for _, other in member.others()})
                added.set_result(None)
            except Exception as error:  # raised again in `result`
                added.set_exception(error)

        self._expect(member, "total", {other: shares[place] for place, other in member.others()})

        def result() -> np.ndarray:
            self._receive(member, "total")
            added.result()
            return total_n

        self._adding[member.device].submit(add)
        return result

    def _scatter(self, member: Member, x_Pm: np.ndarray) -> Callable[[], np.ndarray]:
        """Each member sums the blocks of its place, in the order of the group."""
        own_m = x_Pm[member.place].copy()
        parts = {other: np.empty_like(own_m) for _, other in member.others()}
        self._expect(member, "block", parts)
        self._send(member, "block", {other: x_Pm[place].copy() for place, other in member.others()})

        def result() -> np.ndarray:
            self._receive(member, "block")
            return functools.reduce(np.add, (parts.get(device, own_m) for device in member.group_P))

        return result

    def _send(self, member: Member, what: Literal["block", "total"], to: dict[int, np.ndarray]) -> None:
        for target, x in to.items():
            send = functools.partial(self._post.send, _key(member, what, member.device, target), x)
            self._sending[member.device].submit(send, _TRAFFIC[member.kind])

    def _expect(self, member: Member, what: Literal["block", "total"], out: dict[int, np.ndarray]) -> None:
        for source, x in out.items():
            self._post.expect(_key(member, what, source, member.device), x)

    def _receive(self, member: Member, what: Literal["block", "total"]) -> None:
        for _, source in member.others():
            self._post.receive(_key(member, what, source, member.device))


def _key(member: Member, what: Literal["block", "total"], source: int, target: int) -> MessageTag:
    return MessageTag(source, target, member.channel, 2 * member.number + (what == "total"))


_engine: Engine | None = None
_places = threading.local()  # of starts in the program that this thread traces


def connect(mesh: jax.sharding.Mesh) -> None:
    """Connect the processes of a mesh; all of them call it, before they run programs over this mesh.

    Programs over another mesh must have ended, and need it connected again.
    """
    global _engine
    owner_D = tuple(device.process_index for device in mesh.devices.flat)
    if _engine is None or _engine.owner_D != owner_D:
        before, _engine = _engine, Engine(owner_D)
        if before is not None:  # closed only now, when all processes have come and need it no more
            before.close()


def new_program() -> None:
    """Count the starts of the program that is traced from here on anew, whatever this process has traced before."""
    _places.count = itertools.count()


def start(
    x: Shaped[Array, "..."], kind: Kind, axes: tuple[Axis, ...], part_2: Bool[Array, "2"] | None = None
) -> Int32[Array, ""]:
    """Start a collective over `axes`, inside `shard_map`; returns the ticket that `finish` needs.

    What goes to another stage only goes if `part_2`, a `CollectiveShare`, says so. A device that receives nothing gets
    zeros. Devices tell collectives apart by where their program starts them, as independent ones start in any order.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ranks = math.prod(mesh.shape[axis] for axis in axes)
    device_of = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    last = [mesh.axis_names.index(axis) for axis in axes]
    groups = np.moveaxis(device_of, last, range(-len(last), 0)).reshape(-1, ranks).tolist()
    group_of = {device: tuple(group) for group in groups for device in group}
    if not hasattr(_places, "count"):
        new_program()
    # Members of a group pass a place equally often, but stages do not: no two kinds of groups may share a channel.
    place = (next(_places.count), kind, axes, tuple(mesh.shape.items()))
    channel = zlib.crc32(repr(place).encode()) >> 1

    def hand_over(device: np.ndarray, x: np.ndarray, *part: np.ndarray) -> np.ndarray:
        own, does = int(device), CollectiveShare(*map(bool, part[0])) if part else CollectiveShare()
        return np.array(engine().start(kind, own, group_of[own], channel, x, does), np.int32)

    operands = (jax.lax.axis_index(mesh.axis_names), x) + (() if part_2 is None else (part_2,))
    with jax.named_scope(START_SCOPE):
        return call(hand_over, jax.ShapeDtypeStruct((), jnp.int32), *operands)


def finish(ticket: Int32[Array, ""], result: jax.ShapeDtypeStruct) -> Shaped[Array, "..."]:
    """Wait for a collective's result, of this shape and dtype; of `NOTHING` it is zeros."""

    def wait(ticket: np.ndarray) -> np.ndarray:
        return np.zeros(result.shape, result.dtype) if ticket == NOTHING else engine().finish(int(ticket))

    with jax.named_scope(FINISH_SCOPE):
        return call(wait, result, ticket)


def engine() -> Engine:
    """The one that is connected."""
    assert _engine is not None, "connect the mesh first"
    return _engine
