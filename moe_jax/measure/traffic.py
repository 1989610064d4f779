"""Count what the exchanges of a compiled program send inside and between nodes, and find exchanges that overlap."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_jax.measure.costs import collective_of, groups_of, sent_bytes
from moe_jax.measure.hlo import HloError, HloModule, Instruction
from moe_jax.plan.exchange import SentBytes, Steps, Traffic


@dataclass(frozen=True, kw_only=True)
class ExchangeOp:
    """One all-to-all or collective-permute of a computation."""

    collective: Instruction
    scopes: tuple[str, ...]  # enclosing scopes, outermost first
    groups: tuple[tuple[int, ...], ...]  # ranks; for a permute, source and target
    message_bytes: float  # from one rank to another
    begin: int  # begin and end: places in the schedule, equal for a synchronous exchange
    end: int

    @property
    def is_async(self) -> bool:
        return self.end > self.begin


def exchanges(program: HloModule, num_devices: int, computation: str | None = None) -> list[ExchangeOp]:
    """Return the exchanges of a computation (None: the entry) in the order in which they start. Device numbers are used
    as ranks.
    """
    lines = program.computations[computation or program.entry]
    ends: dict[str, int] = {}
    for place, line in enumerate(lines):
        if line.opcode.endswith("-done"):
            ends[line.operands[0]] = place
    found = []
    for place, line in enumerate(lines):
        inert = line.opcode == "while" or line.opcode.endswith("-done")
        collective = None if inert else collective_of(line, program)
        if collective is None:
            continue
        groups = groups_of(collective, num_devices)
        permutes = "permute" in collective.opcode
        found.append(
            ExchangeOp(
                collective=collective,
                scopes=tuple((program.op_name(collective) or program.op_name(line)).split("/")),
                groups=tuple(map(tuple, groups.tolist())),
                message_bytes=sum(program.operand_bytes(collective)) / (1 if permutes else groups.shape[1]),
                begin=place,
                # XLA:GPU also writes start and done for synchronous collectives
                end=place if '"is_sync":true' in line.attributes else ends.get(line.name, place),
            )
        )
    return found


def traffic_of(found: Iterable[ExchangeOp], num_ranks: int, per_node: int) -> list[Traffic]:
    """Return what each rank sends in these exchanges."""
    sent: dict[tuple[int, bool], SentBytes] = defaultdict(lambda: SentBytes(0, 0.0))
    for exchange in found:
        permutes = "permute" in exchange.collective.opcode
        for group in exchange.groups:
            for source, target in [group] if permutes else [(a, b) for a in group for b in group]:
                key = source, source // per_node != target // per_node
                if source != target:
                    sent[key] = SentBytes(sent[key].messages + 1, sent[key].num_bytes + exchange.message_bytes)
    return [Traffic(sent[rank, False], sent[rank, True]) for rank in range(num_ranks)]


def bytes_sent(program: HloModule, kind: str, num_devices: int) -> float:
    """Return the bytes that leave a device in all collectives of a kind (all-to-all, all-gather, …), counting every
    loop iteration.

    Raises HloError if a loop with such collectives has an unknown number of iterations.
    """

    def of(name: str) -> float:
        return sum(map(of_line, program.computations[name]))

    def of_line(line: Instruction) -> float:
        if line.opcode.removesuffix("-start") == kind:
            return sent_bytes(line, program, num_devices)
        if line.opcode.endswith(("-done", "-update")):
            return 0.0
        inside = sum(map(of, line.called))
        iterations = program.trip_count(line) if line.opcode == "while" else 1
        if iterations is None and inside:
            raise HloError(
                f"{line.name} is a loop with an unknown number of iterations, and bytes of its {kind} count as often: "
                "use a program whose loops have a fixed number"
            )
        return (iterations or 0) * inside

    return of(program.entry)


def side_by_side(some: Sequence[ExchangeOp], others: Sequence[ExchangeOp]) -> bool:
    """Whether one of `some` and one of `others` are in flight at the same time: each starts before the other is done.

    A synchronous exchange can run while an asynchronous one is in flight.
    """
    return any(a.begin <= b.end and b.begin <= a.end for a in some for b in others if a.is_async or b.is_async)


def by_phase(found: Iterable[ExchangeOp], steps: Steps) -> dict[str, list[ExchangeOp]]:
    """Return the exchanges of each phase of an algorithm, by the scope that names it; those without a phase are under
    "".
    """
    phases: dict[str, list[ExchangeOp]] = {phase.name: [] for step in steps for phase in step}
    for exchange in found:
        name = next((scope for scope in exchange.scopes if scope in phases), "")
        phases.setdefault(name, []).append(exchange)
    return phases
