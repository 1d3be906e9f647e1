"""Typed access to the keys of a JSON file that somebody else wrote."""

import math
from collections.abc import Mapping
from typing import Any

from protocol.errors import CheckpointError


class Keys:
    """Reads keys of `raw`; a missing or mistyped one is a CheckpointError naming file and key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self._where = where

    def named(self, names: tuple[str, ...]) -> str:
        """The first of several names of one fact that is there; the first of all if none is."""
        return next((name for name in names if self._raw.get(name) is not None), names[0])

    def integer(
        self, key: str, *, low: int = 1, high: int = (1 << 31) - 1, default: int | None = None
    ) -> int:
        """An integer in ``low..high``; required unless there is a default."""
        value = self.optional_integer(key, low=low, high=high)
        if value is not None:
            return value
        if default is None:
            raise self._missing(key)
        return default

    def optional_integer(self, key: str, *, low: int = 1, high: int = (1 << 31) - 1) -> int | None:
        """An integer in ``low..high``, or None where the key is absent or null."""
        value = self._raw.get(key)
        if value is None:
            return None
        # bool is an int in Python, and never a size.
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(key, value, f"an integer in {low}..{high}")
        return value

    def number(self, key: str) -> float:
        """A positive finite number; required."""
        value = self.optional_number(key)
        if value is None:
            raise self._missing(key)
        return value

    def optional_number(self, key: str, *, low: float | None = None) -> float | None:
        """A positive finite number, or from `low` on; None where the key is absent or null."""
        value = self._raw.get(key)
        if value is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or (value <= 0 if low is None else value < low):
            expected = "a positive number" if low is None else f"a number from {low:g} on"
            raise self._wrong(key, value, expected)
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean."""
        value = self._raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str) -> str:
        """A string; required."""
        value = self.optional_text(key)
        if value is None:
            raise self._missing(key)
        return value

    def optional_text(self, key: str) -> str | None:
        """A string, or None where the key is absent or null."""
        value = self._raw.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def choice(self, key: str, known: tuple[str, ...]) -> str | None:
        """One of the `known` strings, or None where the key is absent or null."""
        value = self.optional_text(key)
        if value is not None and value.removeprefix("torch.") not in known:
            raise self._wrong(key, value, f"one of {', '.join(known)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty where the key is absent or null."""
        value = self._raw.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of strings")
        return tuple(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """An object; empty where the key is absent or null."""
        value = self._raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return dict(value)

    def ids(self, key: str, *, high: int) -> tuple[int, ...]:
        """Token ids: one integer or a list of them; empty where the key is absent or null."""
        value = self._raw.get(key)
        if value is None:
            return ()
        listed = value if isinstance(value, list) else [value]
        for item in listed:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= high:
                raise self._wrong(key, value, f"token ids in 0..{high}")
        return tuple(listed)

    def _missing(self, key: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: key `{key}` is missing")

    def _wrong(self, key: str, value: object, expected: str) -> CheckpointError:
        found = repr(value)
        found = found if len(found) <= 60 else found[:57] + "..."
        return CheckpointError(f"{self._where}: key `{key}` is {found}; expected {expected}")
