"""Which kernel computes attention, and that cuDNN is asked for what XLA computes."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from moe_jax.config import AttentionConfig, Config, LatentConfig, MeshConfig, ModelConfig, TrainConfig
from moe_jax.config.attention_kernels import kernel_of
from moe_jax.errors import ConfigError
from moe_jax.models.attention import kernels

BFLOAT16 = TrainConfig(compute_dtype="bfloat16")
WIDE = LatentConfig(kv_lora_rank=512)  # 192 features of keys, 128 of values
CONFIG = Config(model=ModelConfig(num_attention_heads=2), train=BFLOAT16)
LATENT = dataclasses.replace(CONFIG, model=ModelConfig(num_attention_heads=2, latent=WIDE))
AMPERE, HOPPER = (8, 0), (9, 0)
OTHERS = {
    "float32": dataclasses.replace(CONFIG, train=TrainConfig(compute_dtype="float32")),
    "sinks": dataclasses.replace(CONFIG, model=ModelConfig(attention=AttentionConfig(sinks=True))),
    "context": dataclasses.replace(CONFIG, mesh=MeshConfig(data=1, context=2)),
    "odd": dataclasses.replace(CONFIG, model=ModelConfig(num_attention_heads=2, head_dim=36)),
    "wide": dataclasses.replace(CONFIG, model=ModelConfig(num_attention_heads=2, head_dim=264)),
    "wide values": dataclasses.replace(CONFIG, model=ModelConfig(latent=LatentConfig(kv_lora_rank=8, v_head_dim=256))),
}


@pytest.mark.parametrize(
    ("config", "platform", "capability", "kernel"),
    [
        (CONFIG, "gpu", HOPPER, "cudnn"),
        (CONFIG, "gpu", AMPERE, "cudnn"),
        (CONFIG, "gpu", (7, 5), "xla"),
        (CONFIG, "gpu", None, "xla"),
        (CONFIG, "tpu", None, "xla"),
        (CONFIG, "cpu", None, "xla"),
        (LATENT, "gpu", HOPPER, "cudnn"),
        (LATENT, "gpu", AMPERE, "xla"),
        *((config, "gpu", HOPPER, "xla") for config in OTHERS.values()),
    ],
)
def test_flash_attention_is_chosen_where_it_can_be(config, platform, capability, kernel):
    assert kernel_of(config, platform, capability) == kernel


def test_flash_attention_that_devices_lack_is_refused():
    asked = dataclasses.replace(LATENT, train=dataclasses.replace(BFLOAT16, attention_kernel="cudnn"))
    assert kernel_of(asked, "gpu", HOPPER) == "cudnn"
    with pytest.raises(ConfigError, match=r"cudnn is for NVIDIA's GPUs, which these devices are not: use .*=auto"):
        kernel_of(asked, "cpu", None)
    with pytest.raises(ConfigError, match=r"cudnn needs compute capability 9\.0, and these devices have 8\.6: use "):
        kernel_of(asked, "gpu", (8, 6))


def attended(kernel, window, value_width, dtype):
    """Values that queries see, and gradients."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, 24, 4, 16), (2, 24, 2, 16), (2, 24, 2, value_width), (2, 24, 4, value_width)]
    *inputs, weight = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))

    def total(*inputs):
        seen = kernel(*inputs, window, 0.3)
        return jnp.sum(seen * weight, dtype=jnp.float32), seen

    return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True)), inputs


@pytest.mark.parametrize("value_width", [16, 8])
@pytest.mark.parametrize("window", [None, 5])
def test_cudnn_is_asked_for_what_xla_computes(window, value_width, monkeypatch):
    """jax's own attention in the place of cuDNN's, with the same arguments."""
    step, inputs = attended(kernels.xla, window, value_width, jnp.float32)
    expected = step(*inputs)
    attention = jax.nn.dot_product_attention

    def instead(*arrays, implementation, **asked):
        assert implementation == "cudnn"
        return attention(*arrays, **asked, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    step, inputs = attended(kernels.cudnn, window, value_width, jnp.float32)
    chex.assert_trees_all_close(step(*inputs), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 5])
def test_a_gpus_program_calls_cudnn_forward_and_backward(window, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)  # none is installed here
    step, inputs = attended(kernels.cudnn, window, 8, jnp.bfloat16)
    text = step.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line.replace("\\22", '"') for line in text.splitlines() if "cudnn$fmha" in line]
    names = [re.search(r"@?(__cudnn\$\w+)", line)[1] for line in calls]
    assert names == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    for line in calls:
        assert re.search(r"mask_type\W+CAUSAL", line)
        assert re.search(rf"sliding_window_length\W+{window or 0}\b", line)
        assert re.search(r"fmha_scale\W+0\.3\b", line)
