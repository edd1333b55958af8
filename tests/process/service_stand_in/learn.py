"""A stand-in with the contract of ``learn``: counts words, an update every 20 ms.

If there is a file SERVICE_HOLD, it waits at the percent that the file says.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from slipstream.apps.service.rows import WHOLE, read
from slipstream.runtime.files.whole_files import write_whole


def is_held(update: int, total: int) -> bool:
    try:
        upto = int(Path(os.environ["SERVICE_HOLD"]).read_text() or "0")  # empty: being written
    except FileNotFoundError:
        return False
    return 100 * update > upto * total


def main() -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    directory = Path(sys.argv[1])
    job = json.loads((directory / "job.json").read_bytes())
    rows = read([(directory / "data.csv").read_bytes()], job["cut_to"] or WHOLE)
    if rows.texts[0] == "refuse me":
        print("refused: the model would be too large", file=sys.stderr)
        sys.exit(3)
    if rows.texts[0] == "die":
        print("a line that says why", file=sys.stderr)
        sys.exit(1)
    state = directory / "checkpoints" / "stand_in"
    done = int(state.read_text()) if state.exists() else 0
    state.parent.mkdir(exist_ok=True)
    draft = state.with_suffix(".draft")
    total = job["epochs"] * 10
    for update in range(done + 1, total + 1):
        time.sleep(0.02)
        while is_held(update, total):
            time.sleep(0.02)
        # Whole or not at all, for a kill may come at any moment; no fsync, which has its own pace.
        draft.write_text(str(update))
        draft.replace(state)
        line = {
            "updates": update,
            "total": total,
            "epoch": (update - 1) // 10,
            "epochs": job["epochs"],
            "samples_s": 100.0,
            "loss": 1 / update,
            "accuracy": None,
            "held_accuracy": None,
            "at": time.time_ns() // 1_000_000,
        }
        with (directory / "progress.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    words: dict[str, list[str]] = {label: [] for label in rows.labels}
    for text, classes in zip(rows.texts, rows.classes, strict=True):
        for number in classes:
            words[rows.labels[number]] += text.lower().split()
    write_whole(directory / "model.safetensors", [json.dumps({"words": words}).encode()])
    write_whole(directory / "report.json", [b'{"accuracy": 0.75, "per_class": []}'])


if __name__ == "__main__":
    main()
