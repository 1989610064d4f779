"""Logging of a run's scalars to Weights & Biases (wandb.ai or another server). Imports no jax."""

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, final

from moe_jax.errors import ConfigError, UserError
from moe_jax.files.atomic import write_atomically
from moe_jax.files.untrusted import read_text

_ID = "wandb_id"  # file in log.dir with the ID of the wandb run


class WandbError(UserError):
    """Logging to wandb cannot start."""


def check_wandb(project: str | None) -> None:
    """Raise ConfigError if a project is set but the package wandb is not installed."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"log.wandb_project={project} needs the package wandb, which is not installed: "
            "pip install -e '.[wandb]', or log.wandb_project=null"
        )


@final
class WandbRun:
    """One wandb run, as a context manager. It resumes the wandb run of the same `log.dir`, if there is one.

    After resuming from an earlier step, wandb keeps the scalars that it has: it accepts those of a step only once.
    WANDB_MODE and the other environment variables of wandb are honoured.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any], warn: Callable[[str], None]):
        self._project, self._folder, self._config, self._warn = project, folder, config, warn
        self._run: Any = None
        self._is_working = True

    def __enter__(self) -> Self:
        import wandb

        file = self._folder / _ID
        known = read_text(file).strip() if file.exists() else None
        try:
            self._run = wandb.init(
                project=self._project,
                dir=str(self._folder),
                name=self._folder.name,
                config=dict(self._config),
                id=known,
                resume="allow",
                allow_val_change=True,
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:
            raise WandbError(
                f"log.wandb_project={self._project} cannot begin ({_error_text(error)}): "
                "run wandb login, or set WANDB_MODE=offline, or log.wandb_project=null"
            ) from None
        if known is None:
            with ExitStack() as on_error:
                on_error.push(self.__exit__)
                write_atomically(file, f"{self._run.id}\n")
                on_error.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._run.finish(exit_code=1 if kind else 0)
        except Exception as error:
            self._warn(f"wandb may lack what came last ({_error_text(error)})")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the scalars of a step. A failure does not end the run: it is reported once, and wandb gets no more."""
        if not self._is_working:
            return
        try:
            self._run.log(dict(scalars), step=step)
        except Exception as error:
            self._is_working = False
            self._warn(f"wandb takes nothing any more ({_error_text(error)})")


def _error_text(error: Exception) -> str:
    """An error as one line; wandb's errors have no common base type."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
