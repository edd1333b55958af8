"""What the service refuses: a short fixed word for programs, a sentence for people."""

from __future__ import annotations

from slipstream.errors import ConfigError


class Refused(ConfigError):
    """An input that cannot be used; nothing of it is kept.

    Args:
        error: Short and fixed, such as "Malformed data".
        description: What is wrong, where, and the way out.

    >>> Refused("Data too small", "The number of training entries received = 4").error
    'Data too small'
    """

    def __init__(self, error: str, description: str) -> None:
        self._error, self._description = error, description
        super().__init__(f"{error}: {description}")

    @property
    def error(self) -> str:
        """Short and fixed."""
        return self._error

    @property
    def description(self) -> str:
        """What is wrong, where, and the way out."""
        return self._description

    def __reduce__(self) -> tuple[type[Refused], tuple[str, str]]:
        return type(self), (self._error, self._description)


class Damaged(ConfigError):
    """A model file that cannot be used.

    Args:
        reason: Why; it names no path, so that it may be shown to users.

    >>> str(Damaged("it is cut off"))
    'it is cut off'
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def malformed(description: str) -> Refused:
    """Training data that is no CSV of texts and classes.

    >>> malformed("It has a NUL character: line 3.").error
    'Malformed data'
    """
    return Refused("Malformed data", description)
