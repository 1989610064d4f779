"""What the operations of a training step take by their kind, beside the least that they could.

The least is the longer of floating-point operations at the rate of matrix products and bytes at that of copies:
nothing padded or computed twice, every array read and written once, between kernels as few of them as there can be.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.measure.costs import matrix_products
from moe_jax.measure.hlo import HloModule, Instruction
from moe_jax.measure.trace import TracedOperation, joined
from moe_jax.plan.resources import count_parameters, gate_matrices, train_flops_per_token

ATTENTION, EXPERTS, DENSE = "attention", "expert products", "dense products"
ROUTING, ELEMENTWISE, LOSS, OPTIMIZER = "routing and permutation", "norms, elementwise", "cross-entropy", "optimizer"
# scopes of the step, the first that is found
_SCOPES = {
    OPTIMIZER: ("optimizer", "grad_norm"),
    LOSS: ("cross_entropy",),
    ATTENTION: ("attention",),
    EXPERTS: ("experts",),
    ROUTING: ("route", "unpermute", "dispatch", "combine"),
}
_HALF, _WHOLE = 2, 4  # bytes of a number: of activations, of parameters


class Work(NamedTuple):
    """The least that a step does."""

    flops: float
    num_bytes: float

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Of both at once."""
        return max(self.flops / flops_per_s, self.num_bytes / bytes_per_s)


def kind_of(line: Instruction, program: HloModule) -> str:
    """Of an instruction, by the scope that it comes from and whether it is a matrix product."""
    scopes = set(re.findall(r"[^/()]+", program.op_name(line)))
    found = next((kind for kind, names in _SCOPES.items() if scopes & set(names)), None)
    is_product = matrix_products(line, program) > 0
    if found is None:
        return DENSE if is_product else ELEMENTWISE
    if found == LOSS and is_product:  # with logits made by chunks, the head's
        return DENSE
    return ELEMENTWISE if found == EXPERTS and not is_product else found


def seconds_by_kind(operations: Sequence[TracedOperation], program: HloModule) -> dict[str, float]:
    """Of one traced step; what runs at the same time counts once. Loops count as what runs inside them."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for operation in operations:
        line = program.by_name.get(operation.name)
        if line is not None and not line.is_control:
            spans[kind_of(line, program)].append((operation.start_s, operation.end_s))
    return {kind: sum(end - start for start, end in joined(parts)) for kind, parts in spans.items()}


def work_by_kind(config: Config) -> dict[str, Work]:
    """Of a step on one device, forward and backward, activations in bfloat16 and parameters in float32."""
    model, length = config.model, config.data.seq_len
    moe, width = model.moe, model.hidden_size
    tokens = config.train.batch_size * length
    counts, blocks = count_parameters(model), model.block_kinds.count("moe")
    experts = counts.expert - counts.expert_whole
    met = experts * moe.top_k // max(moe.num_experts, 1)  # by a token
    gates = blocks * gate_matrices(model)
    dense = counts.matrix_active - met - gates
    pairs = train_flops_per_token(model, length) - 6 * counts.matrix_active
    heads = (model.num_attention_heads + model.kv_heads) * (
        model.qk_width + model.v_width
    )  # q, k, v and what comes of them
    hidden = blocks * (moe.top_k + moe.num_shared_experts) * moe.intermediate_size
    hidden += (model.num_layers - blocks) * model.intermediate_size
    # each read and written forward, and twice as often backward: what was read, and its gradient
    norms, residuals, activations = 5 * (2 * model.num_layers + 1), 6 * 2 * model.num_layers, 8
    moved = 4 * (moe.top_k + 1) * blocks  # rows of a token: out and back, forward and backward, read and written
    return {
        EXPERTS: Work(6 * tokens * met, 3 * _HALF * experts),
        DENSE: Work(6 * tokens * dense, 3 * _HALF * dense),
        ATTENTION: Work(tokens * pairs, 3 * _HALF * tokens * model.num_layers * heads),
        ROUTING: Work(6 * tokens * gates, _HALF * tokens * width * moved),
        ELEMENTWISE: Work(0, _HALF * tokens * ((norms + residuals) * width + activations * hidden)),
        LOSS: Work(0, 2 * _WHOLE * tokens * model.vocab_size),
        OPTIMIZER: Work(0, 8 * _WHOLE * counts.total),  # of 4 arrays 3 are written, too, and gradients read for a norm
    }
