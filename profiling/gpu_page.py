"""Write docs/gpu.md from the results of bench_gpu.py: python profiling/gpu_page.py"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench_gpu import MODEL_PARTS, greatest_error, races_of
from results_file import RESULTS

from moe_jax.errors import CommandParser, run_command
from moe_jax.files.atomic import write_atomically

PAGE = RESULTS.parents[1] / "docs" / "gpu.md"
_HEAD = """# On a GPU

What was measured on GPUs, and how to measure the rest. `profiling/gpu_page.py` writes this page from
`profiling/results/bench_gpu_*.json`; [measure.md](measure.md#a-training-step-on-a-gpu) explains the parts.

```sh
profiling/gpu_day.sh                       # everything, in up to three calls of eight minutes, most valuable first
CALLS=1 profiling/gpu_day.sh --out FOLDER  # one call; the next one resumes it, if FOLDER still has the results
profiling/gpu_day.sh --toy                 # does everything run? Anywhere, in a minute
python profiling/gpu_page.py               # afterwards; --results FOLDER: from there
```
"""
_STEP_COLUMNS = ("tokens/s", "MFU", "step, ms", "predicted, ms", "peak, GB", "predicted, GB", "mJ/token")
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
    if "notes" in result:
        yield result["notes"]
    if "memory_bytes_per_s" in rates:
        yield (
            f"Measured rates: {rates['matrix_flops_per_s'] / 1e12:.0f} TFLOP/s of bfloat16 products, "
            f"{rates['memory_bytes_per_s'] / 1e12:.2f} TB/s of copies."
        )
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
    failed = {name: found["failed"] for name, found in parts.items() if "failed" in found}
    yield from ("", *(f"- `{name}`: {reason}" for name, reason in failed.items())) if failed else ()
    if kernels := parts.get("kernels", {}).get("errors"):
        yield from ("", "| kernel against its slow reference | greatest relative error |", "|---|---|")
        for name, found in kernels.items():
            yield _row(f"`{name}`", greatest_error(found))
    if races := races_of(parts):
        yield from (
            "",
            "| grouped products of experts | ms, to the hidden width and back | of the measured rate |",
            "|---|---|---|",
        )
        for model, race in races.items():
            for name, seconds in race["seconds"].items():
                share = f"{race['share_of_rate'][name]:.0%}"
                yield _row(f"`{model}`: {_product(name, result)}", f"{1e3 * seconds:.2f}", share)
            for name, reason in race["left_out"].items():
                yield _row(f"`{model}`: {_product(name, result)}", f"left out: {reason}", "–")
    for name in MODEL_PARTS:
        if kinds := parts.get(name, {}).get("kinds"):
            yield from ("", f"| operations of `{name}` | ms | least ms |", "|---|---|---|")
            for kind, took in kinds.items():
                yield _row(kind, f"{1e3 * took['seconds']:.2f}", f"{1e3 * took['least_seconds']:.2f}")


def _product(label: str, result: Mapping[str, Any]) -> str:
    """Return a pass and its product by the name that it has today."""
    own, _, name = label.partition(" ")
    return f"{own}, `{result.get('renamed', {}).get(name, name)}`"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, factor: float, digits: int) -> str:
    return "–" if value is None else f"{value * factor:.{digits}f}"


if __name__ == "__main__":
    run_command(main)
