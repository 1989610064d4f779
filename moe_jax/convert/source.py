"""A Hugging Face folder and the model that it is to become, held against each other before numbers are read."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_jax.config import Config, ModelConfig, MoEConfig
from moe_jax.convert.families import differences, family_of
from moe_jax.convert.family import Family
from moe_jax.convert.files import Weights
from moe_jax.convert.fused import as_stored
from moe_jax.convert.hf_config import FILE, ConvertError, HfConfig, read_config, read_json
from moe_jax.convert.table import disk_shapes, places

ORIGIN = "imported_config.json"  # the config.json of the model that a run began with


def model_in(folder: Path) -> ModelConfig:
    """The model that a folder holds; not checked. Raises ConvertError."""
    hf = read_config(folder)
    return family_of(hf).model(hf)


def origin_of(config: Config) -> Path | None:
    """The config.json of the imported model that a run begins with, itself or through other runs; None: of none."""
    begun = config.train.init_from
    files = [] if begun is None else [Path(begun) / FILE, Path(begun) / ORIGIN]
    return next((file for file in files if file.exists()), None)


def is_imported(config: Config, run: Path) -> bool:
    """Whether the run was made by an import, whose config names itself as what it begins with."""
    begun = config.train.init_from
    return begun is not None and (run / ORIGIN).exists() and Path(begun).resolve() == run.resolve()


def longest_sequence(config: Config, run: Path) -> int:
    """`max_position_embeddings` of a run: as its model was imported, or is scaled to; no less than it trains with."""
    scaling = config.model.rope_scaling
    longest = 0 if scaling.rope_type == "none" else round(scaling.original_max_position_embeddings * scaling.factor)
    file = run / ORIGIN if (run / ORIGIN).exists() else origin_of(config)
    if file is not None:
        hf = HfConfig(read_json(file), str(file))
        longest = hf.with_defaults(family_of(hf).defaults).whole("max_position_embeddings")
    return max(longest, config.data.seq_len)


@contextmanager
def opened(folder: Path, model: ModelConfig, upcycle: bool = False) -> Iterator[tuple[Weights, Family]]:
    """The tensors of a folder that holds a model, or the dense one that it is upcycled from, and their family.

    Raises ConvertError if it holds another one, or not all of it.
    """
    hf = read_config(folder)
    family = family_of(hf)
    check_same(folder, dense_twin(model) if upcycle else model, family.model(hf))
    with Weights(folder) as weights:
        stored = as_stored(family, weights.names())
        weights.check(disk_shapes(places(model, stored)))
        yield weights, stored


def check_same(folder: Path, here: ModelConfig, there: ModelConfig) -> None:
    """Raise ConvertError unless the model of a folder is the same function of tokens as another."""
    for name, (own, others) in differences(here, there).items():
        raise ConvertError(f"{name}={own}, and the model in {folder} has {name}={others}: use that, or another model")


def dense_twin(model: ModelConfig) -> ModelConfig:
    """The dense model whose MLP each expert begins as."""
    return dataclasses.replace(model, intermediate_size=model.moe.intermediate_size, moe=MoEConfig(num_experts=0))
