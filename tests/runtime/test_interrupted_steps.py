"""An interrupt may come at any line of a step: the next goes on to the same tokens and states, or says why not."""

from __future__ import annotations

import linecache
import sys

import numpy as np
import pytest

from deltafin.errors import BadRequest
from deltafin.runtime import Generation, Runner
from deltafin.runtime.native.kda import KdaState

PROMPTS = [[3, 141, 59, 26, 5], [7]]
NEW = 7
FILES = tuple(
    f"/runtime/{name}.py" for name in ("model", "sequence", "generation", "native/kda", "native/mla", "native/passes")
)


class Parrot:
    """Proposes what it was told comes next, but every `wrong`th token of it is another."""

    def __init__(self, known, wrong):
        self._known, self._wrong = known, wrong

    def propose(self, ids, most):
        proposals = self._known[len(ids) : len(ids) + most]
        return [
            (token + 1) % 100 if self._wrong and (len(ids) + n) % self._wrong == 0 else token
            for n, token in enumerate(proposals)
        ]


class Interrupt:
    """In a `with`: raises at the n-th line that is run in the files above."""

    def __init__(self, line):
        self._left = line
        self.at = None

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, _event, _arg):
        return self._line if frame.f_code.co_filename.endswith(FILES) else None

    def _line(self, frame, event, _arg):
        where = frame.f_code.co_filename, frame.f_lineno
        # Where a `with` of a lock begins and ends Python looks for no signal.
        if event == "line" and not linecache.getline(*where).strip().startswith("with "):
            self._left -= 1
            if self._left == 0:
                self.at = where
                raise KeyboardInterrupt
        return self._line


def begin(model, known=None):
    runner = Runner(model)
    for number, ids in enumerate(PROMPTS):
        draft = None if known is None else Parrot([*ids, *known[number].tokens], 3 * number)
        runner.add(Generation(model.sequence(), ids, max_new=NEW, stop_ids=(), draft=draft, depth=3))
    return runner, list(runner.active)


def finish(runner):
    while runner.active:
        runner.step()


def state_bytes(seq):
    return [
        part.tobytes()
        for layer in seq.state
        for part in (
            (layer.history, layer.memory)
            if isinstance(layer, KdaState)
            else (np.concatenate(layer.blocks)[: layer.length],)
        )
    ]


@pytest.mark.parametrize("stride", [83, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_after_an_interrupt_at_any_line_answers_go_on(tiny, stride):
    runner, known = begin(tiny)
    finish(runner)
    expected = [(one.tokens, state_bytes(one.seq)) for one in known]
    line, went_on, lost = 1, 0, 0
    while True:
        runner, answers = begin(tiny, known)
        runner.step()
        with Interrupt(line) as interrupt:
            try:
                runner.step()
            except KeyboardInterrupt:
                pass
        if interrupt.at is None:
            break
        line += stride
        try:
            finish(runner)
        except BadRequest as e:
            assert "so_far" in str(e), interrupt.at
            lost += 1
        else:
            assert [(one.tokens, state_bytes(one.seq)) for one in answers] == expected, interrupt.at
            went_on += 1
    assert went_on > 20 and lost < 0.05 * went_on
