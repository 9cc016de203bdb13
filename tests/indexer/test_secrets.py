"""Tokens and signed links: the token goes to the hub and nowhere else, and neither is ever written down."""

from __future__ import annotations

import logging
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deltafin.errors import NetworkError
from deltafin.indexer import Expected, RemoteFiles, build_catalog, parse_model
from deltafin.indexer.links import redirect_target

TOKEN = "hf_dummyTokenThatMustNotBeSeen"
SECRETS = (TOKEN, "Signature=", "Bearer")


def written(folder: Path) -> str:
    """The contents and names of all files below a folder."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    return "\n".join(f"{p} {p.read_bytes().decode('latin-1')}" for p in files)


def assert_clean(text: str) -> None:
    for secret in SECRETS:
        at = text.find(secret)
        assert at < 0, text[max(0, at - 200) : at + 200]


def assert_auth_only_on_hub(server) -> None:
    assert not server.stats()["auth_seen_on_cdn"]
    assert server.stats()["auth_seen_on_hub"]
    assert all(row["auth"] for row in server.state.log if row["kind"] == "api")


def test_the_token_reaches_the_hub_but_not_the_cdn_and_is_written_nowhere(tiny_dir, hub, command, tmp_path):
    server = hub(tiny_dir, "redirect_cross_host_expiring", life=60, strict=0)
    home = tmp_path / "home"
    home.mkdir()
    env = {"HF_TOKEN": TOKEN, "HOME": str(home), "HF_HOME": str(home / "hf")}
    for words in (["build", "some/model", "-vv"], ["check", "some/model", "-vv"]):
        done = command("df-index", *words, env=env)
        assert done.returncode == 0, done.stderr
        assert_clean(done.stdout + done.stderr)
    assert_clean(written(tmp_path))
    assert_auth_only_on_hub(server)
    assert any(row["host"] == "cdn" for row in server.state.log)


def test_a_token_stored_by_hf_auth_login_is_used_too(tiny_dir, hub, command, tmp_path):
    server = hub(tiny_dir, "gated_401")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(TOKEN + "\n")
    done = command("df-index", "build", "some/model", "-vv", env={"HF_HOME": str(tmp_path / "hf")})
    assert done.returncode == 0, done.stderr
    assert_clean(done.stdout + done.stderr + written(tmp_path / "cache"))
    assert server.stats()["auth_seen_on_hub"]


def test_a_cdn_that_accepts_no_token_gets_none(tiny_dir, hub, monkeypatch, df_index):
    server = hub(tiny_dir, "redirect_cross_host_expiring", life=60, strict=1)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert df_index("build", "some/model").status == 0
    assert_auth_only_on_hub(server)


@pytest.mark.parametrize("cdn_host", ["localhost", "127.0.0.1"])
def test_another_port_is_another_host(tiny_dir, range_server, quick, cdn_host):
    args = {"life": "60", "strict": "0"}
    with range_server.FaultServer(str(tiny_dir), (), "redirect_cross_host_expiring", args, cdn_host=cdn_host) as server:
        files = RemoteFiles(f"{server.url}/some/model/resolve/{'a' * 40}", TOKEN, quick)
        assert files.read_into("config.json", 0, memoryview(bytearray(100)), Expected()).commit == "a" * 40
        files.close()
        assert server.stats()["auth_seen_on_hub"]
        assert not server.stats()["auth_seen_on_cdn"]


def refusing(status: int):
    """Answers every file with a status, on whichever listener `at` says; the link before it is a signed one."""

    def answer(h, req):
        if h.role == "hub" and h.state.args["at"] == "cdn":
            return h.reply(302, {"Location": h.cdn_location(req.entry.name)}, b"", req.head)
        return h.reply(status, {}, f"you sent {h.headers.get('Authorization')} to {h.path}".encode(), req.head)

    return answer


@pytest.mark.parametrize("at", ["hub", "cdn"])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 416, 418, 500, 503])
def test_no_refusal_shows_the_token_or_a_signed_link(
    tiny_dir, hub, behave, quick, monkeypatch, caplog, tmp_path, status, at
):
    """Even a server that repeats in its answer what it was sent."""
    behave("refusing", refusing(status))
    server = hub(tiny_dir, "refusing", at=at, life=60)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    caplog.set_level(logging.DEBUG, "deltafin")
    source = parse_model("some/model", tmp_path).source(quick)
    with pytest.raises(NetworkError) as refusal:
        build_catalog(source, tmp_path / "catalogs" / "it.catalog", "it")
    source.close()
    assert str(status) in str(refusal.value)
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("deltafin")]
    assert_clean("\n".join([str(refusal.value), *traceback.format_exception(refusal.value), *ours]))
    assert_clean(written(tmp_path))
    assert_auth_only_on_hub(server)


@pytest.mark.parametrize("mode", ["truncate", "reset_midway", "gzip_forced", "no_content_range", "wrong_content_range"])
def test_no_error_of_a_transfer_shows_the_signed_link(tiny_dir, hub, behave, range_server, quick, caplog, mode):
    def through_link(h, req):
        if h.role == "hub":
            return h.reply(302, {"Location": h.cdn_location(req.entry.name)}, b"", req.head)
        return range_server.MODES[mode](h, req)

    behave("through_link", through_link)
    server = hub(tiny_dir, "through_link", life=60, keep=0.1, shift=3)
    caplog.set_level(logging.DEBUG, "deltafin")
    files = RemoteFiles(f"{server.url}/some/model/resolve/{'a' * 40}", TOKEN, quick)
    with pytest.raises(NetworkError) as refusal:
        files.read_into("config.json", 10, memoryview(bytearray(1000)), Expected())
    files.close()
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("deltafin")]
    assert ours
    assert_clean("\n".join([str(refusal.value), *traceback.format_exception(refusal.value), *ours]))
    assert_auth_only_on_hub(server)


def test_not_even_the_http_librarys_own_log_shows_a_link(tiny_dir, hub, behave, quick, caplog):
    """urllib3 logs addresses, at DEBUG always, and with a warning and a traceback where a header is malformed."""

    def malformed(h, req):
        if h.role == "hub":
            return h.reply(302, {"Location": h.cdn_location(req.entry.name)}, b"", req.head)
        h.send_response(206)
        h.send_header("Content-Range", req.content_range())
        h.send_header("Content-Length", str(req.length))
        h._headers_buffer.append(b"a line without a colon\r\n")
        h.end_headers()
        h.push(req.body())

    behave("malformed", malformed)
    server = hub(tiny_dir, "malformed", life=60)
    caplog.set_level(logging.DEBUG)
    files = RemoteFiles(f"{server.url}/some/model/resolve/{'a' * 40}", TOKEN, quick)
    files.read_into("config.json", 10, memoryview(bytearray(1000)), Expected())
    files.close()
    others = {r.name for r in caplog.records if not r.name.startswith("deltafin")}
    assert {"urllib3.connection", "urllib3.connectionpool"} <= others
    assert "Failed to parse headers" in caplog.text
    assert "Traceback" not in caplog.text
    assert_clean(caplog.text)


@pytest.mark.parametrize(
    "location",
    [
        "http://localhost:1/x?Signature=s", "http://[::1?Signature=s", "ftp://x/?Signature=s", "http://\xff?Signature=s",
        "http://a..b/?Signature=s", "http://no-such-host.invalid/?Signature=s", "https://127.0.0.1:1/?Signature=s",
    ],
)  # fmt: skip
def test_no_error_of_a_link_that_leads_nowhere_shows_it(tiny_dir, hub, behave, quick, caplog, location):
    behave("nowhere", lambda h, req: h.reply(302, {"Location": location}, b"", req.head))
    server = hub(tiny_dir, "nowhere")
    caplog.set_level(logging.DEBUG, "deltafin")
    files = RemoteFiles(f"{server.url}/some/model/resolve/{'a' * 40}", TOKEN, quick)
    with pytest.raises(NetworkError) as refusal:
        files.read_into("config.json", 10, memoryview(bytearray(1000)), Expected())
    files.close()
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("deltafin")]
    assert_clean("\n".join([str(refusal.value), *traceback.format_exception(refusal.value), *ours]))


@pytest.mark.parametrize("status", [401, 403, 404, 500, 502])
def test_no_refusal_of_the_repository_itself_shows_the_token(
    tiny_dir, hub, range_server, monkeypatch, df_index, tmp_path, status, quick
):
    monkeypatch.setattr("deltafin.indexer.remote.RetryPolicy", lambda: quick)

    def api(handler, path):
        handler.reply(status, {"X-Error-Message": f"{handler.headers.get('Authorization')}"}, b"no", False)

    monkeypatch.setattr(range_server.Handler, "_api", api)
    hub(tiny_dir)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = df_index("build", "some/model", "-vv")
    assert result.status == 1
    assert "some/model" in result.stderr
    assert "Traceback" not in result.stderr
    assert_clean(result.stdout + result.stderr + written(tmp_path))


def test_a_crash_shows_neither(tiny_dir, hub, quick, monkeypatch, tmp_path):
    hub(tiny_dir, "redirect_cross_host_expiring", life=60)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    source = parse_model("some/model", tmp_path).source(quick)

    def crash(done, total):
        raise RuntimeError("a mistake of ours")

    with pytest.raises(RuntimeError) as crashed:
        build_catalog(source, tmp_path / "it.catalog", "it", crash)
    source.close()
    assert_clean("".join(traceback.format_exception(crashed.value)))


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("by", ["home", "variable"])
def test_passwords_in_netrc_are_not_sent(
    tiny_dir, hub, behave, range_server, monkeypatch, tmp_path, df_index, token, by
):
    """requests adds them to every request for a known host, in place of the token and also after a redirect."""
    seen = set()

    def remember(h, req):
        seen.add((h.role, h.headers.get("Authorization")))
        return range_server.MODES["redirect_cross_host_expiring"](h, req)

    netrc = tmp_path / ".netrc"
    netrc.write_text("".join(f"machine {m}\nlogin user\npassword secret\n" for m in ("localhost", "127.0.0.1")))
    netrc.chmod(0o600)
    monkeypatch.setenv(*("HOME", str(tmp_path)) if by == "home" else ("NETRC", str(netrc)))
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    behave("remember", remember)
    server = hub(tiny_dir, "remember", life=60, strict=0)
    assert df_index("build", "some/model").status == 0
    assert seen == {("hub", f"Bearer {token}" if token else None), ("cdn", None)}
    assert {row["auth"] for row in server.state.log if row["kind"] == "api"} == {token is not None}


@pytest.fixture
def stranger():
    """A server that remembers the Authorization headers it is sent, and where it redirects to."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        location = ""

        def do_GET(self):
            seen.append(self.headers.get("Authorization"))
            self.send_response(302 if Handler.location else 404)
            if Handler.location:
                self.send_header("Location", Handler.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server.server_port, seen, Handler
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:{stranger}\\@127.0.0.1:{hub}/x",
        "http://127.0.0.1:{hub}@127.0.0.1:{stranger}/x",
        "http://127.0.0.1:{stranger}/\t@127.0.0.1:{hub}/x",
        "//127.0.0.1:{stranger}\\@127.0.0.1:{hub}/x",
    ],
)
def test_an_address_that_two_parsers_read_differently_gets_no_token(stranger, quick, address):
    """The first hop, still on the hub, redirects to an address whose host depends on who reads it."""
    port, seen, handler = stranger
    hub_seen: list[str | None] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            hub_seen.append(self.headers.get("Authorization"))
            self.send_response(302)
            self.send_header("Location", address.format(stranger=port, hub=self.server.server_port))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True).start()
    try:
        files = RemoteFiles(f"http://127.0.0.1:{hub.server_port}/org/x/resolve/main", TOKEN, quick)
        with pytest.raises(NetworkError) as failure:
            files.read_into("f", 0, memoryview(bytearray(8)), Expected())
        files.close()
    finally:
        hub.shutdown()
        hub.server_close()
    assert hub_seen[0] == f"Bearer {TOKEN}"
    assert not any(seen), seen
    assert_clean(str(failure.value))
    assert handler.location == ""


def test_https_in_capitals_is_not_downgraded():
    with pytest.raises(ValueError, match="refusing a redirect from https to 'http'"):
        redirect_target("HTTPS://hub.invalid/x/f", "http://hub.invalid/x")
