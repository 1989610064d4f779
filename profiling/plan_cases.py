"""Plans whose figures docs/plan.md, docs/results.md and README.md give: python profiling/plan_cases.py [--table]

Each model is planned on a cluster with all axes, and without context ranks. Takes about two minutes of one core. Writes
results/plan_cases.json, and prints the table of docs/plan.md; `--table` only prints it. tests/test_plan_figures.py
compares the pages with the results.
"""

import json
import time
from typing import Any, NamedTuple

from planned_model import draft_of, plan_command
from results_file import RESULTS, rounded, write_result

from moe_jax.errors import CommandParser, run_command
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.planner import plan

NAME = "plan_cases"


class Case(NamedTuple):
    """A model on a cluster, and its row in the table."""

    row: str
    model: str  # name in configs/models
    cluster: str
    settings: tuple[str, ...]


CASES = (
    Case("DeepSeek-V3 on 2,048 H100", "deepseek_v3", "h100x2048", ("exchange.rank_capacity_factor=1.5",)),
    Case("Kimi K2 on 6,144 v5p", "kimi_k2", "v5p-6144", ("train.batch_size=6144", "exchange.rank_capacity_factor=1.5")),
    Case("Mixtral 8x7B on 64 H100", "mixtral_8x7b", "h100x64", ("train.batch_size=256",)),
)
VARIANTS: dict[str, tuple[str, ...]] = {"all axes": (), "without context ranks": ("mesh.context=1",)}


def planned(case: Case, more: tuple[str, ...]) -> dict[str, Any]:
    """Return the best plan and what it took to find it."""
    settings = (*case.settings, *more)
    draft = draft_of(case.model, settings)
    start_s = time.process_time()
    found = plan(draft, find_cluster(case.cluster))
    cpu_s = time.process_time() - start_s
    return {
        "command": plan_command(case.model, case.cluster, settings),
        "sequences": draft.train.batch_size,
        "step_s": rounded(found.best.estimate.step_s),
        "mfu": rounded(found.best.estimate.mfu),
        "mesh": found.best.mesh,
        "meshes": len(found.ranked) + found.slower + len(found.refused),
        "cpu_s": rounded(cpu_s),
    }


def table(plans: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """The lines of the table in docs/plan.md."""
    lines = [f"| | {' | '.join(VARIANTS)} |", f"|---|{'---|' * len(VARIANTS)}"]
    for row, found in plans.items():
        sequences = next(iter(found.values()))["sequences"]
        cells = [f"{each['step_s']:.3g} ({each['mesh']})" for each in found.values()]
        lines.append(f"| {row}, {sequences:,} sequences | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Plan all cases and write the results, or print the table of the last ones."""
    parser = CommandParser(prog="python profiling/plan_cases.py", description=__doc__)
    parser.add_argument("--table", action="store_true", help="only print the table")
    if not parser.parse_args().table:
        plans = {case.row: {name: planned(case, more) for name, more in VARIANTS.items()} for case in CASES}
        write_result(NAME, {"plans": plans})
    print("\n".join(table(json.loads((RESULTS / f"{NAME}.json").read_text("utf-8"))["plans"])))


if __name__ == "__main__":
    run_command(main)
