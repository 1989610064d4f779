"""How long a model's tasks take: floating-point operations and bytes of each, at the rates of a device and its link."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_jax.config import Config, Model
from moe_jax.plan.resources import attention_matrices
from moe_jax.plan.task_times import Compute, Linear, TaskTimes, Transfer

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Rates:
    """What a device reaches in matrix products, and what leaves it in exchanges, gathers and sums over devices."""

    flops_per_s: float
    exchange: Linear
    gather: Linear  # over tensor ranks
    reduce: Linear


@dataclass(frozen=True)
class _Typical:
    """A platform: its devices, their links, and the network between nodes of so many devices (None: no nodes)."""

    flops_per_s: float
    link: Linear
    network: Linear
    node_devices: int | None


# Half of the peak rates of TPU v5p and H100, one link of each, and an adapter of 400 Gbit/s for each H100; a CPU core
# behind a local network.
_TYPICAL = {
    "tpu": _Typical(230e12, Linear(5e-6, 1 / 300e9), Linear(5e-6, 1 / 300e9), None),
    "gpu": _Typical(500e12, Linear(10e-6, 1 / 200e9), Linear(10e-6, 1 / 50e9), 8),
    "cpu": _Typical(50e9, Linear(2e-4, 1 / 1e9), Linear(2e-4, 1 / 1e9), None),
}


def rates_of(config: Config, platform: str, expert_ranks: int, tensor_ranks: int, num_devices: int) -> Rates:
    """The platform's rates, or those that a config gives. Tensor ranks are neighbours, and so are expert groups."""
    typical, settings = _TYPICAL[platform], config.schedule

    def link(devices: int) -> Linear:
        """Between so many neighbours."""
        beyond = typical.node_devices is not None and devices > typical.node_devices
        known = typical.network if beyond else typical.link
        given = settings.network_gb_per_s if beyond else settings.link_gb_per_s
        return known if given is None else Linear(known.alpha_s, 1e-9 / given)

    return Rates(
        typical.flops_per_s if settings.device_tflops is None else settings.device_tflops * 1e12,
        exchange=link(expert_ranks * tensor_ranks),
        gather=link(tensor_ranks),
        reduce=link(num_devices),
    )


def task_times(
    config: Config,
    tokens: int,
    expert_ranks: int,
    tensor_ranks: int,
    reduction_bytes: Sequence[Sequence[float]],
    rates: Rates,
    measured: Mapping[str, Compute],
) -> TaskTimes:
    """Of a step in which each device has `tokens` tokens; `reduction_bytes` leave it for each chunk of each owner.

    Ops that were `measured` are not estimated. Tensor ranks gather what was exchanged; what they gather and sum in
    attention and MLPs is not counted.
    """
    model, moe = config.model, config.model.moe
    matmul = Linear(0.0, 1 / rates.flops_per_s)
    matrices = 3 if model.activation == "swiglu" else 2
    attention = 2 * tokens * attention_matrices(model)
    scores = 2 * tokens * config.data.seq_len * model.num_heads * (model.qk_width + model.v_width)
    dense = 2 * tokens * matrices * model.d_model * model.hidden_dim
    shared = 2 * tokens * matrices * model.d_model * moe.hidden_dim * moe.num_shared_experts
    shared += dense if moe.dense_residual else 0
    rows = _expert_rows(model, tokens)
    expert = 2 * rows * matrices * model.d_model * moe.hidden_dim
    head = 2 * tokens * model.d_model * model.vocab_size

    def compute(products: float, rest: float = 0.0) -> Compute:
        """Of matrix products with weights, and of `rest` without, whose backward pass is twice as long."""
        return Compute(rate=matmul, forward=products + rest, backward=products + 2 * rest, weight=products)

    estimated = {
        "embed": Compute(rate=matmul, forward=0.0, backward=0.0),
        "attend": compute(attention + shared, scores),
        "dense": compute(attention + dense, scores),
        "expert": compute(expert),
        "head": compute(head),
    }
    own = _sent_rows(config, tokens, expert_ranks) * model.d_model * _ITEM_BYTES[config.train.compute_dtype]
    copies = tensor_ranks if config.exchange.tensor_form == "replicated" else 1
    moved = own * copies * (expert_ranks - 1) / expert_ranks
    gathered = own * (tensor_ranks - 1) * rates.gather.beta_s / rates.exchange.beta_s  # as bytes of an exchange
    exchange = Transfer(link=rates.exchange, num_bytes=moved + gathered)
    return TaskTimes(
        compute={**estimated, **measured},
        transfer=dict.fromkeys(("dispatch", "combine", "gather", "scatter"), exchange),
        reduce=rates.reduce,
        reduction_bytes=tuple(tuple(chunks) for chunks in reduction_bytes),
    )


def _sent_rows(config: Config, tokens: int, ranks: int) -> float:
    """Rows that a device sends, padding included."""
    moe, factor = config.model.moe, config.exchange.buffer_factor
    if not moe.sends_sized_rows or moe.num_experts == 0:
        return _expert_rows(config.model, tokens)
    worst = ranks * min(moe.top_k, moe.num_experts // ranks)
    return tokens * (worst if factor is None else min(factor * moe.top_k, worst))


def _expert_rows(model: Model, tokens: int) -> float:
    """Rows that a device's experts see, padding included; a dropless layer's share is taken to be even."""
    moe = model.moe
    factor = 1.0 if moe.capacity_factor is None else moe.capacity_factor
    return min(factor * moe.top_k, moe.num_experts) * tokens
