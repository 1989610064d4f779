"""What each gate decides, and what its parameters learn from it, against its slow reference.

T tokens, D features, E experts, k choices.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.config import ModelConfig, MoEConfig
from moe_jax.config.gates import gate_parameters
from moe_jax.config.registry import GATE_FACTS
from moe_jax.models.dispatchers import GATE_DISPATCHERS, dispatcher_of
from moe_jax.models.dispatchers.protocol import full_capacity
from moe_jax.models.gates import GATES, gate_of
from moe_jax.models.gates.balanced import rotation
from moe_jax.models.gates.choice import ExpertChoiceRouting, SoftRouting, TopKRouting
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.gates.protocol import GateOutput
from moe_jax.models.moe import RouterContext, RouterStats, load_balance_loss, route, unpermute
from moe_jax.step.losses import ObjectiveParts, metrics_of
from tests import gate_references
from tests.gate_references import Draws
from tests.numpy_gradients import value_and_grad

DOCS = Path(__file__).parents[2] / "docs"
TOKENS, WIDTH, BLOCK, SEED, STEP = 24, 6, 3, 7, 11
NUMBERS = np.arange(1.0, 9.0, dtype=np.float32)
ALONE = [name for name, facts in GATE_FACTS.items() if facts.splits]
BIASED = [name for name, facts in GATE_FACTS.items() if "bias_update_rate" in facts.settings]
GROUPED = [name for name, facts in GATE_FACTS.items() if facts.group_scorers]


def moe_of(gate: str, **more) -> MoEConfig:
    own = {"n_group": 4, "topk_group": 2} if gate in GROUPED else {}
    own |= {"slots_per_expert": 2} if gate == "softmoe" else {}
    own |= {"router_jitter_noise": 0.3} if gate == "sparsemixer" else {}
    return MoEConfig(**({"num_experts": 8, "top_k": 2, "routed_scaling_factor": 1.5, "gate": gate} | own | more))


def params_of(moe: MoEConfig) -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    shapes = {
        name: tuple(dims.values())
        for name, (dims, _) in gate_parameters(ModelConfig(hidden_size=WIDTH, moe=moe)).items()
    }
    return {name: jnp.asarray(0.5 + 0.6 * rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def features(tokens: int = TOKENS) -> jax.Array:
    return jax.random.normal(jax.random.key(2), (tokens, WIDTH))


def router_inputs_of(tokens: int = TOKENS, seed: int = SEED, step: int = STEP, block: int = BLOCK) -> RouterInputs:
    key = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), step))
    ids = np.random.default_rng(3).integers(0, 9, tokens)
    return RouterInputs(jnp.asarray(ids, jnp.int32), jnp.arange(tokens, dtype=jnp.int32) + 100, key, jnp.int32(block))


def draws_of(router_inputs: RouterInputs) -> Draws:
    seed = None if router_inputs.key is None else (SEED, STEP)
    return Draws(np.asarray(router_inputs.id), np.asarray(router_inputs.place), BLOCK, seed)


def through(decision: Any, x_TD: jax.Array, moe: MoEConfig) -> jax.Array:
    """What experts that multiply by their number make of the tokens, without a limit of slots."""
    if isinstance(decision, TopKRouting):
        weight_TE = (jax.nn.one_hot(decision.expert_Tk, moe.num_experts) * decision.weight_Tk[..., None]).sum(1)
        return (weight_TE @ NUMBERS)[:, None] * x_TD
    dispatcher = dispatcher_of(moe)
    sent, metadata = dispatcher.permute(x_TD, decision, moe, 2)
    return dispatcher.unpermute(sent.rows * NUMBERS.reshape(2, 4, 1, 1), metadata)


def by_reference(params: Any, x_TD: jax.Array, router_inputs: RouterInputs, moe: MoEConfig) -> tuple[Any, ...]:
    """The same, and probabilities and logits, by the slow reference."""
    everyone = [np.arange(len(x_TD))]
    if moe.gate == "softmoe":
        return gate_references.softmoe(params, x_TD, moe, everyone, lambda expert, rows: NUMBERS[expert] * rows)
    if moe.gate == "expert_choice":
        weight_TE, prob_TE, _ = gate_references.expert_choice(params, x_TD, moe, everyone)
        return (weight_TE @ NUMBERS)[:, None] * x_TD, prob_TE, gate_references.linear(params, x_TD)
    weight_TE, prob_TE, _, logit_TE = gate_references.GATES[moe.gate](params, x_TD, moe, draws_of(router_inputs))
    return (weight_TE @ NUMBERS)[:, None] * x_TD, prob_TE, logit_TE


@functools.partial(jax.jit, static_argnames="moe")
def decide(params: Any, x_TD: jax.Array, router_inputs: RouterInputs | None, moe: MoEConfig) -> GateOutput:
    return gate_of(moe)(params, x_TD, router_inputs, moe)


def by_gate(params: Any, x_TD: jax.Array, router_inputs: RouterInputs, moe: MoEConfig) -> tuple[Any, ...]:
    decision, logit_TE = decide(params, x_TD, router_inputs, moe)
    return through(decision, x_TD, moe), decision.prob_TE, logit_TE


def total_of(out_TD: Any, prob_TE: Any, logit_TE: Any) -> Any:
    """One number of all that a gate decides, which every expert's weight is in."""
    rng = np.random.default_rng(4)
    total = (out_TD * rng.standard_normal(out_TD.shape)).sum() + (prob_TE * rng.standard_normal(prob_TE.shape)).sum()
    return total if logit_TE is None else total + (logit_TE**2).mean()


def test_the_table_knows_every_gate():
    assert list(GATE_FACTS) == list(GATES)
    assert {facts.decides for facts in GATE_FACTS.values() if facts.fills_slots} == GATE_DISPATCHERS.keys()


def test_the_documentation_has_every_gate_and_what_it_reached():
    text, root = (DOCS / "gates.md").read_text(), DOCS.parent
    reached = json.loads((root / "profiling" / "results" / "gates.json").read_text())["gates"]
    assert list(reached) == [gate for gate, facts in GATE_FACTS.items() if not facts.for_timing_only]
    for gate, values in reached.items():
        losses = f"{values['validation_loss']:.3f} | {values['training_loss']:.3f}"
        dropped = f"{100 * values['dropped_fraction']:.1f} %"
        reached_row = f"{losses} | {values['load_max_over_mean']:.2f} | {dropped} | {values['parameters']:,}"
        assert f"| `{gate}` | {reached_row} |" in text
        assert text.count(f"\n| `{gate}` |") == 2, "what it is, and what was measured"
    for gate in GATE_FACTS.keys() - reached.keys():
        assert text.count(f"\n| `{gate}` |") == 1, "what it is"


@pytest.mark.parametrize(
    ("gate", "normalize"), [*((gate, True) for gate in GATES), ("sigmoid", False), ("deepseek_v2", False)]
)
def test_decisions_and_gradients_are_those_of_the_reference(gate, normalize):
    moe = moe_of(gate, norm_topk_prob=normalize)
    params, x_TD, router_inputs = params_of(moe), features(), router_inputs_of()

    def decided(inputs: Any, by: Any) -> Any:
        found = by(*inputs, router_inputs, moe)
        return total_of(*found), found

    slow, fast = functools.partial(decided, by=by_reference), functools.partial(decided, by=by_gate)
    (_, expected), expected_grads = value_and_grad(slow)((params, x_TD))
    (_, found), grads = jax.jit(jax.value_and_grad(fast, has_aux=True))((params, x_TD))
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    chex.assert_trees_all_close(grads, expected_grads, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid", "deepseek_v3", "xmoe"])
def test_one_expert_has_its_score_as_weight_or_1(gate):
    """With 1 the router learns nothing from what the experts make; the default is the score."""
    moe, params, x_TD = moe_of(gate, top_k=1), params_of(moe_of(gate)), features()
    one = dataclasses.replace(moe, norm_top1_prob=True)
    plain, whole = (decide(params, x_TD, router_inputs_of(), each)[0] for each in (moe, one))
    np.testing.assert_array_equal(plain.expert_Tk, whole.expert_Tk)
    np.testing.assert_allclose(whole.weight_Tk, 1.5, rtol=1e-6)
    assert plain.weight_Tk.min() < 1.2, "scores below 1, times routed_scaling_factor"
    expected = gate_references.GATES[gate](params, x_TD, one, draws_of(router_inputs_of()))[0]
    np.testing.assert_allclose(expected.sum(axis=1), 1.5, rtol=1e-6)

    def out(params: Any, moe: MoEConfig) -> jax.Array:
        return through(decide(params, x_TD, router_inputs_of(), moe)[0], x_TD, moe).sum()

    learned, nothing = (jax.jit(jax.grad(out), static_argnums=1)(params, each)["router"] for each in (moe, one))
    assert np.abs(learned).max() > 0.1
    np.testing.assert_allclose(nothing, 0, atol=1e-5)


@pytest.mark.parametrize("gate", ["noisy", "xmoe", "gpt_oss", "expert_choice", "softmoe"])
def test_gradients_are_those_of_finite_differences(gate):
    moe, router_inputs = moe_of(gate), router_inputs_of()
    run = jax.jit(lambda params, x_TD: total_of(*by_gate(params, x_TD, router_inputs, moe)))
    check_grads(run, (params_of(moe), features()), order=1, modes=["rev"], rtol=0.02, atol=0.02, eps=2e-3)


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_that_splits_decides_on_each_token_alone_and_no_other_does(gate):
    moe = moe_of(gate)
    params, x_TD, router_inputs, half = params_of(moe), features(), router_inputs_of(), TOKENS // 2
    whole = decide(params, x_TD, router_inputs, moe).decision
    first = router_inputs._replace(id=router_inputs.id[:half], place=router_inputs.place[:half])
    part = decide(params, x_TD[:half], first, moe).decision
    if gate in ALONE:
        assert whole.priority_T is None
        chex.assert_trees_all_close(jax.tree.map(lambda leaf: leaf[:half], whole), part, rtol=1e-6)
    elif isinstance(whole, TopKRouting):
        assert whole.priority_T is not None
    else:
        alone, together = through(part, x_TD[:half], moe), through(whole, x_TD, moe)[:half]
        assert (np.abs(alone - together) > 1e-3).any()


@pytest.mark.parametrize("gate", ["noisy", "random", "sparsemixer"])
def test_what_is_random_follows_from_seed_step_block_and_place(gate):
    moe = moe_of(gate)
    choose = functools.partial(decide, params_of(moe), moe=moe)
    x_TD, router_inputs = features(), router_inputs_of()
    expert_Tk = choose(x_TD, router_inputs).decision.expert_Tk
    turned = np.random.default_rng(5).permutation(TOKENS)
    moved = choose(
        x_TD[turned], router_inputs._replace(id=router_inputs.id[turned], place=router_inputs.place[turned])
    ).decision.expert_Tk
    np.testing.assert_array_equal(moved, expert_Tk[turned], err_msg="wherever a token lies")
    np.testing.assert_array_equal(choose(x_TD, router_inputs_of()).decision.expert_Tk, expert_Tk)
    for other in (
        router_inputs_of(seed=8),
        router_inputs_of(step=12),
        router_inputs_of(block=4),
        router_inputs._replace(place=router_inputs.place + 1),
    ):
        assert (choose(x_TD, other).decision.expert_Tk != expert_Tk).any()


def test_evaluation_has_no_noise_and_leaves_no_choice_out():
    moe = moe_of("noisy")
    params, x_TD = params_of(moe), features()
    calm = decide(params, x_TD, router_inputs_of()._replace(key=None), moe)
    plain = decide(params, x_TD, None, moe_of("softmax"))
    chex.assert_trees_all_equal(calm, plain)
    noisy = decide(params, x_TD, router_inputs_of(), moe).decision
    left_out = noisy.expert_Tk == moe.num_experts
    assert left_out.any()
    assert not left_out[:, 0].any()


def test_sparsemixer_draws_candidates_by_their_probabilities():
    """Without noise it takes the best ones; in training other candidates, with a third of their weight or all of it."""
    moe = moe_of("sparsemixer", num_experts=4, top_k=1, router_jitter_noise=0.25, routed_scaling_factor=1.0)
    logits = np.array([1.0, 2.0, 1.6, 0.9])  # candidates are above 2 − 2 · 0.25 · 2
    params, count = {"router": jnp.asarray(logits[None], jnp.float32)}, 40_000
    x_TD, candidates = jnp.ones((count, 1)), np.exp(logits) * (logits >= 1)
    calm = decide(params, x_TD[:1], None, moe).decision
    assert calm.expert_Tk.tolist() == [[1]]
    prob = candidates / candidates.sum()
    np.testing.assert_allclose(calm.weight_Tk, prob[1], rtol=1e-6)
    drawn = decide(params, x_TD, router_inputs_of(count), moe).decision
    share = np.bincount(np.ravel(drawn.expert_Tk), minlength=4) / count
    np.testing.assert_allclose(share, prob, atol=0.01)
    relative = np.ravel(drawn.weight_Tk) / prob[np.ravel(drawn.expert_Tk)]
    other = np.ravel(drawn.expert_Tk) != 1
    np.testing.assert_allclose(relative[~other], 1, rtol=1e-6)
    is_whole = np.isclose(relative[other], 1)
    np.testing.assert_allclose(relative[other][~is_whole], 1 / 3, rtol=1e-6)
    assert abs(is_whole.mean() - 0.25) < 0.01, "so that on average it is half of the weight: Heun's method"


def test_a_hash_gives_a_token_the_same_experts_wherever_it_stands():
    moe = moe_of("hash")
    router_inputs = router_inputs_of(tokens=900)._replace(id=jnp.arange(900, dtype=jnp.int32) % 450)
    choice = decide({}, features(900), router_inputs, moe).decision
    np.testing.assert_array_equal(choice.expert_Tk[:450], choice.expert_Tk[450:])
    counts = np.bincount(np.ravel(choice.expert_Tk), minlength=8)
    assert counts.max() < 1.3 * counts.mean(), "a random hash spreads a vocabulary evenly"


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (6, 5), (1, 1), (2**16, 3), (2**16, 2**16 - 1)])
def test_balanced_experts_get_as_many_pairs_each(experts, top_k):
    """From any token on, of the fewest tokens whose pairs are a multiple of the experts."""
    moe = moe_of("balanced", num_experts=experts, top_k=top_k)
    period = experts // math.gcd(experts, top_k)
    checked = min(period, 2**18 // top_k)  # not all pairs of the last case, which is there for its large products
    for start in (0, 5, 2**31 - 1 - checked):
        expert_Tk = np.asarray(rotation(jnp.arange(start, start + checked, dtype=jnp.int32), moe))
        assert all(len(set(own.tolist())) == top_k for own in expert_Tk[:3])
        counts = np.bincount(expert_Tk.ravel(), minlength=experts)
        assert counts.size == experts
        if checked == period:
            assert len(set(counts.tolist())) == 1


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
def test_neighbours_of_a_balanced_gate_are_spread_over_ranks(ranks):
    """The 8 experts of a token are on all of up to 8 ranks, and none has more than one above an even share."""
    rank_Tk = np.asarray(rotation(jnp.arange(32, dtype=jnp.int32), moe_of("balanced", num_experts=256, top_k=8)))
    for own in rank_Tk // (256 // ranks):
        counts = np.bincount(own, minlength=ranks)
        assert counts.max() <= -(-8 // ranks) + 1
        assert (counts > 0).sum() >= min(ranks, 8) - 1


def test_a_balanced_gate_reads_neither_features_nor_step():
    moe = moe_of("balanced")
    choose = functools.partial(decide, params_of(moe), moe=moe)
    others = choose(-features(), router_inputs_of(seed=8, step=12, block=4)).decision
    np.testing.assert_array_equal(choose(features(), router_inputs_of()).decision.expert_Tk, others.expert_Tk)


@pytest.mark.parametrize("gate", BIASED)
def test_a_bias_of_scores_counts_in_the_choice_and_not_in_the_weights(gate):
    moe = moe_of(gate, norm_topk_prob=False, routed_scaling_factor=1.5, bias_update_rate=0.0)
    params, x_TD = params_of(moe), features()
    params["score_bias"] = jnp.zeros(8).at[5].set(100.0)
    choice, logit_TE = decide(params, x_TD, None, moe)
    assert (choice.expert_Tk[:, 0] == 5).all()
    score_TE = jax.nn.softmax(logit_TE) if gate == "softmax" else jax.nn.sigmoid(logit_TE)
    np.testing.assert_allclose(choice.weight_Tk[:, 0], 1.5 * score_TE[:, 5], rtol=1e-6)
    grads = jax.jit(jax.grad(lambda p: total_of(*by_gate(p, x_TD, router_inputs_of(), moe))))(params)
    assert not grads["score_bias"].any()
    assert grads["router"].any()


@pytest.mark.parametrize("gate", GROUPED)
def test_a_tokens_experts_are_in_its_best_groups(gate):
    moe = moe_of(gate, top_k=3)
    choice = decide(params_of(moe), features(), None, moe).decision
    groups = [set(own.tolist()) for own in np.asarray(choice.expert_Tk) // 2]
    assert all(len(own) == 2 for own in groups), "three experts of two groups of two"
    assert len(set.union(*groups)) > 2


def test_experts_pick_as_many_tokens_each_and_the_best_ones():
    moe = moe_of("expert_choice", capacity_factor=1.5)
    picked = decide(params_of(moe), features(), None, moe).decision
    assert isinstance(picked, ExpertChoiceRouting)
    assert picked.token_EC.shape == (8, 9)  # 1.5 · 2 · 24 / 8
    assert all(len(set(own)) == 9 for own in picked.token_EC.tolist())
    left = np.asarray(picked.prob_TE.T).copy()
    np.put_along_axis(left, np.asarray(picked.token_EC), 0, axis=1)
    assert (left.max(axis=1) <= picked.weight_EC.min(axis=1) / 1.5).all()


def test_slots_are_convex_mixes():
    moe = moe_of("softmoe")
    mixed = decide(params_of(moe), features(), None, moe).decision
    assert isinstance(mixed, SoftRouting)
    assert (mixed.dispatch_TEC > 0).all()
    np.testing.assert_allclose(mixed.dispatch_TEC.sum(axis=0), 1, rtol=1e-5)
    np.testing.assert_allclose(mixed.combine_TEC.sum(axis=(1, 2)), 1.5, rtol=1e-5)


@pytest.mark.parametrize("gate", ["sigmoid", "deepseek_v3"])
def test_scores_that_are_all_zero_give_weights_of_zero_and_finite_gradients(gate: str) -> None:
    """Sigmoids of logits below -104 are 0 in float32: no score of the first token, every score of the second."""
    moe = moe_of(gate, routed_scaling_factor=1.0)
    params = params_of(moe) | {"router": jnp.diag(jnp.full(8, 1.0))}
    x_TD = jnp.stack([jnp.linspace(-3.0, 2.0, 8), jnp.full(8, -200.0)])

    def weights(x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
        decision = decide(params, x_TD, None, moe).decision
        return (decision.weight_Tk * jnp.array([1.0, 3.0])).sum() + (decision.prob_TE * NUMBERS).sum(), decision

    (_, decision), grad_TD = jax.jit(jax.value_and_grad(weights, has_aux=True))(x_TD)
    chex.assert_trees_all_close(decision.weight_Tk.sum(axis=1), jnp.array([1.0, 0.0]), rtol=1e-6)
    assert jnp.isfinite(grad_TD).all()
    assert grad_TD[0].any()
    assert not grad_TD[1].any()


def test_a_block_without_chosen_experts_has_a_finite_loss_and_gradient() -> None:
    """The first block's gate leaves out every choice. M = 2 blocks, E = 8 experts."""
    count_ME = jnp.stack([jnp.zeros(8, jnp.int32), jnp.arange(8)])
    for kind in ("batch", "pooled"):
        moe = moe_of("softmax", load_balancing_type=kind)

        def loss(prob_sum_ME: jax.Array, counts: jax.Array, moe: MoEConfig = moe) -> jax.Array:
            stats = RouterStats(counts, prob_sum_ME, jnp.zeros(2), jnp.zeros(2, jnp.int32))
            return load_balance_loss(stats, counts, 14, moe)

        for counts, used in ((count_ME, 1), (jnp.zeros_like(count_ME), 0)):
            value, grad_ME = jax.value_and_grad(loss)(jnp.ones((2, 8)), counts)
            assert (value > 0) == used
            assert jnp.isfinite(value)
            assert (grad_ME > 0).any() == used
            assert kind == "pooled" or not grad_ME[0].any()
    total = ObjectiveParts(jnp.float32(1), jnp.float32(0), jnp.float32(0), jnp.zeros((1, 8), jnp.int32), jnp.zeros(1))
    for name, value in metrics_of(total, jnp.float32(0), jnp.float32(0), moe_of("softmax"), 0.0).items():
        assert jnp.isfinite(value).all(), name


@pytest.mark.parametrize("gate", GATES)
def test_text_does_not_depend_on_padding(gate: str) -> None:
    """Nor do statistics, and what parameters learn from both. Each expert has a slot for every third token here."""
    moe, params, rng = moe_of(gate, capacity_factor=1.0), params_of(moe_of(gate)), np.random.default_rng(5)
    is_padding = np.arange(TOKENS) % 4 == 1
    inputs = router_inputs_of()._replace(is_padding=jnp.asarray(is_padding))
    of_text_TD, of_stat_E = (rng.standard_normal(shape) for shape in ((TOKENS, WIDTH), moe.num_experts))

    def total(params: Any, x_TD: jax.Array) -> tuple[jax.Array, Any]:
        routed = route(params, x_TD, moe, 1, RouterContext(inputs, full_capacity(moe, TOKENS)))
        y_TD = unpermute(routed.sent.rows, routed.metadata, moe)
        stats = routed.stats
        learned = (y_TD * of_text_TD)[~is_padding].sum() + (stats.prob_sum_E * of_stat_E).sum() + stats.z_sum
        return learned, (y_TD, stats)

    text_TD = features()
    padded_TD = jnp.where(is_padding[:, None], 3 * text_TD[::-1] + 1, text_TD)
    differentiated = jax.jit(jax.value_and_grad(total, has_aux=True))
    (_, (y_TD, stats)), grads = differentiated(params, text_TD)
    (_, (other_TD, other)), other_grads = differentiated(params, padded_TD)
    np.testing.assert_allclose(other_TD[~is_padding], y_TD[~is_padding], rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close((other, other_grads), (stats, grads), rtol=1e-5, atol=1e-6)
    if GATE_FACTS[gate].decides == "top_k":
        assert not np.any(other_TD[is_padding])
        assert stats.count_E.sum() == 2 * np.sum(~is_padding) or gate == "noisy"
