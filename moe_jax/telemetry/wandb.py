"""Scalars of a run at Weights & Biases (wandb.ai, or a server of one's own). Imports no jax."""

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, final

from moe_jax.errors import ConfigError, UserError
from moe_jax.files.atomic import write_atomically
from moe_jax.files.untrusted import read_text

_ID = "wandb_id"  # the file in log.dir that says which run there it is


class WandbError(UserError):
    """A logger that cannot begin."""


def check_wandb(project: str | None) -> None:
    """Raise ConfigError for a project without the package."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"log.wandb_project={project} needs the package wandb, which is not installed: "
            "pip install -e '.[wandb]', or log.wandb_project=null"
        )


@final
class WandbRun:
    """One run there, as a context manager: that of the same `log.dir`, if there is one, goes on.

    Where it goes on from an earlier step, it keeps the numbers it has: those of a step are taken once. WANDB_MODE and
    the other variables of wandb are honoured.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any], warn: Callable[[str], None]):
        self._project, self._folder, self._config, self._warn = project, folder, config, warn
        self._run: Any = None
        self._takes_more = True

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
                f"log.wandb_project={self._project} cannot begin ({_told(error)}): "
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
            self._warn(f"wandb may lack what came last ({_told(error)})")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add numbers of a step. A logger that fails ends no run: it is left out from then on."""
        if not self._takes_more:
            return
        try:
            self._run.log(dict(scalars), step=step)
        except Exception as error:
            self._takes_more = False
            self._warn(f"wandb takes nothing any more ({_told(error)})")


def _told(error: Exception) -> str:
    """In one line; wandb's errors have no common type."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
