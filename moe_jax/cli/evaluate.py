"""The command that evaluates a run's checkpoint: its loss on texts.

python -m moe_jax.evaluate RUN [--data TEXT] [--step N] [--ema] [--json FILE] [section.key=value …]

Without --data the text is the validation part of the run's own data. Results are printed, and added to the run's
metrics, so that its report shows them.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from moe_jax.checkpoint.files import steps_of
from moe_jax.config import Config
from moe_jax.config.ranges import ANY, Range, check_number
from moe_jax.config.yaml_io import load_config
from moe_jax.data.evaluation import text_samples
from moe_jax.data.samples import Samples
from moe_jax.data.sources import open_tokens
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.data.tokens import BPE_FILE, find_data
from moe_jax.distributed import processes
from moe_jax.distributed.failures import fail_fast, run_and_exit
from moe_jax.errors import CheckpointError, CommandParser, ConfigError
from moe_jax.files.atomic import check_writable, write_atomically
from moe_jax.files.local_copy import local_path, upload
from moe_jax.files.places import output_file, place
from moe_jax.measure.provenance import provenance
from moe_jax.paths import shown
from moe_jax.run.evaluation import Checkpoint, Result, Text, evaluate_texts, evaluate_validation, metrics_of
from moe_jax.run.evaluation_record import finite_or_null, record_evaluation
from moe_jax.run.model_tokenizer import check_tokens_of_run, tokenizer_of_run

_COLUMNS = ("text", "tokens", "nats per token", "perplexity", "bits per byte")


def main() -> None:
    """Parse the command line, evaluate, print the results, and store them."""
    arguments = _arguments()
    run = local_path(arguments.run)
    config = load_config(run, arguments.overrides)
    if not steps_of(run):
        raise CheckpointError(f"run {run} has no checkpoint: train it first, or name another run folder")
    processes.initialize(processes.options_from(arguments), config.mesh.cpu_devices)
    with fail_fast():
        if arguments.json and processes.is_main_process():
            check_writable(arguments.json)
        texts = [_text(name, config, run) for name in arguments.data]
        _check_names([text.name for text in texts])
        if not texts:
            check_tokens_of_run(config, run, config.data)
        checkpoint = Checkpoint.load(config, run, arguments.ema, arguments.step)
        if texts:
            results = evaluate_texts(checkpoint, texts, arguments.batches)
        else:
            results = evaluate_validation(checkpoint, arguments.batches or config.train.eval_batches)
        problem = record_evaluation(config, run, checkpoint.step, metrics_of(results), _options(arguments))
        if not processes.is_main_process():
            return
        which = "moving average of parameters" if arguments.ema else "parameters"
        print(f"{shown(str(run))}, step {checkpoint.step}: {which}")
        print(_table(results))
        if problem:
            print(shown(f"the results are not added to the run's metrics: {problem}"))
        if arguments.json:
            _write_json(arguments, checkpoint.step, results)


def _arguments() -> argparse.Namespace:
    parser = CommandParser(prog="python -m moe_jax.evaluate", description="Evaluate a trained run.")
    parser.add_argument("run", type=place, metavar="RUN", help="folder of the run (log.dir)")
    parser.add_argument(
        "--data",
        type=place,
        action="append",
        default=[],
        metavar="TEXT",
        help="a .txt, .jsonl or .parquet file, or a prepared folder, of which the validation part is used; may be "
        "repeated (default: the validation part of the run's data)",
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
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. mesh.expert=1")
    processes.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    check_number("--batches", arguments.batches, Range(1, ANY))
    check_number("--step", arguments.step, Range(0, ANY))
    arguments.json = arguments.json and output_file(arguments.json)
    return arguments


def _options(arguments: argparse.Namespace) -> str:
    """The options with which results are other ones, to be stored with them."""
    batches = [] if arguments.batches is None else [f"--batches={arguments.batches}"]
    return " ".join([*(["--ema"] if arguments.ema else []), *batches, *arguments.overrides])


def _text(given: str, config: Config, run: Path) -> Text:
    """The text that --data names, encoded as the run's own. Raises DataError."""
    path = find_data(given, "--data")
    if not path.is_dir():
        tokenizer = tokenizer_of_run(config, run)
        _check_vocabulary(tokenizer, config, f"--data={path}")
        return Text(path.name, text_samples(path, config.data, tokenizer, "--data"), tokenizer)
    data = dataclasses.replace(config.data, path=str(path), sources=(), tokenizer="bytes", text_key="text")
    tokenizer = check_tokens_of_run(config, run, data)
    (tokens,) = open_tokens(data, config.model.vocab_size)
    return Text(path.name, Samples.of(tokens, "validation", data), tokenizer)


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--data names several texts {name}, as results would be called: evaluate one at a time")


def _check_vocabulary(tokenizer: Tokenizer, config: Config, given: str) -> None:
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{given} is encoded with {tokenizer.vocab_size} tokens, more than model.vocab_size="
            f"{config.model.vocab_size}: put the run's own {BPE_FILE} into its folder"
        )


def _table(results: Sequence[Result]) -> str:
    rows = [_COLUMNS, *map(_row, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([f"{name:<{widths[0]}}", *cells]).rstrip())
    return "\n".join(lines)


def _row(result: Result) -> tuple[str, ...]:
    bits = "" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
    return shown(result.name), f"{result.tokens:,}", f"{result.loss:.4f}", f"{result.perplexity:.4g}", bits


def _write_json(arguments: argparse.Namespace, step: int, results: Sequence[Result]) -> None:
    found = {
        "run": shown(str(arguments.run)),
        "step": step,
        "options": _options(arguments),
        "results": {result.name: result.values for result in results},
        "provenance": provenance(),
    }
    write_atomically(arguments.json, json.dumps(finite_or_null(found), indent=2) + "\n")
    upload(arguments.json.parent)
    print(f"written: {shown(str(arguments.json))}")


if __name__ == "__main__":
    run_and_exit(main)
