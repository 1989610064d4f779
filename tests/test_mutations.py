"""The table of faults: each can be made, and is one."""

import ast
import importlib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_fault_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text stands once in the file, and what stands there instead is another program."""
    monkeypatch.syspath_prepend(ROOT / "profiling")
    mutations = importlib.import_module("mutation_table").MUTATIONS
    assert max(Counter(each.name for each in mutations).values()) == 1
    for each in mutations:
        text = (ROOT / "moe_jax" / each.file).read_text(encoding="utf-8")
        assert text.count(each.old) == 1, each.name
        changed = text.replace(each.old, each.new)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), each.name
