"""Signed links: used as long as they hold, renewed before they expire, replaced at once when they are refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from deltafin.errors import NetworkError
from deltafin.indexer import Expected, RemoteFiles
from deltafin.indexer.links import Links, expires_at

FILE, SIZE = "shard.bin", 300_000


@pytest.fixture(scope="module")
def server(range_server):
    with range_server.FaultServer(made_up=[(FILE, SIZE, "seed")]) as server:
        yield server


@pytest.fixture
def files(server, quick) -> Iterator[Callable[..., RemoteFiles]]:
    opened = []

    def start(mode: str, policy=quick, **args) -> RemoteFiles:
        server.set_mode(mode, **args)
        opened.append(RemoteFiles(f"{server.url}/some/model/resolve/main", None, policy))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def read(files: RemoteFiles, offset: int = 1000, nbytes: int = 5000) -> bytes:
    buffer = bytearray(nbytes)
    files.read_into(FILE, offset, memoryview(buffer), Expected(file_nbytes=SIZE))
    return bytes(buffer)


def rows(server, host: str) -> list[dict]:
    return [row for row in server.state.log if row["host"] == host]


# ---- what a link says of itself -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "when"),
    [
        ("Expires=1700000000&Signature=x", 1_700_000_000),
        ("Expires=1700000000.125", 1_700_000_000.125),
        ("X-Amz-Date=20231114T221320Z&X-Amz-Expires=3600&X-Amz-Signature=x", 1_700_003_600),
        ("X-Goog-Date=20231114T221320Z&X-Goog-Expires=60", 1_700_000_060),
        ("X-Amz-Date=20231114T221320Z&X-Amz-Expires=3600&Expires=1700000500", 1_700_000_500),
        ("Signature=x", None),
        ("", None),
        ("Expires=soon", None),
        ("Expires=-5", None),
        ("Expires=1e9", None),
        ("Expires=nan", None),
        ("Expires=", None),
        ("Expires=" + "9" * 400, None),
        ("X-Amz-Expires=3600", None),
        ("X-Amz-Date=yesterday&X-Amz-Expires=3600", None),
        ("X-Amz-Date=20231399T221320Z&X-Amz-Expires=3600", None),
        ("X-Amz-Date=20231114T221320Z&X-Amz-Expires=%C2%B2", None),
    ],
)
def test_a_link_says_when_it_expires_or_nothing_is_believed(query, when):
    assert expires_at(f"https://cdn.invalid/x?{query}") == when


@pytest.fixture
def clock(monkeypatch) -> Callable[[float], None]:
    """`clock(seconds)` lets so much time pass for links."""
    now = 5000.0
    monkeypatch.setattr("deltafin.indexer.links.time.monotonic", lambda: now)

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    return advance


@pytest.mark.parametrize(
    ("life_s", "used_s"),
    [(3600, 3570), (100, 90), (10, 9)],
    ids=["an hour: half a minute before", "less: a tenth before", "seconds"],
)
def test_a_link_is_used_until_shortly_before_it_expires(clock, life_s, used_s):
    """By the server's clock, which may be another than ours."""
    links, server_now = Links(), 1_700_000_000.0
    links.keep("f", f"http://cdn/f?Expires={server_now + life_s:.0f}", server_now)
    clock(used_s - 0.5)
    assert links.get("f") is not None
    clock(1)
    assert links.get("f") is None


@pytest.mark.parametrize("query", ["", "?Signature=x", "?Expires=1600000000"], ids=["none", "unsaid", "clock differs"])
def test_a_link_without_a_usable_date_is_used_until_it_is_refused(clock, query):
    links = Links()
    links.keep("f", f"http://cdn/f{query}", 1_700_000_000.0)
    clock(1e9)
    assert links.get("f") is not None


def test_using_a_link_again_does_not_make_it_younger(clock):
    links, url = Links(), "http://cdn/f?Expires=1700000100"
    links.keep("f", url, 1_700_000_000.0)
    clock(80)
    links.keep("f", url, None)
    clock(11)
    assert links.get("f") is None


def test_a_refusal_of_an_old_link_does_not_lose_the_new_one():
    links = Links()
    links.keep("f", "http://cdn/old", None)
    links.keep("f", "http://cdn/new", None)
    links.forget("f", "http://cdn/old")
    assert links.get("f") == "http://cdn/new"
    links.forget("f", "http://cdn/new")
    assert links.get("f") is None


# ---- over the wire --------------------------------------------------------------------------------


def unsaid(h, req):
    """Links die as told by life=, but do not say when: the date is in the signature's own words."""
    if h.role == "hub":
        number = len([row for row in h.state.log if row["host"] == "hub"])
        return h.reply(302, {**h.hub_headers(req), "Location": f"{h.state.cdn_base}/{FILE}?n={number}"}, b"", req.head)
    return h.good(req)


@pytest.fixture
def dying(behave, range_server, monkeypatch) -> Callable[[Callable[[str], bool]], None]:
    """`dying(lives)`: links do not say when they expire; the CDN answers those for which `lives(number)` holds."""

    def install(lives: Callable[[str], bool]) -> None:
        behave("unsaid", unsaid)

        def refusal(handler, name, query):
            return None if lives(query.get("n", "")) else (403, "expired")

        monkeypatch.setattr(range_server.Handler, "_cdn_refusal", refusal)

    return install


def test_an_expired_link_is_replaced_at_once(files, server, dying, quick):
    """Nothing is wrong with anybody: there is nothing to wait for."""
    dead: set[str] = set()
    dying(lambda number: number not in dead)
    remote = files("unsaid", policy=replace(quick, backoff_s=5, max_backoff_s=5))
    read(remote)
    dead.add("1")
    begun = time.monotonic()
    assert read(remote) == server.state.catalogue.find(FILE).read(1000, 5000)
    assert time.monotonic() - begun < 2
    assert [row["status"] for row in server.state.log] == [302, 206, 403, 302, 206]


def test_a_fresh_link_that_is_refused_is_no_reason_to_hurry(files, server, dying, quick):
    dead = {"2"}
    dying(lambda number: number not in dead)
    remote = files("unsaid", policy=replace(quick, backoff_s=0.4, max_backoff_s=0.4))
    read(remote)
    dead.add("1")
    begun = time.monotonic()
    read(remote)
    assert time.monotonic() - begun > 0.2
    assert [row["status"] for row in server.state.log] == [302, 206, 403, 302, 403, 302, 206]


def test_links_that_are_all_refused_end_soon_and_say_so(files, server, dying):
    dying(lambda number: False)
    begun = time.monotonic()
    with pytest.raises(NetworkError, match=r"gave up after 5 attempts \(the link that the hub gave was refused with"):
        read(files("unsaid"))
    assert time.monotonic() - begun < 5
    assert len(server.state.log) == 10


def test_links_that_serve_one_range_each_are_followed_without_a_wait_each(files, server, dying, quick):
    used: dict[str, int] = {}

    def once(number: str) -> bool:
        used[number] = used.get(number, 0) + 1
        return used[number] == 1

    dying(once)
    remote = files("unsaid", policy=replace(quick, backoff_s=5, max_backoff_s=5))
    begun = time.monotonic()
    for number in range(6):
        read(remote, 1000 * number, 1000)
    assert time.monotonic() - begun < 3


def test_a_link_that_says_when_it_expires_is_renewed_before(files, server):
    """No request is refused, and no more are asked for than lifetimes pass."""
    remote = files("redirect_cross_host_expiring", life=2)
    begun = time.monotonic()
    while time.monotonic() - begun < 2.6:
        read(remote, nbytes=500)
        time.sleep(0.02)
    assert {row["status"] for row in rows(server, "cdn")} == {206}
    assert 2 <= len(rows(server, "hub")) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("stated", [True, False], ids=["renewed before", "refused"])
def test_two_hundred_spans_with_links_that_live_for_a_second(files, server, behave, range_server, stated):
    """Four workers and a slow CDN, so that several lifetimes pass."""

    def unstated(h, req):
        if h.role == "hub":  # a name of its own hides when it expires
            location = h.cdn_location(FILE).replace("Expires=", "Until=")
            return h.reply(302, {**h.hub_headers(req), "Location": location}, b"", req.head)
        return range_server.MODES["redirect_cross_host_expiring"](h, req)

    behave("unstated", unstated)
    real = range_server.Handler._cdn_refusal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            range_server.Handler,
            "_cdn_refusal",
            lambda h, name, query: real(h, name, {**query, "Expires": query.get("Until", query.get("Expires"))}),
        )
        remote = files("redirect_cross_host_expiring" if stated else "unstated", life=1, delay=0.08)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: read(remote, i * 1000, 1000), range(200)))
    refused = [row for row in rows(server, "cdn") if row["status"] == 403]
    assert len([row for row in rows(server, "cdn") if row["status"] == 206]) == 200
    assert len(rows(server, "hub")) < 30 and len(refused) < 30
    assert refused or stated


def test_many_threads_ask_the_hub_once_and_again_when_the_link_ends(files, server, dying):
    dead: set[str] = set()
    dying(lambda number: number not in dead)
    remote = files("unsaid")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: read(remote, i * 100, 100), range(40)))
        assert len(rows(server, "hub")) == 1
        dead.add("1")
        list(pool.map(lambda i: read(remote, i * 100, 100), range(40)))
    assert len(rows(server, "hub")) == 2
    assert len([row for row in rows(server, "cdn") if row["status"] == 403]) <= 8


def test_a_silent_hub_does_not_keep_the_threads_waiting_one_after_the_other(server, behave, quick):
    behave("silent", lambda h, req: time.sleep(3))
    server.set_mode("silent")
    policy = replace(quick, attempts=1, first_contact_attempts=1, read_timeout_s=1.2)
    remote = RemoteFiles(f"{server.url}/some/model/resolve/main", None, policy)
    begun = time.monotonic()
    with ThreadPoolExecutor(6) as pool:
        reads = [pool.submit(read, remote) for _ in range(6)]
        for one in reads:
            with pytest.raises(NetworkError, match="fell silent"):
                one.result()
    remote.close()
    assert time.monotonic() - begun < 3.5, "six times as long, one after the other"


# ---- the hub's quota ------------------------------------------------------------------------------


def test_the_hub_is_left_alone_once_its_quota_is_spent_and_links_go_on_working(files, server, behave, caplog):
    """A good answer says that it was the last: the next would be refused, and is not sent."""

    def last(h, req):
        if h.role == "cdn":
            return h.good(req)
        headers = {**h.hub_headers(req), "RateLimit": '"resolvers";r=0;t=1', "Location": h.cdn_location(FILE)}
        return h.reply(302, headers, b"", req.head)

    behave("last", last)
    remote = files("last", life=60)
    begun = time.monotonic()
    for _ in range(5):
        read(remote)
    assert time.monotonic() - begun < 0.9 and not caplog.records, "the link needs no hub"
    remote._links.forget(FILE, remote._links.get(FILE))
    read(remote)
    first, second = (row["t"] for row in rows(server, "hub"))
    assert second - first > 0.95
    assert remote.stats.pauses == 0
    assert "quota of requests is spent; asking it again in 1 s" in caplog.text


def test_a_quota_that_is_not_spent_is_no_reason_to_wait(files, server, behave):
    def plenty(h, req):
        headers = {**h.hub_headers(req), "RateLimit": '"resolvers";r=2999;t=300', "Content-Range": req.content_range()}
        return h.reply(206, headers, req.body(), req.head)

    behave("plenty", plenty)
    begun = time.monotonic()
    for _ in range(3):
        read(files("plenty"))
    assert time.monotonic() - begun < 2
