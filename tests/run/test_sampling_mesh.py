"""Text that expert and tensor ranks generate: the tokens of one device, with parameters that stay sharded."""

import dataclasses

import jax
import pytest

from moe_jax.config import Config, DataConfig, MeshConfig, TrainConfig
from moe_jax.errors import ConfigError, MeshError
from moe_jax.models.sampling import Sampling
from moe_jax.run.generation import Decoder, Generation
from moe_jax.run.sampling_mesh import SamplingMesh, asked_mesh
from tests.models.test_decode import MODELS
from tests.small import first_params

PROMPTS = [[3, 1, 4], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4], [5, 9, 2, 6, 5, 3]]
ALONE = MeshConfig(data=1)


def config_of(name: str, **mesh: int) -> Config:
    moe = dataclasses.replace(MODELS[name].moe, hooks="fp8")  # what experts are sent is not rounded
    return Config(
        model=dataclasses.replace(MODELS[name], moe=moe),
        data=DataConfig(seq_len=16),
        train=TrainConfig(compute_dtype="float32"),
        mesh=MeshConfig(**mesh),
    )


def texts(config: Config, mesh: MeshConfig | None, params, sampling: Sampling) -> list[list[int]]:
    where = SamplingMesh.of(config, mesh)
    generation = Generation.of(Decoder(where, where.placed(params), sampling), PROMPTS, 10, seed=1)
    while not generation.is_done:
        generation.advance()
    return [row.new for row in generation.rows]


@pytest.mark.parametrize(
    ("name", "mesh", "sampling"),
    [
        ("grouped", MeshConfig(data=1, expert=2, tensor=2), Sampling()),
        ("latents", MeshConfig(data=1, expert=4), Sampling(1.0, top_k=20)),
        ("delta nets", MeshConfig(data=2, expert=1, tensor=2), Sampling()),
        ("sinks-and-biases", MeshConfig(data=1, expert=2, tensor=2), Sampling()),
        ("windows-and-no-rope", MeshConfig(data=1, expert=2, tensor=2), Sampling()),
    ],
)
def test_ranks_generate_the_tokens_of_one_device(name, mesh, sampling):
    """Three prompts, which do not divide over the ranks."""
    config = config_of(name)
    params = jax.tree.map(lambda x: 3 * x, first_params(config.model))
    assert texts(config, mesh, params, sampling) == texts(config, ALONE, params, sampling)


def test_no_device_holds_all_parameters():
    where = SamplingMesh.of(config_of("grouped"), MeshConfig(data=1, expert=2, tensor=2))
    params = where.placed(first_params(where.config.model))
    leaves = jax.tree.leaves_with_path(params)
    held = {jax.tree_util.keystr(path): x.size / x.addressable_shards[0].data.size for path, x in leaves}
    of_experts = [share for name, share in held.items() if "experts" in name]
    assert set(of_experts) == {4.0}
    assert {share for name, share in held.items() if "query'" in name or "mlp" in name} == {2.0}


def test_without_a_wish_the_runs_expert_and_tensor_ranks_generate(monkeypatch):
    """Where they exist, and were not simulated."""

    def sizes(**mesh: int) -> dict[str, int]:
        where = SamplingMesh.of(config_of("grouped", **mesh))
        return {name: size for name, size in where.mesh.shape.items() if size > 1}

    assert sizes(data=4, expert=2) == {"expert": 2}
    assert sizes(data=1, context=2, expert=2, tensor=2) == {"expert": 2, "tensor": 2}
    assert sizes(data=1, expert=4, cpu_devices=4) == {}
    with monkeypatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda: jax.devices()[:4])
        where = SamplingMesh.of(config_of("grouped", data=1, expert=4, tensor=2))
    assert where.mesh.size == 1
    assert where.missing.startswith("mesh.expert=4 × mesh.tensor=2 takes 8 devices, and this process has 4: ")


def test_devices_that_are_not_there_are_refused():
    config = config_of("grouped")
    with pytest.raises(MeshError, match=r"^mesh\.data=2 × mesh\.expert=4 × mesh\.tensor=2 takes 16 devices, and "):
        SamplingMesh.of(config, MeshConfig(data=2, expert=4, tensor=2))
    for axis, name in (("expert", r"moe\.num_experts"), ("tensor", "num_attention_heads")):
        another = rf"^mesh\.{axis}=3 does not divide model\.{name}=4: use mesh\.{axis}=1.* or \d$"
        with pytest.raises(ConfigError, match=another):
            SamplingMesh.of(config, MeshConfig(**{"data": 1, axis: 3}))
        with pytest.raises(ConfigError, match=rf"^mesh\.{axis}=0 must be at least 1"):
            SamplingMesh.of(config, MeshConfig(**{"data": 1, axis: 0}))
    with pytest.raises(ConfigError, match=r"^mesh\.data=0 must be at least 1"):
        SamplingMesh.of(config, MeshConfig(data=0))


def test_a_command_asks_for_data_expert_and_tensor_ranks():
    own = MeshConfig(data=8, expert=2, context=2, experts_over_context=True)
    assert asked_mesh(own, {"tensor"}) == MeshConfig(data=1, expert=2)
    assert asked_mesh(own, {"data"}) == MeshConfig(data=8, expert=2)
    assert asked_mesh(own, ()) is None
    for name, value in (("context", "2"), ("experts_over_context", "true")):
        with pytest.raises(ConfigError, match=rf"^mesh\.{name}={value}: text is generated over"):
            asked_mesh(own, {name})
