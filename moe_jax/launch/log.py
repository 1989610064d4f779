"""What supervisors tell."""

import sys


def log(text: str) -> None:
    """One line on stderr."""
    if text:
        print(f"launch: {text}", file=sys.stderr, flush=True)
