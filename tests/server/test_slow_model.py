"""A model so slow that a pass outlasts the patience of proxies: no connection is ever silent for long.

The hub drips every expert, so that the first pass, which needs most of them, takes as long as the test wants.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import openai
import pytest

from deltafin.store import fetch, open_store, spine_items

REPO = "org/demo"
QUESTION = "Name the capital of France, the capital of Japan, three colours and the first five prime numbers."
BODY = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3, "reasoning_effort": "none"}


@dataclass
class Heard:
    """What a client read from its socket, and when."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def gaps(self) -> list[float]:
        """Seconds of silence, the one before the first byte too."""
        times = [self.began, *(at for at, _ in self.pieces)]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def lines(self) -> list[str]:
        """Of the body, without the sizes of its chunks."""
        _, _, body = b"".join(data for _, data in self.pieces).partition(b"\r\n\r\n")
        return [line for line in body.decode().replace("\r\n", "\n").split("\n") if line.startswith((":", "data:"))]


def _listen(port: int, body: dict, heard: Heard) -> None:
    """A client of bare sockets."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=120) as client:
        client.sendall(head.encode() + f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        while piece := client.recv(65536):
            heard.pieces.append((time.monotonic(), piece))


def _all_at_once(*clients: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run(client: Callable[[], None]) -> None:
        try:
            client()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


def _check(new_server, hub, demo_dir, tmp_path, *, every: float, least_s: float, most_gap_s: float, **settings) -> None:
    """`every`: seconds between two drips of 4 KB. `least_s` that the first pass must take for the test to mean much."""
    server = hub(demo_dir)
    with open_store(REPO, cache_dir=tmp_path / "cache") as store:
        fetch(store, spine_items(store.catalog))
        server.set_mode("slow_drip", bytes=4096, every=every)
        served = new_server(store, **settings)
        body = {**BODY, "model": served.model_name}
        streamed, whole = Heard(), Heard()
        patience = httpx.Timeout(10, read=most_gap_s)  # of a client that gives up when nothing comes for so long
        url = f"{served.url}/v1"
        texts: list[str] = []

        def official(*, stream: bool) -> None:
            with openai.OpenAI(api_key="none", base_url=url, timeout=patience, max_retries=0) as client:
                if stream:
                    chunks = client.chat.completions.create(**body, stream=True)
                    texts.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
                else:
                    texts.append(client.chat.completions.create(**body).choices[0].message.content or "")

        began = time.monotonic()
        try:
            _all_at_once(
                lambda: _listen(served.port, {**body, "stream": True}, streamed),
                lambda: _listen(served.port, body, whole),
                lambda: official(stream=True),
                lambda: official(stream=False),
            )
        finally:
            served.close()
    took = time.monotonic() - began
    assert took > least_s, "the model was not slow"
    assert max(streamed.gaps) < most_gap_s and max(whole.gaps) < most_gap_s, (streamed.gaps, whole.gaps)
    said = [json.loads(line[1:]) for line in streamed.lines if line.startswith(":")]
    under_way = [told for told in said if told.get("layer") is not None]
    assert len({told["layer"] for told in under_way}) > 1, "it is told where the pass is"
    assert max(told["fetched_bytes"] for told in under_way) > under_way[0]["fetched_bytes"], "and what is fetched"
    assert under_way[0]["experts_missing"] > 0
    assert streamed.lines[-1] == "data: [DONE]"
    last = whole.pieces[-1][1]
    assert last.endswith(b"0\r\n\r\n"), "and an answer that is not streamed is whole"
    assert len(set(texts)) == 1 and texts[0]


def test_while_a_pass_takes_seconds_something_is_heard_all_the_time(new_server, hub, demo_dir, tmp_path):
    _check(new_server, hub, demo_dir, tmp_path, every=0.01, least_s=1.5, most_gap_s=1.2, keep_alive_s=0.2)


@pytest.mark.slow
def test_while_a_pass_takes_half_a_minute_no_silence_lasts_fifteen_seconds(new_server, hub, demo_dir, tmp_path):
    """As the server is set up unasked."""
    _check(new_server, hub, demo_dir, tmp_path, every=0.25, least_s=20.0, most_gap_s=15.0)
