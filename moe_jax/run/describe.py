"""Summary of a run as text, printed at its start, or by a dry run instead of it."""

import dataclasses

import jax

from moe_jax.checkpoint.replicas.plan import safety_text
from moe_jax.config import AttentionView, Config
from moe_jax.config.attention_kernels import unfused_reason
from moe_jax.config.layer_layout import Stages
from moe_jax.convert.hf_config import FILE
from moe_jax.convert.source import left_out
from moe_jax.files.local_copy import local_path
from moe_jax.measure.peak import matrix_flops_per_s
from moe_jax.measure.temporaries import Temporaries, compile_and_measure
from moe_jax.measure.trace import FOLDER
from moe_jax.models.transformer import ComputeConfig, capability_of
from moe_jax.parallel.mesh import Axis
from moe_jax.plan.activation_memory import fuses_if_unrolled, longest_loop
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.memory import step_memory
from moe_jax.plan.memory_parts import StepMemory
from moe_jax.plan.rank_speeds import first_counts
from moe_jax.plan.resources import count_parameters, train_flops_per_token
from moe_jax.plan.units import size
from moe_jax.run.memory_check import predicted_memory
from moe_jax.run.profiler import steps_to_trace
from moe_jax.run.setup import Run, open_run
from moe_jax.run.unused_settings import unused
from moe_jax.schedule.pipelines.bubble import lock_step_bubble
from moe_jax.schedule.pipelines.memory import in_flight
from moe_jax.schedule.pipelines.table import Table
from moe_jax.step.compile import step_program
from moe_jax.telemetry.run_log import human_seconds


def describe(run: Run) -> dict[str, str]:
    """The devices, mesh, model and data of a run, as rows of a table."""
    config, shape = run.config, run.trainer.mesh.shape
    counts = count_parameters(config.model)
    tokens = config.train.batch_size * config.data.seq_len
    table = run.trainer.table
    return (
        {
            "run": f"{run.folder}, from step {run.first_step} to {config.train.steps}",
            "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}, {jax.process_count()} process(es)",
            "mesh": " × ".join(f"{axis}={ranks}" for axis, ranks in shape.items()),
            "blocks": blocks_text(config),
            "parameters": f"{counts.total:,} ({counts.active:,} active per token)",
            "memory": _memory(predicted_memory(run)),
            "tokens": f"{tokens * config.train.steps:,}, {tokens:,} in each step",
            "schedule": f"{config.schedule.policy}, {config.schedule.microbatches} microbatch(es)",
        }
        | ({"sources": sources_text(run)} if config.data.sources else {})
        | _initial(run)
        | attention_text(config, run.trainer.mesh)
        | loop_text(config, run.trainer.mesh)
        | router_text(config)
        | shares_text(config, run.cluster)
        | unused(config, shape)
        | ({"pipeline": pipeline_text(table)} if table else {})
        | _tuning(run)
        | _trace(run)
        | ({"safety copies": safety_text(run.config, run.safety)} if run.safety else {})
    )


def sources_text(run: Run) -> str:
    """The sources of a mixture: their shares of all steps, and how often each is read."""
    counts = run.mixture.counts(run.config.train.steps)
    sources = zip(run.config.data.sources, run.sources, counts, strict=True)
    return ", ".join(
        f"{source.label} {count / sum(counts):.1%} ({count / len(samples):.3g} epochs)"
        for source, samples, count in sources
    )


def dry_run(config: Config) -> dict[str, str]:
    """`describe`, plus the temporary memory of the step, which is compiled, and a rough time. Raises UserError."""
    run = open_run(config)
    program = step_program(run.trainer, run.batch_shape, run.target)
    _, temporaries = compile_and_measure(program.compile, jax.default_backend())
    tokens = config.train.batch_size * config.data.seq_len
    flops = tokens * train_flops_per_token(config.model, config.data.seq_len)
    rate = matrix_flops_per_s(config.train.compute_dtype)
    return describe(run) | {
        "temporaries": temporaries_text(temporaries),
        "step time": f"about {human_seconds(flops / rate)}, if all were as fast as one large matrix product was here: "
        f"{flops:.3g} FLOP at {rate:.3g} FLOP/s",
    }


def temporaries_text(temporaries: Temporaries) -> str:
    """The temporary memory of the compiled step."""
    most, why = ("at most ", ", which counts gaps twice") if temporaries.is_upper_bound else ("", "")
    return f"{most}{size(temporaries.num_bytes)} per device, as compiled{why}"


def shares_text(config: Config, cluster: Cluster | None) -> dict[str, str]:
    """How many experts each rank holds before any load is known, if ranks have different speeds.

    `cluster` is the one by which migration is priced.
    """
    if config.rank_speeds is not None:
        counts = ", ".join(map(str, first_counts(config, config.rank_speeds)))
        return {"experts": f"{counts} of a block on the expert ranks at first, by migration.rank_speeds"}
    if config.migration.rank_speeds is None and cluster is not None and cluster.speeds:
        return {
            "experts": f"equally many on all ranks, although devices of plan.cluster={config.plan.cluster} have "
            "different speeds: python -m moe_jax.plan gives migration.rank_speeds"
        }
    return {}


def loop_text(config: Config, mesh: jax.sharding.Mesh) -> dict[str, str]:
    """What a step without a loop over blocks would take, where that is less: plain steps on GPUs."""
    platform, iterations = ComputeConfig.of(config, mesh).platform, longest_loop(config)
    is_plain = not config.step_facts.orders_tasks
    if not (is_plain and fuses_if_unrolled(config, platform)) or config.schedule.unroll >= iterations:
        return {}
    schedule = dataclasses.replace(config.schedule, unroll=iterations)
    unrolled = step_memory(dataclasses.replace(config, schedule=schedule), platform, mesh.shape)
    return {
        "loop": f"over the blocks; with schedule.unroll={iterations} a step takes about {size(unrolled.total)} per "
        "device, moves fewer bytes, and compiles longer (docs/memory.md)"
    }


def attention_text(config: Config, mesh: jax.sharding.Mesh) -> dict[str, str]:
    """The kernel or context form that computes attention, and why it is not the fused kernel of these devices."""
    compute = ComputeConfig.of(config, mesh)
    reason = unfused_reason(config, compute.platform, capability_of(mesh.devices.flat[0]))
    impl = compute.attention
    name = f"{impl.context_form} over context ranks" if mesh.shape[Axis.CONTEXT] > 1 else impl.kernel
    return {"attention": f"{name}, because {reason}"} if reason else {}


def blocks_text(config: Config) -> str:
    """The kinds of the blocks, and how many blocks each pipeline stage has."""
    stages, model = Stages.of(config), config.model
    kinds = [_kind_text(kind, view) for kind, view in zip(model.block_kinds, model.views, strict=True)]
    text = " ".join(kinds[: config.model.num_layers])
    if config.model.has_mtp:
        text += f", and {kinds[-1]} for multi-token prediction"
    counts = [0] * stages.stages
    for group, blocks in enumerate(stages.groups):
        counts[group % stages.stages] += len(blocks)
    if len(counts) == 1:
        return text
    of_stages = " + ".join(map(str, counts)) + (" + 1 with the head" if config.model.has_mtp else "")
    return f"{text} ({of_stages} on the stages)"


def _kind_text(kind: str, view: AttentionView) -> str:
    if not view.has_mlp:
        return view.recurrent or "attention"
    return f"{view.recurrent}+{kind}" if view.is_recurrent else kind


def router_text(config: Config) -> dict[str, str]:
    """A note on a router that does not choose experts, or that the loss does not train."""
    moe = config.model.moe
    if moe.num_experts and moe.gate_facts.for_timing_only:
        return {
            "router": f"model.moe.gate={moe.gate} chooses experts whatever the tokens: for measuring speed, not for a "
            "model"
        }
    if moe.num_experts == 0 or moe.top_k > 1 or not (moe.norm_top1_prob or moe.gate_facts.sums_to_1):
        return {}
    return {
        "router": "each token's one expert has weight 1, so the loss gives the router no gradient: only "
        "model.moe.aux_loss_coeff and model.moe.z_loss_coeff train it"
    }


def pipeline_text(table: Table) -> str:
    """The schedule of a pipeline, its activations and idle time; with a hint if there are too few microbatches."""
    idle = lock_step_bubble(table, forward_s=1, backward_s=1, weight_s=1)
    chunks = f" × {table.chunks} chunks" if table.chunks > 1 else ""
    text = (
        f"{table.name}, {table.stages} stages{chunks}, {table.microbatches} microbatches; at once the stages keep "
        f"activations of {', '.join(map(str, in_flight(table)))}; idle {idle:.0%} of the time, if backward takes two "
        f"forward passes and stages wait for each other after each of {len(table.ticks)} ticks"
    )
    if table.microbatches < table.stages:
        text += f" (fewer microbatches than stages: train.grad_accumulation={table.stages} or more idles less)"
    return text


def _initial(run: Run) -> dict[str, str]:
    """A note on what the model of `train.init_from` has, and the run's does not."""
    start = run.config.train.init_from
    folder = None if start is None or run.first_step else local_path(start)
    if folder is None or not (folder / FILE).exists():
        return {}
    message = left_out(folder, run.config.model)
    return {} if message is None else {"train.init_from": message}


def _memory(memory: StepMemory) -> str:
    """The predicted memory of a step per device, in total and by its largest parts."""
    parts = {"state": memory.state, "stored activations": memory.activations, "gradients": memory.gradients}
    parts |= {"gathered parameters": memory.gathered, "head": memory.head, "a block at work": memory.working}
    listed = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in parts.items() if num_bytes)
    on_host = f"; {memory.host_text}" if memory.host_text else ""
    return f"about {size(memory.total)} per device in a step: {listed}{on_host}"


def _trace(run: Run) -> dict[str, str]:
    """The steps to trace."""
    wanted, steps = run.config.log.trace_step, steps_to_trace(run.config, run.first_step)
    if wanted is None:
        return {}
    if not steps:
        is_first = wanted[-1] == run.first_step + 1
        why = "would be the first of this process" if is_first else "is not left to do"
        return {"trace": f"none: step {wanted[-1]} {why}"}
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return {"trace": f"{which}, to {run.folder / FOLDER}"}


def _tuning(run: Run) -> dict[str, str]:
    """The number of choices of `tune.over`, and the first one."""
    choices = run.choices
    if choices is None:
        return {}
    origin = (
        "" if choices.best_s is None else f", found before ({choices.file}): {human_seconds(choices.best_s)} per step"
    )
    return {"tuning": f"{len(choices.values)} choices, beginning with {choices.describe(choices.first)}{origin}"}


def table(rows: dict[str, str]) -> str:
    """Names and values in two columns."""
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
