"""What ranges over HTTP cost: the store's own client beside the leanest ones there are, over loopback.

A small server in a process of its own sends whole spans out of memory, plain and over TLS. The clients take
turns, each fetches the same ranges into the same memory, and the medians count.
"""

from __future__ import annotations

import http.client
import os
import random
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, local

from deltafin.errors import DeltafinError
from deltafin.indexer import Expected, RemoteFiles

SPAN_NBYTES = 17_547_264  # an expert of Kimi K3
ROUNDS = 11
TURN_S = 0.4
AT_ONCE = (1, 4)

_SPANS = 64  # in the file; all have the same bytes
_FILE = "shard"

# Fetches the span of this number into the view; one connection for each thread that calls it.
Client = Callable[[int, memoryview], None]


@dataclass(frozen=True, slots=True)
class Line:
    """One client: bytes a second (median, least, most), the leanest client's median, processor time of this process."""

    client: str
    scheme: str
    at_once: int
    rate: float
    least: float
    most: float
    limit: float
    core_s_per_gb: float

    @property
    def ratio(self) -> float:
        return self.rate / self.limit


@dataclass(frozen=True, slots=True)
class Report:
    """`without_tls` says why there is no TLS, None if there is."""

    lines: tuple[Line, ...]
    rounds: int
    without_tls: str | None


def turns(*, tls: bool = True) -> int:
    """How many turns `measure` takes, for a progress display."""
    return ROUNDS * len(AT_ONCE) * (2 if tls else 1)


def measure(measured: Callable[[int], None] | None = None) -> Report:
    """Measures all clients; calls `measured` with 1 after every round."""
    lines: list[Line] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltafin-")))
        certificate, complaint = _certificate(folder)
        stack.enter_context(_environment(certificate))
        for scheme in ("http", "https") if certificate is not None else ("http",):
            port = stack.enter_context(_server(certificate if scheme == "https" else None))
            for at_once in AT_ONCE:
                lines += _compare(scheme, port, certificate, at_once, measured)
    return Report(tuple(lines), ROUNDS, complaint)


def _compare(
    scheme: str, port: int, certificate: Path | None, at_once: int, measured: Callable[[int], None] | None
) -> list[Line]:
    """All clients in turns, with so many threads."""
    context = ssl.create_default_context(cafile=certificate) if scheme == "https" else None
    files = RemoteFiles(f"{scheme}://127.0.0.1:{port}")
    expected = Expected(file_nbytes=_SPANS * SPAN_NBYTES)

    def ours(number: int, view: memoryview) -> None:
        files.read_into(_FILE, number * SPAN_NBYTES, view, expected)

    clients: dict[str, Client] = {
        "http.client, readinto": _http_client(port, context),
        "a socket, recv_into": _bare_socket(port, context),
        "store": ours,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
    with ExitStack() as stack:
        stack.callback(files.close)
        runs = {name: stack.enter_context(_threads(client, at_once)) for name, client in clients.items()}
        spans = max(at_once, round(TURN_S * _warm_up(runs) / SPAN_NBYTES))
        for _ in range(ROUNDS):
            for name, run in runs.items():
                found[name].append(run(spans))
            if measured is not None:
                measured(1)
    medians = {name: statistics.median(rate for rate, _ in turns) for name, turns in found.items()}
    limit = max(rate for name, rate in medians.items() if name != "store")
    return [
        Line(
            name,
            scheme,
            at_once,
            medians[name],
            min(rate for rate, _ in turns),
            max(rate for rate, _ in turns),
            limit,
            statistics.median(core_s for _, core_s in turns),
        )
        for name, turns in found.items()
    ]


def _warm_up(runs: dict[str, Callable[[int], tuple[float, float]]]) -> float:
    """Opens every client's connections; returns the best rate seen."""
    return max(run(8)[0] for run in runs.values())


@contextmanager
def _threads(client: Client, at_once: int) -> Iterator[Callable[[int], tuple[float, float]]]:
    """`run(spans)` fetches so many with threads that stay: bytes a second, and core-seconds a GB of this process."""
    views = [memoryview(bytearray(SPAN_NBYTES)) for _ in range(at_once)]
    with ThreadPoolExecutor(at_once) as pool:

        def some(numbers: Sequence[int], view: memoryview) -> None:
            for number in numbers:
                client(number % _SPANS, view)

        def run(spans: int) -> tuple[float, float]:
            begun, cpu = time.perf_counter(), time.process_time()
            works = [pool.submit(some, range(i, spans, at_once), view) for i, view in enumerate(views)]
            for work in works:
                work.result()
            nbytes = spans * SPAN_NBYTES
            return nbytes / (time.perf_counter() - begun), (time.process_time() - cpu) / nbytes * 1e9

        yield run
        content = _content()
        if any(view != content for view in views):
            raise DeltafinError("a client brought other bytes than the server sent")


# ---- the lean clients -------------------------------------------------------------------------------------


def _range(number: int) -> str:
    return f"bytes={number * SPAN_NBYTES}-{(number + 1) * SPAN_NBYTES - 1}"


def _http_client(port: int, context: ssl.SSLContext | None) -> Client:
    """The standard library's client, which reads into memory that it is given."""
    mine = local()

    def fetch(number: int, view: memoryview) -> None:
        if not hasattr(mine, "connection"):
            mine.connection = (
                http.client.HTTPConnection("127.0.0.1", port)
                if context is None
                else http.client.HTTPSConnection("127.0.0.1", port, context=context)
            )
        mine.connection.request("GET", f"/{_FILE}", headers={"Range": _range(number)})
        response = mine.connection.getresponse()
        filled = 0
        while filled < SPAN_NBYTES and (nbytes := response.readinto(view[filled:])):
            filled += nbytes

    return fetch


def _bare_socket(port: int, context: ssl.SSLContext | None) -> Client:
    """A socket and nothing else: it looks for the end of the headers and believes whatever follows."""
    mine = local()

    def fetch(number: int, view: memoryview) -> None:
        if not hasattr(mine, "socket"):
            plain = socket.create_connection(("127.0.0.1", port))
            mine.socket = plain if context is None else context.wrap_socket(plain, server_hostname="127.0.0.1")
        mine.socket.sendall(f"GET /{_FILE} HTTP/1.1\r\nHost: x\r\nRange: {_range(number)}\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += mine.socket.recv(1024)
        begun = head.partition(b"\r\n\r\n")[2]
        view[: len(begun)] = begun
        filled = len(begun)
        while filled < SPAN_NBYTES and (nbytes := mine.socket.recv_into(view[filled:])):
            filled += nbytes

    return fetch


# ---- the server -------------------------------------------------------------------------------------------


@contextmanager
def _server(certificate: Path | None) -> Iterator[int]:
    """The port of a server in a process of its own."""
    code = "from deltafin.store.httpbench import serve; serve()"
    words = [sys.executable, "-c", code, str(certificate or "")]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.strip().isdigit():
            raise DeltafinError("the server to measure against did not start")
        yield int(line)
    finally:
        process.stdin.close()  # it ends when it reads this, so it cannot outlive us
        process.stdout.close()
        process.terminate()
        process.wait()


def serve() -> None:
    """Serves spans on loopback until standard input ends; prints its port. Its argument is a certificate, or empty."""
    context = None
    if sys.argv[1]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(sys.argv[1])
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)  # noqa: T201

    def accept() -> None:
        content = _content()
        while True:
            Thread(target=_answer, args=(listener.accept()[0], context, content), daemon=True).start()

    Thread(target=accept, daemon=True).start()
    sys.stdin.buffer.read()


def _answer(connection: socket.socket, context: ssl.SSLContext | None, content: bytes) -> None:
    """Answers the requests of one connection, each of them for a whole span."""
    with connection if context is None else context.wrap_socket(connection, server_side=True) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = b""
        while data := stream.recv(4096):
            received += data
            if b"\r\n\r\n" not in received:
                continue
            asked = received.partition(b"bytes=")[2].partition(b"\r\n")[0].decode()
            received = b""
            head = (
                f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {asked}/{_SPANS * SPAN_NBYTES}\r\n"
                f"Content-Length: {SPAN_NBYTES}\r\n\r\n"
            )
            stream.sendall(head.encode())
            stream.sendall(content)


def _content() -> bytes:
    return random.Random(5).randbytes(SPAN_NBYTES)


def _certificate(folder: Path) -> tuple[Path | None, str | None]:
    """A certificate for loopback with its key, made by the openssl program; or why there is none."""
    words = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
        "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key", "-out", "certificate",
    ]  # fmt: skip
    try:
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None, "there is no openssl program here that makes a certificate"
    both = folder / "both"
    both.write_bytes((folder / "key").read_bytes() + (folder / "certificate").read_bytes())
    return both, None


@contextmanager
def _environment(certificate: Path | None) -> Iterator[None]:
    """While inside, our client trusts the certificate and no proxy stands between it and the server."""
    ours = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    if certificate is not None:
        ours["REQUESTS_CA_BUNDLE"] = str(certificate)
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
