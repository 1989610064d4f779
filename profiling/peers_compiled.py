"""MaxText's steps compiled for TPUs: python profiling/peers_compiled.py TARGET --maxtext PYTHON [key=value …]

Compiles MaxText's training step with its own command (`train_compile`), ahead of time and without the hardware, and
reads off its scheduled program what peer_shapes.py and fully_sharded.py read off ours: the step, communication, what of
it is exposed, and the memory allocated for temporaries. `fine` is four blocks of DeepSeek-V2-Lite, `olmoe` OLMoE-1B-7B,
with 4 sequences of 4,096 tokens per chip. PYTHON is the interpreter of an environment with MaxText and libtpu
(docs/measure.md). Settings are MaxText's, and replace others. Target: v5p:2x2x2.

A program is a model, the way its experts compute, a mesh, and what is recomputed. `sparse`, MaxText's default, has
sorted rows and no capacity, `buffer` sorted rows in 1.25 times the balanced number, `dense` one-hot products with a
capacity factor of 1.25 and gathered experts, `exchange` the same with rows that are sent. Pallas kernels for rows in
groups have no cycles in the program: they count like ours, by the rows of balanced routing. `--only NAMES` compiles
these only, such as fine+dense+ep8+full; `--hlo FOLDER` keeps programs there. Takes 5 to 10 minutes of a core and 4 GB
for each. Writes results/peers_compiled_TARGET.json after each, and keeps the others.
"""

import json
import math
import re
import resource
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from real_compiler import read_command
from results_file import RESULTS, rounded, write_result

from moe_jax.errors import CommandParser, ConfigError, UserError, run_command
from moe_jax.measure.hlo import parse
from moe_jax.measure.overlap import replay
from moe_jax.measure.targets import Target, child_environment
from moe_jax.measure.temporaries import allocated_temporaries

_EVERY = (
    "run_name=peers base_output_directory=run dataset_type=synthetic enable_checkpointing=False opt_type=adamw "
    "compile_topology_num_slices=1 override_model_config=True max_target_length=4096 per_device_batch_size=4 "
    "dtype=bfloat16 weight_dtype=float32 load_balance_loss_weight=0.01"
)
_MODELS = {
    "fine": "model_name=deepseek2-16b base_num_decoder_layers=4",
    "olmoe": "decoder_block=qwen3_moe use_qk_norm=True norm_topk_prob=False vocab_size=50304 base_emb_dim=2048 "
    "base_num_decoder_layers=16 head_dim=128 base_num_query_heads=16 base_num_kv_heads=16 base_mlp_dim=1024 "
    "base_moe_mlp_dim=1024 num_experts=64 num_experts_per_tok=8",
}
_DENSE = "sparse_matmul=False capacity_factor=1.25"
_EXPERTS = {
    "sparse": "",
    "buffer": "ragged_buffer_factor=1.25",
    "dense": _DENSE,
    "exchange": f"{_DENSE} moe_dispatch_no_expert_sharding=True",
}
_MESHES = {"ep8": (1, 8), "fsdp8": (8, 1)}  # ranks along the axes fsdp and expert
_REMATS = {"full": "full", "least": "minimal_with_context"}  # MaxText always recomputes
PROGRAMS = (
    *(f"fine+{experts}+ep8+full" for experts in _EXPERTS),
    *("olmoe+sparse+fsdp8+least", "olmoe+sparse+fsdp8+full"),
)
# Runs MaxText's command, and keeps what it compiled.
_COMPILE = """
import importlib.metadata, json, pathlib, sys
from maxtext.trainers.pre_train import train_compile as command

folder, compile_step = pathlib.Path(sys.argv[1]), command.jit_and_compile

def kept(*arguments):
    compiled = compile_step(*arguments)
    (folder / "step.hlo").write_text(compiled.as_text())
    memory = compiled.memory_analysis()
    found = {"argument": memory.argument_size_in_bytes}
    found["versions"] = {name: importlib.metadata.version(name) for name in ("maxtext", "jax", "libtpu")}
    (folder / "step.json").write_text(json.dumps(found))
    return compiled

command.jit_and_compile = kept
command.main(["", str(pathlib.Path(command.__file__).parents[2] / "configs" / "base.yml"), *sys.argv[2:]])
"""
_GROUPED = re.compile(r'( custom-call\([^\n]*op_name="[^"\n]*\bt?gmm\b[^"\n]*)(?=")')


def compile_program(name: str, target: Target, python: str, settings: list[str], folder: Path) -> None:
    """Compile a program into a folder. Raises UserError."""
    model, experts, mesh, remat = name.split("+")
    fsdp, expert = _MESHES[mesh]
    words = f"{_EVERY} {_MODELS[model]} {_EXPERTS[experts]} remat_policy={_REMATS[remat]}".split()
    words += [f"ici_fsdp_parallelism={fsdp}", f"ici_expert_parallelism={expert}"]
    words += [f"compile_topology={target.kind}-{2 * _chips(target)}"]  # its number is that of cores
    words += [f"compile_xla_flags=--xla_dump_to={folder}", f"jax_cache_dir={folder}/programs", *settings]
    command = [python, "-c", _COMPILE, str(folder), *{word.partition("=")[0]: word for word in words}.values()]
    try:
        run = subprocess.run(command, cwd=folder, env=child_environment(target), capture_output=True, text=True)
    except OSError as error:
        raise UserError(
            f"--maxtext {python} does not run ({error.strerror}): name the python of an environment with MaxText, see "
            "docs/measure.md"
        ) from error
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"--maxtext {python} does not compile {name}: {last} (how MaxText is installed: docs/measure.md)"
        )


def account(name: str, target: Target, folder: Path) -> dict[str, Any]:
    """Return what the program in a folder shows."""
    _, experts, mesh, _ = name.split("+")
    filled = {"sparse": 100 / _MESHES[mesh][1], "buffer": 80.0}.get(experts, 100.0)  # percent, of buffers of rows
    text = _GROUPED.sub(rf"\1/filled_{filled:g}_percent/grouped_rows", (folder / "step.hlo").read_text())
    result = replay(parse(text), target, _chips(target))
    exposed: dict[str, float] = defaultdict(float)
    for each in result.collectives:
        exposed[f"{each.kind}, {'async' if each.is_async else 'sync'}"] += 1e3 * each.exposed_s
    allocated, found = allocated_temporaries(folder), json.loads((folder / "step.json").read_text())
    assert allocated is not None, "the compiler has written its dump"
    return {
        "step_ms": rounded(1e3 * result.step_s),
        "communication_ms": rounded(1e3 * result.communication_s),
        "exposed_ms": rounded(1e3 * result.exposed_s),
        "exposed": {kind: rounded(value) for kind, value in sorted(exposed.items()) if value >= 0.1},
        "temporary_gib": rounded(allocated / 2**30),
        "argument_gib": rounded(found["argument"] / 2**30),
        "versions": found["versions"],
    }


def _chips(target: Target) -> int:
    return math.prod(map(int, target.layout.split("x")))


def main() -> None:
    """Compile each program, and write results/peers_compiled_TARGET.json."""
    parser = CommandParser(prog="python profiling/peers_compiled.py", description=__doc__)
    parser.add_argument("--maxtext", required=True, metavar="PYTHON", help="interpreter of an environment with MaxText")
    parser.add_argument("--only", default=",".join(PROGRAMS), metavar="NAMES", help="default: %(default)s")
    parser.add_argument("--hlo", type=Path, metavar="FOLDER", help="where to keep the programs")
    arguments, target = read_command(parser, (), settings=True)
    if target.platform != "tpu":
        raise ConfigError(f"TARGET={target.name} is no TPU slice: use v5p:2x2x2")
    names = arguments.only.split(",")
    if unknown := set(names) - set(PROGRAMS):
        raise ConfigError(f"--only={min(unknown)} is unknown: choose of {', '.join(PROGRAMS)}")
    stem = f"peers_compiled_{target.name.replace(':', '_')}"
    path = RESULTS / f"{stem}.json"
    programs = json.loads(path.read_text())["programs"] if path.is_file() else {}
    for name in names:
        with tempfile.TemporaryDirectory() as own:
            folder, before = Path(own), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
            compile_program(name, target, arguments.maxtext, arguments.overrides, folder)
            seconds = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
            found = account(name, target, folder) | {"compile_cpu_s": rounded(seconds)}
            if arguments.hlo:
                (arguments.hlo / f"{name}.hlo").write_text((folder / "step.hlo").read_text())
        programs[" ".join([name, *arguments.overrides])] = {"settings": arguments.overrides} | found
        write_result(stem, {"programs": programs})


if __name__ == "__main__":
    run_command(main)
