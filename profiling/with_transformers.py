"""What transformers computes from folders of models, in an environment of its own: tests/golden/check.py runs there."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from moe_jax.errors import CommandParser, UserError

GOLDEN = Path(__file__).resolve().parents[1] / "tests/golden"
Pair = tuple[Path, Path]  # a folder, and a file of tokens and expected logits
_DIFFERENCE = re.compile(r"largest difference (\S+)")
_VERSIONS = "import torch, transformers as t; print(t.__version__, torch.__version__)"


class TransformersError(UserError):
    """Raised for a command that failed: transformers cannot load a folder, or has other logits."""


def asked_python(program: str, description: str | None) -> str:
    """Return the interpreter that the command line gives, of an environment with torch and transformers."""
    python: str = _parser(program, description).parse_args().transformers
    return python


def asked_families(program: str, description: str | None) -> tuple[str, list[str]]:
    """Return the interpreter, and the names of families that the command line gives."""
    parser = _parser(program, description)
    parser.add_argument("families", metavar="FAMILY", nargs="*", help="default: all; results of others stay")
    arguments = parser.parse_args()
    return arguments.transformers, arguments.families


def _parser(program: str, description: str | None) -> CommandParser:
    parser = CommandParser(prog=f"python profiling/{program}.py", description=description)
    parser.add_argument("--transformers", required=True, metavar="PYTHON", help="python with transformers")
    return parser


def versions(python: str) -> dict[str, str]:
    """Return the versions of transformers and torch. Raises TransformersError."""
    return dict(zip(("transformers", "torch"), call(python, "-c", _VERSIONS).split(), strict=True))


def differences(python: str, pairs: Mapping[str, Pair]) -> dict[str, dict[str, float]]:
    """Return the largest difference of each model's logits. Raises TransformersError."""
    output = call(python, str(GOLDEN / "check.py"), *(str(path) for pair in pairs.values() for path in pair))
    found = [{"largest_difference": float(text)} for text in _DIFFERENCE.findall(output)]
    return dict(zip(pairs, found, strict=True))


def call(*command: str) -> str:
    """Run a command and return its output. Raises TransformersError."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise TransformersError(f"{' '.join(command)} ended with exit code {done.returncode}: {done.stderr[-500:]}")
    print(" ".join(command[1:4]), flush=True)
    return done.stdout
