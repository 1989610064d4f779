"""Plans as text: a table with the best plan first, and why the others are slower."""

from collections.abc import Sequence

from moe_jax.plan.candidates import place
from moe_jax.plan.clusters.tpu import CORES
from moe_jax.plan.forward import best_ranges
from moe_jax.plan.links_text import links_text
from moe_jax.plan.planner import Plans
from moe_jax.plan.rank_capacity import has_buffers, prices
from moe_jax.plan.search import Candidate
from moe_jax.plan.speeds_text import speeds_text
from moe_jax.plan.traffic import traffic
from moe_jax.plan.units import amount, seconds, size

_COLUMNS = (
    "mesh",
    "step",
    "MFU",
    "tokens/s",
    "memory",
    "exposed",
    "schedule",
    "exchange",
    "bottleneck",
    "why not first",
)
_SHOWN = 8
_WORTH_PRINTING = 0.99  # of the planned forward pass: ranges that save less are not printed
_KWH_PER_BILLION = 1e9 / 3.6e6  # kilowatt hours of a billion tokens, for each joule of a token


def plan_text(plans: Plans) -> str:
    """The table of plans, the refused meshes, and the facts of the best plan."""
    return "\n\n".join([table(plans), *([refusals(plans)] if plans.refused else []), facts(plans)])


def table(plans: Plans) -> str:
    """The fastest candidate on each mesh. ≤ marks meshes on which only a few candidates were tried."""
    best = plans.best
    rows = [_COLUMNS, *(_row(each, best) for each in plans.ranked[:_SHOWN])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    left = max(len(plans.ranked) - _SHOWN, 0) + plans.slower
    return "\n".join([*lines, *([f"{left} more meshes are slower"] if left > 0 else [])])


def refusals(plans: Plans, most: int = 4) -> str:
    """Invalid and infeasible meshes with the reason."""
    lines = [f"refused: {each.mesh}: {each.reason}" for each in plans.refused[:most]]
    left = len(plans.refused) - most
    return "\n".join([*lines, *([f"refused: {left} more meshes"] if left > 0 else [])])


def facts(plans: Plans) -> str:
    """The costs of the best plan."""
    found, busy, memory = plans.best.estimate, plans.best.estimate.busy, plans.best.memory
    device = plans.cluster.device
    parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in memory.parts.items() if num_bytes > 0)
    lines = [
        f"cluster     {plans.cluster.devices} × {device.name}, {' and '.join(_links(plans))}{_chips(plans)}",
        f"step        {seconds(found.step_s)} for {found.tokens:,} tokens: compute {seconds(busy.compute)}, exchanges "
        f"{seconds(busy.exchange)}, sums of gradients {seconds(busy.sums)}, optimizer {seconds(busy.update)}; "
        f"{seconds(busy.exposed)} of communication exposed"
        + (f", {seconds(busy.idle)} idle, waiting for other stages" if plans.config.mesh.pipeline > 1 else ""),
        f"traffic     leaves each device in a step: {_traffic(plans)}",
        *_ranges(plans.best),
        *_placement(plans),
        *(f"speeds      {text}" for text in filter(None, [speeds_text(plans.config, plans.cluster)])),
        *(f"links       {text}" for text in filter(None, [links_text(plans.config, plans.cluster)])),
        *_buffers(plans),
        f"memory      {size(memory.total)} per device at its peak, {memory.moment}: {parts}"
        + (f"; {memory.host_text}" if memory.host_text else "")
        + ("; what devices have is not known" if device.memory_bytes is None else ""),
    ]
    if found.joules_per_token is not None:
        kwh = found.joules_per_token * _KWH_PER_BILLION
        lines.append(
            f"energy      {found.joules_per_token:.3g} J per token, {amount(kwh)} kWh per billion tokens, if each "
            f"device draws the {device.watts:g} W of its data sheet"
        )
    if found.dollars_per_billion_tokens is not None:
        lines.append(
            f"cost        {amount(found.dollars_per_billion_tokens)} $ per billion tokens, at "
            f"{device.dollars_per_hour:g} $ for an hour of a device (--dollars-per-hour; presets assume prices of 2025)"
        )
    return "\n".join(lines)


def _buffers(plans: Plans) -> list[str]:
    """What smaller buffers of expert ranks would save; the memory of the plan itself is on its own line."""
    if not has_buffers(plans.config):
        return []
    factor, load = plans.config.exchange.rank_capacity_factor, plans.config.plan.load_factor
    name = f"exchange.rank_capacity_factor={'null' if factor is None else f'{factor:g}'}"
    sent = "rows for the worst case are sent" if factor is None else f"{factor:g} times the rows that exist are sent"
    known = f", for a load of {load:g}" if load > 1 else ""
    others = [
        f"{each.factor:g}: {seconds(each.step_s)} and {size(each.memory_bytes)}" for each in prices(plans.best.estimate)
    ]
    cheaper = f". This mesh with {'; '.join(others)}; others may be faster then" if others else ""
    return [f"buffers     {name}: {sent}{known}{cheaper}. Rows beyond a buffer are dropped"]


def _placement(plans: Plans) -> list[str]:
    """Whether experts are sharded over context ranks, too, and whether MoNTA's rule agrees."""
    mesh = plans.config.mesh
    if mesh.context == 1 or not plans.config.model.moe.num_experts:
        return []
    rule = place(mesh.context, mesh.expert, mesh.tensor, plans.cluster.node_devices)
    ranks = "context and expert ranks" if mesh.experts_over_context else "expert ranks alone"
    agrees = "as" if rule.shared == mesh.experts_over_context else "not as"
    return [f"context     experts are cut over {ranks}, {agrees} MoNTA's rule has it: {rule.reason}"]


def _traffic(plans: Plans) -> str:
    sent = traffic(plans.config, plans.cluster)
    return ", ".join(f"{axis} {size(num_bytes)}" for axis, num_bytes in sent.items()) or "nothing"


def _ranges(best: Candidate) -> list[str]:
    """The ranges of the forward pass that would be worth splitting, if they are faster than the plan's schedule.

    Training splits the same ops in every block, so these ranges are a bound for it, not a plan.
    """
    if not best.config.schedule.pipeline_facts.needs_stages:  # its forward pass overlaps with a backward pass
        return []
    found = best_ranges(best.estimate)
    cut = [f"{first} to {last} in {parts} parts ({count} ×)" for (first, last, parts), count in found.cut.items()]
    if not cut or found.best.seconds >= _WORTH_PRINTING * found.scheduled_s:
        return []
    blocks = len(best.estimate.timeline.schedule.shape.kinds)
    scheduled, uncut, fastest = (
        seconds(whole / blocks) for whole in (found.scheduled_s, found.uncut_s, found.best.seconds)
    )
    return [
        f"ranges      not trained: a block's forward pass takes {scheduled} as planned, {uncut} uncut, and would take "
        f"{fastest} if each range of ops had its own number of parts: {', '.join(cut)}"
    ]


def _chips(plans: Plans) -> str:
    """Google's name of a slice, where it counts cores and not devices."""
    levels, cores = plans.cluster.levels, CORES.get(plans.cluster.device.name, 1)
    if cores == 1:
        return ""
    name = plans.cluster.device.name.removeprefix("TPU ")
    return (
        f"; devices are chips, so a slice is a {name}-{cores * levels[0].devices} in Google's names, which count cores"
    )


def _links(plans: Plans) -> Sequence[str]:
    return [f"{level.name} between {level.devices}" for level in plans.cluster.levels]


def _row(candidate: Candidate, best: Candidate) -> tuple[str, ...]:
    found = candidate.estimate
    share = found.busy.exposed / max(found.busy.exchange + found.busy.sums, 1e-12)
    return (
        candidate.mesh,
        f"{'' if candidate.refined else '≤ '}{seconds(found.step_s)}",
        f"{found.mfu:.1%}",
        f"{found.tokens_per_s:,.0f}",
        size(candidate.memory.total),
        f"{share:.0%}",
        _schedule(candidate),
        _exchange(candidate),
        candidate.bottleneck,
        "" if candidate is best else _why_not(candidate, best),
    )


def _schedule(candidate: Candidate) -> str:
    settings, parts = candidate.config.schedule, candidate.config.train.grad_accumulation
    degrees = str(settings.microbatches)
    if settings.backward_microbatches not in (None, settings.microbatches):
        degrees += f"/{settings.backward_microbatches}"
    if settings.expert_chunks > 1:
        degrees += f" × {settings.expert_chunks}"
    words = [settings.policy + (f" {degrees}" if settings.policy_facts.cuts else "")]
    if candidate.config.step_facts.has_ticks:
        words.append(settings.pipeline + (f" × {settings.virtual_stages}" if settings.virtual_stages > 1 else ""))
        head = settings.head_blocks
        words += [f"head as {head} block{'s' if head > 1 else ''}"] if head else []
    words += [f"chunks {settings.bucket_cap_mb:g} MB"] if settings.bucket_cap_mb else []
    words += [f"remat {settings.remat}"] if settings.remat != "none" else []
    words += [f"batch in {parts}"] if parts > 1 else []
    if stage := candidate.config.optimizer.zero:
        axes = candidate.config.optimizer.zero_axes
        words.append(f"ZeRO {stage}" + (f" over {' × '.join(axes)}" if axes else ""))
    return ", ".join(words)


def _exchange(candidate: Candidate) -> str:
    settings, mesh = candidate.config.exchange, candidate.config.mesh
    words = [candidate.estimate.algorithm if mesh.expert_ranks(mesh.sizes) > 1 else "none"]
    if mesh.expert_tensor_ranks(mesh.sizes) > 1:
        words.append(
            settings.tensor_form
            + (
                f" in {settings.tensor_chunks}"
                if settings.tensor_form in ("sharded_chunked", "sharded_overlapped")
                else ""
            )
        )
    return ", ".join(words)


def _why_not(candidate: Candidate, best: Candidate) -> str:
    """The cost in which a candidate is worst compared with the best one."""
    own, other = candidate.estimate.busy, best.estimate.busy
    more = {
        "compute": own.compute - other.compute,
        "exposed communication": own.exposed - other.exposed,
        "optimizer": own.update - other.update,
        "idle, waiting for other stages": own.idle - other.idle,
    }
    name = max(more, key=lambda each: more[each])
    ratio = candidate.estimate.step_s / best.estimate.step_s
    if ratio < 1.005:
        return "as fast"
    return f"{ratio:.2f} ×: {seconds(more[name])} more {name}"
