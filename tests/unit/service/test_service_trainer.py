from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from slipstream.service.trainer import Running


def test_the_end_of_a_log_can_be_stored(tmp_path: Path) -> None:
    """PostgreSQL refuses a NUL; the trainer died of that, again and again."""
    log = tmp_path / "train.log"
    log.write_bytes(b"an earlier attempt\nit broke: \xff\0\n")
    running = SimpleNamespace(_log=log, _log_start=19)
    assert Running.log_tail(running) == "it broke: \ufffd\ufffd\n"  # type: ignore[arg-type]
