"""Stop strings: the first to be complete ends the text, however it is cut, and nothing is held back needlessly."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltafin.errors import BadRequest
from deltafin.runtime.stopping import StopStrings


def specified(text: str, stops) -> tuple[str, str | None]:
    """What is shown in all, and the string that ended it: looked up at each character."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def must_hold(text: str, stops) -> int:
    """How many characters at the end of the text begin a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


few = st.text(alphabet="ab\u00e9", max_size=40)
stops_ = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=6), min_size=0, max_size=4)


@settings(max_examples=400, deadline=None)
@given(text=few, stops=stops_, cuts=st.lists(st.integers(0, 40), max_size=8))
@example(text="abcX", stops=["abcX", "bc"], cuts=[2])
@example(text="aabaab!", stops=["aabaaa", "aab!"], cuts=[])
@example(text="ab", stops=["ab", "b"], cuts=[1])
def test_any_cut_shows_what_the_whole_shows(text, stops, cuts):
    shown, matched = specified(text, stops)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    search = StopStrings(stops)
    out, so_far = "", ""
    for begin, end in pairwise(edges):
        piece, stopped = search.push(text[begin:end])
        out += piece
        so_far += text[begin:end]
        ended = specified(so_far, stops)[1] is not None
        assert stopped == ended
        if not ended:  # exactly what may begin a stop string is held back
            assert out == so_far[: len(so_far) - must_hold(so_far, stops)]
    out += search.finish()
    assert (out, search.matched) == (shown, matched)


def test_the_stop_string_and_what_follows_are_not_shown():
    search = StopStrings(["\n\nUser:"])
    assert search.push("Paris.\n") == ("Paris.", False)
    assert search.push("\nUs") == ("", False)
    assert search.push("er: and") == ("", True)
    assert search.push("more") == ("", True)
    assert (search.finish(), search.matched) == ("", "\n\nUser:")


def test_what_was_no_stop_string_after_all_is_shown():
    search = StopStrings(["END"])
    assert search.push("the EN") == ("the ", False)
    assert search.push("D of") == ("", True)
    search = StopStrings(["END"])
    assert search.push("the EN") == ("the ", False)
    assert search.push("TRY E") == ("ENTRY ", False)
    assert search.finish() == "E"
    assert search.push("ND") == ("ND", False)  # a new text


def test_without_stop_strings_everything_is_shown_at_once():
    search = StopStrings([])
    assert search.push("anything") == ("anything", False)
    assert search.finish() == ""


def test_time_is_linear_for_what_is_worst_to_search():
    """A string that nearly matches everywhere: quadratic search would take minutes."""
    search = StopStrings(["a" * 50_000 + "b"])
    begun = time.process_time()
    shown = "".join(search.push("a" * 1000)[0] for _ in range(200)) + search.finish()
    assert shown == "a" * 200_000
    assert time.process_time() - begun < 20


@pytest.mark.parametrize(
    ("stops", "says"),
    [
        ([""], "empty"),
        (["a", ""], "empty"),
        (["a"] * 5, "5 stop strings"),
        ("abc", "list of strings"),
        ([b"a"], "list of strings"),
        ([None], "list of strings"),
    ],
)
def test_stop_strings_that_make_no_sense_are_refused(stops, says):
    with pytest.raises(BadRequest, match=says):
        StopStrings(stops)
