"""The published models, with few and narrow blocks, as steps for GPUs and TPUs: each is traced, and not compiled.

So the devices need not exist. Every pair of values of model, platform, schedule and rematerialisation occurs in some
step; CPUs run the steps of other tests.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from moe_jax.config import Config, DataConfig, MeshConfig, ModelConfig, ScheduleConfig, TrainConfig
from moe_jax.config.attention_kernels import HOPPER
from moe_jax.config.yaml_io import load_config
from moe_jax.parallel.mesh import ALL_AXES
from moe_jax.step.compile import batch_shape
from moe_jax.step.trainer import make_trainer
from tests.pairwise import covering

FOLDER = Path(__file__).parents[2] / "configs/models"
_PERIOD = 2  # of blocks that differ
_ITERATIONS = 3  # enough for a scheduled step to scan over blocks
SCHEDULES = {
    "vanilla": {},
    "unified": {"policy": "unified", "microbatches": 2, "weight_grad": "greedy", "grad_reduce": "bucketed"},
}


@dataclass(frozen=True)
class Device:
    """What tracing a step reads of a device."""

    id: int
    platform: str
    process_index: int = 0
    device_kind: str = "absent"

    @property
    def coords(self) -> tuple[int, int, int]:
        return (self.id, 0, 0)


def narrowed(model: ModelConfig) -> ModelConfig:
    """The same kinds of blocks and of heads, a few of each, with small matrices and other constants."""
    moe, attention, latent = model.moe, model.attention, model.latent
    of_heads = model.num_key_value_heads not in (None, model.num_attention_heads)
    dense = min(moe.first_k_dense_replace, 1)
    delta = model.delta_net if model.has_delta_nets else replace(model.delta_net, full_attention_interval=None)
    mamba = replace(model.mamba, num_heads=4, n_groups=min(model.mamba.n_groups, 2), head_dim=8, d_state=8)
    if mamba.attn_layer_period:
        mixers = (0,) if mamba.mixer_only_offsets else ()
        places = {"attn_layer_offsets": (_PERIOD - 1,), "mixer_only_offsets": mixers}
        mamba = replace(mamba, attn_layer_period=_PERIOD, **places)
    periods = moe.moe_layer_freq, attention.full_every, attention.nope_every, delta.full_attention_interval
    freq, full, nope, interval = (n and min(n, _PERIOD) for n in periods)
    narrow = replace(delta, num_value_heads=4, num_key_heads=2, key_head_dim=8, value_head_dim=8)
    return replace(
        model,
        vocab_size=16,
        hidden_size=16,
        num_layers=dense + _ITERATIONS * max(freq, full or 1, nope or 1, interval or 1, model.has_mamba * _PERIOD),
        num_attention_heads=2,
        num_key_value_heads=1 if of_heads else None,
        head_dim=64 if latent.kv_lora_rank is None else None,
        intermediate_size=16,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        attention=replace(attention, full_every=full, nope_every=nope, chunk_size=attention.chunk_size and 3),
        latent=replace(latent, kv_lora_rank=latent.kv_lora_rank and 8, q_lora_rank=latent.q_lora_rank and 8),
        mamba=mamba if model.has_mamba else model.mamba,
        delta_net=replace(narrow, full_attention_interval=interval) if model.has_delta_nets else model.delta_net,
        moe=replace(
            moe,
            num_experts=8,
            top_k=min(moe.top_k, 2),
            intermediate_size=8,
            num_shared_experts=min(moe.num_shared_experts, 1),
            routed_scaling_factor=2.0,
            n_group=min(moe.n_group, 4),
            topk_group=min(moe.topk_group, 2),
            first_k_dense_replace=dense,
            moe_layer_freq=freq,
            aux_loss_coeff=0.01,
        ),
    )


def _models() -> dict[str, ModelConfig]:
    """One model of each group of models that are equal once narrowed, under the names of the group."""
    names: dict[ModelConfig, list[str]] = {}
    for file in sorted(FOLDER.glob("*.yaml")):
        names.setdefault(narrowed(load_config(file).model), []).append(file.stem)
    return {"+".join(group): model for model, group in names.items()}


MODELS = _models()


def _cases() -> list[dict[str, str]]:
    factors = {"model": [*MODELS], "platform": ["gpu", "tpu"], "schedule": [*SCHEDULES]}
    factors["remat"] = ["none", "full"]
    # stores most on GPUs, where narrow values are padded inside a call that returns a constant
    latent = next(name for name, model in MODELS.items() if model.latent.kv_lora_rank)
    padded = [{"model": latent, "platform": "gpu", "schedule": own, "remat": "none"} for own in SCHEDULES]
    pairs = covering(factors, lambda pair: False)
    return [*padded, *(case for case in pairs if case not in padded)]


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there are GPUs of that kind, and their cuDNN."""
    attention = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{attention}.check_compute_capability", lambda needed: True)
    monkeypatch.setattr(f"{attention}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr("moe_jax.models.transformer.capability_of", lambda device: HOPPER)


@pytest.mark.parametrize("case", _cases(), ids=lambda case: "-".join(case.values()))
def test_a_step_is_traced(case: dict[str, str]) -> None:
    config = Config(
        model=MODELS[case["model"]],
        data=DataConfig(seq_len=8),
        train=TrainConfig(batch_size=4),
        mesh=MeshConfig(expert=2),
        schedule=ScheduleConfig(**SCHEDULES[case["schedule"]], remat=case["remat"]),
    )
    devices = np.array([Device(number, case["platform"]) for number in range(2)]).reshape(1, 1, 1, 2, 1)
    mesh = Mesh(devices, ALL_AXES, axis_types=(AxisType.Auto,) * len(ALL_AXES))
    trainer = make_trainer(config, mesh)
    assert trainer.step.trace(*trainer.step_shapes(batch_shape(config, mesh))).jaxpr.eqns
