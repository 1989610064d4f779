"""Configs with open settings: their value is `auto`, and the planner chooses it."""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from moe_jax.config import Config, Sections

PLANNED = frozenset(
    {
        *("mesh.data", "mesh.expert", "mesh.pipeline", "mesh.tensor", "mesh.context"),
        *("mesh.experts_over_context", "mesh.experts_over_tensor"),
        *("schedule.pipeline", "schedule.virtual_stages", "schedule.head_blocks"),
        *("schedule.policy", "schedule.microbatches", "schedule.backward_microbatches", "schedule.expert_chunks"),
        *("schedule.weight_grad", "schedule.grad_reduce", "schedule.bucket_cap_mb", "schedule.remat"),
        *("exchange.tensor_form", "exchange.tensor_chunks", "exchange.context_form"),
        *("optimizer.zero", "train.grad_accumulation"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Draft(Sections):
    """Sections with some open settings. They are validated only after these settings have been chosen."""

    open: frozenset[str]  # a subset of `PLANNED`
    given: frozenset[str] = frozenset()  # dotted names of all settings that a file or an override has
    rest_open: bool = False  # whether all of `PLANNED` is open but what was given, and not only what is `auto`

    def choose(self, base: Sections | None = None, **sections: Mapping[str, object]) -> Config:
        """Return a config with values for the open settings; values for other settings are ignored.

        All other settings come from `base`. If it is None, they come from this draft, with defaults for open settings
        without a value. Raises ConfigError if the result is invalid.
        """
        return Config(**self._chosen(base, sections))

    def unchecked(self, base: Sections | None = None, **sections: Mapping[str, object]) -> Sections:
        """Return what `choose` returns, without validation."""
        return Sections(**self._chosen(base, sections))

    def _chosen(self, base: Sections | None, sections: Mapping[str, Mapping[str, object]]) -> dict[str, Any]:
        chosen = sections_of(self if base is None else base)
        for name, settings in sections.items():
            opened = self._open_keys.get(name, ())
            chosen[name] = _replaced(chosen[name], *[item for item in settings.items() if item[0] in opened])
        return chosen

    @functools.cached_property
    def _open_keys(self) -> dict[str, set[str]]:
        """The open settings of each section."""
        found: dict[str, set[str]] = {}
        for name in self.open:
            section, _, key = name.partition(".")
            found.setdefault(section, set()).add(key)
        return found


def open_draft(config: Sections, fixed: Set[str] = frozenset()) -> Draft:
    """Return a draft in which every setting that can be planned is open, except the `fixed` ones."""
    given = config.given if isinstance(config, Draft) else frozenset()
    return Draft(**sections_of(config), open=PLANNED - fixed, given=given, rest_open=True)


def sections_of(config: Sections) -> dict[str, Any]:
    """Return the sections of a config by name."""
    return dict(zip(_NAMES, _values_of(config), strict=True))


_NAMES = tuple(field.name for field in dataclasses.fields(Sections))
_values_of = operator.attrgetter(*_NAMES)


@functools.lru_cache(maxsize=2**12)
def _replaced(section: Any, *settings: tuple[str, object]) -> Any:
    """The section with these settings: cached because a plan chooses the same ones on many meshes."""
    return dataclasses.replace(section, **dict(settings))
