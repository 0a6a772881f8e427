"""Pieces of a page that needs nothing beside it: style, pictures, tables, verdicts."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from meka.lab.reproduce.verdict import Check

STYLE = """
:root { color-scheme: light dark; --ok: #1a7f37; --no: #c0362c; --line: #8884;
  --soft: #8881; --link: #0b62b8; }
@media (prefers-color-scheme: dark) { :root { --ok: #4cc26a; --no: #ff7b72;
  --link: #79b8ff; } }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 0 auto;
  padding: 1rem; overflow-wrap: break-word; }
a { color: var(--link); }
h1 { line-height: 1.2; } h2 { margin: 0; font-size: 1.25rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .95rem; }
th, td { padding: .35rem .6rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
section { border-top: 2px solid var(--line); padding-top: 1.2rem; margin-top: 2rem; }
.paper { opacity: .75; margin: .1rem 0 .8rem; }
blockquote { margin: 0 0 1rem; padding: .5rem .9rem; background: var(--soft);
  border-left: 4px solid var(--line); }
.holds { color: var(--ok); font-weight: 700; white-space: nowrap; }
.fails { color: var(--no); font-weight: 700; white-space: nowrap; }
figure { margin: 1rem 0; }
img { display: block; width: 100%; height: auto; background: white;
  border-radius: 6px; }
figure a { display: block; overflow-x: auto; }
.reason { border-left: 4px solid var(--no); padding: .3rem .9rem; margin: .8rem 0; }
.small { font-size: .88rem; opacity: .8; }
summary { cursor: pointer; }
@media (max-width: 40rem) { figure img { width: auto; max-width: none;
  height: 17rem; } figure.tall img { height: 30rem; } }
"""


def word(holds: bool, yes: str = "holds", no: str = "does not hold") -> str:
    """A verdict, in its colour."""
    kind, text = ("holds", yes) if holds else ("fails", no)
    return f'<span class="{kind}">{text}</span>'


def checks(found: Iterable[Check]) -> str:
    """A table of checks: whether each holds, what it asks, what was found."""
    rows = "".join(
        f"<tr><td>{word(check.holds, 'yes', 'no')}</td><td>{html.escape(check.name)}"
        f"<br><span class=small>{html.escape(check.says)}</span></td>"
        f"<td>{html.escape(check.found)}</td></tr>"
        for check in found
    )
    return (
        '<div class="scroll"><table><thead><tr><th></th><th>check</th><th>found</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts."""
    top = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def picture(path: Path, words: str) -> str:
    """A PNG as part of the page; the words are for those who do not see it."""
    content = path.read_bytes()
    # A PNG says its width and height in its first chunk.
    width, height = (int.from_bytes(content[k : k + 4], "big") for k in (16, 20))
    tall = ' class="tall"' if height > 0.6 * width else ""
    encoded = base64.b64encode(content).decode()
    return (
        f'<figure{tall}><a><img width="{width}" height="{height}" '
        f'src="data:image/png;base64,{encoded}" alt="{html.escape(words)}"></a>'
        "</figure>"
    )
