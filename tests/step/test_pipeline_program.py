"""What the compiler makes of a pipelined step."""

from collections.abc import Iterator

import pytest

from moe_jax.measure.costs import matrix_products
from moe_jax.measure.hlo import HloModule, parse
from moe_jax.step.trainer import make_trainer
from tests.small import small_config, tokens_of
from tests.step.gradients import mesh_of
from tests.step.test_pipeline import PIPELINES


def products_by_depth(program: HloModule, computation: str, depth: int = 0) -> Iterator[int]:
    """The loops around each matrix product."""
    for line in program.computations[computation]:
        if line.is_control:
            for name in line.called:
                yield from products_by_depth(program, name, depth + (line.opcode == "while"))
        else:
            yield from [depth] * matrix_products(line, program)


@pytest.mark.parametrize(("name", "remat"), [("zero_bubble", "none"), ("coscheduled", "full")])
def test_passes_run_only_in_the_ticks_that_have_them(name: str, remat: str) -> None:
    """Each product is in the loop of a pass inside the loop over ticks, from where compilers would like to hoist it."""
    schedule = PIPELINES[name] | {"remat": remat}
    config = small_config(1, 2, pipeline=2, grad_accumulation=2, seq_len=6, moe_layer_freq=1, schedule=schedule)
    trainer = make_trainer(config, mesh_of(config))
    shapes, tokens = trainer.state_shapes, tokens_of(config)
    for lowered in (trainer.step.lower(shapes, tokens), trainer.evaluate.lower(shapes["params"], tokens)):
        program = parse(lowered.compile().as_text())
        assert set(products_by_depth(program, program.entry)) == {2}
