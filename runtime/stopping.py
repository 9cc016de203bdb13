"""Strings that end an answer, found in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from deltafin.errors import BadRequest

MOST_STOPS = 4


class StopStrings:
    """Shows text up to the first stop string, which is never shown, and says when it has come.

    First is the one that is complete first: the text so far decides, and nothing more has to be computed to know. Of
    several that end with the same character, the longest goes. What may still become a stop string is held back, and
    nothing else; so however the text is cut into pieces, the same comes out. Time is linear in the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
            raise BadRequest(f"stop is {stops!r}; expected a list of strings")
        if len(stops) > MOST_STOPS:
            raise BadRequest(f"{len(stops)} stop strings; expected at most {MOST_STOPS}")
        if not all(stops):
            raise BadRequest("a stop string is empty; every text contains it, so leave it out")
        # Longest first, because it decides when several are complete.
        self._searches = [_Search(stop) for stop in sorted(set(stops), key=lambda stop: (-len(stop), stop))]
        self._held: deque[str] = deque()  # the characters at the end of the text so far that begin a stop string
        self.matched: str | None = None  # the stop string that has come

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown now, and whether a stop string has come. After that all text is ignored."""
        if self.matched is not None:
            return "", True
        if not self._searches:
            return text, False
        for at, character in enumerate(text):
            complete = [search.stop for search in self._searches if search.push(character)]
            if complete:
                self.matched = complete[0]
                self._held.extend(text[: at + 1])
                shown = self._let_go(len(self.matched))
                self._held.clear()
                return shown, True
        self._held.extend(text)
        return self._let_go(max(search.length for search in self._searches)), False

    def finish(self) -> str:
        """The text has ended: what was held back, which was no stop string after all."""
        for search in self._searches:
            search.length = 0
        return self._let_go(0)

    def _let_go(self, keep: int) -> str:
        """All that is held back but the last `keep` characters."""
        return "".join([self._held.popleft() for _ in range(len(self._held) - keep)])


class _Search:
    """Looks for one string, character by character (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0  # of its longest beginning that ends the text so far
        # For each length of a beginning: the length of the next shorter one that ends it.
        self._shorter = [0] * len(stop)
        for end in range(1, len(stop)):
            length = self._shorter[end - 1]
            while length and stop[length] != stop[end]:
                length = self._shorter[length - 1]
            self._shorter[end] = length + (stop[length] == stop[end])

    def push(self, character: str) -> bool:
        """Whether the string is complete with this character. Nothing may be pushed after that."""
        length = self.length
        while length and self.stop[length] != character:
            length = self._shorter[length - 1]
        self.length = length + (self.stop[length] == character)
        return self.length == len(self.stop)
