"""Reading JSON files that a user names."""

import json
from pathlib import Path
from typing import Any

from moe_jax.errors import UserError
from moe_jax.files import untrusted as foreign_files


def read_json(path: Path, name: str, cure: str, error: type[UserError]) -> Any:
    """The content of a JSON file. Raises `error`, which calls the file by `name`, if it cannot be read."""
    try:
        return foreign_files.read_json(path)
    except (OSError, ValueError) as problem:
        is_json = not isinstance(problem, json.JSONDecodeError | UnicodeDecodeError)
        reason = problem.strerror if isinstance(problem, OSError) else str(problem) if is_json else "it is no JSON"
        raise error(f"{name} cannot be read ({reason}): {cure}") from None
