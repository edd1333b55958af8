"""A table of a TOML file, read key by key: errors give the file, the key and the fix."""

from __future__ import annotations

import tomllib
from typing import Any

from slipstream.errors import ConfigError
from slipstream.printable import printable, shown
from slipstream.units import bits_per_second

MOST_DOTS = 512  # per line: tomllib's time grows with the square of a key's parts
MOST_LETTERS = 100  # of a name
MOST_NUMBER = 1e6


class TomlTable:
    """A table and its place in the file; ``done`` refuses keys that were not read."""

    def __init__(self, content: dict[str, Any], source: str, path: str = "") -> None:
        self.content = content
        self.source = source
        self.path = path
        self.asked: list[str] = []

    @classmethod
    def parse(cls, text: str, source: str) -> TomlTable:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.count(".") > MOST_DOTS:
                raise ConfigError(
                    f"{printable(source)}, line {number}: more than {MOST_DOTS} dots; break the "
                    "line, such as after every row of numbers"
                )
        try:
            return cls(tomllib.loads(text), source)
        except ValueError as error:
            raise ConfigError(printable(f"{source} is not TOML: {error}")) from error
        except RecursionError as error:
            raise ConfigError(
                f"{printable(source)}: lists or tables are nested too deep; no key needs more than "
                "two levels"
            ) from error

    def refusal(self, key: str, message: str) -> ConfigError:
        return ConfigError(printable(f"{self.source}: {self._name(shorter(key))}: {message}"))

    def __contains__(self, key: str) -> bool:
        return key in self.content

    def text(self, key: str, default: str) -> str:
        value = self._take(key, default)
        if not isinstance(value, str) or not value:
            raise self.refusal(key, f"{shown(value)} is no name; write it in quotation marks")
        if not value.isprintable() or len(value) > MOST_LETTERS:
            problem = f"{shown(value)} is no name: give at most {MOST_LETTERS} printable letters"
            raise self.refusal(key, problem)
        return value

    def number(self, key: str, default: float) -> float:
        value = self._take(key, default)
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or not 0 <= value <= MOST_NUMBER:
            problem = f"{shown(value)} is no number of 0 or more, up to {MOST_NUMBER:g}"
            raise self.refusal(key, f"{problem}; write {default}, say")
        return float(value)

    def rate(self, key: str, default: float | None = None) -> float | None:
        """Read a rate in bits/s; ``"none"`` means no limit; a missing key gives the default."""
        value = self._take(key, default)
        if value is None or value == "none":
            return None
        return self.as_rate(key, value)

    def as_rate(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.refusal(key, f'{shown(value)} is no rate; write "200mbit" or "1gbit"')
        try:
            return bits_per_second(value)
        except ConfigError as error:
            raise self.refusal(key, str(error)) from error

    def list(self, key: str) -> list[Any]:
        value = self._take(key, [])
        if not isinstance(value, list):
            raise self.refusal(key, f"{shown(value)} is no list; write it in square brackets")
        return value

    def table(self, key: str) -> TomlTable:
        value = self._take(key, {})
        if not isinstance(value, dict):
            raise self.refusal(key, f"{shown(value)} is no table; write [{self._name(key)}]")
        return TomlTable(value, self.source, self._name(key))

    def tables(self, key: str) -> tuple[TomlTable, ...]:
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.refusal(key, f"is no list of tables; write [[{self._name(key)}]] for each")
        return tuple(
            TomlTable(one, self.source, f"{self._name(key)}[{index}]")
            for index, one in enumerate(value)
        )

    def done(self) -> None:
        for key in self.content:
            if key not in self.asked:
                known = ", ".join(sorted(self.asked))
                raise self.refusal(key, f"unknown key; known here: {known}")

    def _take(self, key: str, default: Any) -> Any:
        self.asked.append(key)
        return self.content.get(key, default)

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def shorter(name: str) -> str:
    return name if len(name) <= MOST_LETTERS else name[:MOST_LETTERS] + "…"
