"""Rules for gates and for the settings that only some gates read."""

import dataclasses
import functools
import math

from moe_jax.config.registry import DISPATCHER_FACTS, GATE_FACTS
from moe_jax.config.sections import MoEConfig
from moe_jax.config.validate.ranges import RANGES, check_changes
from moe_jax.errors import ConfigError, all_of, divisors_text

_SMALL = {1: "one expert", 2: "two"}  # numbers of experts, in words


def check_gate(moe: MoEConfig) -> None:
    """Raise ConfigError if the gate does not work with the capacity or dispatcher, or does not read a setting."""
    for field in dataclasses.fields(moe):
        name, value, unset = field.name, getattr(moe, field.name), field.default
        gates = _gates_reading(name)
        if gates and value != unset and moe.gate not in gates:
            raise ConfigError(
                f"model.moe.{name}={value} is of gate {all_of(gates)}, and model.moe.gate={moe.gate}: "
                f"set model.moe.gate={gates[-1]}, or model.moe.{name}={'null' if unset is None else unset}"
            )
    if moe.gate_facts.group_scorers is not None:
        _check_groups(moe, moe.gate_facts.group_scorers)
    if moe.norm_top1_prob:
        _check_normalize_top_1(moe)
    _check_capacity_schedule(moe)
    facts = moe.gate_facts
    if not facts.splits and not DISPATCHER_FACTS.of(moe.dispatcher).sorts_rows:
        raise ConfigError(
            f"model.moe.gate={moe.gate} fills slots in an order of its own, and model.moe.dispatcher="
            f"{moe.dispatcher} has another: use model.moe.dispatcher=sort"
        )
    if moe.load_balancing_type == "sequence" and facts.fills_slots:
        raise ConfigError(
            f"model.moe.gate={moe.gate} fills all slots alike, and model.moe.load_balancing_type=sequence balances "
            "what each sequence chose: use model.moe.load_balancing_type=batch, or another gate"
        )
    if moe.capacity_factor is None and not facts.splits and not facts.mixes:
        raise ConfigError(
            f"model.moe.gate={moe.gate} chooses who gets one of few slots, and model.moe.capacity_factor=null limits "
            "none: set model.moe.capacity_factor, or another gate"
        )


@functools.cache
def _gates_reading(name: str) -> tuple[str, ...]:
    """Return the gates that read a setting which not all gates read."""
    return tuple(gate for gate, facts in GATE_FACTS.items() if name in facts.settings)


def _check_normalize_top_1(moe: MoEConfig) -> None:
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


def _check_capacity_schedule(moe: MoEConfig) -> None:
    schedule, name = moe.capacity_schedule, "model.moe.capacity_schedule"
    if not schedule:
        return
    allowed = RANGES["model.moe.capacity_factor"]
    check_changes(name, schedule, allowed, "a factor", [[1000, 1.5], [5000, 1.0]])
    text = f"{name}={[list(pair) for pair in schedule]}"
    if moe.capacity_factor is None or moe.gate_facts.mixes:
        name, value = ("capacity_factor", "null") if moe.capacity_factor is None else ("gate", moe.gate)
        raise ConfigError(
            f"{text} changes a capacity that there is not with model.moe.{name}={value}: set another, or "
            "model.moe.capacity_schedule=[]"
        )


def _check_groups(moe: MoEConfig, scorers: int) -> None:
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
    if top < groups and size < scorers:
        fewest = min(GATE_FACTS, key=lambda gate: GATE_FACTS[gate].group_scorers or math.inf)
        raise ConfigError(
            f"model.moe.n_group={groups} leaves {_SMALL.get(size, f'{size} experts')} in each group, and gate "
            f"{moe.gate} scores a group by {_SMALL.get(scorers, scorers)}: use "
            f"model.moe.n_group={moe.num_experts // scorers} or less, or model.moe.gate={fewest}"
        )
