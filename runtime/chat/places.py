"""Where in an answer its text stands, and where a tag leads from there."""

from __future__ import annotations

from enum import Enum


class Place(Enum):
    """The innermost open element, by its name; or none, or the end of the message."""

    OUTSIDE = "message"
    THINK = "think"
    RESPONSE = "response"
    TOOLS = "tools"
    CALL = "call"
    ARGUMENT = "argument"
    JSON = "json"
    AFTER = ""


VALUES = (Place.ARGUMENT, Place.JSON)
IN_CALL = (Place.CALL, *VALUES)
IN_TOOLS = (Place.TOOLS, *IN_CALL)


def opened(place: Place, name: str) -> Place | None:
    """Where the opening tag leads; None for one that means nothing there, which leaves no trace.

    The model may leave out closing tags: what cannot stand inside an open element ends it.
    """
    if place is Place.AFTER:
        return None
    match name:
        case "think":
            return Place.THINK
        case "response":
            return Place.RESPONSE
        case "tools":
            return Place.TOOLS
        case "message":
            return Place.OUTSIDE
        case "call" if place in IN_TOOLS:
            return Place.CALL
        case "argument" if place in IN_CALL:
            return Place.ARGUMENT
        case "json" if place in IN_CALL:
            return Place.JSON
    return None


def closed(place: Place, name: str) -> Place | None:
    """Where the closing tag leads; None for one that closes nothing."""
    match name:
        case "think" if place is Place.THINK:
            return Place.OUTSIDE
        case "response" if place in (Place.RESPONSE, Place.THINK):  # an answer written where it was to think
            return Place.OUTSIDE
        case "tools" if place in IN_TOOLS:
            return Place.OUTSIDE
        case "call" if place in IN_CALL:
            return Place.TOOLS
        case "argument" | "json" if place in VALUES:
            return Place.CALL
        case "message" if place is not Place.AFTER:
            return Place.AFTER
    return None
