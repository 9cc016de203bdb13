"""One conversation's state between passes."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from deltafin.errors import BadRequest


class Commit:
    """Whether one pass has happened. All its sequences look here, so one assignment commits them together."""

    __slots__ = ("done",)

    def __init__(self, done: bool = False) -> None:
        self.done = done


@dataclass(frozen=True, slots=True)
class _Version:
    length: int
    state: object
    commit: Commit
    drafted: int = 0  # ids beyond `length` that were proposals; `state` is then what decides between them
    rows: int = 0  # that are kept for that


class Sequence:
    """The tokens a model has seen in one conversation and what its layers remember of them.

    Made by `Model.sequence()`, advanced only by that model's `forward`. A pass that fails, for whatever reason,
    leaves it exactly as it was. One thread at a time.
    """

    def __init__(
        self,
        number: int,
        state: object,
        owner: object,
        accept: abc.Callable[[object, int], object],
        ids: abc.Sequence[int] = (),
    ) -> None:
        """`accept` makes a state of one that a pass with proposals left, and how many of them count."""
        self.number = number  # counts a model's sequences from 0; traces name it
        self.owner = owner  # the model whose backend understands `state`
        self._accept = accept
        self._ids: list[int] = list(ids)  # those beyond the committed length belong to a pass that failed
        self._committed = _Version(len(self._ids), state, Commit(done=True))
        self._offered: _Version | None = None

    def __len__(self) -> int:
        """Tokens fed so far; of proposals only those that were accepted."""
        return self._version.length

    @property
    def ids(self) -> list[int]:
        """A copy of every token fed so far."""
        return self._ids[: self._version.length]

    @property
    def state(self) -> object:
        """The backend's own; nobody else looks inside. Proposals that nobody accepted are rejected by asking."""
        if self._version.drafted:
            self.accept(0)
        return self._version.state

    @property
    def undecided_rows(self) -> int:
        """How many rows of the last pass are kept until `accept`, or whatever asks for the state, lets go of them."""
        return self._version.rows

    def accept(self, count: int) -> None:
        """Keep the first `count` proposals of the last pass as fed, and forget the others.

        Neither copies a state: it is computed from the one before the pass, into memory of its own.
        """
        now = self._version
        if not 0 <= count <= now.drafted:
            raise BadRequest(f"{count} proposals cannot be accepted; the last pass left {now.drafted} to decide on")
        if not now.drafted:
            return
        state = self._accept(now.state, count)
        self._committed = _Version(now.length + count, state, Commit(done=True))
        self._offered = None

    def offer(self, ids: abc.Sequence[int], state: object, commit: Commit, drafted: int = 0) -> None:
        """What the sequence will be once `commit` is done; until then it stays what it is.

        Of `ids` the last `drafted` are proposals to decide on.
        """
        # Kept as the version to fall back to: an interrupt may have come before the last pass was settled.
        self._committed = committed = self._version
        self._ids[committed.length :] = ids
        rows = len(ids) if drafted else 0
        self._offered = _Version(committed.length + len(ids) - drafted, state, commit, drafted, rows)

    def settle(self) -> None:
        """Let go of the state before the last pass, or of the one that a failed pass offered."""
        self._committed = self._version
        self._offered = None

    @property
    def _version(self) -> _Version:
        offered = self._offered
        return offered if offered is not None and offered.commit.done else self._committed
