"""Slow references: one device, one whole batch, Python loops over heads, sequences' source devices and experts.

Written from the definitions, in numpy, and sharing no code with the package but the config and the parameter tree.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import autograd.numpy as anp
import jax
import ml_dtypes
import numpy as np
from autograd.extend import defvjp, primitive

from moe_jax.config import ModelConfig, MoEConfig
from tests import gate_references
from tests.delta_reference import delta_net, with_ones
from tests.gate_references import Draws
from tests.mamba_reference import mamba
from tests.numpy_gradients import fixed, gelu, log_softmax, silu, softmax


class Text(NamedTuple):
    """Which tokens of some sequences are not padding."""

    is_text_BN1: np.ndarray
    share: float  # of the inputs of the whole batch

    @property
    def is_text_T(self) -> np.ndarray:
        return self.is_text_BN1[:, :-1].ravel()


def rows_of(tree):
    """Each row of its arrays as a tree."""
    return [jax.tree.map(lambda leaf, row=row: leaf[row], tree) for row in range(len(jax.tree.leaves(tree)[0]))]


def norm(x, scale, eps):
    return x / ((x**2).mean(-1, keepdims=True) + eps) ** 0.5 * scale


def block_norm(p, x, model: ModelConfig):
    """The norm before attention, an MLP or experts, or the last one."""
    if model.normalization == "layernorm":
        from_mean = x - x.mean(-1, keepdims=True)
        return norm(from_mean, p["norm"], model.rms_norm_eps) + p["norm_bias"]
    return norm(x, p["norm"], model.rms_norm_eps)


def rope(x, model: ModelConfig):
    """Pairs (i, i + K/2) as complex numbers, turned by position · frequency: [..., N, K]."""
    n, width = x.shape[-2:]
    half = width // 2
    angle = np.outer(np.arange(n), [frequency(pair, half, model, n) for pair in range(half)])
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle) * model.rope_scaling.attention_factor
    return anp.concatenate([anp.real(z), anp.imag(z)], axis=-1)


def frequency(pair: int, pairs: int, model: ModelConfig, length: int) -> float:
    """The scaled frequency of one pair of features, in sequences of a length."""
    plain, scaling = model.rope_theta ** (-pair / pairs), model.rope_scaling
    if scaling.rope_type == "none":
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    if scaling.rope_type == "longrope":
        is_short = length <= scaling.original_max_position_embeddings
        return plain / (scaling.short_factor if is_short else scaling.long_factor)[pair]
    turns = scaling.original_max_position_embeddings * plain / math.tau
    if scaling.rope_type == "llama3":
        kept = (turns - scaling.slow_turns) / (scaling.fast_turns - scaling.slow_turns)
    else:

        def pair_with(turns):
            return pairs * math.log(scaling.original_max_position_embeddings / (turns * math.tau), model.rope_theta)

        first, last = pair_with(scaling.fast_turns), pair_with(scaling.slow_turns)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        kept = 1 - (pair - first) / (last - first)
    kept = min(max(kept, 0.0), 1.0)
    return plain * kept + plain / scaling.factor * (1 - kept)


def attention(p, x_BND, model: ModelConfig, block: int):
    """Each sequence for itself, one head at a time."""
    h = block_norm(p, x_BND, model)
    if "conv" in p:
        return delta_net(p, h, model)
    if "skip" in p:
        return mamba(p, h, model)
    out = p["out_bias"] if model.attention.bias and model.attention.out_bias else 0.0
    for head, (score, v) in enumerate(scores(p, h, model, block)):
        if model.attention.sinks:
            score = anp.concatenate([score, p["sink"][head] * np.ones((*score.shape[:-1], 1))], axis=-1)
        y = softmax(score)[..., : h.shape[-2]] @ v
        if model.attention.output_gate:
            y = y / (1 + anp.exp(-h @ p["gate"][:, head]))
        out = out + y @ p["out"][head]
    return out


def scores(p, h_BND, model: ModelConfig, block: int):
    """The logits of each head, -inf for tokens that a token does not see, and its values."""
    scaling, multiplier = model.rope_scaling, model.attention_multiplier
    mscale = 1 + 0.1 * scaling.mscale_all_dim * math.log(scaling.factor)
    for q, k, v in (latent_heads if model.latent.kv_lora_rank else grouped_heads)(p, h_BND, model, block):
        factor = 1 / math.sqrt(q.shape[-1]) if multiplier is None else multiplier
        logits = q @ anp.swapaxes(k, -1, -2) * mscale**2 * factor
        yield anp.where(visible(h_BND.shape[-2], model, block), logits, -np.inf), v


def largest_logits(p, x_BND, model: ModelConfig, block: int):
    """The largest logit of each token and head, [B, N, H]."""
    h = block_norm(p, x_BND, model)
    return np.stack([fixed(score).max(axis=-1) for score, _ in scores(p, h, model, block)], axis=-1)


def qk_clip(p, largest_H, threshold: float, model: ModelConfig):
    """The weights of one block's attention after QK-clip, head by head."""
    p = {name: np.array(leaf) for name, leaf in p.items()}
    plain = model.latent.qk_nope_head_dim if model.latent.kv_lora_rank else model.head_width
    keys = p["key"].shape[1]  # a head each, or a group of heads
    for key, largest_J in enumerate(np.reshape(largest_H, (keys, -1))):
        factor = threshold / largest_J.max() if largest_J.max() > threshold else 1.0
        heads = range(key * len(largest_J), (key + 1) * len(largest_J))
        p["query"][:, heads, :plain] *= math.sqrt(factor)
        p["query"][:, heads, plain:] *= factor  # multiplied with the rotated key that all heads share
        p["key"][:, key] *= math.sqrt(factor)
        if "query_bias" in p:
            p["query_bias"][heads] *= math.sqrt(factor)
            p["key_bias"][key] *= math.sqrt(factor)
    return p


def visible(n, model: ModelConfig, block: int):
    """Which tokens (columns) a token (row) sees."""
    window, full_every, chunk = model.attention.sliding_window, model.attention.full_every, model.attention.chunk_size
    causal = np.tri(n, dtype=bool)
    if full_every and (block + 1) % full_every == 0:
        return causal
    if chunk is not None:
        return np.array([[i // chunk == j // chunk and j <= i for j in range(n)] for i in range(n)])
    if window is None:
        return causal
    return causal & ~np.tri(n, k=-window, dtype=bool)


def turned(x, model: ModelConfig, block: int):
    every = model.attention.nope_every
    return x if every and (block + 1) % every == 0 else rope(x, model)


def grouped_heads(p, h, model: ModelConfig, block: int):
    """Query, key and value of each head."""
    names = ("query", "key", "value")
    q, k, v = (anp.stack([h @ p[name][:, head] for head in range(p[name].shape[1])]) for name in names)
    if model.attention.bias:
        q, k, v = (x + p[f"{name}_bias"][:, None, None] for x, name in zip((q, k, v), names, strict=True))
    width = round(model.head_width * model.partial_rotary_factor)

    def normed(q, k):
        if not model.qk_norm:
            return q, k
        if model.qk_norm_over == "projection":
            return [norm_all(x, p[f"{name}_norm"], model.rms_norm_eps) for x, name in ((q, "query"), (k, "key"))]
        return norm(q, p["query_norm"], model.rms_norm_eps), norm(k, p["key_norm"], model.rms_norm_eps)

    def rotated(q, k):
        return [anp.concatenate([turned(x[..., :width], model, block), x[..., width:]], axis=-1) for x in (q, k)]

    for step in (rotated, normed) if model.qk_norm_after_rope else (normed, rotated):
        q, k = step(q, k)
    if model.attention.nope_every is None or (block + 1) % model.attention.nope_every:
        if model.qk_l2_norm:
            q, k = (norm(x, 1.0, model.rms_norm_eps) for x in (q, k))
    else:
        reached = (np.arange(q.shape[-2]) + 1) // model.attention.floor_scale
        q = q * (1 + model.attention.attn_scale * np.log(1 + reached))[:, None]
    for head in range(model.num_attention_heads):
        group = head * model.kv_heads // model.num_attention_heads
        yield q[head], k[group], v[group]


def norm_all(x_HBNK, scale_HK, eps):
    """All heads of a token as one vector."""
    x_BNHK = anp.moveaxis(x_HBNK, 0, -2)
    flat = x_BNHK.reshape((*x_BNHK.shape[:-2], -1))
    return anp.moveaxis(norm(flat, scale_HK.ravel(), eps).reshape(x_BNHK.shape), -2, 0)


def latent_heads(p, h, model: ModelConfig, block: int):
    """The same from latents: the last features of a query are rotated, and those of all keys are one vector."""
    plain = model.latent.qk_nope_head_dim
    eps = model.latent.rms_norm_eps or model.rms_norm_eps
    c_q = norm(h @ p["query_latent"], p["query_latent_norm"], eps) if model.latent.q_lora_rank else h
    c_kv = norm(h @ p["kv_latent"], p["kv_latent_norm"], eps)
    for head in range(model.num_attention_heads):
        q = c_q @ p["query"][:, head]
        q = anp.concatenate([q[..., :plain], turned(q[..., plain:], model, block)], axis=-1)
        k = anp.concatenate([c_kv @ p["key"][:, head], turned(h @ p["rope_key"], model, block)], axis=-1)
        yield q, k, c_kv @ p["value"][:, head]


def to_fp8(x, name, axis):
    """The nearest 8-bit numbers, times their scale: of the largest along `axis` the nearest power of 2, / 2⁸ or 2¹⁵.

    Halfway between two powers, the odd one.
    """
    dtype, highest = {"e4m3": (ml_dtypes.float8_e4m3fn, 8), "e5m2": (ml_dtypes.float8_e5m2, 15)}[name]
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(axis, keepdims=True)
    largest = np.where(largest, largest, 1)
    power = np.ceil(np.log2(largest / 1.5))
    power += (largest == 1.5 * 2**power) & (power % 2 == 0)
    scale = 2 ** (power - highest)
    return (x / scale).astype(dtype).astype(np.float64) * scale


@primitive
def fp8_product(x, w):
    return to_fp8(x, "e4m3", -1) @ to_fp8(w, "e4m3", None)


def to_fp8_back(dy):
    return to_fp8(dy, "e5m2", -1)


defvjp(
    fp8_product,
    lambda y, x, w: lambda dy: to_fp8_back(dy) @ to_fp8(w, "e4m3", None).T,
    lambda y, x, w: lambda dy: to_fp8(x, "e4m3", -1).T @ to_fp8_back(dy),
)


def mlp(p, x, product=anp.matmul):
    def linear(x, name):
        return product(x, p[name]) + p.get(f"{name}_bias", 0.0)

    up = linear(x, "squared_up" if "squared_up" in p else "up")
    if "squared_up" in p:
        hidden = anp.where(up > 0, up, 0) ** 2
    elif "clipped_gate" in p:
        gate, up = anp.minimum(linear(x, "clipped_gate"), 7.0), anp.maximum(anp.minimum(up, 7.0), -7.0)
        hidden = gate / (1 + anp.exp(-1.702 * gate)) * (up + 1)
    else:
        hidden = silu(linear(x, "gate")) * up if "gate" in p else gelu(up)
    y = linear(hidden, "down")
    return y / (1 + anp.exp(-x @ p["token_gate"])) if "token_gate" in p else y


def keep_in_buffer(expert_Tk, moe: MoEConfig, buffer):
    """Which pairs of one sequence find room at the rank of their expert: the first ones, a token's best choices first.

    `buffer` is (factor, ranks).
    """
    factor, ranks = buffer
    room = [math.ceil(factor * len(expert_Tk) * moe.top_k / ranks)] * ranks
    kept_TE = np.zeros((len(expert_Tk), moe.num_experts), bool)
    for token, experts in enumerate(expert_Tk):
        for expert in experts[experts < moe.num_experts]:
            rank = expert // (moe.num_experts // ranks)
            kept_TE[token, expert] = room[rank] > 0
            room[rank] -= 1
    return kept_TE


def keep(chosen_TE, moe: MoEConfig, prob_TE=None):
    """Which of one device's pairs find a slot: the first C of each expert, in the order of tokens or of scores."""
    tokens = chosen_TE.shape[0]
    if moe.capacity_factor is None:
        return chosen_TE
    slots = math.ceil(moe.capacity_factor * moe.top_k * tokens / moe.num_experts)
    used, kept = np.zeros(moe.num_experts, int), np.zeros_like(chosen_TE)
    order = range(tokens)
    if moe.gate == "batch_prioritised":
        order = np.argsort(-fixed(prob_TE).max(-1), kind="stable")
    for token in order:
        for expert in np.flatnonzero(chosen_TE[token]):
            kept[token, expert] = used[expert] < slots
            used[expert] += 1
    return kept


def shares(tokens: int, sources: int, sequences: int, tensor: int, context: int) -> np.ndarray:
    """The tokens of each device: of a source's consecutive sequences, each context rank has a piece from the front and
    the one as far from the end, of which each tensor rank has an equal part.
    """
    numbers = np.arange(tokens).reshape(sequences, -1)
    if context > 1:
        pieces = np.split(numbers, 2 * context, axis=1)
        numbers = np.concatenate([piece for r in range(context) for piece in (pieces[r], pieces[-1 - r])], axis=1)
    numbers = numbers.reshape(sources, sequences // sources, context * tensor, -1)
    return numbers.swapaxes(1, 2).reshape(sources * context * tensor, -1)


def moe_layer(
    p,
    h_TD,
    moe: MoEConfig,
    sources: int,
    sequences: int,
    draws: Draws,
    buffer=None,
    tensor: int = 1,
    context: int = 1,
    text=None,
):
    """Output, pairs chosen, probabilities, mean squared log-sum-exp, pairs per expert and dropped pairs of the batch.

    Each device fills slots of its own with its share of the tokens. So does each of its parts of the `sequences`, where
    ranks have a buffer. With `text` some tokens only fill their sequences: they have no experts, and no mean is over
    them. It is which tokens do not, and their share of all tokens of the batch that this is a part of.
    """
    of_devices = shares(len(h_TD), sources, sequences, tensor, context)
    out = sum(mlp(p[name], h_TD) for name in ("shared", "dense") if name in p) + np.zeros(h_TD.shape)

    experts = rows_of(p["experts"])

    def run_expert(expert: int, x):
        return mlp(experts[expert], x, fp8_product if moe.expert_matmuls == "fp8" else anp.matmul)

    dropped = 0
    if moe.gate == "softmoe":
        routed, prob_TE, logit_TE = gate_references.softmoe(p, h_TD, moe, of_devices, run_expert)
        chosen_TE = None
        count_E = np.full(moe.num_experts, moe.slots_per_expert * len(of_devices))
    else:
        weight_TE, prob_TE, chosen_TE, kept_TE, logit_TE = token_choice(
            p, h_TD, moe, of_devices, shares(len(h_TD), sequences, sequences, tensor, context), draws, buffer, text
        )
        weight_TE = anp.where(kept_TE, weight_TE, 0)
        weight_ET1 = rows_of(weight_TE.T[:, :, None])
        if moe.apply_probs_on_input:
            kept_ET1 = kept_TE.T[:, :, None]
            routed = sum(kept_ET1[e] * run_expert(e, weight_T1 * h_TD) for e, weight_T1 in enumerate(weight_ET1))
        else:
            routed = sum(weight_T1 * run_expert(expert, h_TD) for expert, weight_T1 in enumerate(weight_ET1))
        count_E, dropped = chosen_TE.sum(0), (chosen_TE & ~kept_TE).sum()
    z_loss = 0.0
    if logit_TE is not None:
        square_T = anp.log(anp.exp(logit_TE).sum(axis=-1)) ** 2
        z_loss = (square_T if text is None else square_T * text.is_text_T / text.share).mean()
    if text is not None:
        prob_TE = prob_TE * text.is_text_T[:, None] / text.share
    return out + routed, (chosen_TE, prob_TE), z_loss, count_E, dropped


def load_balance(choices, counts_ME, moe: MoEConfig, sequences: int):
    """The loss of all blocks, from (chosen, probabilities) [T, E] of each."""
    if moe.load_balancing_type == "pooled":
        probs = anp.concatenate([prob_TE for _, prob_TE in choices])
        return moe.num_experts * (counts_ME.sum(0) / counts_ME.sum() * probs.mean(0)).sum()
    total = 0.0
    for (chosen_TE, prob_TE), count_E in zip(choices, counts_ME, strict=True):
        if moe.load_balancing_type == "batch":
            total += moe.num_experts * (count_E / count_E.sum() * prob_TE.mean(0)).sum()
            continue
        prob_BNE = prob_TE.reshape((sequences, -1, moe.num_experts))
        for own, prob_NE in zip(np.split(chosen_TE, sequences), prob_BNE, strict=True):
            total += moe.num_experts * (own.sum(0) / max(own.sum(), 1) * prob_NE.mean(0)).sum() / sequences
    return total


def token_choice(p, h_TD, moe: MoEConfig, of_devices, of_sequences, draws: Draws, buffer, text=None):
    """Weights, probabilities, chosen and kept pairs [T, E], and logits."""
    if moe.gate == "expert_choice":
        weight_TE, prob_TE, picked_TE = gate_references.expert_choice(p, h_TD, moe, of_devices)
        return weight_TE, prob_TE, picked_TE, picked_TE, gate_references.linear(p, h_TD)
    weight_TE, prob_TE, best_Tk, logit_TE = gate_references.GATES[moe.gate](p, h_TD, moe, draws)
    chosen_TE = gate_references.mask(best_Tk, moe.num_experts)
    if text is not None:
        chosen_TE = chosen_TE & text.is_text_T[:, None]
        best_Tk = np.where(text.is_text_T[:, None], best_Tk, moe.num_experts)
    kept_TE = np.zeros_like(chosen_TE)
    for own in of_devices:
        kept_TE[own] = keep(chosen_TE[own], moe, prob_TE[own])
    if buffer is not None:
        for own in of_sequences:
            kept_TE[own] = keep_in_buffer(best_Tk[own], moe, buffer)
    return weight_TE, prob_TE, chosen_TE, kept_TE, logit_TE


def block_params(params, model: ModelConfig):
    """Each block's parameters, from the bottom up, out of the stacked segments."""
    blocks = []
    for segment in params["segments"].values():
        for row in rows_of(segment):
            blocks += row.values()
    assert len(blocks) == model.num_layers + model.num_nextn_predict_layers
    return blocks


def objective(
    params,
    token_BN1,
    model: ModelConfig,
    sources: int,
    buffer=None,
    tensor: int = 1,
    context: int = 1,
    seed_and_step=None,
    sequence_B=None,
    z_loss_multiplier=0.0,
    end_of_text=None,
    counted_share=1.0,
    text=None,
    mtp_weight=0.0,
    mtp_share=1.0,
    qk_clips=False,
    record_LGk=None,
):
    """The loss of a whole batch, and its parts and what the routers counted by name.

    `sequence_B`: which sequences of the step they are, if not all, in order. `end_of_text`: the last token of each
    document, which are then attended to one by one; the loss is the mean over `counted_share` of the tokens, all but
    those that would have to predict another document, or padding. `text`: padding is neither predicted nor routed.
    With multi-token prediction its loss has `mtp_weight`, and is the mean over `mtp_share` of all tokens but the last
    one of each sequence. With `qk_clips` the parts have the largest logit of each block and head, but for padding.
    With `record_LGk` tokens have these experts.
    """
    params = with_ones(params, model)
    id_T = np.ravel(token_BN1[:, :-1])
    sequence_B = np.arange(len(token_BN1)) if sequence_B is None else sequence_B
    length = token_BN1.shape[1] - 1
    place_T = (sequence_B[:, None] * length + np.arange(length)).ravel()
    x = model.embedding_multiplier * params["embedding"][token_BN1[:, :-1]]
    added = model.residual_multiplier
    choices, z_losses, dropped, counts_ME, largest_LH = [], 0.0, [], np.zeros((0, 0), int), []
    for block, p in enumerate(block_params(params, model)):
        if block == model.num_layers:
            decoded, x = x, mtp_input(p["mtp_input"], x, token_BN1, params, model)
        view = min(block, model.num_layers - 1)  # that of multi-token prediction is the highest one's

        def each(function, x, p=p, view=view):
            def run(x_BND):
                return function(p["attention"], x_BND, model, view)

            return run(x) if end_of_text is None else by_document(run, x, token_BN1, end_of_text)

        y = each(attention, x)
        if qk_clips:
            largest_TH = each(largest_logits, fixed(x)).reshape(x.shape[0] * x.shape[1], -1)
            largest_LH.append((largest_TH if text is None else largest_TH[text.is_text_T]).max(axis=0))
        x = x + added * y
        if "norm" not in p:  # a block without an MLP or experts
            continue
        h = block_norm(p, x, model)
        if "mlp" in p:
            x = x + added * mlp(p["mlp"], h)
            continue
        y, choice, z_loss, count_E, lost = moe_layer(
            *(p["moe"], h.reshape((-1, h.shape[-1])), model.moe, sources, len(x)),
            *(Draws(id_T, place_T, block, seed_and_step, record_LGk), buffer, tensor, context, text),
        )
        x = x + added * y.reshape(x.shape)
        choices, z_losses, dropped = [*choices, choice], z_losses + z_loss, [*dropped, lost]
        counts_ME = np.vstack([counts_ME.reshape(-1, count_E.size), count_E])
    balances = load_balance(choices, counts_ME, model.moe, len(x)) if choices else 0.0
    head = params["embedding"].T if model.tie_word_embeddings else params["head"]
    bias = params["head_bias"] if model.head_bias else 0.0
    mtp_loss = 0.0
    if model.num_nextn_predict_layers:
        logits = norm(x, params["mtp_norm"], model.rms_norm_eps) @ head / model.logits_scaling + bias
        picked_BN = picked(logits[:, :-1], token_BN1[:, 2:])
        is_counted = np.ones(token_BN1[:, 2:].shape)
        if end_of_text is not None:
            is_counted = (token_BN1[:, :-2] != end_of_text) & (token_BN1[:, 1:-1] != end_of_text)
        if text is not None:
            is_counted = is_counted & text.is_text_BN1[:, 2:]
        mtp_loss, x = -(picked_BN * is_counted).mean() / mtp_share, decoded
    logits = block_norm(params, x, model) @ head / model.logits_scaling + bias
    picked_BN = picked(logits, token_BN1[:, 1:])
    is_counted = np.ones(token_BN1[:, 1:].shape) if end_of_text is None else token_BN1[:, :-1] != end_of_text
    if text is not None:
        is_counted = is_counted & text.is_text_BN1[:, 1:]
    cross_entropy = -(picked_BN * is_counted).mean() / counted_share
    z_loss = (anp.log(anp.exp(logits).sum(-1)) ** 2 * is_counted).mean() / counted_share
    head_loss = cross_entropy + z_loss_multiplier * z_loss + mtp_weight * mtp_loss
    loss = head_loss + model.moe.aux_loss_coeff * balances + model.moe.z_loss_coeff * z_losses
    return loss, {
        "cross_entropy": cross_entropy,
        "load_balance_loss": balances,
        "router_z_loss": z_losses,
        "count_ME": counts_ME,
        "num_dropped_M": np.array(dropped, np.float32),
        "z_loss": z_loss,
        **({"mtp_loss": mtp_loss} if model.num_nextn_predict_layers else {}),
        **({"largest_LH": np.stack(largest_LH)} if qk_clips else {}),
    }


def picked(logits_BNV, token_BN):
    """The logarithms of the shares of these tokens."""
    return log_softmax(logits_BNV)[(*np.indices(token_BN.shape), token_BN)]


def mtp_input(p, x_BND, token_BN1, params, model: ModelConfig):
    """The normed embedding of each next token, then the normed features, by one matrix."""
    eps = model.rms_norm_eps
    next_BND = norm(model.embedding_multiplier * params["embedding"][token_BN1[:, 1:]], p["embedding_norm"], eps)
    features = norm(norm(x_BND, params["norm"], eps), p["hidden_norm"], eps)
    width = model.hidden_size
    return next_BND @ p["projection"][:width] + features @ p["projection"][width:]


def by_document(attend, x_BND, token_BN1, end_of_text):
    """Attention of each document on its own, with positions from 0.

    Each is followed by what fills a sequence, which its tokens do not see.
    """
    sequences, length = x_BND.shape[:2]
    begins_BN = np.concatenate([np.ones((sequences, 1), bool), token_BN1[:, :-2] == end_of_text], axis=1)
    sequence_d, start_d = np.nonzero(begins_BN)
    place_dN = np.minimum(start_d[:, None] + np.arange(length), length - 1)
    y_dND = attend(x_BND[sequence_d[:, None], place_dN])
    document_BN = np.cumsum(begins_BN).reshape(begins_BN.shape) - 1
    return y_dND[document_BN, np.arange(length) - start_d[document_BN]]


def moved_bias(bias_E, count_E, rate: float):
    """The biases of one block after a step in which so many pairs chose each expert."""
    mean, moved = Fraction(int(sum(count_E)), len(count_E)), []
    for bias, count in zip(bias_E, count_E, strict=True):
        up = (mean > int(count)) - (mean < int(count))
        moved.append(np.float32(bias) + np.float32(rate) * np.float32(up))
    return np.array(moved)
