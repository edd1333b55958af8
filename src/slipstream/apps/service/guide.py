"""``/guide``: the guide, ``docs/service.md``, as a page.

It knows the Markdown that the guide uses: headings, paragraphs, lists, tables, fenced code; and in
a line code, emphasis and links.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from html import escape
from importlib import resources
from typing import Final

from slipstream.apps.service.docs import PAGE

FENCE: Final = "```"
ITEM: Final = re.compile(r"(\d+\.|[-*]) +")
INLINE: Final = re.compile(
    r"`(?P<code>[^`]+)`|\*\*(?P<strong>[^*]+)\*\*|\*(?P<em>[^*\s][^*]*)\*"
    r"|\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)|<(?P<url>https?://[^>\s]+)>"
)


@functools.cache
def guide_page() -> str:
    """The guide as a page of the service."""
    file = resources.files("slipstream.apps.service") / "page" / "guide.md"
    return PAGE.format(title="guide", content=to_html(file.read_text("utf-8")))


def to_html(markdown: str) -> str:
    """Markdown as HTML; nothing in it is taken for markup of HTML.

    >>> print(to_html("# A <b>\\n\\nOne `x < y`,\\ntwo.\\n\\n- three"))
    <h2>A &lt;b&gt;</h2>
    <p>One <code>x &lt; y</code>, two.</p>
    <ul><li>three</li></ul>
    """
    return "\n".join(_block(kind, lines) for kind, lines in _blocks(markdown.splitlines()))


def _kind(line: str) -> str:
    if line.startswith("|"):
        return "table"
    if found := ITEM.match(line):
        return "ol" if found[1][0].isdigit() else "ul"
    return "heading" if line.startswith("#") else "p"


def _blocks(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Blocks and their lines; those of code without the fences."""
    kind, block = "", list[str]()
    for line in lines:
        if kind == "pre":
            if line.startswith(FENCE):
                yield kind, block
                kind, block = "", []
            else:
                block.append(line)
            continue
        fenced = line.startswith(FENCE)
        now = "pre" if fenced else _kind(line) if line.strip() else ""
        # What follows in an item or a paragraph belongs to it.
        if now == "p" and kind in ("p", "ol", "ul"):
            now = kind
        if block and (now != kind or now == "heading"):
            yield kind, block
            block = []
        kind = now
        if now and not fenced:
            block.append(line)
    if block:
        yield kind, block


def _block(kind: str, lines: list[str]) -> str:
    if kind == "heading":
        marks, _, title = lines[0].partition(" ")
        level = min(len(marks) + 1, 6)  # the first level is the service's own name
        return f"<h{level}>{_inline(title)}</h{level}>"
    if kind == "pre":
        return f'<pre tabindex="0"><code>{escape(chr(10).join(lines))}</code></pre>'
    if kind == "table":
        return f'<div class="scroll whole" tabindex="0"><table>{_rows(lines)}</table></div>'
    if kind == "p":
        return f"<p>{_inline(' '.join(lines))}</p>"
    return f"<{kind}>{_items(lines)}</{kind}>"


def _items(lines: list[str]) -> str:
    items = list[str]()
    for line in lines:
        if found := ITEM.match(line):
            items.append(line[found.end() :])
        else:
            items[-1] += f" {line.strip()}"
    return "".join(f"<li>{_inline(item)}</li>" for item in items)


def _rows(lines: list[str]) -> str:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    return "".join(
        f"<tr>{''.join(f'<{tag}>{_inline(cell)}</{tag}>' for cell in row)}</tr>"
        for number, row in enumerate(rows)
        if number != 1  # the line of dashes
        for tag in ("th" if number == 0 else "td",)
    )


def _inline(text: str) -> str:
    out, at = list[str](), 0
    for found in INLINE.finditer(text):
        out += [escape(text[at : found.start()]), _mark(found)]
        at = found.end()
    return "".join([*out, escape(text[at:])])


def _mark(found: re.Match[str]) -> str:
    for tag in ("code", "strong", "em"):
        if (inner := found[tag]) is not None:
            return f"<{tag}>{escape(inner)}</{tag}>"
    target = found["url"] or found["target"]
    text = escape(target) if found["url"] else _inline(found["text"])
    # Other documents are not served here.
    is_served = target.startswith(("https:", "http:"))
    return f'<a href="{escape(target)}">{text}</a>' if is_served else text
