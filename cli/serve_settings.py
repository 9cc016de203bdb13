"""Options of who may ask a server, and how much; and what they come to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from deltafin.cli.options import ByteSize, gathered, options
from deltafin.errors import BadRequest

if TYPE_CHECKING:
    from deltafin.runtime.server.addresses import Address
    from deltafin.runtime.server.settings import Settings

KEY_VARIABLE = "DELTAFIN_API_KEY"
_ORIGIN = re.compile(r"(https?)://([a-z0-9.-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?", re.ASCII)
_MOST_NAME = 256

_options = options(
    click.option(
        "--host",
        default="127.0.0.1",
        show_default=True,
        metavar="HOST",
        help="Where to listen. Whatever others can reach needs a key.",
    ),
    click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8000,
        show_default=True,
        metavar="N",
        help="Of the host; 0 takes any that is free and says which.",
    ),
    click.option(
        "--api-key",
        metavar="KEY",
        help=f"What requests must have as their API key. Other users of this machine see a command line: better "
        f"set {KEY_VARIABLE}.",
    ),
    click.option(
        "--cors",
        "origins",
        multiple=True,
        metavar="ORIGIN",
        help="Let web pages of this origin ask, like https://chat.example. Repeatable (default: none).",
    ),
    click.option(
        "--max-body",
        type=ByteSize(),
        default="16MiB",
        show_default=True,
        metavar="SIZE",
        help="Longest request, files aside.",
    ),
    click.option(
        "--max-file",
        type=ByteSize(),
        default="512MiB",
        show_default=True,
        metavar="SIZE",
        help="Largest file that may be uploaded for a batch.",
    ),
    click.option("--log-prompts", is_flag=True, help="Write prompts and answers to the log, too; keep it to yourself."),
)


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """As they were given."""

    host: str
    port: int
    api_key: str | None
    origins: tuple[str, ...]
    max_body: int
    max_file: int
    log_prompts: bool

    def __repr__(self) -> str:
        """Without the key."""
        return f"AccessOptions({self.host}:{self.port})"


def access_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options; the command takes them as one argument `access`."""
    return _options(gathered("access", AccessOptions)(command))


def settings_of(access: AccessOptions, addresses: list[Address]) -> Settings:
    """Checks the options; `addresses` are what the host means. Raises BadRequest."""
    from deltafin.runtime.server.settings import Settings

    key = _api_key(access.api_key)
    open_to = [address.text for address in addresses if not address.is_loopback]
    if open_to and key is None:
        meant = "" if open_to == [access.host] else f" ({', '.join(open_to)})"
        raise BadRequest(
            f"--host {access.host}{meant} can be reached from other machines: set {KEY_VARIABLE} or "
            "give --api-key, or listen on 127.0.0.1"
        )
    for name, nbytes in (("--max-body", access.max_body), ("--max-file", access.max_file)):
        if nbytes < 1024:
            raise BadRequest(f"{name} {nbytes}: no request is so short; give 1KiB or more")
    return Settings(
        host=access.host,
        port=access.port,
        api_key=key,
        cors_origins=tuple(dict.fromkeys(map(_origin, access.origins))),
        most_body_nbytes=access.max_body,
        most_file_nbytes=access.max_file,
        logs_prompts=access.log_prompts,
    )


def name_of(given: str | None, own: str) -> str:
    """What requests call the model. Raises BadRequest."""
    if given is None:
        return own
    if not given or len(given) > _MOST_NAME or not given.isprintable() or given != given.strip():
        raise BadRequest(f"--name {given[:80]!r}: give 1 to {_MOST_NAME} printable characters")
    return given


def _api_key(given: str | None) -> str | None:
    """The key, if there is one. No message repeats it."""
    where, key = ("--api-key", given) if given is not None else (KEY_VARIABLE, os.environ.get(KEY_VARIABLE))
    if key is None:
        return None
    if not key:
        raise BadRequest(f"{where} is empty; give a key, or leave it out")
    if not all("!" <= character <= "~" for character in key):
        raise BadRequest(f"{where}: a key has letters, digits and signs of ASCII only, and no blanks")
    return key


def _origin(text: str) -> str:
    """As a browser sends it."""
    match = _ORIGIN.fullmatch(text.lower())
    if match is None or int(match[3] or 0) > 65535:
        raise BadRequest(
            f"--cors {text!r}: an origin is a scheme and a host, maybe a port, like https://chat.example or "
            "http://localhost:3000"
        )
    scheme, host, port = match.groups()
    usual = {"http": "80", "https": "443"}[scheme]
    return f"{scheme}://{host}" + ("" if port in (None, usual) else f":{port}")
