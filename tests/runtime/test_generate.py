"""Greedy continuation: when ids come, when it stops, and what the sequence holds afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from deltafin.errors import BadCheckpoint
from deltafin.runtime import Model

IDS = [3, 141, 59, 26, 5]


@pytest.fixture(scope="module")
def whole(tiny):
    return list(tiny.generate(tiny.sequence(), IDS, max_new=8, stop_ids=()))


def test_the_stop_id_is_yielded_last_and_not_fed(tiny, whole):
    stop = whole[3]
    expected = whole[: whole.index(stop) + 1]
    seq = tiny.sequence()
    assert list(tiny.generate(seq, IDS, max_new=8, stop_ids=[stop])) == expected
    assert seq.ids == IDS + expected[:-1]


def test_the_last_of_max_new_ids_is_not_fed_either(tiny, whole):
    seq = tiny.sequence()
    assert list(tiny.generate(seq, IDS, max_new=1, stop_ids=())) == whole[:1]
    assert seq.ids == IDS


def test_a_sequence_with_history_continues(tiny, whole):
    seq = tiny.sequence()
    first = list(tiny.generate(seq, IDS, max_new=3, stop_ids=()))
    assert first + list(tiny.generate(seq, first[-1:], max_new=5, stop_ids=())) == whole


def test_each_id_is_yielded_before_the_next_is_computed(tiny, recorder, whole):
    running = tiny.generate(tiny.sequence(), IDS, max_new=3, stop_ids=(), observer=recorder)
    assert recorder.spans == []
    for passes in (1, 2, 3):
        assert next(running) == whole[passes - 1]
        assert len(recorder.spans) == passes
    assert [[s.count for s in spans] for spans in recorder.spans] == [[len(IDS)], [1], [1]]


def test_of_equal_logits_the_lowest_id_wins(spoiled, spoiled_model):
    spoiled.on_head = lambda first, bits: np.zeros_like(bits)
    assert list(spoiled_model.generate(spoiled_model.sequence(), IDS, max_new=2, stop_ids=())) == [0, 0]


def test_without_a_tokenizer_the_config_says_where_to_stop(tiny):
    assert tiny.tokenizer is None
    assert tiny.stop_ids == {tiny.config.eos_id}


class _Catalog:
    def __init__(self, catalog, **files) -> None:
        self._catalog = catalog
        self.files = files

    def __getattr__(self, name):
        return getattr(self._catalog, name)

    def file(self, name):
        return self.files.get(name.replace(".", "_"))


@pytest.mark.parametrize(
    ("raw", "stops"),
    [(b'{"eos_token_id": 7}', {7}), (b'{"eos_token_id": [7, 9]}', {7, 9}), (b"{}", set())],
)
def test_generation_config_adds_stop_ids(spoiled, raw, stops):
    spoiled.catalog = _Catalog(spoiled.catalog, generation_config_json=raw)
    with Model(spoiled) as model:
        assert model.stop_ids == {model.config.eos_id, *stops}


@pytest.mark.parametrize("raw", [b"[]", b"{", b'{"eos_token_id": "x"}', b'{"eos_token_id": [true]}'])
def test_a_generation_config_that_makes_no_sense_is_refused(spoiled, raw):
    spoiled.catalog = _Catalog(spoiled.catalog, generation_config_json=raw)
    with pytest.raises(BadCheckpoint, match=r"generation_config\.json"):
        Model(spoiled)


def test_ranks_without_names_for_the_special_ids_are_refused(spoiled):
    spoiled.catalog = _Catalog(spoiled.catalog, tiktoken_model=b"")
    with pytest.raises(BadCheckpoint, match="tokenizer_config"):
        Model(spoiled)
