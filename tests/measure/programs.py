"""Small programs in HLO text, and hardware whose times are easy to add up: a cycle or a byte takes a microsecond."""

from pathlib import Path

from moe_jax.measure.hlo import HloModule, parse
from moe_jax.measure.targets import Target
from moe_jax.plan.task_times import Linear

LINK = Linear(0.0, 1e-6)
TOY = Target(
    name="v5p:2x2x2",
    platform="tpu",
    matrix_flops_per_s=1e6,
    memory_bytes_per_s=1e6,
    clock_hz=1e6,
    link=LINK,
    network=Linear(0.0, 10e-6),
    node_devices=None,
)


def saved(name: str) -> HloModule:
    """A program that a real compiler scheduled, cut down to what is read."""
    return parse((Path(__file__).parent / name).read_text(encoding="utf-8"))


def program(entry: str, others: str = "") -> HloModule:
    """A module of an entry computation, one instruction per line, and other computations."""
    lines = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    return parse(f"HloModule toy, is_scheduled=true\n\n{others}\nENTRY %main () -> f32[] {{\n{lines}\n}}\n")


def work(name: str, cycles: int, scope: str = "") -> str:
    """A line that computes for so many microseconds."""
    return (
        f"%{name} = f32[2] fusion(), kind=kLoop, calls=%body, "
        f'metadata={{op_name="jit(step)/{scope}/mul"}}, backend_config={{"estimated_cycles":"{cycles}"}}'
    )


def start(name: str, size: int, scope: str = "") -> str:
    """A line that starts to send so many bytes."""
    return (
        f"%{name} = (u8[{size}], u8[{size}]) collective-permute-start(%x{size}), "
        f"source_target_pairs={{{{0,1}},{{1,0}}}}, "
        f'metadata={{op_name="jit(step)/{scope}/ppermute"}}'
    )


def done(name: str) -> str:
    """A line that waits for what `start` began."""
    return f"%{name}.done = u8[1] collective-permute-done(%{name})"


def operand(size: int) -> str:
    """The line that `start` reads from."""
    return f"%x{size} = u8[{size}] parameter(0)"


BODY = "%body () -> f32[2] {\n  ROOT %zero = f32[2] constant(0)\n}\n"
