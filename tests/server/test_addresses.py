"""Where a server listens: who can reach it, and one line for whatever is in the way."""

from __future__ import annotations

import os
import re
import socket

import pytest

from deltafin.errors import BadRequest, DeltafinError
from deltafin.runtime.server.addresses import Address, Listeners, addresses_of


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"])
def test_loopback_is_known_by_its_address(host):
    found = addresses_of(host)
    assert found and all(address.is_loopback for address in found)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "2001:db8::1", "::ffff:192.0.2.7", "169.254.1.1"])
def test_whatever_others_can_reach_is_no_loopback(host):
    assert not any(address.is_loopback for address in addresses_of(host))


def test_a_name_is_what_it_resolves_to_and_not_what_it_looks_like(monkeypatch):
    def resolve(host, port, **keywords):
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.9", 0)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert [address.is_loopback for address in addresses_of("localhost.example")] == [True, False]


@pytest.mark.parametrize("host", ["", " ", " 127.0.0.1", "a\nb"])
def test_what_is_no_name_is_wrong_usage(host):
    with pytest.raises(BadRequest, match="give a name or an address"):
        addresses_of(host)


@pytest.mark.parametrize("host", ["nowhere.invalid", "1.2.3.4.5.6", "x" * 70, "ä" * 80])
def test_a_host_that_is_not_known_is_one_line(host):
    with pytest.raises(DeltafinError) as e:
        addresses_of(host)
    assert f"--host {host}" in str(e.value) and "\n" not in str(e.value)


def test_any_free_port_is_one_for_all_addresses():
    both = [Address(socket.AF_INET, "127.0.0.1"), Address(socket.AF_INET, "127.0.0.2")]
    with Listeners("two", both, 0) as listeners:
        assert listeners.port > 0
        assert listeners.urls == [f"http://127.0.0.1:{listeners.port}", f"http://127.0.0.2:{listeners.port}"]
        assert [s.getsockname()[1] for s in listeners.sockets] == [listeners.port] * 2


def test_nobody_connects_before_it_listens():
    with Listeners("127.0.0.1", addresses_of("127.0.0.1"), 0) as listeners:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listeners.port), timeout=5)
        listeners.listen(8)
        socket.create_connection(("127.0.0.1", listeners.port), timeout=5).close()


def test_a_port_in_use_is_one_line_that_says_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(DeltafinError, match=rf"port {port} of 127.0.0.1 is in use.*choose another --port"):
            Listeners("127.0.0.1", addresses_of("127.0.0.1"), port)


def test_of_two_that_begin_together_one_is_refused_when_it_would_listen():
    with (
        Listeners("127.0.0.1", addresses_of("127.0.0.1"), 0) as first,
        Listeners("127.0.0.1", addresses_of("127.0.0.1"), first.port) as second,
    ):
        first.listen(8)
        with pytest.raises(DeltafinError, match="in use"):
            second.listen(8)


def test_an_address_of_another_machine_is_refused_and_leaves_no_socket_open():
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(DeltafinError, match=r"--host 192\.0\.2\.7 is no address of this machine"):
        Listeners("192.0.2.7", addresses_of("192.0.2.7"), 0)
    with pytest.raises(DeltafinError, match="in use"), Listeners("127.0.0.1", addresses_of("127.0.0.1"), 0) as taken:
        taken.listen(1)
        Listeners("both", [Address(socket.AF_INET, "127.0.0.2"), *taken.addresses], taken.port)
    assert len(os.listdir("/dev/fd")) == before


def test_an_address_that_this_machine_lacks_is_left_out_if_there_is_another():
    """As ::1 of localhost, where there is no IPv6."""
    with Listeners("localhost", [Address(socket.AF_INET, "192.0.2.7"), *addresses_of("127.0.0.1")], 0) as listeners:
        assert [address.text for address in listeners.addresses] == ["127.0.0.1"]


def test_a_port_that_needs_rights_says_so(monkeypatch):
    def refuse(self, address):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(DeltafinError, match=re.escape("port 80 needs rights that this user has not")):
        Listeners("127.0.0.1", addresses_of("127.0.0.1"), 80)
