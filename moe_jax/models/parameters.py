"""Declarations of the model's parameters: names, shapes, dimensions and initial values.

Blocks of one segment are stacked: a segment is a run of equal periods (e.g. dense, moe, dense, moe, …), and each
parameter of a period's block has a leading dimension over the periods, over which a scan iterates. Pipeline stages
have another order: blocks are in the rows that `moe_jax.config.layer_layout` assigns.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from moe_jax.config import AttentionView, ModelConfig
from moe_jax.config.gates import gate_parameters
from moe_jax.config.layer_layout import Stages, decoder_segments, segments
from moe_jax.parallel.sharding import Dims
from moe_jax.parallel.trees import ParamDims, Params, Tree

# names of the matrices before an MLP's activation, which determine it
_INNER = {
    "swiglu": ("gate", "up"),
    "clipped_swiglu": ("clipped_gate", "up"),
    "gelu": ("up",),
    "squared_relu": ("squared_up",),
}
_ROUTER_STD = 0.01  # small: initially all experts are about equally likely


class _Declare:
    """Declares the parameters of one block, stacked over `repeats` periods (None: not stacked)."""

    def __init__(self, rngs: nnx.Rngs, model: ModelConfig, repeats: int | None = None):
        self._rngs, self._repeats, self._zero_centered = rngs, repeats, model.rms_norm_zero_centered

    def matrix(self, std: float, **dims: int) -> nnx.Param:
        """Return a normal matrix with dimensions of these names and sizes."""
        shape, names = self._stacked(dims)
        return nnx.Param(std * jax.random.normal(self._rngs.params(), shape), dims=names)

    def scale(self, **dims: int) -> nnx.Param:
        """Return the weights of a norm that changes nothing."""
        return self.constant(0.0 if self._zero_centered else 1.0, **dims)

    def norm_of(self, module: nnx.Module, model: ModelConfig) -> None:
        """Give a module the norm of its input, or of the model's output: `norm`, of a LayerNorm also `norm_bias`."""
        module.norm = self.scale(model=model.hidden_size)
        if model.normalization == "layernorm":
            module.norm_bias = self.offset(model=model.hidden_size)

    def uniform(self, least: float, most: float, **dims: int) -> nnx.Param:
        """Return random numbers between two others."""
        shape, names = self._stacked(dims)
        return nnx.Param(jax.random.uniform(self._rngs.params(), shape, minval=least, maxval=most), dims=names)

    def constant(self, value: float, **dims: int) -> nnx.Param:
        """Return an array filled with `value`."""
        shape, names = self._stacked(dims)
        return nnx.Param(jnp.full(shape, value), dims=names)

    def offset(self, **dims: int) -> nnx.Param:
        """Return zeros, to be added."""
        shape, names = self._stacked(dims)
        return nnx.Param(jnp.zeros(shape), dims=names)

    def _stacked(self, dims: dict[str, int]) -> tuple[tuple[int, ...], Dims]:
        if self._repeats is None:
            return tuple(dims.values()), tuple(dims)
        return (self._repeats, *dims.values()), ("layers", *dims)


def _output_matrix(model: ModelConfig, declare: _Declare) -> nnx.Param:
    """Return the projection from values of heads to the model width."""
    std = (model.num_attention_heads * model.v_width * 2 * model.num_layers) ** -0.5
    return declare.matrix(std, heads=model.num_attention_heads, head=model.v_width, model=model.hidden_size)


class GroupedAttention(nnx.Module):
    """Projections of grouped-query attention."""

    def __init__(self, model: ModelConfig, declare: _Declare):
        width, in_std = model.head_width, model.hidden_size**-0.5
        declare.norm_of(self, model)
        self.query = declare.matrix(in_std, model=model.hidden_size, heads=model.num_attention_heads, head=width)
        self.key = declare.matrix(in_std, model=model.hidden_size, kv_heads=model.kv_heads, head=width)
        self.value = declare.matrix(in_std, model=model.hidden_size, kv_heads=model.kv_heads, head=width)
        self.out = _output_matrix(model, declare)
        queries, keys = {"heads": model.num_attention_heads, "head": width}, {"kv_heads": model.kv_heads, "head": width}
        if model.attention.bias:
            self.query_bias = declare.offset(**queries)
            self.key_bias = declare.offset(**keys)
            self.value_bias = declare.offset(**keys)
            if model.attention.out_bias:
                self.out_bias = declare.offset(model=model.hidden_size)
        if model.qk_norm:
            over_projection = model.qk_norm_over == "projection"
            self.query_norm = declare.scale(**(queries if over_projection else {"head": width}))
            self.key_norm = declare.scale(**(keys if over_projection else {"head": width}))
        if model.attention.sinks:
            self.sink = declare.offset(heads=model.num_attention_heads)
        if model.attention.output_gate:
            self.gate = declare.matrix(in_std, model=model.hidden_size, **queries)


class LatentAttention(nnx.Module):
    """Projections to and from the latents of multi-head latent attention."""

    def __init__(self, model: ModelConfig, declare: _Declare):
        d, heads, latent = model.hidden_size, model.num_attention_heads, model.latent
        rank, q_rank = latent.kv_lora_rank, latent.q_lora_rank
        assert rank is not None, "a model with latents"
        declare.norm_of(self, model)
        source = {"model": d}
        if q_rank is not None:
            self.query_latent = declare.matrix(d**-0.5, model=d, latent=q_rank)
            self.query_latent_norm = declare.scale(latent=q_rank)
            source = {"latent": q_rank}
        self.query = declare.matrix((q_rank or d) ** -0.5, **source, heads=heads, head=model.qk_width)
        self.kv_latent = declare.matrix(d**-0.5, model=d, latent=rank)
        self.kv_latent_norm = declare.scale(latent=rank)
        self.rope_key = declare.matrix(d**-0.5, model=d, head=latent.qk_rope_head_dim)
        self.key = declare.matrix(rank**-0.5, latent=rank, heads=heads, head=latent.qk_nope_head_dim)
        self.value = declare.matrix(rank**-0.5, latent=rank, heads=heads, head=model.v_width)
        self.out = _output_matrix(model, declare)
        if model.attention.sinks:
            self.sink = declare.offset(heads=heads)


class DeltaNet(nnx.Module):
    """Projections, convolution and decay of a gated delta net. Its value heads are grouped by their key head."""

    def __init__(self, model: ModelConfig, declare: _Declare):
        delta, d, in_std = model.delta_net, model.hidden_size, model.hidden_size**-0.5
        heads, values = delta.key_heads * delta.group, delta.group * delta.value_head_dim

        def projection(features: int) -> nnx.Param:
            return declare.matrix(in_std, model=d, kv_heads=delta.key_heads, head=features)

        declare.norm_of(self, model)
        self.query, self.key = projection(delta.key_head_dim), projection(delta.key_head_dim)
        self.value, self.gate = projection(values), projection(values)
        self.rate, self.step = projection(delta.group), projection(delta.group)
        channels = 2 * delta.key_width + delta.value_width
        self.conv = declare.matrix(delta.conv_kernel_dim**-0.5, channels=channels, taps=delta.conv_kernel_dim)
        self.decay_log, self.step_bias = _decay(declare, {"heads": heads})
        self.value_norm = declare.constant(1.0, head=delta.value_head_dim)
        std = (delta.value_width * 2 * model.num_layers) ** -0.5
        self.out = declare.matrix(std, heads=heads, head=delta.value_head_dim, model=d)


class Mamba(nnx.Module):
    """Projections, convolutions and decay of Mamba-2. Values are of heads, keys and queries of groups of heads."""

    def __init__(self, model: ModelConfig, declare: _Declare):
        mamba, d, in_std = model.mamba, model.hidden_size, model.hidden_size**-0.5
        heads = {"heads": mamba.num_heads or 0}
        values, keys = heads | {"head": mamba.head_dim}, {"group_heads": mamba.n_groups, "head": mamba.d_state}
        declare.norm_of(self, model)
        for name, dims in (("value", values), ("key", keys), ("query", keys)):
            setattr(self, name, declare.matrix(in_std, model=d, **dims))
            setattr(self, f"conv_{name}", declare.matrix(mamba.d_conv**-0.5, **dims, taps=mamba.d_conv))
            setattr(self, f"conv_{name}_bias", declare.offset(**dims))
        self.gate, self.step = declare.matrix(in_std, model=d, **values), declare.matrix(in_std, model=d, **heads)
        self.decay_log, self.step_bias = _decay(declare, heads)
        self.skip = declare.constant(1.0, **heads)
        self.value_norm = declare.constant(1.0, **values)
        self.out = declare.matrix((mamba.value_width * 2 * model.num_layers) ** -0.5, **values, model=d)


def _decay(declare: _Declare, heads: dict[str, int]) -> tuple[nnx.Param, nnx.Param]:
    """Return logarithms of decays of 1 to 16 per unit of time, and biases for steps of 0.001 to 0.1 units, as in
    Mamba-2.
    """
    return declare.uniform(0.0, math.log(16), **heads), declare.uniform(math.log(0.001), math.log(0.1), **heads)


class MLP(nnx.Module):
    """The matrices of an MLP, or of many at once (`experts=E` in `stack`)."""

    def __init__(self, model: ModelConfig, hidden: int, declare: _Declare, bias: bool = False, **stack: int):
        in_std, out_std = model.hidden_size**-0.5, (hidden * 2 * model.num_layers) ** -0.5
        for name in _INNER[model.activation]:
            setattr(self, name, declare.matrix(in_std, **stack, model=model.hidden_size, hidden=hidden))
        self.down = declare.matrix(out_std, **stack, hidden=hidden, model=model.hidden_size)
        if bias:
            for name in _INNER[model.activation]:
                setattr(self, f"{name}_bias", declare.offset(**stack, hidden=hidden))
            self.down_bias = declare.offset(**stack, model=model.hidden_size)


class MoELayer(nnx.Module):
    """The router, routed experts, shared experts, and the MLP of a dense residual."""

    def __init__(self, model: ModelConfig, declare: _Declare):
        moe = model.moe
        # "choices", not "experts": the router is replicated on every device
        for name, (dims, initial) in gate_parameters(model).items():
            setattr(self, name, _gate_parameter(declare, initial, dims))
        self.experts = MLP(model, moe.intermediate_size, declare, moe.bias, experts=moe.num_experts)
        if moe.num_shared_experts:
            self.shared = MLP(model, moe.intermediate_size * moe.num_shared_experts, declare)
            if moe.shared_gate:
                self.shared.token_gate = declare.matrix(model.hidden_size**-0.5, model=model.hidden_size, one=1)
        if moe.dense_residual:
            self.dense = MLP(model, model.intermediate_size, declare)


def _gate_parameter(declare: _Declare, initial: str | float, dims: dict[str, int]) -> nnx.Param:
    if isinstance(initial, float):
        return declare.constant(initial, **dims)
    if initial == "zeros":
        return declare.offset(**dims)
    return declare.matrix(_ROUTER_STD if initial == "router" else next(iter(dims.values())) ** -0.5, **dims)


class MTPInput(nnx.Module):
    """Two norms, of the last features and of the next token's embedding, and the projection of both together."""

    def __init__(self, model: ModelConfig, declare: _Declare):
        d = model.hidden_size
        self.embedding_norm = declare.scale(model=d)
        self.hidden_norm = declare.scale(model=d)
        self.projection = declare.matrix((2 * d) ** -0.5, joined=2 * d, model=d)


class Block(nnx.Module):
    """Attention, then an MLP, an MoE layer or nothing. That of multi-token prediction also makes its own input."""

    def __init__(self, kind: str, view: AttentionView, model: ModelConfig, declare: _Declare, is_mtp: bool = False):
        self.attention = _attention(model, view)(model, declare)
        if view.has_mlp:
            declare.norm_of(self, model)
        if kind == "moe":
            self.moe = MoELayer(model, declare)
        elif view.has_mlp:
            self.mlp = MLP(model, model.intermediate_size, declare)
        if is_mtp:
            self.mtp_input = MTPInput(model, declare)


def _attention(model: ModelConfig, view: AttentionView) -> Callable[[ModelConfig, _Declare], nnx.Module]:
    if view.recurrent is not None:
        return {"delta_net": DeltaNet, "mamba": Mamba}[view.recurrent]
    return LatentAttention if model.has_latents else GroupedAttention


class Transformer(nnx.Module):
    """All parameters of the decoder."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        declare, std = _Declare(rngs, model), model.hidden_size**-0.5
        self.embedding = declare.matrix(std, vocab=model.vocab_size, model=model.hidden_size)
        self.segments = nnx.List(
            nnx.List(
                Block(kind, view, model, _Declare(rngs, model, segment.repeats), number >= len(decoder_segments(model)))
                for kind, view in zip(segment.kinds, segment.views, strict=True)
            )
            for number, segment in enumerate(segments(model))
        )
        declare.norm_of(self, model)
        if model.has_mtp:
            self.mtp_norm = declare.scale(model=model.hidden_size)  # the last norm of multi-token prediction
        if not model.tie_word_embeddings:
            self.head = declare.matrix(std, model=model.hidden_size, vocab=model.vocab_size)
        if model.head_bias:
            self.head_bias = declare.offset(vocab=model.vocab_size)


def init_params(model: ModelConfig, seed: int) -> Params:
    """Return initial parameters: nested dicts of float32 arrays, the same for a seed on every mesh."""
    return nnx.to_pure_dict(nnx.state(Transformer(model, nnx.Rngs(seed)), nnx.Param))


def param_shapes(model: ModelConfig) -> Params:
    """Return the parameters as ShapeDtypeStructs; nothing is allocated."""
    return nnx.to_pure_dict(_declared(model))


def param_dims(model: ModelConfig) -> ParamDims:
    """Return the parameters' tree with each array replaced by the names of its dimensions."""
    named = jax.tree.map(lambda param: param.dims, _declared(model), is_leaf=lambda leaf: isinstance(leaf, nnx.Param))
    return nnx.to_pure_dict(named)


@functools.lru_cache(maxsize=16)
def _declared(model: ModelConfig) -> Tree:
    """Return an `nnx.State` of the parameters without values; building a step asks for it a dozen times."""
    return jax.eval_shape(lambda: nnx.state(Transformer(model, nnx.Rngs(0)), nnx.Param))


def stored_shapes(stages: Stages) -> Params:
    """Return the shapes of the parameters in the layout of stages; nothing is allocated."""
    return jax.eval_shape(lambda params: stored(params, stages), param_shapes(stages.model))


def stored(params: Params, stages: Stages) -> Params:
    """Return parameters in the layout of stages, from those in the order of blocks. Unused rows are 0."""

    def put(leaf: jax.Array, row: NDArray[np.int64], total: int) -> jax.Array:
        return jnp.zeros((total, *leaf.shape[1:]), leaf.dtype).at[row].set(leaf)

    return _rearrange(params, stages, put)


def in_order(params: Params, stages: Stages) -> Params:
    """Return parameters in the order of blocks, from those in the layout of stages."""
    return _rearrange(params, stages, lambda leaf, row, total: leaf[row])


def _rearrange(
    params: Params, stages: Stages, move: Callable[[jax.Array, NDArray[np.int64], int], jax.Array]
) -> Params:
    moved = {}
    for number, tree in params["segments"].items():
        total, *rows = stages.layout[number]
        row = np.array(rows)
        is_identity = np.array_equal(row, np.arange(total))
        moved[number] = (
            tree if is_identity else jax.tree.map(lambda leaf, row=row, total=total: move(leaf, row, total), tree)
        )
    return params | {"segments": moved}
