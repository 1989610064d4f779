"""A schedule: the tasks of a step in issue order, as data and as text."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from moe_jax.schedule.actions import Action, ScheduleError, Stream, three_streams
from moe_jax.schedule.shape import Parts, StepShape


@dataclass(frozen=True)
class Schedule:
    """The shape of a step and the order of its tasks. Each stream runs its own tasks in this order.

    `moe_jax.schedule.dependencies.check` reports whether the order can run.
    """

    policy: str
    shape: StepShape
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        header = [f"policy: {self.policy}"]
        header += [f"{field.name}: {_write(getattr(self.shape, field.name))}" for field in fields(StepShape)]
        return "\n".join([*header, "", *(" ".join(map(str, line)) for line in _lines(self.actions)), ""])

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Parse the text of a schedule, as `str` writes it; line breaks between actions are free.

        Raises ScheduleError if a line cannot be read. The order is not checked.
        """
        head, _, body = text.strip().partition("\n\n")
        values = dict(_read_line(line) for line in head.splitlines())
        names = ["policy", *(field.name for field in fields(StepShape))]
        if list(values) != names:
            raise ScheduleError(f"the header of the schedule has {', '.join(values)}: write {', '.join(names)}")
        policy = str(values.pop("policy"))
        return cls(policy, StepShape(**values), tuple(map(Action.parse, body.split())))  # type: ignore[arg-type]


def _lines(actions: tuple[Action, ...]) -> Iterator[list[Action]]:
    """Start a new line when compute moves to another stage; communication stays on the line of the task before it."""
    line: list[Action] = []
    stage = None
    for action in actions:
        compute = three_streams(action) == Stream.COMPUTE
        if compute and line and action[:3] != stage:
            yield line
            line = []
        stage = action[:3] if compute else stage
        line.append(action)
    yield line


def _write(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_line(line: str) -> tuple[str, object]:
    name, colon, value = line.partition(": ")
    try:
        if not colon:
            raise ValueError
        match name:
            case "forward" | "backward":
                microbatches, chunks = map(int, value.split())
                return name, Parts(microbatches, chunks)
            case "reductions":
                return name, tuple(map(int, value.split()))
            case "kinds":
                return name, tuple(value.split())
            case "sharded_experts" | "tied" | "mtp" | "local_experts":
                return name, {"true": True, "false": False}[value]
    except (ValueError, KeyError):
        raise ScheduleError(
            f"{line!r} in the header of the schedule cannot be read: write it as `name: value`"
        ) from None
    return name, value
