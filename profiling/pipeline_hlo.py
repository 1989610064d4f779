"""What real compilers make of pipelined steps: python profiling/pipeline_hlo.py TARGET [section.key=value …]

Compiles the training step of each pipeline schedule, on a mesh of pipeline × expert, ahead of time and without the
hardware, and reports on the scheduled programs:

1. the peak memory of a device, and the part of it that outlives a tick (in flight);
2. the time of the step, replayed as the busiest stage sees it, and the time of a tick outside of its passes;
3. whether sends between stages are asynchronous, and in how many ticks matrix products run between start and done;
4. the time of each all-to-all of a co-scheduled tick, by the compiler's cycles or published rates, and its exposed
   share;
5. the time of instructions between start and done that belong to the other pass, to its own, and to neither (casts of
   weights, reads of buffers).

Targets as in docs/compiled.md: h100:1x1x8, v5p:2x2x2. Takes minutes for each schedule; results of the same settings
that results/pipeline_hlo_TARGET.json holds already are not compiled again. Exit code 1 if a schedule stores more, or
hides less, than it should.
"""

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from real_compiler import read_command
from results_file import RESULTS, rounded, write_result

from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.measure.costs import collective_seconds, compute_seconds, matrix_products
from moe_jax.measure.hlo import HloModule, Instruction, parse
from moe_jax.measure.overlap import Passes, Replay, replay
from moe_jax.measure.provenance import provenance
from moe_jax.measure.targets import Target, target_devices
from moe_jax.measure.tasks import action_of
from moe_jax.measure.traffic import exchanges
from moe_jax.models.parameters import stored_shapes
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC, REPLICATED
from moe_jax.report.compiled import Job, compile_job
from moe_jax.schedule.pipelines.tick import side_of
from moe_jax.step.context import StepContext, StepInputs
from moe_jax.step.pipelined.build import make_plan
from moe_jax.step.pipelined.executor import PipelineStage

_CONFIG = "configs/bench/fine_grained.yaml"
SCHEDULES = {
    name: [f"schedule.pipeline={name}"]
    for name in ("gpipe", "1f1b", "interleaved", "zero_bubble", "coscheduled", "coscheduled_split")
}
SCHEDULES["interleaved"] += ["schedule.virtual_stages=2"]
_COMMON = [
    "model.hidden_size=1024",
    "model.num_layers=8",
    "model.num_attention_heads=8",
    "model.vocab_size=8192",
    "model.moe.num_experts=16",
    "model.moe.top_k=2",
    "model.moe.intermediate_size=1024",
    "data.seq_len=1024",
    "schedule.policy=vanilla",
    "schedule.microbatches=1",
    "schedule.weight_grad=inline",
    "schedule.grad_reduce=end",
    "schedule.bucket_cap_mb=null",
    "schedule.unroll=1",
]
_SENDS = ("to_next_stage", "to_previous_stage")
_OTHER = {"F": "B", "B": "F"}
_EXPOSED = 0.1
_COSCHEDULED = ("coscheduled", "coscheduled_split")
_SIDES = {"F": {"F", "keep_forward"}, "B": {"B", "add_gradients"}}


def buffer_bytes(config: Config, mesh: Mesh) -> dict[str, int]:
    """Return bytes of a device: what outlives a tick, by field of `State`, and the sums of gradients."""
    plan, context = make_plan(config, mesh), StepContext.of(config, mesh)

    def body(params: Any, token_BN1: jax.Array) -> dict[str, Any]:
        return PipelineStage(params, StepInputs(token_BN1), context, plan).first_state()._asdict()

    on_mesh = jax.shard_map(
        body, mesh=mesh, in_specs=(context.specs, BATCH_SPEC), out_specs=REPLICATED, check_vma=False
    )
    batch = jax.ShapeDtypeStruct((config.train.batch_size, config.data.seq_len + 1), np.int32)
    state = jax.eval_shape(on_mesh, stored_shapes(Stages.of(config)), batch)
    return {
        name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state[name]))
        for name in ("saved", "weight", "activations", "gradients", "grads")
    }


def computations_with(program: HloModule, scopes: Sequence[str]) -> list[str]:
    """Return the computations that themselves contain a collective of each of these scopes or sides."""
    found = []
    for name in program.computations:
        own = [_words(program, line) for line in program.computations[name] if _is_collective(line)]
        if all(any(scope in words for words in own) for scope in scopes):
            found.append(name)
    return found


def _is_collective(line: Instruction) -> bool:
    return line.opcode.removesuffix("-start").endswith(("collective-permute", "all-to-all"))


def _words(program: HloModule, line: Instruction) -> set[str]:
    name = program.op_name(line)
    action = action_of(name)
    return {*name.split("/"), *([side_of(action)] if action else [])}


def sends(found: Replay, passes: Passes) -> dict[str, dict[str, Any]]:
    """Summarise the sends between stages in each direction, one per tick, and those in ticks with both passes."""
    pairs = _ticks_of_pairs(found, passes)
    of_directions = {}
    for direction in _SENDS:
        own = [each for each in found.collectives if direction in each.op_name.split("/")]
        of_directions[direction] = {
            "asynchronous": all(each.is_async for each in own),
            "ticks": len(own),
            "beside_products": sum(each.inside_products > 0 for each in own),
            "pairs": len(pairs),
            "pairs_beside_products": sum(each.inside_products > 0 for each in own if each.iteration in pairs),
            "us": rounded(1e6 * sum(each.seconds for each in own)),
            "exposed_us": rounded(1e6 * sum(each.exposed_s for each in own)),
        }
    return of_directions


def _ticks_of_pairs(found: Replay, passes: Passes) -> set[int]:
    together = [rows for name, rows in passes.items() if "together" in name]
    return {tick for rows in together for tick, stages in enumerate(rows) if stages[found.stage]}


def exposed_share(found: Replay, passes: Passes) -> float | None:
    """Return the exposed share of the time of all-to-alls in ticks with both passes; None without such ticks."""
    pairs = _ticks_of_pairs(found, passes)
    own = [each for each in found.collectives if each.iteration in pairs and "all-to-all" in each.kind]
    total_s = sum(each.seconds for each in own)
    return sum(each.exposed_s for each in own) / total_s if total_s else None


def between_passes_us(program: HloModule, target: Target) -> float:
    """Return the time of a tick that belongs to no pass, mostly copies of whole buffers, in µs."""
    (tick,) = computations_with(program, _SENDS)
    return 1e6 * sum(seconds_of(program, target, line) for line in program.computations[tick])


def concurrent_compute(program: HloModule, target: Target, num_devices: int) -> list[dict[str, Any]]:
    """Return, of each all-to-all of a tick with both passes, its time and the other pass's compute while it runs."""
    found = []
    for computation in computations_with(program, ("F", "B")):
        for each in exchanges(program, num_devices, computation):
            action = action_of("/".join(each.scopes))
            if action is None or "all-to-all" not in each.collective.opcode:
                continue
            side = side_of(action)
            between = program.computations[computation][each.begin + 1 : each.end]
            of_side = {part: [line for line in between if side_of_line(program, line) == part] for part in _OTHER}
            us = {part: 1e6 * sum(seconds_of(program, target, line) for line in of_side[part]) for part in _OTHER}
            all_us = 1e6 * sum(seconds_of(program, target, line) for line in between)
            found.append(
                {
                    "task": str(action),
                    "us": rounded(1e6 * collective_seconds(each.collective, program, target, num_devices)),
                    "other_pass_us": rounded(us[_OTHER[side]]),
                    "other_pass_products": sum(matrix_products(line, program) for line in of_side[_OTHER[side]]),
                    "own_pass_us": rounded(us[side]),
                    "no_pass_us": rounded(all_us - sum(us.values())),
                }
            )
    return found


def seconds_of(program: HloModule, target: Target, line: Instruction) -> float:
    """Return the seconds of an instruction that runs on the device itself."""
    return 0.0 if line.is_control or _is_collective(line) else compute_seconds(line, program, target)


def side_of_line(program: HloModule, line: Instruction) -> str:
    """Return the direction of an instruction: F or B, or "" if it belongs to neither.

    F and B are instructions of tasks, a tick's stores of a forward pass (F), and its additions to the sums (B).
    """
    words = _words(program, line)
    return next((side for side, scopes in _SIDES.items() if words & scopes), "")


def study(target: Target, config: Config, overrides: list[str], mesh: Mesh) -> dict[str, Any]:
    """Compile and describe one schedule."""
    job = Job(target=target.name, config=_CONFIG, overrides=overrides, options={})
    text, outcome = compile_job(target, job)
    program, buffers = parse(text), buffer_bytes(config, mesh)
    grads, found = buffers.pop("grads"), replay(program, target, mesh.size, outcome.passes)
    passes = outcome.passes or {}
    return {
        "settings": " ".join(overrides),
        "argument_bytes": outcome.argument_bytes,
        "temporary_bytes": outcome.temporary_bytes,
        "peak_bytes": outcome.peak_bytes,
        "gradient_bytes": grads,
        "in_flight_bytes": sum(buffers.values()),
        "in_flight_bytes_by_buffer": buffers,
        "step_ms": rounded(1e3 * found.step_s),
        "compute_ms": rounded(1e3 * found.compute_s),
        "exposed_ms": rounded(1e3 * found.exposed_s),
        "idle_ms": rounded(1e3 * found.idle_s),
        "tick_between_passes_us": rounded(between_passes_us(program, target)),
        "sends": sends(found, passes),
        "all_to_alls": concurrent_compute(program, target, mesh.size),
        "exposed_share_of_pairs": exposed_share(found, passes),
        "compile_s": rounded(outcome.compile_s),
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Format the results as text, with bytes in 10⁶."""
    lines = [
        "MB of a device     arguments temporary      peak gradients in flight   step ms    idle  ticks sends hidden"
    ]
    for name, row in rows.items():
        parts = ("argument", "temporary", "peak", "gradient", "in_flight")
        megabytes = "".join(f"{row[f'{part}_bytes'] / 1e6:10.0f}" for part in parts)
        hidden = " ".join(f"{each['beside_products']}" for each in row["sends"].values())
        ticks = max(each["ticks"] for each in row["sends"].values())
        lines.append(f"{name:18}{megabytes}{row['step_ms']:10.2f}{row['idle_ms']:8.2f}{ticks:7} {hidden}")
    for name, row in rows.items():
        lines += [
            f"\n{name}, a tick's all-to-alls: µs; the other, their own and no pass between start and done"
        ] * bool(row["all_to_alls"])
        lines += [
            f"{each['task']:14} {each['us']:9.1f} {each['other_pass_us']:9.1f}"
            f" with {each['other_pass_products']} products {each['own_pass_us']:9.1f} {each['no_pass_us']:9.1f}"
            for each in row["all_to_alls"]
        ]
    return "\n".join(lines)


def verdicts(rows: dict[str, dict[str, Any]], platform: str) -> dict[str, bool]:
    """Check the expectations of the schedules present.

    Activations are all memory except arguments and sums of gradients; buffers are their part that outlives ticks. On
    TPUs tasks store little but the inputs of products, which weight gradients still read, so gradients that wait for
    them need buffers of their own: a zero bubble may take as much as GPipe there.
    """
    activations = {
        name: row["peak_bytes"] - row["argument_bytes"] - row["gradient_bytes"] for name, row in rows.items()
    }
    found = {}
    buffers = {name: row["in_flight_bytes"] for name, row in rows.items()}
    of_zero_bubble = ("gpipe", 1.0) if platform == "tpu" else ("1f1b", 1.1)
    for what, sizes, name, (other, most) in (
        ("buffers", buffers, "1f1b", ("gpipe", 0.6)),
        ("activations", activations, "zero_bubble", of_zero_bubble),
    ):
        if {name, other} <= set(rows):
            found[f"{what} of {name} at most {most} of {other}'s"] = sizes[name] <= most * sizes[other]
    for name, row in rows.items():
        found[f"{name}: sends asynchronous, and some ticks' beside products"] = all(
            each["asynchronous"] and each["beside_products"] for each in row["sends"].values()
        )
        tick_us = 1e3 * row["step_ms"] / max(each["ticks"] for each in row["sends"].values())
        found[f"{name}: a tick spends at most a tenth between its passes"] = (
            row["tick_between_passes_us"] <= tick_us / 10
        )
    if "coscheduled_split" in rows:
        found["coscheduled_split: both sends of every tick with both passes beside products"] = all(
            each["pairs_beside_products"] == each["pairs"] > 0 for each in rows["coscheduled_split"]["sends"].values()
        )
    for name in set(_COSCHEDULED) & set(rows):
        tick = rows[name]["all_to_alls"]
        by_other = all(each["other_pass_us"] > 0 for each in tick)
        found[f"{name}: all all-to-alls of a tick beside the other pass"] = bool(tick) and by_other
        exposed = rows[name]["exposed_share_of_pairs"]
        found[f"{name}: at most {_EXPOSED:.0%} of their time exposed"] = exposed is not None and exposed <= _EXPOSED
    return found


def main() -> None:
    """Read the command line, compile and describe every schedule, write the result."""
    parser = CommandParser(prog="python profiling/pipeline_hlo.py", description=__doc__)
    parser.add_argument("--pipeline", type=int, default=4, help="stages (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="default %(default)s")
    parser.add_argument("--schedules", metavar="NAME,…", default=",".join(SCHEDULES), help="default: %(default)s")
    arguments, target = read_command(parser, ("pipeline", "microbatches"), settings=True)
    names = arguments.schedules.split(",")
    if unknown := [name for name in names if name not in SCHEDULES]:
        raise ConfigError(f"--schedules={unknown[0]} is unknown: choose of {', '.join(SCHEDULES)}")
    devices = target_devices(target)
    if len(devices) % arguments.pipeline:
        raise ConfigError(f"--pipeline={arguments.pipeline} must divide the {len(devices)} devices of {target.name}")
    experts = len(devices) // arguments.pipeline
    sizes = [f"mesh.pipeline={arguments.pipeline}", f"mesh.expert={experts}"]
    sizes += [
        f"train.batch_size={arguments.microbatches * experts}",
        f"train.grad_accumulation={arguments.microbatches}",
    ]
    path = RESULTS / f"pipeline_hlo_{target.name.replace(':', '_')}.json"
    known = json.loads(path.read_text(encoding="utf-8"))["schedules"] if path.exists() else {}
    for name in names:
        overrides = [*_COMMON, *sizes, *arguments.overrides, *SCHEDULES[name]]
        if name in known and known[name]["settings"] == " ".join(overrides):
            continue
        config = load_config(_CONFIG, overrides)
        known[name] = study(target, config, overrides, make_mesh(config.mesh, devices)) | {"provenance": provenance()}
        write_result(path.stem, {"schedules": known})
    found = verdicts(known, target.platform)
    write_result(path.stem, {"schedules": known, "as_expected": found})
    print(table(known))
    print("\n".join(f"{'yes' if holds else 'NO':4}{what}" for what, holds in found.items()))
    if not all(found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
