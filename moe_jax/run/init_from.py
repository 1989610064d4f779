"""Initial parameters of a new run from `train.init_from`: a Hugging Face model or another run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from moe_jax.checkpoint.checksums import names_of
from moe_jax.checkpoint.load import load_params
from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.config.yaml_io import load_config
from moe_jax.convert import hf_config
from moe_jax.convert.hf_config import ConvertError
from moe_jax.convert.read import read_params
from moe_jax.convert.source import check_same, open_model
from moe_jax.distributed.processes import first_problem
from moe_jax.errors import ConfigError, UserError
from moe_jax.files.local_copy import local_path
from moe_jax.models.parameters import init_params, stored


def check_source(config: Config) -> None:
    """Raise UserError if `train.init_from` is set and does not contain the config's model. Reads no weights."""
    if config.train.init_from is None:
        return
    folder = local_path(config.train.init_from)
    try:
        if _is_hf(folder):
            with open_model(folder, config.model, config.train.upcycle):
                return
        _check_run(config, folder)
    except UserError as error:
        raise ConfigError(f"train.init_from={config.train.init_from}: {error}") from None


def source_params(config: Config, shapes: Any) -> Any:
    """The parameters of `train.init_from`, with the shardings of `shapes`. All processes call it.

    The experts of an upcycled model are copies of its dense layer; its gates are random. Raises UserError.
    """
    folder = local_path(config.train.init_from or "")
    if not _is_hf(folder):
        return load_params(folder, shapes)
    params, problem = None, ""
    try:
        with open_model(folder, config.model, config.train.upcycle) as (weights, family):
            params = read_params(weights, family, Stages.of(config), shapes)
    except UserError as error:
        problem = str(error)
    if problem := first_problem(problem):
        raise ConvertError(problem)
    missing = {name for name, leaf in _by_name(shapes, params).items() if leaf is None}
    random = _first_values(config, shapes, missing) if missing else {}
    flat = [random.get(name, leaf) for name, leaf in _by_name(shapes, params).items()]
    return jax.tree.unflatten(jax.tree.structure(shapes), flat)


def _is_hf(folder: Path) -> bool:
    return (folder / hf_config.FILE).exists()


def _check_run(config: Config, folder: Path) -> None:
    """Raise UserError unless a folder is a run with the config's model and layout of blocks."""
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"it has no {hf_config.FILE} and no config.yaml: name the folder of a model, or of a run")
    if config.train.upcycle:
        raise ConfigError("it is a run, and train.upcycle=true needs the folder of a Hugging Face model")
    saved = load_config(folder)
    check_same(folder, config.model, saved.model)
    if Stages.of(config).layout != Stages.of(saved).layout:
        raise ConfigError(f"its blocks lie in the order of mesh.pipeline={saved.mesh.pipeline}: use as many stages")


def _by_name(shapes: Any, tree: Any) -> dict[str, Any]:
    """The leaves of a tree with the structure of `shapes`, by their names; missing ones are None."""
    return dict(zip(names_of(shapes), jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None), strict=True))


def _first_values(config: Config, shapes: Any, names: set[str]) -> dict[str, jax.Array]:
    """Random initial values of the named parameters, as without `train.init_from`; no others are computed."""

    def chosen(tree: Any) -> dict[str, Any]:
        return {name: leaf for name, leaf in _by_name(shapes, tree).items() if name in names}

    def init() -> dict[str, jax.Array]:
        return chosen(stored(init_params(config.model, config.train.seed), Stages.of(config)))

    placed = {name: shape.sharding for name, shape in chosen(shapes).items()}
    made: Callable[[], dict[str, jax.Array]] = jax.jit(init, out_shardings=placed)
    return made()
