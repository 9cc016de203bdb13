"""Bodies read straight into memory: as exact as any other way, and a connection is used again only when it is empty."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from deltafin.errors import DiskError, NetworkError
from deltafin.indexer import Expected, RemoteFiles, transfer

SIZE = 900_000
DATA = bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256)

# What is sent for a range of DATA, after "HTTP/1.1 206 Partial Content\r\n"; and whether it is then closed.
Reply = Callable[[int, int], tuple[bytes, bool]]


def head(first: int, last: int, *more: str) -> bytes:
    lines = [f"Content-Range: bytes {first}-{last}/{SIZE}", *more]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


def plain(first: int, last: int) -> tuple[bytes, bool]:
    return head(first, last, f"Content-Length: {last + 1 - first}") + DATA[first : last + 1], False


def until_closed(first: int, last: int) -> tuple[bytes, bool]:
    return head(first, last) + DATA[first : last + 1], True


def announced_close(first: int, last: int) -> tuple[bytes, bool]:
    return head(first, last, f"Content-Length: {last + 1 - first}", "Connection: close") + DATA[first : last + 1], True


def chunked(first: int, last: int) -> tuple[bytes, bool]:
    out, body = head(first, last, "Transfer-Encoding: chunked"), DATA[first : last + 1]
    for at in range(0, len(body), 7001):
        piece = body[at : at + 7001]
        out += f"{len(piece):x};odd=extension\r\n".encode() + piece + b"\r\n"
    return out + b"0\r\nTrailer: x\r\n\r\n", False


class Server:
    """Speaks HTTP by hand, so that every byte is as it is meant. Counts connections and the ranges asked on each."""

    def __init__(self) -> None:
        self.reply: Reply = plain
        self.asked: list[list[tuple[int, int]]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.asked.append([])
            threading.Thread(target=self._serve, args=(connection, self.asked[-1]), daemon=True).start()

    def _serve(self, connection: socket.socket, asked: list[tuple[int, int]]) -> None:
        with connection, contextlib.suppress(ConnectionError):
            received = b""
            while data := connection.recv(4096):
                received += data
                if b"\r\n\r\n" not in received:
                    continue
                span = received.partition(b"bytes=")[2].partition(b"\r\n")[0].decode()
                first, last = map(int, span.split("-"))
                received = b""
                asked.append((first, last))
                sent, closes = self.reply(first, last)
                connection.sendall(b"HTTP/1.1 206 Partial Content\r\n" + sent)
                if closes:
                    return


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def files(server, quick) -> Iterator[RemoteFiles]:
    files = RemoteFiles(server.url, None, quick)
    yield files
    files.close()


def read(files: RemoteFiles, offset: int, nbytes: int) -> bytes:
    """With a guard on either side: nothing beyond the view may be touched."""
    around = bytearray(b"\xa5" * (nbytes + 200))
    files.read_into("f", offset, memoryview(around)[100 : 100 + nbytes], Expected(file_nbytes=SIZE))
    assert around[:100] == around[-100:] == b"\xa5" * 100
    return bytes(around[100:-100])


@pytest.fixture(params=["straight", "by urllib3"])
def way(request, monkeypatch) -> str:
    """Both ways of reading a body must agree in everything."""
    if request.param == "by urllib3":
        monkeypatch.setattr(transfer, "_plain_stream", lambda response: None)
    return request.param


SPANS = [(0, 1), (5, 3000), (1234, 8192), (17, 8193), (100_000, 700_000), (SIZE - 1, 1), (0, SIZE)]


@pytest.mark.parametrize("reply", [plain, until_closed, announced_close, chunked], ids=lambda reply: reply.__name__)
def test_every_kind_of_body_arrives_exactly(server, files, way, reply):
    server.reply = reply
    for offset, nbytes in SPANS:
        assert read(files, offset, nbytes) == DATA[offset : offset + nbytes]
    assert files.stats.nbytes == sum(nbytes for _, nbytes in SPANS)
    assert files.stats.retries == 0


def test_a_connection_whose_body_was_read_serves_the_next_request(server, files, way):
    for offset, nbytes in SPANS:
        read(files, offset, nbytes)
    assert len(server.asked) == 1
    assert [last + 1 - first for first, last in server.asked[0]] == [nbytes for _, nbytes in SPANS]


def test_the_straight_way_is_taken_where_it_can_be(server, files, monkeypatch):
    """Else the tests above would say nothing of it, and every fetch would be slower without a word."""
    monkeypatch.setattr(transfer.Transfers, "pieces", None)
    assert read(files, 100_000, 700_000) == DATA[100_000:800_000]


def test_a_connection_with_something_left_in_it_is_never_used_again(server, files, way):
    """What is left would be taken for the next answer."""
    sent = []

    def longer(first: int, last: int) -> tuple[bytes, bool]:
        sent.append(first)
        if len(sent) > 1:
            return plain(first, last)
        body = (
            DATA[first : last + 1] + b"HTTP/1.1 206 Partial Content\r\n" + head(0, 9, "Content-Length: 10") + b"X" * 10
        )
        return head(first, last, "Transfer-Encoding: chunked") + f"{len(body):x}\r\n".encode() + body, False

    server.reply = longer
    assert read(files, 1000, 5000) == DATA[1000:6000]
    assert read(files, 0, 10) == DATA[:10]
    assert [len(asked) for asked in server.asked] == [1, 1]


@pytest.mark.parametrize("cut", [0, 1, 4095, 8192, 60_000])
def test_a_body_that_breaks_off_is_continued_where_it_ended(server, files, way, cut):
    def broken(first: int, last: int) -> tuple[bytes, bool]:
        begun = head(first, last, f"Content-Length: {last + 1 - first}") + DATA[first : first + cut]
        return (begun, True) if first == 1000 and len(server.asked) == 1 else plain(first, last)

    server.reply = broken
    assert read(files, 1000, 100_000) == DATA[1000:101_000]
    asked = [span for spans in server.asked for span in spans]
    assert asked == [(1000, 100_999), (1000 + cut, 100_999)]
    assert files.stats.nbytes == 100_000


def test_a_connection_that_broke_off_is_not_used_again(server, files, way, quick):
    server.reply = lambda first, last: (head(first, last, f"Content-Length: {last + 1 - first}"), True)
    with pytest.raises(NetworkError, match="the connection broke off"):
        read(files, 0, 1000)
    assert [len(asked) for asked in server.asked] == [1] * quick.attempts
    server.reply = plain
    assert read(files, 0, 1000) == DATA[:1000]


@pytest.mark.parametrize("after", [0, 5000])
def test_a_body_that_stays_silent_is_cut_off_by_stop(server, files, after):
    def silent(first: int, last: int) -> tuple[bytes, bool]:
        return head(first, last, f"Content-Length: {last + 1 - first}") + DATA[first : first + after], False

    server.reply = silent
    threading.Timer(0.2, files.stop).start()
    with pytest.raises(NetworkError, match="stopped"):
        read(files, 0, 100_000)
    assert len(server.asked) == 1


def test_a_body_that_trickles_is_given_up_after_a_minute(server, files, monkeypatch):
    """Also one that would take an hour to fill the first buffer."""
    now = [0.0]
    monkeypatch.setattr("deltafin.indexer.transfer.time.monotonic", lambda: now[0])
    real = transfer._read_some

    def slowly(stream, view):
        now[0] += 5.0
        return real(stream, view[:100])

    monkeypatch.setattr(transfer, "_read_some", slowly)
    with pytest.raises(NetworkError, match=r"gave up after .* less than 1 KB/s"):
        read(files, 0, 500_000)
    first = server.asked[0][0][0], server.asked[1][0][0]
    assert first == (0, 1300), "13 receives of 5 seconds each"


def test_arrivals_are_told_while_they_happen_and_add_up(server, files):
    told = []
    files.on_arrival = lambda: told.append(files.stats.nbytes)
    read(files, 0, SIZE)
    assert told[-1] == SIZE and told == sorted(told)


def test_out_of_open_files_is_said_at_once_and_not_blamed_on_the_server(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = Server()
    files = RemoteFiles(server.url)
    files.read_into("warm", 0, memoryview(bytearray(8)), Expected(SIZE))  # what is imported on first use is there now
    files.close()
    files = RemoteFiles(server.url)
    gc.collect()  # what other tests have left must not be closed in between
    taken = [os.open(tmp_path, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(tmp_path, os.O_RDONLY))
        with pytest.raises(DiskError, match="too many open files"):
            files.read_into("file", 0, memoryview(bytearray(8)), Expected(SIZE))
        assert files.stats.retries == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
        files.close()
        server.close()
