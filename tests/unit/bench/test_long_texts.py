"""The generator of a data set with long texts, on a small folder of sources."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from slipstream.apps.service.errors import ApiError
from slipstream.apps.service.rows import Limits, check, read

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "long_texts.py"


def test_long_texts_a_header_and_unequal_classes(tmp_path: Path) -> None:
    for folder in ("trec", "mr"):
        (tmp_path / folder).mkdir()
    questions = [f"C{n % 9}:fine What is {n} , and where ?\n" for n in range(90)]
    (tmp_path / "trec" / "train.label").write_text("".join(questions))
    for name in ("pos", "neg"):
        sentences = [f"a {name} film , number {n} , of a hundred\n" for n in range(30)]
        (tmp_path / "mr" / f"reviews.{name}").write_text("".join(sentences))
    out = tmp_path / "out.csv"
    command = [sys.executable, SCRIPT, "--data", tmp_path, "--out", out, "--rows", "900"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told, data = json.loads(done.stdout), out.read_bytes()
    with pytest.raises(ApiError, match=rf" {told['longer']} rows cannot be used, the first 20 at"):
        check([data], Limits())
    limit = Limits().text_chars
    assert check([data], Limits(), limit) == (901, 10, told["longer"])
    assert 0.35 < told["longer"] / 900 < 0.47
    rows = read([data], limit)
    assert "looks like a header" in rows.warnings[0]
    sizes = Counter(rows.labels[own[0]] for own in rows.classes).most_common()
    assert sizes[0][1] > 5 * sizes[-2][1]  # the last one is the header's
