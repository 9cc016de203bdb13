"""Beginnings that are kept by themselves: states in the cache, found again by the chain of their tokens."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import abc
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from deltafin.errors import BadRequest, Corrupt, DeltafinError, DiskError, NoSpace, NotFound
from deltafin.indexer import disk_error, make_directory
from deltafin.runtime.model import Model
from deltafin.runtime.native import KdaState, Latents
from deltafin.runtime.sequence import Sequence
from deltafin.runtime.states.identifying import Identity, identity
from deltafin.runtime.states.layout import Ids, ids_array, state_nbytes
from deltafin.runtime.states.reading import StateReader
from deltafin.runtime.states.saving import layers_of, restore_from
from deltafin.runtime.states.writing import StateWriter
from deltafin.store import StateFile, refuse_links, state_files, state_folder, states_in

log = logging.getLogger(__name__)

BUDGET_PART = 0.1  # of what is free, where nobody says how much states may take
_FOLDER_MODE = 0o700
_ADVICE = "it is removed, and computed again"


@dataclass(slots=True)
class PrefixStats:
    """What one `PrefixStore` did so far."""

    kept: int = 0
    kept_nbytes: int = 0
    restored: int = 0
    restored_nbytes: int = 0
    restored_tokens: int = 0
    evicted: int = 0
    evicted_nbytes: int = 0
    damaged: int = 0

    def snapshot(self) -> dict[str, int]:
        return asdict(self)


class PrefixStore:
    """States in the caches of the models that it is asked about. One thread at a time.

    Advisory: a full disk, a place that is only read or a lost drive is said once in the log, and then nothing is kept
    or found. Several processes may share a cache; each writes files of its own and renames them.
    """

    def __init__(self, budget_nbytes: int | None = None) -> None:
        """`budget_nbytes` is the most that the states in a cache may take, of all models together.

        0 is off: nothing is kept and nothing looked for. The default is a tenth of what its disk has free beyond the
        reserve, counting what states take as free.
        """
        if budget_nbytes is not None and budget_nbytes < 0:
            raise BadRequest(f"a budget of {budget_nbytes} bytes for states; expected 0 (off) or more")
        self.budget_nbytes = budget_nbytes
        self.stats = PrefixStats()
        self._said: set[str] = set()
        self._unremovable: set[Path] = set()  # damaged ones

    def longest(self, model: Model, ids: abc.Sequence[int], more_than: int = 0) -> Sequence | None:
        """A sequence that has seen the longest kept beginning of `ids`, but not all of them; None if there is none.

        One of `more_than` tokens or fewer is not looked at.

        The state was compared with its digests. One that is damaged is removed, and said. Raises BadRequest for a model
        that has no states, NoMemory if what was found does not fit.
        """
        which, wanted = identity(model), ids_array(ids, model.config)
        if self.budget_nbytes == 0:
            return None
        try:
            folder = self._folder(model, which)
            kept = {file.path.name for file in states_in(folder)}
        except DiskError as e:
            self._say("read", f"{e}; no saved state is looked for there")
            return None
        lengths = sorted({length for name in kept if more_than < (length := _length(name)) < len(wanted)})
        names = prefix_names(which, wanted, lengths)
        for name in reversed([name for name in names if name in kept]):
            seq = self._restore(folder / name, model, which, wanted)
            if seq is not None:
                return seq
        return None

    def keep(self, model: Model, seq: Sequence) -> bool:
        """Keeps what a sequence has seen and remembers, if there is room and it is not there; whether it is there."""
        if not len(seq):
            return False
        writer = self.writer(model, seq.ids)
        if writer is None:
            return self.has(model, seq.ids)
        try:
            for layer, state in enumerate(layers_of(seq)):
                writer.layer(layer, state)
            return writer.commit()
        finally:
            writer.abort()

    def has(self, model: Model, ids: abc.Sequence[int]) -> bool:
        """Whether a state of exactly these ids is kept. Looks at no content."""
        which = identity(model)
        with suppress(DiskError):
            return self.budget_nbytes != 0 and os.path.isfile(self._path(model, which, ids_array(ids, model.config)))
        return False

    def writer(self, model: Model, ids: abc.Sequence[int]) -> PrefixWriter | None:
        """Takes the state after `ids` layer by layer; None where it is kept already or will not be.

        Makes room first: the least recently used states go.
        """
        which, wanted = identity(model), ids_array(ids, model.config)
        if self.budget_nbytes == 0 or not len(wanted):
            return None
        try:
            final = self._path(model, which, wanted)
            if _touch(final):
                return None
            if not self._make_room(model, state_nbytes(which, model.config, len(wanted))):
                return None
            _make_folder(final.parent)
            tmp = model.store.roots[0].path / "tmp"
            return PrefixWriter(self, StateWriter(final, tmp, which, model.config, wanted))
        except DeltafinError as e:
            self.failed(e)
            return None

    def failed(self, error: DeltafinError) -> None:
        """Takes note of a state that could not be written; the run goes on without it."""
        kind = "space" if isinstance(error, NoSpace) else "write"
        self._say(kind, f"{error}; the state is not kept, and what it remembers is computed again the next time")

    def _restore(self, path: Path, model: Model, which: Identity, ids: Ids) -> Sequence | None:
        if path in self._unremovable:
            return None
        try:
            with StateReader(path, which, model.config, follow_links=False, advice=_ADVICE) as reader:
                if len(reader.pending) or not np.array_equal(reader.ids, ids[: _length(path.name)]):
                    raise Corrupt(f"{path}: this is the state of other tokens; {_ADVICE}")
                seq = restore_from(reader, model)
                reader.touch()
        except NotFound:
            return None  # removed meanwhile
        except DiskError as e:
            self._say("read", f"{e}; computed again instead")
            return None
        except (Corrupt, BadRequest) as e:
            self.stats.damaged += 1
            log.warning("%s", e if isinstance(e, Corrupt) else f"{e} ({_ADVICE})")
            try:
                path.unlink(missing_ok=True)
            except OSError:
                self._unremovable.add(path)
            return None
        self.stats.restored += 1
        self.stats.restored_nbytes += reader.nbytes
        self.stats.restored_tokens += len(seq)
        return seq

    def _make_room(self, model: Model, nbytes: int) -> bool:
        """Evicts the least recently used states until so many bytes more fit; whether they do."""
        root = model.store.roots[0]
        if root.space is None or root.presence.look():
            return False  # a lost drive has been said
        held = sorted(state_files(root.path), key=lambda file: file.used_ns)
        held_nbytes, left = sum(file.nbytes for file in held), root.space.left_on_disk
        budget = self.budget_nbytes
        if budget is None:
            budget = int(BUDGET_PART * (left + held_nbytes))
        if nbytes > min(budget, left + held_nbytes):
            self._say(
                "budget",
                f"{root.path}: a state of {nbytes:,} bytes is not kept: states may take {budget:,} bytes there; free "
                "some space or give them a larger budget",
            )
            return False
        while held and (held_nbytes + nbytes > budget or nbytes > left):
            oldest = held.pop(0)
            held_nbytes, left = held_nbytes - oldest.nbytes, left + oldest.nbytes
            self._evict(oldest)
        return True

    def _evict(self, file: StateFile) -> None:
        try:
            file.path.unlink()
        except FileNotFoundError:
            return  # by another process
        except OSError as e:
            raise disk_error(e, file.path, "cannot remove") from None
        self.stats.evicted += 1
        self.stats.evicted_nbytes += file.nbytes

    def _path(self, model: Model, which: Identity, ids: Ids) -> Path:
        return self._folder(model, which) / prefix_names(which, ids, [len(ids)])[0]

    def _folder(self, model: Model, which: Identity) -> Path:
        folder = state_folder(model.store) / which.digest.hex()[:32]
        refuse_links(model.store.roots[0].path, folder)
        return folder

    def _say(self, kind: str, line: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.warning("%s", line)


class PrefixWriter:
    """A `StateSink`: takes every layer of one state, then `commit`, or `abort`. Errors of the disk end it quietly.

    That is, they are said once in the log, what was written is removed, and further layers are let pass.
    """

    def __init__(self, store: PrefixStore, writer: StateWriter) -> None:
        self._store = store
        self._writer: StateWriter | None = writer

    def layer(self, layer: int, state: object) -> None:
        assert isinstance(state, KdaState | Latents)
        if self._writer is not None:
            try:
                self._writer.layer(layer, state)
            except DeltafinError as e:
                self._fail(e)

    @property
    def complete(self) -> bool:
        """Whether every layer has come and was written."""
        return self._writer is not None and self._writer.complete

    def commit(self) -> bool:
        """Makes the state appear; whether it did."""
        if (writer := self._writer) is None:
            return False
        try:
            writer.publish()
        except DeltafinError as e:
            self._fail(e)
            return False
        self._writer = None
        self._store.stats.kept += 1
        self._store.stats.kept_nbytes += writer.nbytes
        return True

    def abort(self) -> None:
        """Lets go of it; after `commit` it does nothing."""
        if self._writer is not None:
            self._writer.discard()
            self._writer = None

    def _fail(self, error: DeltafinError) -> None:
        self.abort()
        self._store.failed(error)


def prefix_names(which: Identity, ids: Ids, lengths: abc.Sequence[int]) -> list[str]:
    """What the states of the beginnings of `ids` of these ascending lengths are called.

    SHA-256 is a chain over blocks of 64 bytes, from the identity on; so all lengths together hash each id once.
    """
    chain = hashlib.sha256(b"deltafin prefix\n" + which.digest)
    names, at = [], 0
    for length in lengths:
        chain.update(ids[at:length].data)
        at = length
        names.append(f"{length}-{chain.copy().hexdigest()[:32]}.state")
    return names


def _make_folder(folder: Path) -> None:
    try:
        make_directory(folder, _FOLDER_MODE)
    except OSError as e:
        raise disk_error(e, folder) from None


def _length(name: str) -> int:
    return int(name.partition("-")[0])


def _touch(path: Path) -> bool:
    """Whether a state is there, which then counts as just used."""
    if os.path.islink(path) or not os.path.isfile(path):
        return False
    with suppress(OSError):
        os.utime(path)
    return True
