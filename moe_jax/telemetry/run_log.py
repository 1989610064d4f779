"""Log of a run: metrics.jsonl, TensorBoard and Weights & Biases scalars, and a progress line. Imports no jax."""

import difflib
import itertools
import json
import math
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self, final

from moe_jax.errors import UserError
from moe_jax.files.atomic import AppendOnlyFile, write_pieces_atomically
from moe_jax.files.untrusted import open_bytes
from moe_jax.paths import shown
from moe_jax.telemetry.record_schema import RecordError, TruncatedError, load_shapes, read_record
from moe_jax.telemetry.tensorboard import Scalars
from moe_jax.telemetry.wandb import WandbRun

FILE_NAME = "metrics.jsonl"
_MAX_BYTES = 2**32  # of a metrics.jsonl whose records are all in memory at once
_MAX_LINE = 2**26  # bytes


class MetricsError(UserError):
    """The records of a run folder are missing or damaged, or cannot be written."""


@final
class RunLog:
    """Context manager that writes the records of one run. Entering it deletes those after `start_step`.

    Every record also gets `tokens`, the number of tokens trained on so far. A quiet log (of processes other than 0)
    does nothing. Raises MetricsError if the folder cannot be created or its earlier records are damaged.
    """

    def __init__(
        self,
        folder: Path,
        start_step: int,
        total_steps: int,
        tokens_per_step: int,
        tensorboard: bool,
        quiet: bool,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        self._start_step = start_step
        self._total_steps = total_steps
        self._tokens_per_step = tokens_per_step
        self._tensorboard = tensorboard
        self._quiet = quiet
        self._recent: deque[tuple[int, float]] = deque(maxlen=10)  # steps of a record, and their mean time
        self._shown_step = start_step
        self._closing = ExitStack()
        self._file: AppendOnlyFile | None = None
        self._scalars: Scalars | None = None
        self._wandb = WandbRun(wandb_project, folder, config or {}, self.warn) if wandb_project else None
        self._line_is_open = False

    def __enter__(self) -> Self:
        if self._quiet:
            return self
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MetricsError(
                f"log.dir={self._folder} cannot be created ({error.strerror}): name a folder that can be written"
            ) from None
        with ExitStack() as closing:  # closes what is open if another file cannot be opened
            if self._wandb is not None:
                closing.enter_context(self._wandb)
            _delete_after(self._folder / FILE_NAME, self._start_step)
            self._file = closing.enter_context(AppendOnlyFile(self._folder / FILE_NAME))
            if self._tensorboard:
                scalars = Scalars(self._folder / "tensorboard", self._start_step)
                self._scalars = closing.enter_context(scalars)
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)
        for file in self._files():
            if file.pending_bytes:
                self.warn(f"{file.path} lacks its last {file.pending_bytes} bytes, which could not be written")
        if self._line_is_open:
            print(flush=True)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; those of training (`step, loss, step_s, …`) and validation (`validation_loss`) are printed.

        Training records of untimed steps have no `step_s`. Values are numbers, including NaN and infinities. Lists of
        numbers and strings are only written to metrics.jsonl.
        """
        if self._file is None:
            return
        step = record["step"]
        self._append(record)
        scalars = _scalars_of(record)
        if self._scalars is not None and scalars:
            self._scalars.write(step, scalars)
        self._report_write_errors(step)
        if self._wandb is not None:
            self._wandb.write(step, scalars)
        if "validation_loss" in record:
            loss = record["validation_loss"]
            bits = loss / math.log(2)
            text = f"step {step} validation loss {loss:.3f} nats per token ({bits:.3f} bits)"
            prefix = "validation_loss/"
            parts = [f"{key.removeprefix(prefix)} {record[key]:.3f}" for key in record if key.startswith(prefix)]
            self._print(f"{text}: {', '.join(parts)}" if parts else text, in_place=False)
        if "loss" in record:
            self._show_progress(record, step)

    def alarm(self, step: int, text: str, **numbers: float) -> None:
        """Record a problem, for reports, and print it as a warning."""
        self.write({"step": step, "alarm": text, **numbers})
        self.warn(text)

    def info(self, text: str) -> None:
        """Print a line without recording it."""
        if self._file is not None:
            self._print(text, in_place=False)

    def warn(self, text: str) -> None:
        """Print a warning without recording it."""
        self.info(f"warning: {text}")

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(_to_json({**record, "tokens": record["step"] * self._tokens_per_step}))

    def _report_write_errors(self, step: int) -> None:
        """Record and print each new problem with writing the files, once."""
        for text in [text for file in self._files() for text in file.take_messages()]:
            self._append({"step": step, "alarm": text})
            self.warn(text)

    def _files(self) -> list[AppendOnlyFile]:
        return [file for file in (self._file, self._scalars and self._scalars.file) if file is not None]

    def _show_progress(self, record: Mapping[str, Any], step: int) -> None:
        steps, self._shown_step = max(step - self._shown_step, 1), step
        if "step_s" in record:
            self._recent.append((steps, record["step_s"]))
        step_s = None
        if self._recent:
            counts, seconds = zip(*self._recent, strict=True)
            step_s = fmean(seconds, counts)
        eta_s = None if step_s is None else (self._total_steps - step) * step_s
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns - 1 if terminal else None
        self._print(format_line(record, self._total_steps, eta_s, width), in_place=terminal)

    def _print(self, text: str, in_place: bool) -> None:
        """Print a line. If printed in place, the next line in place overwrites it; other lines follow it."""
        start = "" if not self._line_is_open else "\r\x1b[2K" if in_place else "\n"
        print(start + shown(text), end="" if in_place else "\n", flush=True)
        self._line_is_open = in_place


def insert_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Add a record of a run that does not train now after those of its step and of earlier ones.

    Raises MetricsError for damaged records, and OSError if the file cannot be written.
    """
    path, step = folder / FILE_NAME, record["step"]

    def lines() -> Iterator[bytes]:
        if path.exists():
            yield from (line for line, each in _records(path) if each["step"] <= step)
        yield _to_json(record).encode() + b"\n"
        if path.exists():
            yield from (line for line, each in _records(path) if each["step"] > step)

    write_pieces_atomically(path, lines())


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, oldest first; a truncated last line, as a killed process leaves it, is ignored.

    Raises MetricsError if the run does not exist or a record is damaged.
    """
    path = folder / FILE_NAME
    if not folder.exists():
        runs = [p.parent.name for p in folder.parent.glob(f"*/{FILE_NAME}")]
        near = difflib.get_close_matches(folder.name, runs, n=1)
        cure = f"did you mean {folder.parent / near[0]}?" if near else "give the folder that a run has as log.dir"
        raise MetricsError(f"run {folder} does not exist: {cure}")
    if not path.is_file():
        raise MetricsError(f"{folder} is not a run (no {FILE_NAME} in it): give the folder that a run has as log.dir")
    if path.stat().st_size > _MAX_BYTES:
        raise MetricsError(f"{path} has more than {_MAX_BYTES:,} bytes: read a copy of the run without its first lines")
    return [record for _, record in _records(path)]


class RecordedSteps(NamedTuple):
    """The steps that a run's records tell of."""

    last: int  # the last training step, 0 if there is none
    validated: frozenset[int]  # the steps with a validation loss


def recorded_steps(folder: Path) -> RecordedSteps:
    """Read the steps of a run's records, one record at a time. Raises MetricsError if a record is damaged."""
    last, validated, path = 0, set[int](), folder / FILE_NAME
    for _, record in _records(path) if path.exists() else ():
        if "loss" in record:
            last = max(last, record["step"])
        if "validation_loss" in record:
            validated.add(record["step"])
    return RecordedSteps(last, frozenset(validated))


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line, with its line break, and its record; a truncated last line is left out. Raises MetricsError."""
    shapes: dict[str, tuple[int, ...]] = {}  # of lists, from the first record that has them
    error: MetricsError | None = None  # of the line before, which may be the last
    with open_bytes(path) as file:
        for number in itertools.count(1):
            if not (line := file.readline(_MAX_LINE)):
                return
            if error:
                raise error
            try:
                if len(line) == _MAX_LINE:
                    raise RecordError(f"it has more than {_MAX_LINE:,} bytes")
                record = read_record(line.decode(errors="replace").strip("\r\n"))
                found = load_shapes(record)
                if wrong := [key for key in found if shapes.setdefault(key, found[key]) != found[key]]:
                    raise RecordError(
                        f"its {wrong[0]} has {_sizes(found[wrong[0]])} numbers, and {_sizes(shapes[wrong[0]])} before"
                    )
            except RecordError as problem:
                error = MetricsError(f"{path} line {number} is not a record of metrics ({problem}): delete the line")
                if not isinstance(problem, TruncatedError):
                    raise error from None
            else:
                yield line.rstrip(b"\r\n") + b"\n", record


def _sizes(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def format_line(record: Mapping[str, Any], total_steps: int, eta_s: float | None, width: int | None = None) -> str:
    """The progress line of a training record; missing values, and those that exceed `width` columns, are omitted."""
    shown = [
        ("loss", lambda v: f"loss {v:.3f}"),
        ("mtp_loss", lambda v: f"mtp {v:.3f}"),
        ("max_attention_logit", lambda v: f"max logit {v:.1f}"),
        ("tokens_per_s", lambda v: f"{human_count(v)} tok/s"),
        ("step_s", lambda v: f"{human_seconds(v)}/step"),
        ("mfu", lambda v: f"MFU {v:.1%}"),
        ("dropped_fraction", lambda v: "dropped <0.1%" if 0 < v < 0.0005 else f"dropped {v:.1%}"),
        ("load_max_over_mean", lambda v: f"load max/mean {v:.2f}"),
    ]
    parts = [f"step {record['step']:>{len(str(total_steps))}}/{total_steps}"]
    parts += [text(record[key]) for key, text in shown if key in record]
    parts.append(f"ETA {'unknown' if eta_s is None else _clock(eta_s)}")
    while width is not None and len("  ".join(parts)) > width and len(parts) > 2:
        del parts[-2]  # the ETA stays
    return "  ".join(parts)


def human_count(number: float) -> str:
    """Three digits and a unit: 950, 41.2k, 1.23M, 4.00B."""
    if number < 999.5 and number == round(number):
        return f"{number:.0f}"
    for unit in ("", "k", "M", "B"):
        if number < 999.5:
            return _three_digits(number) + unit
        number /= 1000
    return _three_digits(number) + "T"


def human_seconds(seconds: float) -> str:
    """Three digits and a unit: 85.0 µs, 312 ms, 1.23 s."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds)} s" if seconds < 999.5 else f"{seconds:.0f} s"


def _three_digits(number: float) -> str:
    return f"{number:#.3g}".rstrip(".")


def _clock(seconds: float) -> str:
    """A duration in two units: 5s, 1m05s, 2h03m, 1d04h."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{h}h{m:02d}m"
    return f"{m}m{s:02d}s" if minutes else f"{s}s"


def _delete_after(path: Path, step: int) -> None:
    """Delete the records after `step` from a file; all of them if `step` is 0, the start of a new run."""
    if path.exists():
        remaining = (line for line, record in _records(path) if record["step"] <= step) if step else ()
        write_pieces_atomically(path, remaining)


def _scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The values of a record that TensorBoard and wandb accept: finite numbers."""
    return {
        key: value
        for key, value in record.items()
        if key != "step" and not isinstance(value, list | str) and math.isfinite(value)
    }


def _to_json(record: Mapping[str, Any]) -> str:
    # JSON has no NaN and no infinities: they become null, and `not_finite` has the value as text
    not_finite = {key: str(v) for key, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    values = {key: None if key in not_finite else _finite_or_null(v) for key, v in record.items()}
    return json.dumps(values | ({"not_finite": not_finite} if not_finite else {}), allow_nan=False)


def _finite_or_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_or_null(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
