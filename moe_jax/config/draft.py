"""A config that leaves settings open: they say auto, and the planner chooses them."""

import dataclasses
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from moe_jax.config import Config, Sections

PLANNED = frozenset(
    {
        *("mesh.data", "mesh.expert", "mesh.pipeline", "mesh.tensor", "mesh.context", "mesh.experts_over_context"),
        *("schedule.pipeline", "schedule.virtual_stages", "schedule.head_blocks"),
        *("schedule.policy", "schedule.microbatches", "schedule.backward_microbatches", "schedule.expert_chunks"),
        *("schedule.weight_grad", "schedule.grad_reduce", "schedule.bucket_cap_mb", "schedule.remat"),
        *("exchange.tensor_form", "exchange.tensor_chunks", "exchange.context_form"),
        *("optimizer.zero", "train.grad_accumulation"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Draft(Sections):
    """Sections of which some settings are open. Nothing is checked before these are chosen."""

    open: frozenset[str]  # of `PLANNED`

    def choose(self, base: Sections | None = None, **sections: Mapping[str, object]) -> Config:
        """`base` (None: this draft, defaults for what is open) with settings replaced, as far as they are open.

        Raises ConfigError.
        """
        chosen = sections_of(self if base is None else base)
        for name, settings in sections.items():
            allowed = {key: value for key, value in settings.items() if f"{name}.{key}" in self.open}
            chosen[name] = dataclasses.replace(chosen[name], **allowed)
        return Config(**chosen)


def open_draft(config: Sections, but: Set[str] = frozenset()) -> Draft:
    """All that can be planned is open, `but` for these settings."""
    return Draft(**sections_of(config), open=PLANNED - but)


def sections_of(config: Sections) -> dict[str, Any]:
    """Each section by its name."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(Sections)}
