"""Write estimated instruction times as a profile (fdo_profile), with which XLA:GPU's scheduler compiles a program
again.

Without a profile the scheduler treats all fusions as equally long, and assumes that five of any size hide any
collective.
"""

import re

from moe_jax.measure.costs import collective_of, collective_seconds, compute_seconds
from moe_jax.measure.hlo import HloModule, Instruction
from moe_jax.measure.overlap import loop_seconds
from moe_jax.measure.targets import Target
from moe_jax.measure.tasks import action_of

_NAME = re.compile(r'scheduling_name="([^"]*)"')


def estimated_profile(program: HloModule, target: Target, num_devices: int) -> str:
    """Return a ProfiledInstructionsProto as text: microseconds of each instruction, by the name it is scheduled under.

    Compute outside the tasks of a schedule counts as 0. It would hide collectives anywhere, so it should not replace a
    task that runs concurrently with one. A loop inside a task, as over the rows of an expert, has the time of all its
    iterations.
    """
    fused = {name for line in program.by_name.values() if line.opcode == "fusion" for name in line.called}
    lines = [line for name, lines in program.computations.items() if name not in fused for line in lines]
    times = ((_scheduled_name(line), 1e6 * _seconds(line, program, target, num_devices)) for line in lines)
    return "".join(f'costs {{ name: "{name}" cost_us: {us:.3f} }}\n' for name, us in times)


def _scheduled_name(line: Instruction) -> str:
    """Return the name an instruction is scheduled under; later passes may rename it."""
    found = _NAME.search(line.attributes)
    return found[1] if found else line.name


def _seconds(line: Instruction, program: HloModule, target: Target, num_devices: int) -> float:
    if line.opcode in ("conditional", "call") or line.opcode.endswith(("-done", "-update")):
        return 0.0
    collective, is_task = collective_of(line, program), action_of(program.op_name(line)) is not None
    if line.opcode == "while":
        return loop_seconds(line, program, target) if is_task and collective is None else 0.0
    if collective is not None:
        return collective_seconds(collective, program, target, num_devices)
    return compute_seconds(line, program, target) if is_task else 0.0
