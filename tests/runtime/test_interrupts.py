"""An interrupt may come at any instant of a pass: the next passes are right to the bit, and nothing hangs.

Python looks for signals right after C calls, so a read can be queued just before its future is known to the caller.
"""

from __future__ import annotations

import heapq
import threading
import time
from types import SimpleNamespace

import pytest

import deltafin
from deltafin.errors import BadRequest
from deltafin.runtime import Segment
from deltafin.runtime.native import opening
from deltafin.store import drive as drive_room
from deltafin.store import landing as landing_room
from deltafin.store import least_ring_nbytes
from deltafin.store import spine as spine_room
from deltafin.store import tier as tier_room
from deltafin.store.drive import Drive

PROMPT = [5, 17, 2, 200, 33, 7, 90]


@pytest.fixture
def model(tiny_dir, tmp_path, monkeypatch):
    """tiny in small pieces, with four slots and a few experts that stay."""
    from dataclasses import replace

    monkeypatch.setattr("deltafin.indexer.catalog.SPINE_SPAN_NBYTES", 12_000)
    monkeypatch.setattr("deltafin.indexer.catalog.SMALL_TENSOR_NBYTES", 2_000)
    real = opening.plan_memory

    def plan(nbytes, catalog, layers, *more):
        return replace(
            real(nbytes, catalog, layers, *more),
            resident=(2, 5),
            ring_nbytes=least_ring_nbytes(layers),
            held_nbytes=2 * max(layer.held_nbytes for layer in layers),
            slots=4,
            resident_experts=12,
        )

    monkeypatch.setattr(opening, "plan_memory", plan)
    with deltafin.open(tiny_dir, cache_dir=tmp_path) as model:
        yield model


def forward(model) -> bytes:
    return model.forward([Segment(model.sequence(), PROMPT)]).tobytes()


@pytest.fixture
def slow(monkeypatch) -> None:
    """Reads that begin while `slow.on` take long enough to write into memory that somebody else has got by then."""
    real, state = Drive.read, SimpleNamespace(on=False)

    def read(self, path, offset, nbytes, slot):
        if state.on:
            time.sleep(0.03)
        return real(self, path, offset, nbytes, slot)

    monkeypatch.setattr(Drive, "read", read)
    return state


def interrupting(monkeypatch, room, at: int) -> SimpleNamespace:
    """`room` is interrupted just after it has pushed something for the at-th time."""
    state = SimpleNamespace(left=at, fired=False)

    def heappush(heap, item):
        heapq.heappush(heap, item)
        state.left -= 1
        if state.left == -1 and threading.current_thread() is threading.main_thread():
            state.fired = True
            raise KeyboardInterrupt

    fake = SimpleNamespace(**{**vars(heapq), "heappush": heappush})
    monkeypatch.setattr(room, "heapq", fake)
    return state


@pytest.mark.parametrize("at", [0, 1, 5, 19, 40, 77, 120])
def test_after_an_interrupt_when_a_read_was_just_queued_all_is_right(model, slow, monkeypatch, at):
    wanted = forward(model)
    slow.on = True
    with monkeypatch.context() as patch:
        state = interrupting(patch, drive_room, at)
        with pytest.raises(KeyboardInterrupt):
            forward(model)
        assert state.fired
    slow.on = False
    for _ in range(3):
        assert forward(model) == wanted


@pytest.mark.parametrize("at", [0, 3, 9])
def test_after_an_interrupt_while_an_expert_is_kept_no_slot_has_two_owners(model, monkeypatch, at):
    with monkeypatch.context() as patch:
        state = interrupting(patch, tier_room, at)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(5):
                forward(model)
        assert state.fired
    store = model.store
    free = {slot.ctypes.data for slot in store._slots}
    resident = {slot.ctypes.data for slot, _ in store._tier._resident.values()}
    assert not free & resident
    wanted = forward(model)
    for _ in range(4):
        assert forward(model) == wanted


@pytest.mark.parametrize("room", [landing_room, spine_room], ids=["experts", "spine"])
def test_interrupts_while_an_interrupted_pass_waits_for_its_reads_do_not_cut_the_wait_short(
    model, slow, monkeypatch, room
):
    wanted = forward(model)
    slow.on = True
    real, interrupts = drive_room.wait, iter([KeyboardInterrupt, KeyboardInterrupt])

    def wait(futures):
        if (error := next(interrupts, None)) is not None:
            raise error
        return real(futures)

    class Stop(Exception):
        pass

    class Stopper(deltafin.Observer):
        def layer(self, layer, num_layers):
            if layer == 4:
                raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(drive_room, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            model.forward([Segment(model.sequence(), PROMPT)], observer=Stopper())
    assert next(interrupts, None) is None
    slow.on = False
    for _ in range(2):
        assert forward(model) == wanted


def test_an_interrupt_before_anybody_could_close_the_walk_is_made_good_by_the_next(model, slow):
    wanted = forward(model)
    slow.on = True
    model._backend.spine.walk(head=True)  # and nobody knows of it
    slow.on = False
    assert forward(model) == wanted


def test_a_second_pass_at_once_is_refused_and_the_first_goes_on(model):
    wanted = forward(model)

    class Greedy(deltafin.Observer):
        refused = 0

        def layer(self, layer, num_layers):
            if layer == 3:
                with pytest.raises(BadRequest, match="another pass of this model is under way"):
                    forward(model)
                Greedy.refused += 1

    found = model.forward([Segment(model.sequence(), PROMPT)], observer=Greedy())
    assert found.tobytes() == wanted and Greedy.refused == 1
    assert forward(model) == wanted
