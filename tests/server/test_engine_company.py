"""What rides beside requests: it takes what they leave, steps back for them, and cannot harm them."""

from __future__ import annotations

import threading
import time

import pytest

from deltafin.errors import DiskError
from deltafin.runtime import Generation
from deltafin.runtime.server import Company
from deltafin.runtime.server.engine import STUCK_S
from tests.server.engines import GUILTY, size_of
from tests.server.test_engine import ids_of, stays_sound


class Riders(Company):
    """Raw prompts, answered where there is room; what steps back begins anew."""

    def __init__(self, *tasks) -> None:
        self.lock = threading.Lock()
        self.todo, self.riding, self.done, self.back, self.errors = list(tasks), {}, [], 0, []
        self.engine = None
        self.closed = False
        self.asked = 0

    def ready(self) -> bool:
        self.asked += 1
        with self.lock:
            return bool(self.todo)

    def join(self, runner, room) -> None:
        while self.todo and room.fits(self.todo[0].tokens):
            task = self.todo.pop(0)
            seq = self.engine.model.sequence()
            generation = Generation(seq, task.ids, max_new=task.max_new, sampling=task.sampling)
            self.riding[id(generation)] = (generation, task, room, room.take(task.tokens))
            runner.add(generation)

    def owns(self, generation) -> bool:
        return id(generation) in self.riding

    def took(self, steps) -> None:
        for step in steps:
            if step.generation.finish is not None:
                generation, task, room, taken = self.riding.pop(id(step.generation))
                room.give(taken)
                self.done.append((task, generation.chosen))

    def step_back(self, runner, room) -> bool:
        if not self.riding:
            return False
        _, (generation, task, _, taken) = self.riding.popitem()
        runner.remove(generation)
        room.give(taken)
        self.todo.insert(0, task)
        self.back += 1
        return True

    def failed(self, generation, error, *, alone) -> None:
        _, task, room, taken = self.riding.pop(id(generation))
        room.give(taken)
        self.errors.append((task, error, alone))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def ride(new_engine):
    """`ride(riders, size)`: an engine with company."""

    def start(riders, size=None, **keywords):
        asking = new_engine(size, start=False, **keywords)
        riders.engine = asking.engine
        asking.engine.start(riders)
        return asking

    return start


@pytest.fixture
def tasks(new_engine):
    """`tasks(n)`: so many prompts."""
    asking = new_engine(start=False)
    return lambda count, new=6: [asking.text(ids_of(200 + n, 8), new) for n in range(count)]


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def all_right(asking, riders, tasks) -> None:
    until(lambda: len(riders.done) + len(riders.errors) == len(tasks))
    until(lambda: not asking.engine._passes.runner.active)
    for task, chosen in riders.done:
        assert chosen == asking.alone(task)[1]


def test_company_steps_back_for_requests_and_both_are_served(ride, tasks):
    many = tasks(4, 12)
    riders = Riders(*many)
    asking = ride(riders, size_of(2))
    until(lambda: len(riders.riding) == 2)
    requests = [(task := asking.text(ids_of(n, 9), 3), asking.ask(task)) for n in range(3)]
    answers = [told.wait() and told.answer() for _, told in requests]
    assert riders.back >= 1
    all_right(asking, riders, many)
    assert answers == [asking.alone(task)[0] for task, _ in requests]
    stays_sound(asking)


def test_what_is_kept_for_chats_makes_way_for_company(ride, tasks):
    riders = Riders()
    asking = ride(riders, size_of(1))
    asking.ask(asking.text(ids_of(1, 9), 3)).wait()
    asking.settle()
    assert asking.engine.recent == 1
    (task,) = tasks(1)
    riders.todo.append(task)
    asking.engine.wake()
    all_right(asking, riders, [task])
    assert asking.engine.recent == 0


def test_company_that_raises_when_asked_whether_it_is_ready_is_not_asked_again(ride):
    riders = Riders()
    asking = ride(riders)
    riders.ready = None  # cannot be called
    asking.engine.wake()
    until(lambda: not asking.engine._beside._guests)
    stays_sound(asking)


def test_company_that_finds_no_room_does_not_keep_the_processor_busy(ride, tasks):
    riders = Riders()
    riders.join = lambda runner, room: None
    asking = ride(riders)
    riders.todo += tasks(1)
    began = time.monotonic()
    asking.engine.wake()
    until(lambda: riders.asked >= 2)  # once at the start
    time.sleep(0.2)
    assert riders.asked <= 3 + (time.monotonic() - began) / STUCK_S
    stays_sound(asking)


def test_company_may_wake_the_engine_while_it_holds_its_own_lock(ride, tasks):
    """The engine asks it with no lock of its own held: else the two would wait for each other."""
    riders = Riders()
    asking = ride(riders)
    many = tasks(30, 1)

    def bring() -> None:
        for task in many:
            with riders.lock:
                riders.todo.append(task)
                asking.engine.wake()

    thread = threading.Thread(target=bring)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    all_right(asking, riders, many)


def test_an_answer_of_company_that_fails_is_told_to_it_alone(ride, tasks, tiny, monkeypatch):
    forward = tiny.forward

    def spoiled(segments, **keywords):
        if any(GUILTY in s.ids for s in segments):
            raise DiskError("gone")
        return forward(segments, **keywords)

    monkeypatch.setattr(tiny, "forward", spoiled)
    good = tasks(2, 12)
    riders = Riders(*good)
    asking = ride(riders)
    guilty = asking.text([5, GUILTY, 6], 4)
    request = asking.text(ids_of(3, 9), 14)
    told = asking.ask(request)
    until(lambda: asking.engine.running == 1 and riders.riding)
    riders.todo.append(guilty)
    asking.engine.wake()
    told.wait()
    all_right(asking, riders, [*good, guilty])
    assert told.answer() == asking.alone(request)[0]
    ((task, error, was_alone),) = riders.errors
    assert (task, type(error), was_alone) == (guilty, DiskError, True)
    stays_sound(asking)


@pytest.mark.parametrize(
    "method", ["took", *(pytest.param(name, marks=pytest.mark.slow) for name in ("join", "owns", "step_back"))]
)
def test_company_that_raises_is_not_asked_again_and_requests_go_on(ride, tasks, method):
    riders = Riders(*tasks(2, 200))
    asking = ride(riders, size_of(2))
    until(lambda: len(riders.riding) == 2)
    requests = [asking.text(ids_of(n, 9), 3) for n in range(3)]

    def fail(*args, **keywords):
        raise ZeroDivisionError("a bug of ours")

    setattr(riders, method, fail)
    asked = [asking.ask(task) for task in requests]
    for told in asked:
        told.wait()
    until(lambda: not asking.engine._beside._guests)
    asking.settle()
    until(lambda: not asking.engine._passes.runner.active)
    for told, task in zip(asked, requests, strict=True):
        assert told.answer() == asking.alone(task)[0]
    stays_sound(asking)


def test_the_end_is_told_to_company(ride, tasks):
    riders = Riders(*tasks(1, 300))
    asking = ride(riders)
    until(lambda: riders.riding)
    asking.engine.close()
    assert riders.closed
