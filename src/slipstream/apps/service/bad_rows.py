"""What a refusal says of the rows that cannot be used: all of them, not the first alone."""

from __future__ import annotations

from slipstream.apps.service.errors import ApiError

TOO_LONG = "Phrase too long"
MOST_LINES = 20  # that a refusal names


class BadRows:
    """The rows that cannot be used: the reason of the first, the lines of some, and how many."""

    def __init__(self) -> None:
        self._first: ApiError | None = None
        self._lines: list[int] = []
        self._count = 0

    def add(self, line: int, reason: ApiError) -> None:
        """Count a row."""
        self._first = self._first or reason
        self._count += 1
        if self._count <= MOST_LINES:
            self._lines.append(line)

    def refusal(self, within: str, after: str) -> ApiError | None:
        """The reason of the first row; of several, with their lines. None if there is no row.

        ``within`` says which rows were checked, ``after`` why no more were, if not all.
        """
        first = self._first
        if first is None or self._count == 1:
            return first
        lines = ", ".join(f"{line:,}" for line in self._lines)
        some = f"the first {MOST_LINES} at lines" if self._count > MOST_LINES else "at lines"
        reason = f"{first.description} {within}{self._count:,} rows cannot be used, {some} {lines}."
        if after:
            reason += f" The rows after them were not read: {after}"
        if first.error == TOO_LONG:
            reason += " With ?long=cut the service cuts long texts after a word."
        return ApiError(first.error, reason)
