"""A step of a config on a cluster: training's schedule, simulated with the times of its tasks on that cluster.

Compute time is that of matrix products by their sizes (`plan/products.py`), plus memory traffic between them; weights
are read again for every part of a batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from moe_jax.config import Config, ModelConfig
from moe_jax.config.registry import REDUCTION_FACTS
from moe_jax.plan.attention_times import squares_seconds
from moe_jax.plan.clusters import Cluster, Device
from moe_jax.plan.collective_costs import Collective, CollectiveCosts, DeviceGroup
from moe_jax.plan.costs import order_times
from moe_jax.plan.exchange_times import ExchangeTimes
from moe_jax.plan.gradients import Sum, own_parameters, sums_of
from moe_jax.plan.launch_overhead import with_launch_overhead
from moe_jax.plan.measured import MeasuredTimes
from moe_jax.plan.param_gathers import Gathered, gathered_bytes, param_gathers
from moe_jax.plan.products import Direction, OpTimes, Product, block_products
from moe_jax.plan.rank_speeds import slowest_devices
from moe_jax.plan.resources import Owned, owned_parameters, parameters_per_device
from moe_jax.plan.simulate import Timeline, simulate
from moe_jax.plan.task_times import Linear, TaskTimes, owner_of
from moe_jax.plan.work import (
    ITEM_BYTES,
    busiest_rows,
    context_hops,
    context_width,
    exchange_bytes,
    gathered_widths,
    has_ring,
    logit_chunk,
)
from moe_jax.schedule.actions import Action, Seconds, Stream, StreamOf, is_reduction
from moe_jax.schedule.build import make_schedule, step_shape, step_streams
from moe_jax.schedule.grad_buckets import exchanges_first
from moe_jax.schedule.link_order import Priority, finish_times_s
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.shape import StepShape
from moe_jax.schedule.simulation import BackgroundSum

# Bytes that pass through memory, forward and backward; estimates of how much XLA fuses.
_TOKEN_PASSES = (16, 32)  # over a block's tokens × features: norms, residual stream, heads, MLP
_ROW_PASSES = (10, 22)  # over experts' rows × (features + hidden widths)
_LOGIT_BYTES = (12, 8)
# kernels or fusions of an op, by direction
_KERNELS: dict[str, dict[Direction, int]] = {
    "embed": {"F": 2, "B": 4},
    "attend": {"F": 30, "B": 60, "W": 8},
    "dense": {"F": 20, "B": 40, "W": 6},
    "expert": {"F": 8, "B": 16, "W": 4},
    "head": {"F": 8, "B": 8, "W": 2},
}
_ROUNDED_BYTES = (3, 6)  # per number of a row that is rounded to 8 bits: it is read and written once more
_DIRECTIONS: tuple[Direction, Direction] = ("F", "B")
_ADDED_BYTES = 12  # per gradient that is added, in float32
_NOTHING = MeasuredTimes({})


class Step:
    """Task times of one step, and its simulated timeline.

    If its model has only some blocks of a `whole` one, tasks take what they take on average over the whole one's.
    """

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        measured: MeasuredTimes = _NOTHING,
        whole: ModelConfig | None = None,
    ):
        self.config, self.mesh = config, config.mesh.sizes
        self._whole = config if whole is None else replace(config, model=whole)
        self.device, self._expert_device, self._local_experts = slowest_devices(config, cluster)
        self.interference, self.launch_overhead, self.measured = cluster.interference, cluster.launch_overhead, measured
        self.collectives = CollectiveCosts(cluster)
        self.tensor, self.context = self.mesh["tensor"], self.mesh["context"]
        self.expert_tensor = config.mesh.expert_tensor_ranks(self.mesh)  # ranks that share each expert
        self.experts = DeviceGroup(config.mesh.expert_ranks(self.mesh), self.expert_tensor)
        self.exchanges = ExchangeTimes(config, self.collectives, cluster.device)
        shards = self.mesh["data"] * self.mesh["expert"] * config.train.grad_accumulation
        self.sequences = config.train.batch_size / shards
        self.tokens = self.sequences * config.data.seq_len / (self.tensor * self.context)
        self._item = ITEM_BYTES[config.train.compute_dtype]

    @cached_property
    def exchanged_bytes(self) -> float:
        """Bytes of rows that a device has for all ranks in one dispatch or combine, if it is not split."""
        return exchange_bytes(self.config, self.tokens, self.experts.ranks, self.device.platform)

    @cached_property
    def sums(self) -> tuple[tuple[Sum, ...], ...]:
        settings = self.config.schedule
        limit = settings.bucket_cap_mb if settings.grad_reduce == "bucketed" else None
        return sums_of(self.config, self.mesh, limit)

    @cached_property
    def stream_of(self) -> StreamOf:
        inside = self.collectives.stay_inside_nodes(self.experts)
        return step_streams(self.config, self.mesh, self.device.platform, inside)

    @cached_property
    def timeline(self) -> Timeline:
        shape = step_shape(self.config, self.mesh, list(map(len, self.sums)))
        sent = [[each.sent_bytes for each in owner] for owner in self.sums]
        known = order_times(
            self.config,
            self.mesh,
            self.device.platform,
            sent,
            self.measured.compute,
            gathered_bytes(self.config, self.mesh),
        )
        schedule = make_schedule(self.config.schedule.policy, shape, known.of(shape), self.stream_of)
        times = self.task_seconds(schedule), self.stream_of, exchanges_first, self.interference
        return simulate(schedule, *times, self._in_background(schedule))

    def task_seconds(self, schedule: Schedule) -> Seconds:
        """Task durations with the launch overhead of collectives."""
        times = self.times

        def bytes_of(action: Action) -> float:
            if action.direction == "P":
                return sum(each.sent_bytes for each in self._gathers[owner_of(action)][action.op])
            if action.direction == "G":
                return self.sums[owner_of(action)][action.part].num_bytes if is_reduction(action) else 0.0
            whole = times.transfer[action.op].num_bytes
            whole *= self.tensor if action.op in ("gather", "scatter") else 1  # a block of each tensor rank
            return whole / schedule.shape.num_parts(action.direction, action.op)

        seconds = times.of(schedule.shape)
        return with_launch_overhead(schedule, seconds, self.stream_of, self.launch_overhead, bytes_of)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of the whole step and its parts.

        With gradient accumulation, only the last part sums gradients over devices before ZeRO 2.
        """
        line, accumulation = self.timeline, self.config.train.grad_accumulation
        sums = line.busy_with_s(is_reduction)
        exchange = line.busy_s[Stream.COMMUNICATION] + line.busy_s[Stream.INTRA_NODE] - sums
        each_summed = self.sums_each_part
        alone = line.exposed_s if each_summed else self._exposed_without_sums()
        compute = line.busy_s[Stream.COMPUTE]
        adding = self.adding_parts_s
        exposed = line.exposed_s + (accumulation - 1) * alone
        return {
            "step": accumulation * compute + adding + exposed,
            "compute": accumulation * compute + adding,
            "exchange": accumulation * exchange,
            "sums": accumulation * sums if each_summed else sums,
            "exposed": exposed,
        }

    @property
    def sums_each_part(self) -> bool:
        """Whether the gradients of every part of the batch are summed over devices, not only those of the last."""
        return self.config.train.grad_accumulation == 1 or self.config.optimizer.zero >= 2

    @property
    def adding_parts_s(self) -> float:
        """Seconds to add the gradients of all parts of the batch."""
        return (self.config.train.grad_accumulation - 1) * self.adding_s(self._added)

    @property
    def _added(self) -> float:
        """The number of gradients of a part that are added to those of earlier parts."""
        if self.config.optimizer.zero >= 2:
            return own_parameters(owned_parameters(self.config.model), self.config, self.mesh)
        return parameters_per_device(self.config, self.mesh)

    def adding_s(self, parameters: float) -> float:
        """Seconds to add a part's gradients to those of earlier parts: both are read, and their sum is written."""
        return _ADDED_BYTES * parameters / self.device.copied_bytes_per_s

    def _exposed_without_sums(self) -> float:
        schedule = self.timeline.schedule
        seconds = self.task_seconds(schedule)
        free = simulate(
            schedule,
            lambda task: 0.0 if is_reduction(task) else seconds(task),
            self.stream_of,
            interference=self.interference,
        )
        return free.exposed_s

    def _in_background(self, schedule: Schedule) -> dict[Action, BackgroundSum]:
        """The sums that the host's threads run (`parallel/reductions/background.py`)."""
        if not REDUCTION_FACTS.of(self.config.exchange.reduction).in_background:
            return {}
        sums = [(task, self.sums[owner_of(task)][task.part]) for task in filter(is_reduction, schedule.actions)]
        passed_on_s = self.collectives.passed_on_s
        return {task: BackgroundSum(passed_on_s(own.sent_bytes, own.group), own.parts == 1) for task, own in sums}

    @cached_property
    def times(self) -> TaskTimes:
        """Costs of all tasks. Amounts of compute and sums are seconds, those of exchanges bytes."""
        return TaskTimes(
            compute={**self.compute(), **self.measured.compute},
            transfer=self.exchanges.transfers(self.exchanged_bytes),
            reduce=Linear(0.0, 1.0),
            reduction_bytes=self.sums_s,
            gather_bytes=self.gathers_s,
        )

    @cached_property
    def sums_s(self) -> tuple[tuple[float, ...], ...]:
        """Seconds of each reduction, by owner and bucket."""
        owners = owned_parameters(self.config.model)
        sums = dict(zip(owners, self.sums, strict=True))  # those of equal blocks are equal
        seconds = {each: each.seconds(self.collectives) for each in {each for some in sums.values() for each in some}}
        found = {owned: tuple(seconds[each] for each in some) for owned, some in sums.items()}
        return tuple(found[owned] for owned in owners)

    @cached_property
    def gathers_s(self) -> tuple[dict[str, float], ...]:
        """Seconds of each gather of parameters, by owner and op; () if parameters are not sharded."""
        owners = owned_parameters(self.config.model)
        found = {
            owned: {op: sum(each.seconds(self.collectives) for each in gathers) for op, gathers in ops.items()}
            for owned, ops in dict(zip(owners, self._gathers, strict=False)).items()
        }
        return tuple(found[owned] for owned in owners) if found else ()

    @cached_property
    def _gathers(self) -> tuple[dict[str, tuple[Gathered, ...]], ...]:
        return param_gathers(self.config, self.mesh) if self.config.param_gather != "none" else ()

    def squares_s(self, direction: Direction = "F") -> float:
        """Seconds of attention between its projections, in one block, on average over blocks of several kinds."""
        return squares_seconds(self._whole, self.device, self.tokens, direction)

    def algorithm(self, shape: StepShape) -> str:
        """The algorithm of the exchanges of one microbatch."""
        return self.exchanges.choice(self.exchanged_bytes / shape.num_parts("F", "dispatch")).algorithm

    def compute(self) -> Mapping[str, OpTimes]:
        """Estimates of the compute stages."""
        model = self._whole.model
        owned = owned_parameters(model)
        of_kind = dict(zip(model.block_kinds[: model.num_layers], owned[1:], strict=False))
        blocks = {kind: self._block(kind, part) for kind, part in of_kind.items()}
        any_block = next(iter(blocks.values()))  # for the kind that the model lacks
        return {
            "embed": self._op("embed", Owned(), [self._stream_bytes, 2 * self._stream_bytes]),
            "attend": blocks.get("moe", any_block),
            "dense": blocks.get("dense", any_block),
            "expert": self._expert(of_kind.get("moe", Owned())),
            "head": self._head(owned[-1]),
        }

    def _block(self, kind: str, owned: Owned) -> OpTimes:
        """The times of a block but for its experts."""
        full, gathered_s = self.config.schedule.remat == "full", self._gathered(self._whole.model, kind)
        found = self._op(
            "attend" if kind == "moe" else "dense",
            owned._replace(expert=0, expert_whole=0),
            [each * self._stream_bytes for each in _TOKEN_PASSES],
            [attention_s + gathered_s for attention_s in self._attention_s],
        )
        return self._recomputing(found, full, 0.0 if full else gathered_s)

    def _expert(self, owned: Owned) -> OpTimes:
        """The times of a rank's experts: the busiest one, if ranks have different numbers of them."""
        model = self._whole.model
        share = self._local_experts * self.experts.ranks / max(model.moe.num_experts, 1)  # 1: as many as other ranks
        rows = busiest_rows(self.config, self.tokens, self.device.platform)
        numbers = share * rows * (model.hidden_size + 2 * model.moe.intermediate_size)
        moved = [each * self._item * numbers / 3 for each in _ROW_PASSES]
        if model.moe.expert_matmuls == "fp8":
            moved = [each + rounded * numbers for each, rounded in zip(moved, _ROUNDED_BYTES, strict=True)]
        # remat of whole periods repeats their exchanges in the backward pass, where nothing overlaps with them
        again = self.config.schedule.remat in ("dots", "full") and self.config.step_facts.remat_unit == "period"
        exchanged_s = 2 * self.exchanges.seconds(self.exchanged_bytes) if again else 0.0
        copied_s, summed_s = self.exchanges.copies_s if self.config.step_kind == "plain" else (0.0, 0.0)
        weights = Owned(expert=round(share * owned.expert))
        return self._recomputing(self._op("expert", weights, moved, (copied_s, exchanged_s + summed_s)), True, 0.0)

    def _head(self, owned: Owned) -> OpTimes:
        """The times of the head, with what else multi-token prediction needs."""
        model = self._whole.model
        heads = 1 + model.num_nextn_predict_layers
        found = self._op("head", owned, [each * self.tokens * model.vocab_size * heads for each in _LOGIT_BYTES])
        # with chunks of logits, gradients are the forward pass's (models/head.py)
        return replace(found, at_once=logit_chunk(self.config, self.tokens) is not None)

    def _op(self, name: str, owned: Owned, moved: Sequence[float], waited_s: Sequence[float] = (0.0, 0.0)) -> OpTimes:
        """The times of an op with `moved` bytes of memory traffic and `waited_s`, forward and backward."""
        device = self._expert_device if name == "expert" else self.device
        forward, backward = (
            num_bytes / device.copied_bytes_per_s + seconds for num_bytes, seconds in zip(moved, waited_s, strict=True)
        )
        return OpTimes(
            device=device,
            products=self._products[name],
            weights_s=self._weights(owned, device),
            kernels=_KERNELS[name],
            whole_s={"F": forward, "B": backward},
        )

    @cached_property
    def _products(self) -> Mapping[str, tuple[Product, ...]]:
        ranks, platform = self.experts.ranks, self.device.platform
        return block_products(self._whole, self.tokens, self.tensor, ranks, platform, self._local_experts)

    @property
    def _stream_bytes(self) -> float:
        """Bytes of a device's residual stream."""
        return self._item * self.tokens * self._whole.model.hidden_size

    @cached_property
    def _attention_s(self) -> tuple[float, ...]:
        """Seconds of a block's attention between its projections, and that it waits, forward and backward."""
        waited = self._from_others(self._whole.model)
        return tuple(self.squares_s(each) + waited_s for each, waited_s in zip(_DIRECTIONS, waited, strict=True))

    def _recomputing(self, times: OpTimes, products: bool, kept_s: float) -> OpTimes:
        """The op with what `schedule.remat` recomputes in the backward pass: with or without its products, and all of
        its other time but `kept_s`.
        """
        if self.config.schedule.remat in ("none", "chunk"):
            return times
        whole_s: dict[Direction, float] = {
            "F": times.whole_s["F"],
            "B": times.whole_s["B"] + times.whole_s["F"] - kept_s,
        }
        return replace(times, recomputes=products, whole_s=whole_s)

    def _weights(self, owned: Owned, device: Device) -> float:
        """Seconds in which a device reads an owner's own weights once."""
        own = owned.whole + owned.heads_and_hidden / self.tensor
        own += owned.expert / (self.expert_tensor * self.experts.ranks)
        return own * self._item / device.copied_bytes_per_s

    def _gathered(self, model: ModelConfig, kind: str) -> float:
        """Seconds in which tensor ranks gather the tokens of attention and MLP, and reduce-scatter their outputs."""
        group, seconds = DeviceGroup(self.tensor, 1), 0.0
        for width in gathered_widths(model, kind):
            gathered, summed = (
                (self.tensor - 1) * self.tokens * each * self._item for each in (width, model.hidden_size)
            )
            seconds += self.collectives.ring(gathered, group) + self.collectives.ring(summed, group, "reduce_scatter")
        return seconds

    def _from_others(self, model: ModelConfig) -> tuple[float, float]:
        """Seconds in which attention waits for keys and values of other context ranks, forward and backward.

        Hops of a ring overlap with attention's products; in the backward pass, gradients in float32 follow them. If the
        batch is split, exchanges of its other microbatches go first if they need the same links. Gathers come before
        attention, and gathered gradients are summed after it.
        """
        width = context_width(model, self.tensor)
        group = DeviceGroup(self.context, self.mesh["expert"] * self.tensor)
        leaving = context_hops(self._whole) * self.tokens * width
        if not has_ring(self.config):
            gathers: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
            forward, backward = (self.collectives.ring(leaving * self._item, group, each) for each in gathers)
            return forward, backward
        sizes = (self._item, ITEM_BYTES["float32"])
        once, sums = (self.collectives.ring(leaving * size, group, "permute") for size in sizes)
        squares_s, before_s = self.squares_s(), self._exchanges_during_attention_s(group)

        def waited_s(hops_s: float, products_s: float) -> float:
            wanted_s = {Priority.EXPERT: before_s, Priority.CONTEXT: hops_s}
            return min(max(finish_times_s(wanted_s)[Priority.CONTEXT] - products_s, 0.0), hops_s)

        return waited_s(once, squares_s), waited_s(once + sums, self.squares_s("B"))

    def _exchanges_during_attention_s(self, ring: DeviceGroup) -> float:
        """Seconds of a block's exchanges that overlap with its attention and need the links of the ring."""
        settings = self.config.schedule
        if not settings.cuts_batch or not self.collectives.share_links(ring, self.experts):
            return 0.0
        parts = settings.microbatches
        # exchanges of all microbatches but the one in attention
        return 2 * (parts - 1) * self.exchanges.seconds(self.exchanged_bytes / parts)
