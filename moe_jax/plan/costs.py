"""How long a model's tasks take: operations and bytes of each, at the rates of a device and its link."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_jax.config import Config
from moe_jax.plan.task_times import ComputeStage, Linear, TaskStage, TaskTimes, Transfer
from moe_jax.plan.work import OpWork, exchange_bytes, work_of


@dataclass(frozen=True)
class Rates:
    """A device's rate in matrix products, and its link in exchanges, gathers and sums over devices."""

    flops_per_s: float
    exchange: Linear
    gather: Linear  # over tensor ranks
    reduce: Linear


@dataclass(frozen=True)
class Typical:
    """Typical rates of a platform: its devices, their links, and the network between nodes."""

    flops_per_s: float
    link: Linear
    network: Linear
    node_devices: int | None  # None: no nodes


# Half of the peak rates of TPU v5p and H100, one link of each, and an adapter of 400 Gbit/s for each H100; a CPU core
# on a local network.
TYPICAL = {
    "tpu": Typical(230e12, Linear(5e-6, 1 / 300e9), Linear(5e-6, 1 / 300e9), None),
    "gpu": Typical(500e12, Linear(10e-6, 1 / 200e9), Linear(10e-6, 1 / 50e9), 8),
    "cpu": Typical(50e9, Linear(2e-4, 1 / 1e9), Linear(2e-4, 1 / 1e9), None),
}


def rates_of(config: Config, platform: str, expert_ranks: int, tensor_ranks: int, num_devices: int) -> Rates:
    """The platform's rates, or those that a config sets. Tensor ranks are neighbours, and so are expert groups."""
    typical, settings = TYPICAL[platform], config.schedule

    def link(devices: int) -> Linear:
        """The link that connects this many neighbours."""
        beyond = typical.node_devices is not None and devices > typical.node_devices
        known = typical.network if beyond else typical.link
        rate = settings.network_gb_per_s if beyond else settings.link_gb_per_s
        return known if rate is None else Linear(known.alpha_s, 1e-9 / rate)

    return Rates(
        typical.flops_per_s if settings.device_tflops is None else settings.device_tflops * 1e12,
        exchange=link(expert_ranks * tensor_ranks),
        gather=link(tensor_ranks),
        reduce=link(num_devices),
    )


def order_times(
    config: Config,
    mesh: Mapping[str, int],
    platform: str,
    reduction_bytes: Sequence[Sequence[float]],
    measured: Mapping[str, TaskStage],
    gather_bytes: tuple[Mapping[str, float], ...] = (),
) -> TaskTimes:
    """The task times that training orders a step's tasks by, on a mesh of these sizes. See `task_times`."""
    sequences = config.train.batch_size // (config.train.grad_accumulation * mesh["data"] * mesh["expert"])
    expert, shared_by = config.mesh.expert_ranks(mesh), config.mesh.expert_tensor_ranks(mesh)
    tensor, context = mesh["tensor"], mesh["context"]
    rates = rates_of(config, platform, expert, shared_by, mesh["data"] * context * mesh["expert"] * tensor)
    tokens = sequences * config.data.seq_len // (tensor * context)
    return task_times(config, platform, tokens, expert, shared_by, reduction_bytes, rates, measured, gather_bytes)


def task_times(
    config: Config,
    platform: str,
    tokens: int,
    expert_ranks: int,
    tensor_ranks: int,
    reduction_bytes: Sequence[Sequence[float]],
    rates: Rates,
    measured: Mapping[str, TaskStage],
    gather_bytes: tuple[Mapping[str, float], ...] = (),
) -> TaskTimes:
    """Task times of a step in which each device has `tokens` tokens.

    `reduction_bytes` leave a device for each bucket of each owner of gradients, `gather_bytes` for each gather of its
    parameters. `measured` ops replace estimates.
    `tensor_ranks` share each expert, and gather exchanged rows. Communication of tensor ranks in attention and MLPs,
    and of context ranks, is not counted.
    """
    matmul = Linear(0.0, 1 / rates.flops_per_s)
    estimated = {op: _compute(matmul, work) for op, work in work_of(config, tokens, platform).items()}
    own = exchange_bytes(config, tokens, expert_ranks, platform)
    copies = tensor_ranks if config.exchange.tensor_form == "replicated" else 1
    moved = own * copies * (expert_ranks - 1) / expert_ranks
    gathered = own * (tensor_ranks - 1)
    gather = Transfer(link=rates.gather, num_bytes=gathered)
    if config.exchange.tensor_form != "sharded_scheduled":  # one task, with the gather as bytes of an exchange
        moved += gathered * rates.gather.beta_s / rates.exchange.beta_s
    exchange = Transfer(link=rates.exchange, num_bytes=moved)
    return TaskTimes(
        compute={**estimated, **measured},
        transfer=dict.fromkeys(("dispatch", "combine"), exchange) | dict.fromkeys(("gather", "scatter"), gather),
        reduce=rates.reduce,
        reduction_bytes=tuple(tuple(chunks) for chunks in reduction_bytes),
        gather_bytes=gather_bytes,
    )


def _compute(rate: Linear, work: OpWork) -> ComputeStage:
    products, rest = work
    return ComputeStage(rate=rate, forward=products + rest, backward=products + 2 * rest, weight=products)
