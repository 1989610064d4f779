"""Collectives of a CPU cluster that run concurrently with the program: on their own threads, over TCP.

A collective of XLA:CPU blocks the thread that runs it, and the memory that XLA plans for it makes other work wait. Here
`start` hands over an operand and `finish` waits for the result, like the start and done operations of an accelerator's
collective. `start_after` hands over the result of another collective as soon as it is there, so that the program does
not wait between the two. A device sends in the order in which its collectives were started, except that urgent traffic
goes first (`schedule/link_order.py`), and that what goes to other tensor ranks alone is sent by a thread of its own,
because inside a node it takes other links than between nodes.

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

Kind = Literal[
    "exchange",
    "gather_rows",
    "scatter_rows",
    "to_next",
    "to_previous",
    "gather",
    "sum",
    "scatter",
    "gather_in_node",
    "scatter_in_node",
]
_TRAFFIC: dict[Kind, Priority] = {
    "exchange": Priority.EXPERT,
    "gather_rows": Priority.EXPERT,
    "scatter_rows": Priority.EXPERT,
    "to_next": Priority.PIPELINE,
    "to_previous": Priority.PIPELINE,
    "gather": Priority.PARAMETERS,
    "sum": Priority.DATA,
    "scatter": Priority.DATA,
    "gather_in_node": Priority.DATA,
    "scatter_in_node": Priority.DATA,
}
_IN_NODE: tuple[Kind, ...] = ("gather_rows", "scatter_rows", "gather_in_node", "scatter_in_node")  # of tensor ranks

NOTHING = -1  # the handle of a collective from which this device receives nothing


class Member(NamedTuple):
    """One device's membership in one collective."""

    kind: Kind
    device: int
    group_P: tuple[int, ...]
    channel: int  # identifies the place in the program that starts the collective
    number: int  # how often the program has started it there before

    @property
    def place(self) -> int:
        """The index of this device in its group."""
        return self.group_P.index(self.device)

    def others(self) -> Iterator[tuple[int, int]]:
        """Yield the index and device of every other member, starting with the next one.

        Members start with different targets, so they do not all send to the same device at once.
        """
        for step in range(1, len(self.group_P)):
            place = (self.place + step) % len(self.group_P)
            yield place, self.group_P[place]


class CollectiveShare(NamedTuple):
    """Whether a device sends and receives in a collective. Senders and receivers must agree."""

    sends: bool = True
    receives: bool = True


class JobThread:
    """A thread that runs jobs one after another, and starts with the first. Jobs of lower `urgency` run first."""

    def __init__(self) -> None:
        self._jobs: queue.PriorityQueue[tuple[float, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._starting = threading.Lock()

    def submit(self, job: Callable[[], None], urgency: int = 0) -> None:
        """Queue `job` after all other jobs of the same urgency."""
        self._jobs.put((urgency, next(self._count), job))
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def close(self) -> None:
        """Run all queued jobs, then end the thread."""
        if self._thread.ident is not None:
            self._jobs.put((math.inf, next(self._count), None))
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()[-1]) is not None:
            job()


class Engine:
    """Runs the collectives of the devices of this process. `owner_D` is the process of each device of the mesh."""

    def __init__(self, owner_D: tuple[int, ...]):
        self.owner_D = owner_D
        self._transport = P2PTransport(owner_D)
        own = [device for device, process in enumerate(owner_D) if process == jax.process_index()]
        self._senders = {(device, in_node): JobThread() for device in own for in_node in (False, True)}
        # a thread for each kind: none waits for the collectives of another kind that will be sent on
        self._relays = {(device, kind): JobThread() for device in own for kind in _TRAFFIC}
        self._reducers = {device: JobThread() for device in own}
        self._results: dict[int, Callable[[], np.ndarray]] = {}
        self._numbers: dict[tuple[int, int], Iterator[int]] = {}
        self._handles = itertools.count()

    def start(
        self, kind: Kind, device: int, group_P: tuple[int, ...], channel: int, x: np.ndarray, part: CollectiveShare
    ) -> int:
        """Start a collective of `x` and return its handle. The caller may change `x` afterwards."""
        member, handle = self._member(kind, device, group_P, channel), next(self._handles) % 2**31
        with jax.profiler.TraceAnnotation(STARTED, collective=_key(member, "block", device, device).trace):
            result = self._start(member, x, part)
        if not part.receives:
            return NOTHING
        self._results[handle] = result
        return handle

    def start_after(self, kind: Kind, device: int, group_P: tuple[int, ...], channel: int, earlier: int) -> int:
        """Start a collective of the result of an earlier one, once it is there, and return its handle."""
        member, handle = self._member(kind, device, group_P, channel), next(self._handles) % 2**31
        arrived, started = self._results.pop(earlier), Future[Callable[[], np.ndarray]]()

        def relay() -> None:
            try:
                x = arrived()
                with jax.profiler.TraceAnnotation(STARTED, collective=_key(member, "block", device, device).trace):
                    started.set_result(self._start(member, x, CollectiveShare()))
            except Exception as error:  # raised again in `finish`
                started.set_exception(error)

        self._relays[device, kind].submit(relay)
        self._results[handle] = lambda: started.result()()
        return handle

    def finish(self, handle: int) -> np.ndarray:
        """Wait for a collective and return its result. Raises ConnectionError if another process is gone."""
        return self._results.pop(handle)()

    def close(self) -> None:
        """End all threads and connections after everything submitted has been sent.

        Pending receives raise ConnectionError.
        """
        for sender in self._senders.values():
            sender.close()
        self._transport.close()
        for worker in (*self._relays.values(), *self._reducers.values()):
            worker.close()

    def _member(self, kind: Kind, device: int, group_P: tuple[int, ...], channel: int) -> Member:
        number = next(self._numbers.setdefault((device, channel), itertools.count()))
        return Member(kind, device, group_P, channel, number % 2**31)

    def _start(self, member: Member, x: np.ndarray, part: CollectiveShare) -> Callable[[], np.ndarray]:
        match member.kind:
            case "exchange":
                return self._exchange(member, x)
            case "sum":
                return self._sum(member, x)
            case "gather" | "gather_rows" | "gather_in_node":
                return self._gather(member, x)
            case "scatter" | "scatter_rows" | "scatter_in_node":
                return self._scatter(member, x)
            case "to_next":
                return self._shift(member, x, 1, part)
            case "to_previous":
                return self._shift(member, x, -1, part)

    def _shift(self, member: Member, x: np.ndarray, distance: int, part: CollectiveShare) -> Callable[[], np.ndarray]:
        """Send all of x to the member `distance` places further on in the group, which is a ring."""
        group_P, moved = member.group_P, np.empty_like(x)
        target, source = (group_P[(member.place + steps) % len(group_P)] for steps in (distance, -distance))
        if part.receives:
            self._expect(member, "block", {source: moved})
        if part.sends:
            self._send(member, "block", {target: x.copy()})

        def result() -> np.ndarray:
            self._transport.receive(_key(member, "block", source, member.device))
            return moved

        return result

    def _exchange(self, member: Member, x_P: np.ndarray) -> Callable[[], np.ndarray]:
        """Send block p to member p. Block p of the result comes from member p."""
        result_P = np.empty_like(x_P)
        self._expect(member, "block", {other: result_P[place : place + 1] for place, other in member.others()})
        self._send(member, "block", {other: x_P[place : place + 1].copy() for place, other in member.others()})
        result_P[member.place] = x_P[member.place]

        def result() -> np.ndarray:
            self._receive(member, "block")
            return result_P

        return result

    def _gather(self, member: Member, x_n: np.ndarray) -> Callable[[], np.ndarray]:
        """Concatenate the arrays of all members, in the order of the group."""
        x_Pn = np.empty((len(member.group_P), *x_n.shape), x_n.dtype)
        self._expect(member, "block", {other: x_Pn[place] for place, other in member.others()})
        own_n = x_n.copy()
        self._send(member, "block", {other: own_n for _, other in member.others()})
        x_Pn[member.place] = x_n

        def result() -> np.ndarray:
            self._receive(member, "block")
            return x_Pn.reshape(-1, *x_n.shape[1:])

        return result

    def _sum(self, member: Member, x_n: np.ndarray) -> Callable[[], np.ndarray]:
        """Sum over the group. The result has the same bits on every member.

        Each member sums its share in the order of the group and sends it to all.
        """
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

        self._reducers[member.device].submit(add)
        return result

    def _scatter(self, member: Member, x_Pm: np.ndarray) -> Callable[[], np.ndarray]:
        """Sum the blocks of this member over the group, in the order of the group."""
        own_m = x_Pm[member.place].copy()
        parts = {other: np.empty_like(own_m) for _, other in member.others()}
        self._expect(member, "block", parts)
        self._send(member, "block", {other: x_Pm[place].copy() for place, other in member.others()})

        def result() -> np.ndarray:
            self._receive(member, "block")
            # XLA sums narrow numbers in float32, too
            wide = np.dtype(np.float32) if own_m.dtype.itemsize < 4 else own_m.dtype
            blocks = (parts.get(device, own_m).astype(wide, copy=False) for device in member.group_P)
            return functools.reduce(np.add, blocks).astype(own_m.dtype, copy=False)

        return result

    def _send(self, member: Member, what: Literal["block", "total"], to: dict[int, np.ndarray]) -> None:
        for target, x in to.items():
            send = functools.partial(self._transport.send, _key(member, what, member.device, target), x)
            urgency = Priority.EXPERT if x.dtype.kind == "i" else _TRAFFIC[member.kind]  # counts, which are awaited
            self._senders[member.device, member.kind in _IN_NODE].submit(send, urgency)

    def _expect(self, member: Member, what: Literal["block", "total"], out: dict[int, np.ndarray]) -> None:
        for source, x in out.items():
            self._transport.expect(_key(member, what, source, member.device), x)

    def _receive(self, member: Member, what: Literal["block", "total"]) -> None:
        for _, source in member.others():
            self._transport.receive(_key(member, what, source, member.device))


def _key(member: Member, what: Literal["block", "total"], source: int, target: int) -> MessageTag:
    return MessageTag(source, target, member.channel, 2 * member.number + (what == "total"))


_engine: Engine | None = None
_places = threading.local()  # counts the starts in the program that this thread traces


def connect(mesh: jax.sharding.Mesh) -> None:
    """Connect the processes of a mesh. All of them must call this before they run programs over the mesh.

    Programs over another mesh must have ended. That mesh must be connected again before it is used again.
    """
    global _engine
    owner_D = tuple(device.process_index for device in mesh.devices.flat)
    if _engine is None or _engine.owner_D != owner_D:
        previous, _engine = _engine, Engine(owner_D)
        if previous is not None:  # closed only now: every process is here, so none needs it any more
            previous.close()


def new_program() -> None:
    """Restart the count of collectives for the program that is traced next.

    It then does not depend on programs that this process traced before.
    """
    _places.count = itertools.count()


def start(
    x: Shaped[Array, "..."], kind: Kind, axes: tuple[Axis, ...], part_2: Bool[Array, "2"] | None = None
) -> Int32[Array, ""]:
    """Start a collective over `axes`, inside `shard_map`, and return the handle that `finish` needs.

    `part_2` holds the two flags of a `CollectiveShare`; only sends to another stage read it. A device that receives
    nothing gets zeros.
    """
    group_of, channel = _place(kind, axes)

    def hand_over(device: np.ndarray, x: np.ndarray, *part: np.ndarray) -> np.ndarray:
        own, does = int(device), CollectiveShare(*map(bool, part[0])) if part else CollectiveShare()
        return np.array(engine().start(kind, own, group_of[own], channel, x, does), np.int32)

    return _started(hand_over, x, *(() if part_2 is None else (part_2,)))


def start_after(handle: Int32[Array, ""], kind: Kind, axes: tuple[Axis, ...]) -> Int32[Array, ""]:
    """Start a collective of the result of an earlier one, without waiting for it. Returns the handle of the new one,
    which replaces that of the earlier one.
    """
    group_of, channel = _place(kind, axes)

    def hand_over(device: np.ndarray, earlier: np.ndarray) -> np.ndarray:
        own = int(device)
        return np.array(engine().start_after(kind, own, group_of[own], channel, int(earlier)), np.int32)

    return _started(hand_over, handle)


def _place(kind: Kind, axes: tuple[Axis, ...]) -> tuple[dict[int, tuple[int, ...]], int]:
    """Return the group over `axes` of each device, and the channel of this place in the program.

    The place in the program that starts a collective identifies it: independent collectives start in any order.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device_of = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    last = [mesh.axis_names.index(axis) for axis in axes]
    ranks = math.prod(mesh.shape[axis] for axis in axes)
    groups = np.moveaxis(device_of, last, range(-len(last), 0)).reshape(-1, ranks).tolist()
    group_of = {device: tuple(group) for group in groups for device in group}
    if not hasattr(_places, "count"):
        new_program()
    # Members of a group reach a place equally often, but stages do not: no two kinds of groups may share a channel.
    place = (next(_places.count), kind, axes, tuple(mesh.shape.items()))
    return group_of, zlib.crc32(repr(place).encode()) >> 1


def _started(hand_over: Callable[..., np.ndarray], *operands: jax.Array) -> Int32[Array, ""]:
    device = jax.lax.axis_index(jax.sharding.get_abstract_mesh().axis_names)
    with jax.named_scope(START_SCOPE):
        return call(hand_over, jax.ShapeDtypeStruct((), jnp.int32), device, *operands)


def finish(handle: Int32[Array, ""], result: jax.ShapeDtypeStruct) -> Shaped[Array, "..."]:
    """Wait for the result of a collective, which has this shape and dtype. For the handle `NOTHING` it is zeros."""

    def wait(handle: np.ndarray) -> np.ndarray:
        return np.zeros(result.shape, result.dtype) if handle == NOTHING else engine().finish(int(handle))

    with jax.named_scope(FINISH_SCOPE):
        return call(wait, result, handle)


def engine() -> Engine:
    """Return the connected engine."""
    assert _engine is not None, "connect the mesh first"
    return _engine
