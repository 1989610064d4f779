"""How fast is a training step on a GPU? python profiling/bench_gpu.py [--toy] [--only PARTS] [--out FOLDER] [--resume]

Measures the rates of matrix products and copies first. Then it compares every kernel with its slow reference
(`kernels`), and times the grouped products of experts against each other (`races`). Then it measures a model of coarse
experts (Mixtral's widths) and one of fine-grained experts (DeepSeek-V2-Lite's), with as many blocks as fill the device:
our step without a capacity, the same model in transformers, and our step with capacity factor 1.25. Each part runs in
its own process with its own time limit, all of them in --minutes. A part that fails is reported in one line, and the
other parts still run.

Reports tokens/s, MFU by the measured rate, energy, peak memory, predicted time and memory, and the time of each kind of
operation next to its lower bound. Writes results/bench_gpu_DEVICE.json after each part, and traces into the same
folder. With --resume, parts that the file of this device and commit has are not measured again: profiling/gpu_day.sh
measures everything in several such calls. Needs neither grain nor matplotlib. With --toy, or on a machine without a
GPU, it runs tiny models and writes bench_gpu.quick.json.
"""

import json
import operator
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_models import MODELS, TOYS, config_of, filling, unrolled, with_capacity
from parts import Values, run_part
from results_file import RESULTS

from moe_jax.config import Config
from moe_jax.config.ranges import Range, check_number
from moe_jax.convert.families import family_that_holds
from moe_jax.errors import CommandParser, ConfigError, run_command
from moe_jax.files.atomic import write_atomically
from moe_jax.measure.provenance import origin
from moe_jax.plan.resources import train_flops_per_token

MODEL_PARTS = {  # model, and what computes it; in this order, since time may run out before the last
    "coarse": ("coarse", "dropless"),
    "coarse-transformers": ("coarse", "transformers"),
    "fine": ("fine", "dropless"),
    "fine-transformers": ("fine", "transformers"),
    "coarse-capacity": ("coarse", "capacity"),
    "fine-capacity": ("fine", "capacity"),
}
PARTS = ("kernels", "races", *MODEL_PARTS, "tiles")
_FACTORS = {"dropless": None, "capacity": 1.25}
_MINUTES, _LEAST_S = 9.0, 40.0  # time limit of all parts; least remaining time to start another part
NOT_BEGUN = "not begun"
_RATES_S, _PART_S = 75.0, 125.0  # time limits of the rates and of each other part
_CLOCK_S, _TOY_CLOCK_S = 6.0, 0.1  # duration of the timed steps of a part
_UNFINISHED = 75  # exit code if there was no time for some parts: call again with --resume (EX_TEMPFAIL)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",  # by default, jax leaves a quarter of the memory unused
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


class Bench:
    """A run of all parts, and the results so far."""

    def __init__(self, folder: Path, toy: bool, minutes: float = _MINUTES, resume: bool = False):
        self._end, self._folder, self._toy = time.monotonic() + 60 * minutes, folder, toy
        self._origin, self._resume = origin(), resume
        self.parts: dict[str, Values] = {}

    def run(self, wanted: Sequence[str]) -> bool:
        """Measure the rates, then run the parts in `wanted`. Return whether there was time for all of them."""
        rates = self._part("rates", "gpu_rates", {}, _RATES_S)
        for name in wanted:
            if not self._has(name):
                self._run(name, rates)
        return all(map(self._has, wanted))

    def _has(self, name: str) -> bool:
        """Return whether a part ran, in this call or an earlier one, successfully or not."""
        return name in self.parts and not self.parts[name].get("failed", "").startswith(NOT_BEGUN)

    def _run(self, name: str, rates: Values) -> None:
        if name == "kernels":
            self._part(name, "gpu_kernels", {"toy": self._is_toy}, _PART_S)
        elif name in ("races", "tiles"):
            configs = {model: self._config(model, rates) for model in MODELS}
            fitting = {model: config for model, config in configs.items() if config is not None}
            self._part(name, f"gpu_{name}", {"configs": fitting, "rates": rates}, _PART_S)
        else:
            model, how = MODEL_PARTS[name]
            config = self._config(model, rates)
            if config is None:
                self._put(name, {"failed": "the rates are not known, or not one block fits in the memory"})
            elif how == "transformers":
                limited = self._timed(rates) | {"limit_s": _PART_S}
                self._part(name, "gpu_transformers", limited | _in_transformers(config), _PART_S)
            else:
                trace = self.path.with_name(f"{self.path.stem}_{name}.trace.json.gz")
                own = with_capacity(config, _FACTORS[how])
                self._part(name, "gpu_step", self._timed(rates) | {"config": own, "trace": trace}, _PART_S)

    @property
    def path(self) -> Path:
        """Return the path of the results file."""
        device = self.parts["rates"].get("device", "")
        name = ".quick" if self._is_toy else "_" + re.sub(r"\W+", "_", device.lower())
        return self._folder / f"bench_gpu{name}.json"

    @property
    def _is_toy(self) -> bool:
        return self._toy or self.parts["rates"].get("platform", "cpu") == "cpu"

    def _config(self, model: str, rates: Values) -> Config | None:
        if "memory_bytes_per_s" not in rates:
            return None
        return (
            unrolled(config_of(TOYS[model], 2, 32)) if self._is_toy else filling(MODELS[model], rates["memory_bytes"])
        )

    def _timed(self, rates: Values) -> Values:
        return {"rates": rates, "clock_s": _TOY_CLOCK_S if self._is_toy else _CLOCK_S}

    def _part(self, name: str, module: str, arguments: Values, limit_s: float) -> Values:
        left_s = self._end - time.monotonic()
        if left_s < _LEAST_S:
            self._put(name, {"failed": f"{NOT_BEGUN}, {max(left_s, 0):.0f} s before the end"})
        else:
            run_part(module, arguments, min(limit_s, left_s), lambda found: self._put(name, found))
        print(_line(name, self.parts[name]), flush=True)
        return self.parts[name]

    def _put(self, name: str, found: Values) -> None:
        self.parts[name] = found
        if self._resume and "device" in found:  # of the rates, the first part: now the name of the file is known
            self._resume = False
            self.parts = self._earlier() | self.parts
        write_atomically(self.path, json.dumps({"parts": self.parts, "provenance": self._origin}, indent=2) + "\n")

    def _earlier(self) -> dict[str, Values]:
        """Return the parts of the results file, if they were measured at this commit and with these versions."""
        if not self.path.exists():
            return {}
        found = json.loads(self.path.read_text())
        same = all(found["provenance"][key] == self._origin[key] for key in ("commit", "jax", "jaxlib", "python"))
        return dict(found["parts"]) if same else {}


def main() -> None:
    """Run all parts and write results/bench_gpu_DEVICE.json."""
    parser = CommandParser(prog="python profiling/bench_gpu.py", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="tiny models: whether everything runs, in a minute")
    parser.add_argument("--only", metavar="A,B", default=",".join(PARTS), help="of %(default)s (default: all)")
    parser.add_argument("--resume", action="store_true", help="leave out what an earlier call has measured")
    parser.add_argument(
        "--minutes", type=float, default=_MINUTES, metavar="N", help="time limit of this call (default: %(default)g)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results and traces (default: %(default)s)")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if unknown := [name for name in wanted if name not in PARTS]:
        raise ConfigError(f"--only={unknown[0]} is unknown: choose of {', '.join(PARTS)}")
    check_number("--minutes", arguments.minutes, Range(1, 60))
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as programs:
        # results of the GPU compiler's autotuning are shared between parts
        for variable, value in (_ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": programs}).items():
            os.environ.setdefault(variable, value)
        os.environ[_VISIBLE] = os.environ.get(_VISIBLE, "0").partition(",")[0]  # use one device only
        bench = Bench(arguments.out, arguments.toy, arguments.minutes, arguments.resume)
        is_complete = bench.run(wanted)
    print(table(bench.parts))
    print(f"written: {bench.path}")
    if not is_complete:
        sys.exit(_UNFINISHED)


def _in_transformers(config: Config) -> Values:
    """Return the model's settings as arguments for transformers."""
    family = family_that_holds(config.model)
    return {
        "settings": {"model_type": family.model_type, **family.settings(config.model)},
        "sequences": config.train.batch_size,
        "seq_len": config.data.seq_len,
        "flops_per_token": train_flops_per_token(config.model, config.data.seq_len),
    }


def table(parts: dict[str, Values]) -> str:
    """Format a table of all parts, and one of each kind of operation for the parts that were traced."""
    rows = [f"{'part':<22}{'tokens/s':>12}{'MFU':>8}{'step ms':>10}{'peak GB':>9}"]
    for name, found in parts.items():
        if "tokens_per_s" in found:
            peak = f"{found['peak_bytes'] / 1e9:.1f}" if found["peak_bytes"] else "-"
            step_ms, mfu = 1e3 * found["step_s"]["median"], f"{found['mfu']:.1%}"
            rows.append(f"{name:<22}{found['tokens_per_s']:>12,.0f}{mfu:>8}{step_ms:>10.1f}{peak:>9}")
    if errors := parts.get("kernels", {}).get("errors"):
        rows += ["", f"{'kernel':<34}{'greatest relative error':>24}"]
        for name, found in errors.items():
            rows.append(f"  {name:<32}{greatest_error(found):>24}")
    for model, race in races_of(parts).items():
        rows += ["", f"grouped products, {model:<8}{'ms':>10}{'of the rate':>13}"]
        for name, seconds in sorted(race["seconds"].items(), key=operator.itemgetter(1)):
            rows.append(f"  {name:<24}{1e3 * seconds:>10.2f}{race['share_of_rate'][name]:>13.0%}")
    for name, found in parts.items():
        if kinds := found.get("kinds"):
            rows += ["", f"{name:<26}{'ms':>10}{'least ms':>10}{'least / ms':>12}"]
            for kind, took in kinds.items():
                seconds, least = took["seconds"], took["least_seconds"]
                share = f"{least / seconds:.0%}" if seconds else "-"
                rows.append(f"  {kind:<24}{1e3 * seconds:>10.2f}{1e3 * least:>10.2f}{share:>12}")
    return "\n".join(rows)


def greatest_error(kernel: Values) -> str:
    """Return the greatest relative error of a kernel, or why it has none."""
    return kernel.get("failed") or f"{max(kernel.values()):.1e}"


def races_of(parts: Mapping[str, Values]) -> dict[str, Values]:
    """Return the times of grouped products, by model."""
    return {model: race for model, race in parts.get("races", {}).items() if model in MODELS}


def _line(name: str, found: Values) -> str:
    text: Any = found.get("failed") or found.get("skipped")
    if text is None:
        shown = ("device", "tokens_per_s", "mfu", "matrix_flops_per_s", "memory_bytes_per_s", "kernels", "wrong")
        text = ", ".join(f"{key} {found[key]}" for key in shown if key in found)
    return f"{name}: {text} ({found.get('wall_s', 0)} s)"


if __name__ == "__main__":
    run_command(main)
