"""The tiny models of `tests/golden`, as they are read."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from safetensors.numpy import load_file

from moe_jax.config import Config, MeshConfig, ModelConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.convert.families import FAMILIES, family_of
from moe_jax.convert.files import Weights
from moe_jax.convert.hf_config import read_config
from moe_jax.convert.quantized import quantization_of
from moe_jax.convert.read import read_params
from moe_jax.models.parameters import param_dims, stored_shapes
from moe_jax.parallel.mesh import expert_axis, make_mesh
from moe_jax.parallel.sharding import partitions
from tests.models.test_decode import logits_of

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(FAMILIES)


def model_of(name: str) -> ModelConfig:
    hf = read_config(GOLDEN / name)
    return family_of(hf).model(hf)


def shapes_on(mesh: jax.sharding.Mesh, config: Config) -> Any:
    """Shapes of parameters as the config's stages hold them."""
    specs = partitions(param_dims(config.model), expert_axis(config.mesh))
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        stored_shapes(Stages.of(config)),
        specs,
    )


def read(folder: Path, mesh: MeshConfig | None = None) -> Any:
    """Parameters on a mesh; None: on one device."""
    hf = read_config(folder)
    family = family_of(hf)
    settings = mesh or MeshConfig()
    config = Config(model=family.model(hf), mesh=settings)
    devices = jax.devices()[: 1 if mesh is None else int(np.prod(list(mesh.sizes.values())))]
    with Weights(folder, quantization_of(hf)) as weights:
        return read_params(weights, family, Stages.of(config), shapes_on(make_mesh(settings, devices), config))


def expected(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and logits."""
    found = load_file(GOLDEN / name / "golden.safetensors")
    return found["tokens"], found["logits"]


def changed(name: str, folder: Path, **settings: Any) -> Path:
    """A copy of one of these models, with other settings in its config.json."""
    made = shutil.copytree(GOLDEN / name, folder / name)
    values = json.loads((made / "config.json").read_text()) | settings
    (made / "config.json").write_text(json.dumps(values))
    return made


def logits_in(folder: Path) -> np.ndarray:
    """Logits of the model in a folder, for the tokens of `golden.safetensors` there."""
    hf = read_config(folder)
    tokens = load_file(folder / "golden.safetensors")["tokens"]
    return np.asarray(logits_of(read(folder), tokens, family_of(hf).model(hf)))


def of_transformers(name: str) -> np.ndarray:
    """Logits of transformers 5.24 for one of these models with other settings: of the last tokens only."""
    return load_file(GOLDEN / "changed.safetensors")[name]
