"""The steps with predicted and measured times, and the prediction from plain values that were measured separately."""

import dataclasses
from pathlib import Path
from typing import Any

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.plan.clusters import Cluster, Device, Level, LinkCurve
from moe_jax.plan.estimate import estimate
from moe_jax.plan.launch_overhead import LaunchOverhead
from moe_jax.plan.measured import Seconds, write_times
from moe_jax.plan.task_times import Linear
from moe_jax.schedule.simulation import Interference

_CONFIG = Path(__file__).parents[1] / "configs" / "bench" / "box.yaml"
_LINK_GB_PER_S = 0.04  # rate used to order tasks, in the middle of the measured rates: one program for all of them
_SMALLER = ["train.batch_size=8", "model.num_layers=2", f"schedule.link_gb_per_s={_LINK_GB_PER_S}"]
MODELS = {
    "wide experts": _SMALLER,
    "dense between": [*_SMALLER, "model.hidden_size=384", "model.moe.moe_layer_freq=2", "data.seq_len=256"],
    "large vocabulary": [
        *_SMALLER,
        "model.vocab_size=4096",
        "model.moe.num_experts=8",
        "model.moe.intermediate_size=512",
        "model.moe.capacity_factor=4",
    ],
}
THREE_STREAMS = "expert and tensor"
# by number of processes; four are two nodes of two tensor ranks, with FSMoE's three streams
MESHES = {
    2: {"expert": ["mesh.data=1", "mesh.expert=2"], "data": ["mesh.data=2", "mesh.expert=1"]},
    4: {
        THREE_STREAMS: ["mesh.data=1", "mesh.expert=2", "mesh.tensor=2", "exchange.tensor_form=sharded_scheduled"],
    },
}
_GREEDY = ["schedule.weight_grad=greedy", "schedule.grad_reduce=bucketed"]
_UNIFIED = ["schedule.policy=unified", "schedule.microbatches=2"]
_PIPELINE = ["schedule.policy=expert_pipeline", "schedule.microbatches=2"]
VARIANTS = {
    "vanilla": [],
    "vanilla, chunks of 4 MB": [*_GREEDY, "schedule.bucket_cap_mb=4"],
    "expert_pipeline, R=2": _PIPELINE,
    "unified, R=2": _UNIFIED,
    "unified, R=2, chunks of 1 MB": [*_UNIFIED, *_GREEDY, "schedule.bucket_cap_mb=1"],
    "unified, R=4, chunks of 4 MB": [*_UNIFIED, *_GREEDY, "schedule.microbatches=4", "schedule.bucket_cap_mb=4"],
}
# variants worth trying where each device has all experts, and those that have tasks
_TRIED = {
    "expert": tuple(VARIANTS),
    "data": ("vanilla", "vanilla, chunks of 4 MB"),
    THREE_STREAMS: tuple(name for name in VARIANTS if name != "vanilla"),
}
# Its tasks are measured, so its rates are never used.
_CORE = Device(
    name="CPU core",
    platform="cpu",
    memory_bytes=None,
    matrix_flops_per_s=50e9,
    memory_bytes_per_s=10e9,
    matrix_efficiency=1.0,
    watts=None,
    dollars_per_hour=None,
)


def variants_on(mesh: str) -> tuple[str, ...]:
    """Return the variants tried on a mesh."""
    return _TRIED[mesh]


def config_of(model: str, mesh: str, *more: str) -> Config:
    """Return the config of one step."""
    settings = next(meshes[mesh] for meshes in MESHES.values() if mesh in meshes)
    return load_config(str(_CONFIG), [*MODELS[model], *settings, *more])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineTimes:
    """Seconds of collectives over one line, and how they and concurrent compute delay each other."""

    alpha_s: float
    bytes_per_s: float
    busy_s: float  # added to `alpha_s` while the device computes
    slowdown: float  # of compute

    def in_units_of(self, unit_s: float) -> "LineTimes":
        """Return the same times in another unit than a second."""
        times = {"alpha_s": self.alpha_s / unit_s, "busy_s": self.busy_s / unit_s}
        return dataclasses.replace(self, **times, bytes_per_s=self.bytes_per_s * unit_s)

    def level(self, name: str, devices: int) -> Level:
        """Return the line as a level of a cluster."""
        return Level(name=name, devices=devices, bytes_per_s=self.bytes_per_s, ring=LinkCurve(self.alpha_s))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """Exchanges over a link, and gathers between two neighbours, if there are any; and the compute that they take."""

    between: LineTimes
    start: tuple[float, float]  # compute that one exchange takes: seconds, and seconds per byte
    finish: tuple[float, float]
    in_node: LineTimes | None = None

    @staticmethod
    def of(plain: dict[str, Any]) -> "LinkTimes":
        """Read from the values of a result file."""
        in_node = plain["in_node"] and LineTimes(**plain["in_node"])
        ends = {name: (plain[name][0], plain[name][1]) for name in ("start", "finish")}
        return LinkTimes(between=LineTimes(**plain["between"]), in_node=in_node, **ends)

    def in_units_of(self, unit_s: float) -> "LinkTimes":
        """Return the same times in another unit than a second."""
        return LinkTimes(
            between=self.between.in_units_of(unit_s),
            start=(self.start[0] / unit_s, self.start[1] / unit_s),
            finish=(self.finish[0] / unit_s, self.finish[1] / unit_s),
            in_node=self.in_node and self.in_node.in_units_of(unit_s),
        )

    def cluster(self) -> Cluster:
        """Return a cluster of two processes joined by this link, or of two nodes of two processes."""
        near = self.in_node or self.between
        nodes = () if self.in_node is None else (near.level("node", 2),)
        levels = (*nodes, self.between.level("link", 2 * (len(nodes) + 1)))
        return Cluster(
            name="box",
            device=_CORE,
            devices=levels[-1].devices,
            levels=levels,
            interference=Interference(
                slowdown=(max(self.between.slowdown, 1.0), max(near.slowdown, 1.0)),
                start_s=(self.between.busy_s, near.busy_s),
            ),
            launch_overhead=LaunchOverhead(start=Linear(*self.start), finish=Linear(*self.finish)),
        )


@dataclasses.dataclass(frozen=True)
class TaskTimes:
    """Seconds of the tasks of a model on a mesh, without communication."""

    tasks: Seconds
    rest_s: float

    def write(self, path: Path) -> None:
        """Write all times to a file that `schedule.task_times` can name."""
        write_times(path, self.tasks, self.rest_s)

    @staticmethod
    def of(plain: dict[str, Any]) -> "TaskTimes":
        """Read from the values of a result file, in which numbers of parts are text."""
        tasks = {op: {int(parts): times for parts, times in at.items()} for op, at in plain["tasks"].items()}
        return TaskTimes(tasks, plain["rest_s"])


def predicted_step_s(config: Config, times: TaskTimes, pace: float, link: LinkTimes, path: Path) -> float:
    """Predict a step on a machine that computes `pace` times as slowly; `path` is for a file that the config names.

    Everything is in units of `pace` seconds, in which tasks take as long as when the step was compiled. Otherwise the
    plan could choose another order of tasks than the compiled program has.
    """
    times.write(path)
    schedule = dataclasses.replace(config.schedule, task_times=str(path))
    return pace * estimate(dataclasses.replace(config, schedule=schedule), link.in_units_of(pace).cluster()).step_s
