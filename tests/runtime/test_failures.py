"""A pass that fails leaves every sequence as it was, and says what was wrong with which row."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from deltafin.errors import BadCheckpoint, BadRequest, Corrupt, DiskError, NotANumber
from deltafin.runtime import Observer, Segment

IDS = [3, 141, 59, 26, 5]
BF16_NAN = 0x7FC0
BF16_INF = 0x7F80


def _fail_at(layer, error):
    def on_spine(number, tensors):
        if number == layer:
            raise error
        return tensors

    return on_spine


def _poison(layer, name, at, bits=BF16_NAN):
    def on_spine(number, tensors):
        if number == layer:
            tensors = {**tensors, name: tensors[name].copy()}
            tensors[name][at] = bits
        return tensors

    return on_spine


@pytest.mark.parametrize("error", [DiskError("gone"), KeyboardInterrupt()])
@pytest.mark.parametrize("layer", [0, 3, 8])
def test_a_pass_that_fails_leaves_every_sequence_usable_and_as_it_was(spoiled, spoiled_model, layer, error):
    model = spoiled_model
    expected = model.forward([Segment(model.sequence(), [*IDS, 7, 8, 9])])
    old, new = model.sequence(), model.sequence()
    model.forward([Segment(old, IDS)], logits="none")
    spoiled.on_spine = _fail_at(layer, error)
    with pytest.raises(type(error)):
        model.forward([Segment(new, [9, 9]), Segment(old, [100, 200, 300, 400])])
    assert (len(old), old.ids) == (len(IDS), IDS)
    assert (len(new), new.ids) == (0, [])
    spoiled.on_spine = None
    found = model.forward([Segment(old, [7, 8, 9]), Segment(new, [*IDS, 7, 8, 9])])
    assert np.abs(found - np.concatenate([expected[len(IDS) :], expected])).max() < 1e-3


@pytest.mark.parametrize("moment", ["rows", "layer", "routes", "finished"])
def test_an_interrupt_while_observing_leaves_the_sequence_as_it_was(tiny, moment):
    class Interrupting(Observer):
        pass

    def interrupt(*_):
        raise KeyboardInterrupt

    setattr(Interrupting, moment, interrupt)
    seq = tiny.sequence()
    with pytest.raises(KeyboardInterrupt):
        tiny.forward([Segment(seq, IDS)], observer=Interrupting())
    assert len(seq) == 0
    tiny.forward([Segment(seq, IDS)], logits="none")
    assert seq.ids == IDS


def test_a_failed_read_of_an_expert_or_of_the_head_leaves_the_sequence_as_it_was(spoiled, spoiled_model):
    seq = spoiled_model.sequence()
    expected = spoiled_model.forward([Segment(spoiled_model.sequence(), IDS)])
    for name, good in (("on_expert", 1), ("on_head", 0)):
        reads = count(1)

        def later_ones_fail(*args, reads=reads, good=good):
            if next(reads) > good:
                raise DiskError("read failed")
            return args[-1]

        setattr(spoiled, name, later_ones_fail)
        with pytest.raises(DiskError, match="read failed"):
            spoiled_model.forward([Segment(seq, IDS)])
        assert len(seq) == 0
        setattr(spoiled, name, None)
    assert spoiled_model.forward([Segment(seq, IDS)]).tobytes() == expected.tobytes()


def test_an_interrupted_generation_continues_where_it_stopped(spoiled, spoiled_model):
    model = spoiled_model
    whole = list(model.generate(model.sequence(), IDS, max_new=6, stop_ids=()))
    seq = model.sequence()
    running = model.generate(seq, IDS, max_new=6, stop_ids=())
    found = [next(running), next(running)]
    spoiled.on_spine = _fail_at(4, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        next(running)
    spoiled.on_spine = None
    assert seq.ids == [*IDS, found[0]]
    assert found + list(model.generate(seq, found[-1:], max_new=4, stop_ids=())) == whole


@pytest.mark.parametrize("bits", [BF16_NAN, BF16_INF])
def test_a_weight_that_is_no_number_is_reported_with_layer_and_row(spoiled, spoiled_model, bits):
    """The first row that computes with it is named, and in a chat that is a position, not a row of the pass."""
    model = spoiled_model
    seq = model.sequence()
    model.forward([Segment(seq, IDS)], logits="none")
    spoiled.on_spine = _poison(5, "block_sparse_moe.shared_experts.down_proj.weight", (0, slice(None)), bits)
    with pytest.raises(NotANumber, match=r"layer 5: .*row 0 \(segment 0, position 5\)"):
        model.forward([Segment(seq, [7, 8])])
    assert len(seq) == 5


def test_the_row_that_went_wrong_is_named_among_others(tiny, spoiled, spoiled_model, recorder):
    """Only rows that chose the damaged expert see it."""
    segments = [Segment(spoiled_model.sequence(), ids) for ids in ([1, 2, 3], [4, 5, 6, 7])]
    tiny.forward([Segment(tiny.sequence(), s.ids) for s in segments], logits="none", observer=recorder)
    chosen = recorder.route_ids[4]
    number = next(n for n in range(16) if (chosen[3:] == n).any() and not (chosen[:3] == n).any())
    row = int(np.nonzero((chosen == number).any(1))[0][0])

    def on_expert(layer, read, span):
        if (layer, read) == (4, number):
            for part in spoiled_model._backend.layout:
                # 2^127 times 6 overflows float32, in every column
                value = 254 if part.name.endswith("weight_scale") else 0x77
                span[part.offset : part.offset + part.nbytes] = value
        return span

    spoiled.on_expert = on_expert
    with pytest.raises(NotANumber, match=rf"layer 4: .*row {row} \(segment 1, position {row - 3}\)"):
        spoiled_model.forward(segments)


def test_a_router_bias_that_is_no_number_is_reported(spoiled, spoiled_model):
    """It would only choose experts, and leave no trace in any vector."""
    spoiled.on_spine = _poison(2, "block_sparse_moe.gate.e_score_correction_bias", 3, np.nan)
    with pytest.raises(NotANumber, match="router of layer 2"):
        spoiled_model.forward([Segment(spoiled_model.sequence(), IDS)])


@pytest.mark.parametrize("logits", ["all", "last", "targets"])
def test_a_head_that_is_no_number_is_reported(spoiled, spoiled_model, logits):
    def on_head(first, bits):
        bits[-1] = BF16_NAN
        return bits

    spoiled.on_head = on_head
    row = len(IDS) - 1 if logits == "last" else 0
    with pytest.raises(NotANumber, match=rf"head: .*position {row}\)"):
        spoiled_model.forward([Segment(spoiled_model.sequence(), IDS, IDS)], logits=logits)


def test_a_scale_byte_of_255_is_corrupt_and_its_tensor_is_named(spoiled, spoiled_model):
    def on_expert(layer, number, span):
        part = next(p for p in spoiled_model._backend.layout if p.name == "w3.weight_scale")
        span[part.offset + 5] = 255
        return span

    spoiled.on_expert = on_expert
    with pytest.raises(Corrupt, match=r"model\.layers\.1\.block_sparse_moe\.experts\.\d+\.w3\.weight_scale: .*row"):
        spoiled_model.forward([Segment(spoiled_model.sequence(), IDS)])


def test_values_in_the_padding_of_a_log_are_refused(spoiled, spoiled_model):
    """Then it is not the per-head tensor that it is read as."""
    spoiled.on_spine = _poison(2, "self_attn.A_log", -1, 0.5)
    with pytest.raises(BadCheckpoint, match=r"layers\.2\.self_attn\.A_log: entry 31 is 0\.5"):
        spoiled_model.forward([Segment(spoiled_model.sequence(), IDS)])


def test_requests_that_make_no_sense_are_refused_before_any_byte_is_read(tiny, spoiled, spoiled_model):
    spoiled.on_spine = _fail_at(0, AssertionError("a byte was read"))
    model, seq = spoiled_model, spoiled_model.sequence()
    too_long = model.config.max_positions + 1
    refused = [
        ([], "all", "at least one segment"),
        ([Segment(seq, [])], "all", "segment 0 is empty"),
        ([Segment(seq, [1]), Segment(seq, [2])], "all", "same sequence"),
        ([Segment(seq, [1, 512])], "all", "id 512 at 1 is outside the vocabulary of 512"),
        ([Segment(seq, [-1])], "all", "id -1 at 0"),
        ([Segment(seq, [1] * too_long)], "all", f"makes {too_long} tokens"),
        ([Segment(seq, [1, 2])], "targets", "2 ids and no targets"),
        ([Segment(seq, [1, 2], [1])], "targets", "2 ids and 1 targets"),
        ([Segment(seq, [1], [512])], "targets", "targets of segment 0: id 512"),
        ([Segment(seq, [1])], "some", "logits is 'some'"),
        ([Segment(tiny.sequence(), [1])], "all", "another model"),
    ]
    for segments, logits, message in refused:
        with pytest.raises(BadRequest, match=message) as caught:
            model.forward(segments, logits=logits)
        assert "\n" not in str(caught.value)
    assert len(seq) == 0
    for ids in ([1.5], ["a"], [None]):
        with pytest.raises(BadRequest, match="must be integers"):
            Segment(seq, ids)


def test_a_generation_that_cannot_fit_is_refused_at_once(tiny):
    with pytest.raises(BadRequest, match="exceed"):
        tiny.generate(tiny.sequence(), [1, 2], max_new=tiny.config.max_positions)
    with pytest.raises(BadRequest, match="max_new is 0"):
        tiny.generate(tiny.sequence(), [1, 2], max_new=0)


def test_a_closed_model_and_an_unknown_device_are_refused(open_model, tiny_dir):
    model = open_model(tiny_dir)
    seq = model.sequence()
    model.close()
    model.close()
    with pytest.raises(BadRequest, match="closed"):
        model.forward([Segment(seq, [1])])
    for device in ("nonsense", "cuda:99"):
        with pytest.raises(BadRequest, match=device) as caught:
            open_model(tiny_dir, device=device)
        assert "\n" not in str(caught.value)


def test_two_interrupts_at_awkward_moments_lose_no_committed_pass(tiny, monkeypatch):
    """The first comes after the commit and before the sequence is settled, the second before the next commit."""
    expected = tiny.forward([Segment(tiny.sequence(), [*IDS, 7, 8, 9])])
    seq = tiny.sequence()
    settle = type(seq).settle

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(seq), "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.forward([Segment(seq, IDS)])
    assert seq.ids == IDS
    monkeypatch.setattr(type(seq), "settle", settle)
    offer = type(seq).offer

    def offered_then_interrupted(self, *arguments):
        offer(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(seq), "offer", offered_then_interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.forward([Segment(seq, [1, 2])])
    monkeypatch.setattr(type(seq), "offer", offer)
    assert seq.ids == IDS
    assert tiny.forward([Segment(seq, [7, 8, 9])]).tobytes() == expected[len(IDS) :].tobytes()
