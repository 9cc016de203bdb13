"""Looking at every byte that is on disk: `df-fetch verify`.

Objects are compared with their names, packs with their digests, and whole shards, in place or as objects, with the
published SHA-256; what agrees with that is recorded as proven.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

import xxhash

from deltafin.errors import DeltafinError
from deltafin.indexer import Span, disk_error
from deltafin.store.encodings import PackFormat
from deltafin.store.objectlog import ObjectEntry, key_parts
from deltafin.store.packcheck import verify_packs
from deltafin.store.packs import pack_files
from deltafin.store.proof import record_proven
from deltafin.store.roots import Root, ShardDirectory
from deltafin.store.spantable import REST, SpanTable, span_table
from deltafin.store.store import Store
from deltafin.store.verifystate import VerifyState

log = logging.getLogger(__name__)

_READ_NBYTES = 4 << 20
_THREADS = 4
_ANOTHER = "a span of another model"  # how an object is called whose model is not the one in hand
_NAMED_SPANS = 3  # of a damaged shard, in one line

Progress = Callable[[int], None]


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


@dataclass(slots=True)
class VerifyReport:
    """What `verify` found. `damaged` names each bad object, shard or pack; everything else is whole."""

    mode: str = "full"
    whole: int = 0
    whole_nbytes: int = 0
    damaged: list[str] = field(default_factory=list)
    vanished: int = 0  # logged, but the file is gone: a miss, no fault
    unknown: int = 0  # files among the objects that no record names
    bad_records: int = 0  # damaged records in object logs, skipped
    proven_shards: int = 0  # shards that were proven by this verification
    unproven_shards: int = 0  # original shards without a published digest to compare with
    packs: int = 0  # whole ones
    packs_nbytes: int = 0
    # For the repair: what is wrong with this model, beside objects on record that are gone.
    strangers: dict[Path, dict[str, int]] = field(
        default_factory=dict
    )  # unknown objects of each root, with their bytes
    wrong_spans: list[Span] = field(default_factory=list)  # in original shards
    doubtful_shards: list[int] = field(default_factory=list)  # whose objects are not, together, what was published
    lost_packs: list[tuple[PackFormat, int]] = field(default_factory=list)
    beyond_repair: list[str] = field(default_factory=list)  # those lines of `damaged` that no fetch could mend

    def as_json(self) -> dict[str, object]:
        hidden = ("strangers", "wrong_spans", "doubtful_shards", "lost_packs", "beyond_repair")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}


def verify(store: Store, progress: Progress | None = None, *, restart: bool = True) -> VerifyReport:
    """Hashes every object and pack of every root, whichever model it is of, and local shards with a published digest.

    Damaged objects and packs of the cache are moved to its `quarantine` folder, so that they are fetched again
    when next needed. `progress` is told bytes as they are read. Without `restart` it goes on where one was interrupted
    less than a week ago.
    """
    state = VerifyState(store.roots[0].path, store.model, restart=restart)
    finished = False
    try:
        report = _Verification(store, state, progress).run()
        finished = True
        return report
    finally:
        state.close(finished=finished)


def quick_verify(store: Store) -> VerifyReport:
    """Looks at sizes, records and headers, and at no content; what has the wrong size is moved aside in the cache."""
    report = VerifyReport("quick")
    labels = _labels(store)
    for root in store.roots:
        owners = _owners(root, labels)
        files = dict(root.object_files())
        report.bad_records += root.log.bad_records
        report.vanished += sum(owner.held and name not in files for name, owner in owners.items())
        for name, nbytes in files.items():
            owner = owners.get(name)
            if owner is None:
                report.unknown += 1
                report.strangers.setdefault(root.path, {})[name] = nbytes
            if owner is None or owner.entry.nbytes == nbytes:
                report.whole += 1
                report.whole_nbytes += nbytes
                continue
            entry = owner.entry
            line = f"{root.object_path(entry)}: {owner.label}: {nbytes} bytes, expected {entry.nbytes}"
            report.damaged.append(line + _moved(root, entry))
            if not _repairable(root.object_path(entry), owner):
                report.beyond_repair.append(report.damaged[-1])
    for directory in store.shard_directories:
        for number, shard in enumerate(store.catalog.shards):
            if directory.has(number):
                report.whole += 1
                report.whole_nbytes += shard.nbytes
            elif directory.required:
                report.damaged.append(f"{directory.shard_path(number)}: missing")
                report.beyond_repair.append(report.damaged[-1])
    for format in PackFormat:
        packs = store.packs(format)
        report.packs += len(packs.packs)
        report.packs_nbytes += packs.nbytes
        report.damaged += packs.complaints
        report.lost_packs += [(format, layer) for layer in packs.passed_over]
    return report


def nbytes_to_verify(store: Store) -> int:
    objects = sum(nbytes for root in store.roots for _, nbytes in root.object_files())
    on_record = {key_parts(key)[0] for root in store.roots for key in root.log.entries}
    shards = sum(
        shard.nbytes
        for directory in store.shard_directories
        for number, shard in enumerate(store.catalog.shards)
        if directory.has(number) and (shard.sha256 is not None or store.shard_ids[number] in on_record)
    )
    packs = sum(nbytes for root in store.roots for _, nbytes in pack_files(root.path))
    return objects + shards + packs


@dataclass(frozen=True, slots=True)
class _Owner:
    """What a root's log says of an object."""

    entry: ObjectEntry
    label: str
    held: bool  # by any of the spans that are this object


def _labels(store: Store) -> dict[bytes, str]:
    table = span_table(store.catalog).with_rest(store.catalog)
    return {key: table.label(row) for row, key in enumerate(table.keys(store.shard_ids))}


def _owners(root: Root, labels: dict[bytes, str]) -> dict[str, _Owner]:
    owners: dict[str, _Owner] = {}
    for key, entry in root.log.entries.items():
        name = entry.sha256.hex()
        before = owners.get(name)
        held = entry.held or (before is not None and before.held)
        owners[name] = _Owner(entry, labels.get(key, _ANOTHER), held)
    return owners


class _Verification:
    def __init__(self, store: Store, state: VerifyState, progress: Progress | None) -> None:
        self._store = store
        self._state = state
        self._progress = progress
        self._report = VerifyReport(damaged=list(state.damaged))
        self._lock = threading.Lock()
        self._stopped = False
        self._seen: dict[Path, str] = {}  # objects that were hashed, and what is wrong with them
        self._table = span_table(store.catalog).with_rest(store.catalog)
        self._labels = _labels(store)

    def run(self) -> VerifyReport:
        store, report = self._store, self._report
        if self._state.resumed:
            log.info("%d files were found whole before the interruption", self._state.resumed)
        owners = {root.path: _owners(root, self._labels) for root in store.roots}
        shards = range(len(store.catalog.shards))
        with ThreadPoolExecutor(_THREADS, "verify") as pool:
            try:
                _drain(pool.map(lambda n: self._shard_of_objects(n, owners), shards))
                for root in store.roots:
                    files = dict(root.object_files())
                    mine = owners[root.path]
                    _drain(pool.map(lambda f, r=root, o=mine: self._object(r, f, o), files.items()))
                    report.vanished += sum(owner.held and name not in files for name, owner in mine.items())
                    report.bad_records += root.log.bad_records
                for directory in store.shard_directories:
                    _drain(pool.map(lambda n, d=directory: self._shard_in_place(d, n), shards))
            except BaseException:
                self._stopped = True  # nobody waits for a shard to be read to its end
                raise
        packs = verify_packs(store, self._tell)
        report.packs, report.packs_nbytes = packs.whole, packs.whole_nbytes
        report.damaged += packs.damaged
        report.lost_packs = packs.lost
        return report

    def _tell(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress(nbytes)

    def _damaged(self, line: str, *, repairable: bool = True) -> None:
        with self._lock:
            self._report.damaged.append(line)
            if not repairable:
                self._report.beyond_repair.append(line)

    # ---- objects ---------------------------------------------------------------------------------------------

    def _object(self, root: Root, file: tuple[str, int], owners: dict[str, _Owner]) -> None:
        name, nbytes = file
        owner = owners.get(name)
        path = root.path / "objects" / name[:2] / name
        if (complaint := self._seen.get(path)) is None:
            complaint = self._look_at(path, name, nbytes)
        if complaint and not path.exists():
            with self._lock:
                self._report.vanished += owner is not None and owner.held  # removed while it was being looked at
            return
        if complaint:
            label = owner.label if owner is not None else "named by no record"
            entry = owner.entry if owner is not None else ObjectEntry(bytes.fromhex(name), b"", nbytes)
            line = f"{path}: {label}: {complaint}, {nbytes} bytes{_moved(root, entry)}"
            self._damaged(line, repairable=_repairable(path, owner))
            if not path.exists():
                self._state.note_damaged(line)  # moved aside, it would not be found again
            return
        with self._lock:
            self._report.whole += 1
            self._report.whole_nbytes += nbytes
            self._report.unknown += owner is None
            if owner is None:
                self._report.strangers.setdefault(root.path, {})[name] = nbytes

    def _look_at(self, path: Path, name: str, nbytes: int) -> str:
        """What is wrong with an object whose content should be what its name says; empty if nothing is."""
        if self._state.is_whole(path):
            self._tell(nbytes)
            return ""
        digest = hashlib.sha256()
        try:
            self._hash_file(path, [digest])
        except DeltafinError as e:
            return str(e)
        complaint = _differs(digest.digest(), bytes.fromhex(name))
        if not complaint:
            self._state.note_whole(path)
        return complaint

    def _shard_of_objects(self, number: int, owners: dict[Path, dict[str, _Owner]]) -> None:
        """Proves a shard that is here as objects: each is compared with its name by the same reading."""
        store, shard = self._store, self._store.catalog.shards[number]
        if shard.sha256 is None:
            return
        table = self._table.of_shard(number)
        spans = [table.span(row) for row in range(len(table))]
        found = [store.object_of(span) for span in spans]
        if all((known := store.known(span)) is not None and known.proven for span in spans):
            return
        here = [at for at in found if at is not None]
        if len(here) < len(spans):
            return
        digest = hashlib.sha256()
        entries: list[ObjectEntry] = []
        for root, entry in here:
            path, own = root.object_path(entry), hashlib.sha256()
            try:
                self._hash_file(path, [own, digest], tell=path not in self._seen)
            except DeltafinError:
                return  # the object's own fault; it is looked at for itself
            with self._lock:
                self._seen[path] = complaint = _differs(own.digest(), entry.sha256)
            if complaint:
                return
            self._state.note_whole(path)
            entries.append(entry)
        if digest.hexdigest() == shard.sha256:
            self._prove(number, list(zip(spans, entries, strict=True)))
            return
        self._damaged(
            f"{shard.name}: its objects do not have, together, the published SHA-256; df-fetch verify {store.model} "
            "--repair fetches what is unproven of it once more"
        )
        with self._lock:
            self._report.doubtful_shards.append(number)

    def _prove(self, number: int, found: list[tuple[Span, ObjectEntry]]) -> None:
        try:
            record_proven(self._store, found)
        except DeltafinError as e:
            log.warning("%s is proven, but that cannot be recorded: %s", self._store.catalog.shards[number].name, e)
            return
        with self._lock:
            self._report.proven_shards += 1

    # ---- original shards -------------------------------------------------------------------------------------

    def _shard_in_place(self, directory: ShardDirectory, number: int) -> None:
        store, shard = self._store, self._store.catalog.shards[number]
        path = directory.shard_path(number)
        if not directory.has(number):
            if directory.required:
                self._damaged(f"{path}: missing", repairable=False)
            return
        table = self._table.of_shard(number)
        spans = [table.span(row) for row in range(len(table))]
        known = [store.known(span) for span in spans]
        text = [row for row in range(len(table)) if table.layer[row] != REST]
        proven = all((entry := known[row]) is not None and entry.proven for row in text)
        if shard.sha256 is None and not any(known):
            with self._lock:
                self._report.unproven_shards += 1
            return
        if self._state.is_whole(path) and (proven or shard.sha256 is None):
            self._tell(shard.nbytes)
            self._note_shard(path, shard.nbytes, proven or shard.sha256 is not None)
            return
        try:
            whole, found = self._hash_pieces(path, spans)
        except DeltafinError as e:
            self._damaged(str(e), repairable=False)
            return
        wrong = [row for row, entry in enumerate(known) if entry is not None and entry.sha256 != found[row].sha256]
        if shard.sha256 is not None and whole == shard.sha256:
            self._prove_in_place(number, spans, found, known)
            if false := sum((entry := known[row]) is not None and entry.proven for row in wrong):
                self._damaged(
                    f"{path}: has its published SHA-256, but {false} digests on record as proven contradict it; a "
                    f"manifest was wrong: df-fetch manifest forget {store.model}, then verify again",
                    repairable=False,
                )
                return
        elif wrong or shard.sha256 is not None:
            line = f"{path}: {self._what_differs(table, wrong, shard.sha256 is not None)}"
            self._damaged(line, repairable=bool(wrong))
            with self._lock:
                self._report.wrong_spans += [spans[row] for row in wrong]
            return
        self._state.note_whole(path)
        self._note_shard(path, shard.nbytes, proven or shard.sha256 is not None)

    def _note_shard(self, path: Path, nbytes: int, proven: bool) -> None:
        with self._lock:
            self._report.whole += 1
            self._report.whole_nbytes += nbytes
            self._report.unproven_shards += not proven

    def _prove_in_place(
        self, number: int, spans: list[Span], found: list[ObjectEntry], known: list[ObjectEntry | None]
    ) -> None:
        news = [
            (span, entry) for span, entry, old in zip(spans, found, known, strict=True) if old is None or not old.proven
        ]
        if news:
            self._prove(number, news)

    @staticmethod
    def _what_differs(table: SpanTable, wrong: list[int], published: bool) -> str:
        what = "SHA-256 differs from the published one" if published else "differs from what is on record"
        if not wrong:
            return f"{what}; which bytes are wrong is known only with a manifest (df-fetch manifest import)"
        named = ", ".join(table.label(row) for row in wrong[:_NAMED_SPANS])
        more = f" and {len(wrong) - _NAMED_SPANS} more spans" if len(wrong) > _NAMED_SPANS else ""
        return f"{what}: {named}{more}"

    def _hash_pieces(self, path: Path, spans: list[Span]) -> tuple[str, list[ObjectEntry]]:
        """SHA-256 of a shard, and what each of its spans is; they cover it without a gap."""
        whole, found = hashlib.sha256(), []
        for span in spans:
            sha256, xxh3 = hashlib.sha256(), xxhash.xxh3_128()
            self._hash_file(path, [whole, sha256, xxh3], span)
            found.append(ObjectEntry(sha256.digest(), xxh3.digest(), span.nbytes, held=False))
        return whole.hexdigest(), found

    def _hash_file(self, path: Path, digests: list[_Digest], span: Span | None = None, *, tell: bool = True) -> None:
        """Feeds a file, or a span of it, to digests. Raises DiskError."""
        try:
            with open(path, "rb", buffering=0) as f:
                f.seek(0 if span is None else span.offset)
                left = None if span is None else span.nbytes
                while left != 0 and (block := f.read(_READ_NBYTES if left is None else min(left, _READ_NBYTES))):
                    for digest in digests:
                        digest.update(block)
                    if left is not None:
                        left -= len(block)
                    if self._stopped:
                        raise CancelledError
                    if tell:
                        self._tell(len(block))
        except OSError as e:
            raise disk_error(e, path, "cannot read") from None


def _differs(got: bytes, expected: bytes) -> str:
    return "" if got == expected else f"content has SHA-256 {got.hex()[:16]}.."


def _moved(root: Root, entry: ObjectEntry) -> str:
    if not root.writable:
        return ""
    try:
        return f"; moved to {root.quarantine(entry)}"
    except DeltafinError as e:
        return f" ({e})"


def _repairable(path: Path, owner: _Owner | None) -> bool:
    """Whether a damaged object is out of the way, and of this model or of none: then what is missing can be fetched."""
    return not path.exists() and (owner is None or owner.label != _ANOTHER)


def _drain(results: Iterable[None]) -> None:
    for _ in results:
        pass
