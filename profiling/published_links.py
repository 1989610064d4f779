"""Predicted against published times of collectives: python profiling/published_links.py

The rows of published_links.yaml are predicted for their preset (plan/clusters). Takes seconds. Writes
results/published_links.json, which docs/plan.md shows.
"""

import statistics
from pathlib import Path
from typing import Any

import yaml
from results_file import rounded, write_result

from moe_jax.errors import CommandParser, run_command
from moe_jax.plan.clusters import PRESETS, find_cluster
from moe_jax.plan.collective_costs import CollectiveCosts, DeviceGroup

LINKS = Path(__file__).parent / "published_links.yaml"


def predicted_us(link: dict[str, Any], num_bytes: float) -> float:
    """Return the predicted microseconds of a collective; `num_bytes` are counted as nccl-tests does."""
    costs = CollectiveCosts(find_cluster(link["cluster"]))
    group, collective = DeviceGroup(link["ranks"], link.get("stride", 1)), link["collective"]
    if collective == "all_to_all":
        return 1e6 * costs.exchange(num_bytes, group, "flat").seconds
    rounds = 2 if collective == "all_reduce" else 1
    return 1e6 * costs.ring(rounds * num_bytes * (1 - 1 / group.ranks), group, collective)


def compared(link: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its predictions, and their median error."""
    predicted = [rounded(predicted_us(link, num_bytes)) for num_bytes in link["bytes"]]
    errors = [found / us - 1 for found, us in zip(predicted, link["us"], strict=True)]
    return link | {"predicted_us": predicted, "median_error": rounded(statistics.median(map(abs, errors)))}


def main() -> None:
    """Predict all rows and write the results."""
    CommandParser(prog="python profiling/published_links.py", description=__doc__).parse_args()
    given = yaml.safe_load(LINKS.read_text())
    found = [compared(link) for link in given["links"]]
    presets: dict[str, list[float]] = {name: [] for name in PRESETS if name != "cpu"}
    for link in found:
        preset = max((name for name in presets if link["cluster"].startswith(name)), key=len)
        presets[preset] += [abs(a / b - 1) for a, b in zip(link["predicted_us"], link["us"], strict=True)]
    medians = {name: rounded(statistics.median(errors)) if errors else None for name, errors in presets.items()}
    every = [error for errors in presets.values() for error in errors]
    write_result(
        "published_links",
        {
            "sources": given["sources"],
            "links": found,
            "median_error_of_presets": medians,
            "median_error": rounded(statistics.median(every)),
            "points": len(every),
        },
    )


if __name__ == "__main__":
    run_command(main)
