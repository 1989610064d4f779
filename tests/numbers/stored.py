"""Results as the documentation writes them."""

import re

from moe_jax.config.yaml_io import load_config
from moe_jax.plan.memory import step_memory
from tests.results import ROOT, result

RESULTS = ROOT / "profiling" / "results"


def within(found: dict[str, float], digits: int = 2) -> str:
    """A median and its quartiles."""
    return " ".join(f"{found[name]:,.{digits}f}" for name in ("median", "first_quartile", "third_quartile"))


def hundreds(share: float, digits: int = 1) -> str:
    """In percent."""
    return f"{100 * share:.{digits}f}"


def variants(name: str) -> dict[str, dict[str, float]]:
    """Milliseconds and gigabytes of each variant, as `report --compile` printed them."""
    _, table = (RESULTS / f"{name}.txt").read_text().split("\nvariant ", 1)
    found = {}
    for line in table.split("\n\n")[0].splitlines()[1:]:
        variant, *values = line.split()
        names = ("step", "ratio", "compute", "communication", "exposed", "temporaries")
        found[variant] = dict(zip(names, map(float, values[:6]), strict=True))
    return found


def plan_text(name: str) -> dict[str, str]:
    """Memory in GB and seconds of a step, predicted and compiled, as `plan --compile` printed them."""
    text = (RESULTS / f"{name}.txt").read_text()
    found = {}
    for what, pattern in (
        ("memory", r"^memory +predicted (\S+) GB, compiled (\S+) GB .*, of (\S+) GB"),
        ("step", r"^step +predicted (\S+) s, compiled (\S+) s()"),
    ):
        (values,) = re.findall(pattern, text, re.MULTILINE)
        found |= {
            f"{what} {which}": value for which, value in zip(("predicted", "compiled", "of"), values, strict=True)
        }
    return found


def planned_gb(stage: str) -> float:
    """Memory that a plan predicts for a stage of fully_sharded_v5p_2x2x2.json, such as "3, block"."""
    zero, *block = stage.split(", ")
    own = [f"optimizer.zero={zero}", *(f"schedule.param_gather={how}" for how in block)]
    settings = [*result("fully_sharded_v5p_2x2x2")["settings"], *own]
    return step_memory(load_config(str(ROOT / "configs/bench/fine_grained.yaml"), settings), "tpu").total / 1e9
