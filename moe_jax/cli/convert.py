"""The command that imports and exports Hugging Face models.

python -m moe_jax.convert import FOLDER --out RUN
python -m moe_jax.convert export RUN --out FOLDER
"""

import argparse
import dataclasses
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding

from moe_jax.checkpoint.checksums import digest_program
from moe_jax.checkpoint.load import load_params
from moe_jax.checkpoint.save import Checkpoints, check_room
from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.config.yaml_io import config_from, load_config, to_yaml
from moe_jax.convert.files import DTYPES
from moe_jax.convert.hf_config import FILE, read_config
from moe_jax.convert.source import ORIGIN, family_to_export, left_out, longest_sequence, model_in
from moe_jax.convert.write import check_is_free, copy_companion_files, special_tokens, write_model
from moe_jax.distributed import processes
from moe_jax.distributed.failures import fail_fast, run_and_exit
from moe_jax.errors import CheckpointError, CommandParser, ConfigError
from moe_jax.files.atomic import all_or_nothing, write_atomically
from moe_jax.files.local_copy import local_path
from moe_jax.files.places import all_uploaded_or_nothing, check_is_empty, output_folder, place, place_of
from moe_jax.measure.provenance import versions
from moe_jax.models.parameters import in_order, param_dims, stored_shapes
from moe_jax.parallel.mesh import expert_axis, make_mesh, one_device_mesh, with_sizes_of
from moe_jax.parallel.sharding import REPLICATED, partitions
from moe_jax.paths import shown
from moe_jax.run.export_tokenizer import byte_tokenizer_of, special_tokens_of
from moe_jax.run.init_from import check_source, source_params
from moe_jax.run.run_dir import check_folder
from moe_jax.telemetry.run_log import RunLog


def main() -> None:
    """Parse the command line and convert."""
    parser = CommandParser(
        prog="python -m moe_jax.convert",
        description="Hugging Face models in and out: a model becomes a run without steps, or a run's newest checkpoint "
        "a model.",
    )
    parser.add_argument("direction", choices=("import", "export"))
    parser.add_argument("source", type=place, help="folder of the model (config.json, safetensors), or of the run")
    parser.add_argument("--out", type=place, required=True, help="the folder to make")
    parser.add_argument("--family", help="export: model_type of config.json (default: the one that holds the model)")
    parser.add_argument("--dtype", choices=DTYPES, help="export: of the tensors (default: float32)")
    parser.add_argument("--ema", action="store_true", help="export: the average of parameters (optimizer.ema_decay)")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="import: e.g. mesh.expert=8"
    )
    processes.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    if arguments.direction == "import":
        for name in ("family", "dtype"):
            if getattr(arguments, name) is not None:
                parser.error(f"--{name} is for export")
        if arguments.ema:
            parser.error("--ema is for export")
    if arguments.direction == "export":
        if arguments.overrides:
            parser.error(f"{arguments.overrides[0]} changes a model's settings, and export writes what there is")
        if arguments.distributed == "on" or processes.options_from(arguments).coordinator is not None:
            parser.error("--distributed and --coordinator are for import: one process exports")
    arguments.source, arguments.out = local_path(arguments.source), output_folder(arguments.out)
    if arguments.direction == "export":
        _export(arguments)
    else:
        _import(arguments)


def _import(arguments: argparse.Namespace) -> None:
    run, source = arguments.out, arguments.source
    check_folder(run, "--out")
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise ConfigError(f"--out={run} exists and is not an empty folder: name another one, or remove it")
    check_is_empty("--out", run)
    special_tokens(read_config(source))
    values = {
        "model": json.loads(json.dumps(dataclasses.asdict(model_in(source)))),  # lists instead of tuples, as in files
        "train": {"init_from": place_of(source)},
        "log": {"dir": place_of(run), "sample_tokens": 0},
    }
    config = config_from(values, arguments.overrides)
    processes.initialize(processes.options_from(arguments), config.mesh.cpu_devices)
    with fail_fast():
        mesh = make_mesh(config.mesh)
        with_sizes_of(mesh, config)  # checks them
        check_source(config)
        placed = partitions(param_dims(config.model), expert_axis(config.mesh))
        shapes = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
            stored_shapes(Stages.of(config)),
            placed,
        )
        check_room("--out", run, shapes)  # before the model is read
        params = source_params(config, shapes)
        step = jax.device_put(np.int32(0), NamedSharding(mesh, REPLICATED))
        with (
            all_or_nothing(run) if processes.is_main_process() else nullcontext(),
            all_uploaded_or_nothing(run) if processes.is_main_process() else nullcontext(),
        ):
            _write_run(run, source, config, {"step": step, "params": params})


def _write_run(run: Path, source: Path, config: Config, state: dict[str, object]) -> None:
    mesh = jax.tree.leaves(state)[0].sharding.mesh
    sizes = {str(axis): size for axis, size in mesh.shape.items()}
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, init_from=place_of(run)))
    facts = {"config": dataclasses.asdict(config), "mesh": sizes, "versions": versions()}
    quiet = RunLog(run, start_step=0, total_steps=0, tokens_per_step=0, tensorboard=False, quiet=True)
    if processes.is_main_process():
        run.mkdir(parents=True, exist_ok=True)
        copy_companion_files(source, run)
        shutil.copyfile(source / FILE, run / ORIGIN)
        write_atomically(run / "config.yaml", to_yaml(config))
    processes.allgather(0)  # wait until the folder exists
    checkpoints = Checkpoints(run, 1, quiet, digest_program(state), facts)
    try:
        with checkpoints:
            checkpoints.save(0, state, data={})
    except CheckpointError:  # raised in all processes
        processes.allgather(0)  # wait until no process writes any more
        reason, cure = checkpoints.last_failure
        raise ConfigError(f"--out={run} was not written ({reason}): {cure}, or name another folder") from None
    if processes.is_main_process():
        if (message := left_out(source, config.model)) is not None:
            print(shown(f"{source}: {message}"))
        print(shown(f"{run}: begin with it by --config {run} log.dir=… data.path=…"))


def _export(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.source)
    family = family_to_export(config, arguments.source, arguments.family)
    dtype = arguments.dtype or "float32"
    check_is_free(arguments.out)
    check_is_empty("--out", arguments.out)
    placed = NamedSharding(one_device_mesh(), REPLICATED)
    stages = Stages.of(config)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), stored_shapes(stages))
    params = in_order(load_params(arguments.source, shapes, arguments.ema), stages)
    longest, tokens = longest_sequence(config, arguments.source), special_tokens_of(config, arguments.source)
    others = byte_tokenizer_of(config, arguments.source)
    with all_uploaded_or_nothing(arguments.out):
        write_model(
            arguments.out, config.model, family, params, dtype, longest, arguments.source, tokens=tokens, others=others
        )
    print(f"{shown(str(arguments.out))}: {family.architecture}, {dtype}")


if __name__ == "__main__":
    run_and_exit(main)  # threads of orbax run on after some errors
