"""Operations and memory of Muon's Newton-Schulz iterations on one device.

Ranks that have shards of the same matrices, tensor ranks and with ZeRO those with the same parameters, share the
matrices; the last ones may get none. Without ZeRO, devices with the same parameters compute the same.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from moe_jax.config import Config, ModelConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.plan.gradients import parts_by_owner
from moe_jax.plan.recurrent import recurrent_layer
from moe_jax.plan.work import ITEM_BYTES

# arrays of a stack's size: the momentum, whole matrices, two in an iteration and the update; XLA:CPU needs 4.7
_COPIES = 5


class Matrices(NamedTuple):
    """An array of a block: one matrix, or one of each expert if its owner is `expert` (see `resources.Owned`)."""

    owner: Literal["whole", "heads_and_hidden", "expert"]
    rows: int
    columns: int

    def flops(self, iterations: int) -> int:
        """Operations for one matrix: of an iteration X·Xᵀ, its square, and a product with X."""
        least, most = sorted((self.rows, self.columns))
        return iterations * (4 * least**2 * most + 2 * least**3)


def hidden_matrices(
    model: ModelConfig, kind: str, is_recurrent: bool = False, has_mlp: bool = True
) -> Counter[Matrices]:
    """Return the number of arrays of each shape in a block of a kind, without those of its gate."""
    d, heads, latent, delta = model.hidden_size, model.num_attention_heads, model.latent, model.delta_net
    outputs = recurrent_layer(model).values if is_recurrent else heads * model.v_width
    found: Counter[Matrices] = Counter([Matrices("heads_and_hidden", outputs, d)])
    if is_recurrent and model.has_mamba:
        found[Matrices("heads_and_hidden", d, outputs)] += 2
        found[Matrices("heads_and_hidden", d, model.mamba.num_heads or 0)] += 1
        found[Matrices("whole", d, model.mamba.group_width)] += 2
    elif is_recurrent:
        for width in (delta.key_width, delta.value_width, delta.num_value_heads or 0):  # of which there are two each
            found[Matrices("heads_and_hidden", d, width)] += 2
    elif latent.kv_lora_rank is None:
        found[Matrices("heads_and_hidden", d, heads * model.head_width)] += 1
        found[Matrices("heads_and_hidden", d, heads * model.head_width)] += model.attention.output_gate
        found[Matrices("heads_and_hidden", d, model.kv_heads * model.head_width)] += 2
    else:
        rank, q_rank = latent.kv_lora_rank, latent.q_lora_rank
        found.update(Matrices("whole", d, width) for width in (rank, latent.qk_rope_head_dim, q_rank) if width)
        found[Matrices("heads_and_hidden", q_rank or d, heads * model.qk_width)] += 1
        found[Matrices("heads_and_hidden", rank, heads * latent.qk_nope_head_dim)] += 1
        found[Matrices("heads_and_hidden", rank, heads * model.v_width)] += 1
    moe, of_mlp = model.moe, 3 if model.is_gated else 2
    if has_mlp if kind == "dense" else moe.dense_residual:
        found[Matrices("heads_and_hidden", d, model.intermediate_size)] += of_mlp
    if kind == "moe":
        found[Matrices("expert", d, moe.intermediate_size)] += of_mlp
        if moe.num_shared_experts:
            found[Matrices("heads_and_hidden", d, moe.intermediate_size * moe.num_shared_experts)] += of_mlp
    return found


def orthogonalizing_flops(config: Config, mesh: Mapping[str, int]) -> float:
    """Operations of a device of the stage with the most blocks in an update; 0 for other optimizers than Muon."""
    iterations = config.optimizer.newton_schulz_steps
    return float(
        sum(arrays * math.ceil(count) * each.flops(iterations) for each, arrays, count in _stacks(config, mesh))
    )


def sent_matrix_bytes(config: Config, platform: str, mesh: Mapping[str, int]) -> dict[str, float]:
    """Bytes of its shards that a device exchanges for whole matrices, once, by their owner; as many return."""
    item = ITEM_BYTES[config.optimizer.products_dtype(platform)]
    sent: dict[str, float] = defaultdict(float)
    for each, arrays, count in _stacks(config, mesh):
        sent[each.owner] += arrays * count * each.rows * each.columns * item
    return dict(sent)


def orthogonalizing_bytes(config: Config, platform: str, mesh: Mapping[str, int]) -> float:
    """Memory of a device for the largest stack of matrices in an update; 0 for other optimizers than Muon."""
    item = ITEM_BYTES[config.optimizer.products_dtype(platform)]
    sizes = [count * each.rows * each.columns for each, _, count in _stacks(config, mesh)]
    return _COPIES * item * max(sizes, default=0.0)


def _stacks(config: Config, mesh: Mapping[str, int]) -> Iterator[tuple[Matrices, int, float]]:
    """Yield arrays of blocks, the number of those of one shape in a block, and a device's matrices of each of them."""
    if not config.optimizer.facts.orthogonalizes:
        return
    model, stages, shards = config.model, Stages.of(config), parts_by_owner(config, mesh)
    experts = config.expert_slots(mesh) / config.mesh.expert_ranks(mesh)
    shared_by = {"whole": 1, "heads_and_hidden": mesh["tensor"], "expert": config.mesh.expert_tensor_ranks(mesh)}
    views = ((view.is_recurrent, view.has_mlp) for view in model.views)
    for (kind, of_view), count in Counter(zip(model.block_kinds, views, strict=True)).items():
        blocks = -(-count // stages.stages)
        for each, arrays in hidden_matrices(model, kind, *of_view).items():
            ranks = shards[each.owner] * shared_by[each.owner]
            yield each, arrays, blocks * (experts if each.owner == "expert" else 1) / ranks
    if model.has_mtp:  # the matrix of the input of its block
        yield Matrices("whole", 2 * model.hidden_size, model.hidden_size), 1, 1 / shards["whole"]
