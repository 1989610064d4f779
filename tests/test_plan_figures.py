"""Figures of plans in README.md, docs/plan.md and docs/fully_sharded.md are those of plan_cases.json and
fully_sharded_plans.json in profiling/results."""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "profiling"))  # its programs find each other there
import fully_sharded_plans
import plan_cases

from tests.results import ROOT, result

PLANS: dict[str, dict[str, dict[str, Any]]] = result(plan_cases.NAME)["plans"]


def test_the_table_is_that_of_the_script() -> None:
    assert "\n".join(plan_cases.table(PLANS)) in (ROOT / "docs/plan.md").read_text()


def test_so_is_that_of_sharded_parameters() -> None:
    sharded = result(fully_sharded_plans.NAME)["plans"]
    assert "\n".join(fully_sharded_plans.table(sharded)) in (ROOT / "docs/fully_sharded.md").read_text()


def test_a_plan_that_may_shard_parameters_is_never_slower() -> None:
    for by_mesh in result(fully_sharded_plans.NAME)["plans"].values():
        for without, allowed in map(dict.values, by_mesh.values()):
            assert "mesh" not in without or allowed["step_s"] <= without["step_s"], allowed["command"]


def test_planning_takes_as_long_as_the_pages_say() -> None:
    kimi, deepseek = (PLANS[row]["all axes"] for row in ("Kimi K2 on 6,144 v5p", "DeepSeek-V3 on 2,048 H100"))
    readme = re.search(r"considers ([\d,]+) meshes .* in (\d+) s", (ROOT / "README.md").read_text())
    assert readme
    assert int(readme[1].replace(",", "")) == kimi["meshes"]
    assert int(readme[2]) == round(kimi["cpu_s"])
    page = re.search(r"plans in (\d+) s, Kimi K2 on 6,144 v5p in (\d+)\ss", (ROOT / "docs/plan.md").read_text())
    assert page
    assert [int(each) for each in page.groups()] == [round(deepseek["cpu_s"]), round(kimi["cpu_s"])]
    summary = re.search(
        r"\| (\d+) s and (\d+) s on .* for ([\d,]+) and ([\d,]+) meshes", (ROOT / "docs/results.md").read_text()
    )
    assert summary
    assert [int(each.replace(",", "")) for each in summary.groups()] == [
        *(round(each["cpu_s"]) for each in (deepseek, kimi)),
        *(each["meshes"] for each in (deepseek, kimi)),
    ]
