"""Predicted against published times of collectives: python profiling/published_links.py

The rows of published_links.yaml are predicted for their preset (plan/clusters). Takes seconds. Writes
results/published_links.json, and prints the tables of docs/published.md.
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
    found = link | {"predicted_us": [rounded(predicted_us(link, num_bytes)) for num_bytes in link["bytes"]]}
    return found | {"median_error": rounded(statistics.median(errors(found)))}


def errors(link: dict[str, Any]) -> list[float]:
    """Return the relative errors of a row's predictions."""
    return [abs(found / us - 1) for found, us in zip(link["predicted_us"], link["us"], strict=True)]


def of_presets(links: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the median error of the points of each preset; None if none was found."""
    presets: dict[str, list[float]] = {name: [] for name in PRESETS if name != "cpu"}
    for link in links:
        preset = max((name for name in presets if link["cluster"].startswith(name)), key=len)
        presets[preset] += errors(link)
    return {name: rounded(statistics.median(each)) if each else None for name, each in presets.items()}


def table(result: dict[str, Any]) -> str:
    """Return the rows as a Markdown table of ratios of predicted to published times, by size."""
    lines = [
        "| devices | collective | source | predicted / published, by bytes | median error |",
        "|---|---|---|---|---|",
    ]
    for link in result["links"]:
        points = zip(link["bytes"], link["predicted_us"], link["us"], strict=True)
        ratios = ", ".join(f"{size_text(num_bytes)}: {found / us:.2f}" for num_bytes, found, us in points)
        lines.append(
            f"| {link['ranks']} of {link['cluster']} | {link['collective']} | {link['source']} | {ratios} | "
            f"{100 * link['median_error']:.0f} % |"
        )
    return "\n".join(lines)


def size_text(num_bytes: float) -> str:
    """Return a size in binary units."""
    for name, unit in (("G", 2**30), ("M", 2**20)):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g}{name}"
    return f"{num_bytes / 2**10:.3g}k"


def main() -> None:
    """Predict all rows and write the results."""
    CommandParser(prog="python profiling/published_links.py", description=__doc__).parse_args()
    given = yaml.safe_load(LINKS.read_text())
    found = [compared(link) for link in given["links"]]
    every = [error for link in found for error in errors(link)]
    result = {
        "sources": given["sources"],
        "links": found,
        "median_error_of_presets": of_presets(found),
        "median_error": rounded(statistics.median(every)),
        "points": len(every),
    }
    write_result("published_links", result)
    print(table(result))


if __name__ == "__main__":
    run_command(main)
