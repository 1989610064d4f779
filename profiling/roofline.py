"""Times of a training step's operations by kind, with their lower bounds.

The lower bound is the longer of two times: that of the floating-point operations at the rate of matrix products, and
that of the bytes at the rate of copies. It assumes that nothing is padded or computed twice, that every array is read
and written once, and that as few arrays as possible pass between kernels.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.measure.costs import compute_seconds, matrix_products
from moe_jax.measure.hlo import HloModule, Instruction
from moe_jax.measure.targets import Target
from moe_jax.measure.trace import TracedOperation, joined
from moe_jax.plan.resources import count_parameters, gate_matrices, train_flops_per_token

ATTENTION, EXPERTS, DENSE = "attention", "expert products", "dense products"
ROUTING, ELEMENTWISE, LOSS, OPTIMIZER = "routing and permutation", "norms, elementwise", "cross-entropy", "optimizer"
# scopes of the step; the first one found counts
_SCOPES = {
    OPTIMIZER: ("optimizer", "grad_norm"),
    LOSS: ("cross_entropy",),
    ATTENTION: ("attention",),
    EXPERTS: ("experts",),
    ROUTING: ("route", "unpermute", "dispatch", "combine"),
}
_HALF, _WHOLE = 2, 4  # bytes of a number: of activations, of parameters


class Work(NamedTuple):
    """The least work of a step: floating-point operations and bytes."""

    flops: float
    num_bytes: float

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Return the longer of the times of both."""
        return max(self.flops / flops_per_s, self.num_bytes / bytes_per_s)


def kind_of(line: Instruction, program: HloModule) -> str:
    """Return the kind of an instruction, by its scope and whether it is a matrix product."""
    scopes = set(re.findall(r"[^/()]+", program.op_name(line)))
    found = next((kind for kind, names in _SCOPES.items() if scopes & set(names)), None)
    is_product = matrix_products(line, program) > 0
    if found is None:
        return DENSE if is_product else ELEMENTWISE
    if found == LOSS and is_product:  # with logits computed in chunks, a product of the head
        return DENSE
    return ELEMENTWISE if found == EXPERTS and not is_product else found


def seconds_by_kind(operations: Sequence[TracedOperation], program: HloModule) -> dict[str, float]:
    """Return the seconds of each kind in one traced step; concurrent operations count once, loops as their contents."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for operation in operations:
        line = program.by_name.get(operation.name)
        if line is not None and not line.is_control:
            spans[kind_of(line, program)].append((operation.start_s, operation.end_s))
    return {kind: sum(end - start for start, end in joined(parts)) for kind, parts in spans.items()}


def work_by_kind(config: Config) -> dict[str, Work]:
    """Return the work of each kind in a step on one device, forward and backward.

    Activations are bfloat16, parameters float32.
    """
    model, length = config.model, config.data.seq_len
    moe, width = model.moe, model.hidden_size
    tokens = config.train.batch_size * length
    counts, blocks = count_parameters(model), model.block_kinds.count("moe")
    experts = counts.expert - counts.expert_whole
    met = experts * moe.top_k // max(moe.num_experts, 1)  # experts per token
    gates = blocks * gate_matrices(model)
    dense = counts.matrix_active - met - gates
    pairs = train_flops_per_token(model, length) - 6 * counts.matrix_active
    heads = (model.num_attention_heads + model.kv_heads) * (
        model.qk_width + model.v_width
    )  # q, k, v and the attention output
    hidden = blocks * (moe.top_k + moe.num_shared_experts) * moe.intermediate_size
    hidden += (model.num_layers - blocks) * model.intermediate_size
    # each read and written forward, and twice as often backward: the value that was read, and its gradient
    norms, residuals, activations = 5 * (2 * model.num_layers + 1), 6 * 2 * model.num_layers, 8
    moved = 4 * (moe.top_k + 1) * blocks  # rows of a token: out and back, forward and backward, read and written
    return {
        EXPERTS: Work(6 * tokens * met, 3 * _HALF * experts),
        DENSE: Work(6 * tokens * dense, 3 * _HALF * dense),
        ATTENTION: Work(tokens * pairs, 3 * _HALF * tokens * model.num_layers * heads),
        ROUTING: Work(6 * tokens * gates, _HALF * tokens * width * moved),
        # and gradients are read for their norm
        ELEMENTWISE: Work(0, _HALF * (tokens * ((norms + residuals) * width + activations * hidden) + counts.total)),
        LOSS: Work(0, 2 * _WHOLE * tokens * model.vocab_size),
        # parameters and moments are read and written, gradients, which may still be in bfloat16, are read
        OPTIMIZER: Work(0, (6 * _WHOLE + _HALF) * counts.total),
    }


def kernel_seconds(program: HloModule, target: Target) -> dict[str, float]:
    """Return the least time of the kernels of each kind in a step that was compiled for one device.

    Each kernel takes the longer of its operations at peak rate and the bytes that it touches at memory bandwidth.
    Unlike `work_by_kind`, this counts everything that the compiler made the step read and write. Loops of an unknown
    number of iterations, and branches, count once.
    """
    seconds: dict[str, float] = defaultdict(float)
    for line, count in _executed(program, program.entry, 1):
        if own_s := compute_seconds(line, program, target):
            seconds[kind_of(line, program)] += count * own_s
    return dict(seconds)


def _executed(program: HloModule, computation: str, count: int) -> Iterator[tuple[Instruction, int]]:
    """Yield every instruction that runs by itself, with the number of times."""
    for line in program.computations[computation]:
        if not line.is_control:
            yield line, count
        else:
            times = count * (program.trip_count(line) or 1) if line.opcode == "while" else count
            for called in line.called:
                yield from _executed(program, called, times)
