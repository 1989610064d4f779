"""Rules of gates and of the settings that only some of them have."""

from typing import TYPE_CHECKING

from moe_jax.config.gates import BIASED, GROUPED
from moe_jax.config.validate.messages import divisors_text
from moe_jax.config.validate.ranges import RANGES
from moe_jax.errors import ConfigError

if TYPE_CHECKING:
    from moe_jax.config import MoE

_OWNERS = {
    "n_group": (GROUPED, 1),
    "topk_group": (GROUPED, 1),
    "router_rank": (("xmoe",), None),
    "slots_per_expert": (("softmoe",), 1),
    "bias_update_rate": (BIASED, None),
}
_OF_TWO = 2  # experts that score a group of gate deepseek_v3


def check_gate(moe: "MoE") -> None:
    """Raise ConfigError for a gate that its slots do not suit, and for settings that it does not read."""
    for name, (gates, unset) in _OWNERS.items():
        value = getattr(moe, name)
        if value != unset and moe.gate not in gates:
            raise ConfigError(
                f"model.moe.{name}={value} is of gate {_all(gates)}, and model.moe.gate={moe.gate}: "
                f"set model.moe.gate={gates[-1]}, or model.moe.{name}={'null' if unset is None else unset}"
            )
    if moe.gate in GROUPED:
        _check_groups(moe)
    if moe.norm_top1_prob:
        _check_normalize_top_1(moe)
    _check_capacity_schedule(moe)
    facts = moe.gate_facts
    if not facts.splits and moe.dispatcher != "sort":
        raise ConfigError(
            f"model.moe.gate={moe.gate} fills slots in an order of its own, and "
            f"model.moe.dispatcher={moe.dispatcher} has "
            "another: use model.moe.dispatcher=sort"
        )
    if moe.load_balancing_type == "sequence" and facts.fills_slots:
        raise ConfigError(
            f"model.moe.gate={moe.gate} fills all slots alike, and model.moe.load_balancing_type=sequence balances "
            "what each "
            "sequence chose: use model.moe.load_balancing_type=batch, or another gate"
        )
    if moe.capacity_factor is None and not facts.splits and moe.gate != "softmoe":
        raise ConfigError(
            f"model.moe.gate={moe.gate} chooses who gets one of few slots, and model.moe.capacity_factor=null limits "
            "none: set model.moe.capacity_factor, or another gate"
        )


def _check_normalize_top_1(moe: "MoE") -> None:
    facts = moe.gate_facts
    name, value, needed = "top_k", str(moe.top_k), "1"
    if moe.top_k == 1:
        if moe.norm_topk_prob and not facts.fills_slots:
            return
        name, value, needed = "gate", moe.gate, "softmax"
        if not moe.norm_topk_prob:
            name, value, needed = "norm_topk_prob", "false", "true"
    raise ConfigError(
        f"model.moe.norm_top1_prob=true has no effect with model.moe.{name}={value}: use model.moe.{name}={needed}, "
        "or model.moe.norm_top1_prob=false"
    )


def _check_capacity_schedule(moe: "MoE") -> None:
    schedule, last, most = moe.capacity_schedule, 0.0, RANGES["model.moe.capacity_factor"].most
    if not schedule:
        return
    text = f"model.moe.capacity_schedule={[list(pair) for pair in schedule]}"
    for pair in schedule:
        if (
            len(pair) != len(("step", "factor"))
            or not pair[0].is_integer()
            or pair[0] <= last
            or not 0 < pair[1] <= most
        ):
            raise ConfigError(
                f"{text} has {list(pair)}: use pairs of a step, from 1 on and growing, and a factor above 0 and up to "
                f"{most}, as in [[1000, 1.5], [5000, 1.0]]"
            )
        last = pair[0]
    if moe.capacity_factor is None or moe.gate == "softmoe":
        name, value = ("capacity_factor", "null") if moe.capacity_factor is None else ("gate", moe.gate)
        raise ConfigError(
            f"{text} changes a capacity that there is not with model.moe.{name}={value}: set another, or "
            "model.moe.capacity_schedule=[]"
        )


def _all(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _check_groups(moe: "MoE") -> None:
    groups, top = moe.n_group, moe.topk_group
    if moe.num_experts % groups:
        raise ConfigError(
            f"model.moe.num_experts={moe.num_experts} is not divisible by model.moe.n_group={groups}: "
            f"use {divisors_text(moe.num_experts)} groups"
        )
    if top > groups:
        raise ConfigError(f"model.moe.topk_group={top} must be 1..model.moe.n_group={groups}")
    size = moe.num_experts // groups
    if moe.top_k > top * size:
        raise ConfigError(
            f"model.moe.top_k={moe.top_k} experts are not in model.moe.topk_group={top} of {size} experts each: "
            f"use model.moe.topk_group={-(-moe.top_k // size)} or more, or model.moe.top_k={top * size} or less"
        )
    if moe.gate == "deepseek_v3" and top < groups and size < _OF_TWO:
        raise ConfigError(
            f"model.moe.n_group={groups} leaves one expert in each group, and gate deepseek_v3 scores a group by "
            f"two: use model.moe.n_group={moe.num_experts // _OF_TWO} or less, or model.moe.gate=deepseek_v2"
        )
