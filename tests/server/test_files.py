"""Uploaded files: whole or not at all, never in memory, and under no name that a client chose."""

from __future__ import annotations

import errno
import gc
import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import openai
import pytest

from deltafin.errors import DiskError
from deltafin.runtime.server.errors import ApiError
from deltafin.runtime.server.files import MOST_SENT, FileStore
from deltafin.runtime.server.uploads import own_name


@pytest.fixture
def client(file_server):
    return openai.OpenAI(base_url=f"{file_server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def folder(file_server):
    """Of the files; what is in it is only what the test has made."""
    store = file_server.services.batches.files
    for file in store.all():
        store.remove(file.id)
    yield store.folder
    assert [p for p in store.folder.iterdir() if p.name.startswith(".")] == [], "a part was left behind"


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def form(*parts, boundary="b0undary"):
    """A body of parts, each a header line and its bytes."""
    body = b"".join(
        f"--{boundary}\r\nContent-Disposition: form-data; {header}\r\n\r\n".encode() + data + b"\r\n"
        for header, data in parts
    )
    return body + f"--{boundary}--\r\n".encode()


FILE = ('name="file"; filename="in.jsonl"', b"{}\n")
PURPOSE = ('name="purpose"', b"batch")
KIND = "multipart/form-data; boundary=b0undary"


def post(server, body, kind=KIND):
    return httpx.post(f"{server.url}/v1/files", content=body, headers={"Content-Type": kind}, timeout=20)


def test_a_file_comes_back_as_it_went(client, folder):
    raw = os.urandom(300_000)
    before = int(time.time())
    file = client.files.create(file=("my file.jsonl", raw), purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(raw), "my file.jsonl", "batch")
    assert (file.status, file.expires_at) == ("processed", None) and before <= file.created_at <= time.time()
    assert client.files.retrieve(file.id) == file
    answer = client.files.with_raw_response.content(file.id)
    assert answer.content == raw and answer.headers["content-length"] == str(len(raw))
    told = answer.headers["content-disposition"]
    assert "attachment" in told and "my%20file" in told
    assert names(folder) == sorted([file.id, f"{file.id}.json"])
    assert client.files.delete(file.id).deleted
    assert names(folder) == []
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(file.id)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\work\\in.jsonl", "in.jsonl"),
        ("a\x1b[2J\n\0b", "a[2Jb"),
        ("", "upload.jsonl"),
        ("..", ".."),
        ("ünï.jsonl", "ünï.jsonl"),
        ("x" * 500, "x" * 255),
    ],
)
def test_a_users_name_is_shown_and_never_a_path(file_server, folder, given, shown):
    assert own_name(given) == shown
    told = post(file_server, form((f'name="file"; filename="{shown}"', b"{}\n"), PURPOSE)).json()
    assert told["filename"] == shown and names(folder) == sorted([told["id"], f"{told['id']}.json"])


@pytest.mark.parametrize("name", ["..", "%2e%2e", "..%2flock", "file-../../lock", "file-" + "0" * 24, "a" * 5000])
def test_what_is_no_id_is_not_found(file_server, name):
    for method, path in (("GET", name), ("GET", f"{name}/content"), ("DELETE", name)):
        answer = httpx.request(method, f"{file_server.url}/v1/files/{path}")
        assert answer.status_code in (404, 405) and set(answer.json()) == {"error"}
        assert str(file_server.services.batches.files.folder) not in answer.text


@pytest.mark.parametrize(
    ("body", "kind", "status", "param"),
    [
        (form(FILE), KIND, 400, "purpose"),
        (form(FILE, ('name="purpose"', b"fine-tune")), KIND, 400, "purpose"),
        (form(PURPOSE), KIND, 400, "file"),
        (form(('name="file"', b"{}"), PURPOSE), KIND, 400, "file"),
        (form(FILE, FILE, PURPOSE), KIND, 400, "file"),
        (form(FILE, PURPOSE, PURPOSE), KIND, 400, "purpose"),
        (form(FILE, PURPOSE, ('name="expires_after[seconds]"', b"3600")), KIND, 400, "expires_after[seconds]"),
        (form(FILE, ('name="purpose"', b"b" * 2000)), KIND, 400, "purpose"),
        (form(*((f'name="f{n}"', b"") for n in range(40)), FILE, PURPOSE), KIND, 400, None),
        (form(('name="file"; filename="a"', b"x" * ((1 << 20) + 1)), PURPOSE), KIND, 413, "file"),
        (form(FILE, PURPOSE)[:-6], KIND, 400, None),
        (b"", KIND, 400, None),
        (b"not a form at all", KIND, 400, None),
        (form(FILE, PURPOSE), "multipart/form-data", 415, None),
        (form(FILE, PURPOSE), "multipart/form-data; boundary=" + "b" * 500, 400, None),
        (b"{}", "application/json", 415, None),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value)[:12],
)
def test_what_is_no_upload_is_refused_and_leaves_nothing(file_server, folder, body, kind, status, param):
    answer = post(file_server, body, kind)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert names(folder) == []


def test_a_file_of_the_most_bytes_is_taken(file_server, folder):
    assert post(file_server, form(('name="file"; filename="a"', b"x" * (1 << 20)), PURPOSE)).json()["bytes"] == 1 << 20


def test_an_upload_that_breaks_off_leaves_nothing(file_server, folder):
    body = form(('name="file"; filename="a"', b"x" * 900_000), PURPOSE)
    head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: {KIND}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", file_server.port)) as one:
        one.sendall(head.encode() + body[:500_000])
        time.sleep(0.05)
    end = time.monotonic() + 20
    while names(folder):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("call", ["write", "replace", "fsync"])
def test_a_full_drive_is_told_in_one_line_and_leaves_nothing(file_server, folder, monkeypatch, call):
    whole = getattr(os, call)

    def full(first, *args):
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first
        if str(path).startswith(str(folder)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(first, *args)

    monkeypatch.setattr(os, call, full)
    answer = post(file_server, form(FILE, PURPOSE))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "disk_full")
    assert "\n" not in error["message"] and str(folder) not in error["message"]
    assert names(folder) == []
    monkeypatch.undo()
    assert post(file_server, form(FILE, PURPOSE)).status_code == 200


def test_a_file_that_a_batch_needs_stays(client, file_server, folder, monkeypatch):
    file = client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    service = file_server.services.batches
    monkeypatch.setattr(service, "_needs_work", lambda record, now: False)
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.ConflictError) as told:
        client.files.delete(file.id)
    assert told.value.body["code"] == "file_in_use" and batch.id in told.value.body["message"]
    monkeypatch.undo()
    assert client.batches.cancel(batch.id).status == "cancelling"
    end = time.monotonic() + 20
    while client.batches.retrieve(batch.id).status != "cancelled":
        assert time.monotonic() < end
        time.sleep(0.01)
    assert client.files.delete(file.id).deleted


def test_a_file_that_is_removed_while_it_is_read_comes_whole(file_server, client, folder):
    raw = os.urandom(1 << 20)
    file = client.files.create(file=("in.jsonl", raw), purpose="batch")
    with httpx.stream("GET", f"{file_server.url}/v1/files/{file.id}/content") as answer:
        client.files.delete(file.id)
        assert answer.read() == raw


def open_below(folder):
    """Files of a folder that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if name.startswith(str(folder))]


def test_uploads_that_do_not_go_on_hold_no_files_open(file_server, folder):
    head = f"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {KIND}\r\nContent-Length: 1048000\r\n\r\n"
    half = form(FILE)[:-16] + b"x" * 1_047_000  # more than is written at once
    with ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", file_server.port)))
            client.sendall(head.encode() + half)
        end = time.monotonic() + 20
        while len(names(folder)) < 3 or open_below(folder):
            assert time.monotonic() < end, (names(folder), open_below(folder))
            time.sleep(0.01)
    while names(folder):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_more_downloads_than_may_hold_files_open_are_told_to_come_again(tmp_path):
    store = FileStore(tmp_path / "files")
    part = store.part()
    part.write_bytes(b"whole")
    file = store.add(part, "a", "batch")
    opened = [store.open(file.id) for _ in range(MOST_SENT)]
    with pytest.raises(ApiError) as told:
        store.open(file.id)
    assert (told.value.status, told.value.code, told.value.headers["Retry-After"]) == (503, "too_many_downloads", "5")
    opened[0].close()
    opened[0].close()  # gives one place back, not two
    opened[0] = store.open(file.id)
    with pytest.raises(ApiError):
        store.open(file.id)
    del opened[1]  # whose client had left before the first byte
    gc.collect()
    assert store.open(file.id).read() == b"whole"
    store.path(file.id).unlink()
    for _ in range(2 * MOST_SENT):
        with pytest.raises(DiskError, match="cannot read"):
            store.open(file.id)


def test_what_a_kill_left_is_cleared_at_the_start(tmp_path):
    store = FileStore(tmp_path / "files")
    part = store.part()
    part.write_bytes(b"whole")
    kept = store.add(part, "a", "batch")
    half = store.part()
    half.write_bytes(b"half")
    (store.folder / "file-0123456789abcdef01234567").write_bytes(b"without a record")
    odd = {"file-" + "1" * 24: b"{", "file-" + "2" * 24: b'{"id": "x"}', "file-" + "3" * 24: b"[]"}
    for name, raw in odd.items():
        (store.folder / f"{name}.json").write_bytes(raw)
        (store.folder / name).write_bytes(b"somebody knows why")
    again = FileStore(store.folder)
    assert again.all() == [kept] and again.path(kept.id).read_bytes() == b"whole"
    damaged = [file for name in odd for file in (name, f"{name}.json")]
    assert names(store.folder) == sorted([kept.id, f"{kept.id}.json", *damaged])


@pytest.mark.slow
def test_a_large_upload_is_not_in_memory(new_server, tmp_path):
    served = new_server(data=tmp_path / "data")

    def pieces():
        yield b"--b0undary\r\nContent-Disposition: form-data; " + FILE[0].encode() + b"\r\n\r\n"
        for _ in range(300):
            yield b"x" * (1 << 20)
        yield b"\r\n" + form(PURPOSE)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    post(served, form(FILE, PURPOSE))
    before = resident()
    told = httpx.post(f"{served.url}/v1/files", content=pieces(), headers={"Content-Type": KIND}, timeout=120).json()
    assert told["bytes"] == 300 << 20
    assert resident() - before < 30 << 20
