"""How a server is set up: who may ask, and how much."""

from __future__ import annotations

from dataclasses import dataclass

MOST_BODY_NBYTES = 16 << 20
MOST_FILE_NBYTES = 512 << 20
KEEP_ALIVE_S = 8.0  # silence on a connection that waits; proxies cut after 15 to 60
BODY_TIMEOUT_S = 60.0  # for a request's body to arrive, since its last byte


@dataclass(frozen=True, slots=True)
class Settings:
    """All of it is known before the first request."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None  # that every request must have; a secret
    cors_origins: tuple[str, ...] = ()  # of web pages that may ask
    most_body_nbytes: int = MOST_BODY_NBYTES
    most_file_nbytes: int = MOST_FILE_NBYTES
    keep_alive_s: float = KEEP_ALIVE_S
    body_timeout_s: float = BODY_TIMEOUT_S
    logs_prompts: bool = False

    def __repr__(self) -> str:
        """Without the key."""
        return f"Settings({self.host}:{self.port}{', with a key' if self.api_key else ''})"
