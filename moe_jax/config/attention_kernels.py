"""Which kernel computes attention on which devices: the model and plans of memory have to know.

`xla` writes the logits of all pairs of tokens to memory, `cudnn` never does (FlashAttention-2, Dao 2023).
"""

from typing import Literal

from moe_jax.config.sections import Sections
from moe_jax.errors import ConfigError

Kernel = Literal["xla", "cudnn"]
Capability = tuple[int, int]  # CUDA's compute capability
HOPPER: Capability = (9, 0)
_AMPERE: Capability = (8, 0)
_WIDTH, _HOPPER_WIDTH, _MULTIPLE = 128, 256, 8  # of a head, that cuDNN knows
_CURE = "use train.attention_kernel=auto"


def kernel_of(config: Sections, platform: str, capability: Capability | None = HOPPER) -> Kernel:
    """Of devices of cpu, gpu or tpu; `capability` is that of a GPU, None if it is not NVIDIA's. Raises ConfigError."""
    if config.train.attention_kernel == "auto":
        return "xla" if _misfit(config) or _lacking(config, platform, capability) else "cudnn"
    if config.train.attention_kernel == "cudnn" and (lacking := _lacking(config, platform, capability)):
        raise ConfigError(f"train.attention_kernel=cudnn {lacking}: {_CURE}")
    return config.train.attention_kernel


def check_attention_kernel(config: Sections) -> None:
    """Raise ConfigError if cuDNN is asked for what it cannot compute on any device."""
    if config.train.attention_kernel == "cudnn" and (misfit := _misfit(config)):
        raise ConfigError(f"train.attention_kernel=cudnn {misfit}: {_CURE}")


def _misfit(config: Sections) -> str | None:
    """What of the settings cuDNN does not compute."""
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


def _lacking(config: Sections, platform: str, capability: Capability | None) -> str | None:
    """What the devices lack."""
    if platform != "gpu" or capability is None:
        return "is for NVIDIA's GPUs, which these devices are not"
    width = max(config.model.qk_width, config.model.v_width)
    needed = HOPPER if width > _WIDTH else _AMPERE
    if capability < needed:
        return f"needs compute capability {_text(needed)}, and these devices have {_text(capability)}"
    return None


def _text(capability: Capability) -> str:
    return ".".join(map(str, capability))
