"""Rows that overflow their expert's lane: no product is computed if there are none."""

import jax
import jax.numpy as jnp
import pytest

from moe_jax.config import MoEConfig
from moe_jax.measure.hlo import HloModule, Instruction, parse
from moe_jax.models.dispatchers.protocol import RowSource
from moe_jax.models.dispatchers.ragged import Overflow, Rest, Stored
from moe_jax.models.routing import TokenPermutation
from moe_jax.parallel.trees import Grads, Params

D, F, LANE = 16, 32, 8


def _has_product(program: HloModule, instruction: Instruction) -> bool:
    return any(line.opcode == "dot" for line in program.inside(instruction))


@pytest.mark.parametrize("experts", [1, 2])
def test_weight_gradients_of_overflow_are_computed_inside_the_loop_that_does_not_run(experts: int) -> None:
    """With one expert on each rank no array depends on the loop's iteration, and XLA could hoist its whole body."""
    moe = MoEConfig(num_experts=experts)

    def add(gradient: Grads, stack: Params, rows: jax.Array, d_out: jax.Array, count_PE: jax.Array) -> Grads:
        source = RowSource(rows, TokenPermutation(count_PE, count_PE[0]))
        overflow = Overflow(source, count_PE, count_PE[0], count_PE.max() > LANE)
        return overflow.add_weights(gradient, Stored(stack, 0), Rest(rows, LANE), d_out, moe)

    def weights(*outer: int) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = {"up": (D, F), "gate": (D, F), "down": (F, D)}
        return {name: jax.ShapeDtypeStruct((*outer, *shape), jnp.float32) for name, shape in shapes.items()}

    rows = jax.ShapeDtypeStruct((experts * LANE, D), jnp.float32)
    counts = jax.ShapeDtypeStruct((1, experts), jnp.int32)
    lowered = jax.jit(add, donate_argnums=0).lower(weights(experts), weights(1, experts), rows, rows, counts)
    program = parse(lowered.compile().as_text() or "")
    outside = [line for line in program.computations[program.entry] if line.opcode != "while"]
    assert any(_has_product(program, line) for line in program.computations[program.entry])
    assert not [line.name for line in outside if _has_product(program, line)]
