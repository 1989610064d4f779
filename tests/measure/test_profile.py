"""Times that a program is compiled again by."""

import re

from moe_jax.measure.costs import matrix_products
from moe_jax.measure.profile import estimated_profile, is_profile, measured_profile, measured_seconds
from moe_jax.measure.targets import find_target
from moe_jax.measure.trace import TracedOperation
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


def run(name: str, us: float, device: str = "0", communicates: bool = False, start_s: float = 1.0) -> TracedOperation:
    return TracedOperation(name, "", communicates, "", start_s, start_s + 1e-6 * us, device)


def in_us(seconds: dict[str, float]) -> dict[str, int]:
    return {name: round(1e6 * each) for name, each in seconds.items()}


def test_of_several_runs_compute_has_the_median_and_a_transfer_the_one_that_waits_least() -> None:
    toy = program("\n".join([operand(40), start("s", 40), work("a", 7, "F.expert.0.0"), done("s")]), BODY)
    product = [run("a", us) for us in (5, 90, 7)]
    transfer = [run("s", us, communicates=True) for us in (40, 30, 900)]
    others = [run("a", 1000, device="10"), run("a", 1000, device="1")]
    assert in_us(measured_seconds(toy, [*product, *transfer, *others], 3)) == {"a": 7, "s": 30}
    assert measured_seconds(toy, [], 3) == {}


def test_the_kernels_of_one_run_are_added_up() -> None:
    """A product in parts and their sum; in a loop of four iterations there are four runs in each step."""
    loop = 'while(%x40), condition=%more, body=%turn, backend_config={"known_trip_count":{"n":"4"}}'
    body = f"%turn () -> s32[] {{\n  {work('b', 6, 'F.expert.0.0')}\n}}\n%more () -> pred[] {{\n}}\n"
    toy = program("\n".join([operand(40), work("a", 7, "F.expert.0.0"), f"%w = s32[] {loop}"]), BODY + body)
    kernels = [run("a", us, start_s=i) for i, us in enumerate([5, 1000, 8, 6, 900, 9])]
    assert in_us(measured_seconds(toy, kernels, 2)) == {"a": (1013 + 915) // 2}
    assert in_us(
        measured_seconds(toy, [run("b", us, start_s=i) for i, us in enumerate([1, 3, 3, 3, 3, 3, 9, 9])], 2)
    ) == {"b": 3}
    pairs = [run("b", us, start_s=i) for i, us in enumerate([10, 1] * 8)]
    assert in_us(measured_seconds(toy, pairs, 2)) == {"b": 11}


def test_measured_times_replace_estimated_ones_of_tasks_and_transfers() -> None:
    lines = [operand(40), start("s", 40), work("a", 7, "F.expert.0.0"), work("b", 9), done("s")]
    lines += [start("t", 40), work("c", 5, "F.attend.0.0"), done("t")]
    toy, seconds = program("\n".join(lines), BODY), {"s": 3e-6, "a": 2e-6, "b": 4e-6, "s.done": 6e-6}
    with_tasks = {"x40": 0, "s": 3, "a": 2, "b": 0, "s.done": 0, "t": 40, "c": 5, "t.done": 0}
    assert times(measured_profile(toy, seconds, TOY, 2, has_tasks=True)) == with_tasks
    found = times(measured_profile(toy, seconds, None, 2, has_tasks=False))
    assert found == {"s": 3, "a": 2, "b": 4, "s.done": 0, "t.done": 0}, "of a plain step all compute counts"


def test_with_all_estimates_as_measured_the_profile_is_the_same() -> None:
    real, target = saved("gpu_h100.hlo"), find_target("h100:1x1x8")
    estimated = estimated_profile(real, target, 8)
    seconds = {name: 1e-6 * us for name, us in times(estimated).items()}
    renamed = {line.name for lines in real.computations.values() for line in lines} - seconds.keys()
    assert (
        measured_profile(real, {name: seconds[name] for name in seconds.keys() - renamed}, target, 8, True) == estimated
    )
    assert is_profile(estimated)


def test_other_text_is_no_profile() -> None:
    line = 'costs { name: "a" cost_us: 7.000 }\n'
    assert is_profile(2 * line)
    for text in (line[:-1], line + "\n", line.replace("7.000", "-7.000"), line + "more", line.replace("a", 'a" x: "')):
        assert not is_profile(text)
