"""The loss of a run's checkpoint on texts: the run's own validation text, or any other one.

The texts are encoded with the tokenizer of the run. The results go to the run's metrics, and to a JSON file.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from moe_jax.checkpoint.compatibility import check_same_run
from moe_jax.checkpoint.files import DamagedError
from moe_jax.checkpoint.latest import agreed_record
from moe_jax.checkpoint.load import damage_message, load_step
from moe_jax.config import Config, DataConfig, MigrationConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.config.validate import check_batch_split
from moe_jax.config.yaml_io import load_config
from moe_jax.data.evaluation import Batch, all_batches, spread_batches, text_bytes, text_samples
from moe_jax.data.mixture import Mixture
from moe_jax.data.samples import Samples
from moe_jax.data.sources import Tokens, open_tokens, source_tokenizer
from moe_jax.data.token_marks import num_targets
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.data.tokens import BPE_FILE, find_data, is_text, read_meta
from moe_jax.distributed.processes import is_main_process
from moe_jax.errors import CheckpointError, ConfigError, UserError
from moe_jax.files.places import place_of
from moe_jax.models.parameters import in_order, stored, stored_shapes
from moe_jax.parallel.mesh import batch_shards, make_mesh, with_sizes_of
from moe_jax.parallel.trees import Params
from moe_jax.run.choose_exchange import with_fastest_exchange
from moe_jax.run.choose_grouped_matmul import with_fastest_product
from moe_jax.run.identity import check_text, identity_of
from moe_jax.run.model_tokenizer import check_tokens_of_run, tokenizer_of_run
from moe_jax.run.run_dir import lock_run_dir
from moe_jax.run.validation import loss_metrics, mean
from moe_jax.step.compile import batch_shape, config_at
from moe_jax.step.compile_cache import compiled
from moe_jax.step.moving_average import evaluated
from moe_jax.step.trainer import Trainer, make_trainer
from moe_jax.telemetry.run_log import insert_record


def record_evaluation(
    config: Config, run: Path, step: int, results: Mapping[str, Mapping[str, float]], options: str
) -> str:
    """Add results of a step, and the options they were found with, to a run's metrics.jsonl. All processes call it.

    A value is called `evaluation/NAME/VALUE`, with the name of the text or task.

    Returns why that was not possible, for a message; empty if it was. A run that trains now keeps its file to itself.
    """
    own = dataclasses.replace(config, log=dataclasses.replace(config.log, dir=place_of(run)))
    values = {f"evaluation/{name}/{key}": value for name, own in results.items() for key, value in own.items()}
    trained = load_config(run)  # an evaluation may have batches of its own
    tokens = step * trained.train.batch_size * trained.data.seq_len
    try:
        with lock_run_dir(own):
            if is_main_process():
                insert_record(run, {"step": step, **values, "evaluation_options": options, "tokens": tokens})
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{run} cannot be written ({error.strerror})"
    return ""


def finite_or_null(value: Any) -> Any:
    """Return nested values for JSON, which has no NaN and no infinities."""
    if isinstance(value, Mapping):
        return {key: finite_or_null(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Text(NamedTuple):
    """A text to evaluate on."""

    name: str  # in metrics
    samples: Samples
    tokenizer: Tokenizer | None  # None: the bytes of its text are not known


class Result(NamedTuple):
    """The loss on a text."""

    name: str
    loss: float  # nats per predicted token
    tokens: int  # predicted
    text_bytes: int | None = None  # of the predicted tokens' text; None: not known

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite if it is beyond a float."""
        return math.exp(self.loss) if self.loss < math.log(1e300) else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of UTF-8 text; None if the bytes are not known."""
        return self.loss * self.tokens / math.log(2) / self.text_bytes if self.text_bytes else None

    @property
    def values(self) -> dict[str, float]:
        """The values by their names in metrics."""
        bits = {} if self.bits_per_byte is None else {"bits_per_byte": self.bits_per_byte}
        return {"loss": self.loss, "perplexity": self.perplexity, **bits, "tokens": self.tokens}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The parameters of a run after a step, or their moving average, on a mesh."""

    config: Config  # as in that step
    mesh: Mesh
    step: int
    params: Params

    @classmethod
    def load(cls, config: Config, run: Path, average: bool, step: int | None) -> "Checkpoint":
        """Load the checkpoint of a step, or the newest one, onto the config's mesh. All processes call it.

        The config may differ from the run's in all that does not define the model. Raises UserError.
        """
        optimizer = config.optimizer if average else dataclasses.replace(config.optimizer, ema_decay=None)
        config = dataclasses.replace(config, optimizer=optimizer, migration=MigrationConfig())
        check_same_run(config, run, ignore_data_order=True, ignore_stages=True)
        mesh = make_mesh(config.mesh)
        with_sizes_of(mesh, config)  # checks them
        check_batch_split(config, batch_shards(mesh))
        config = with_fastest_product(with_fastest_exchange(config, mesh), mesh)
        shapes = evaluated(make_trainer(config_at(config, 1), mesh).state_shapes)
        found, params = _in_stages(config, run, shapes, average, step)
        return cls(config_at(config, max(found, 1)), mesh, found, params)

    def loss_of(self, config: Config) -> Callable[[Batch], float]:
        """Compile the evaluation of a config with the model of this one. Returns the mean loss of a batch."""
        trainer: Trainer = make_trainer(config, self.mesh)
        shape = batch_shape(config, self.mesh)
        program = compiled(trainer.evaluate.lower(evaluated(trainer.state_shapes), shape, None))

        def loss(batch: Batch) -> float:
            placed = jax.make_array_from_callback(shape.shape, shape.sharding, lambda index: batch[index])
            return float(program(self.params, placed, None))

        return loss


def _in_stages(config: Config, run: Path, shapes: Any, average: bool, step: int | None) -> tuple[int, Params]:
    """The step and the parameters of a checkpoint, whose blocks may lie in the order of another number of stages."""
    saved, own = Stages.of(load_config(run)), Stages.of(config)
    if saved.layout == own.layout:
        return load_step(run, shapes, average, step)
    if config.mesh.pipeline > 1:
        raise ConfigError(
            f"mesh.pipeline={config.mesh.pipeline} with schedule.virtual_stages={config.schedule.virtual_stages} is "
            f"not how run {run} was trained: use its own settings, or mesh.pipeline=1"
        )
    there = jax.tree.map(
        lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own.sharding), stored_shapes(saved), shapes
    )
    found, params = load_step(run, there, average, step)
    move = jax.jit(lambda tree: stored(in_order(tree, saved), own), out_shardings=jax.tree.map(_sharding, shapes))
    return found, cast(Params, move(params))


def _sharding(shape: Any) -> Any:
    return shape.sharding


def evaluate_validation(checkpoint: Checkpoint, run: Path, count: int | None) -> list[Result]:
    """Return the loss on the validation text of the run's data, then that of each source of a mixture.

    `count` is the number of batches of each source, None for all of its text. With `train.eval_batches` on the run's
    own mesh, the program and the batches are those of validation during training, so its loss is the same. Raises
    DataError, and CheckpointError if the text is another one than in training.
    """
    config = checkpoint.config
    data, names = config.data, [source.label for source in config.data.sources]
    opened = open_tokens(data, config.model.vocab_size)
    _check_validation(run, checkpoint.step, opened, data)
    samples = [Samples.of(tokens, "validation", data) for tokens in opened]
    texts = [
        Text(f"validation/{name}" if names else "validation", each, source_tokenizer(data, number))
        for number, (name, each) in enumerate(zip(names or ["validation"], samples, strict=True))
    ]
    results = evaluate_texts(checkpoint, texts, count)
    if not names:
        return results
    weights = Mixture.of(data, config.train.batch_size, config.train.seed).weights_at(max(checkpoint.step, 1))
    losses = loss_metrics([result.loss for result in results], weights, names)
    return [Result("validation", losses["validation_loss"], sum(each.tokens for each in results)), *results]


def _check_validation(run: Path, step: int, sources: Sequence[Tokens], data: DataConfig) -> None:
    """Raise CheckpointError unless the validation tokens are those of training; all processes call it.

    Prints a warning if that is not known.
    """
    trained = len(load_config(run).data.mixture)
    if len(sources) != trained:
        raise CheckpointError(
            f"data.sources names {len(sources)} texts, and run {run} was trained on {trained}: leave it out, or "
            f"name other texts with {_OPTION}"
        )
    try:
        record = agreed_record(run, step)
    except DamagedError as error:  # since its parameters were read; or the run, which trains now, has deleted it
        raise CheckpointError(f"{damage_message(run, step, str(error))}: name another step") from None
    if record.text is None and step == 0:  # of an imported model
        return
    identity, cure = identity_of(run, step, sources), f"evaluate it with {_OPTION}"
    warning = check_text(identity, record, run, data, splits=("validation",), cure=cure)
    if warning and is_main_process():
        print(f"warning: {warning}", file=sys.stderr)


def evaluate_texts(checkpoint: Checkpoint, texts: Sequence[Text], count: int | None) -> list[Result]:
    """Return the loss on each text, over at most `count` batches spread evenly, or over all tokens.

    All tokens are those of a text if `count` is None, or if it does not fill a batch. Raises DataError.
    """
    size = checkpoint.config.train.batch_size
    compile_once = functools.cache(checkpoint.loss_of)
    results = []
    for text in texts:
        if count is None or len(text.samples) < size:
            config, batches = _with_padding(checkpoint.config), all_batches(text.samples, size)
        else:
            config, batches = checkpoint.config, spread_batches(text.samples, size, count)
        results.append(_evaluate(text, batches, compile_once(config), counts_all=not config.data.mask_documents))
    return results


def _evaluate(text: Text, batches: Iterable[Batch], loss_of: Callable[[Batch], float], counts_all: bool) -> Result:
    losses, weights, tokens, found_bytes = [], [], 0, 0
    for batch in tqdm(batches, unit="batch", desc=text.name, disable=None if is_main_process() else True, leave=False):
        targets = num_targets(batch)
        losses.append(loss_of(batch))
        weights.append(1 if counts_all else targets)  # as in validation during training
        tokens += targets
        found_bytes += text_bytes(batch, text.tokenizer) if text.tokenizer else 0
    return Result(text.name, mean(losses, weights), tokens, found_bytes or None)


def _with_padding(config: Config) -> Config:
    """The config with a step that does not count padding. Documents are marked only in tokens that have such marks."""
    data = dataclasses.replace(config.data, mask_documents=True, sources=(), path=DataConfig.path)
    kernel = "auto" if config.train.attention_kernel == "cudnn" else config.train.attention_kernel
    return dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, attention_kernel=kernel))


_OPTION = "--data"


def open_texts(names: Sequence[str], config: Config, run: Path) -> list[Text]:
    """Open .txt, .jsonl, .parquet and .array_record files, of which all text is used, and prepared folders.

    Of these the validation part is used. Raises UserError.
    """
    texts = [_open_text(name, config, run) for name in names]
    called = [text.name for text in texts]
    for name in called:
        if called.count(name) > 1:
            raise ConfigError(f"{_OPTION} names two texts {name}, which would share one result: evaluate one at a time")
    return texts


def _open_text(given: str, config: Config, run: Path) -> Text:
    path = find_data(given, _OPTION)
    if path.is_dir() and not is_text(path):
        data = dataclasses.replace(config.data, path=str(path), sources=(), tokenizer="bytes", text_key="text")
        read_meta(path, _OPTION)
        tokenizer = check_tokens_of_run(config, run, data, [_OPTION])
        (tokens,) = open_tokens(data, config.model.vocab_size, [_OPTION])
        return Text(path.name, Samples.of(tokens, "validation", data), tokenizer)
    tokenizer, known = tokenizer_of_run(config, run), config.model.vocab_size
    if tokenizer.vocab_size > known:
        raise ConfigError(
            f"{_OPTION}={path} is encoded with {tokenizer.vocab_size} tokens, more than model.vocab_size={known}: put "
            f"the model's own {BPE_FILE} into the run's folder"
        )
    return Text(path.name, text_samples(path, config.data, tokenizer, _OPTION), tokenizer)
