"""The choice of the attention kernel for a platform, which the model and the memory planner share.

| kernel | what computes attention | memory |
|---|---|---|
| `xla` | XLA, all pairs of tokens at once | the logits of all pairs of tokens |
| `tiled` | XLA, tiles of queries and keys one after another | linear in the number of tokens |
| `cudnn` | cuDNN's implementation of FlashAttention-2 (Dao 2023), on NVIDIA's GPUs | linear |
| `splash` | JAX's Pallas kernel for TPUs | linear |

With context ranks none of these runs: a ring and gathered keys have tiles of their own.
"""

from typing import Literal

from moe_jax.config.sections import Sections
from moe_jax.errors import ConfigError

Kernel = Literal["xla", "tiled", "cudnn", "splash"]
Fused = Literal["cudnn", "splash"]  # kernels that never write logits to memory
Capability = tuple[int, int]  # CUDA's compute capability
ATTENTION_TILE = 512  # tokens of a tile of queries or keys
# tokens of a chunk of a recurrent layer: products of a chunk are square, and as many states as there are chunks pass
# through memory
STATE_CHUNK = 64
HOPPER: Capability = (9, 0)
_AMPERE: Capability = (8, 0)
# cuDNN's limits on the features of a head: the most before Hopper, the most since, and the divisor of their number
_WIDTH, _HOPPER_WIDTH, _MULTIPLE = 128, 256, 8
# The splash kernel's limits: the features of a head whose blocks fit into a TPU's vector memory, the most tokens of a
# block, and their divisor, the lanes of a vector
_SPLASH_WIDTH, _SPLASH_BLOCK, _SPLASH_MULTIPLE = 256, 1024, 128
_ROUND = 8  # tokens that tiles are multiples of
_FUSED: dict[str, Fused] = {"gpu": "cudnn", "tpu": "splash"}
_CURE = "use train.attention_kernel=auto"


def kernel_of(config: Sections, platform: str, capability: Capability | None = HOPPER) -> Kernel:
    """Return the attention kernel for devices of a platform (cpu, gpu or tpu).

    `capability` is the compute capability of the GPUs; None means that they are not NVIDIA's. Raises ConfigError if the
    config requires a kernel that these devices do not support. Over context ranks, the result says whether their
    attention has tiles, whichever kernel is named.
    """
    asked, fused = config.train.attention_kernel, _FUSED.get(platform)
    if asked in ("cudnn", "splash") and (problem := _device_problem(asked, config, platform, capability)):
        raise ConfigError(f"train.attention_kernel={asked} {problem}: {_CURE}")
    if asked != "auto":
        if config.mesh.context == 1:
            return asked
    elif fused is not None and unfused_reason(config, platform, capability) is None:
        return fused
    # Up to one tile, `tiled` would compute the same as `xla`, and its program would be larger.
    return "xla" if config.data.seq_len <= ATTENTION_TILE else "tiled"


def unfused_reason(config: Sections, platform: str, capability: Capability | None = HOPPER) -> str | None:
    """Return why a run with `attention_kernel=auto` does not use the fused kernel of its platform.

    None means that it does, that the config names a kernel, or that the platform has no fused kernel.
    """
    fused = _FUSED.get(platform)
    if fused is None or config.train.attention_kernel != "auto":
        return None
    problem = _device_problem(fused, config, platform, capability) or _settings_problem(fused, config)
    return f"train.attention_kernel={fused} {problem}" if problem else None


def tile_of(length: int, preferred: int = ATTENTION_TILE) -> int:
    """Return the tokens of a tile of the `tiled` kernel, whose tiles cover a sequence of this length.

    There are as few tiles as possible with at most the `preferred` number of tokens, which is a multiple of 8.
    """
    tile = -(-length // -(-length // preferred))
    return -(-tile // _ROUND) * _ROUND


def splash_block(length: int) -> int:
    """Return the tokens of a block of the splash kernel, whose blocks divide a sequence of this length."""
    return next(size for size in range(_SPLASH_BLOCK, 0, -_SPLASH_MULTIPLE) if length % size == 0)


def check_attention_kernel(config: Sections) -> None:
    """Raise ConfigError if the config requires a fused kernel that supports its settings on no device."""
    asked = config.train.attention_kernel
    if asked in ("cudnn", "splash") and (problem := _settings_problem(asked, config)):
        raise ConfigError(f"train.attention_kernel={asked} {problem}: {_CURE}")


def _settings_problem(kernel: Fused, config: Sections) -> str | None:
    """Describe the setting that a fused kernel does not support, or return None."""
    if config.train.compute_dtype != "bfloat16":
        return f"computes in bfloat16, and train.compute_dtype={config.train.compute_dtype}"
    if kernel == "cudnn" and config.model.attention.sinks:
        return "has no sinks, and model.attention.sinks=true"
    if kernel == "cudnn" and config.data.mask_documents:
        return "masks no documents, and data.mask_documents=true"
    chunk = config.model.attention.chunk_size
    if kernel == "cudnn" and chunk is not None and chunk < config.data.seq_len:
        return f"has no chunks, and model.attention.chunk_size={chunk} is below data.seq_len={config.data.seq_len}"
    if config.mesh.context != 1:
        return f"sees the tokens of one rank, and mesh.context={config.mesh.context}"
    return _cudnn_width_problem(config) if kernel == "cudnn" else _splash_shape_problem(config)


def _cudnn_width_problem(config: Sections) -> str | None:
    model, width = config.model, max(config.model.qk_width, config.model.v_width)
    if width > _HOPPER_WIDTH or model.qk_width % _MULTIPLE or model.v_width % _MULTIPLE:
        return (
            f"has heads of up to {_HOPPER_WIDTH} features, multiples of {_MULTIPLE}, and this model's have "
            f"{model.qk_width} and {model.v_width}"
        )
    if model.v_width > model.qk_width:
        return f"has values no wider than keys, and this model's have {model.v_width} and {model.qk_width}"
    return None


def _splash_shape_problem(config: Sections) -> str | None:
    width, length = max(config.model.qk_width, config.model.v_width), config.data.seq_len
    if length % _SPLASH_MULTIPLE:
        return f"has sequences of multiples of {_SPLASH_MULTIPLE} tokens, and data.seq_len={length}"
    if width > _SPLASH_WIDTH:
        return f"has heads of up to {_SPLASH_WIDTH} features, and this model's have {width}"
    return None


def _device_problem(kernel: Fused, config: Sections, platform: str, capability: Capability | None) -> str | None:
    """Describe why these devices cannot run a fused kernel, or return None."""
    if kernel == "splash":
        return None if platform == "tpu" else f"is for TPUs, and these devices are {platform}"
    if platform != "gpu" or capability is None:
        return "is for NVIDIA's GPUs, which these devices are not"
    width = max(config.model.qk_width, config.model.v_width)
    needed = HOPPER if width > _WIDTH else _AMPERE
    if capability < needed:
        return f"needs compute capability {_text(needed)}, and these devices have {_text(capability)}"
    return None


def _text(capability: Capability) -> str:
    return ".".join(map(str, capability))
