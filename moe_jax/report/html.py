"""HTML elements of the page of a run: plots, tables and texts, and its CSS with a light and a dark theme.

Plots use the same colour variables as the CSS.
"""

import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from moe_jax.files.untrusted import read_text

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --line: #e4e3df;
  --ink: #1b1b1a; --muted: #66655f; --grid: #e8e7e3;
  --series-1: #2a6fd0; --series-2: #d9541e; --warning: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131312; --card: #1c1c1b; --line: #32312f;
    --ink: #efeee9; --muted: #a09f98; --grid: #31302e;
    --series-1: #5f9df0; --series-2: #f0803c; --warning: #f2857c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.25rem 3rem; max-width: 72rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { margin: 0; font-size: 1.7rem; letter-spacing: -0.01em; overflow-wrap: anywhere; }
header p { margin: 0.2rem 0 0; color: var(--muted); }
section { margin-top: 2.2rem; }
h2 { margin: 0 0 0.7rem; font-size: 1.1rem; }
section > p { margin: 0 0 0.6rem; color: var(--muted); }
section > p.warning { color: var(--warning); font-weight: 600; }
.plots, .panels { display: grid; gap: 0.9rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }
.wide { margin-bottom: 0.9rem; }
.panels { grid-template-columns: repeat(auto-fill, minmax(min(100%, 14.5rem), 1fr)); }
figure, table, pre { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
figure { padding: 0.8rem 0.8rem 0.5rem; }
figcaption { font-weight: 600; font-size: 0.87rem; margin: 0 0 0.3rem 0.2rem; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: inherit !important; }
svg image { image-rendering: pixelated; }
table { width: 100%; border-spacing: 0; font-variant-numeric: tabular-nums; }
th, td { padding: 0.42rem 0.9rem; text-align: left; vertical-align: baseline; border-top: 1px solid var(--line); }
tr:first-child > * { border-top: 0; }
th { font-weight: 500; white-space: nowrap; }
.numbers td:nth-child(2) { font-size: 1.1rem; font-weight: 650; white-space: nowrap; }
.numbers td:last-child { width: 100%; color: var(--muted); }
.facts td { width: 100%; overflow-wrap: anywhere; }
pre {
  padding: 0.9rem; max-height: 28rem; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
.legend { display: flex; flex-wrap: wrap; gap: 0.5rem; align-items: center; font-size: 0.85rem; }
.legend .bar { width: 9rem; height: 0.8rem; border: 1px solid var(--line); border-radius: 4px; }
footer { margin-top: 2.5rem; color: var(--muted); font-size: 0.85rem; }
@media (max-width: 40rem) {
  .plots svg text { font-size: 9.5px !important; }
  .numbers tr { display: grid; grid-template-columns: 1fr auto; border-top: 1px solid var(--line); padding: 0.4rem 0; }
  .numbers tr:first-child { border-top: 0; }
  .numbers th, .numbers td { border: 0; padding-block: 0; }
  .numbers td:last-child { grid-column: 1 / -1; font-size: 0.87rem; }
  .facts th { white-space: normal; }
}
"""


def plots(found: Iterable[tuple[str, str]], kind: str = "plots") -> str:
    """Return titles and SVGs as HTML figures next to each other; "" if there are none."""
    figures = "".join(f"<figure><figcaption>{title}</figcaption>{svg}</figure>\n" for title, svg in found)
    return figures and f'<div class="{kind}">\n{figures}</div>\n'


def table(kind: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Return an HTML table; each row is a name, followed by its values."""
    lines = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>\n'
        for row in rows
    )
    return f'<table class="{kind}">\n{lines}</table>\n'


def text(path: Path) -> str:
    """Return the text of a file as preformatted HTML; "" if the file does not exist."""
    if not path.is_file():
        return ""
    content = re.sub(r"[^\n\t\x20-\x7e\x80-\U0010ffff]", "�", read_text(path, errors="replace"))
    return f"<pre>{escape(content)}</pre>\n"
