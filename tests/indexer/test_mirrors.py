"""Mirrors: asked in order before the hub, believed in nothing, and passed over when they fail."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deltafin.errors import BadRequest, NetworkError, Refused
from deltafin.indexer import Expected, MirroredFiles, mirror_address

FILE, SIZE, COMMIT = "shard.bin", 300_000, "a" * 40
TOKEN = "hf_dummyTokenThatMustNotBeSeen"


class Place:
    """The hub and mirrors of it, and a client that asks the mirrors first."""

    def __init__(self, hub, mirrors: list, policy) -> None:
        self.hub, self.mirrors = hub, mirrors
        self.files = MirroredFiles(
            [m.url for m in mirrors], f"{hub.url}/some/model/resolve/{COMMIT}", TOKEN, policy
        )  # fmt: skip
        self.entry = hub.state.catalogue.find(FILE)
        self.expected = Expected(SIZE, self.entry.sha256(), COMMIT)

    def read(self, offset: int = 1000, nbytes: int = 50_000):
        buffer = bytearray(nbytes)
        answer = self.files.read_into(FILE, offset, memoryview(buffer), self.expected)
        assert bytes(buffer) == self.entry.read(offset, nbytes)
        return answer

    @property
    def requests(self) -> list[int]:
        """Of each mirror, and last of the hub."""
        return [len(s.state.log) for s in (*self.mirrors, self.hub)]


@pytest.fixture
def place(range_server, quick) -> Iterator[Callable[..., Place]]:
    """`place("ok", "gone_404")` has a mirror for each mode; a dict is the arguments of the mode before it."""
    running: list = []
    opened: list[Place] = []

    def server(mode: str, **args):
        running.append(range_server.FaultServer(made_up=[(FILE, SIZE, "seed")]))
        running[-1].__enter__()
        running[-1].set_mode(mode, **args)
        return running[-1]

    def start(*modes: str | dict, policy=quick) -> Place:
        mirrors = []
        for mode in modes:
            if isinstance(mode, dict):
                mirrors[-1].set_mode(mirrors[-1].state.mode, **mode)
            else:
                mirrors.append(server(mode))
        opened.append(Place(server("ok"), mirrors, policy))
        return opened[-1]

    yield start
    for one in opened:
        one.files.close()
    for one in running:
        one.__exit__(None, None, None)


@pytest.fixture
def later(monkeypatch) -> Callable[[float], None]:
    """`later(seconds)` lets time pass for mirrors that were passed over."""
    ahead = 0.0
    real = time.monotonic
    monkeypatch.setattr("deltafin.indexer.mirrors.time.monotonic", lambda: real() + ahead)

    def pass_(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    return pass_


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("deltafin")]


# ---- who is asked ---------------------------------------------------------------------------------


def test_while_the_first_mirror_is_fine_nobody_else_is_asked(place):
    p = place("ok", "ok")
    for number in range(5):
        assert p.read(number * 1000).mirror == 0
    assert p.requests == [5, 0, 0]
    assert {row["path"] for row in p.mirrors[0].state.log} == {f"/{FILE}"}


def test_the_counters_count_everybodys_requests(place):
    p = place("gone_404", "ok")
    p.read()
    stats = p.files.stats
    assert (stats.requests, stats.ranges, stats.nbytes) == (2, 1, 50_000)


FAILING = {
    "gone_404": {}, "gated_401": {}, "truncate": {"keep": 0}, "reset_midway": {}, "wrong_length": {}, "416": {},
    "ignore_range": {}, "gzip_forced": {}, "no_content_range": {}, "wrong_content_range": {}, "redirect_loop": {},
    "503_burst": {"times": 99}, "429_retry_after": {"times": 99, "seconds": 60}, "stall": {"keep": 0, "hold": 3},
    "redirect_cross_host_expiring": {"life": -1},
}  # fmt: skip


@pytest.mark.parametrize("mode", FAILING)
def test_a_mirror_that_fails_is_passed_over_with_one_line(place, caplog, impatient, mode):
    p = place(mode, FAILING[mode], "ok", policy=impatient(mode))
    begun = time.monotonic()
    assert p.read().mirror == 1
    asked = p.requests[0]
    assert p.read(0).mirror == 1
    assert time.monotonic() - begun < 5
    assert p.requests[0] == asked <= 8, "for a minute it is not asked again"
    assert p.requests[2] == 0
    assert p.mirrors[0].stats()["bytes_sent"] <= 3 * SIZE
    (line,) = warnings(caplog)
    assert (
        line.startswith("mirror passed over for 60 s")
        and "127.0.0.1" in line
        and "Signature" not in line
        and "run the same" not in line
    )


def test_a_mirror_that_is_not_there_is_passed_over(place, quick, caplog):
    p = place("ok")
    p.mirrors[0].__exit__(None, None, None)
    assert p.read().mirror is None
    assert p.requests[-1] == 1
    assert "no answer in 2 attempts" in warnings(caplog)[0]


def test_a_mirror_that_asks_to_wait_is_not_waited_for(place):
    p = place("429_retry_after", {"seconds": 30, "times": 1})
    begun = time.monotonic()
    assert p.read().mirror is None
    assert time.monotonic() - begun < 2
    assert p.files.pause_left_s == 0
    assert p.requests == [1, 1]


@pytest.mark.parametrize("wrong", ["size", "size unsaid"])
def test_a_file_of_another_size_is_not_the_one_that_was_indexed(place, behave, wrong, caplog):
    def other(h, req):
        said = "*" if wrong == "size unsaid" else SIZE + 1
        return h.reply(206, {"Content-Range": f"bytes {req.start}-{req.end}/{said}"}, req.body(), req.head)

    behave("other", other)
    p = place("other")
    assert p.read().mirror is None
    assert "indexed with 300000" in warnings(caplog)[0] or "does not say how large" in warnings(caplog)[0]


def test_a_mirror_need_not_know_etag_or_commit_and_may_have_its_own(place, behave):
    def own(h, req):
        said = {"Content-Range": req.content_range(), "ETag": '"other"', "X-Repo-Commit": "b" * 40}
        return h.reply(206, said, req.body(), req.head)

    behave("own", own)
    assert place("own").read().mirror == 0
    p = place("mirror_bare")
    assert p.read().mirror == 0
    assert p.read().commit is None, "what it says of itself is not passed on"


def test_a_span_is_never_mixed_of_two_servers_bytes(place, behave):
    """The first sends other bytes and breaks off halfway; the second starts from the span's first byte."""

    def half(h, req):
        h.start_good(req)
        h.push(bytes(req.length // 2))
        h.close_connection = True

    behave("half", half)
    p = place("half", "ok")
    assert p.read().mirror == 1
    assert p.mirrors[1].state.log[0]["range"] == "bytes=1000-50999"


def test_the_hubs_own_failure_is_the_one_that_is_raised(place):
    p = place("gone_404")
    p.hub.set_mode("gated_401")
    p.files._token = None
    with pytest.raises(Refused, match=r"shard\.bin from 127\.0\.0\.1: access refused"):
        p.read()


# ---- afterwards -----------------------------------------------------------------------------------


def test_a_mirror_is_tried_again_after_a_minute_and_later_each_time_it_fails(place, later):
    p = place("503_burst", {"times": 10**6})
    p.read()
    before = p.requests[0]
    for wait_s, tried in ((59, False), (2, True), (118, False), (3, True), (238, False), (3, True)):
        later(wait_s)
        p.read()
        assert (p.requests[0] > before) is tried, wait_s
        before = p.requests[0]
    p.mirrors[0].set_mode("ok")
    later(4000)
    assert p.read().mirror == 0


def test_a_mirror_that_lacks_one_file_still_serves_the_others(range_server, quick, caplog):
    files = [("one.bin", 1000, "1"), ("two.bin", 1000, "2")]
    with (
        range_server.FaultServer(made_up=files[:1]) as mirror,
        range_server.FaultServer(made_up=files) as hub,
    ):
        client = MirroredFiles([mirror.url], f"{hub.url}/some/model/resolve/{COMMIT}", None, quick)
        view = memoryview(bytearray(1000))
        for _ in range(3):
            assert client.read_into("two.bin", 0, view, Expected(file_nbytes=1000)).mirror is None
            assert client.read_into("one.bin", 0, view, Expected(file_nbytes=1000)).mirror == 0
        client.close()
        assert len(mirror.state.log) == 4
    assert len(warnings(caplog)) == 1


def test_bytes_that_the_caller_calls_wrong_are_asked_of_the_next(place, caplog, later):
    p = place("corrupt_byte", "ok")
    buffer = bytearray(1000)

    def fetch():
        return p.files.read_into(FILE, 0, memoryview(buffer), p.expected)

    answer = fetch()
    assert answer.mirror == 0 and bytes(buffer) != p.entry.read(0, 1000)
    assert p.files.blame(answer, "its digest is another")
    answer = fetch()
    assert answer.mirror == 1 and bytes(buffer) == p.entry.read(0, 1000)
    assert p.files.blame(answer, "just so")
    assert fetch().mirror is None
    assert not p.files.blame(fetch(), "the hub's own"), "behind the hub there is nobody"
    first, second = (m.url.removeprefix("http://") for m in p.mirrors)
    assert warnings(caplog) == [
        f"mirror passed over for 60 s ({first}: its digest is another)",
        f"mirror passed over for 60 s ({second}: just so)",
    ]
    later(61)
    assert fetch().mirror == 0


def test_many_threads_say_once_that_a_mirror_is_dead(place, caplog):
    p = place("503_burst", {"times": 10**6})
    threads = [threading.Thread(target=p.read, args=(1000 * i, 1000)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(warnings(caplog)) == 1


def test_stopping_reaches_the_mirrors_and_asks_nobody_else(place, quick):
    p = place("stall", {"hold": 30}, policy=replace(quick, read_timeout_s=30))
    threading.Timer(0.3, p.files.stop).start()
    begun = time.monotonic()
    with pytest.raises(NetworkError):
        p.read()
    assert time.monotonic() - begun < 5
    assert p.requests[-1] == 0


# ---- secrets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ok", "gated_401", "redirect_cross_host_expiring"])
def test_the_token_never_goes_to_a_mirror(place, caplog, mode):
    caplog.set_level(logging.DEBUG, "deltafin")
    p = place(mode, {"life": 60, "strict": 0} if mode.startswith("redirect") else {})
    p.read()
    p.read(0)
    assert not any(row["auth"] for row in p.mirrors[0].state.log)
    assert all(row["auth"] for row in p.hub.state.log)
    assert TOKEN not in caplog.text and "Signature=" not in caplog.text


# ---- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://nas:8080/kimi", "http://nas:8080/kimi"),
        ("http://nas:8080/kimi/", "http://nas:8080/kimi"),
        ("HTTP://NAS/kimi", "HTTP://NAS/kimi"),
        ("https://m.invalid/{repo}/resolve/{commit}", f"https://m.invalid/org/name/resolve/{COMMIT}"),
        ("http://[::1]:8000/x", "http://[::1]:8000/x"),
    ],
)
def test_an_address_has_repository_and_commit_filled_in(text, address):
    assert mirror_address(text, "org/name", COMMIT) == address


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nas:8080/kimi", "must be an address like"),
        ("/data/kimi", "must be an address like"),
        ("ftp://nas/kimi", "must be an address like"),
        ("http://", "must be an address like"),
        ("http://[", "must be an address like"),
        ("http://nas:99999/x", "must be an address like"),
        ("http://na s/x", "must be an address like"),
        ("http://nas/{revision}", "{revision} stands for nothing; use {repo} and {commit}"),
        ("http://nas/{repo", "a brace stands alone"),
        ("http://nas/x?token=secret", "a plain address is needed"),
        ("http://nas/x#y", "a plain address is needed"),
        ("http://user:password@nas/x", "a plain address is needed"),
    ],
)
def test_what_is_no_plain_address_is_a_bad_request_that_shows_no_password(text, complaint):
    with pytest.raises(BadRequest) as refusal:
        mirror_address(text, "org/name", COMMIT)
    assert complaint in str(refusal.value)
    assert "password" not in str(refusal.value).replace("user, password", "")
    assert "secret" not in str(refusal.value)


def test_a_path_with_spaces_or_umlauts_works(range_server, tmp_path: Path, quick):
    folder = tmp_path / "Modell ä"
    folder.mkdir()
    (folder / FILE).write_bytes(b"x" * 1000)
    with range_server.FaultServer(root=str(tmp_path)) as server:
        address = mirror_address(f"{server.url}/Modell%20%C3%A4", "org/name", COMMIT)
        client = MirroredFiles([address], "http://127.0.0.1:1/x", None, quick)
        assert client.read_into(FILE, 0, memoryview(bytearray(1000)), Expected(file_nbytes=1000)).mirror == 0
        client.close()
