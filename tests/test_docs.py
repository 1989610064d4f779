"""What README.md and docs/ show is so: code runs, and links lead somewhere. For commands see test_docs_commands.py."""

import importlib
import json
import re
import sys
from argparse import ArgumentParser, Namespace
from functools import cache
from pathlib import Path

import pytest

from moe_jax.config.renamed import RENAMED
from moe_jax.config.yaml_io import load_draft
from moe_jax.errors import CommandParser
from tests.bad_input.cases import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIG = "configs/shakespeare_cpu.yaml"  # in place of a run that has yet to be
FOLDERS = "configs|docs|moe_jax|profiling|scripts|tests"
_TEXTS = {".md", ".py", ".yaml", ".sh", ".ipynb", ".txt"}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@cache
def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and content of each block of code."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@cache
def prose(page: Path) -> str:
    """What is no block of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


WITH_PYTHON = [page for page in PAGES if any(language == "python" for language, _ in blocks(page))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, one after another, in a folder that has the configs."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, (_, code) in enumerate(block for block in blocks(page) if block[0] == "python"):
        exec(compile(code, f"{page.name}, python block {number}", "exec"), names)


class Parsed(Exception):
    """Ends a command that has read its line."""


def arguments_of(program: str, words: list[str]) -> tuple[Namespace, list[str]]:
    """What a command makes of its line, and what a launcher would hand on."""
    launches = program == "launch"
    with pytest.MonkeyPatch.context() as patch:
        for read in ("parse_known_args",) if launches else ("parse_args", "parse_intermixed_args"):

            def parse(parser: CommandParser, *given: object, read: str = read) -> None:
                raise Parsed(getattr(ArgumentParser, read)(parser, *given))

            patch.setattr(CommandParser, read, parse, raising=False)
        patch.setattr(sys, "argv", [program, *words])
        main = COMMANDS.get(program) or importlib.import_module(program).main
        with pytest.raises(Parsed) as parsed:
            main()
    (found,) = parsed.value.args
    return found if launches else (found, [])


def check_command(program: str, words: list[str], whole: bool = True) -> None:
    """Raises unless the command knows its flags and, in a `whole` line, the settings are right together."""
    arguments, rest = arguments_of(program, words)
    if rest:
        check_command(arguments.module.removeprefix("moe_jax."), rest, whole)
    config = getattr(arguments, "config", None) or getattr(arguments, "model", None)
    if isinstance(config, Path | str):
        draft = load_draft(config if Path(config).is_file() else CONFIG, arguments.overrides)
        if whole and not draft.open:
            draft.choose()


def test_there_is_code() -> None:
    assert len(WITH_PYTHON) > 3


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.resolve()), link


@each_page
def test_files_that_are_named_are_there(page: Path) -> None:
    for name in re.findall(rf"`((?:{FOLDERS})/[\w./-]+\.\w+)`", prose(page)):
        assert (ROOT / name).exists() or (ROOT / "moe_jax" / name).exists(), name


def test_every_page_is_in_the_list_that_the_readme_links() -> None:
    listed = ROOT / "docs/pages.md"
    assert f"({listed.relative_to(ROOT)})" in PAGES[0].read_text()
    links = re.findall(r"\]\((\w+\.md)\)", listed.read_text())
    assert sorted(links) == sorted(page.name for page in PAGES[1:] if page != listed)


def test_messages_are_those_of_the_program() -> None:
    """Each piece between the dots stands in one text of the code."""
    files = (ROOT / "moe_jax").rglob("*.py")
    code = "\n".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in files)
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 30
    pieces = [piece.strip() for row in rows for piece in row.split("…")]
    assert not [piece for piece in pieces if piece not in code]


def test_nothing_is_installed_by_a_name_that_others_could_register() -> None:
    """The project is published nowhere: pip installs it from its folder alone."""
    folders = [path for name in FOLDERS.split("|") for path in (ROOT / name).rglob("*")]
    files = [path for path in (*ROOT.glob("*"), *folders) if path.suffix in _TEXTS or path.name == "Dockerfile"]
    assert len(files) > 300
    named = re.compile(r"install\b[^\n]*[\s'\"]moe[_-]jax\b(?![./])|\bmoe[_-]jax\\*\[(text|plots|wandb|nvml|tpu|cuda)")
    assert not [(path.name, found[0]) for path in files if (found := named.search(path.read_text("utf-8")))]


def test_plans_are_those_of_the_results() -> None:
    """Commands, and each row of the table."""
    text = (ROOT / "docs/scaling.md").read_text()
    plans = json.loads((ROOT / "profiling/results/scaling.json").read_text())["plans"]
    assert len(plans) == 6
    for model, found in plans.items():
        command = found["command"]
        for old, new in RENAMED.items():
            section = old.rpartition(".")[0]
            command = command.replace(f" {old}=", f" {section}.{new}=")
        assert f"\n{command}\n" in text
        mesh = " ".join(f"{axis}={size}" for axis, size in found["mesh"].items()) or "one chip"
        numbers = f"{found['step_s']:.3g} | {found['mfu']:.1%} | {found['exposed']:.0%} | {found['memory_gb']:.1f}"
        row = f"| {model} | {found['chips']:,} | {mesh} | "
        assert [line for line in text.splitlines() if line.startswith(row) and f"| {numbers} |" in line], row
