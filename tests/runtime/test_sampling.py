"""Choosing a token: what the settings mean, and that a choice depends on logits, settings and position alone."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections import Counter
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafin.cext import _math
from deltafin.errors import BadRequest, NotANumber
from deltafin.runtime import Segment
from deltafin.runtime import sampling as sampling_module
from deltafin.runtime.sampling import Sampler, Sampling, likeliest, reserved_ids, uniform

VOCAB = 3000  # three tiles of the log-probability's sum, the last one short; and more ids than top-p sorts at first
LOGITS = (np.random.default_rng(5).standard_normal(VOCAB) * 2).astype(np.float32)


def choose(logits, position=1, *, forbidden=(), **fields):
    logits = np.asarray(logits, np.float32)
    sampler = Sampler(Sampling(**fields), vocab_size=len(logits), forbidden=frozenset(forbidden))
    return sampler.choose(logits, position)


def drawn(logits, count, **fields) -> Counter:
    """How often each id comes at positions 1 to `count`."""
    logits = np.asarray(logits, np.float32)
    sampler = Sampler(Sampling(**fields), vocab_size=len(logits))
    return Counter(sampler.choose(logits, position).token for position in range(1, count + 1))


# The definition of docs/arithmetic.md and docs/sampling.md, one id at a time.


def philox(counter: int, key: int) -> int:
    """First word of Philox-4x64-10 for counter (counter, 0, 0, 0) and key (key, 0)."""
    mask = 2**64 - 1
    a, b, c, d = counter & mask, counter >> 64, 0, 0
    k0, k1 = key, 0
    for _ in range(10):
        left, right = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = (right >> 64) ^ b ^ k0, right & mask, (left >> 64) ^ d ^ k1, left & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return a


def specified(logits, position, sampling: Sampling, forbidden) -> int:
    scores = {i: np.float32(x) for i, x in enumerate(logits)}
    for i, bias in sampling.logit_bias.items():
        scores[i] = scores[i] + np.float32(bias)
    for i in forbidden:
        scores[i] = np.float32(-math.inf)
    falling = sorted(scores, key=lambda i: (-scores[i], i))
    best = falling[0]
    if sampling.temperature == 0:
        return best
    weights = {}
    for i, score in scores.items():
        out = np.array([(score - scores[best]) / np.float32(sampling.temperature)], np.float32)
        _math.exp(out, out)
        weights[i] = float(out[0])
    kept = falling[: sampling.top_k or None]
    if sampling.top_p < 1:
        share = sampling.top_p * list(accumulate(weights[i] for i in sorted(kept)))[-1]
        before = accumulate((weights[i] for i in kept), initial=0.0)
        kept = [i for i, sum_before in zip(kept, before, strict=False) if sum_before < share]
    kept = sorted(i for i in kept if weights[i] >= sampling.min_p)
    sums = list(accumulate(weights[i] for i in kept))
    at = (philox(position + 1, sampling.seed) >> 11) * 2.0**-53 * sums[-1]
    return next(i for i, up_to in zip(kept, sums, strict=True) if up_to > at)


@st.composite
def cases(draw):
    size = draw(st.integers(2, 40))
    value = st.one_of(st.sampled_from([0.0, -0.0, 1.0, 3.0]), st.floats(-30, 30, width=32))
    logits = np.array(draw(st.lists(value, min_size=size, max_size=size)), np.float32)
    forbidden = draw(st.sets(st.integers(1, size - 1), max_size=size - 2))
    bias = draw(st.dictionaries(st.integers(1, size - 1), st.one_of(st.floats(-9, 9), st.just(-math.inf)), max_size=4))
    sampling = Sampling(
        temperature=draw(st.sampled_from([0, 1e-6, 0.3, 1, 1.7, 100])),
        top_p=draw(st.sampled_from([1e-9, 0.1, 0.5, 0.95, 1 - 2**-53, 1])),
        top_k=draw(st.sampled_from([0, 1, 2, 7, 1000])),
        min_p=draw(st.sampled_from([0, 0, 1e-3, 0.2, 1])),
        seed=draw(st.integers(0, 2**64 - 1)),
        logit_bias=bias,
    )
    return logits, draw(st.integers(1, 2**20)), sampling, forbidden


@settings(max_examples=250, deadline=None)
@given(cases())
def test_a_choice_is_the_specified_one(case):
    logits, position, sampling, forbidden = case
    chosen = Sampler(sampling, vocab_size=len(logits), forbidden=forbidden).choose(logits, position)
    assert chosen.token == specified(logits, position, sampling, forbidden)
    assert chosen.token not in forbidden
    assert sampling.logit_bias.get(chosen.token) != -math.inf


@pytest.mark.parametrize("scale", [0.0, 0.01, 1, 3])
@pytest.mark.parametrize("top_p", [0.2, 0.7, 0.9999, 1])
def test_a_choice_out_of_many_ids_is_the_specified_one(scale, top_p):
    logits = (LOGITS * np.float32(scale)).astype(np.float32)
    for position in range(1, 6):
        sampling = Sampling(temperature=0.8, top_p=top_p, seed=position)
        chosen = Sampler(sampling, vocab_size=VOCAB, forbidden={0, 17}).choose(logits, position)
        assert chosen.token == specified(logits, position, sampling, {0, 17})


def test_numbers_are_philox_of_seed_and_position():
    for seed in (0, 1, 2**32, 2**64 - 1):
        for position in (1, 2, 3, 1000, 2**40):
            assert uniform(seed, position) == (philox(position + 1, seed) >> 11) * 2.0**-53


def test_numbers_are_known_ones():
    """So that neither numpy nor its twin above can change without notice."""
    assert philox(0, 0) == 0x16554D9ECA36314C  # the generator's published test vector
    assert [uniform(0, 1), uniform(1, 1), uniform(1, 2)] == [
        0.5023796042735054,
        0.9002684531124185,
        0.4082618259872465,
    ]


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_a_number_on_the_border_belongs_to_the_next(monkeypatch, number, token):
    """Above all 0 does: the first id may weigh nothing."""
    monkeypatch.setattr(sampling_module, "uniform", lambda seed, position: number)
    assert choose([9, 2, 9, 2, 9], temperature=1, forbidden={0, 2, 4}).token == token


def test_numbers_fill_the_interval_evenly():
    counts = np.bincount([int(uniform(seed, p) * 16) for seed in range(20) for p in range(1, 201)], minlength=16)
    assert (counts - 250) @ (counts - 250) / 250 < 37.7  # chi-square, 15 degrees of freedom, one in a thousand


def test_greedy_takes_the_largest_and_of_equals_the_lowest():
    assert choose([0, 2, 1, 2]).token == 1
    assert choose([-0.0, 0.0]).token == 0
    assert choose([0, 2, 1, 2], forbidden={1}).token == 3
    assert choose([0, 2, 1, 2], logit_bias={2: 1.5}).token == 2
    assert choose([0, 2, 1, 2], logit_bias={1: -math.inf, 3: -100}).token == 2


def test_forbidden_wins_over_bias():
    assert choose([0, 1, 0], forbidden={2}, logit_bias={2: 100}).token == 1
    assert 2 not in drawn([0, 1, -5], 200, temperature=5, logit_bias={2: -math.inf})


def test_equal_logits_stay_in_the_order_of_their_ids():
    assert likeliest(np.array([1, 3, -0.0, 3, 0.0, 3], np.float32), 5).tolist() == [1, 3, 5, 0, 2]
    assert likeliest(np.zeros(5000, np.float32), 3).tolist() == [0, 1, 2]
    falling = likeliest(LOGITS, VOCAB)
    assert falling.tolist() == sorted(range(VOCAB), key=lambda i: (-LOGITS[i], i))
    assert likeliest(LOGITS, 100).tolist() == falling[:100].tolist()
    assert likeliest(np.array([-np.inf, -3, -1e-40, 1e-40], np.float32), 4).tolist() == [3, 2, 1, 0]


PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.25, 0.2])
FIVE = np.log(PROBABILITIES).astype(np.float32)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-12}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),  # the one that crosses stays
        ({"top_p": 0.64}, {1, 3}),
        ({"top_p": 0.66}, {1, 3, 4}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # of the two left, 0.4 of 0.65 is enough
        ({"min_p": 1}, {1}),
        ({"min_p": 0.49}, {1, 3, 4}),
        ({"min_p": 0.51}, {1, 3}),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.55}, {1, 3}),
    ],
)
def test_filters_keep_what_they_should_in_proportion(fields, kept):
    """Chi-square against the exact probabilities of what is kept, with a fixed seed."""
    count = 2000
    counts = drawn(FIVE, count, temperature=1, seed=3, **fields)
    assert set(counts) == kept
    total = sum(PROBABILITIES[i] for i in kept)
    expected = {i: count * PROBABILITIES[i] / total for i in kept}
    assert sum((counts[i] - expected[i]) ** 2 / expected[i] for i in kept) < 18.5  # 4 degrees, one in a thousand


@pytest.mark.parametrize("temperature", [0.5, 1, 2])
def test_temperature_sharpens_and_flattens(temperature):
    counts = drawn(FIVE, 3000, temperature=temperature, seed=11)
    powers = PROBABILITIES ** (1 / temperature)
    expected = 3000 * powers / powers.sum()
    assert sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected)) < 18.5


def test_min_p_looks_after_the_temperature():
    assert set(drawn(FIVE, 500, temperature=4, min_p=0.58)) == {0, 1, 2, 3, 4}  # (0.05 / 0.4) ** (1 / 4) is 0.59
    assert set(drawn(FIVE, 500, temperature=1, min_p=0.58)) == {1, 3}


def test_one_of_equals_crosses_the_threshold():
    assert set(drawn(np.zeros(8), 400, temperature=1, top_p=0.5)) == {0, 1, 2, 3}
    assert set(drawn(np.zeros(8), 400, temperature=1, top_k=3)) == {0, 1, 2}


def test_a_choice_depends_on_nothing_before_it():
    sampler = Sampler(Sampling(temperature=1, seed=9, top_p=0.9), vocab_size=VOCAB)
    forwards = [sampler.choose(LOGITS, p) for p in range(1, 30)]
    assert [sampler.choose(LOGITS, p) for p in reversed(range(1, 30))] == forwards[::-1]
    assert len(set(forwards)) > 5


def test_seeds_and_positions_draw_differently():
    by_seed = {choose(LOGITS, 1, temperature=2, seed=s).token for s in range(20)}
    by_position = {choose(LOGITS, p, temperature=2).token for p in range(1, 21)}
    assert len(by_seed) > 15 and len(by_position) > 15


def test_the_instruction_set_and_threads_change_no_choice():
    isa, threads = _math.isa(), _math.threads()
    fields = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.01, "top_logprobs": 3}
    expected = [choose(LOGITS, p, **fields) for p in range(1, 20)]
    try:
        for name in _math.isas():
            for count in (1, 3):
                _math.set_isa(name)
                _math.set_threads(count)
                assert [choose(LOGITS, p, **fields) for p in range(1, 20)] == expected, (name, count)
    finally:
        _math.set_isa(isa)
        _math.set_threads(threads)


def test_the_logits_stay_as_they_are():
    logits = LOGITS.copy()
    logits.flags.writeable = False
    choose(logits, temperature=1, top_p=0.5, logit_bias={3: 1}, forbidden={4}, top_logprobs=2)
    assert np.array_equal(logits, LOGITS)


# Log-probabilities


@pytest.mark.parametrize("model", ["tiny", "demo"])
def test_log_probabilities_are_the_bytes_of_a_forward(model, request):
    model = request.getfixturevalue(model)
    ids = [3, 141, 59, 26, 5]
    rows = model.forward([Segment(model.sequence(), ids)])
    fields = {"temperature": 1.3, "top_k": 40, "logit_bias": {7: 4}, "top_logprobs": 5}
    chosen = [choose(row, p, forbidden={9}, **fields) for p, row in enumerate(rows, start=1)]
    for rank in range(-1, 5):  # the chosen ids, then the likeliest, then the second
        targets = [c.token if rank < 0 else c.top[rank][0] for c in chosen]
        values = [c.logprob if rank < 0 else c.top[rank][1] for c in chosen]
        expected = model.forward([Segment(model.sequence(), ids, targets)], logits="targets")
        assert np.array(values, np.float32).tobytes() == expected.tobytes()


def test_alternatives_are_the_models_own():
    """They ignore temperature, bias and what is forbidden, and the chosen one need not be among them."""
    plain = choose(LOGITS, top_logprobs=4)
    assert plain.token == plain.top[0][0] and plain.logprob == plain.top[0][1]
    values = [value for _, value in plain.top]
    assert values == sorted(values, reverse=True)
    best = plain.top[0][0]
    other = choose(LOGITS, temperature=3, seed=1, forbidden={best}, logit_bias={5: 50}, top_logprobs=4)
    assert other.token == 5 and other.top == plain.top and other.logprob < values[-1]


def test_log_probabilities_only_when_asked_for():
    assert choose(LOGITS).logprob is None and choose(LOGITS).top == ()
    only = choose(LOGITS, top_logprobs=0)
    assert only.logprob is not None and only.top == ()
    every = choose(FIVE, top_logprobs=5).top
    assert math.isclose(sum(math.exp(value) for _, value in every), 1, rel_tol=1e-6)


# What is refused


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": 1e-9}, "temperature is 1e-09"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"temperature": None}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.0}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "a"}, "seed"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": False}, "top_logprobs"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: math.inf}}, "logit_bias of 1 is inf"),
        ({"logit_bias": {1: 1e7}}, "logit_bias of 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(fields, named):
    with pytest.raises(BadRequest) as error:
        Sampling(**fields)
    assert str(error.value).startswith(named)


@pytest.mark.parametrize(
    ("fields", "forbidden", "says"),
    [
        ({"logit_bias": {5: 1}}, (), "logit_bias: id 5 is outside the vocabulary of 5"),
        ({"logit_bias": {-1: 1}}, (), "logit_bias: id -1"),
        ({"top_logprobs": 6}, (), "top_logprobs is 6"),
        ({"logit_bias": {0: -math.inf, 3: -math.inf}}, {1, 2, 4}, "forbids every token"),
    ],
)
def test_settings_that_do_not_fit_the_vocabulary_are_refused(fields, forbidden, says):
    with pytest.raises(BadRequest, match=says):
        Sampler(Sampling(**fields), vocab_size=5, forbidden=frozenset(forbidden))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_choose_nothing(value):
    logits = LOGITS.copy()
    logits[8] = value
    with pytest.raises(NotANumber, match="position 77"):
        choose(logits, 77)


def test_settings_cannot_change_afterwards():
    bias = {1: 2}
    sampling = Sampling(logit_bias=bias, temperature=1, top_p=np.float32(0.5), seed=np.int64(3))
    bias[1] = 5
    assert sampling.logit_bias == {1: 2.0}
    assert (type(sampling.temperature), type(sampling.top_p), type(sampling.seed)) == (float, float, int)
    with pytest.raises(TypeError):
        sampling.logit_bias[1] = 3  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampling.seed = 1  # type: ignore[misc]
    assert dataclasses.replace(sampling, seed=4).logit_bias == {1: 2.0}


def test_reserved_ids_are_those_without_a_name(demo):
    reserved = reserved_ids(demo.tokenizer)
    assert reserved and not reserved & set(demo.stop_ids)
    assert {demo.tokenizer.token_bytes(i).decode() for i in reserved} == {f"<|reserved_token_{i}|>" for i in reserved}
    assert all(
        name[1:-1].startswith("|reserved_token_") is (i in reserved)
        for name, i in demo.tokenizer.special_tokens.items()
    )
    assert reserved_ids(None) == frozenset()


def test_another_process_draws_the_same():
    code = (
        "import numpy as np\n"
        "from deltafin.runtime.sampling import Sampler, Sampling\n"
        "logits = (np.random.default_rng(5).standard_normal(3000) * 2).astype(np.float32)\n"
        "s = Sampler(Sampling(temperature=1, top_p=0.9, seed=4), vocab_size=3000)\n"
        "print([s.choose(logits, p).token for p in range(1, 21)])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert eval(out) == [choose(LOGITS, p, temperature=1, top_p=0.9, seed=4).token for p in range(1, 21)]
