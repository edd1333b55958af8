"""What the service refuses: a short fixed word for programs, a sentence for people."""

from __future__ import annotations

from slipstream.errors import ConfigError


class Refused(ConfigError):
    """An input that cannot be used; nothing of it is kept.

    Args:
        error: Short and fixed, such as "Malformed data".
        description: What is wrong, where, and the way out.

    >>> str(Refused("Malformed data", "Line 3 has a NUL character."))
    'Malformed data: Line 3 has a NUL character.'
    """

    def __init__(self, error: str, description: str) -> None:
        super().__init__(error, description)
        self.error, self.description = error, description

    def __str__(self) -> str:
        return f"{self.error}: {self.description}"


class Damaged(ConfigError):
    """A model file that cannot be used. The reason names no path, so that users may see it."""


def malformed(description: str) -> Refused:
    """The refusal of training data that is no CSV of texts and classes."""
    return Refused("Malformed data", description)
