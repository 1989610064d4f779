"""The site of the documentation: what `mkdocs build --strict` in scripts/test.sh does not notice."""

import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path
from types import ModuleType

import griffe
import pytest
import yaml
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import get_files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_page_is_in_the_menu_twice() -> None:
    _, _, menu = (ROOT / ".mkdocs.yml").read_text().partition("\nnav:\n")
    pages = re.findall(r"- (?:[^:\n]+: )?(\w+\.md)\b", menu)
    assert sorted(pages) == sorted([*(path.name for path in (ROOT / "docs").glob("*.md")), "index.md"])


@cache
def settings() -> MkDocsConfig:
    return load_config(str(ROOT / ".mkdocs.yml"))


def as_on_the_site(page: str, text: str) -> tuple[str, list[str]]:
    """What mkdocs gets of a page, and which files come to the site with it."""
    config, hooks = settings(), settings().plugins
    files = hooks.on_files(get_files(config), config=config)
    before = {file.src_uri for file in files}
    found = hooks.on_page_markdown(text, page=Page(None, files.src_uris[page], config), config=config, files=files)
    return found, sorted({file.src_uri for file in files} - before)


@pytest.mark.parametrize(
    ("page", "link", "shown", "files"),
    [
        ("tune.md", "[a](plan.md#zero)", "[a](plan.md#zero)", []),
        ("tune.md", "[a](../README.md#limits)", "[a](index.md#limits)", []),
        ("tune.md", "![a](../scripts/gke.yaml)", "![a](scripts/gke.yaml)", ["scripts/gke.yaml"]),
        ("tune.md", "[a](../configs)", "a", []),
        ("tune.md", "[a](../absent.yaml)", "[a](../absent.yaml)", []),
        ("tune.md", "[a](https://example.com/b.md)", "[a](https://example.com/b.md)", []),
        ("tune.md", "[a](#here)", "[a](#here)", []),
        ("index.md", "[a](docs/plan.md#zero)", "[a](plan.md#zero)", []),
        ("index.md", "[a](configs/bench/box.yaml)", "[a](configs/bench/box.yaml)", ["configs/bench/box.yaml"]),
        ("index.md", "[a](profiling/results)", "a", []),
        ("index.md", "[a](.github/CONTRIBUTING.md)", "a", []),
    ],
)
def test_links_of_a_checkout_lead_to_the_same_place(page: str, link: str, shown: str, files: list[str]) -> None:
    assert as_on_the_site(page, link) == (shown, files)


def test_blocks_of_code_stay_as_they_are() -> None:
    code = "```\n[a](../configs)\n- `\\|`\n```"
    assert as_on_the_site("tune.md", f"text\n{code}\ntext")[0] == f"text\n\n{code}\n\ntext"


def test_lists_and_tables_are_those_of_github() -> None:
    found, _ = as_on_the_site("tune.md", "text:\n- one\n  more\n- two\n\n| `a \\| b` | c |\n")
    assert found == "text:\n\n- one\n  more\n- two\n\n| `a | b` | c |\n"


def test_comments_on_fields_are_their_docstrings(tmp_path: Path) -> None:
    (tmp_path / "fields.py").write_text(
        "class A:\n    x: int  # behind\n    # above\n    # it\n    y: int = 1  # and behind\n    z: int\n"
    )
    extensions = griffe.load_extensions(script("site_fields").Fields)
    found = griffe.load("fields", search_paths=[tmp_path], extensions=extensions)["A"].members
    output = {name: field.docstring and field.docstring.value for name, field in found.items()}
    assert output == {"x": "behind", "y": "above it and behind", "z": None}


def test_the_page_of_settings_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise: python scripts/settings_page.py"""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # it shares code with site_fields.py
    page = (ROOT / "docs/settings.md").read_text()
    assert page == script("settings_page").page()
    names = re.findall(r"^\| `(\S+)` \|", page, re.MULTILINE)
    assert {"model.moe.top_k", "data.sources", "weight_schedule", "log.sample_prompt"} < set(names)
    assert names.count("train.steps") == 1


def test_git_runs_the_quick_checks_of_all_checks() -> None:
    lines = (ROOT / "scripts/test.sh").read_text().splitlines()
    checks = [line.removeprefix("check ") for line in lines if line.startswith("check ")]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    quick = [hook["entry"] for repo in hooks for hook in repo["hooks"]]
    assert quick == [check for check in checks if shlex.split(check)[0] not in ("build_site", "python")]
