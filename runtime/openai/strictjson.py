"""JSON as the standard has it: no NaN, no name twice in an object, no endless nesting, and one line when written."""

from __future__ import annotations

import codecs
import json
from typing import NoReturn

from deltafin.errors import BadRequest

# Python's own limit counts the callers, too: what just passes here would fail where more of them read it again.
MOST_DEPTH = 200  # objects and lists inside of one another

# Where other programs end a line, besides at the newline.
_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}


def parse(raw: bytes) -> object:
    """The value of a JSON text. Raises BadRequest that says where it is none."""
    if raw.startswith(codecs.BOM_UTF8):
        raise BadRequest("a byte order mark stands before it; save the file as UTF-8 without one")
    try:
        value: object = json.loads(raw.decode(), parse_constant=_refuse, object_pairs_hook=_object)
    except UnicodeDecodeError as e:
        raise BadRequest(f"not UTF-8 (byte {e.start})") from None
    except json.JSONDecodeError as e:
        raise BadRequest(f"not JSON ({e.msg} at character {e.pos})") from None
    except ValueError:  # of an integer with thousands of digits
        raise BadRequest("not JSON that can be read (a number is too long)") from None
    except RecursionError:
        raise _too_deep() from None
    if not _is_shallow(value):
        raise _too_deep()
    return value


def write_line(value: object) -> bytes:
    """A value as one line with its newline. No program that reads lines can see two in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half of a surrogate pair, which a request may have in a name, has no UTF-8; its escape is the same in JSON.
    return (text.translate(_LINE_ENDS) + "\n").encode(errors="backslashreplace")


def _is_shallow(value: object) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_DEPTH):
        inner = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return True
    return False


def _too_deep() -> BadRequest:
    return BadRequest(f"not JSON that can be read (nested more than {MOST_DEPTH} deep)")


def _refuse(constant: str) -> NoReturn:
    raise BadRequest(f"not JSON ({constant} is no number there)")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise BadRequest(f"{twice[:60]!r} is twice in one object; which of them counts is not said")
    return found
