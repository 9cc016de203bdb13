"""Proxies, certificates and tokens: whoever has set up huggingface_hub need not set up anything else."""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

TOKEN = "hf_dummyTokenThatMustNotBeSeen"


@pytest.fixture(autouse=True)
def hasty(monkeypatch, quick) -> None:
    monkeypatch.setattr("deltafin.indexer.remote.RetryPolicy", lambda: quick)


# ---- proxies --------------------------------------------------------------------------------------


@pytest.fixture
def proxy() -> Iterator[ThreadingHTTPServer]:
    """Forwards plain HTTP; `seen` holds the addresses it was asked for."""

    class Forward(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.server.seen.append(self.path)
            target = urllib.parse.urlsplit(self.path)
            there = http.client.HTTPConnection(target.netloc)
            headers = {name: value for name, value in self.headers.items() if not name.lower().startswith("proxy")}
            there.request("GET", urllib.parse.urlunsplit(("", "", *target[2:])), headers=headers)
            answer = there.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("server", "date", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            there.close()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Forward)
    server.seen = []
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_every_request_goes_through_the_proxy(tiny_dir, hub, proxy, df_index, monkeypatch, variable):
    server = hub(tiny_dir)
    monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.server_port}")
    assert df_index("build", "some/model").status == 0
    assert len(proxy.seen) == len(server.state.log) == 14
    assert all(address.startswith(f"{server.url}/") for address in proxy.seen)


def test_no_proxy_names_hosts_that_are_asked_directly(tiny_dir, hub, proxy, df_index, monkeypatch):
    hub(tiny_dir)
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert df_index("build", "some/model").status == 0
    assert proxy.seen == []


def test_a_proxy_that_is_not_there_is_named_as_what_to_check(tiny_dir, hub, df_index, monkeypatch):
    server = hub(tiny_dir)
    monkeypatch.setenv("HTTP_PROXY", "http://user:secret@127.0.0.1:1")
    done = df_index("build", "some/model")
    assert done.status == 1
    assert "the proxy refused the connection" in done.line and "a proxy)" in done.line
    assert "secret" not in done.stderr and server.state.log == []


@pytest.mark.parametrize(
    ("address", "complaint"),
    [("http://", "the proxy's address cannot be used"), ("socks5://127.0.0.1:1", "SOCKS|proxy")],
)
def test_a_proxy_that_cannot_be_used_is_said(tiny_dir, hub, df_index, monkeypatch, address, complaint):
    server = hub(tiny_dir)
    monkeypatch.setenv("HTTP_PROXY", address)
    done = df_index("build", "some/model")
    assert done.status == 1 and re.search(complaint, done.line), done.line
    assert server.state.log == []


def test_a_proxy_that_wants_a_password_gets_it_and_nobody_else_does(
    tiny_dir, hub, proxy, df_index, monkeypatch, range_server
):
    server, told = hub(tiny_dir), []
    real = range_server.Handler._route

    def route(handler, head):
        told.append(handler.headers.get("Proxy-Authorization"))
        return real(handler, head)

    monkeypatch.setattr(range_server.Handler, "_route", route)
    monkeypatch.setenv("HTTP_PROXY", f"http://user:secret@127.0.0.1:{proxy.server_port}")
    done = df_index("build", "some/model", "-vv")
    assert done.status == 0 and len(proxy.seen) == len(server.state.log)
    assert "secret" not in done.stdout + done.stderr
    assert set(told) == {None}


# ---- certificates ---------------------------------------------------------------------------------


@pytest.fixture
def tls_hub(certificate, range_server, tiny_dir, monkeypatch) -> Iterator[Callable[[], object]]:
    """The hub stand-in over TLS, with a certificate that only `certificate` vouches for."""
    server = range_server.FaultServer(root=str(tiny_dir))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.hub.socket = context.wrap_socket(server.hub.socket, server_side=True)
    monkeypatch.setenv("HF_ENDPOINT", server.url.replace("http:", "https:"))
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    with server:
        yield server


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"])
def test_a_bundle_of_certificates_is_believed_whichever_variable_names_it(
    tls_hub, certificate, df_index, monkeypatch, variable
):
    monkeypatch.setenv(variable, str(certificate))
    done = df_index("build", "some/model")
    assert done.status == 0, done.stderr
    assert len(tls_hub.state.log) == 14


def test_without_one_the_certificate_is_refused_and_the_line_says_so(tls_hub, df_index):
    done = df_index("build", "some/model")
    assert done.status == 1
    assert "TLS failed: the certificate was not accepted" in done.line


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"])
def test_a_bundle_that_is_not_there_is_one_line(tls_hub, df_index, monkeypatch, tmp_path, variable):
    monkeypatch.setenv(variable, str(tmp_path / "nothing.pem"))
    done = df_index("build", "some/model")
    assert done.status == 1
    assert "cannot connect" in done.line and "nothing.pem" in done.line


# ---- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "sent"),
    [
        ({"HUGGING_FACE_HUB_TOKEN": TOKEN}, True),
        ({"HF_TOKEN_PATH": "{file}"}, True),
        ({"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}, False),
    ],
    ids=lambda value: "+".join(value) or "none" if isinstance(value, dict) else "",
)
def test_the_token_is_found_where_huggingface_hub_finds_it(tiny_dir, hub, command, tmp_path, variables, sent):
    """In a process of its own: huggingface_hub reads some of these when it is imported."""
    file = tmp_path / "my token"
    file.write_text(TOKEN + "\n")
    server = hub(tiny_dir)
    env = {name: value.format(file=file) for name, value in variables.items()}
    done = command("df-index", "build", "some/model", "-vv", env=env)
    assert done.returncode == 0, done.stderr
    assert {row["auth"] for row in server.state.log} == {sent}
    assert TOKEN not in done.stdout + done.stderr
