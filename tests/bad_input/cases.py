"""What the cases of bad input are made of: command lines, what they print, and damage to a run."""

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moe_jax.cli import convert, evaluate, generate, launch, measure, plan, report, train

ROOT = Path(__file__).parents[2]


def _script_main(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()


COMMANDS: dict[str, Callable[[], None]] = {
    "train": train.main,
    "evaluate": evaluate.main,
    "generate": generate.main,
    "convert": convert.main,
    "report": report.main,
    "launch": launch.main,
    "measure": measure.main,
    "plan": plan.main,
    "prepare_text": partial(_script_main, "prepare_text"),
    "prepare_chat": partial(_script_main, "prepare_chat"),
}


class Said(NamedTuple):
    code: int
    errors: str


Command = Callable[[str], Said]
Refusal = Callable[[str, str], None]  # of a command line, with a message
Damage = Callable[[Path], object]


def cases(table: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The rows of a table under the name that each has in front."""
    return [pytest.param(*row[1:], id=row[0]) for row in table]


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its content, and every folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def remove(name: str) -> Damage:
    def damage(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def write(name: str, text: str) -> Damage:
    return lambda run: (run / name).write_text(text)
