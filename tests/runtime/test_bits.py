"""One arithmetic: the bytes of logits depend on weights and tokens, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from deltafin.cext import _math
from deltafin.runtime import Model, Segment

MODELS = ["tiny", "k93", "demo"]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Whatever a test switches, the next one finds the defaults."""
    isa, threads, grain = _math.isa(), _math.threads(), _math.grain()
    yield
    _math.set_isa(isa)
    _math.set_threads(threads)
    _math.set_grain(grain)


@pytest.fixture
def model(request) -> Model:
    return request.getfixturevalue(request.param)


@pytest.fixture
def ids(model, golden) -> list[int]:
    """A golden prompt of 37 tokens, or the demo's first 37 of a chat."""
    if model.tokenizer is not None:
        return model.tokenizer.encode("The capital of France is Paris. One day a little fox lost the way home.")[:37]
    name = "tiny" if model.config.num_layers == 9 else "k93"
    return np.load(golden / name / "golden.npz")["p2_ids"].tolist()


def logits(model: Model, *pieces: list[int]) -> bytes:
    """All rows' logits when the prompt is fed in these pieces."""
    seq = model.sequence()
    return b"".join(model.forward([Segment(seq, piece)]).tobytes() for piece in pieces)


each_model = pytest.mark.parametrize("model", MODELS, indirect=True)


@each_model
def test_the_number_of_threads_changes_no_bit(model, ids):
    _math.set_grain(3)  # small shapes are split like large ones
    expected = logits(model, ids)
    for count in (1, 2, 3, 5):
        _math.set_threads(count)
        assert logits(model, ids) == expected


@each_model
def test_the_instruction_set_changes_no_bit(model, ids):
    expected = logits(model, ids)
    assert "scalar" in _math.isas()
    for isa in _math.isas():
        _math.set_isa(isa)
        assert logits(model, ids) == expected, isa


@each_model
def test_feeding_token_by_token_changes_no_bit(model, ids):
    assert logits(model, *[[token] for token in ids]) == logits(model, ids)


@pytest.mark.parametrize("model", ["tiny", "demo"], indirect=True)
def test_cutting_the_prompt_anywhere_changes_no_bit(model, ids):
    expected = logits(model, ids)
    for cut in range(1, len(ids)):
        assert logits(model, ids[:cut], ids[cut:]) == expected, cut


@pytest.mark.parametrize("model", ["k93"], indirect=True)
@pytest.mark.parametrize(
    "cuts", [(1, 3, 4, 36), pytest.param(tuple(range(1, 37)), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_cutting_a_prompt_of_93_layers_changes_no_bit(model, ids, cuts):
    expected = logits(model, ids)
    for cut in cuts:
        assert logits(model, ids[:cut], ids[cut:]) == expected, cut


@each_model
def test_company_in_the_pass_changes_no_bit(model, ids):
    alone = logits(model, ids)
    others = [ids[n:] + ids[:n] for n in (1, 5, 9, 20, 30)]
    lengths = (1, 37, 2, 8, 17)
    company = [Segment(model.sequence(), other[:n]) for other, n in zip(others, lengths, strict=True)]
    for place in (0, 2, 5):
        segments = [Segment(model.sequence(), s.ids) for s in company]
        segments.insert(place, Segment(model.sequence(), ids))
        rows = model.forward(segments)
        start = sum(len(s) for s in segments[:place])
        assert rows[start : start + len(ids)].tobytes() == alone


@each_model
def test_the_order_in_which_experts_land_changes_no_bit(model, ids, spoil):
    expected = logits(model, ids)
    for seed in (1, 2):
        store, random, orders = spoil(model), np.random.default_rng(seed), []

        def shuffled(landing, random=random, orders=orders):
            landed = [(expert, span.copy()) for expert, span in landing]
            random.shuffle(landed)
            orders.append([expert for expert, _ in landed])
            yield from landed

        store.on_landing = shuffled
        with Model(store) as other:
            assert logits(other, ids) == expected
        assert any(order != sorted(order) for order in orders)


@each_model
def test_flush_to_zero_set_by_the_caller_changes_no_bit(model, ids):
    expected = logits(model, ids)
    _math.test_set_flush(True)
    try:
        assert logits(model, ids) == expected
    finally:
        _math.test_set_flush(False)


@each_model
def test_log_probabilities_are_the_same_alone_and_cut(model, ids):
    targets = ids[1:] + ids[:1]
    whole = model.forward([Segment(model.sequence(), ids, targets)], logits="targets")
    seq = model.sequence()
    parts = [
        model.forward([Segment(seq, ids[a:b], targets[a:b])], logits="targets")
        for a, b in ((0, 11), (11, 12), (12, 37))
    ]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("model", ["tiny", "demo"], indirect=True)
def test_generating_gives_the_bytes_of_scoring_the_same_text(model, ids):
    seq = model.sequence()
    rows = [model.forward([Segment(seq, ids)], logits="last")]
    text = list(ids)
    for _ in range(8):
        token = int(rows[-1][0].argmax())
        text.append(token)
        rows.append(model.forward([Segment(seq, [token])], logits="last"))
    whole = model.forward([Segment(model.sequence(), text)])
    assert np.concatenate(rows).tobytes() == whole[len(ids) - 1 :].tobytes()
