"""What a run may try while it trains: values of some settings that leave its state and its data as they are."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from moe_jax.config import Config
from moe_jax.config.validate import check_batch_split
from moe_jax.distributed.processes import from_process, is_main_process
from moe_jax.errors import ConfigError
from moe_jax.files.atomic import check_writable, reason
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.all_to_all import EXCHANGES, RAGGED
from moe_jax.parallel.mesh import batch_shards
from moe_jax.plan.bayes import Choice
from moe_jax.plan.tuned_file import Tuned, read_tuned, write_tuned
from moe_jax.schedule.grad_buckets import Bucket
from moe_jax.step.compile import config_at
from moe_jax.step.scheduled.build import reductions_of

_SECTIONS = {"bucket_cap_mb": "schedule", "microbatches": "schedule", "algorithm": "exchange"}
_CHUNKS = [2 ** (-i / 3) for i in range(19)]  # of the largest chunk: to a 64th, up to three for each halving
_MICROBATCHES = (1, 2, 4, 8)
_ITEM_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Choices:
    """The choices of a run whose config is one of them."""

    config: Config  # with the first one
    values: tuple[Choice, ...]  # of the settings of `tune.over`
    first: int
    best_s: float | None  # what a step took with the first one, if it was found by an earlier search
    file: Path  # of what was found
    key: dict[str, Any]  # under which it is there

    def config_of(self, number: int) -> Config:
        """With another choice."""
        return _changed(self.config, self.values[number])

    def settings(self, number: int) -> dict[str, float | str]:
        """A choice by the names of its settings."""
        return dict(zip(self.config.tune.over, self.values[number], strict=True))

    def told(self, number: int) -> str:
        """A choice in words."""
        return " ".join(f"{_SECTIONS[name]}.{name}={value}" for name, value in self.settings(number).items())

    def write(self, number: int, step_s: float) -> None:
        """Note the fastest choice. Raises ConfigError or OSError."""
        write_tuned(self.file, self.key, Tuned(self.settings(number), step_s))


def choices_of(config: Config, mesh: Mesh) -> Choices | None:
    """What `tune.over` leaves open, beginning with what was found before; None without any. Raises ConfigError."""
    over = config.tune.over
    if not over:
        return None
    file = Path(config.log.dir) / "tuned.json" if config.tune.cache is None else Path(config.tune.cache)
    key = _key(config, mesh)
    found = _agreed_found(config.tune.cache, file, key)
    given = tuple(_OWN[name](config, mesh) for name in over)
    own = given if found is None else _as_found(found, over, given, file)
    options = [_options(name, config, mesh, *values) for name, *values in zip(over, given, own, strict=True)]
    values = tuple(choice for choice in itertools.product(*options) if _works(config, mesh, choice))
    if found is not None and own not in values:
        raise ConfigError(
            f"what was tuned before, {file}, has {found.settings}, which do not work here: "
            "remove it, or set tune.cache to another file"
        )
    if len(values) < 2:
        raise ConfigError(f"tune.over=[{', '.join(over)}] leaves nothing to choose here: use tune.over=[]")
    return Choices(
        config=_changed(config, own),
        values=values,
        first=values.index(own),
        best_s=None if found is None else found.step_s,
        file=file,
        key=key,
    )


def config_of_first_step(config: Config, mesh: Mesh) -> Config:
    """What a new run on these devices begins with, but for a grouped product that it would time. Raises ConfigError."""
    choices = choices_of(config, mesh)
    return config_at(choices.config if choices else config, 1)


def _agreed_found(cache: str | None, file: Path, key: dict[str, Any]) -> Tuned | None:
    """What process 0 finds, which alone writes such files. Raises ConfigError."""
    found, problem = None, ""
    if is_main_process():
        try:
            found = _found(cache, file, key)
        except ConfigError as error:
            problem = str(error)
    problem, values = from_process(0, (problem, found and list(found)))
    if problem:
        raise ConfigError(problem)
    return values and Tuned(*values)


def _found(cache: str | None, file: Path, key: dict[str, Any]) -> Tuned | None:
    """Raises ConfigError also for a cache that could not be written at the end of a search; a run has its folder."""
    if cache is not None and is_main_process():
        try:
            check_writable(file)
        except OSError as error:
            raise ConfigError(f"tune.cache={cache} cannot be written ({reason(error)}): name another file") from None
    return read_tuned(file, key)


def _options(name: str, config: Config, mesh: Mesh, given: float | str, own: float | str) -> list[Any]:
    """Sorted. A number of one's own is an option, too."""
    return sorted({*_OPTIONS[name](config, mesh), given} | (set() if isinstance(own, str) else {own}))


def _as_found(found: Tuned, over: Sequence[str], own: Choice, file: Path) -> Choice:
    choice = tuple(found.settings.get(name, value) for name, value in zip(over, own, strict=True))
    if any(isinstance(new, str) != isinstance(old, str) for new, old in zip(choice, own, strict=True)):
        raise ConfigError(
            f"what was tuned before, {file}, has {found.settings}, which are no settings: "
            "remove it, or set tune.cache to another file"
        )
    return choice


def _changed(config: Config, choice: Choice) -> Config:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in zip(config.tune.over, choice, strict=True):
        sections.setdefault(_SECTIONS[name], {})[name] = value
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    )


def _works(config: Config, mesh: Mesh, choice: Choice) -> bool:
    try:
        changed = _changed(config, choice)
        check_batch_split(changed, batch_shards(mesh))
        computation = ComputeConfig.of(changed, mesh)
    except ConfigError:
        return False
    return "algorithm" not in config.tune.over or computation.exchange == changed.exchange.algorithm


def _key(config: Config, mesh: Mesh) -> dict[str, Any]:
    """All that the time of a step depends on, but for what is tuned."""
    plain = dataclasses.asdict(config)
    for name in config.tune.over:
        del plain[_SECTIONS[name]][name]
    own = ("batch_size", "grad_accumulation", "compute_dtype", "grouped_product")
    train = {name: plain["train"][name] for name in own}
    return {name: plain[name] for name in ("model", "schedule", "exchange")} | {
        "over": list(config.tune.over),
        "train": train | {"seq_len": config.data.seq_len, "zero": config.optimizer.zero},
        "mesh": {str(axis): size for axis, size in mesh.shape.items()},
        "expert_axes": list(config.mesh.expert_axes),
        "devices": f"{mesh.size} × {mesh.devices.flat[0].device_kind}, {jax.process_count()} process(es)",
        "jax": jax.__version__,
    }


def _largest_mb(config: Config, mesh: Mesh) -> float:
    """Of what is summed at once when nothing is cut: of a block, or of embedding and head if blocks share nothing."""
    sizes = [
        max((chunk.stop - chunk.start for chunk in owner.chunks), default=0)
        for owner in reductions_of(config, mesh, None)
    ]
    largest = max(sizes[1:-1]) or max(sizes)
    if not largest:
        raise ConfigError("tune.over has bucket_cap_mb, and no gradients are summed over one device: leave it out")
    return largest * _ITEM_BYTES / 1e6


def _chunk_sizes(config: Config, mesh: Mesh) -> list[float]:
    """Three digits, rounded up: the largest one must not be cut in two. Of sizes that cut alike the smallest one."""
    largest = _largest_mb(config, mesh)
    sizes = [float(f"{1.005 * share * largest:.3g}") for share in _CHUNKS]
    return list({_cuts(config, mesh, size): size for size in sizes}.values())


def _cuts(config: Config, mesh: Mesh, bucket_cap_mb: float) -> tuple[tuple[Bucket, ...], ...]:
    return tuple(owner.chunks for owner in reductions_of(config, mesh, bucket_cap_mb))


def _algorithms(config: Config, mesh: Mesh) -> list[str]:
    """Those that are something of their own on these devices."""
    if config.mesh.expert_ranks(mesh.shape) == 1:
        return []
    cpu = ComputeConfig.of(config, mesh).platform == "cpu"
    return [*EXCHANGES, *([] if cpu else RAGGED)]  # CPUs have no ragged collective


_OPTIONS: dict[str, Callable[[Config, Mesh], Any]] = {
    "bucket_cap_mb": _chunk_sizes,
    "microbatches": lambda config, mesh: _MICROBATCHES,
    "algorithm": _algorithms,
}
_OWN: dict[str, Callable[[Config, Mesh], Any]] = {
    "bucket_cap_mb": lambda config, mesh: config.schedule.bucket_cap_mb or _chunk_sizes(config, mesh)[0],
    "microbatches": lambda config, mesh: config.schedule.microbatches,
    "algorithm": lambda config, mesh: ComputeConfig.of(config, mesh).exchange,
}
