"""What real compilers make of pipelined steps: python profiling/pipeline_hlo.py TARGET [section.key=value …]

Compiles the training step of each pipeline schedule, on a mesh of pipeline × expert, for hardware that need not be
there, and tells of the scheduled programs: the memory of a device, and what of it outlives a tick (in flight); which
sends between stages are asynchronous, and have a matrix product between start and done; which all-to-alls of a
co-scheduled tick's forward pass have a product of its backward pass there, and the reverse. Targets as in
docs/compiled.md: h100:1x1x8, v5p:2x2x2. Minutes for each schedule; what results/pipeline_hlo_TARGET.json holds of
the same settings is not compiled again. Exit code 1 if a schedule keeps more, or hides less, than it should.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from real_compiler import read_command
from results_file import RESULTS, rounded, write_result

from moe_jax.config import Config
from moe_jax.config_files import load_config
from moe_jax.errors import ConfigError, run_command
from moe_jax.measure.costs import matrix_products
from moe_jax.measure.hlo import Instruction, Program, parse
from moe_jax.measure.provenance import provenance
from moe_jax.measure.targets import target_devices
from moe_jax.measure.tasks import action_of
from moe_jax.measure.traffic import Exchange, exchanges
from moe_jax.models.parameters import param_dims
from moe_jax.models.stages import stored_shapes
from moe_jax.models.transformer import Computation
from moe_jax.parallel.mesh import expert_axis, make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC, REPLICATED, partitions
from moe_jax.report.compiled import Job, compile_job
from moe_jax.schedule.pipelines.tick import side_of
from moe_jax.stages import Stages
from moe_jax.train.pipeline.plan import make_plan
from moe_jax.train.pipeline.stage import Stage

_CONFIG = "configs/bench/fine_grained.yaml"
SCHEDULES = {
    name: [f"schedule.pipeline={name}"] for name in ("gpipe", "1f1b", "interleaved", "zero_bubble", "coscheduled")
}
SCHEDULES["interleaved"] += ["schedule.virtual_stages=2"]
_COMMON = [
    "model.d_model=1024",
    "model.num_layers=8",
    "model.num_heads=8",
    "model.vocab_size=8192",
    "model.moe.num_experts=16",
    "model.moe.top_k=2",
    "model.moe.hidden_dim=1024",
    "data.seq_len=1024",
    "schedule.policy=vanilla",
    "schedule.microbatches=1",
    "schedule.weight_grad=inline",
    "schedule.grad_reduce=end",
    "schedule.chunk_mb=null",
    "schedule.unroll=1",
]
_SENDS = ("to_next_stage", "to_previous_stage")
_OTHER = {"F": "B", "B": "F"}


def buffer_bytes(config: Config, mesh: Mesh) -> dict[str, int]:
    """Of a device: what outlives a tick, by field of `State`, and the sums of gradients."""
    plan, specs = make_plan(config, mesh), partitions(param_dims(config.model), expert_axis(config.mesh))
    how, tokens = Computation.of(config, mesh), config.train.batch_size * config.data.seq_len

    def body(params: Any, token_BN1: jax.Array) -> dict[str, Any]:
        return Stage(params, token_BN1, config, how, tokens, plan).first_state()._asdict()

    on_mesh = jax.shard_map(body, mesh=mesh, in_specs=(specs, BATCH_SPEC), out_specs=REPLICATED, check_vma=False)
    batch = jax.ShapeDtypeStruct((config.train.batch_size, config.data.seq_len + 1), np.int32)
    state = jax.eval_shape(on_mesh, stored_shapes(Stages.of(config)), batch)
    return {
        name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state[name]))
        for name in ("saved", "weight", "taken", "activations", "gradients", "grads")
    }


def computations_with(program: Program, scopes: Sequence[str]) -> list[str]:
    """Computations that themselves have a collective of each of these scopes or sides."""
    found = []
    for name in program.computations:
        own = [_words(program, line) for line in program.computations[name] if _is_collective(line)]
        if all(any(scope in words for words in own) for scope in scopes):
            found.append(name)
    return found


def _is_collective(line: Instruction) -> bool:
    return line.opcode.removesuffix("-start").endswith(("collective-permute", "all-to-all"))


def _words(program: Program, line: Instruction) -> set[str]:
    name = program.op_name(line)
    action = action_of(name)
    return {*name.split("/"), *([side_of(action)] if action else [])}


def products_between(program: Program, computation: str, exchange: Exchange) -> list[str]:
    """The sides, F or B, of instructions with matrix products between start and done; "" of those of no task."""
    sides = []
    for line in program.computations[computation][exchange.begin + 1 : exchange.end]:
        for inner in program.inside(line):
            if matrix_products(inner, program) and not inner.called:
                action = action_of(program.op_name(inner))
                sides.append(side_of(action) if action else "")
    return sides


def sends(program: Program, num_devices: int) -> dict[str, dict[str, Any]]:
    """Of each send between stages."""
    found = {}
    for computation in computations_with(program, _SENDS):
        for each in exchanges(program, num_devices, computation):
            if direction := next((scope for scope in _SENDS if scope in each.scopes), None):
                between = products_between(program, computation, each)
                found[direction] = {"asynchronous": each.is_async, "beside_products": len(between)}
    return found


def beside_the_other(program: Program, num_devices: int) -> dict[str, list[int]]:
    """Of a tick with both passes: how many all-to-alls of each have a product of the other inside, and all of them."""
    counts = {"F": [0, 0], "B": [0, 0]}
    for computation in computations_with(program, ("F", "B")):
        for each in exchanges(program, num_devices, computation):
            action = action_of("/".join(each.scopes))
            if action is None or "all-to-all" not in each.collective.opcode:
                continue
            side = side_of(action)
            counts[side][0] += _OTHER[side] in products_between(program, computation, each)
            counts[side][1] += 1
    return counts


def study(target: Any, config: Config, overrides: list[str], mesh: Mesh) -> dict[str, Any]:
    """One schedule."""
    job = Job(target=target.name, config=_CONFIG, overrides=overrides, options={})
    text, outcome = compile_job(target, job)
    program, held = parse(text), buffer_bytes(config, mesh)
    grads = held.pop("grads")
    return {
        "settings": " ".join(overrides),
        "argument_bytes": outcome.argument_bytes,
        "temporary_bytes": outcome.temporary_bytes,
        "gradient_bytes": grads,
        "in_flight_bytes": sum(held.values()),
        "in_flight_bytes_by_buffer": held,
        "sends": sends(program, mesh.size),
        "all_to_alls_beside_the_other_pass": beside_the_other(program, mesh.size),
        "compile_s": rounded(outcome.compile_s),
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """As text, bytes in 10⁶."""
    lines = ["MB of a device arguments temporary gradients in flight  sends beside products  F beside B  B beside F"]
    for name, row in rows.items():
        megabytes = [row[f"{part}_bytes"] / 1e6 for part in ("argument", "temporary", "gradient", "in_flight")]
        hidden = sum(each["asynchronous"] and each["beside_products"] > 0 for each in row["sends"].values())
        sides = [f"{part} of {of}" for part, of in row["all_to_alls_beside_the_other_pass"].values()]
        lines.append(
            f"{name:14} {megabytes[0]:9.0f} {megabytes[1]:9.0f} {megabytes[2]:9.0f} {megabytes[3]:9.0f}"
            f"  {f'{hidden} of {len(_SENDS)}':>21}  {sides[0]:>10}  {sides[1]:>10}"
        )
    return "\n".join(lines)


def verdicts(rows: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """What was expected of the schedules that there are. Activations: temporaries, but for the sums of gradients."""
    activations = {name: row["temporary_bytes"] - row["gradient_bytes"] for name, row in rows.items()}
    found = {}
    for name, other, most in (("1f1b", "gpipe", 0.6), ("zero_bubble", "1f1b", 1.1)):
        if {name, other} <= set(rows):
            found[f"activations of {name} at most {most} of {other}'s"] = activations[name] <= most * activations[other]
    for name, row in rows.items():
        for direction, each in row["sends"].items():
            found[f"{name} {direction} beside a product"] = each["asynchronous"] and each["beside_products"] > 0
    if "coscheduled" in rows:
        sides = rows["coscheduled"]["all_to_alls_beside_the_other_pass"].values()
        found["all all-to-alls of a co-scheduled tick beside the other pass"] = all(0 < n == of for n, of in sides)
    return found


def main() -> None:
    """Read the command line, study every schedule, write the result."""
    parser = argparse.ArgumentParser(prog="python profiling/pipeline_hlo.py", description=__doc__)
    parser.add_argument("--pipeline", type=int, default=4, help="stages (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="default %(default)s")
    parser.add_argument("--schedules", metavar="NAME,…", default=",".join(SCHEDULES), help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for all schedules")
    arguments, target = read_command(parser, ("pipeline", "microbatches"))
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
    found = verdicts(known)
    write_result(path.stem, {"schedules": known, "as_expected": found})
    print(table(known))
    print("\n".join(f"{'yes' if holds else 'NO':4}{what}" for what, holds in found.items()))
    if not all(found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
