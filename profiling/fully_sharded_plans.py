"""What fully sharded parameters add to plans of large models: python profiling/fully_sharded_plans.py [--table]

Plans each model twice: with any `optimizer.zero`, and with stages 0 to 2 only (the best of three plans, one for each
stage); and both again without pipeline stages. Takes a few minutes of one core. Writes
results/fully_sharded_plans.json, and prints the table of docs/fully_sharded.md; `--table` only prints it.
tests/test_plan_figures.py compares the page with the results.
"""

import json
from typing import Any

from plan_cases import Case
from planned_model import draft_of, plan_command
from results_file import RESULTS, rounded, write_result

from moe_jax.errors import CommandParser, run_command
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.planner import PlanError, plan
from moe_jax.plan.search import step_s

NAME = "fully_sharded_plans"
_BUFFERS = ("exchange.rank_capacity_factor=1.5",)
CASES = (
    Case("DeepSeek-V3 on 256 H100", "deepseek_v3", "h100x256", _BUFFERS),
    Case("DeepSeek-V3 on 2,048 H100", "deepseek_v3", "h100x2048", _BUFFERS),
    Case("Kimi K2 on 1,024 v5p", "kimi_k2", "v5p-1024", _BUFFERS),
    Case("Kimi K2 on 512 H200", "kimi_k2", "h200x512", _BUFFERS),
)
MESHES: dict[str, tuple[str, ...]] = {"any": (), "no pipeline stages": ("mesh.pipeline=1",)}
STAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "0 to 2": tuple((f"optimizer.zero={stage}",) for stage in range(3)),
    "0 to 3": ((),),
}


def best_plan(case: Case, choices: tuple[tuple[str, ...], ...]) -> dict[str, Any]:
    """Return the fastest plan of a case with any of these settings, and why the others have none."""
    plans, refused = [], {}
    for each in choices:
        settings = (*case.settings, *each)
        command = plan_command(case.model, case.cluster, settings)
        try:
            plans.append((plan(draft_of(case.model, settings), find_cluster(case.cluster)).best, command))
        except PlanError as error:
            refused[command] = str(error)
    found: dict[str, Any] = {"refused": refused}
    if not plans:
        return found
    best, command = min(plans, key=lambda each: step_s(each[0]))
    estimate, config = best.estimate, best.config
    return found | {
        "command": command,
        "tokens_per_s": rounded(estimate.tokens_per_s / estimate.cluster.devices),
        "step_s": rounded(estimate.step_s),
        "mfu": rounded(estimate.mfu),
        "memory_gb": rounded(best.memory.total / 1e9),
        "mesh": best.mesh,
        "zero": config.optimizer.zero,
        "remat": config.schedule.remat,
        "parts": config.train.grad_accumulation,
        "policy": config.schedule.policy,
    }


def table(plans: dict[str, dict[str, dict[str, dict[str, Any]]]]) -> list[str]:
    """Return the lines of the table in docs/fully_sharded.md."""
    lines = [f"| | meshes | {' | '.join(f'`optimizer.zero` {stages}' for stages in STAGES)} |", "|---|---|---|---|"]
    for row, by_mesh in plans.items():
        for meshes, by_stages in by_mesh.items():
            without, allowed = by_stages.values()
            same = "the same" if without.get("mesh") and _facts(without) == _facts(allowed) else _cell(allowed)
            lines.append(f"| {row} | {meshes} | {_cell(without)} | {same} |")
    return lines


def _facts(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in ("refused", "command")}


def _cell(found: dict[str, Any]) -> str:
    if "mesh" not in found:
        return min(found["refused"].values(), key=len)
    return f"{found['tokens_per_s']:,.0f}, {found['memory_gb']:.1f} GB: {found['mesh']}, ZeRO {found['zero']}"


def main() -> None:
    """Plan all cases and write the results, or print the table of the last ones."""
    parser = CommandParser(prog="python profiling/fully_sharded_plans.py", description=__doc__)
    parser.add_argument("--table", action="store_true", help="only print the table")
    if not parser.parse_args().table:
        plans = {
            case.row: {
                meshes: {
                    stages: best_plan(case._replace(settings=(*case.settings, *more)), choices)
                    for stages, choices in STAGES.items()
                }
                for meshes, more in MESHES.items()
            }
            for case in CASES
        }
        write_result(NAME, {"plans": plans})
    print("\n".join(table(json.loads((RESULTS / f"{NAME}.json").read_text("utf-8"))["plans"])))


if __name__ == "__main__":
    run_command(main)
