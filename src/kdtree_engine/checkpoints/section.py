"""Typed access to one object of a config.json, with errors that name the file and the key."""

from __future__ import annotations

from typing import Any

from kdtree_engine.errors import ConfigError, shown


class Section:
    """One JSON object and where it stands: `where` is a file's path, `prefix` e.g. "text_config.".

    A key that is present with the value null counts as absent. Every method raises ConfigError:
    for an absent key where no default is given, or for a value of the wrong type or range.
    """

    def __init__(self, data: dict[str, Any], where: str, prefix: str = "") -> None:
        self.data = data
        self.where = where
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def error(self, key: str, text: str) -> ConfigError:
        """An error about `key`, to be raised by the caller."""
        return ConfigError(f'{self.where}: "{self.prefix}{key}" {text}')

    def section(self, key: str) -> Section:
        """The object under `key`."""
        value = self._get(key)
        if not isinstance(value, dict):
            raise self.error(key, f"is {shown(value)}, expected an object")
        return Section(value, self.where, f"{self.prefix}{key}.")

    def size(
        self, key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1
    ) -> int:
        """A whole number from `least` to `most`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            wanted = f"a whole number of at least {least}"
            if isinstance(value, int) and value > most:
                wanted = f"at most {most}"
            raise self.error(key, f"is {shown(value)}, expected {wanted}")
        return value

    def number(self, key: str, default: float | None = None, positive: bool = True) -> float:
        """A finite number, greater than zero unless `positive` is False."""
        value = self._get(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        # The bound comes first: a whole number of hundreds of digits is no float at all.
        if not good or not abs(value) < 1e300 or (positive and value <= 0):
            kind = "positive number" if positive else "finite number"
            raise self.error(key, f"is {shown(value)}, expected a {kind}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {shown(value)}, expected true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {shown(value)}, expected a string")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Non-negative whole numbers: one, a list of them, or () where the key is absent."""
        value = self.data.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in values):
            raise self.error(key, f"is {shown(value)}, expected whole numbers of at least 0")
        return tuple(values)

    def one_id(self, key: str) -> int | None:
        """A non-negative whole number, or None where the key is absent."""
        return self.size(key, least=0) if key in self else None

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, or () where the key is absent."""
        value = self.data.get(key)
        values = [] if value is None else value
        if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
            raise self.error(key, f"is {shown(value)}, expected a list of strings")
        return tuple(values)

    def must_be(self, key: str, *allowed: Any) -> None:
        """Refuse a value that the engine does not implement; an absent key is fine."""
        value = self.data.get(key)
        if value is not None and value not in allowed:
            known = ", ".join(repr(one) for one in allowed) or "no value"
            raise self.error(key, f"is {shown(value)}; supported: {known}")

    def _get(self, key: str, default: Any = None) -> Any:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value
