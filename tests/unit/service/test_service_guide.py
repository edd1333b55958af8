"""The guide as a page: the Markdown that it uses, and nothing taken for markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slipstream.apps.service.guide import guide_page, to_html

GUIDE = Path(__file__).parents[3] / "docs" / "service.md"


@pytest.mark.parametrize(
    ("markdown", "html"),
    [
        ("# One\n## Two", "<h2>One</h2>\n<h3>Two</h3>"),
        ("a\nb\n\nc", "<p>a b</p>\n<p>c</p>"),
        ("text\n- one\n  more\n- two", "<p>text</p>\n<ul><li>one more</li><li>two</li></ul>"),
        ("1. one\n2. two", "<ol><li>one</li><li>two</li></ol>"),
        ("```sh\n# x <y>\n\n| z\n```\nend", "# x &lt;y&gt;\n\n| z</code></pre>\n<p>end</p>"),
        ("| a | b |\n| --- | --- |\n| `c` | |", "<tr><th>a</th><th>b</th></tr>"),
        ("| a | b |\n| --- | --- |\n| `c` | |", "<tr><td><code>c</code></td><td></td></tr>"),
        ("`*a*` *b* **c** 2 * 3 * 4", "<code>*a*</code> <em>b</em> <strong>c</strong> 2 * 3 * 4"),
        ("[`x`](http://a/?b&c) <http://d>", '<a href="http://a/?b&amp;c"><code>x</code></a> <a'),
        ("[`x`](running.md#y) here", "<p><code>x</code> here</p>"),
        (
            "<script>alert(1)</script> & *<b>*",
            "&lt;script&gt;alert(1)&lt;/script&gt; &amp; <em>&lt;b",
        ),
        ("[x](javascript:alert(1))", "<p>x)</p>"),
    ],
)
def test_markdown(markdown: str, html: str) -> None:
    assert html in to_html(markdown)


class Words(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.feed(text.partition("<main>")[2])

    def handle_data(self, data: str) -> None:
        self.words += re.findall(r"\w+", data)


def test_the_page_has_all_of_the_guide() -> None:
    """All its words in their order, but for the targets of links and the names of languages."""
    markdown = re.sub(r"\]\([^)]+\)|(?<=^```)\w+", "", GUIDE.read_text("utf-8"), flags=re.M)
    markdown = re.sub(r"(?m)^\d+\. ", "", markdown)
    assert Words(guide_page()).words == re.findall(r"\w+", markdown)
    assert "`" not in re.sub(r"<pre.*?</pre>", "", guide_page(), flags=re.S)
