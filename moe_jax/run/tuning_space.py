"""The search space of tuning: values of some settings that do not affect a run's state and data."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from moe_jax.config import Config
from moe_jax.config.ranges import BUCKET
from moe_jax.config.validate import check_batch_split
from moe_jax.distributed.processes import from_process, is_main_process
from moe_jax.errors import ConfigError
from moe_jax.files.atomic import check_writable, reason
from moe_jax.files.local_copy import local_path
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.all_to_all import EXCHANGES, RAGGED
from moe_jax.parallel.mesh import batch_shards
from moe_jax.plan.tuner import Choice, Tuned, read_tuned, write_tuned
from moe_jax.schedule.grad_buckets import Bucket
from moe_jax.step.compile import config_at
from moe_jax.step.scheduled.build import reductions_of

_SECTIONS = {"bucket_cap_mb": "schedule", "microbatches": "schedule", "algorithm": "exchange"}
_BUCKET_SHARES = [2 ** (-i / 3) for i in range(19)]  # of the largest bucket: down to 1/64, three for each halving
_MICROBATCHES = (1, 2, 4, 8)
_ITEM_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Choices:
    """The choices that a run may try: combinations of values of the settings in `tune.over`."""

    config: Config  # with the first choice
    values: tuple[Choice, ...]  # of the settings of `tune.over`, for each choice
    first: int  # the number of the choice that the run begins with
    best_s: float | None  # step time of the first choice, if an earlier search found it
    file: Path  # in which the result of a search is stored
    key: dict[str, Any]  # of the result in this file

    def config_of(self, number: int) -> Config:
        """The config with another choice."""
        return _changed(self.config, self.values[number])

    def settings(self, number: int) -> dict[str, float | str]:
        """The values of a choice, by the names of the settings."""
        return dict(zip(self.config.tune.over, self.values[number], strict=True))

    def describe(self, number: int) -> str:
        """A choice as text."""
        return " ".join(f"{_SECTIONS[name]}.{name}={value}" for name, value in self.settings(number).items())

    def write(self, number: int, step_s: float) -> None:
        """Store the fastest choice in `file`. Raises ConfigError or OSError."""
        write_tuned(self.file, self.key, Tuned(self.settings(number), step_s))


def choices_of(config: Config, mesh: Mesh) -> Choices | None:
    """The choices of `tune.over`, beginning with the result of an earlier search; None if there is nothing to tune.

    Raises ConfigError.
    """
    over = config.tune.over
    if not over:
        return None
    file = local_path(config.log.dir) / "tuned.json" if config.tune.cache is None else Path(config.tune.cache)
    key = _key(config, mesh)
    found = _agreed_found(config.tune.cache, file, key)
    configured = tuple(_CONFIGURED[name](config, mesh) for name in over)
    first = configured if found is None else _found_choice(found, over, configured, file)
    options = [_options(name, config, mesh, *values) for name, *values in zip(over, configured, first, strict=True)]
    values = tuple(choice for choice in itertools.product(*options) if _is_valid(config, mesh, choice))
    if found is not None and first not in values:
        raise ConfigError(
            f"what was tuned before, {file}, has {found.settings}, which do not work here: "
            "remove it, or set tune.cache to another file"
        )
    if len(values) < 2:
        raise ConfigError(f"tune.over=[{', '.join(over)}] leaves nothing to choose here: use tune.over=[]")
    return Choices(
        config=_changed(config, first),
        values=values,
        first=values.index(first),
        best_s=None if found is None else found.step_s,
        file=file,
        key=key,
    )


def config_of_first_step(config: Config, mesh: Mesh) -> Config:
    """The config of a new run's first step on these devices, without timing grouped products. Raises ConfigError."""
    choices = choices_of(config, mesh)
    return config_at(choices.config if choices else config, 1)


def _agreed_found(cache: str | None, file: Path, key: dict[str, Any]) -> Tuned | None:
    """The stored result of an earlier search, as read by process 0, which alone writes it. Raises ConfigError."""
    found, problem = None, ""
    if is_main_process():
        try:
            found = _read_found(cache, file, key)
        except ConfigError as error:
            problem = str(error)
    problem, values = from_process(0, (problem, found and list(found)))
    if problem:
        raise ConfigError(problem)
    return values and Tuned(*values)


def _read_found(cache: str | None, file: Path, key: dict[str, Any]) -> Tuned | None:
    """Read the stored result of an earlier search. Raises ConfigError.

    It is also raised if `tune.cache` could not be written at the end of a search. (The run's own folder is checked
    elsewhere.)
    """
    if cache is not None and is_main_process():
        try:
            check_writable(file)
        except OSError as error:
            raise ConfigError(f"tune.cache={cache} cannot be written ({reason(error)}): name another file") from None
    return read_tuned(file, key)


def _options(name: str, config: Config, mesh: Mesh, configured: float | str, first: float | str) -> list[Any]:
    """The values to try for a setting, sorted; they include the configured one and a number found earlier."""
    return sorted({*_OPTIONS[name](config, mesh), configured} | (set() if isinstance(first, str) else {first}))


def _found_choice(found: Tuned, over: Sequence[str], configured: Choice, file: Path) -> Choice:
    """The choice that an earlier search found. Raises ConfigError if its values have other types than settings."""
    choice = tuple(found.settings.get(name, value) for name, value in zip(over, configured, strict=True))
    if any(isinstance(new, str) != isinstance(old, str) for new, old in zip(choice, configured, strict=True)):
        raise ConfigError(
            f"what was tuned before, {file}, has {found.settings}, which are no settings: "
            "remove it, or set tune.cache to another file"
        )
    return choice


def _changed(config: Config, choice: Choice) -> Config:
    """The config with the values of a choice."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in zip(config.tune.over, choice, strict=True):
        sections.setdefault(_SECTIONS[name], {})[name] = value
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    )


def _is_valid(config: Config, mesh: Mesh, choice: Choice) -> bool:
    """Whether a choice is a valid config on this mesh, with the exchange that it names."""
    try:
        changed = _changed(config, choice)
        check_batch_split(changed, batch_shards(mesh))
        compute = ComputeConfig.of(changed, mesh)
    except ConfigError:
        return False
    return "algorithm" not in config.tune.over or compute.exchange == changed.exchange.algorithm


def _key(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Everything that the step time depends on, except the settings that are tuned."""
    plain = dataclasses.asdict(config)
    for name in config.tune.over:
        del plain[_SECTIONS[name]][name]
    relevant = ("batch_size", "grad_accumulation", "compute_dtype", "grouped_product")
    train = {name: plain["train"][name] for name in relevant}
    return {name: plain[name] for name in ("model", "schedule", "exchange")} | {
        "over": list(config.tune.over),
        "train": train | {"seq_len": config.data.seq_len, "zero": config.optimizer.zero},
        "mesh": {str(axis): size for axis, size in mesh.shape.items()},
        "expert_axes": list(config.mesh.expert_axes),
        "devices": f"{mesh.size} × {mesh.devices.flat[0].device_kind}, {jax.process_count()} process(es)",
        "jax": jax.__version__,
    }


def _largest_mb(config: Config, mesh: Mesh) -> float:
    """The size in MB of the largest bucket if gradients are not split: that of a block.

    If no gradients of blocks are reduced, it is that of the embedding or head. Raises ConfigError if none are reduced.
    """
    sizes = [
        max((bucket.stop - bucket.start for bucket in owner.buckets), default=0)
        for owner in reductions_of(config, mesh, None)
    ]
    largest = max(sizes[1:-1]) or max(sizes)
    if not largest:
        raise ConfigError("tune.over has bucket_cap_mb, and no gradients are summed over one device: leave it out")
    return largest * _ITEM_BYTES / 1e6


def _bucket_caps(config: Config, mesh: Mesh) -> list[float]:
    """Values of `schedule.bucket_cap_mb`: the smallest of those that give the same buckets.

    They have three digits, rounded up so that the first value does not split the largest bucket.
    """
    largest = _largest_mb(config, mesh)
    sizes = [max(BUCKET.least, float(f"{1.005 * share * largest:.3g}")) for share in _BUCKET_SHARES]
    return list({_buckets(config, mesh, size): size for size in sizes}.values())


def _buckets(config: Config, mesh: Mesh, bucket_cap_mb: float) -> tuple[tuple[Bucket, ...], ...]:
    return tuple(owner.buckets for owner in reductions_of(config, mesh, bucket_cap_mb))


def _algorithms(config: Config, mesh: Mesh) -> list[str]:
    """The exchanges that differ from each other on these devices; none if there is only one expert rank."""
    if config.mesh.expert_ranks(mesh.shape) == 1:
        return []
    cpu = ComputeConfig.of(config, mesh).platform == "cpu"
    return [*EXCHANGES, *([] if cpu else RAGGED)]  # CPUs have no ragged collective


_OPTIONS: dict[str, Callable[[Config, Mesh], Any]] = {
    "bucket_cap_mb": _bucket_caps,
    "microbatches": lambda config, mesh: _MICROBATCHES,
    "algorithm": _algorithms,
}
# the value of each setting in the run's config
_CONFIGURED: dict[str, Callable[[Config, Mesh], Any]] = {
    "bucket_cap_mb": lambda config, mesh: config.schedule.bucket_cap_mb or _bucket_caps(config, mesh)[0],
    "microbatches": lambda config, mesh: config.schedule.microbatches,
    "algorithm": lambda config, mesh: ComputeConfig.of(config, mesh).exchange,
}
