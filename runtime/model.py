"""A model opened for computing: `open`, `forward`, `generate`."""

from __future__ import annotations

import json
import threading
from collections import Counter, abc
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, overload
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from deltafin.errors import BadCheckpoint, BadRequest, DeltafinError, NoMemory
from deltafin.indexer import ModelConfig
from deltafin.runtime.backend import Backend
from deltafin.runtime.clock import PassTimes, RunTimes
from deltafin.runtime.draft import Draft
from deltafin.runtime.generation import Generation, Runner
from deltafin.runtime.leaving import Leaving
from deltafin.runtime.memory import (
    MemoryPlan,
    Want,
    divided_nbytes,
    kda_state_nbytes,
    logits_nbytes,
    replay_nbytes,
    sequence_nbytes,
)
from deltafin.runtime.observer import Observer
from deltafin.runtime.sampling import Sampling, reserved_ids
from deltafin.runtime.segment import Logits, Segment, check_segments, cut, part
from deltafin.runtime.sequence import Commit, Sequence
from deltafin.runtime.tokenizer import Tokenizer
from deltafin.runtime.traffic import StateTraffic
from deltafin.store import PackSet, RootSpec, Store, open_store

Floats = npt.NDArray[np.float32]


def open(
    model: str | Path,
    *,
    offline: bool = False,
    cache_dir: str | Path | None = None,
    roots: abc.Sequence[str | Path | RootSpec] = (),
    revision: str | None = None,
    device: str = "cpu",
    ram: int | None = None,
    threads: int | None = None,
    want: Want | None = None,
    spine: str | None = None,
) -> Model:
    """Open a model by directory, repo id, catalog name or `demo`; close it, or use it in a `with`.

    Builds the catalog first if there is none. `device` is "cpu" for the native kernels, "torch" for the plain torch
    implementation on the CPU, or a torch device. `ram` is the most memory, in bytes, that the process is to take
    (default: a safe share of what is available), `threads` how many compute (default: all cores), `want` what to
    prepare for, and `spine` an encoding to use; see docs/pass.md. The rest, and the errors, are `open_store`'s to
    explain.
    """
    store = open_store(str(model), offline=offline, cache_dir=cache_dir, roots=roots, revision=revision)
    try:
        return Model(store, device=device, ram=ram, threads=threads, want=want, spine=spine)
    except BaseException:
        store.close()
        raise


class Model:
    """Computes any K3-shaped model out of an open store, which it closes with itself.

    Only sequences, what one pass needs, and what else fits into its memory are in memory. Passes of one model may not
    overlap in time.
    """

    def __init__(
        self,
        store: Store,
        *,
        device: str = "cpu",
        ram: int | None = None,
        threads: int | None = None,
        want: Want | None = None,
        spine: str | PackSet | None = None,
        tokenizer: Tokenizer | None = None,
        plan: MemoryPlan | None = None,
    ) -> None:
        self.store = store
        self.config: ModelConfig = store.catalog.config
        self.tokenizer = tokenizer or load_tokenizer(store)
        self.stop_ids = _stop_ids(store, self.config, self.tokenizer)
        self.reserved_ids = reserved_ids(self.tokenizer)  # never chosen
        self.times = RunTimes()
        self.last_pass: PassTimes | None = None  # of the native backend
        self._backend = _backend(store, device, ram, threads, want, spine, plan)
        self._passing = threading.Lock()
        self._sequences = 0
        self._live: WeakSet[Sequence] = WeakSet()
        self._shed_nbytes = 0  # of resident experts, for sequences that were not planned for
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._backend.close()
            self.store.close()

    @property
    def memory(self) -> MemoryPlan | None:
        """What the budget is spent on; None for torch, which has none."""
        return self._backend.plan

    @property
    def most_rows(self) -> int | None:
        """How many rows a pass may have; None is any number."""
        return self._backend.most_rows

    @property
    def state_traffic(self) -> StateTraffic | None:
        """Bytes of states written and copied so far; None for torch, which does not count them."""
        return self._backend.traffic

    @property
    def spine_label(self) -> str | None:
        """The encoding of the spine in use, and whether it is as released; None if no pack is in use."""
        packs, layers = self._backend.packs, self.config.num_layers
        if packs is None:
            return None
        return packs.format.label + ("" if len(packs.packs) == layers else f" in {len(packs.packs)} of {layers} layers")

    @property
    def as_released(self) -> bool:
        """Whether every weight in use is exactly the released one."""
        packs = self._backend.packs
        return packs is None or packs.format.as_released

    @property
    def packs(self) -> PackSet | None:
        """The packs that the spine is taken from; None is the released bytes."""
        return self._backend.packs

    @property
    def packed_layers(self) -> frozenset[int]:
        """The layers whose spine is taken from packs."""
        packs = self._backend.packs
        return frozenset() if packs is None else frozenset(packs.packs)

    def sequence(self) -> Sequence:
        """A conversation that has not begun."""
        return self._sequence(self._backend.new_state(), ())

    def restore(self, ids: abc.Sequence[int], state: object) -> Sequence:
        """A conversation that has seen `ids`, after which the layers remember `state`, which becomes its own."""
        return self._sequence(state, ids)

    def make_room(self, tokens: int) -> None:
        """Memory for one sequence more, of so many tokens; that of resident experts if need be. Raises NoMemory."""
        self._make_room([], "none", True, tokens)

    def fork(self, seq: Sequence) -> Sequence:
        """A second conversation that begins as `seq` is now; copies its state. Raises NoMemory."""
        self._check_owner([seq])
        self.make_room(len(seq))
        return self._sequence(self._backend.copied(seq.state), seq.ids)

    def _sequence(self, state: object, ids: abc.Sequence[int]) -> Sequence:
        seq = Sequence(self._sequences, state, self, self._backend.accept, ids)
        self._sequences += 1
        self._live.add(seq)
        return seq

    @overload
    def forward(
        self,
        segments: abc.Sequence[Segment],
        *,
        logits: Literal["all", "last", "tails", "targets"] = "all",
        advance: bool = True,
        observer: Observer | None = None,
        leaving: Leaving | None = None,
    ) -> Floats: ...

    @overload
    def forward(
        self,
        segments: abc.Sequence[Segment],
        *,
        logits: Literal["none"],
        advance: bool = True,
        observer: Observer | None = None,
        leaving: Leaving | None = None,
    ) -> None: ...

    def forward(
        self,
        segments: abc.Sequence[Segment],
        *,
        logits: Logits = "all",
        advance: bool = True,
        observer: Observer | None = None,
        leaving: Leaving | None = None,
    ) -> Floats | None:
        """Feed each segment to its sequence in one pass over the weights, or in several if memory holds fewer rows.

        Returns, rows in the order of the segments: "all" logits [rows, vocab]; "last" the logits after each segment
        [segments, vocab]; "tails" those of each segment's last `tail` rows [sum of tails, vocab]; "targets" the
        log-probability of each row's target [rows]; "none" nothing. Either every sequence has advanced when this
        returns, or it raised and none has, interrupts included. With `advance` False none does: then a state is only
        there while its layer is computed, and between the passes of a segment that is cut.

        Sequences that leave the pass stay as they were, and have no rows in what is returned. That is only for one that
        keeps to `most_rows`.
        """
        if self._closed:
            raise BadRequest("this model is closed; open it again")
        check_segments(segments, logits, self.config, self._backend.most_rows)
        self._check_owner([segment.seq for segment in segments])
        if not advance and any(segment.drafted for segment in segments):
            raise BadRequest("proposals have no effect where no sequence advances; leave them out")
        if leaving is not None and len(cut(segments, self._backend.most_rows)) > 1:
            raise BadRequest("leaving is for a forward of one pass; give it no more rows than most_rows")
        if self._passing.locked():
            raise BadRequest("another pass of this model is under way; passes of one model come one after the other")
        with self._passing:  # not `acquire` and `try`: an interrupt between the two would leave it locked
            self._make_room(segments, logits, advance)
            values, states = self._passes(segments, logits, advance, observer, leaving)
            left = leaving.left if leaving is not None else ()
            staying = [(s, state) for s, state in zip(segments, states, strict=True) if s.seq.number not in left]
            if advance:
                commit = Commit()
                for segment, state in staying:
                    segment.seq.offer(segment.ids, state, commit, segment.drafted)
                commit.done = True
                for segment, _ in staying:
                    segment.seq.settle()
        if values is None and logits == "tails":
            return np.empty((0, self.config.vocab_size), np.float32)
        return values

    def _check_owner(self, sequences: abc.Iterable[Sequence]) -> None:
        if any(seq.owner is not self for seq in sequences):
            raise BadRequest("a sequence belongs to another model; use this model's sequence()")

    def _make_room(self, segments: abc.Sequence[Segment], logits: Logits, advance: bool, restored: int = 0) -> None:
        """What was not planned for, more sequences or all logits, takes the memory of resident experts.

        Raises NoMemory.
        """
        plan = self.memory
        if plan is None:
            return
        growth = {id(s.seq): len(s) for s in segments} if advance else {}
        lengths = [len(seq) + growth.get(id(seq), 0) for seq in self._live] + [restored] * (restored > 0)
        wanted = sum(sequence_nbytes(self.config, tokens) for tokens in lengths if tokens)
        taken = {id(s.seq) for s in segments}  # what they have undecided is let go before the pass
        kept = sum(len(s) for s in segments if s.drafted)
        kept += sum(seq.undecided_rows for seq in self._live if id(seq) not in taken)
        wanted += replay_nbytes(self.config) * kept
        # Between two passes of one forward there is a third state; that of a sequence not begun yet takes nothing.
        parts = Counter(number for pieces in cut(segments, plan.rows) for number, _ in pieces)
        split = [segments[number] for number, count in parts.items() if count > 1]
        if advance:
            wanted += kda_state_nbytes(self.config) * sum(1 for s in split if len(s.seq))
        else:  # one after the other
            wanted += max((divided_nbytes(self.config, len(s.seq) + len(s)) for s in split), default=0)
        # Of the result, and if it takes several passes of one of them beside it. As many rows are in the plan, twice.
        rows = sum({"all": len(s), "last": 1, "tails": s.tail}.get(logits, 0) for s in segments)
        beside = min(rows, plan.rows) if rows > plan.rows else 0
        wanted += logits_nbytes(self.config) * sum(max(0, n - plan.logits_rows) for n in (rows, beside))
        have = plan.sequences + plan.budget - plan.total + self._shed_nbytes
        lacking = wanted - have
        if lacking <= 0:
            return
        if lacking > self.store.sheddable_nbytes:
            asked = " and all their logits" if logits == "all" else ""
            most = have + self.store.sheddable_nbytes
            raise NoMemory(
                f"{len(lengths)} sequences of {sum(lengths)} tokens{asked} take {wanted / 1e9:.2f} GB, but of "
                f"{plan.budget / 1e9:.2f} GB {most / 1e9:.2f} GB are left for them; drop some, or open the model with "
                "more ram"
            )
        self._shed_nbytes += self.store.shrink(lacking)

    def _passes(
        self,
        segments: abc.Sequence[Segment],
        logits: Logits,
        advance: bool,
        observer: Observer | None,
        leaving: Leaving | None,
    ) -> tuple[Floats | None, list[object]]:
        """The asked logits, and every segment's state after it; no sequence has changed yet."""
        states: list[object] = [segment.seq.state for segment in segments]
        found: list[Floats] = []
        for pieces in cut(segments, self._backend.most_rows):
            parts = [part(segments, number, tokens, states[number], logits, advance) for number, tokens in pieces]
            wanted: Logits = logits if logits == "targets" or any(p.tail for p in parts) else "none"
            values, after = self._backend.run(parts, wanted, observer, leaving)
            if leaving is not None and leaving.left.issuperset(p.sequence for p in parts):
                break  # nobody is left to finish it for
            if observer is not None:
                observer.finished()
            if values is not None:
                found.append(values)
            for (number, tokens), state in zip(pieces, after, strict=True):
                # The first state of several has the sequence's own memory to write its successor into.
                first = tokens.start == 0 and tokens.stop < len(segments[number])
                states[number] = self._backend.detached(state) if first else state
            if (times := self._backend.times) is not None:
                self.last_pass = times
                self.times.add(times)
        return _joined(found), states

    def generate(
        self,
        seq: Sequence,
        ids: abc.Sequence[int],
        *,
        max_new: int,
        sampling: Sampling | None = None,
        draft: Draft | None = None,
        stop_ids: abc.Collection[int] | None = None,
        observer: Observer | None = None,
    ) -> abc.Iterator[int]:
        """Continue `seq` after `ids`, greedily unless `sampling` says otherwise, yielding ids as they are known.

        `ids` are one pass, then each new id is one, or several are if `draft` proposed them; it changes no id. Ends
        after `max_new` ids or with the first of `stop_ids`, which is still yielded; the default is the model's own,
        `()` is none. The last id has not been fed: `seq` then holds everything before it, and a caller who goes on
        starts the next `ids` with it.
        """
        return self._generate(
            Generation(seq, ids, max_new=max_new, sampling=sampling, draft=draft, stop_ids=stop_ids), observer
        )

    def _generate(self, generation: Generation, observer: Observer | None) -> abc.Iterator[int]:
        runner = Runner(self)
        runner.add(generation)
        while runner.active:
            for step in runner.step(observer):
                yield from [chosen.token for chosen in step.new]


def _joined(found: list[Floats]) -> Floats | None:
    """All rows as one array; what was found is let go of bit by bit, so that not everything is there twice."""
    if len(found) < 2:
        return found[0] if found else None
    out = np.empty((sum(map(len, found)), *found[0].shape[1:]), np.float32)
    at = len(out)
    while found:
        values = found.pop()
        out[at - len(values) : at] = values
        at -= len(values)
    return out


def _backend(
    store: Store,
    device: str,
    ram: int | None,
    threads: int | None,
    want: Want | None,
    spine: str | PackSet | None,
    plan: MemoryPlan | None,
) -> Backend:
    """The CPU's own kernels for "cpu"; the plain torch implementation for "torch" (on the CPU) and torch's devices."""
    if device == "cpu":
        try:
            from deltafin.runtime.native import open_native
        except ImportError as e:
            raise DeltafinError(f"the native kernels cannot be loaded ({e})") from None
        return open_native(store, ram, threads, want, spine, plan)
    settings = (("ram", ram), ("threads", threads), ("want", want), ("spine", spine), ("plan", plan))
    for name, value in settings:
        if value is not None:
            raise BadRequest(f"{name} has no effect with device {device!r}: it is for the native kernels; leave it out")
    try:
        from deltafin.runtime.reference import Reference
    except ImportError:
        raise BadRequest(f"device {device!r} needs PyTorch; install it with: pip install torch") from None
    return Reference(store, "cpu" if device == "torch" else device)


def load_tokenizer(store: Store) -> Tokenizer | None:
    """The tokenizer of an open store's model, if it has one."""
    ranks = store.catalog.file("tiktoken.model")
    if ranks is None:
        return None
    names = store.catalog.file("tokenizer_config.json")
    if names is None:
        raise BadCheckpoint("tiktoken.model is there but tokenizer_config.json, which names the special ids, is not")
    return Tokenizer(ranks, names, store.catalog.config.vocab_size)


def _stop_ids(store: Store, config: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Where an answer ends: what the checkpoint's files say, and [EOS], which raw texts end with."""
    stops = {config.eos_id}
    raw = store.catalog.file("generation_config.json")
    if raw is not None:
        stops.update(_generation_eos(raw))
    if tokenizer is not None and "[EOS]" in tokenizer.special_tokens:
        stops.add(tokenizer.special_tokens["[EOS]"])
    return frozenset(stops)


def _generation_eos(raw: bytes) -> list[int]:
    """`eos_token_id` may be a number, a list of them, or absent."""
    try:
        fields: object = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise BadCheckpoint(f"generation_config.json: not JSON ({e})") from None
    eos: object = fields.get("eos_token_id", []) if isinstance(fields, dict) else None
    ids: list[object] = eos if isinstance(eos, list) else [eos]
    found = [i for i in ids if type(i) is int]
    if len(found) != len(ids):
        raise BadCheckpoint(f"generation_config.json: eos_token_id is {eos!r}; expected a token id or a list of them")
    return found
