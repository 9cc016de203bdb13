"""Which token comes next: the likeliest, or one drawn from what the model thinks of all of them.

A choice is a function of the logits' bytes, of `Sampling` and of the token's position, and of nothing else: not of
what was chosen before, what else runs, or the machine. So a text can be continued, replayed or checked against a
draft, and comes out the same. The order of steps:

    bias         logit + bias; forbidden ids become -infinity
    greedy       temperature 0 takes the largest, the lowest id of equals, and ends here
    temperature  weight = exp((logit - largest) / temperature): the largest weight is 1
    top-k        the k largest logits stay
    top-p        of these, in falling order, as many as make up the share p of their weight; the one that crosses stays
    min-p        of these, weights of at least min_p times the largest
    draw         a number of (seed, position) picks one of the rest by weight

"Largest" is by logit, and of equal logits the lower id goes first. docs/arithmetic.md has the order of each sum.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from deltafin.cext import _math
from deltafin.errors import BadRequest, NotANumber
from deltafin.runtime.tokenizer import Tokenizer

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

MOST_SEED = 2**64 - 1
# Below this a temperature is greedy in all but name, and its reciprocal leaves the range of a float32.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 100.0
MOST_BIAS = 1e6  # far beyond any logit, and far from overflow
HEAD = 1024  # likeliest ids in which top-p usually ends; sorting a whole vocabulary costs ten times as much


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen. Raises BadRequest for what makes no sense, naming the field."""

    temperature: float = 0.0  # 0: greedy; else 1e-6 to 100
    top_p: float = 1.0  # above 0, at most 1
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # 0 to 1
    seed: int = 0  # 0 to 2**64 - 1
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # id -> -1e6 to 1e6, or -infinity: never; read-only
    top_logprobs: int | None = None  # None: no logprobs; 0: the chosen one's; n: those of the n likeliest too

    def __post_init__(self) -> None:
        temperature = _number("temperature", self.temperature)
        if temperature != 0 and not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
            raise BadRequest(f"temperature is {self.temperature}; expected 0 (greedy) or 1e-6 to {MOST_TEMPERATURE:g}")
        top_p = _number("top_p", self.top_p)
        if not 0 < top_p <= 1:
            raise BadRequest(f"top_p is {self.top_p}; expected more than 0, and at most 1 (all)")
        min_p = _number("min_p", self.min_p)
        if not 0 <= min_p <= 1:
            raise BadRequest(f"min_p is {self.min_p}; expected 0 (all) to 1")
        top_k = _integer("top_k", self.top_k)
        if top_k < 0:
            raise BadRequest(f"top_k is {top_k}; expected 0 (all) or more")
        seed = _integer("seed", self.seed)
        if not 0 <= seed <= MOST_SEED:
            raise BadRequest(f"seed is {seed}; expected 0 to {MOST_SEED}")
        if self.top_logprobs is not None and _integer("top_logprobs", self.top_logprobs) < 0:
            raise BadRequest(f"top_logprobs is {self.top_logprobs}; expected 0 or more")
        exact = {
            "temperature": temperature,
            "top_p": top_p,
            "min_p": min_p,
            "top_k": top_k,
            "seed": seed,
            "logit_bias": _biases(self.logit_bias),
        }
        for name, value in exact.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token, and if asked for, what the model itself thought of it and of the likeliest ones.

    Log-probabilities are the float32 values that `forward(..., logits="targets")` returns: of the raw logits, without
    temperature, bias or anything forbidden.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]  # (id, log-probability), falling


class Sampler:
    """Chooses tokens out of logits [vocab]; holds no state between two choices.

    `forbidden` ids are never chosen, not even greedily. Raises BadRequest if no id is left to choose.
    """

    def __init__(self, sampling: Sampling, *, vocab_size: int, forbidden: Collection[int] = frozenset()) -> None:
        self.sampling = sampling
        self.vocab_size = vocab_size
        for token in sampling.logit_bias:
            if not 0 <= token < vocab_size:
                raise BadRequest(f"logit_bias: id {token} is outside the vocabulary of {vocab_size}")
        if sampling.top_logprobs is not None and sampling.top_logprobs > vocab_size:
            raise BadRequest(f"top_logprobs is {sampling.top_logprobs}; the vocabulary has {vocab_size} ids")
        self._biased = np.fromiter(sampling.logit_bias.keys(), np.int64)
        self._biases = np.fromiter(sampling.logit_bias.values(), np.float32)
        self._forbidden = np.array(sorted(forbidden), np.int64)
        assert not len(self._forbidden) or 0 <= self._forbidden[0] <= self._forbidden[-1] < vocab_size
        never = self._biased[np.isneginf(self._biases)]
        if len(np.union1d(never, self._forbidden)) == vocab_size:
            raise BadRequest("logit_bias forbids every token of the vocabulary; leave some to choose from")

    def choose(self, logits: Floats, position: int) -> Chosen:
        """The token at `position` of its sequence, given the logits [vocab] after the one before it.

        Raises NotANumber if a logit is NaN or infinite.
        """
        assert logits.shape == (self.vocab_size,) and logits.dtype == np.float32 and position >= 1
        if _math.all_finite(logits[np.newaxis]) >= 0:
            raise NotANumber(f"logits: NaN or infinity in what decides the token at position {position}")
        scores = logits.copy()
        scores[self._biased] += self._biases
        scores[self._forbidden] = -np.inf
        best = _argmax(scores)
        token = best if self.sampling.temperature == 0 else self._draw(scores, scores[best], position)
        if self.sampling.top_logprobs is None:
            return Chosen(token, None, ())
        return _with_log_probs(token, logits, self.sampling.top_logprobs)

    def _draw(self, scores: Floats, largest: np.float32, position: int) -> int:
        weights = np.subtract(scores, largest, out=np.empty_like(scores))
        weights /= np.float32(self.sampling.temperature)
        _math.exp(weights, weights)
        kept = self._kept(scores, weights)
        sums = _running_sums(weights if kept is None else weights[kept])
        # The product is below the last sum, whatever the rounding, because the number is at most 1 - 2**-53; and the
        # first sum above it belongs to a weight above 0.
        at = int(np.searchsorted(sums, uniform(self.sampling.seed, position) * sums[-1], side="right"))
        return at if kept is None else int(kept[at])

    def _kept(self, scores: Floats, weights: Floats) -> Ids | None:
        """The ids to draw from, ascending; None is all."""
        top_k, top_p, min_p = self.sampling.top_k, self.sampling.top_p, self.sampling.min_p
        kept: Ids | None = None
        if 0 < top_k < len(scores):
            kept = likeliest(scores, top_k)
        if top_p < 1:
            kept = _nucleus(scores, weights, kept, top_p)
        if kept is not None:
            kept = _ascending(kept, len(scores))
        if min_p > 0:
            kept = np.arange(len(scores)) if kept is None else kept
            kept = kept[weights[kept].astype(np.float64) >= min_p]
        return kept


def reserved_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    """The special ids that no one has given a meaning: `<|reserved_token_N|>`."""
    if tokenizer is None:
        return frozenset()
    return frozenset(i for name, i in tokenizer.special_tokens.items() if name == f"<|reserved_token_{i}|>")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53, that belongs to this position of a text with this seed."""
    word = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (word >> 11) * 2.0**-53


def likeliest(logits: Floats, count: int) -> Ids:
    """The `count` ids of the largest logits, falling; equal ones by ascending id."""
    if count < len(logits):
        border = np.partition(logits, len(logits) - count)[len(logits) - count]
        ids = np.flatnonzero(logits >= border)
        logits = logits[ids]
    else:
        ids = np.arange(len(logits))
    # One integer holds both orders, and no two are equal, so that no algorithm of sorting can make a difference.
    bits = (logits + np.float32(0)).view(np.int32)  # the sum turns -0 into +0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the logits
    keys = (~rising).astype(np.int64) << 32 | ids
    keys.sort()
    return keys[:count] & 0xFFFFFFFF


def _nucleus(scores: Floats, weights: Floats, kept: Ids | None, top_p: float) -> Ids:
    """The first ids of the falling order with whose weight the sum reaches the share `top_p`; at least one."""
    if kept is not None:
        sums = _running_sums(weights[kept])
        return kept[: _reaching(sums, top_p * _running_sums(weights[_ascending(kept, len(weights))])[-1])]
    share = top_p * _running_sums(weights)[-1]
    count = HEAD
    while True:  # sorting more of the vocabulary until it is enough; that changes no sum
        order = likeliest(scores, count)
        sums = _running_sums(weights[order])
        least = float(weights[order[-1]])  # nor is any that follows heavier
        if sums[-1] >= share or least == 0 or count >= len(scores):
            return order[: _reaching(sums, share)]
        count += max(7 * count, int(2 * (share - sums[-1]) / least))


def _reaching(sums: npt.NDArray[np.float64], share: float) -> int:
    """How many weights it takes until their running sum is the share or more; more than there are if it never is."""
    return int(np.searchsorted(sums, share, side="left")) + 1


def _running_sums(weights: Floats) -> npt.NDArray[np.float64]:
    """Each weight added in turn, in float64. (A plain sum would go in an order that numpy does not promise.)"""
    sums = weights.astype(np.float64)
    return np.cumsum(sums, out=sums)


def _ascending(ids: Ids, vocab_size: int) -> Ids:
    marked = np.zeros(vocab_size, bool)
    marked[ids] = True
    return np.flatnonzero(marked)


def _argmax(scores: Floats) -> int:
    at = np.empty(1, np.int64)
    _math.argmax(at, scores[np.newaxis])
    return int(at[0])


def _with_log_probs(token: int, logits: Floats, count: int) -> Chosen:
    top, total = np.full(1, -np.inf, np.float32), np.zeros(1, np.float32)
    _math.log_prob_tiles(top, total, logits[np.newaxis], 0)
    best = likeliest(logits, count).tolist() if count else []
    out = logits[[token, *best]]
    _math.log_prob_finish(out, out, np.repeat(top, len(out)), np.repeat(total, len(out)))
    own, *others = out.tolist()
    return Chosen(token, own, tuple(zip(best, others, strict=True)))


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise BadRequest(f"{name} is {value!r}; expected a number")
    number = float(value)
    if math.isnan(number):
        raise BadRequest(f"{name} is not a number (NaN)")
    return number


def _integer(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise BadRequest(f"{name} is {value!r}; expected an integer") from None


def _biases(given: object) -> Mapping[int, float]:
    if not isinstance(given, Mapping):
        raise BadRequest(f"logit_bias is {given!r}; expected a mapping from token id to bias")
    biases: dict[int, float] = {}
    for token, value in given.items():
        bias = _number("logit_bias", value)
        if not -MOST_BIAS <= bias <= MOST_BIAS and bias != -math.inf:
            raise BadRequest(f"logit_bias of {token} is {bias}; expected -1e6 to 1e6, or -infinity to forbid it")
        biases[_integer("logit_bias: token id", token)] = bias
    return MappingProxyType(dict(sorted(biases.items())))
