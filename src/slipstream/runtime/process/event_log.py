"""Life-cycle events through ``logging``: one line per event, with fields for grep.

``joined rank=0 size=4 host=10.0.0.1``: the event's name comes first, then its fields. A handler
finds them as data on the record, as ``record.event`` and ``record.fields``.
"""

from __future__ import annotations

import json
import logging

Field = str | int | float | bool | None


def log_event(
    logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: Field
) -> None:
    """Log one event; fields appear in the order in which they are given."""
    if logger.isEnabledFor(level):
        text = " ".join((event, *(f"{name}={shown(value)}" for name, value in fields.items())))
        logger.log(level, "%s", text, extra={"event": event, "fields": fields}, stacklevel=2)


def shown(value: Field) -> str:
    """Return a field's value without spaces outside of quotes, and without control characters.

    >>> print(shown("ako"), shown("rank 2"), shown(5.125), shown(None))
    ako "rank 2" 5.125 none
    """
    if isinstance(value, str):
        plain = value.isascii() and value.isprintable() and not set(value) & set(' "=')
        return value if value and plain else json.dumps(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "none" if value is None else str(value)
