"""Hooks of mkdocs (.mkdocs.yml) that make the site show pages as GitHub does.

README.md is the first page. A page may link to any file of the project, relative to its own folder: the file becomes
part of the site, under its path in the project. Folders, and Markdown outside docs/, have no page: a link to one is
replaced by its text.
"""

import os.path
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
README, FIRST_PAGE = "README.md", "index.md"
_FENCE = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?\[([^\]]*)\])\(([^)\s]+)\)")
_LIST_AFTER_TEXT = re.compile(r"^(?![-*|#>\s]|\d+\. )(.+)\n(?=[-*] |1\. )", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md as the first page."""
    files.append(File.generated(config, FIRST_PAGE, abs_src_path=str(ROOT / README)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite a page's links for the site, and add the linked files to the site."""
    source = README if page.file.src_uri == FIRST_PAGE else f"docs/{page.file.src_uri}"

    def rewritten(match: re.Match[str]) -> str:
        label, text, link = match.groups()
        path, hash_sign, anchor = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if not path or "://" in path or not (ROOT / target).exists():
            return match[0]  # mkdocs warns about missing files
        uri = FIRST_PAGE if target == README else target.removeprefix("docs/")
        if files.get_file_from_path(uri) is None:
            if (ROOT / target).is_dir() or uri.endswith(".md"):
                return text
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
        return f"{label}({uri}{hash_sign}{anchor})"

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(rewritten, _as_on_github(part)) for part in parts[::2]]
    return "\n".join(parts)  # Python-Markdown needs empty lines around code blocks


def _as_on_github(text: str) -> str:
    """Adapt Markdown for Python-Markdown: an empty line before a list, and no backslash before | in code in a table."""
    text = _LIST_AFTER_TEXT.sub(r"\1\n\n", text)
    return _CODE.sub(lambda code: code[0].replace(r"\|", "|"), text)
