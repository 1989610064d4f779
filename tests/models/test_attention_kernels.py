"""Which kernel computes attention, and that all kernels compute what XLA computes with all pairs in memory."""

import dataclasses
import functools
import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.extend.core import jaxprs_in_params

from moe_jax.config import AttentionConfig, Config, DataConfig, LatentConfig, MeshConfig, ModelConfig, TrainConfig
from moe_jax.config.attention_kernels import kernel_of, unfused_reason
from moe_jax.errors import ConfigError
from moe_jax.models.attention import kernels, tiles

BFLOAT16 = TrainConfig(compute_dtype="bfloat16")
WIDE = LatentConfig(kv_lora_rank=512)  # 192 features of keys, 128 of values
LONG = DataConfig(seq_len=1024)
CONFIG = Config(model=ModelConfig(num_attention_heads=2), train=BFLOAT16, data=LONG)
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


def of_length(config: Config, length: int) -> Config:
    return dataclasses.replace(config, data=DataConfig(seq_len=length))


@pytest.mark.parametrize(
    ("config", "platform", "capability", "kernel"),
    [
        (CONFIG, "gpu", HOPPER, "cudnn"),
        (CONFIG, "gpu", AMPERE, "cudnn"),
        (CONFIG, "gpu", (7, 5), "tiled"),
        (CONFIG, "gpu", None, "tiled"),
        (CONFIG, "tpu", None, "splash"),
        (CONFIG, "cpu", None, "tiled"),
        (LATENT, "gpu", HOPPER, "cudnn"),
        (LATENT, "gpu", AMPERE, "tiled"),
        (LATENT, "tpu", None, "splash"),
        (OTHERS["sinks"], "tpu", None, "splash"),
        (OTHERS["odd"], "tpu", None, "splash"),
        *((config, "gpu", HOPPER, "tiled") for config in OTHERS.values()),
        *((OTHERS[name], "tpu", None, "tiled") for name in ("float32", "context", "wide")),
        *((of_length(CONFIG, length), "tpu", None, "tiled") for length in (520, 1000)),
        *((of_length(CONFIG, 512), platform, None, "xla") for platform in ("cpu", "gpu")),
        (of_length(OTHERS["context"], 512), "gpu", HOPPER, "xla"),
    ],
)
def test_fused_kernels_are_chosen_where_they_can_be(config, platform, capability, kernel):
    """Else tiles, for sequences longer than one. There is a reason wherever a platform's fused kernel is not chosen."""
    assert kernel_of(config, platform, capability) == kernel
    assert (unfused_reason(config, platform, capability) is None) == (
        platform == "cpu" or kernel in ("cudnn", "splash")
    )


@pytest.mark.parametrize("platform", ["gpu", "tpu", "cpu"])
def test_over_context_ranks_no_kernel_is_fused_whatever_the_config_names(platform):
    """Plans count tiles, or the logits of short sequences, as with auto."""
    for asked, length, kernel in (("xla", 1024, "tiled"), ("tiled", 1024, "tiled"), ("tiled", 512, "xla")):
        train = dataclasses.replace(BFLOAT16, attention_kernel=asked)
        assert kernel_of(dataclasses.replace(of_length(OTHERS["context"], length), train=train), platform) == kernel


def test_other_kernels_mask_other_documents_where_cudnn_cannot():
    config = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, mask_documents=True))
    reason = "train.attention_kernel=cudnn masks no documents, and data.mask_documents=true"
    assert unfused_reason(config, "gpu", HOPPER) == reason
    assert kernel_of(config, "gpu", HOPPER) == "tiled"
    assert kernel_of(config, "tpu", None) == "splash"


def test_the_reason_names_the_setting():
    assert unfused_reason(OTHERS["sinks"], "gpu") == (
        "train.attention_kernel=cudnn has no sinks, and model.attention.sinks=true"
    )
    assert unfused_reason(of_length(CONFIG, 1000), "tpu") == (
        "train.attention_kernel=splash has sequences of multiples of 128 tokens, and data.seq_len=1000"
    )


def test_a_kernel_that_devices_lack_is_refused():
    asked = dataclasses.replace(LATENT, train=dataclasses.replace(BFLOAT16, attention_kernel="cudnn"))
    assert kernel_of(asked, "gpu", HOPPER) == "cudnn"
    with pytest.raises(ConfigError, match=r"cudnn is for NVIDIA's GPUs, which these devices are not: use .*=auto"):
        kernel_of(asked, "cpu", None)
    with pytest.raises(ConfigError, match=r"cudnn needs compute capability 9\.0, and these devices have 8\.6: use "):
        kernel_of(asked, "gpu", (8, 6))
    asked = dataclasses.replace(CONFIG, train=dataclasses.replace(BFLOAT16, attention_kernel="splash"))
    assert kernel_of(asked, "tpu") == "splash"
    with pytest.raises(ConfigError, match=r"splash is for TPUs, and these devices are gpu: use .*=auto"):
        kernel_of(asked, "gpu", HOPPER)


class Attention(NamedTuple):
    """A case of attention: sizes and masks."""

    length: int
    kv_heads: int = 2
    value_width: int = 16
    window: int | None = None
    extras: bool = False  # sinks and documents
    dtype: str = "float32"

    def inputs(self) -> tuple[list[jax.Array], jax.Array, jax.Array | None]:
        """Queries, keys, values and perhaps sinks; weights of the outputs; documents."""
        keys = jax.random.split(jax.random.key(0), 6)
        shapes = [(4, 16), (self.kv_heads, 16), (self.kv_heads, self.value_width), (4, self.value_width)]
        *arrays, weight = (
            jax.random.normal(key, (2, self.length, *shape), self.dtype)
            for key, shape in zip(keys, shapes, strict=False)
        )
        if not self.extras:
            return arrays, weight, None
        document = jnp.sort(jax.random.randint(keys[5], (2, self.length), 0, 4))  # borders anywhere, also inside tiles
        return [*arrays, jax.random.normal(keys[4], (4,))], weight, document

    def program(self, kernel):
        """A function that returns gradients of all inputs and the outputs, and its inputs."""
        inputs, weight, document = self.inputs()

        def total(query, key, value, sink=None):
            out = kernel(query, key, value, self.window, 0.3, sink, document)
            return jnp.sum(out * weight, dtype=jnp.float32), out

        return jax.jit(jax.grad(total, range(len(inputs)), has_aux=True)), inputs

    def results(self, kernel):
        """Gradients of all inputs, and outputs."""
        run, inputs = self.program(kernel)
        return run(*inputs)


@pytest.mark.parametrize(
    "case",
    [
        Attention(100),  # is padded
        Attention(96, kv_heads=1, value_width=8, window=40, extras=True),
    ],
    ids=str,
)
def test_tiles_give_the_values_and_gradients_of_all_pairs(case, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 32)
    chex.assert_trees_all_close(case.results(kernels.whole_sequence), case.results(kernels.xla), rtol=1e-5, atol=1e-5)


def test_the_splash_kernel_gives_the_values_and_gradients_of_all_pairs(monkeypatch):
    """Interpreted, with several blocks."""
    case = Attention(256, value_width=8, window=40, extras=True)
    monkeypatch.setattr(kernels, "splash_block", lambda length: 128)
    kernel = functools.partial(kernels.splash, interpret=True)
    chex.assert_trees_all_close(case.results(kernel), case.results(kernels.xla), rtol=1e-5, atol=1e-5)


def largest_array(jaxpr) -> int:
    """The elements of the largest array that a program computes, loops and calls included."""
    sizes = [var.aval.size for eqn in jaxpr.eqns for var in eqn.outvars if hasattr(var.aval, "size")]
    inner = [largest_array(each) for eqn in jaxpr.eqns for each in jaxprs_in_params(eqn.params)]
    return max(sizes + inner, default=0)


@pytest.mark.parametrize(
    ("kernel", "growth"),
    [(kernels.xla, 4), (kernels.whole_sequence, 2), (functools.partial(kernels.splash, interpret=True), 2)],
    ids=["xla", "tiled", "splash"],
)
def test_arrays_grow_with_the_sequence_and_not_with_its_square(kernel, growth):
    def gradients(length):
        inputs = [jax.ShapeDtypeStruct((1, length, 16, 128), jnp.float32)] * 3
        total = lambda *inputs: kernel(*inputs, 300, 0.3).sum()  # noqa: E731
        return jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(*inputs).jaxpr

    assert largest_array(gradients(8192)) == growth * largest_array(gradients(4096))


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("length", [33, 64, 100])
def test_tiles_cover_every_visible_pair_once(length, window):
    tile, pairs = tiles.of_sequence(length, window, 32)
    assert tile <= 32
    assert len({*map(tuple, pairs)}) == len(pairs)
    covered = np.zeros((length + tile, length + tile), bool)
    for query, key in pairs * tile:
        age = query + np.arange(tile)[:, None] - key - np.arange(tile)
        seen = (age >= 0) & (age < (window or length))
        assert seen.any(), "no tile without a visible pair"
        covered[query : query + tile, key : key + tile] = seen
    age = np.arange(length)[:, None] - np.arange(length)
    np.testing.assert_array_equal(covered[:length, :length], (age >= 0) & (age < (window or length)))


@pytest.mark.parametrize("value_width", [16, 8])
@pytest.mark.parametrize("window", [None, 5])
def test_cudnn_is_asked_for_what_xla_computes(window, value_width, monkeypatch):
    """jax's own attention in the place of cuDNN's, with the same arguments."""
    case = Attention(24, value_width=value_width, window=window)
    expected = case.results(kernels.xla)
    attention = jax.nn.dot_product_attention

    def instead(*arrays, implementation, **asked):
        assert implementation == "cudnn"
        return attention(*arrays, **asked, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    chex.assert_trees_all_close(case.results(kernels.cudnn), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 5])
def test_a_gpus_program_calls_cudnn_forward_and_backward(window, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)  # none is installed here
    run, inputs = Attention(24, value_width=8, window=window, dtype="bfloat16").program(kernels.cudnn)
    text = run.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line.replace("\\22", '"') for line in text.splitlines() if "cudnn$fmha" in line]
    names = [re.search(r"@?(__cudnn\$\w+)", line)[1] for line in calls]
    assert names == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    for line in calls:
        assert re.search(r"mask_type\W+CAUSAL", line)
        assert re.search(rf"sliding_window_length\W+{window or 0}\b", line)
        assert re.search(r"fmha_scale\W+0\.3\b", line)
