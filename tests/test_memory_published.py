"""The papers' formulas for memory against one case by hand."""

import sys
from pathlib import Path

from moe_jax.config import Config, DataConfig, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from moe_jax.plan.resources import count_parameters

sys.path.insert(0, str(Path(__file__).parents[1] / "profiling"))

from memory_published import monta_bytes, piper_bytes


def test_published_formulas_are_those_of_the_papers() -> None:
    """By hand, for one block of width 4 with two experts of width 8 on two ranks, one head, 16 tokens of a device."""
    model = ModelConfig(
        hidden_size=4,
        num_attention_heads=1,
        num_layers=1,
        vocab_size=2,
        moe=MoEConfig(num_experts=2, top_k=2, intermediate_size=8),
    )
    config = Config(
        model=model, mesh=MeshConfig(data=1, expert=2), data=DataConfig(seq_len=16), train=TrainConfig(batch_size=2)
    )
    sizes = {"data": 1, "expert": 2, "tensor": 1, "context": 1}
    experts, activations = 48 * 4 * 8, 16 * (12 * 4 + 4 * 16 + 2 * 2 * (3 * 8 + 4))
    assert piper_bytes(config, sizes) == 64 * 16 + experts + activations
    counts = count_parameters(model)
    weights = 16 * (counts.total - 3 * 4 * 8)
    assert monta_bytes(config, sizes) == weights + 16 * ((13 + 42) * 4 + 5 * 16)
