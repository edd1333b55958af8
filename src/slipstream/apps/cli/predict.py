"""``slipstream predict``: classifies with a downloaded classifier, without service and torch."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from slipstream.errors import ConfigError
from slipstream.printable import printable_lines


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model.safetensors.")],
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="Texts to classify; by default lines of stdin."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object a text.")] = False,
    top: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many classes to name.")] = 10,
) -> None:
    """Classify texts with a model that the service has trained."""
    # Imported here, because numpy is slow to import and --help does not need it.
    from slipstream.apps.service.answers import Model
    from slipstream.apps.service.errors import Damaged

    try:
        classifier = Model.load(model)
    except Damaged as error:
        raise ConfigError(f"{model}: {error}") from error
    for text in _texts(texts):
        classes = classifier.classify([text], top)[0]
        if json:
            as_json = [{"class_name": name, "confidence": sure} for name, sure in classes]
            answer = {"text": text, "top_class": classes[0][0], "classes": as_json}
            print(jsonlib.dumps(answer, ensure_ascii=False), flush=True)
            continue
        shown = "\t".join(f"{printable_lines(name)} {sure:.4f}" for name, sure in classes)
        print(shown, flush=True)


def _texts(texts: list[str] | None) -> Iterator[str]:
    """Yield the arguments, or the lines of stdin as they come; blank ones are skipped."""
    if texts:
        yield from texts
        return
    if sys.stdin.isatty():
        print("No TEXT given: type texts, one a line; Ctrl-D ends.", file=sys.stderr, flush=True)
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    any_text = False
    for line in sys.stdin:
        if line.strip():
            any_text = True
            yield line.strip()
    if not any_text:
        raise ConfigError("no text to classify: give TEXT, or lines of texts on stdin")
