"""The loss by chunks of tokens against all logits at once: values, gradients, and what is in memory."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import ModelConfig, MoEConfig
from moe_jax.config.loss_chunks import tokens_of_chunk
from moe_jax.models.head import (
    NO_TARGET,
    SOURCE_STEP,
    HeadLoss,
    LossForm,
    LossTerms,
    head_loss,
    head_loss_onto,
)
from tests import references

MODEL = ModelConfig(vocab_size=40, hidden_size=16, num_layers=1, num_attention_heads=2, moe=MoEConfig(num_experts=0))


def example(model, sequences=3, length=8):
    rng = np.random.default_rng(0)
    name, shape = ("embedding", (40, 16)) if model.tie_word_embeddings else ("head", (16, 40))
    params = {"norm": rng.random(16, np.float32), name: rng.standard_normal(shape, np.float32)}
    params |= {"head_bias": rng.standard_normal(40, np.float32)} if model.head_bias else {}
    x_BnD = rng.standard_normal((sequences, length, 16), np.float32)
    return params, x_BnD, rng.integers(0, 40, (sequences, length))


def reference(params, x_BnD, target_Bn, model, z_weight):
    head = params["embedding"].T if model.tie_word_embeddings else params["head"]
    logits = references.norm(x_BnD, params["norm"], model.rms_norm_eps) @ head + params.get("head_bias", 0.0)
    log_share = jax.nn.log_softmax(logits)
    nats = -sum(log_share[i, j, target_Bn[i, j]] for i, j in np.ndindex(target_Bn.shape)) / target_Bn.size
    if not z_weight:
        return nats, HeadLoss(nats, None)
    z_loss = (jnp.log(jnp.exp(logits).sum(axis=-1)) ** 2).mean()
    return nats + z_weight * z_loss, HeadLoss(nats + z_weight * z_loss, LossTerms(nats, z_loss))


def loss_of(model, loss_chunk, z_weight=0.0):
    def mean(params, x_BnD, target_Bn):
        sums = head_loss(params, x_BnD, target_Bn, model, loss_chunk, LossForm(z_weight))
        loss = jax.tree.map(lambda total: total / target_Bn.size, sums)
        return loss.total, loss

    return mean


@pytest.mark.parametrize(("tied", "bias", "z_weight"), [(False, False, 0.0), (True, True, 0.0), (False, True, 0.3)])
@pytest.mark.parametrize(("loss_chunk", "length", "size"), [(None, 8, 24), (7, 8, 6), (12, 13, 10)])
def test_chunks_have_the_loss_and_gradients_of_the_whole(tied, bias, z_weight, loss_chunk, length, size):
    """None: all 24 tokens at once; 7: four chunks of 6; 12, of 39 tokens: four of 10, one token of them filling."""
    model = dataclasses.replace(MODEL, tie_word_embeddings=tied, head_bias=bias)
    params, x_BnD, target_Bn = example(model, length=length)
    assert tokens_of_chunk(target_Bn.size, model.vocab_size, loss_chunk) == size
    expected = jax.value_and_grad(reference, argnums=(0, 1), has_aux=True)(params, x_BnD, target_Bn, model, z_weight)
    run = jax.jit(jax.value_and_grad(loss_of(model, loss_chunk, z_weight), argnums=(0, 1), has_aux=True))
    found = run(params, x_BnD, target_Bn)
    without_gradient = jax.jit(loss_of(model, loss_chunk, z_weight))(params, x_BnD, target_Bn)
    chex.assert_trees_all_close(without_gradient, expected[0], rtol=1e-5)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("tied", "bias", "z_weight"), [(False, False, 0.0), (True, True, 0.3)])
def test_gradients_of_microbatches_added_up_in_one_array_are_those_of_the_whole(tied, bias, z_weight):
    model = dataclasses.replace(MODEL, tie_word_embeddings=tied, head_bias=bias)
    params, x_BnD, target_Bn = example(model)
    mean = loss_of(model, None, z_weight)
    grad = jax.jit(jax.value_and_grad(mean, argnums=(0, 1), has_aux=True))
    expected, (d_params, d_x_BnD) = grad(params, x_BnD, target_Bn)
    params, x_BnD, target_Bn = jax.tree.map(jnp.asarray, (params, x_BnD, target_Bn))
    totals, of_params, of_x, sums = [], [], [], None
    for r in range(3):

        def share(params, x_1nD, r=r, sums=sums):
            target_1n = target_Bn[r : r + 1]
            loss, so_far = head_loss_onto(params, x_1nD, target_1n, model, 3, LossForm(z_weight), sums, is_last=r == 2)
            return loss.total / target_Bn.size, so_far

        total, pullback, sums = jax.vjp(share, params, x_BnD[r : r + 1], has_aux=True)
        totals.append(total)
        for grads, found in zip((of_params, of_x), pullback(jnp.float32(1)), strict=True):
            grads.append(found)
    np.testing.assert_allclose(sum(totals), expected[0], rtol=1e-5)
    chex.assert_trees_all_close(jax.tree.map(lambda *each: sum(each), *of_params), d_params, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(of_x), d_x_BnD, rtol=1e-5, atol=1e-6)
    if not tied:
        assert [bool(jnp.any(grads["head"])) for grads in of_params] == [False, False, True]


@pytest.mark.parametrize("loss_chunk", [None, 7])
@pytest.mark.parametrize("z_weight", [0.0, 0.3])
def test_the_loss_of_each_source_is_that_of_its_tokens(loss_chunk, z_weight):
    """And the gradients are those without sources. Source 2 has no token; two tokens are not counted."""
    params, x_BnD, target_Bn = example(MODEL)
    target_Bn[0, :2] = NO_TARGET
    source_Bn = np.array([[0], [1], [3]]) + np.zeros_like(target_Bn)
    marked_Bn = np.where(target_Bn == NO_TARGET, NO_TARGET, target_Bn + source_Bn * SOURCE_STEP)

    def run(target_Bn, form):
        def loss(params, x_BnD, target_Bn):
            found = head_loss(params, x_BnD, target_Bn, MODEL, loss_chunk, form)
            return found.total, found.terms

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x_BnD, target_Bn)

    (total, terms), gradients = run(marked_Bn, LossForm(z_weight, 4))
    found = (total, terms._replace(source_loss_S=None)), gradients
    chex.assert_trees_all_close(found, run(target_Bn, LossForm(z_weight)), rtol=1e-6)
    for source in range(4):
        alone, _ = run(np.where(source_Bn == source, target_Bn, NO_TARGET), LossForm())
        np.testing.assert_allclose(terms.source_loss_S[source], alone[1].cross_entropy, rtol=1e-6)


def test_half_precision_is_as_exact_as_without_chunks():
    params, x_BnD, target_Bn = example(MODEL, length=64)

    def gradients(x_BnD, loss_chunk):
        run = jax.jit(jax.grad(loss_of(MODEL, loss_chunk), argnums=(0, 1), has_aux=True))
        return [np.float32(leaf) for leaf in jax.tree.leaves(run(params, x_BnD, target_Bn)[0])]

    expected = gradients(x_BnD, None)
    errors = [
        np.array([np.linalg.norm(a - b) for a, b in zip(gradients(jnp.bfloat16(x_BnD), size), expected, strict=True)])
        for size in (None, 16)
    ]
    assert (errors[1] < 1.2 * errors[0]).all()


def test_no_array_has_all_logits():
    sizes = []
    tokens, vocab_size, width = 1024, 2048, 16
    model = dataclasses.replace(MODEL, vocab_size=vocab_size)
    params = {"norm": np.ones(width, np.float32), "head": np.ones((width, vocab_size), np.float32)}
    given = params, np.ones((1, tokens, width), np.float32), np.zeros((1, tokens), np.int32)
    for loss_chunk in (None, 64):
        step = jax.jit(jax.grad(loss_of(model, loss_chunk), argnums=(0, 1), has_aux=True))
        sizes.append(step.lower(*given).compile().memory_analysis().temp_size_in_bytes)
    assert sizes[0] >= 4 * tokens * vocab_size
    assert sizes[1] < tokens * vocab_size


def test_operands_of_half_precision_stay_so():
    """A product of the logits' float32 gradient would run at a fraction of the speed."""
    params, x_BnD, target_Bn = example(MODEL)
    for loss_chunk in (None, 6):
        step = jax.jit(jax.grad(loss_of(MODEL, loss_chunk), argnums=(0, 1), has_aux=True))
        text = step.lower(params, jnp.bfloat16(x_BnD), target_Bn).as_text()
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert len(products) == (3 if loss_chunk is None else 6)  # the first chunk has its own
        assert all("algorithm" in line or line.count("bf16") == 3 for line in products)


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "most", "size"),
    [
        (4096, 32000, None, 4096),
        (8192, 32000, None, 4096),
        (8192, 151936, None, 512),
        (60, 7, 25, 20),
        (7, 7, 5, 4),
        (2053, 128_256, None, 1027),
    ],
)
def test_chunks_are_few_and_equal(tokens, vocab_size, most, size):
    assert tokens_of_chunk(tokens, vocab_size, most) == size
