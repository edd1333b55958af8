"""A data set as users have them: long texts, a header row, and classes of very unequal size.

    .venv/bin/python benchmarks/long_texts.py --data FOLDER --out long.csv [--rows 5000] [--seed 0]

FOLDER has trec/, with *.label files of lines "LABEL:fine text", and mr/, with a text file for each
class, a sentence a line. A text joins questions of one fine class of TREC with sentences of MR,
which say nothing about the class. Lengths are log-normal, so that about four texts of ten have more
than 1,024 characters, as in ordinary news. The k-th class has a share in proportion to 1/k. Sources
occur in several texts, so accuracy on these rows is no measure of how well new texts are answered.

The service refuses the file as it is, and takes it with ``?long=cut`` or a larger ``--max-text``.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from slipstream.apps.bench.data.labelled_text import Sentence, read_labelled_text
from slipstream.errors import ConfigError

CLASSES = 20  # the most frequent of TREC's 50
MEDIAN, SPREAD = 850, 0.8  # of the number of characters, and of its logarithm
MOST = 20_000  # characters
HEADER = ("text", "class")
LIMIT = 1_024  # the service's default
SOURCES = (
    "a folder with trec/, which has *.label files of lines 'LABEL:fine text', and mr/, which has a "
    "text file for each class, a sentence a line"
)


def long_texts(
    questions: list[Sentence], fillers: list[str], rows: int, rng: random.Random
) -> Iterator[Sentence]:
    """Texts and their classes."""
    classes = [name for name, _ in Counter(name for _, name in questions).most_common(CLASSES)]
    weights = [1 / place for place, _ in enumerate(classes, start=1)]
    by_class = {name: [text for text, own in questions if own == name] for name in classes}
    for name in rng.choices(classes, weights, k=rows):
        wanted = min(int(MEDIAN * rng.lognormvariate(0, SPREAD)), MOST)
        parts = [rng.choice(by_class[name])]
        while sum(len(part) + 1 for part in parts) <= wanted:
            parts.append(rng.choice(rng.choice((by_class[name], fillers))))
        yield " ".join(parts), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help=SOURCES)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the CSV to write")
    parser.add_argument("--rows", type=int, default=5_000, help="5,000 if it is not given")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices")
    args = parser.parse_args()
    if args.rows < 1:
        parser.error(f"argument --rows: {args.rows} is less than 1")
    try:
        questions = list(read_labelled_text(args.data / "trec", fine=True).train)
        fillers = [text for text, _ in read_labelled_text(args.data / "mr").train]
        if not questions or not fillers:
            raise ConfigError(f"{args.data} has no sentences; {SOURCES}")
        found = list(long_texts(questions, fillers, args.rows, random.Random(args.seed)))
        with args.out.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([HEADER, *found])
    except (ConfigError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    sizes = Counter(name for _, name in found).most_common()
    summary = {
        "rows": len(found),
        "longer": sum(len(text) > LIMIT for text, _ in found),
        "longest": max(len(text) for text, _ in found),
        "classes": len(sizes),
        "largest": sizes[0],
        "smallest": sizes[-1],
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
