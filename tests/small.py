"""A model small enough for every test, and its first parameters and tokens."""

import functools
from typing import Any

import jax
import numpy as np

from moe_jax.config import (
    Config,
    DataConfig,
    ExchangeConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    ScheduleConfig,
    TrainConfig,
)
from moe_jax.config.layer_layout import segments
from moe_jax.models.parameters import init_params


def small_config(
    data: int,
    expert: int,
    *,
    model: dict | None = None,
    schedule: dict | None = None,
    exchange: dict | None = None,
    batch_size: int = 8,
    seq_len: int = 12,
    tensor: int = 1,
    pipeline: int = 1,
    grad_accumulation: int = 1,
    context: int = 1,
    experts_over_context: bool = False,
    experts_over_tensor: bool = False,
    **moe,
) -> Config:
    """Two blocks (dense, then experts), grouped-query attention, 8 sequences of 12 tokens."""
    moe = {"num_experts": 8, "top_k": 2, "intermediate_size": 12, "moe_layer_freq": 2, "capacity_factor": 1.0} | moe
    shape = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
    }
    return Config(
        model=ModelConfig(**(shape | (model or {})), moe=MoEConfig(**moe)),
        mesh=MeshConfig(
            data=data,
            expert=expert,
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            experts_over_context=experts_over_context,
            experts_over_tensor=experts_over_tensor,
        ),
        schedule=ScheduleConfig(**(schedule or {})),
        exchange=ExchangeConfig(**(exchange or {})),
        data=DataConfig(seq_len=seq_len),
        train=TrainConfig(batch_size=batch_size, grad_accumulation=grad_accumulation, compute_dtype="float32"),
    )


def tokens_of(config: Config, seed: int = 0) -> np.ndarray:
    shape = (config.train.batch_size, config.data.seq_len + 1)
    return np.random.default_rng(seed).integers(0, config.model.vocab_size, shape, dtype=np.int32)


@functools.cache
def first_params(model: ModelConfig) -> Any:
    """Seed 0, as host arrays: free to be placed on any mesh. What begins with zeros does not here.

    Not under jit: a draw is compiled for each shape, which models share, instead of one program for each model.
    """
    params = jax.device_get(init_params(model, 0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x if x.any() else 0.5 * rng.standard_normal(x.shape, np.float32), params)


def block_params(params: Any, model: ModelConfig) -> list[Any]:
    """Each block's own parameters, from the bottom up."""
    return [
        jax.tree.map(lambda leaf, period=period: leaf[period], params["segments"][number][place])
        for number, segment in enumerate(segments(model))
        for period in range(segment.repeats)
        for place in range(len(segment.kinds))
    ]
