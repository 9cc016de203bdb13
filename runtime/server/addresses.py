"""Where a server listens: addresses for a host, whether others can reach them, and sockets that have them."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from deltafin.errors import BadRequest, DeltafinError

_IPV6 = socket.AF_INET6


@dataclass(frozen=True, slots=True)
class Address:
    """One that a host's name means."""

    family: socket.AddressFamily
    text: str

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine can reach it."""
        address = ipaddress.ip_address(self.text.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return bool((mapped or address).is_loopback)

    def with_port(self, port: int) -> str:
        return f"[{self.text}]:{port}" if self.family == _IPV6 else f"{self.text}:{port}"


def addresses_of(host: str) -> list[Address]:
    """What a host's name or address means on this machine, each once. An address is looked up nowhere.

    Raises DeltafinError if it means nothing.
    """
    if not host or not host.isprintable() or host != host.strip():
        raise BadRequest(f"--host {host!r}: give a name or an address, like 127.0.0.1")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    flags = socket.AI_PASSIVE | (socket.AI_NUMERICHOST if _is_address(bare) else 0)
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no name"
        raise DeltafinError(
            f"--host {host}: not known ({why}); give an address of this machine, like 127.0.0.1"
        ) from None
    there = [Address(family, str(place[0])) for family, _, _, _, place in found if family in (socket.AF_INET, _IPV6)]
    if not there:
        raise DeltafinError(f"--host {host}: has no address; give one of this machine, like 127.0.0.1")
    return list(dict.fromkeys(there))


class Listeners:
    """Sockets that are bound but do not listen yet: the port is ours while the model is opened, and nobody waits.

    Closes them at the end; closing again does nothing.
    """

    def __init__(self, host: str, addresses: Sequence[Address], port: int) -> None:
        """Of several addresses those may be lacking that this machine has not, but not all. Port 0 is any free one.

        Raises DeltafinError.
        """
        self.sockets: list[socket.socket] = []
        self.addresses: list[Address] = []
        self.port = port
        self._host = host
        try:
            self._bind_all(addresses)
        except OSError as e:
            self.close()
            raise _refused(e, host, port) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def urls(self) -> list[str]:
        return [f"http://{address.with_port(self.port)}" for address in self.addresses]

    def listen(self, backlog: int) -> None:
        """Clients may connect from now on. Raises DeltafinError."""
        try:
            for each in self.sockets:
                each.listen(backlog)
        except OSError as e:  # two may be bound, as long as none listens
            raise _refused(e, self._host, self.port) from None

    def close(self) -> None:
        for each in self.sockets:
            each.close()

    def _bind_all(self, addresses: Sequence[Address]) -> None:
        absent: OSError | None = None
        for address in addresses:
            try:
                self._bind(address)
            except OSError as e:
                if e.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent = e
        if absent is not None and not self.sockets:
            raise absent

    def _bind(self, address: Address) -> None:
        listener = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a restart, at once
            if address.family == _IPV6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # 0.0.0.0 is an address of its own
            listener.bind((address.text, self.port))
        except OSError:
            listener.close()
            raise
        self.sockets.append(listener)
        self.addresses.append(address)
        self.port = listener.getsockname()[1]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _refused(error: OSError, host: str, port: int) -> DeltafinError:
    match error.errno:
        case errno.EADDRINUSE:
            return DeltafinError(
                f"port {port} of {host} is in use, maybe by another server; stop it, or choose another --port (0: any)"
            )
        case errno.EACCES:
            return DeltafinError(f"port {port} needs rights that this user has not; choose a --port above 1023")
        case errno.EADDRNOTAVAIL | errno.EAFNOSUPPORT:
            return DeltafinError(f"--host {host} is no address of this machine; give one that is, like 127.0.0.1")
        case _:
            return DeltafinError(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}")
