"""Write docs/gpu.md from the results of bench_gpu.py: python profiling/gpu_page.py"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench_gpu import MODEL_PARTS, NOT_BEGUN, greatest_error, races_of
from results_file import RESULTS

from moe_jax.errors import CommandParser, run_command
from moe_jax.files.atomic import write_atomically

PAGE = RESULTS.parents[1] / "docs" / "gpu.md"
_HEAD = """# On a GPU

What was measured on GPUs, and how to measure the rest. `profiling/gpu_page.py` writes this page from
`profiling/results/bench_gpu_*.json`; [measure.md](measure.md#a-training-step-on-a-gpu) explains the parts.

There are two models, with as many blocks as are predicted to fit on one GPU: `coarse` has the widths of Mixtral 8x7B,
with a few large experts, and `fine` those of DeepSeek-V2-Lite, with many small ones.

```sh
profiling/gpu_day.sh                       # everything, in up to three calls of eight minutes, most valuable first
CALLS=1 profiling/gpu_day.sh --out FOLDER  # one call; the next one resumes it, if FOLDER still has the results
profiling/gpu_day.sh --toy                 # does everything run? Anywhere, in a minute
python profiling/gpu_page.py               # afterwards; --results FOLDER: from there
```
"""
_STEP_COLUMNS = ("tokens/s", "MFU", "step, ms", "predicted, ms", "peak, GB", "predicted, GB", "mJ/token")
_PASSES = ("forward", "dgrad", "wgrad")
_ON_STEPS = """
Tokens/s, MFU, step, peak and mJ/token are measured; MFU is relative to the measured rate of products. The columns
*predicted* have what the planner of that commit computed beforehand, by published rates."""
_ON_RACES = """
Times of the products of one layer's experts, to the hidden width and back, and their share of the measured rate of
products; *dgrad* is the gradient of the rows, *wgrad* that of the weights."""
_ON_KINDS = """
Times of the operations of one traced step. *Least* is a lower bound: operations at the measured rate of products, or
bytes at that of copies, whichever takes longer."""
_NONE = "\nNothing has been measured on a GPU so far: there is no result.\n"


def main() -> None:
    """Write the page."""
    parser = CommandParser(prog="python profiling/gpu_page.py", description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FOLDER", help="of bench_gpu.py's files (default: %(default)s)"
    )
    write_atomically(PAGE, page(read_results(parser.parse_args().results)))
    print(f"written: {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")


def read_results(folder: Path) -> dict[str, Any]:
    """Return the results by file name; toy runs do not count."""
    paths = sorted(folder.glob("bench_gpu_*.json"))
    return {path.name: json.loads(path.read_text()) for path in paths}


def page(results: Mapping[str, Any]) -> str:
    """Return the text of the page."""
    sections = [_HEAD, *("\n".join(_section(name, found)) + "\n" for name, found in results.items())]
    return "\n".join(sections) if results else _HEAD + _NONE


def _section(file: str, result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one device."""
    parts, made = result["parts"], result["provenance"]
    rates = parts.get("rates", {})
    yield f"## {rates.get('device', file)}"
    yield ""
    yield f"`profiling/results/{file}`: {made['date'][:10]}, commit {made['commit']}, jax {made['jax']}."
    if "memory_bytes_per_s" in rates:
        yield (
            f"Measured rates: {rates['matrix_flops_per_s'] / 1e12:.0f} TFLOP/s of bfloat16 products, "
            f"{rates['memory_bytes_per_s'] / 1e12:.2f} TB/s of copies."
        )
    if "notes" in result:
        yield from ("", result["notes"])
    yield ""
    yield _row("step", "blocks × sequences", *_STEP_COLUMNS)
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in MODEL_PARTS:
        if "tokens_per_s" in (found := parts.get(name, {})):
            yield _row(
                f"`{name}`",
                f"{found.get('blocks', '–')} × {found.get('sequences', '–')}",
                f"{found['tokens_per_s']:,.0f}",
                f"{found['mfu']:.1%}",
                f"{1e3 * found['step_s']['median']:.1f}",
                _number(found.get("predicted_step_s"), 1e3, 1),
                _number(found.get("peak_bytes"), 1e-9, 1),
                _number(found.get("predicted_bytes"), 1e-9, 1),
                _number(found.get("joules_per_token"), 1e3, 2),
            )
    yield from _ON_STEPS.splitlines()
    failed = {name: found["failed"] for name, found in parts.items() if "failed" in found}
    if late := [f"`{name}`" for name, reason in failed.items() if reason.startswith(NOT_BEGUN)]:
        yield from ("", f"Not measured, as there was no time left: {', '.join(late)}.")
    if others := [f"- `{name}`: {reason}" for name, reason in failed.items() if not reason.startswith(NOT_BEGUN)]:
        yield from ("", *others)
    if kernels := parts.get("kernels", {}).get("errors"):
        yield from ("", "| kernel against its slow reference | greatest relative error |", "|---|---|")
        for name, found in kernels.items():
            yield _row(f"`{name}`", greatest_error(found))
    if races := races_of(parts):
        yield from _ON_RACES.splitlines()
        for model, race in races.items():
            yield from _race(model, race, result.get("renamed", {}))
    if any("kinds" in parts.get(name, {}) for name in MODEL_PARTS):
        yield from _ON_KINDS.splitlines()
    for name in MODEL_PARTS:
        if kinds := parts.get(name, {}).get("kinds"):
            yield from ("", f"| operations of `{name}` | ms | least, ms |", "|---|---|---|")
            for kind, took in kinds.items():
                yield _row(kind, f"{1e3 * took['seconds']:.2f}", f"{1e3 * took['least_seconds']:.2f}")


def _race(model: str, race: Mapping[str, Any], renamed: Mapping[str, str]) -> Iterator[str]:
    """Yield a table of products, which have the names of today, and the products that did not run."""
    names = dict.fromkeys(label.partition(" ")[2] for label in race["seconds"])
    yield from ("", _row(f"grouped products of `{model}`", *_PASSES), "|---|---|---|---|")
    for name in names:
        labels = [f"{which} {name}" for which in _PASSES]
        cells = (
            f"{1e3 * race['seconds'][label]:.2f} ms, {race['share_of_rate'][label]:.0%}"
            if label in race["seconds"]
            else "–"
            for label in labels
        )
        yield _row(f"`{renamed.get(name, name)}`", *cells)
    left_out: dict[tuple[str, str], list[str]] = {}
    for label, reason in race["left_out"].items():
        which, _, name = label.partition(" ")
        left_out.setdefault((renamed.get(name, name), reason), []).append(which)
    for (name, reason), passes in left_out.items():
        yield from ("", f"`{name}` did not run ({', '.join(passes)}): `{reason}`.")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, factor: float, digits: int) -> str:
    return "–" if value is None else f"{value * factor:.{digits}f}"


if __name__ == "__main__":
    run_command(main)
