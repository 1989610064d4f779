"""Slow references of gates, from their papers: numpy decides who goes where, and autograd differentiates the weights.

Each returns weights [T, E], 0 for experts not chosen, probabilities [T, E], each token's chosen experts, best first,
and the logits (None: there are none). T tokens, E experts, k choices, C slots.
"""

import math
from typing import Any, NamedTuple

import autograd.numpy as anp
import jax
import numpy as np
from autograd.extend import defvjp, primitive

from moe_jax.config import MoEConfig
from tests.numpy_gradients import fixed, sigmoid, softmax


class Draws(NamedTuple):
    """What random numbers of tokens follow from."""

    id_T: np.ndarray
    place_T: np.ndarray
    block: int
    seed_and_step: tuple[int, int] | None  # None: evaluation
    record_LGk: np.ndarray | None = None  # the experts of all tokens, if they are those of a record

    def replayed(self, best_Tk: np.ndarray) -> np.ndarray:
        """The experts of a record, if there is one, in place of these."""
        return best_Tk if self.record_LGk is None else self.record_LGk[self.block][self.place_T]

    def of_tokens(self) -> list[Any]:
        seed, *rest = self.seed_and_step or (0,)
        key = jax.random.key(seed)
        for number in (*rest, self.block):
            key = jax.random.fold_in(key, number)
        return [jax.random.fold_in(key, int(place)) for place in self.place_T]


def first_k(score_TE, top_k: int) -> np.ndarray:
    return np.argsort(-fixed(score_TE), axis=-1, kind="stable")[:, :top_k]


def mask(expert_Tk, experts: int) -> np.ndarray:
    """The chosen experts as [T, E]."""
    chosen_TE = np.zeros((len(expert_Tk), experts), bool)
    for token, own in enumerate(expert_Tk):
        chosen_TE[token, [expert for expert in own if expert < experts]] = True
    return chosen_TE


def weighted(score_TE, best, moe: MoEConfig):
    weight_TE = anp.where(mask(best, moe.num_experts), score_TE, 0)
    if moe.norm_topk_prob and (moe.top_k > 1 or moe.norm_top1_prob):
        weight_TE = weight_TE / weight_TE.sum(-1, keepdims=True)
    return weight_TE * moe.routed_scaling_factor


def linear(p, x_TD):
    return x_TD @ p["router"] + p.get("router_bias", 0.0)


def by_softmax(p, x_TD, moe: MoEConfig, draws: Draws):
    return of_softmax(linear(p, x_TD), moe, p.get("score_bias", 0.0), draws.replayed)


def of_softmax(logit_TE, moe: MoEConfig, bias_E=0.0, replayed=lambda best_Tk: best_Tk):
    prob_TE = softmax(logit_TE)
    best = replayed(first_k(prob_TE + bias_E, moe.top_k))
    return weighted(prob_TE, best, moe), prob_TE, best, logit_TE


def by_sigmoid(p, x_TD, moe: MoEConfig, draws: Draws):
    logit_TE = linear(p, x_TD)
    score_TE = sigmoid(logit_TE)
    best = draws.replayed(first_k(score_TE + p.get("score_bias", 0.0), moe.top_k))
    return weighted(score_TE, best, moe), score_TE / score_TE.sum(-1, keepdims=True), best, logit_TE


def gpt_oss(p, x_TD, moe: MoEConfig, draws: Draws):
    logit_TE = x_TD @ p["router"] + p["router_bias"]
    best = first_k(logit_TE, moe.top_k)
    of_best = anp.where(mask(best, moe.num_experts), anp.exp(logit_TE), 0)
    weight_TE = of_best / of_best.sum(-1, keepdims=True) * moe.routed_scaling_factor
    return weight_TE, softmax(logit_TE), best, logit_TE


def noisy(p, x_TD, moe: MoEConfig, draws: Draws):
    if draws.seed_and_step is None:
        return by_softmax(p, x_TD, moe, draws)
    streams = [[jax.random.fold_in(key, stream) for stream in (0, 1)] for key in draws.of_tokens()]
    normal = np.stack([jax.random.normal(first, (moe.num_experts,)) for first, _ in streams])
    uniform = np.stack([jax.random.uniform(second, (moe.top_k,)) for _, second in streams])
    spread_TE = anp.log1p(anp.exp(x_TD @ p["router_noise"]))
    weight_TE, prob_TE, best, logit_TE = of_softmax(linear(p, x_TD) + normal * spread_TE, moe)
    best = best.copy()
    for token in range(len(best)):
        for choice in range(1, moe.top_k):
            if 2 * fixed(weight_TE)[token, best[token, choice]] / moe.routed_scaling_factor <= uniform[token, choice]:
                best[token, choice] = moe.num_experts
    return anp.where(mask(best, moe.num_experts), weight_TE, 0), prob_TE, best, logit_TE


@primitive
def estimated(logit_TE, prob_TE, expert_T, scale_T):
    """Weights: the probabilities of the experts drawn, scaled; the logits' gradient is of those without the scale."""
    return prob_TE[np.arange(len(expert_T)), expert_T] * scale_T


def _estimated_back(prob_TE, expert_T, d_T):
    rows = np.arange(len(expert_T))
    d_TE = -prob_TE * (d_T * prob_TE[rows, expert_T])[:, None]
    d_TE[rows, expert_T] += d_T * prob_TE[rows, expert_T]
    return d_TE


defvjp(
    estimated,
    lambda weight_T, logit_TE, prob_TE, expert_T, scale_T: lambda d_T: _estimated_back(prob_TE, expert_T, d_T),
    argnums=(0,),
)


def sparsemixer(p, x_TD, moe: MoEConfig, draws: Draws):
    logit_TE = linear(p, x_TD)
    rows, weight_TE = np.arange(len(x_TD)), np.zeros(logit_TE.shape)
    taken_TE, best, keys = np.zeros(logit_TE.shape, bool), [], draws.of_tokens()
    for choice in range(moe.top_k):
        logits, prob_TE = fixed(logit_TE), np.zeros(logit_TE.shape)
        expert_T, scale_T = np.zeros(len(x_TD), int), np.ones(len(x_TD))
        for token in rows:
            own = np.flatnonzero(~taken_TE[token])
            top = logits[token, own].max()
            near = [
                e
                for e in own
                if (top - logits[token, e]) <= 2 * moe.router_jitter_noise * max(abs(logits[token, e]), top)
            ]
            exp = np.exp(logits[token, near] - top)
            prob_TE[token, near] = exp / exp.sum()
            expert_T[token] = first = own[np.argmax(logits[token, own])]
            if draws.seed_and_step is not None:
                first_key, second_key = (jax.random.fold_in(keys[token], 2 * choice + stream) for stream in (0, 1))
                noise_E = jax.random.gumbel(first_key, (moe.num_experts,))
                expert_T[token] = near[np.argmax(logits[token, near] + np.asarray(noise_E)[near])]
                is_scaled = expert_T[token] != first and jax.random.uniform(second_key, (1,))[0] <= 0.75
                scale_T[token] = 1 / 3 if is_scaled else 1
        weight_T = estimated(logit_TE, prob_TE, expert_T, scale_T)
        weight_TE = weight_TE + mask(expert_T[:, None], moe.num_experts) * weight_T[:, None]
        taken_TE[rows, expert_T] = True
        best.append(expert_T)
    return weight_TE * moe.routed_scaling_factor, softmax(logit_TE), np.stack(best, axis=1), logit_TE


def length(x, axis: int):
    return anp.sqrt((x**2).sum(axis, keepdims=True))


def xmoe(p, x_TD, moe: MoEConfig, draws: Draws):
    low_Tr = x_TD @ p["router_projection"]
    lengths = length(low_Tr, 1) * length(p["router"], 0)
    return of_softmax(low_Tr @ p["router"] / lengths / p["temperature"][0] + p.get("router_bias", 0.0), moe)


def grouped(p, x_TD, moe: MoEConfig, scores, count: int):
    """Experts that are not in a token's best groups, by the sum of the `count` best scores in each, are out."""
    allowed_TE = fixed(scores).copy()
    size = moe.num_experts // moe.n_group
    for token, own in enumerate(allowed_TE):
        of_group = [np.sort(own[g * size : (g + 1) * size])[-count:].sum() for g in range(moe.n_group)]
        for group in np.argsort(-np.array(of_group), kind="stable")[moe.topk_group :]:
            allowed_TE[token, group * size : (group + 1) * size] = -np.inf
    return first_k(allowed_TE, moe.top_k)


def deepseek_v2(p, x_TD, moe: MoEConfig, draws: Draws):
    logit_TE = linear(p, x_TD)
    prob_TE = softmax(logit_TE)
    best = grouped(p, x_TD, moe, prob_TE, 1)
    return weighted(prob_TE, best, moe), prob_TE, best, logit_TE


def deepseek_v3(p, x_TD, moe: MoEConfig, draws: Draws):
    logit_TE = linear(p, x_TD)
    score_TE = sigmoid(logit_TE)
    best = draws.replayed(grouped(p, x_TD, moe, score_TE + p["score_bias"], 2))
    return weighted(score_TE, best, moe), score_TE / score_TE.sum(-1, keepdims=True), best, logit_TE


def drawn(keys, moe: MoEConfig):
    best = first_k(np.stack([jax.random.uniform(key, (moe.num_experts,)) for key in keys]), moe.top_k)
    equal_TE = mask(best, moe.num_experts) / np.float32(moe.top_k)
    return equal_TE * moe.routed_scaling_factor, equal_TE, best, None


def random(p, x_TD, moe: MoEConfig, draws: Draws):
    return drawn(draws.of_tokens(), moe)


def by_hash(p, x_TD, moe: MoEConfig, draws: Draws):
    return drawn([jax.random.fold_in(jax.random.key(0), int(number)) for number in draws.id_T], moe)


def balanced(p, x_TD, moe: MoEConfig, draws: Draws):
    """Pairs of the global batch, in order, are dealt to experts in turn; the turn steps by 5 of 8 experts."""
    assert moe.num_experts == 8
    turn = [0, 5, 2, 7, 4, 1, 6, 3]
    best = np.array([[turn[(int(place) * moe.top_k + j) % 8] for j in range(moe.top_k)] for place in draws.place_T])
    logit_TE = linear(p, x_TD)
    prob_TE = softmax(logit_TE)
    return weighted(prob_TE, best, moe), prob_TE, best, logit_TE


GATES = {
    "softmax": by_softmax,
    "sigmoid": by_sigmoid,
    "gpt_oss": gpt_oss,
    "noisy": noisy,
    "sparsemixer": sparsemixer,
    "xmoe": xmoe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "hash": by_hash,
    "random": random,
    "batch_prioritised": by_softmax,
    "balanced": balanced,
}


def expert_choice(p, x_TD, moe: MoEConfig, shares):
    """Weights, 0 for tokens not picked, and probabilities. Each device's experts pick among its share of the tokens."""
    prob_TE = softmax(linear(p, x_TD))
    picked_TE = np.zeros(prob_TE.shape, bool)
    for own in shares:
        slots = math.ceil(moe.capacity_factor * moe.top_k * len(own) / moe.num_experts)
        for expert in range(moe.num_experts):
            order = np.argsort(-fixed(prob_TE)[own, expert], kind="stable")
            picked_TE[own[order[:slots]], expert] = True
    return anp.where(picked_TE, prob_TE, 0) * moe.routed_scaling_factor, prob_TE, picked_TE


def softmoe(p, x_TD, moe: MoEConfig, shares, expert):
    """The output, the logits [T, E·C] and the probabilities; `expert(e, x)` is what expert e makes of rows."""
    slots_DS = p["slots"].reshape((x_TD.shape[1], -1))
    logit_TS = x_TD / length(x_TD, 1) @ (p["scale"][0] * slots_DS / length(slots_DS, 0))
    out = []
    for own in shares:
        mixes_SD = softmax(logit_TS[own], axis=0).T @ x_TD[own]
        mixes_ECD = mixes_SD.reshape((moe.num_experts, -1, x_TD.shape[1]))
        made = [expert(e, mixes_ECD[e]) for e in range(moe.num_experts)]
        out.append(softmax(logit_TS[own], axis=1) @ anp.concatenate(made) * moe.routed_scaling_factor)
    prob_TE = softmax(logit_TS, axis=1).reshape((len(x_TD), moe.num_experts, -1)).sum(-1)
    return anp.concatenate(out)[np.argsort(np.concatenate(shares))], prob_TE, logit_TS
