"""How many drafted tokens a pass should check: as many as pay for themselves.

A drafted row costs the experts that it adds to the pass, and some computing. If it is accepted, a later pass need not
be made. So the gate keeps three estimates and compares them row by row:

    chance  that the row at this depth is accepted, which needs all before it to be
    price   seconds an expert x experts that a row at this depth adds + seconds a row
    gain    seconds that a token costs now

and lets a draft be as deep as chance x gain > price. All are averages that forget. Where nothing pays, and also where
something does, one row more than pays is tried now and then, the more rarely the more often in a row it was rejected.
The gate has no clock; it is told of each pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deltafin.runtime.clock import PassTimes

CHANCE = 0.5  # of a row that nothing is known of, if the one before it was accepted
SHARE = 0.12  # of the newest observation in an average of many
FIRST_TRIAL, LAST_TRIAL = 8, 64  # passes between two trials, at first and after failures
TRIALS = 0.02  # of the time, at most, is spent on them
SURPRISE = 0.25  # of the expected time of a drafted pass: what lies beyond is taken as chance
DRIFT = 0.05  # how much of a drafted pass's surprise is put down to the rest of the pass


@dataclass(frozen=True, slots=True)
class Drafted:
    """What became of one draft in a pass."""

    proposed: int  # rows
    accepted: int  # of them, from the first on
    added: Sequence[int]  # experts that each row added to the pass, over all layers; see DraftedExperts


@dataclass(frozen=True, slots=True)
class GateSummary:
    """What the gate has seen, and what it thinks of a draft's first row."""

    passes: int
    drafted_passes: int
    proposed: int
    accepted: int
    depth: int  # that pays now
    chance: float
    price_s: float | None  # None until a pass without drafts has been seen
    gain_s: float | None  # if accepted

    def __str__(self) -> str:
        share = f" ({self.accepted / self.proposed:.0%})" if self.proposed else ""
        text = (
            f"{self.accepted} of {self.proposed} drafted tokens accepted{share} in {self.drafted_passes} of "
            f"{self.passes} passes; depth {self.depth}"
        )
        if self.price_s is None or self.gain_s is None:
            return text
        return text + f": a row costs {self.price_s:.3g} s and brings {self.chance:.0%} of {self.gain_s:.3g} s"


class Gate:
    """Decides the depth of drafts for one model, whatever the texts."""

    def __init__(self) -> None:
        self._chances: list[_Average] = []  # by row of a draft: that it is accepted if those before it were
        self._added: list[_Average] = []  # by row of a draft: experts that it adds
        self._answer_experts = _Average()  # experts of a pass without its drafts, for each answer in it
        self._answer_s = _Average()  # seconds of a pass without its drafts, for each answer in it
        self._expert_s = _Average()  # seconds an expert
        self._row_s = _Average()  # seconds a drafted row, without the experts it adds
        self._trial_after = FIRST_TRIAL  # passes
        self._since_trial = math.inf  # passes; infinite: the next trial is due at once, as the first is
        self._most = 0  # rows that were last asked about
        self._passes = self._drafted_passes = self._proposed = self._accepted = 0

    def depth(self, most: int) -> int:
        """Rows to draft, at most `most`, for each answer of the next pass.

        0 until a pass without drafts, and without rows of a prompt, has shown what a token costs.
        """
        self._most = most
        paying = self._paying(most)
        return max(0, min(paying + self._trial_is_due(paying), most))

    def saw(self, drafts: Sequence[Drafted], times: PassTimes, answers: int) -> None:
        """A pass was made: the drafts in it, its times, and how many answers had a row of their own.

        A pass with other rows too, of a prompt, teaches what is accepted, but nothing about prices.
        """
        drafts = [draft for draft in drafts if draft.proposed]
        self._passes += 1
        self._drafted_passes += bool(drafts)
        self._proposed += sum(draft.proposed for draft in drafts)
        self._accepted += sum(draft.accepted for draft in drafts)
        most = max([self._most, *(draft.proposed for draft in drafts)])
        paid = self._paying(most)
        self._judge_trial(drafts, paid)
        self._learn_chances(drafts)
        if answers and times.rows == answers + sum(draft.proposed for draft in drafts):
            self._learn_experts(drafts, times, answers)
            self._learn_seconds(drafts, times, answers)
        if self._paying(most) > paid:
            self._trial_after = FIRST_TRIAL  # something has become better

    @property
    def summary(self) -> GateSummary:
        known = self._knows_prices
        return GateSummary(
            passes=self._passes,
            drafted_passes=self._drafted_passes,
            proposed=self._proposed,
            accepted=self._accepted,
            depth=self._paying(self._most),
            chance=self._chance(0),
            price_s=self._price(0) if known else None,
            gain_s=self._answer_s.value if known else None,
        )

    @property
    def _knows_prices(self) -> bool:
        return self._answer_s.count > 0

    def _paying(self, most: int) -> int:
        """The depth up to which each row pays."""
        if not self._knows_prices:
            return 0
        seconds, tokens, chance = self._answer_s.value, 1.0, 1.0  # of an answer in a pass, with the rows so far
        for row in range(most):
            price = self._price(row)
            chance *= self._chance(row)
            if chance * seconds <= price * tokens:
                return row
            seconds += price
            tokens += chance
        return most

    def _chance(self, row: int) -> float:
        """That the row is accepted if those before it were. An unknown one is like the last known one."""
        known = self._chances[: row + 1]
        return known[-1].value if known else CHANCE

    def _price(self, row: int) -> float:
        """Seconds that the row adds to a pass. An unknown one is like the last known one, or like a row of its own."""
        known = self._added[: row + 1] or [self._answer_experts]
        return known[-1].value * self._expert_s.value + self._row_s.value

    def _trial_is_due(self, paying: int) -> bool:
        if not self._knows_prices:
            return False
        affordable = self._since_trial * TRIALS * self._answer_s.value >= self._price(paying)
        return affordable and self._since_trial >= self._trial_after

    def _judge_trial(self, drafts: Sequence[Drafted], paid: int) -> None:
        """If one row more than pays was drafted: when to try that again."""
        if not any(draft.proposed > paid for draft in drafts):
            self._since_trial += 1
            return
        self._since_trial = 0
        decided = [draft.accepted > paid for draft in drafts if draft.proposed > paid and draft.accepted >= paid]
        if not decided:
            return
        if sum(decided) / len(decided) * self._answer_s.value > self._price(paid):
            self._since_trial = math.inf  # it paid, and may again
        else:
            self._trial_after = min(2 * self._trial_after, LAST_TRIAL)

    def _learn_chances(self, drafts: Sequence[Drafted]) -> None:
        for row in range(max((draft.proposed for draft in drafts), default=0)):
            # Of a row after a rejected one nothing can be said.
            decided = [draft.accepted > row for draft in drafts if draft.proposed > row and draft.accepted >= row]
            if not decided:
                return
            if row == len(self._chances):
                self._chances.append(_Average(self._chance(row), 1))
            self._chances[row].saw(decided)

    def _learn_experts(self, drafts: Sequence[Drafted], times: PassTimes, answers: int) -> None:
        sums = times.sums()
        added = sum(sum(draft.added) for draft in drafts)
        self._answer_experts.saw([(sums.experts - added) / answers])
        if sums.experts:
            self._expert_s.saw([(sums.expert_wait_s + sums.expert_s) / sums.experts])
        for row in range(max((len(draft.added) for draft in drafts), default=0)):
            if row == len(self._added):
                self._added.append(_Average())
            self._added[row].saw([draft.added[row] for draft in drafts if len(draft.added) > row])

    def _learn_seconds(self, drafts: Sequence[Drafted], times: PassTimes, answers: int) -> None:
        """Split what the added experts do not explain between the rest of the pass and the drafted rows."""
        rows = sum(draft.proposed for draft in drafts)
        if not self._row_s.count:
            # Until drafts have shown it. Rows share the reading of weights: of a bf16 matrix 4 take about twice as long
            # as 1 (docs/log.md), but of many each takes its part.
            sums = times.sums()
            computing = sums.attention_s + sums.shared_s + times.head_s
            self._row_s = _Average(computing / (times.rows + 2), 1)
        seconds = times.total_s - self._expert_s.value * sum(sum(draft.added) for draft in drafts)
        if not rows or not self._knows_prices:
            self._answer_s.saw([max(0.0, seconds - self._row_s.value * rows) / answers])
            return
        expected = self._answer_s.value * answers + self._row_s.value * rows
        # A pass that was stopped or swapped out says little about rows, and must not end drafts for long.
        surprise = max(-SURPRISE * expected, min(SURPRISE * expected, seconds - expected))
        self._row_s.saw([max(0.0, self._row_s.value + surprise / rows)])
        # Where every pass is drafted, this is how a change of all times is noticed.
        self._answer_s.value = max(0.0, self._answer_s.value + DRIFT * surprise / answers)


class _Average:
    """A mean that forgets: at first of all it saw, then mostly of the newest."""

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        self.value = value
        self.count = count

    def saw(self, values: Sequence[float]) -> None:
        self.count += len(values)
        share = max(1 - (1 - SHARE) ** len(values), len(values) / self.count)
        self.value += share * (sum(values) / len(values) - self.value)
