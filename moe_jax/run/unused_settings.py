"""Settings without effect, which are reported: of a run by its config, and of a reader of a run by its command line."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moe_jax.config import Config
from moe_jax.distributed.processes import OLDER_EMITTERS
from moe_jax.errors import all_of

# Settings, or beginnings of their names, that a reader reads or compares with the run's.
_MODEL = ("model.", "mesh.", "data.", "schedule.pipeline", "schedule.virtual_stages", "schedule.head_blocks")
_PARAMETERS = ("optimizer.ema_decay", "train.compute_dtype", "train.init_from", "train.seed")
GENERATION = (*_MODEL, *_PARAMETERS)
_STEP = ("schedule.", "exchange.", "optimizer.zero", "train.attention_kernel", "train.grouped_product")
_BATCH = ("train.batch_size", "train.eval_batches", "train.grad_accumulation", "train.loss_chunk")
EVALUATION = (*GENERATION, *_STEP, *_BATCH)


def unread_text(overrides: Sequence[str], read: Sequence[str], reader: str) -> str:
    """Return a line with the settings of overrides that are not among those `read`; empty without any."""
    names = dict.fromkeys(each.partition("=")[0] for each in overrides)
    unread = [name for name in names if not name.startswith(tuple(read))]
    if not unread:
        return ""
    return f"unused: {', '.join(unread)}, as {reader} does not read {'it' if len(unread) == 1 else 'them'}"


def unused(config: Config, sizes: Mapping[str, int]) -> dict[str, str]:
    """Settings without effect in this run, on a mesh of these sizes. They are valid, as other runs may use them."""
    notes = [
        *(f"{all_of(names)}, as {reason}" for names, reason in _groups(config, sizes) if names),
        *_of_steps(config),
    ]
    return {"unused": "; ".join(notes)} if notes else {}


def _groups(config: Config, sizes: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings that differ from their defaults, and why none of them has an effect."""
    moe, schedule, exchange = config.model.moe, config.schedule, config.exchange
    if not config.step_facts.orders_tasks:
        rates = ("device_tflops", "link_gb_per_s", "network_gb_per_s", "task_times")
        yield _given("schedule", schedule, *rates), f"schedule.policy={schedule.policy} orders nothing"
    if config.step_facts.has_ticks:
        yield _given("schedule", schedule, "unroll"), "the blocks of pipelined steps are always unrolled"
    if moe.num_experts == 0:
        others = (each.name for each in dataclasses.fields(moe) if each.name != "num_experts")
        of_experts = ("algorithm", "ranks_per_node", "tensor_form", "tensor_chunks", "rank_capacity_factor")
        names = (*_given("model.moe", moe, *others), *_given("exchange", exchange, *of_experts))
        yield names, "model.moe.num_experts=0"
    else:
        if sizes["tensor"] == 1 or config.mesh.experts_over_tensor:
            yield _given("exchange", exchange, "tensor_form", "tensor_chunks"), "no tensor ranks share an expert"
        elif exchange.tensor_form not in ("sharded_chunked", "sharded_overlapped"):
            yield _given("exchange", exchange, "tensor_chunks"), f"exchange.tensor_form={exchange.tensor_form}"
        if moe.capacity_factor is not None:
            reason = f"model.moe.capacity_factor={moe.capacity_factor:g}"
            yield _given("exchange", exchange, "rank_capacity_factor"), reason
    if sizes["context"] == 1:
        yield _given("exchange", exchange, "context_form"), "the mesh has one rank along context"
    zero, axes = config.optimizer.zero, config.optimizer.sharding_axes
    if zero and all(sizes[axis] == 1 for axis in axes):
        yield (f"optimizer.zero={zero}",), f"the mesh has one rank along {all_of(axes)}"
    if not config.migration.enabled:
        yield _given("migration", config.migration), "migration.enabled=false"
    if not config.tune.over:
        yield _given("tune", config.tune), "tune.over=[]"
    if config.train.quick_compile and not (config.mesh.cpu_devices and OLDER_EMITTERS):
        yield ("train.quick_compile",), "it needs mesh.cpu_devices and jax below 0.11"


def _given(section: str, values: Any, *names: str) -> tuple[str, ...]:
    """The settings of a section, or those with these names, that differ from their defaults."""
    fields = [each for each in dataclasses.fields(values) if not names or each.name in names]
    return tuple(f"{section}.{each.name}" for each in fields if getattr(values, each.name) != _default(each))


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _of_steps(config: Config) -> Iterator[str]:
    """What no step of the run reaches."""
    warmup, steps = config.optimizer.warmup_steps, config.train.steps
    if warmup >= steps:
        yield f"the full optimizer.learning_rate, as optimizer.warmup_steps={warmup} leaves none of train.steps={steps}"
    if any(step > steps for step, _ in config.model.moe.capacity_schedule):
        yield f"entries of model.moe.capacity_schedule after train.steps={steps}"
    if any(step > steps for step, _ in config.train.mtp_loss_schedule):
        yield f"entries of train.mtp_loss_schedule after train.steps={steps}"
    late = [each.label for each in config.data.sources if any(step > steps for step, _ in each.weight_schedule)]
    if late:
        yield f"weights of data.sources ({', '.join(late)}) that change after train.steps={steps}"
