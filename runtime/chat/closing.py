"""An answer that was cut, made a whole message, so that the conversation can go on after it.

What the model wrote has been computed and stays; only what is missing is added.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deltafin.runtime.chat import wire
from deltafin.runtime.chat.places import Place, closed, opened
from deltafin.runtime.chat.wire import Control, Piece

# What may be opened there, likeliest first.
_INSIDE = {
    Place.OUTSIDE: ("response", "tools", "think"),
    Place.THINK: ("response", "tools"),
    Place.RESPONSE: ("tools",),
    Place.TOOLS: ("call",),
    Place.CALL: ("argument", "json"),
}


@dataclass(slots=True)
class CutTag:
    """A tag whose separator has not come."""

    control: Control
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


def closing(place: Place, tag: CutTag | None, answered: bool) -> list[Piece]:
    """Pieces that end the tag, close what is open and end the message; one that never answered answers nothing."""
    pieces: list[Piece] = []
    if tag is not None:
        pieces, name = _end_tag(tag, place, answered)
        place = (closed if tag.control == wire.CLOSE else opened)(place, name) or place
        answered |= name == "response" or place is Place.TOOLS
    while place is not Place.AFTER:
        if place is Place.OUTSIDE and not answered:
            pieces += wire.open_tag("response")
            place, answered = Place.RESPONSE, True
            continue
        pieces += wire.close_tag(place.value)
        after = closed(place, place.value)
        assert after is not None  # each place is closed by its own name
        place = after
    return [*pieces, wire.END_OF_MSG]


def _end_tag(tag: CutTag, place: Place, answered: bool) -> tuple[list[Piece], str]:
    """What is missing of a tag, and its name: the likeliest one there that it may become, else what it is."""
    likely = (place.value,) if tag.control == wire.CLOSE else _INSIDE.get(place, ())
    if tag.control == wire.OPEN and place is Place.OUTSIDE and answered:
        likely = likely[1:]
    text = tag.text
    for name in likely:
        if name.startswith(text):
            return [*wire.text(name[len(text) :]), wire.SEP], name
    quote: list[Piece] = ['"'] if text.count('"') % 2 else []
    return [*quote, wire.SEP], wire.read_tag(text)[0]
