"""Opening a Hugging Face folder, with a check that it contains the expected model before weights are read."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from moe_jax.config import Config, ModelConfig, MoEConfig
from moe_jax.convert import mtp
from moe_jax.convert.families import differences, family_of, family_that_holds
from moe_jax.convert.family import Family
from moe_jax.convert.files import Weights
from moe_jax.convert.fused import stored_family
from moe_jax.convert.hf_config import FILE, ConvertError, config_in, read_config
from moe_jax.convert.quantized import quantization_of
from moe_jax.convert.table import ArrayPath, ArraySlice, array_slices, disk_shapes
from moe_jax.files.local_copy import local_outline, url_of
from moe_jax.telemetry.run_log import FILE_NAME as METRICS

_VISION = ("model.visual.", "vision_model.", "multi_modal_projector.")
_MTP = "model.num_nextn_predict_layers"
_LEFT_OUT = "its module of multi-token prediction is not read: "
ORIGIN = "imported_config.json"  # a copy of the config.json of the imported model, in the run's folder


def model_in(folder: Path) -> ModelConfig:
    """Return the model in a folder, without validation. Raises ConvertError."""
    hf = read_config(folder)
    return family_of(hf).model(hf)


def origin_of(config: Config) -> Path | None:
    """Return the config.json of the imported model that a run starts from, directly or through another run.

    Returns None if the run does not start from an imported model.
    """
    start = config.train.init_from
    files = [] if start is None else [local_outline(start) / FILE, local_outline(start) / ORIGIN]
    return next((file for file in files if file.exists()), None)


def is_imported(config: Config, run: Path) -> bool:
    """Whether an import created the run, and no training: it has a model's config.json and no metrics.

    Its `train.init_from` is the run itself, but may be a path relative to another folder, or from before it was moved.
    """
    if not (run / ORIGIN).exists():
        return False
    return config.train.init_from == url if (url := url_of(run)) else not (run / METRICS).exists()


def longest_sequence(config: Config, run: Path) -> int:
    """Return `max_position_embeddings` for a run: that of the imported model, or the length that it is scaled to.

    It is at least the sequence length of training.
    """
    scaling = config.model.rope_scaling
    longest = 0 if scaling.rope_type == "none" else round(scaling.original_max_position_embeddings * scaling.factor)
    file = _origin(config, run)
    if file is not None:
        hf = config_in(file)
        longest = hf.with_defaults(family_of(hf).defaults).whole("max_position_embeddings")
    return max(longest, config.data.seq_len)


def _origin(config: Config, run: Path) -> Path | None:
    return run / ORIGIN if (run / ORIGIN).exists() else origin_of(config)


@contextmanager
def open_model(folder: Path, model: ModelConfig, upcycle: bool = False) -> Iterator[tuple[Weights, Family]]:
    """Open a folder with the weights of a model, or of the dense model from which it is upcycled.

    Returns the tensors and their family. A module of multi-token prediction in the folder is left out if the model has
    none. Raises ConvertError if the folder contains another model, or is incomplete.
    """
    hf = read_config(folder)
    family = family_of(hf)
    there = family.model(hf)
    here = dense_twin(model) if upcycle else model
    check_same(folder, dataclasses.replace(here, num_nextn_predict_layers=0), there)
    with Weights(folder, quantization_of(hf)) as weights:
        if model.has_mtp and not (family.holds_mtp and mtp.has_module(weights.names(), model)):
            raise ConvertError(
                f"{_MTP}=1, and the model in {folder} has no module of multi-token prediction: use {_MTP}=0, or "
                "another model"
            )
        stored = stored_family(family, weights.names())
        unread = None if family.unread is None else family.unread.part
        slices = array_slices(model, stored)
        of_mtp = {copy: (name, f"use {_MTP}=0") for copy, name in mtp.copies(model).items()}
        weights.check(disk_shapes(slices), of_mtp | _tied_heads(model, weights, slices), unread)
        yield weights, stored


def _tied_heads(
    model: ModelConfig, weights: Weights, slices: Mapping[ArrayPath, Sequence[ArraySlice]]
) -> dict[str, tuple[str, str]]:
    """Return the heads in the files of a model with tied embeddings, which must be copies of its embedding."""
    if not model.tie_word_embeddings:
        return {}
    (embedding,) = [name for each in slices[("embedding",)] for name in each.names()]
    heads = [name for name in weights.names() if name.endswith("lm_head.weight")]
    return dict.fromkeys(heads, (embedding, "set tie_word_embeddings to false in config.json to use it"))


def left_out(folder: Path, model: ModelConfig) -> str | None:
    """Return a message on the parts of a model in a Hugging Face folder that are not read; None: there are none."""
    hf = read_config(folder)
    family = family_of(hf)
    with Weights(folder, quantization_of(hf)) as weights:
        names = weights.names()
    found = []
    if family.unread is not None and (unread := sum(family.unread.part in name for name in names)):
        found.append(family.unread.message(hf.with_defaults(family.defaults), unread))
    if not model.has_mtp and family.holds_mtp and mtp.has_module(names, model):
        found.append(f"{_LEFT_OUT}{_MTP}=1 reads it")
    elif mtp.has_foreign_module(names):
        found.append(f"{_LEFT_OUT}modules of this kind are not built, and the decoder does not need it")
    if vision := sum(name.startswith(_VISION) for name in names):
        found.append(f"{vision} tensors for images are not read: the model reads text only")
    return "; ".join(found) or None


def family_to_export(config: Config, run: Path, name: str | None) -> Family:
    """Return the family of this name; None: that of the model that a run began with, or the first one that can hold it.

    Raises ConvertError if there is none.
    """
    file = _origin(config, run)
    if name is None and file is not None:
        with suppress(ConvertError):
            return family_that_holds(config.model, family_of(config_in(file)).model_type)
    return family_that_holds(config.model, name)


def check_same(folder: Path, here: ModelConfig, there: ModelConfig) -> None:
    """Raise ConvertError unless the model of a folder (`there`) is the same function of tokens as `here`."""
    for name, (own, others) in differences(here, there).items():
        raise ConvertError(f"{name}={own}, and the model in {folder} has {name}={others}: use that, or another model")


def dense_twin(model: ModelConfig) -> ModelConfig:
    """Return the dense model from which a model is upcycled: its MLP initializes each expert."""
    return dataclasses.replace(model, intermediate_size=model.moe.intermediate_size, moe=MoEConfig(num_experts=0))
