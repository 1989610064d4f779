"""The final norm, the output head, and its loss, computed at once or one chunk of tokens after another.

The loss is the cross-entropy, and the z-loss of the logits if it has a weight (PaLM, Chowdhery et al. 2022, section 5).

B sequences of this device, of which it has n tokens each, T = B·n; K chunks of c tokens; D model width, V vocabulary; S
sources of a mixture. A *head* is its matrix and its bias, which is None if there is none.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import Config, ModelConfig
from moe_jax.config.loss_chunks import tokens_of_chunk
from moe_jax.models.layers import block_norm, scaled, wide_matmul, wide_product
from moe_jax.parallel.trees import Tree

_SCOPE = "cross_entropy"
NO_TARGET = -1  # a token whose prediction is not counted, or that pads the last chunk
SOURCE_STEP = 1 << 24  # a target of source s is the token + s · SOURCE_STEP, if the form has sources


class Head(NamedTuple):
    """The parameters of the head."""

    matrix_DV: Float[Array, "D V"]
    bias_V: Float[Array, " V"] | None

    def logits(self, h_TD: Float[Array, "*T D"]) -> Float[Array, "*T V"]:
        """Return logits in float32."""
        logit_TV = wide_matmul(h_TD, self.matrix_DV)
        return logit_TV if self.bias_V is None else logit_TV + self.bias_V

    def gradients(self, h_TD: Float[Array, "T D"], d_logit_TV: Float[Array, "T V"]) -> "Head":
        """Return the gradients in float32, from those of the logits in the precision of `h_TD`."""
        d_bias_V = None if self.bias_V is None else d_logit_TV.astype(jnp.float32).sum(axis=0)
        return Head(wide_matmul(h_TD.T, d_logit_TV), d_bias_V)


_Gradients = tuple[jax.Array, Head]
_Residuals = tuple[jax.Array, Head, jax.Array, jax.Array, jax.Array, jax.Array | None]


class LossForm(NamedTuple):
    """What the head computes, constant over a run."""

    z_loss_multiplier: float = 0.0  # weight of the z-loss
    num_sources: int = 0  # sources of which the loss is summed separately; 0: of none
    has_mtp: bool = False  # whether the loss of multi-token prediction is added (`models/mtp.py`)

    @classmethod
    def of(cls, config: Config) -> "LossForm":
        """Return the form that a config asks for."""
        return cls(config.train.z_loss_multiplier, config.data.marked_sources, config.model.has_mtp)


class LossTerms(NamedTuple):
    """The terms of the head's loss, each a sum over tokens. They are not differentiated."""

    cross_entropy: Float[Array, ""]  # nats
    z_loss: Float[Array, ""] | None  # squared log-sum-exp of the logits; None: it has no weight
    source_loss_S: Float[Array, " S"] | None = None  # cross-entropy by source; None: of no mixture
    mtp_loss: Float[Array, ""] | None = None  # nats of multi-token prediction; None: there is none


class HeadLoss(NamedTuple):
    """The head's loss, summed over tokens."""

    total: Float[Array, ""]  # cross-entropy + z_loss_multiplier · z-loss: what is differentiated
    split: LossTerms | None  # None: the total is the cross-entropy

    @property
    def terms(self) -> LossTerms:
        """The terms, also if there is only one."""
        return LossTerms(self.total, None) if self.split is None else self.split

    @classmethod
    def cotangent(cls, d_total: Float[Array, ""], form: LossForm) -> "HeadLoss":
        """Return the cotangent of a loss of which only the total is differentiated."""
        return cls(d_total, no_loss(form) if form != LossForm() else None)


def unembed(params: Tree, x_BnD: Float[Array, "B n D"], model: ModelConfig) -> Float[Array, "B n V"]:
    """Return logits in float32. They are not differentiated."""
    head, h_BnD = _head(params, model), _features(params, x_BnD, model)
    matrix_DV = head.matrix_DV.astype(h_BnD.dtype)
    return wide_product(lambda h_BnD, matrix_DV: Head(matrix_DV, head.bias_V).logits(h_BnD), h_BnD, matrix_DV)


def head_loss(
    params: Tree,
    x_BnD: Float[Array, "B n D"],
    target_Bn: Int[Array, "B n"],
    model: ModelConfig,
    loss_chunk: int | None,
    form: LossForm,
) -> HeadLoss:
    """Return the loss of all tokens whose target is not NO_TARGET.

    `loss_chunk` is the setting of the config. If the form has sources, targets have them as multiples of
    SOURCE_STEP.
    """
    h_TD = _features(params, x_BnD, model).reshape(-1, model.hidden_size)
    head = _head(params, model)
    if not is_in_chunks(target_Bn, model, loss_chunk):
        with jax.named_scope(_SCOPE):
            return _at_once(form, h_TD, head, target_Bn.ravel())
    h_KcD, target_Kc = _chunks(h_TD, target_Bn, model, loss_chunk)
    with jax.named_scope(_SCOPE):
        return _by_chunks(form, h_KcD, head, target_Kc)


def head_loss_onto(
    params: Tree,
    x_BnD: Float[Array, "B n D"],
    target_Bn: Int[Array, "B n"],
    model: ModelConfig,
    loss_chunk: int | None,
    form: LossForm,
    so_far: Head | None,
    is_last: bool,
) -> tuple[HeadLoss, Head]:
    """Return the loss of a microbatch, chunk by chunk, and the head's gradients summed over it and those before it.

    The sums `so_far` are of the microbatches before it, None if there are none. They are added up in one array, in
    float32, for a total with the cotangent 1. Only the pullback of the last microbatch returns the head's gradients, of
    all microbatches. The cotangents of their totals must therefore be equal.
    """
    h_TD = _features(params, x_BnD, model).reshape(-1, model.hidden_size)
    h_KcD, target_Kc = _chunks(h_TD, target_Bn, model, loss_chunk)
    with jax.named_scope(_SCOPE):
        return _onto(form, is_last, h_KcD, _head(params, model), target_Kc, so_far)


def is_in_chunks(target_Bn: Int[Array, "B n"], model: ModelConfig, loss_chunk: int | None) -> bool:
    """Return whether `head_loss` computes the loss of these targets in several chunks."""
    return tokens_of_chunk(target_Bn.size, model.vocab_size, loss_chunk) < target_Bn.size


def _chunks(
    h_TD: Float[Array, "T D"], target_Bn: Int[Array, "B n"], model: ModelConfig, loss_chunk: int | None
) -> tuple[Float[Array, "K c D"], Int[Array, "K c"]]:
    chunk = tokens_of_chunk(target_Bn.size, model.vocab_size, loss_chunk)
    padding = -target_Bn.size % chunk
    h_KcD = jnp.pad(h_TD, ((0, padding), (0, 0))).reshape(-1, chunk, model.hidden_size)
    return h_KcD, jnp.pad(target_Bn.ravel(), (0, padding), constant_values=NO_TARGET).reshape(-1, chunk)


def _features(params: Tree, x_BnD: Float[Array, "B n D"], model: ModelConfig) -> Float[Array, "B n D"]:
    """Return the normed features of tokens, divided by the divisor of the logits."""
    return scaled(block_norm(params, x_BnD, model), 1 / model.logits_scaling)


def _head(params: Tree, model: ModelConfig) -> Head:
    return Head(params["embedding"].T if model.tie_word_embeddings else params["head"], params.get("head_bias"))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _at_once(form: LossForm, h_TD: Float[Array, "T D"], head: Head, target_T: Int[Array, " T"]) -> HeadLoss:
    """Compute the loss of all tokens at once.

    In differentiation, the exponentials of the logits, and then their gradient, re-use the memory of the logits.
    Autodiff would scatter the part of the target into an array of the same size, and XLA:CPU would copy all of that
    transposed.
    """
    return _at_once_forward(form, h_TD, head, target_T)[0]


def _at_once_forward(form: LossForm, h_TD: jax.Array, head: Head, target_T: jax.Array) -> tuple[HeadLoss, _Residuals]:
    target_T, source_T = _decoded(target_T, form)
    loss_T, lse_T, exp_TV, sum_T = _losses(head.logits(h_TD), target_T, form)
    return _total(_sums(loss_T, lse_T, source_T, form), form), (h_TD, head, target_T, exp_TV, sum_T, lse_T)


def _at_once_backward(form: LossForm, residuals: _Residuals, d: HeadLoss) -> tuple[jax.Array, Head, None]:
    h_TD, head, target_T, exp_TV, sum_T, lse_T = residuals
    d_logit_TV = (_logit_gradients(exp_TV, sum_T, lse_T, target_T, form) * d.total).astype(h_TD.dtype)
    d_head = jax.tree.map(lambda d, own: d.astype(own.dtype), head.gradients(h_TD, d_logit_TV), head)
    return d_logit_TV @ head.matrix_DV.astype(h_TD.dtype).T, d_head, None


_at_once.defvjp(_at_once_forward, _at_once_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_chunks(form: LossForm, h_KcD: Float[Array, "K c D"], head: Head, target_Kc: Int[Array, "K c"]) -> HeadLoss:
    """Compute the loss chunk by chunk.

    In differentiation, the gradient of a chunk's logits is used as soon as it exists, so no logits are computed twice.
    """
    head = head._replace(matrix_DV=head.matrix_DV.astype(h_KcD.dtype))

    def add_chunk(sums: LossTerms, chunk: tuple[jax.Array, jax.Array]) -> tuple[LossTerms, None]:
        h_cD, target_c = chunk
        target_c, source_c = _decoded(target_c, form)
        loss_c, lse_c, _, _ = _losses(head.logits(h_cD), target_c, form)
        return jax.tree.map(jnp.add, sums, _sums(loss_c, lse_c, source_c, form)), None

    return _total(jax.lax.scan(add_chunk, no_loss(form), (h_KcD, target_Kc))[0], form)


def no_loss(form: LossForm) -> LossTerms:
    """Return the terms before any token is added."""
    zero = jnp.float32(0)
    source_loss_S = jnp.zeros(form.num_sources) if form.num_sources else None
    return LossTerms(zero, zero if form.z_loss_multiplier else None, source_loss_S, zero if form.has_mtp else None)


def _losses(
    logit_cV: Float[Array, "c V"], target_c: Int[Array, " c"], form: LossForm
) -> tuple[Float[Array, " c"], Float[Array, " c"] | None, Float[Array, "c V"], Float[Array, " c"]]:
    """Return cross-entropies, log-sum-exps if the z-loss has a weight, exponentials of the logits minus the largest
    one, and the sums of these exponentials.
    """
    max_c = logit_cV.max(axis=-1)
    exp_cV = jnp.exp(logit_cV - max_c[:, None])
    sum_c = exp_cV.sum(axis=-1)
    lse_c = jnp.log(sum_c) + max_c
    loss_c = lse_c - jnp.take_along_axis(logit_cV, target_c[:, None], axis=-1)[:, 0]
    is_left_out_c = target_c == NO_TARGET
    loss_c = jnp.where(is_left_out_c, 0, loss_c)
    return loss_c, jnp.where(is_left_out_c, 0, lse_c) if form.z_loss_multiplier else None, exp_cV, sum_c


def _decoded(target_c: Int[Array, " c"], form: LossForm) -> tuple[Int[Array, " c"], Int[Array, " c"] | None]:
    """Return targets without their sources, and the sources; None if the form has none."""
    if not form.num_sources:
        return target_c, None
    return jnp.where(target_c == NO_TARGET, NO_TARGET, target_c % SOURCE_STEP), target_c // SOURCE_STEP


def _sums(
    loss_c: Float[Array, " c"], lse_c: Float[Array, " c"] | None, source_c: Int[Array, " c"] | None, form: LossForm
) -> LossTerms:
    terms = LossTerms(loss_c.sum(), None if lse_c is None else jnp.square(lse_c).sum())
    if source_c is None:
        return terms
    is_of_source_Sc = jnp.arange(form.num_sources)[:, None] == source_c
    return terms._replace(source_loss_S=jnp.where(is_of_source_Sc, loss_c, 0).sum(axis=1))


def _total(terms: LossTerms, form: LossForm) -> HeadLoss:
    if form == LossForm():
        return HeadLoss(terms.cross_entropy, None)
    if terms.z_loss is None:
        return HeadLoss(terms.cross_entropy, terms)
    return HeadLoss(terms.cross_entropy + form.z_loss_multiplier * terms.z_loss, terms)


def _logit_gradients(
    exp_cV: Float[Array, "c V"],
    sum_c: Float[Array, " c"],
    lse_c: Float[Array, " c"] | None,
    target_c: Int[Array, " c"],
    form: LossForm,
) -> Float[Array, "c V"]:
    """Return the gradient of the total with respect to the logits."""
    factor_c = (
        1 if lse_c is None else 1 + 2 * form.z_loss_multiplier * lse_c
    )  # softmax is the gradient of log-sum-exp, too
    scale_c = jnp.where(target_c == NO_TARGET, 0, factor_c / sum_c)
    return exp_cV * scale_c[:, None] - (jnp.arange(exp_cV.shape[1]) == target_c[:, None])


def _summed(
    form: LossForm, h_KcD: jax.Array, head: Head, target_Kc: jax.Array, so_far: Head | None
) -> tuple[HeadLoss, Head, jax.Array]:
    """Return the loss, the gradients of the head added to those `so_far`, and those of the features."""
    head = head._replace(matrix_DV=head.matrix_DV.astype(h_KcD.dtype))

    def of_chunk(h_cD: jax.Array, target_c: jax.Array) -> tuple[tuple[LossTerms, Head], jax.Array]:
        target_c, source_c = _decoded(target_c, form)
        loss_c, lse_c, exp_cV, sum_c = _losses(head.logits(h_cD), target_c, form)
        d_logit_cV = _logit_gradients(exp_cV, sum_c, lse_c, target_c, form).astype(h_cD.dtype)
        sums = _sums(loss_c, lse_c, source_c, form), head.gradients(h_cD, d_logit_cV)
        return sums, d_logit_cV @ head.matrix_DV.T

    def add_chunk(
        so_far: tuple[LossTerms, Head], chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[LossTerms, Head], jax.Array]:
        sums, dh_cD = of_chunk(*chunk)
        return jax.tree.map(jnp.add, so_far, sums), dh_cD

    if so_far is not None:
        (terms, d_head), dh_KcD = jax.lax.scan(add_chunk, (no_loss(form), so_far), (h_KcD, target_Kc))
        return _total(terms, form), d_head, dh_KcD
    # The first chunk, instead of zeros: XLA:TPU would allocate these when a step begins. With a barrier, or its logits'
    # gradient would wait in memory for one of the two products that read it.
    first, dh_first_cD = jax.lax.optimization_barrier(of_chunk(h_KcD[0], target_Kc[0]))
    (terms, d_head), dh_KcD = jax.lax.scan(add_chunk, first, (h_KcD[1:], target_Kc[1:]))
    return _total(terms, form), d_head, jnp.concatenate([dh_first_cD[None], dh_KcD])


def _forward(form: LossForm, h_KcD: jax.Array, head: Head, target_Kc: jax.Array) -> tuple[HeadLoss, _Gradients]:
    loss, d_head, dh_KcD = _summed(form, h_KcD, head, target_Kc, None)
    return loss, (dh_KcD, _stored_as(head, d_head))


def _stored_as(head: Head, d_head: Head) -> Head:
    return jax.tree.map(lambda d, own: d.astype(own.dtype), d_head, head)


def _backward(form: LossForm, gradients: _Gradients, d: HeadLoss) -> tuple[jax.Array, Head, None]:
    dh_KcD, d_head = _scaled(gradients, d.total)
    return dh_KcD, d_head, None


def _scaled(gradients: Tree, d_total: jax.Array) -> Tree:
    # d_total itself in half precision would scale all by a rounding error
    return jax.tree.map(lambda each: (each.astype(jnp.float32) * d_total).astype(each.dtype), gradients)


_by_chunks.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _onto(
    form: LossForm,
    is_last: bool,
    h_KcD: Float[Array, "K c D"],
    head: Head,
    target_Kc: Int[Array, "K c"],
    so_far: Head | None,
) -> tuple[HeadLoss, Head]:
    return _onto_forward(form, is_last, h_KcD, head, target_Kc, so_far)[0]


def _onto_forward(
    form: LossForm, is_last: bool, h_KcD: jax.Array, head: Head, target_Kc: jax.Array, so_far: Head | None
) -> tuple[tuple[HeadLoss, Head], tuple[jax.Array, Head | None]]:
    loss, d_head, dh_KcD = _summed(form, h_KcD, head, target_Kc, so_far)
    return (loss, d_head), (dh_KcD, _stored_as(head, d_head) if is_last else None)


def _onto_backward(
    form: LossForm, is_last: bool, gradients: tuple[jax.Array, Head | None], d: tuple[HeadLoss, Head]
) -> tuple[jax.Array, Head | None, None, None]:
    dh_KcD, d_head = _scaled(gradients, d[0].total)
    return dh_KcD, d_head, None, None


_onto.defvjp(_onto_forward, _onto_backward)
