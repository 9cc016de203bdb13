"""An interruption that ends something smaller than the command: the store goes on afterwards."""

from __future__ import annotations

import threading
import time

import pytest

from deltafin.errors import DeltafinError


def test_a_store_that_was_interrupted_fetches_again_after_resuming(hub_store, tiny_dir, tiny_truth):
    store, server = hub_store()
    server.set_mode("slow_drip", bytes=16, every=0.2)
    failures = []

    def read():
        try:
            for _ in store.experts(1, [0, 1]):
                pass
        except DeltafinError as e:
            failures.append(e)

    reading = threading.Thread(target=read)
    reading.start()
    end = time.monotonic() + 20
    while not server.state.log and time.monotonic() < end:
        time.sleep(0.01)
    store.interrupt()
    reading.join(timeout=20)
    assert not reading.is_alive() and failures
    with pytest.raises(DeltafinError):
        list(store.experts(1, [0]))
    store.resume()
    server.set_mode("ok")
    found = {number: bytes(span) for number, span in store.experts(1, [0, 1])}
    assert found == {n: tiny_truth.expert(1, n) for n in (0, 1)}
