"""The command that evaluates a run's checkpoint: its loss on texts, and tasks of lm-eval.

python -m moe_jax.evaluate RUN [--data TEXT] [--tasks NAME,NAME] [--step N] [--ema] [--json FILE] [section.key=value …]

Without --data and --tasks the text is the validation part of the run's own data. Results are printed, and added to the
run's metrics, so that its report shows them.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from moe_jax.checkpoint.compatibility import check_same_run
from moe_jax.checkpoint.files import steps_of
from moe_jax.config import Config, DataConfig
from moe_jax.config.ranges import ANY, Range, check_number
from moe_jax.config.yaml_io import load_config
from moe_jax.convert.source import is_imported
from moe_jax.data.chat_template import ChatTemplate
from moe_jax.distributed import processes
from moe_jax.distributed.failures import fail_fast, run_and_exit
from moe_jax.errors import CheckpointError, CommandParser, ConfigError
from moe_jax.files.atomic import check_writable, write_atomically
from moe_jax.files.local_copy import local_path, upload
from moe_jax.files.places import output_file, place
from moe_jax.measure.provenance import package_version, provenance
from moe_jax.paths import shown
from moe_jax.run.evaluation import (
    Checkpoint,
    Result,
    evaluate_texts,
    evaluate_validation,
    finite_or_null,
    open_texts,
    record_evaluation,
)
from moe_jax.run.harness import TaskResult, load_tasks, run_tasks
from moe_jax.run.harness_model import HarnessModel
from moe_jax.run.model_tokenizer import check_tokens_of_run, end_tokens, tokenizer_of_run
from moe_jax.run.sampling_mesh import SamplingMesh
from moe_jax.run.unused_settings import EVALUATION, unread_text

_OF_TEXTS = ("text", "tokens", "nats per token", "perplexity", "bits per byte")
_OF_TASKS = ("task", "metric", "value", "standard error")
_STDERR = "_stderr"
_BATCH_SIZE = 8


def main() -> None:
    """Parse the command line, evaluate, print the results, and store them."""
    arguments = _arguments()
    run = local_path(arguments.run)
    if not run.is_dir():
        problem = "is a file" if run.exists() else "does not exist"
        raise CheckpointError(f"run {run} {problem}: name the folder of a run (log.dir)")
    config = load_config(run, [*_freed(arguments.overrides), *arguments.overrides])
    if not steps_of(run):
        raise CheckpointError(f"run {run} has no checkpoint: train it first, or name another run folder")
    processes.initialize(processes.options_from(arguments), config.mesh.cpu_devices)
    with fail_fast():
        if arguments.json and processes.is_main_process():
            check_writable(arguments.json)
        step, texts, tasks = _evaluate(arguments, config, run)
        found = {text.name: text.values for text in texts} | {task.name: task.values for task in tasks}
        problem = record_evaluation(config, run, step, found, _options(arguments))
        if not processes.is_main_process():
            return
        print(f"{shown(str(run))}, step {step}: {'moving average of parameters' if arguments.ema else 'parameters'}")
        for rows in (
            [_OF_TEXTS, *map(_text_row, texts)],
            [_OF_TASKS, *(row for task in tasks for row in _task_rows(task))],
        ):
            if len(rows) > 1:
                print(_table(rows))
        if text := unread_text(arguments.overrides, EVALUATION, "an evaluation"):
            print(text)
        if problem:
            print(shown(f"the results are not added to the run's metrics: {problem}"))
        if arguments.json:
            _write_json(arguments, step, found)


def _freed(overrides: Sequence[str]) -> list[str]:
    """Return overrides that undo what a run says of its own mesh and changes no loss, if another mesh is named."""
    if not any(each.startswith("mesh.") for each in overrides):
        return []
    over = [axis for axis in ("context", "tensor") if f"mesh.{axis}=1" in overrides]
    stages = ["pipeline=1f1b", "virtual_stages=1", "head_blocks=0", "remat=none"]
    return [
        *(f"schedule.{each}" for each in stages if "mesh.pipeline=1" in overrides),
        "optimizer.zero_axes=null",
        *("exchange.ranks_per_node=null", "exchange.hot_experts=0"),
        *(f"migration.{each}" for each in ("enabled=false", "replicas=0", "rank_speeds=null")),
        *(f"mesh.experts_over_{axis}=false" for axis in over),
    ]


def _arguments() -> argparse.Namespace:
    parser = CommandParser(prog="python -m moe_jax.evaluate", description="Evaluate a trained run.")
    parser.add_argument("run", type=place, metavar="RUN", help="folder of the run (log.dir)")
    parser.add_argument(
        "--data",
        type=place,
        action="append",
        default=[],
        metavar="TEXT",
        help="a .txt, .jsonl, .parquet or .array_record file, a saved dataset, or a prepared folder, of which the "
        "validation part is used; may be repeated (default, without --tasks: the validation part of the run's data)",
    )
    parser.add_argument(
        "--batches",
        type=int,
        metavar="N",
        help="at most so many batches of train.batch_size sequences, spread evenly over the text (default: all of a "
        "--data text, and train.eval_batches of the run's)",
    )
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint (default: the newest one)")
    parser.add_argument("--ema", action="store_true", help="use the moving average of parameters (optimizer.ema_decay)")
    parser.add_argument("--json", type=place, metavar="FILE", help="write the results to this file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="e.g. mesh.expert=1")
    tasks = parser.add_argument_group("tasks of lm-eval, in one process (pip install -e '.[eval]')")
    tasks.add_argument("--tasks", type=_names, default=[], metavar="NAME[,NAME]", help="tasks or groups of tasks")
    tasks.add_argument("--task-folder", type=Path, metavar="DIR", help="folder with more tasks, as YAML files")
    tasks.add_argument("--limit", type=int, metavar="N", help="at most so many documents of each task")
    tasks.add_argument("--fewshot", type=int, metavar="N", help="examples before each document (default: the task's)")
    tasks.add_argument("--chat", action="store_true", default=None, help="apply the model's chat template")
    tasks.add_argument("--batch-size", type=int, metavar="N", help="sequences at a time (default: 8)")
    processes.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    for name, least in (("batches", 1), ("step", 0), ("limit", 1), ("fewshot", 0), ("batch_size", 1)):
        check_number(f"--{name.replace('_', '-')}", getattr(arguments, name), Range(least, ANY))
    for name in ("task_folder", "limit", "fewshot", "batch_size", "chat"):
        if not arguments.tasks and (value := getattr(arguments, name)) is not None:
            option = f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            raise ConfigError(f"{option} is for tasks: name some with --tasks, or drop it")
    if arguments.json and not arguments.json.endswith(".json"):
        raise ConfigError(f"--json={arguments.json} must be a file that ends in .json, e.g. loss.json")
    arguments.json = arguments.json and output_file(arguments.json)
    return arguments


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if "" in names:
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return names


def _options(arguments: argparse.Namespace) -> str:
    """The options with which results are other ones, to be stored with them."""
    numbers = [
        f"--{name}={value}"
        for name in ("batches", "limit", "fewshot")
        if (value := getattr(arguments, name)) is not None
    ]
    given = [f"--{name}" for name in ("ema", "chat") if getattr(arguments, name)]
    return " ".join([*given, *numbers, *arguments.overrides])


def _evaluate(
    arguments: argparse.Namespace, config: Config, run: Path
) -> tuple[int, Sequence[Result], Sequence[TaskResult]]:
    """The step of the checkpoint, and the results on texts and of tasks. What can be refused is before what lasts."""
    template = ChatTemplate(run) if arguments.chat else None
    manager = _task_manager(arguments) if arguments.tasks else None
    texts = open_texts(arguments.data, config, run)
    step, on_texts, of_tasks = 0, [], []
    if texts or manager is None:
        if not texts:
            if is_imported(config, run) and not config.data.sources and config.data.path == DataConfig.path:
                raise ConfigError(f"{run} is an imported model, which has no text of its own: name one with --data")
            check_tokens_of_run(config, run, config.data)
        checkpoint = Checkpoint.load(config, run, arguments.ema, arguments.step)
        step, count = checkpoint.step, arguments.batches
        if texts:
            on_texts = evaluate_texts(checkpoint, texts, count)
        else:
            on_texts = evaluate_validation(checkpoint, run, count or config.train.eval_batches)
    if manager is not None:
        check_same_run(config, run, ignore_data_order=True)
        tokenizer = tokenizer_of_run(config, run)
        where = SamplingMesh.of(config)
        step, params = where.load(run, arguments.ema, arguments.step)
        ends = end_tokens(run, tokenizer)
        size = arguments.batch_size or _BATCH_SIZE
        model = HarnessModel(config, where, params, tokenizer, ends, size, template=template)
        of_tasks = run_tasks(manager, arguments.tasks, model, arguments.limit, arguments.fewshot)
    return step, on_texts, of_tasks


def _task_manager(arguments: argparse.Namespace) -> Any:
    if jax.process_count() > 1:
        raise ConfigError(
            f"--tasks={','.join(arguments.tasks)} runs in one process, and there are {jax.process_count()} processes: "
            "start one, with --distributed=off"
        )
    return load_tasks(arguments.tasks, arguments.task_folder)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([f"{name:<{widths[0]}}", *cells]).rstrip())
    return "\n".join(lines)


def _text_row(result: Result) -> tuple[str, ...]:
    bits = "" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
    return result.name, f"{result.tokens:,}", f"{result.loss:.4f}", f"{result.perplexity:.4g}", bits


def _task_rows(task: TaskResult) -> Iterator[tuple[str, ...]]:
    for metric, value in task.values.items():
        name, colon, own_filter = metric.partition(":")
        if not name.endswith(_STDERR):
            error = task.values.get(f"{name}{_STDERR}{colon}{own_filter}")
            yield task.name, metric, f"{value:.4f}", "" if error is None else f"{error:.4f}"


def _write_json(arguments: argparse.Namespace, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
    found = {
        "run": shown(str(arguments.run)),
        "step": step,
        "options": _options(arguments),
        "results": results,
        "provenance": provenance() | ({"lm-eval": package_version("lm-eval")} if arguments.tasks else {}),
    }
    write_atomically(arguments.json, json.dumps(finite_or_null(found), indent=2) + "\n")
    upload(arguments.json.parent)
    print(f"written: {shown(str(arguments.json))}")


if __name__ == "__main__":
    run_and_exit(main)
