"""Medians, quartiles and ratios of the measurements of a network testbed, as plain values and as a table."""

from collections.abc import Sequence
from typing import Any

from results_file import quartiles, rounded

from moe_jax.measure.trace import TracedOperation, joined

REFERENCES = ("vanilla", "expert_pipeline")  # the baselines that the other variants are compared with
COMPUTE, COMMUNICATION = "compute alone", "communication alone"


def hidden_share(operations: Sequence[TracedOperation], direction: str | tuple[str, ...]) -> float | None:
    """Return the share of a direction's communication in one step during which this process computes.

    It is None without communication.
    """
    of_direction = [each for each in operations if each.communicates and each.task.startswith(direction)]
    total = sum(each.end_s - each.start_s for each in of_direction)
    computing = joined([(each.start_s, each.end_s) for each in operations if not each.communicates])
    hidden = sum(
        max(0.0, min(each.end_s, end_s) - max(each.start_s, start_s))
        for each in of_direction
        for start_s, end_s in computing
    )
    return rounded(hidden / total) if total else None


def summary(found: dict[str, Any], variants: dict[str, list[str]]) -> dict[str, Any]:
    """Return medians and quartiles of seconds, and of ratios within a round."""
    seconds: dict[str, list[float]] = found["seconds"]
    compute, transfer = seconds[f"{COMPUTE}: vanilla"], seconds[COMMUNICATION]
    bound = [max(pair) for pair in zip(compute, transfer, strict=True)]
    rows: dict[str, dict[str, Any]] = {}
    for name, settings in variants.items():
        own = seconds[name]
        rows[name] = {
            "settings": settings,
            "step_s": quartiles(own),
            "step_over_bound": quartiles([a / b for a, b in zip(own, bound, strict=True)]),
        } | {
            f"speed_up_over_{reference}": quartiles([b / a for a, b in zip(own, seconds[reference], strict=True)])
            for reference in REFERENCES
            if reference in variants
        }
        for key, direction in (
            ("exchanges_hidden", ("F", "B")),
            ("gradient_sums_hidden", ("G.reduce", "G.embed", "G.head")),
        ):
            rows[name][key] = hidden_share(found["timelines"][name], direction)
    cut = seconds.get(f"{COMPUTE}: unified")
    return {
        "rate_mbit": found["rate_mbit"],
        "task_times": found["task_times"],
        "compute_alone_s": quartiles(compute),
        "communication_alone_s": quartiles(transfer),
        "bound_s": quartiles(bound),
        **({"compute_alone_in_microbatches_s": quartiles(cut)} if cut else {}),
        "variants": rows,
    }


def _percent(share: float | None) -> str:
    return f"{'-':>17}" if share is None else f"{share:17.0%}"


def table(result: dict[str, Any]) -> str:
    """Format the summary as text."""
    width = max(map(len, result["variants"])) + 2
    lines = [
        f"{'':{width}}  step s  (quartiles)      × vanilla  × expert_pipeline  / bound  hidden: exchanges, sums",
    ]
    for name, row in result["variants"].items():
        step = row["step_s"]
        over = [row.get(f"speed_up_over_{reference}", {}).get("median", float("nan")) for reference in REFERENCES]
        lines.append(
            f"{name:{width}}  {step['median']:6.3f}  ({step['first_quartile']:.3f}…{step['third_quartile']:.3f})"
            f"  {over[0]:9.3f}  {over[1]:17.3f}"
            f"  {row['step_over_bound']['median']:7.3f}  {_percent(row['exchanges_hidden'])}"
            f"  {_percent(row['gradient_sums_hidden'])[-6:]}"
        )
    for name in (name for name in result if name.endswith("_s")):
        lines.append(f"{name.removesuffix('_s').replace('_', ' '):{width}}  {result[name]['median']:6.3f}")
    return "\n".join([*lines, f"links of {result['rate_mbit']:.0f} Mbit/s"])
