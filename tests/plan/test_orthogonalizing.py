"""Muon's operations: of all matrices that it has, and shared by the ranks that share matrices."""

import dataclasses

import pytest

from moe_jax.config import (
    AttentionConfig,
    Config,
    DeltaNetConfig,
    LatentConfig,
    MambaConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
)
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.collective_costs import CollectiveCosts, DeviceGroup
from moe_jax.plan.estimate import update_seconds
from moe_jax.plan.orthogonalizing import (
    hidden_matrices,
    orthogonalizing_bytes,
    orthogonalizing_flops,
    sent_matrix_bytes,
)
from moe_jax.plan.resources import owned_by_kind

LATENT = LatentConfig(kv_lora_rank=36, q_lora_rank=52, qk_nope_head_dim=22, qk_rope_head_dim=10, v_head_dim=18)
MODELS = {
    "grouped": ModelConfig(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, moe=MoEConfig(bias=True)),
    "gelu": ModelConfig(hidden_size=48, activation="gelu", moe=MoEConfig(num_shared_experts=2, shared_gate=True)),
    "delta nets": ModelConfig(
        hidden_size=48,
        num_attention_heads=4,
        attention=AttentionConfig(output_gate=True),
        delta_net=DeltaNetConfig(num_value_heads=4, num_key_heads=2, key_head_dim=14, value_head_dim=10),
    ),
    "mamba": ModelConfig(
        hidden_size=48, num_attention_heads=4, mamba=MambaConfig(num_heads=4, head_dim=10, n_groups=2, d_state=14)
    ),
    "latents": ModelConfig(hidden_size=48, num_attention_heads=4, latent=LATENT, moe=MoEConfig(dense_residual=True)),
}
MUON = OptimizerConfig(name="muon")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("is_recurrent", [False, True])
@pytest.mark.parametrize("has_mlp", [False, True])
def test_matrices_have_all_parameters_of_matrices(
    model: ModelConfig, kind: str, is_recurrent: bool, has_mlp: bool
) -> None:
    found = dict.fromkeys(("whole", "heads_and_hidden", "expert"), 0)
    for each, arrays in hidden_matrices(model, kind, is_recurrent, has_mlp).items():
        found[each.owner] += (
            arrays * each.rows * each.columns * (model.moe.num_experts if each.owner == "expert" else 1)
        )
    expected = owned_by_kind(model, is_recurrent, has_mlp)[kind].hidden_matrices
    assert found == {name: getattr(expected, name) for name in found}


def test_ranks_that_share_matrices_share_operations() -> None:
    model = ModelConfig(
        hidden_size=64, num_layers=8, num_attention_heads=4, head_dim=16, moe=MoEConfig(intermediate_size=32)
    )

    def flops(**mesh: int) -> float:
        zero = mesh.pop("zero", 0)
        optimizer = dataclasses.replace(MUON, zero=zero)
        config = Config(model=model, mesh=MeshConfig(**mesh), optimizer=optimizer)
        return orthogonalizing_flops(config, config.mesh.sizes)

    of_square, of_expert = 5 * (4 * 64**3 + 2 * 64**3), 5 * (4 * 32**2 * 64 + 2 * 32**3)
    assert flops() == 8 * (4 * of_square + 3 * 8 * of_expert)
    assert flops(expert=4) == 8 * (4 * of_square + 3 * 2 * of_expert)
    assert flops(data=4) == flops()
    assert flops(tensor=4) == flops(data=4, zero=1) == flops() / 4
    assert flops(data=64, zero=1) == 4 * of_square + 3 * of_expert, "one of each stack at most"
    adamw = Config(model=model)
    assert orthogonalizing_flops(adamw, adamw.mesh.sizes) == orthogonalizing_bytes(adamw, "cpu", adamw.mesh.sizes) == 0


def test_an_update_needs_copies_of_the_largest_stack() -> None:
    model = ModelConfig(hidden_size=64, num_layers=8, num_attention_heads=4, moe=MoEConfig(intermediate_size=32))
    config = Config(model=model, mesh=MeshConfig(expert=2, data=2), optimizer=dataclasses.replace(MUON, zero=1))
    own = 8 * 4 * 64 * 32 / 2  # of eight blocks four experts, whose shards two data ranks share
    assert orthogonalizing_bytes(config, "cpu", config.mesh.sizes) == 5 * 4 * own
    assert orthogonalizing_bytes(config, "tpu", config.mesh.sizes) == 5 * 2 * own


def test_ranks_that_share_matrices_exchange_their_shards_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sends its shards of all matrices, and later as many bytes of results."""
    model = ModelConfig(hidden_size=64, num_layers=8, num_attention_heads=4, moe=MoEConfig(intermediate_size=32))

    def config_of(zero: int, **mesh: int) -> Config:
        return Config(model=model, mesh=MeshConfig(**mesh), optimizer=dataclasses.replace(MUON, zero=zero))

    square, experts = 8 * 4 * 64 * 64, 8 * 3 * 8 * 64 * 32  # of eight blocks
    sent = sent_matrix_bytes(config_of(1, data=4), "tpu", config_of(1, data=4).mesh.sizes)
    assert sent == {"heads_and_hidden": 2 * square / 4, "expert": 2 * experts / 4}
    cluster = find_cluster("v5p-4")
    collectives = CollectiveCosts(cluster)
    exchanged_s = sum(2 * collectives.exchange(each, DeviceGroup(4, 1), "flat").seconds for each in sent.values())
    update_s = update_seconds(config_of(1, data=4), cluster, collectives)
    monkeypatch.setattr("moe_jax.plan.estimate.sent_matrix_bytes", lambda *_: {})
    assert update_s == pytest.approx(update_seconds(config_of(1, data=4), cluster, collectives) + exchanged_s)
    with_tensor = sent_matrix_bytes(config_of(0, tensor=4), "tpu", config_of(0, tensor=4).mesh.sizes)
    assert with_tensor == sent


def test_products_in_float32_take_as_long_as_exact_ones() -> None:
    cluster, model = find_cluster("h100x1"), ModelConfig(hidden_size=64, num_layers=8, num_attention_heads=4)

    def seconds(dtype: str) -> float:
        config = Config(model=model, optimizer=dataclasses.replace(MUON, newton_schulz_dtype=dtype))
        return update_seconds(config, cluster, CollectiveCosts(cluster))

    device = cluster.device
    config = Config(model=model, optimizer=MUON)
    rate = device.matrix_flops_per_s * device.matrix_efficiency
    products_s = orthogonalizing_flops(config, config.mesh.sizes) / rate
    assert seconds("float32") - seconds("bfloat16") == pytest.approx((1 / device.rate_shares.exact - 1) * products_s)
    assert device.rate_shares.exact < 0.1
