"""The choice of the attention kernel for a platform, which the model and the memory planner share.

The `xla` kernel writes the logits of all pairs of tokens to memory. The `cudnn` kernel does not: it is an
implementation of FlashAttention-2 (Dao 2023).
"""

from typing import Literal

from moe_jax.config.sections import Sections
from moe_jax.errors import ConfigError

Kernel = Literal["xla", "cudnn"]
Capability = tuple[int, int]  # CUDA's compute capability
HOPPER: Capability = (9, 0)
_AMPERE: Capability = (8, 0)
# cuDNN's limits on the features of a head: the most before Hopper, the most since, and the divisor of their number
_WIDTH, _HOPPER_WIDTH, _MULTIPLE = 128, 256, 8
_CURE = "use train.attention_kernel=auto"


def kernel_of(config: Sections, platform: str, capability: Capability | None = HOPPER) -> Kernel:
    """Return the attention kernel for devices of a platform (cpu, gpu or tpu).

    `capability` is the compute capability of the GPUs; None means that they are not NVIDIA's. Raises ConfigError if
    the config requires cuDNN and these devices do not support it.
    """
    if config.train.attention_kernel == "auto":
        supported = not _settings_problem(config) and not _device_problem(config, platform, capability)
        return "cudnn" if supported else "xla"
    if config.train.attention_kernel == "cudnn" and (problem := _device_problem(config, platform, capability)):
        raise ConfigError(f"train.attention_kernel=cudnn {problem}: {_CURE}")
    return config.train.attention_kernel


def check_attention_kernel(config: Sections) -> None:
    """Raise ConfigError if the config requires cuDNN and no device's cuDNN supports its settings."""
    if config.train.attention_kernel == "cudnn" and (problem := _settings_problem(config)):
        raise ConfigError(f"train.attention_kernel=cudnn {problem}: {_CURE}")


def _settings_problem(config: Sections) -> str | None:
    """Describe the setting that cuDNN does not support, or return None."""
    model, width = config.model, max(config.model.qk_width, config.model.v_width)
    if config.train.compute_dtype != "bfloat16":
        return f"computes in bfloat16, and train.compute_dtype={config.train.compute_dtype}"
    if model.attention.sinks:
        return "has no sinks, and model.attention.sinks=true"
    if config.mesh.context != 1:
        return f"sees the tokens of one rank, and mesh.context={config.mesh.context}"
    if width > _HOPPER_WIDTH or model.qk_width % _MULTIPLE or model.v_width % _MULTIPLE:
        return (
            f"has heads of up to {_HOPPER_WIDTH} features, multiples of {_MULTIPLE}, and this model's have "
            f"{model.qk_width} and {model.v_width}"
        )
    if model.v_width > model.qk_width:
        return f"has values no wider than keys, and this model's have {model.v_width} and {model.qk_width}"
    return None


def _device_problem(config: Sections, platform: str, capability: Capability | None) -> str | None:
    """Describe why these devices cannot run the cuDNN kernel, or return None."""
    if platform != "gpu" or capability is None:
        return "is for NVIDIA's GPUs, which these devices are not"
    width = max(config.model.qk_width, config.model.v_width)
    needed = HOPPER if width > _WIDTH else _AMPERE
    if capability < needed:
        return f"needs compute capability {_text(needed)}, and these devices have {_text(capability)}"
    return None


def _text(capability: Capability) -> str:
    return ".".join(map(str, capability))
