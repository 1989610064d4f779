"""Predicted against measured step times, on a throttled cluster in one box.

    sudo .venv/bin/python profiling/predicted_steps.py

Two processes in network namespaces are the cluster. What the planner knows of it is measured first, apart from the
steps that it predicts: tasks of each model on each mesh, timed without communication (`stand.profiled`); the link,
timed without compute; and how much compute slows down beside transfers. Then training steps of every model, mesh,
policy, degree, size of chunks and rate of the link run in turn, and each is held against `plan.estimate`. A case is a
model and a rate: of all that was measured there, the step that is predicted to be fastest is held against the fastest.
Experts have a slot for every token, as in configs/bench/box.yaml: so a microbatch moves no more than its share.
Writes results/predicted_steps.json and .png.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import box
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from predicted_summary import summary, table, write_picture
from results_file import RESULTS, write_result
from stand import Profile, Stand, Step, profiled, seconds_per_step, tell

from moe_jax.config_files import load_config
from moe_jax.errors import ConfigError, run_command
from moe_jax.parallel import background
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.sharding import REPLICATED
from moe_jax.plan.clusters import Cluster, Device, Level
from moe_jax.plan.curves import fit_linear
from moe_jax.plan.estimate import estimate
from moe_jax.plan.measured import write_times
from moe_jax.plan.task_times import Linear

_CONFIG = "configs/bench/box.yaml"
_SMALLER = ["train.batch_size=8", "model.num_layers=2"]
MODELS = {
    "wide experts": _SMALLER,
    "dense between": [*_SMALLER, "model.d_model=384", "model.moe.every=2", "data.seq_len=256"],
    "large vocabulary": [
        *_SMALLER,
        "model.vocab_size=4096",
        "model.moe.num_experts=8",
        "model.moe.hidden_dim=512",
        "model.moe.capacity_factor=4",
    ],
}
MESHES = {"expert": ["mesh.data=1", "mesh.expert=2"], "data": ["mesh.data=2", "mesh.expert=1"]}
_GREEDY = ["schedule.weight_grad=greedy", "schedule.grad_reduce=chunked"]
_UNIFIED = ["schedule.policy=unified", "schedule.microbatches=2"]
_PIPELINE = ["schedule.policy=expert_pipeline", "schedule.microbatches=2"]
WAYS = {
    "vanilla": [],
    "vanilla, chunks of 4 MB": [*_GREEDY, "schedule.chunk_mb=4"],
    "expert_pipeline, R=2": _PIPELINE,
    "unified, R=2": _UNIFIED,
    "unified, R=2, chunks of 1 MB": [*_UNIFIED, *_GREEDY, "schedule.chunk_mb=1"],
    "unified, R=4, chunks of 4 MB": [*_UNIFIED, *_GREEDY, "schedule.microbatches=4", "schedule.chunk_mb=4"],
}
_WITHOUT_EXCHANGE = ("vanilla", "vanilla, chunks of 4 MB")  # what is worth a try where each device has all experts
_PARTS = (1, 4)
_SIZES = (2**16, 2**18, 2**20, 2**22)  # bytes that a process holds for both
_TRANSFERS = 7  # of each size
_SLOWED = 5  # steps beside transfers
_LONGER = 1.5  # the transfers, than compute alone
_UNHEARD: dict[str, Any] = {"burst_kb": 16, "queue": "limit 32mb"}  # nothing is sent for free, nothing is lost
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

Start = Callable[[int], Callable[[], None]]


def measure(arguments: argparse.Namespace) -> None:
    """Everything, in one process of the box."""
    box.join()
    rates = [box.parse_rate(rate, "--rates") for rate in arguments.rates.split(",")]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (model, mesh) in enumerate(itertools.product(MODELS, MESHES)):
            settings = [*MODELS[model], *MESHES[mesh], *arguments.overrides]
            stand = Stand(load_config(_CONFIG, settings))
            profile, times = profiled(stand, stand.config, _PARTS), Path(folder) / f"{number}.json"
            write_times(times, profile.tasks, profile.rest_s)
            tell(f"{model}, {mesh} axis: profiled")
            start = exchanges(stand)
            clusters = {rate: cluster_at(rate, profile, start) for rate in rates}
            settings.append(f"schedule.task_times={times}")
            configs = {way: load_config(_CONFIG, [*settings, *WAYS[way]]) for way in ways_on(mesh)}
            steps = {way: stand.step_of(stand.compiled(config)) for way, config in configs.items()}
            tell(f"{model}, {mesh} axis: compiled")
            seconds = rounds(steps, profile, rates, arguments.rounds)
            for (rate, cluster), (way, config) in itertools.product(clusters.items(), configs.items()):
                rows.append(
                    {"model": model, "mesh": mesh, "way": way, "rate_mbit": rate / 1e6}
                    | {"predicted_s": estimate(config, cluster).step_s, "measured_s": seconds[rate, way]}
                    | {"compute_alone_s": profile.step_s, "alone_s": seconds[rate, ""]}
                    | {"alpha_s": cluster.levels[0].alpha_s, "bytes_per_s": cluster.levels[0].bytes_per_s}
                    | {"slowdown": cluster.compute_slowdown, "tasks": profile.tasks, "rest_s": profile.rest_s}
                )
    box.hand_back(rows)


def ways_on(mesh: str) -> tuple[str, ...]:
    return tuple(WAYS) if mesh == "expert" else _WITHOUT_EXCHANGE


def cluster_at(rate: float, profile: Profile, start: Start) -> Cluster:
    """Both processes, with links of so many bits per second: the same on both."""
    box.set_rate(rate, **_UNHEARD)
    fit = fit_linear([size / 2 for size in _SIZES], [transfer_s(start, size) for size in _SIZES])
    line = Linear(same(fit.line.alpha_s), same(fit.line.beta_s))
    slowdown = same(slowed_s(profile, start, line) / profile.step_s)
    return Cluster(
        name=f"box at {rate / 1e6:.0f} Mbit/s",
        device=_CORE,
        devices=2,
        levels=(Level(name="link", devices=2, alpha_s=line.alpha_s, bytes_per_s=1 / line.beta_s),),
        compute_slowdown=max(slowdown, 1.0),
    )


def same(value: float) -> float:
    """The mean of both processes, on both."""
    return float(np.mean(multihost_utils.process_allgather(np.float32(value))))


def transfer_s(start: Start, num_bytes: int) -> float:
    """Of one exchange, started and waited for by a program."""
    taken = []
    for _ in range(_TRANSFERS + 1):
        multihost_utils.sync_global_devices("transfer")
        begin = time.perf_counter()
        start(num_bytes)()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def slowed_s(profile: Profile, start: Start, line: Linear) -> float:
    """Of compute alone while exchanges are under way that take longer."""
    size = _SIZES[-1]
    enough = math.ceil(_LONGER * profile.step_s / line.seconds(size / 2))
    taken = []
    for _ in range(_SLOWED):
        multihost_utils.sync_global_devices("slowed")
        under_way = [start(size) for _ in range(enough)]
        begin = time.perf_counter()
        jax.block_until_ready(profile.step())
        taken.append(time.perf_counter() - begin)
        for finish in under_way:
            finish()
    return statistics.median(taken)


def exchanges(stand: Stand) -> Start:
    """Starts an exchange of so many bytes, each process's own half included; the function that it returns waits."""
    axes = (Axis.DATA, Axis.EXPERT)
    on_mesh = functools.partial(jax.shard_map, mesh=stand.mesh, out_specs=REPLICATED, check_vma=False)

    @functools.cache
    def programs(num_bytes: int) -> tuple[Callable[[], jax.Array], Callable[[jax.Array], jax.Array]]:
        rows = jax.ShapeDtypeStruct((2, num_bytes // 8), np.float32)
        start = on_mesh(lambda: background.start(jnp.zeros(rows.shape, rows.dtype), "exchange", axes), in_specs=())
        finish = on_mesh(lambda ticket: background.finish(ticket, rows)[0, 0], in_specs=REPLICATED)
        return jax.jit(start), jax.jit(finish)

    def start(num_bytes: int) -> Callable[[], None]:
        begin, end = programs(num_bytes)
        ticket = jax.block_until_ready(begin())

        def finish() -> None:
            jax.block_until_ready(end(ticket))

        return finish

    return start


def rounds(
    steps: dict[str, Step], profile: Profile, rates: list[float], count: int
) -> dict[tuple[float, str], list[float]]:
    """Seconds of every step at every rate, and of compute alone beside them (no name), round by round."""
    seconds: dict[tuple[float, str], list[float]] = {}
    for turn, rate in itertools.product(range(count + 1), rates):
        box.set_rate(rate, **_UNHEARD)
        for way, step in ({"": profile.step} | steps).items():
            step_s = seconds_per_step(step, 1)
            if turn:  # the first warms up
                seconds.setdefault((rate, way), []).append(step_s)
    return seconds


def main() -> None:
    """Run the box, print the table, and write JSON and a picture to results/."""
    parser = argparse.ArgumentParser(prog="python profiling/predicted_steps.py", description=__doc__)
    parser.add_argument("--rates", default="100mbit,200mbit,400mbit,800mbit", help="of the link")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for all models")
    box.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds={arguments.rounds} must be at least 1")
    if box.rank() is not None:
        measure(arguments)
        return
    for rate in arguments.rates.split(","):
        box.parse_rate(rate, "--rates")
    settings = box.box_from(arguments)
    if settings.processes != 2:
        raise ConfigError(f"--processes={settings.processes}: this benchmark has links between 2 processes")
    result = summary(box.run_in_box(settings))
    print(table(result))
    print(f"written: {write_picture(result, RESULTS / 'predicted_steps.png')}")
    write_result("predicted_steps", result | {"box": dataclasses.asdict(settings)})


if __name__ == "__main__":
    run_command(main)
