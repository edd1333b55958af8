"""``/docs``: the description of the API, as a page in the style of the page for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from typing import Any, Final

PAGE: Final = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>slipstream: {title}</title>
  <link rel="icon" href="data:,">
  <link rel="stylesheet" href="page.css">
</head>
<body>
  <header>
    <h1><a href="./">slipstream</a></h1>
    <p><a href="./">Classifiers</a></p>
    <p><a href="docs">API</a></p>
    <p><a href="guide">Guide</a></p>
  </header>
  <main>
{content}
  </main>
</body>
</html>
"""
CURL: Final = """url={base}

# upload; the answer has the classifier's id
curl $url/v1/classifiers -F 'training_metadata={{"name": "trips", "language": "en"}}' \\
     -F training_data=@trips.csv
# texts that are too long are cut if you send it to "$url/v1/classifiers?long=cut" instead
id=…                                      # its "classifier_id"

curl $url/v1/classifiers/$id              # until "status" is "Available"
curl -N $url/api/classifiers/$id/events   # or follow it live

curl $url/v1/classifiers/$id/classify -H 'Content-Type: application/json' \\
     -d '{{"text": "a cheap room in Oslo"}}'
curl $url/api/classifiers/$id/report
curl -X DELETE $url/v1/classifiers/$id
"""
PYTHON: Final = """import json, time
from ibm_cloud_sdk_core.authenticators import BasicAuthenticator, NoAuthAuthenticator
from ibm_watson import NaturalLanguageClassifierV1  # pip install ibm-watson==5.3.1

nlc = NaturalLanguageClassifierV1(authenticator=NoAuthAuthenticator())
# with a key: authenticator=BasicAuthenticator("apikey", "sk_…")
nlc.set_service_url("{base}")

with open("trips.csv", "rb") as data:
    made = nlc.create_classifier(
        training_metadata=json.dumps({{"name": "trips", "language": "en"}}), training_data=data
    ).get_result()
id = made["classifier_id"]
while nlc.get_classifier(id).get_result()["status"] == "Training":
    time.sleep(2)
print(nlc.classify(id, "a cheap room in Oslo").get_result()["top_class"])
"""
KEYS: Final = """
<p>A service on its own machine needs no key at first. From the first key on that its operator makes
(<code>slipstream keys add NAME</code>), every request under <code>/v1</code> and <code>/api</code>
needs one; ask the operator for yours. Send it in any of three ways:</p>
<ul>
  <li>as a password: <code>curl -u apikey:$KEY …</code></li>
  <li>as a header: <code>Authorization: Bearer $KEY</code></li>
  <li>as IBM's clients do, by a token from <code>/identity/token</code>:
    <code>IAMAuthenticator(KEY, url="{base}")</code></li>
</ul>
<p>A key sees only the classifiers of its own name. The page asks for it when it is needed.</p>
"""
BEGIN: Final = """    <h2>API</h2>
<p>Send a CSV of texts and their classes, wait until the classifier is trained, and let it classify.
The <a href="guide">guide</a> says more of each step; the <a href="./">page</a> does the same by
hand.</p>
"""
ERRORS: Final = """
<p>Every error is JSON: <code>error</code> is short, <code>description</code> says what, where and
the way out. IBM's clients show only <code>error</code>; print the body of the exception for
both.</p>
"""


def docs_page(description: dict[str, Any], base: str) -> str:
    """The page: how to begin, then every operation of the description, by tag."""
    base = escape(base)
    content = "".join(
        [
            BEGIN,
            _section("By curl", _pre(CURL.format(base=base))),
            _section("By the Watson SDK for Python", _pre(PYTHON.format(base=base))),
            _section("Keys", KEYS.format(base=base)),
            _section("Errors", ERRORS),
            *_groups(description),
            _section("Types", '<p><a href="openapi.json">openapi.json</a> (OpenAPI 3.1)</p>'),
        ]
    )
    return PAGE.format(title="API", content=content)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n"


def _pre(text: str) -> str:
    return f'<pre tabindex="0"><code>{text}</code></pre>'


def _groups(description: dict[str, Any]) -> Iterator[str]:
    entries = [
        (method.upper(), path, entry)
        for path, methods in description["paths"].items()
        for method, entry in methods.items()
    ]
    for tag in description["tags"]:
        items = "".join(
            _item(method, path, entry)
            for method, path, entry in entries
            if tag["name"] in entry["tags"]
        )
        about = f"<p>{escape(tag['description'])}</p>"
        yield _section(tag["name"], f'{about}<ul class="operations">{items}</ul>')


def _item(method: str, path: str, entry: dict[str, Any]) -> str:
    parameters = "".join(
        f"<li><code>{escape(one['name'])}</code> ({one['in']}): {_code(one['description'])}</li>"
        for one in entry["parameters"]
        if one["in"] != "path"
    )
    more = f"<ul>{parameters}</ul>" if parameters else ""
    if examples := _examples(entry):
        more += f"<details><summary>Example</summary>{examples}</details>"
    where = f"<code><strong>{method}</strong> {escape(path)}</code>"
    return f"<li><p>{where}<br>{_code(entry['summary'])}</p>{more}</li>"


def _code(text: str) -> str:
    """A text with its `code` as markup.

    >>> _code("`a` < b")
    '<code>a</code> &lt; b'
    """
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _examples(entry: dict[str, Any]) -> str:
    """The examples of an operation's body and of its answer."""
    shown = []
    answer = entry["responses"]["200"]["content"]
    for name, contents in (
        ("Body", entry.get("requestBody", {}).get("content")),
        ("Answer", answer),
    ):
        for kind, content in (contents or {}).items():
            if "example" in content:
                text = json.dumps(content["example"], indent=2, ensure_ascii=False)
                shown.append(f"<p>{name}, {kind}</p>{_pre(escape(text))}")
    return "".join(shown)
