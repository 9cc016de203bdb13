"""Ranges over HTTP from servers that misbehave: the exact bytes arrive, or an error says why not, soon."""

from __future__ import annotations

import email.utils
import http.server
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise

import pytest

from deltafin.errors import DeltafinError, NetworkError, Refused
from deltafin.indexer import Expected, RemoteFiles, RetryPolicy

FILE, SIZE = "shard.bin", 300_000
COMMIT = "a" * 40
SPAN = (1_000, 100_000)  # offset, length


class Remote:
    """A file on a server that misbehaves, and a client for it."""

    def __init__(self, server, policy: RetryPolicy, token: str | None = None) -> None:
        self.server = server
        self.files = RemoteFiles(f"{server.url}/some/model/resolve/{COMMIT}", token, policy)
        self.entry = server.state.catalogue.find(FILE)

    def read(self, offset: int, nbytes: int, expected: Expected | None = None) -> bytes:
        buffer = bytearray(nbytes)
        self.files.read_into(FILE, offset, memoryview(buffer), expected or Expected(file_nbytes=self.entry.size))
        return bytes(buffer)

    def true(self, offset: int, nbytes: int) -> bytes:
        return self.entry.read(offset, nbytes)

    def sent(self) -> int:
        """Bytes of bodies that the server has sent, once it sends no more: it counts a moment after sending."""
        before, now = -1, self.server.stats()["bytes_sent"]
        while now != before:
            time.sleep(0.03)
            before, now = now, self.server.stats()["bytes_sent"]
        return now

    def rows(self, host: str | None = None) -> list[dict]:
        return [r for r in self.server.state.log if r["kind"] == "file" and host in (None, r["host"])]


@pytest.fixture(scope="module")
def server(range_server):
    with range_server.FaultServer(made_up=[(FILE, SIZE, "seed")]) as server:
        yield server


@pytest.fixture
def remote(range_server, server, quick) -> Iterator[Callable[..., Remote]]:
    """`remote(mode, **args)` serves 300,000 made-up bytes, or `size`."""
    opened: list[Remote] = []
    others = ExitStack()

    def start(mode: str = "ok", policy: RetryPolicy = quick, token: str | None = None, size: int = SIZE, **args):
        chosen = server
        if size != SIZE:
            chosen = others.enter_context(range_server.FaultServer(made_up=[(FILE, size, "seed")]))
        chosen.set_mode(mode, **args)
        opened.append(Remote(chosen, policy, token))
        return opened[-1]

    with others:
        yield start
        for r in opened:
            r.files.close()


# ---- every mode of the server ---------------------------------------------------------------------

OVERCOME = {
    "ok": {},
    "ignore_range": {},
    "truncate": {},
    "reset_midway": {},
    "wrong_length": {},
    "short_206": {},
    "redirect_cross_host_expiring": {"life": 60},
    "429_retry_after": {"seconds": 0.05},
    "503_burst": {},
    "slow_drip": {"bytes": 30_000, "every": 0.01},
    "stall": {"hold": 3},
    "gzip_range": {},
    "gzip_forced": {},
    "416": {},
    "no_content_range": {},
    "wrong_content_range": {},
    "mirror_bare": {},
}
# Without end; what the error says of it.
HOPELESS = {
    "ignore_range": ({}, NetworkError, "ignored the range"),
    "truncate": ({}, NetworkError, "broke off"),
    "reset_midway": ({}, NetworkError, "broke off|reset"),
    "wrong_length": ({}, NetworkError, "of 99[0-9]{3} bytes are missing|of 100000 bytes are missing"),
    "redirect_cross_host_expiring": ({"life": 0}, NetworkError, "link that the hub gave was refused with status 403"),
    "redirect_loop": ({}, Refused, "redirects without end"),
    "429_retry_after": ({"seconds": 0.01, "times": 1000}, NetworkError, "status 429"),
    "503_burst": ({"times": 1000}, NetworkError, "status 503"),
    "stall": ({"keep": 0, "hold": 3}, NetworkError, "fell silent"),
    "gzip_forced": ({}, NetworkError, "encoded as 'gzip' although identity was asked for"),
    "416": ({}, NetworkError, "status 416 for bytes 1000 to 100999"),
    "no_content_range": ({}, NetworkError, "206 without a usable Content-Range"),
    "wrong_content_range": ({}, NetworkError, "asked for bytes 1000 to 100999, got 488 to 100487"),
    "gated_401": ({}, Refused, r"access refused \(status 401\); set HF_TOKEN"),
    "gone_404": ({}, Refused, r"no such file on the server \(status 404\)"),
}
# Only contents tell, and a range has no digest of its own: see test_sources.py and the store.
INVISIBLE = {"corrupt_byte", "zero_tail"}
TESTED_BELOW = {"etag_change"}


def test_every_mode_of_the_server_is_tried_here(range_server):
    assert len(range_server.MODES) >= 23
    assert set(OVERCOME) | set(HOPELESS) | INVISIBLE | TESTED_BELOW >= set(range_server.MODES)


@pytest.mark.parametrize("mode", OVERCOME)
def test_a_fault_that_passes_is_overcome_and_the_bytes_are_exact(remote, impatient, mode):
    r = remote(mode, impatient(mode), **{"times": 2, **OVERCOME[mode]})
    assert r.read(*SPAN) == r.true(*SPAN)
    assert r.read(SIZE - 700, 700) == r.true(SIZE - 700, 700)
    assert {row["accept_encoding"] for row in r.rows()} == {"identity"}
    assert r.files.stats.requests == len(r.rows()) < 12


@pytest.mark.parametrize("mode", HOPELESS)
def test_a_fault_without_end_is_an_error_soon_that_names_file_and_cause(remote, impatient, mode):
    args, error, cause = HOPELESS[mode]
    r = remote(mode, impatient(mode), **args)
    start = time.monotonic()
    with pytest.raises(error, match=cause) as refusal:
        r.read(*SPAN)
    assert time.monotonic() - start < 10
    assert str(refusal.value).startswith("shard.bin from 127.0.0.1: ")
    assert "\n" not in str(refusal.value)
    assert len(r.rows()) <= 40


def test_a_server_that_always_sends_less_than_asked_but_says_so_is_followed_to_the_end(remote):
    r = remote("short_206")
    assert r.read(*SPAN) == r.true(*SPAN)
    starts = [int(row["range"].removeprefix("bytes=").split("-")[0]) for row in r.rows()]
    assert starts == sorted(set(starts))
    assert r.sent() == SPAN[1]


@pytest.mark.parametrize("mode", ["truncate", "wrong_length", "short_206"])
def test_after_a_short_body_only_the_missing_bytes_are_asked_for(remote, mode):
    r = remote(mode, times=2)
    assert r.read(*SPAN) == r.true(*SPAN)
    assert r.sent() == SPAN[1]


def test_a_body_in_many_pieces_gives_up_only_after_the_attempts_of_the_policy(remote, quick):
    r = remote("wrong_length", policy=replace(quick, total_attempts=9), delta=99_000)
    with pytest.raises(NetworkError, match="gave up after"):
        r.read(*SPAN)
    assert len(r.rows()) <= 9


@pytest.mark.parametrize("mode", ["ignore_range", "gzip_range", "gzip_forced"])
def test_a_server_that_sends_the_whole_file_is_hung_up_on(remote, mode):
    """What a hung-up connection still carries is what the kernel's buffers hold, whatever the file's size."""
    r = remote(mode, size=64 << 20, times=1)
    assert r.read(50_000_000, 100_000) == r.true(50_000_000, 100_000)
    assert r.sent() < 12 << 20


def test_a_redirect_with_a_long_body_is_followed_without_reading_it(remote, behave):
    def long(h, req):
        if h.path.startswith("/some/"):
            return h.reply(302, {"Location": f"/{FILE}"}, bytes(64 << 20), req.head)
        return h.good(req)

    behave("long_redirect", long)
    r = remote("long_redirect")
    assert r.read(*SPAN) == r.true(*SPAN)
    assert r.sent() < 12 << 20


# ---- what a server says of a file -----------------------------------------------------------------


def saying(status: int = 206, **headers: str | None):
    """A good answer but for some headers; underscores stand for hyphens, None takes one away."""

    def answer(h, req):
        kept = {**h.hub_headers(req), "Content-Range": req.content_range()}
        kept |= {name.replace("_", "-"): value for name, value in headers.items()}
        h.reply(status, kept, req.body(), req.head)

    return answer


def test_a_file_that_ends_early_is_filled_as_far_as_it_goes(remote):
    r = remote(size=1_000)
    buffer = bytearray(64 << 10)
    answer = r.files.read_into(FILE, 0, memoryview(buffer), Expected())
    assert (answer.file_nbytes, bytes(buffer[:1000])) == (1_000, r.true(0, 1_000))
    assert (answer.etag, answer.sha256, answer.commit) == (r.entry.sha256(), r.entry.sha256(), COMMIT)


@pytest.mark.parametrize("size", ["\xb2", "9" * 5000, "-1", "1e3", " ", "0x10", "+1", "none"])
def test_a_size_that_is_no_number_is_no_size(remote, behave, size):
    behave("odd", saying(X_Linked_Size=size))
    r = remote("odd")
    answer = r.files.read_into(FILE, 0, memoryview(bytearray(10)), Expected())
    assert answer.file_nbytes == SIZE


@pytest.mark.parametrize(
    "shown",
    [
        None, "", "bytes", "bytes 0-9", "bytes 0-9/", "bytes */300000", "items 0-9/300000", "bytes 0-9/300000 x",
        "bytes -9/300000", "bytes 0-8,9-9/300000", "bytes 1-10/300000", "bytes 0-10/300000", "bytes 9-0/300000",
        "bytes 0-9/" + "9" * 5000, "bytes \xb2-9/300000", "bytes 0x0-0x9/300000",
    ],
)  # fmt: skip
def test_a_206_for_anything_but_the_asked_range_is_not_believed(remote, behave, shown):
    behave("odd", saying(Content_Range=shown))
    r = remote("odd")
    with pytest.raises(NetworkError, match=r"usable Content-Range|asked for bytes 0 to 9, got") as refusal:
        r.read(0, 10)
    assert len(str(refusal.value)) < 300


def test_a_range_of_a_file_of_unknown_length_is_taken(remote, behave):
    behave("odd", saying(Content_Range="bytes 0-9/*", X_Linked_Size=None))
    r = remote("odd")
    assert r.files.read_into(FILE, 0, memoryview(bytearray(10)), Expected()).file_nbytes is None


def test_a_body_longer_than_its_range_is_refused(remote, behave):
    def long(h, req):
        h.reply(206, {**h.hub_headers(req), "Content-Range": req.content_range()}, req.body() + b"more", req.head)

    behave("odd", long)
    with pytest.raises(NetworkError, match="longer than its Content-Range"):
        remote("odd").read(0, 10)


@pytest.mark.parametrize(
    ("expected", "cause"),
    [
        (
            Expected(file_nbytes=SIZE + 1),
            rf"{SIZE} bytes, indexed with {SIZE + 1}|size {SIZE}, indexed with {SIZE + 1}",
        ),
        (Expected(etag="b" * 64), f"ETag [0-9a-f]{{64}}, indexed with {'b' * 64}"),
        (Expected(commit="b" * 40), f"commit {COMMIT}, indexed with {'b' * 40}"),
    ],
    ids=["size", "etag", "commit"],
)
@pytest.mark.parametrize("mode", ["ok", "redirect_cross_host_expiring"])
def test_a_file_that_is_not_the_indexed_one_stops_at_once_and_says_what_to_do(remote, mode, expected, cause):
    r = remote(mode)
    with pytest.raises(Refused, match=cause) as refusal:
        r.read(*SPAN, expected)
    assert "rebuild the catalog with df-index build" in str(refusal.value)
    assert len(r.rows()) == 1


def test_a_file_that_changes_between_two_ranges_is_not_mixed(remote):
    r = remote("etag_change", after=2)
    expected = Expected(SIZE, r.entry.sha256(), COMMIT)
    assert r.read(0, 1000, expected) + r.read(1000, 1000, expected) == r.true(0, 2000)
    for _ in range(2):
        with pytest.raises(Refused, match=r"the file changed on the server \(ETag "):
            r.read(2000, 1000, expected)


def test_a_file_that_changes_between_two_halves_of_a_range_is_not_mixed(remote, behave, range_server):
    def half_then_moved(h, req):
        if h.state.take_fault(FILE):
            return range_server.m_truncate.__wrapped__(h, req)
        h.state.args["after"] = "0"
        return range_server.MODES["etag_change"](h, req)

    behave("half_then_moved", half_then_moved)
    r = remote("half_then_moved", times=1)
    with pytest.raises(Refused, match="the file changed on the server"):
        r.read(*SPAN, Expected(SIZE, r.entry.sha256(), COMMIT))


def test_a_range_behind_the_end_is_explained_with_both_sizes(remote):
    r = remote()
    with pytest.raises(Refused, match=r"asked for bytes 300000 to 300009, but .* 300000 bytes \(indexed with 400000\)"):
        r.read(SIZE, 10, Expected(file_nbytes=400_000, etag=None))
    with pytest.raises(Refused, match=r"asked for bytes 300000 to 300009, but the server's file has 300000 bytes$"):
        r.read(SIZE, 10, Expected())


# ---- whole small files ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ok", "truncate", "reset_midway", "503_burst", "stall", "gzip_forced", "mirror_bare"])
def test_a_small_file_arrives_whole(remote, impatient, mode):
    r = remote(mode, impatient(mode), times=2, hold=3)
    assert r.files.read_file(FILE, SIZE, Expected(commit=COMMIT)) == r.true(0, SIZE)
    assert all(row["range"] is None for row in r.rows())


@pytest.mark.parametrize(
    ("mode", "cause"),
    [
        ("truncate", "broke off|cut short"),
        ("gzip_forced", "encoded as"),
        ("gone_404", "no such file"),
        ("stall", "silent"),
    ],
)
def test_a_small_file_that_never_comes_whole_is_an_error_soon(remote, impatient, mode, cause):
    r = remote(mode, impatient(mode), keep=0.2, hold=3)
    with pytest.raises(NetworkError, match=cause):
        r.files.read_file(FILE, SIZE, Expected())
    assert len(r.rows()) <= 5


def test_a_small_file_that_is_not_small_is_refused_without_reading_it(remote):
    r = remote(size=64 << 20)
    with pytest.raises(Refused, match="larger than the 1000 bytes"):
        r.files.read_file(FILE, 1000, Expected())
    assert r.sent() < 12 << 20


def test_a_small_file_of_another_commit_is_refused(remote):
    with pytest.raises(Refused, match=f"commit {COMMIT}, indexed with {'b' * 40}"):
        remote().files.read_file(FILE, SIZE, Expected(commit="b" * 40))


# ---- links ----------------------------------------------------------------------------------------


def read_many(r: Remote, spans: int, threads: int) -> None:
    def one(number: int) -> None:
        offset = number * 997 % (SIZE - 1500)
        assert r.read(offset, 1500) == r.true(offset, 1500)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(spans)))


def test_the_hub_is_asked_once_and_its_link_used_for_all_ranges(remote):
    r = remote("redirect_cross_host_expiring", life=60)
    read_many(r, 24, 4)
    assert (len(r.rows("hub")), len(r.rows("cdn"))) == (1, 24)


def test_a_link_that_dies_during_the_job_is_asked_for_again(remote):
    r = remote("redirect_cross_host_expiring", life=0.1, delay=0.02)
    read_many(r, 60, 4)
    refused = [row for row in r.rows("cdn") if row["status"] == 403]
    assert refused
    assert len(r.rows("hub")) < 30
    assert r.files.stats.ranges == 60


def test_a_link_to_a_server_that_is_gone_is_asked_for_again(remote, behave):
    def first_dead(h, req):
        if h.role == "hub" and h.state.take_fault(FILE):
            return h.reply(302, {"Location": "http://localhost:1/x?Signature=0"}, b"", req.head)
        if h.role == "hub":
            return h.reply(302, {"Location": h.cdn_location(FILE)}, b"", req.head)
        return h.good(req)

    behave("first_dead", first_dead)
    r = remote("first_dead", times=2, life=60)
    read_many(r, 5, 1)


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd", "ftp://localhost/x", "javascript:alert(1)", "http://[", "http://[::1", "http://",
        "http://localhost:99999/", "http://localhost:abc/", "http://a..b/", "http://.x/", "http://\xff/", "//", "",
        "http://x y/", "http://" + "a" * 80 + ".x/", "http://127.0.0.1:1/", "https://127.0.0.1:1/", "\\\\x", "?" * 9000,
    ],
    ids=lambda text: text[:24],
)  # fmt: skip
def test_a_redirect_to_something_odd_is_refused_or_given_up_soon(remote, behave, location):
    behave("odd", lambda h, req: h.reply(302, {"Location": location}, b"", req.head))
    r = remote("odd", token="hf_dummy")
    start = time.monotonic()
    with pytest.raises(NetworkError) as refusal:
        r.read(*SPAN)
    assert time.monotonic() - start < 10
    assert str(refusal.value).startswith("shard.bin from 127.0.0.1: ")
    assert len(r.rows()) < 40
    if location.startswith(("file:", "ftp:", "javascript:")):
        assert isinstance(refusal.value, Refused)
        assert "refusing a redirect from http to" in str(refusal.value)
        assert len(r.rows()) == 1


def test_a_redirect_on_the_hub_itself_keeps_the_token(remote, behave):
    """The real hub redirects small files to another path of its own, which wants the token too."""

    def moved(h, req):
        if h.path.startswith("/some/"):
            return h.reply(307, {"Location": f"/{FILE}"}, b"", req.head)
        return h.good(req) if h.headers.get("Authorization") else h.reply(401, {}, b"", req.head)

    behave("moved", moved)
    r = remote("moved", token="hf_dummy")
    assert r.read(*SPAN) == r.true(*SPAN)


def test_hubs_that_redirect_to_each_other_are_left(remote, behave):
    def pingpong(h, req):
        back = f"{h.state.hub_base}/some/model/resolve/{COMMIT}/{FILE}"
        h.reply(302, {"Location": h.cdn_location(FILE) if h.role == "hub" else back}, b"", req.head)

    behave("pingpong", pingpong)
    r = remote("pingpong", token="hf_dummy")
    with pytest.raises(Refused, match="redirects without end"):
        r.read(*SPAN)
    assert len(r.rows()) < 10
    assert not any(row["auth"] for row in r.rows("cdn"))


@pytest.fixture
def secure_hub(certificate) -> Iterator[Callable[[str], str]]:
    """`secure_hub(location)` is the address of a TLS server that redirects everything there."""
    running = []

    def start(location: str) -> str:
        class Redirecting(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(302)
                self.send_header("Location", location)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirecting)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        running.append(server)
        return f"https://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_a_redirect_from_https_to_http_is_refused(remote, secure_hub, certificate, quick, monkeypatch):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    plain = remote()
    url = secure_hub(f"{plain.server.url}/{FILE}")
    files = RemoteFiles(f"{url}/some/model/resolve/{COMMIT}", "hf_dummy", quick)
    with pytest.raises(Refused, match="refusing a redirect from https to 'http'"):
        files.read_into(FILE, 0, memoryview(bytearray(10)), Expected())
    files.close()
    assert plain.rows() == []


def test_a_certificate_that_nobody_vouches_for_is_not_accepted(secure_hub, quick):
    files = RemoteFiles(f"{secure_hub('/')}/some/model/resolve/{COMMIT}", "hf_dummy", quick)
    with pytest.raises(NetworkError, match="TLS failed"):
        files.read_into(FILE, 0, memoryview(bytearray(10)), Expected())
    files.close()


# ---- waiting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_all_workers_wait_together_for_as_long_as_the_server_says(remote, form):
    seconds = 2 if form == "seconds" else 3  # a date has whole seconds, so that up to one is lost
    r = remote("429_retry_after", seconds=seconds, times=10, form=form)
    read_many(r, 32, 16)
    first = min(row["t"] for row in r.rows() if row["status"] == 429)
    late = [row["t"] - first for row in r.rows() if row["t"] - first > 1]
    assert min(late) > 1.95
    assert len([row for row in r.rows() if row["status"] == 429]) == 10
    assert len(r.rows()) < 32 + 10 + 8
    assert r.files.stats.pauses == 10


def test_a_wait_shows_how_long_it_is(remote, quick, caplog):
    r = remote("429_retry_after", policy=replace(quick, max_pause_s=30), seconds=25, times=1000)
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        reading = pool.submit(r.read, *SPAN)
        deadline = time.monotonic() + 5
        while r.files.pause_left_s == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 20 < r.files.pause_left_s <= 25
        r.files.stop()
        with pytest.raises(NetworkError):
            reading.result(timeout=5)
    assert "the server asks to wait 25 s (status 429)" in caplog.text


@pytest.mark.parametrize(
    "value",
    ["86400", "inf", "1e999", pytest.param(email.utils.formatdate(time.time() + 1e6, usegmt=True), id="in 11 days")],
)
def test_an_absurd_wait_is_capped(remote, behave, quick, value):
    behave("odd", saying(503, Retry_After=value))
    r = remote("odd", policy=replace(quick, max_pause_s=0.2))
    start = time.monotonic()
    with pytest.raises(NetworkError, match="status 503"):
        r.read(*SPAN)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("value", ["0", "-5", "nan", "Mon, 01 Jan 2024 00:00:00 GMT"])
def test_a_wait_of_nothing_is_no_leave_to_hammer_the_server(remote, behave, quick, value):
    behave("odd", saying(503, Retry_After=value))
    r = remote("odd", policy=replace(quick, attempts=4, backoff_s=0.05, max_backoff_s=9))
    start = time.monotonic()
    with pytest.raises(NetworkError, match="gave up after 4 attempts"):
        r.read(*SPAN)
    assert time.monotonic() - start > (0.05 + 0.1 + 0.2) / 2


@pytest.mark.parametrize(
    "value", ["Mon, 01 Jan 0001 00:00:00 -0000", "Fri, 31 Dec 9999 23:59:59 -2359", "soon", "\xb2", "9" * 5000]
)
def test_a_wait_that_no_clock_can_show_is_no_crash(remote, behave, quick, value):
    behave("odd", saying(429, Retry_After=value))
    with pytest.raises(NetworkError, match="status 429"):
        remote("odd", policy=replace(quick, max_pause_s=0.2)).read(*SPAN)


def test_the_hubs_own_rate_limit_header_is_obeyed_too(remote, behave):
    def limited(h, req):
        if h.state.take_fault(FILE):
            return h.reply(429, {"RateLimit": '"resolvers";r=0;t=1'}, b"", req.head)
        return h.good(req)

    behave("limited", limited)
    r = remote("limited", times=1)
    start = time.monotonic()
    assert r.read(*SPAN) == r.true(*SPAN)
    assert time.monotonic() - start > 0.95


def test_waits_after_errors_grow_and_differ(remote, quick):
    r = remote("503_burst", policy=replace(quick, attempts=7, backoff_s=0.01, max_backoff_s=9), times=6)
    assert r.read(*SPAN) == r.true(*SPAN)
    times = [row["t"] for row in r.rows()]
    gaps = [after - before for before, after in pairwise(times)]
    assert len(gaps) == 6
    for number, gap in enumerate(gaps):
        assert gap > 0.01 * 2**number / 2


@pytest.mark.parametrize("mode", ["stall", "429_retry_after", "slow_drip"])
def test_stopping_ends_silent_slow_and_waiting_transfers_soon(remote, quick, mode):
    args = {"hold": 60, "seconds": 60, "times": 1000, "bytes": 16, "every": 0.5}
    r = remote(mode, policy=replace(quick, read_timeout_s=60, max_pause_s=60), **args)
    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(r.read, 1000 * i, 1000) for i in range(3)]
        while len(r.rows()) < 1:
            time.sleep(0.01)
        time.sleep(0.2)
        start = time.monotonic()
        r.files.stop()
        for future in reading:
            with pytest.raises(NetworkError):
                future.result(timeout=30)
        assert time.monotonic() - start < 10
    with pytest.raises(NetworkError, match="stopped"):
        r.read(*SPAN)


def test_a_server_that_never_answered_is_given_up_sooner(quick):
    files = RemoteFiles(f"http://127.0.0.1:1/some/model/resolve/{COMMIT}", None, quick)
    with pytest.raises(NetworkError, match=r"no answer in 2 attempts \(127\.0\.0\.1: connection refused\); check"):
        files.read_into(FILE, 0, memoryview(bytearray(10)), Expected())
    files.close()


def test_a_name_that_cannot_be_resolved_says_so(quick):
    files = RemoteFiles(f"http://no-such-host.invalid/some/model/resolve/{COMMIT}", None, quick)
    with pytest.raises(NetworkError, match=r"no-such-host\.invalid: "):
        files.read_into(FILE, 0, memoryview(bytearray(10)), Expected())
    files.close()


def test_counters_count_what_was_sent(remote):
    r = remote("truncate", times=1)
    r.read(*SPAN)
    stats = r.files.stats
    assert (stats.requests, stats.ranges, stats.nbytes, stats.retries, stats.pauses) == (2, 1, SPAN[1], 1, 0)


def test_every_error_is_one_of_ours():
    assert issubclass(Refused, NetworkError) and issubclass(NetworkError, DeltafinError)
