"""Seconds of what a block computes between the projections of its attention: products of queries, keys and values, or
the recurrence of a recurrent layer.
"""

from moe_jax.config import Config, ModelConfig
from moe_jax.config.attention_kernels import STATE_CHUNK, kernel_of
from moe_jax.plan.clusters import Device
from moe_jax.plan.products import Direction, measured_attention
from moe_jax.plan.recurrent import mean_over_blocks, recurrent_layer, recurrent_share
from moe_jax.plan.resources import mixed_matrices
from moe_jax.plan.work import attention_flops, attention_tile, computed_keys

# Bytes that pass through memory per pair of tokens and head, forward and backward: logits in float32, weights. An
# estimate of how much XLA fuses.
_PAIR_BYTES = (12, 24)
# The time of a backward pass over that of a forward pass: cuDNN and tiles compute logits again, five products instead
# of two. The splash kernel has seven, but they reach more of the peak than the forward pass: by their instructions the
# backward kernels take 2.4 times as long (profiling/splash_cycles.py), and waiting for memory is not counted there.
_BACKWARD, _BACKWARD_WITH_LOGITS = 2.0, 2.5


def squares_seconds(config: Config, device: Device, tokens: float, direction: Direction) -> float:
    """Seconds of attention between its projections in one block, for a device's `tokens`.

    Blocks of several kinds count with their mean.
    """
    if not (share := recurrent_share(config.model)):
        return _attention_s(config, device, tokens, direction)
    of_attention = _attention_s(config, device, tokens, direction) if share < 1 else 0.0
    return mean_over_blocks(config.model, of_attention, _recurrent_s(config.model, device, tokens, direction))


def _recurrent_s(model: ModelConfig, device: Device, tokens: float, direction: Direction) -> float:
    """Seconds of a recurrent layer's products of chunks, and of its memory traffic, in one block.

    The backward pass computes the forward pass again.
    """
    layer, backward = recurrent_layer(model), direction == "B"
    inner = min(layer.keys, STATE_CHUNK)
    rate = device.matrix_flops_per_s * device.matrix_efficiency * device.rate_shares.of("float32")
    products_s = layer.computed_flops * (inner + device.units.start) / inner / rate
    moved_s = layer.moved_bytes(backward) / device.copied_bytes_per_s
    return tokens * (products_s * (3 if backward else 1) + moved_s)


def _attention_s(config: Config, device: Device, tokens: float, direction: Direction) -> float:
    """Seconds of attention's products of activations and of their memory traffic, in one block."""
    model, backward = config.model, direction == "B"
    kernel = kernel_of(config, device.platform, device.capability)
    again = kernel == "cudnn" or (
        kernel != "splash" and attention_tile(config, kernel, config.mesh.context) is not None
    )
    factors = ((_BACKWARD_WITH_LOGITS if again else _BACKWARD), _BACKWARD) if backward else (1.0, 1.0)
    flops = factors[0] * attention_flops(config, tokens, device.platform, device.capability)
    flops += factors[1] * 2 * tokens * mixed_matrices(model)
    if kernel == "cudnn":
        return flops / (device.matrix_flops_per_s * device.attention_efficiency)
    measured = measured_attention(device.curves, config.data.seq_len, model.qk_width)
    if measured is not None:
        return flops / measured
    filled = model.qk_width / (model.qk_width + device.units.start)
    rate = device.matrix_flops_per_s * device.matrix_efficiency * filled
    moved_s = _PAIR_BYTES[backward] * _pairs(config, device, tokens) / device.copied_bytes_per_s
    return flops / rate + moved_s


def _pairs(config: Config, device: Device, tokens: float) -> float:
    """The number of (query, key, head) triples of a device that pass through memory."""
    if kernel_of(config, device.platform, device.capability) in ("cudnn", "splash"):
        return 0.0
    return tokens * computed_keys(config, device.platform, device.capability) * config.model.num_attention_heads
