"""Ways to train a model on a cluster: every mesh that its sizes allow, and what can be chosen on one."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moe_jax.config import Config
from moe_jax.config_checks.mesh import check_batch_split
from moe_jax.errors import ConfigError
from moe_jax.plan.clusters import Cluster

CHUNKS_MB = (8.0, 32.0, 128.0)
MOST_MICROBATCHES = 8


@dataclass(frozen=True)
class Refused:
    """A mesh that cannot work."""

    mesh: str
    reason: str


def on_meshes(config: Config, cluster: Cluster) -> Iterator[Config | Refused]:
    """The config on every mesh of the cluster's devices that cuts experts and tokens; expert ranks are neighbours.

    Tensor ranks stay inside a node: they wait for each other in every block.
    """
    experts = config.model.moe.num_experts
    for tensor in divisors(cluster.devices):
        if tensor > cluster.node_devices:
            return
        for expert in divisors(cluster.devices // tensor):
            if expert > max(experts, 1) or experts % expert:
                continue
            sizes = {"data": cluster.devices // (tensor * expert), "expert": expert, "tensor": tensor}
            try:
                found = with_settings(plain(config), mesh=sizes)
                check_batch_split(found, sizes["data"] * expert)
            except ConfigError as error:
                yield Refused(mesh_text(sizes), str(error))
            else:
                yield found


def schedules(config: Config) -> Iterator[Config]:
    """Every policy and degree on the mesh of a config, forward and backward apart; with chunks of one size."""
    yield plain(config)
    for degree in divisors(MOST_MICROBATCHES)[1:]:
        yield _scheduled(config, "expert_pipeline", degree)
        if sequences(config) % degree == 0:
            for backward in divisors(degree):
                yield _scheduled(config, "unified", degree, backward)
    for degree in divisors(MOST_MICROBATCHES):
        if sequences(config) % degree == 0:
            for chunks in divisors(MOST_MICROBATCHES // degree)[1:]:
                yield _scheduled(config, "unified", degree, chunks=chunks)


def first_schedule(config: Config) -> Config:
    """One good guess: two microbatches, if there are two sequences."""
    return _scheduled(config, "unified", 2 if sequences(config) % 2 == 0 else 1)


def plain(config: Config) -> Config:
    """Nothing scheduled."""
    settings = {"weight_grad": "inline", "grad_reduce": "end", "chunk_mb": None}
    uncut = {"microbatches": 1, "backward_microbatches": None, "expert_chunks": 1}
    return with_settings(config, schedule={"policy": "vanilla", **uncut, **settings})


def _scheduled(config: Config, policy: str, degree: int, backward: int | None = None, chunks: int = 1) -> Config:
    degrees = {
        "microbatches": degree,
        "backward_microbatches": None if backward == degree else backward,
        "expert_chunks": chunks,
    }
    settings = {"weight_grad": "greedy", "grad_reduce": "chunked", "chunk_mb": CHUNKS_MB[1]}
    return with_settings(config, schedule={"policy": policy, **degrees, **settings})


def accumulations(config: Config) -> Iterator[Config]:
    """The batch in ever more parts, down to one sequence of each device."""
    whole = with_settings(config, train={"grad_accumulation": 1})
    for parts in divisors(sequences(whole)):
        yield with_settings(config, train={"grad_accumulation": parts})


def sequences(config: Config) -> int:
    """That a device has at once."""
    return config.train.batch_size // (config.mesh.data * config.mesh.expert * config.train.grad_accumulation)


def with_settings(config: Config, **sections: Mapping[str, object]) -> Config:
    """The config with settings of its sections replaced. Raises ConfigError."""
    replaced = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **replaced)


def mesh_text(sizes: dict[str, int]) -> str:
    """Axes that are cut, e.g. `data=4 expert=8`."""
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one device"


def divisors(number: int) -> list[int]:
    """From 1 up."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
