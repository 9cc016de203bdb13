"""Reading a JSON object field by field, strictly: the right type, in range, and nothing left unread."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deltafin.runtime.openai.errors import BadBody

_SHOWN = 60  # characters of a wrong value that a message repeats


class Fields:
    """One JSON object. A field that is null counts as absent; `finish` refuses what nobody has asked for.

    Every error names the field by its path in the body.
    """

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, dict):
            raise BadBody(f"{path or 'the body'} is {shown(value)}; expected an object", path or None)
        self._values: dict[str, object] = value
        self._path = path
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def names(self) -> list[str]:
        return list(self._values)

    def all(self) -> dict[str, object]:
        """The object as it was given; not to be changed."""
        return self._values

    def value(self, name: str) -> object:
        """Whatever it is; the caller checks."""
        self._read.add(name)
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def boolean(self, name: str) -> bool | None:
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")  # NaN is in no range
        return float(value)

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        value = self.text(name)
        if value is not None and value not in allowed:
            raise self.wrong(name, one_of(allowed))
        return value

    def inner(self, name: str) -> Fields | None:
        value = self.value(name)
        return None if value is None else Fields(value, self.path(name))

    def array(self, name: str) -> list[object] | None:
        value = self.value(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def only(self, name: str, allowed: Collection[object], why: str) -> None:
        """A field that may be there if it asks for nothing: with one of these values."""
        value = self.value(name)
        if value is not None and not any(type(value) in _alike(a) and value == a for a in allowed):
            raise BadBody(f"{self.path(name)} is {shown(value)}; {why}", self.path(name), "unsupported_value")

    def ignore(self, *names: str) -> None:
        """Fields that mean nothing for an answer."""
        self._read.update(names)

    def finish(self) -> None:
        """Refuses what is left: an answer that leaves out what was asked for would be a wrong one."""
        for name, value in self._values.items():
            if name not in self._read and value is not None:
                path = self.path(name if len(name) <= _SHOWN else name[:_SHOWN] + "..")
                raise BadBody(f"{path!r} is not supported here; leave it out", path, "unsupported_parameter")

    def wrong(self, name: str, expected: str) -> BadBody:
        path = self.path(name)
        return BadBody(f"{path} is {shown(self._values.get(name))}; expected {expected}", path)


def one_of(allowed: Sequence[str]) -> str:
    *most, last = (f'"{a}"' for a in allowed)
    return f"{', '.join(most)} or {last}" if most else last


def shown(value: object) -> str:
    """A value of any size in a few words."""
    match value:
        case dict() | list():
            return ("an empty " if not value else "an " if isinstance(value, dict) else "a ") + (
                "object" if isinstance(value, dict) else "list"
            )
        case bool() | None:
            return {True: "true", False: "false", None: "null"}[value]
        case str():
            return repr(value) if len(value) <= _SHOWN else repr(value[:_SHOWN]) + ".."
        case int() if abs(value) >= 10**20:
            return "a number of more than 20 digits"
        case _:
            return repr(value)


def _alike(value: object) -> tuple[type, ...]:
    """Types of JSON values that mean the same: 0 and 0.0, but not 0 and false."""
    return (int, float) if type(value) in (int, float) else (type(value),)
