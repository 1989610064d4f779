"""Times that a program is compiled again by."""

import re

from moe_jax.measure.costs import matrix_products
from moe_jax.measure.profile import estimated_profile
from moe_jax.measure.targets import find_target
from tests.measure.programs import BODY, TOY, done, operand, program, saved, start, work


def times(text: str) -> dict[str, float]:
    found = re.findall(r'costs \{ name: "([^"]+)" cost_us: ([\d.]+) \}\n', text)
    assert len(found) == len(text.splitlines())
    return {name: float(us) for name, us in found}


def test_tasks_and_transfers_have_their_times_and_what_belongs_to_no_task_has_none() -> None:
    lines = [operand(40), start("s", 40), work("a", 7, "F.expert.0.0"), work("b", 9), done("s")]
    toy = program("\n".join(lines), BODY)
    assert times(estimated_profile(toy, TOY, 2)) == {"x40": 0, "s": 40, "a": 7, "b": 0, "s.done": 0}


def test_a_loop_of_a_task_has_the_time_of_its_iterations() -> None:
    """With none, an expert without a capacity would seem to hide nothing."""
    body = f"%turn () -> s32[] {{\n  {work('b', 6, 'F.expert.0.0')}\n}}\n%more () -> pred[] {{\n}}\n"
    rows = (
        'while(%x40), condition=%more, body=%turn, metadata={op_name="jit(step)/{0}/filled_50_percent/at_most_8/while"}'
    )
    lines = [
        operand(40),
        "%w = s32[] " + rows.replace("{0}", "F.expert.0.0"),
        "%o = s32[] " + rows.replace("{0}", "sort"),
    ]
    found = times(estimated_profile(program("\n".join(lines), BODY + body), TOY, 2))
    assert found["w"] == 4 * 6
    assert found["o"] == 0


def test_an_instruction_is_known_by_the_name_it_was_scheduled_by() -> None:
    renamed = work("a", 7, "F.expert.0.0").replace("op_name=", 'scheduling_name="before" op_name=')
    assert times(estimated_profile(program(renamed, BODY), TOY, 2)) == {"before": 7}


def test_of_a_real_program_every_exchange_and_every_product_of_a_task_has_a_time() -> None:
    real = saved("gpu_h100.hlo")
    found = times(estimated_profile(real, find_target("h100:1x1x8"), 8))
    for line in real.computations[real.entry]:
        if "all-to-all-start" in line.opcode:
            assert found[line.name] > 5  # the start-up alone
        if line.opcode == "fusion" and matrix_products(line, real) and ".expert." in real.op_name(line):
            assert found[line.name] > 0
