"""Models as `python -m moe_jax.plan` plans them: with some settings given, and all others that can be planned open."""

from collections.abc import Sequence

from moe_jax.config.draft import Draft, open_draft
from moe_jax.config.yaml_io import load_draft


def draft_of(model: str, settings: Sequence[str]) -> Draft:
    """Return configs/models/MODEL.yaml with these settings, and all others that can be planned open.

    Raises ConfigError.
    """
    given = load_draft(f"configs/models/{model}.yaml", settings)
    return open_draft(given, fixed={each.partition("=")[0] for each in settings})


def plan_command(model: str, cluster: str, settings: Sequence[str]) -> str:
    """Return the command that plans it."""
    return f"python -m moe_jax.plan --model configs/models/{model}.yaml --cluster {cluster} {' '.join(settings)}"
