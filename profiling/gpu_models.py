"""Two models that fill one device: coarse experts (Mixtral 8x7B) and fine-grained ones (DeepSeek-V2-Lite).

Widths are the published ones; the number of blocks is the largest that fits. Imports no jax.
"""

import dataclasses
from typing import Any

from moe_jax.config import Config, DataConfig, LatentConfig, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from moe_jax.plan.memory import step_memory

MODELS = {
    "coarse": ModelConfig(
        vocab_size=32000,
        hidden_size=4096,
        num_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        moe=MoEConfig(num_experts=8, top_k=2, intermediate_size=14336, capacity_factor=None),
    ),
    "fine": ModelConfig(
        vocab_size=102400,
        hidden_size=2048,
        num_layers=27,
        num_attention_heads=16,
        intermediate_size=10944,
        latent=LatentConfig(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        moe=MoEConfig(
            num_experts=64,
            top_k=6,
            intermediate_size=1408,
            num_shared_experts=2,
            first_k_dense_replace=1,
            gate="deepseek_v2",
            norm_topk_prob=False,
            capacity_factor=None,
        ),
    ),
}
_TOY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4}
TOYS = {
    "coarse": dataclasses.replace(
        MODELS["coarse"],
        **_TOY,
        num_key_value_heads=2,
        moe=dataclasses.replace(MODELS["coarse"].moe, num_experts=4, intermediate_size=32),
    ),
    "fine": dataclasses.replace(
        MODELS["fine"],
        **_TOY,
        intermediate_size=48,
        latent=LatentConfig(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
        moe=dataclasses.replace(MODELS["fine"].moe, num_experts=8, top_k=3, intermediate_size=16),
    ),
}
_SEQ_LEN, _SEQUENCES = 2048, (16, 12, 8, 6, 4)
_LEAST, _LEAST_LOOPED = 8, 4  # sequences that have to fit with the chosen number of blocks
# Share of the memory used. A loop's prediction may be too low. Where blocks are unrolled, XLA:GPU computes values again
# in programs that would take more than 0.784 of the device's memory, which would cost time.
_SHARE, _SHARE_LOOPED = 0.78, 0.92


def config_of(model: ModelConfig, sequences: int, seq_len: int = _SEQ_LEN, **schedule: Any) -> Config:
    """Return the config of the model's step on one device."""
    config = Config(
        model=model,
        mesh=MeshConfig(data=1, expert=1),
        data=DataConfig(seq_len=seq_len),
        train=TrainConfig(batch_size=sequences, compute_dtype="bfloat16"),
    )
    return dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, **schedule))


def with_capacity(config: Config, factor: float | None) -> Config:
    """Return the config with this capacity factor."""
    moe = dataclasses.replace(config.model.moe, capacity_factor=factor)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe))


def with_sequences(config: Config, sequences: int) -> Config:
    """Return the config with another number of sequences in a batch."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=sequences))


def unrolled(config: Config) -> Config:
    """Return the config with all blocks unrolled.

    Then XLA:GPU neither stacks casts of weights and gradients over the blocks, nor copies blocks out of stacks.
    """
    schedule = dataclasses.replace(config.schedule, unroll=config.model.num_layers)
    return dataclasses.replace(config, schedule=schedule)


def filling(model: ModelConfig, num_bytes: int, looped: bool = False) -> Config | None:
    """Return the config with the most blocks that fit with 8 sequences, then the most sequences; None if no block fits.

    All blocks are unrolled, and all activations are stored: MFU does not count recomputation. `looped`: a loop over
    blocks, and at least 4 sequences.
    """
    least = _LEAST_LOOPED if looped else _LEAST
    budget = (_SHARE_LOOPED if looped else _SHARE) * num_bytes
    for layers in range(model.num_layers, model.moe.first_k_dense_replace, -1):
        cut = dataclasses.replace(model, num_layers=layers)
        shaped = (config_of(cut, count, unroll=1 if looped else layers) for count in _SEQUENCES if count >= least)
        if fitting := next((each for each in shaped if step_memory(each, "gpu").total <= budget), None):
            return fitting
    return None
