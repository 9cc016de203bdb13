"""Bringing back what is damaged or lost, and nothing else: `df-fetch verify --repair`."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deltafin.errors import BadCatalog, Corrupt, DeltafinError, Missing, NotFound, Refused
from deltafin.indexer import (
    Catalog,
    Location,
    RetryPolicy,
    Source,
    build_catalog,
    catalog_path,
    disk_error,
    parse_model,
    source_of,
)
from deltafin.store.bulk import fetch
from deltafin.store.encodings import PackFormat
from deltafin.store.logrepair import Mended, mend_log
from deltafin.store.objectlog import ObjectEntry
from deltafin.store.packing import plan_packs, write_packs
from deltafin.store.proof import Prover, Verdict, set_aside, settle
from deltafin.store.selection import Item
from deltafin.store.spantable import SPINE, span_table
from deltafin.store.store import Store
from deltafin.store.verifying import VerifyReport

log = logging.getLogger(__name__)

Progress = Callable[[int], None]


@dataclass(slots=True)
class RepairPlan:
    """What is to be done after a verification; making it changes nothing but records."""

    fetch: list[Item] = field(default_factory=list)
    packs: dict[PackFormat, list[int]] = field(default_factory=dict)
    doubtful_shards: list[int] = field(default_factory=list)
    doubtful_nbytes: int = 0
    rerecorded: int = 0  # objects whose records were lost, and found in another log
    beyond_repair: list[str] = field(default_factory=list)  # damage that stays

    @property
    def fetch_nbytes(self) -> int:
        """What may come over the network, without what lost packs are made of."""
        return sum(item.span.nbytes for item in self.fetch) + self.doubtful_nbytes

    @property
    def nothing(self) -> bool:
        return not (self.fetch or self.packs or self.doubtful_shards)


@dataclass(slots=True)
class RepairReport:
    """What was done. `unrepaired` says what could not be, a line each."""

    corrected_records: int = 0
    rerecorded: int = 0
    spans: int = 0  # fetched
    nbytes: int = 0
    requests: int = 0
    changed: list[str] = field(default_factory=list)  # unproven spans that came otherwise than the first time
    packs: int = 0
    proven_shards: int = 0
    unrepaired: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


# ---- the catalog --------------------------------------------------------------------------------------------


def rebuild_catalog(
    model: str, cache: Path, *, offline: bool, revision: str | None = None, policy: RetryPolicy | None = None
) -> Path | None:
    """Builds a model's catalog anew if it is damaged, at the commit that it was of; None if it is sound or absent.

    Raises what reading the source raises, and Missing if that is out of reach.
    """
    ref = parse_model(model, cache, revision=revision)
    path = catalog_path(cache, ref.name)
    try:
        Catalog(path).close()
        return None
    except NotFound:
        return None
    except BadCatalog as e:
        log.warning("%s", e)
    location = _location_in(path)
    remote = ref.remote if location is None else location.path is None
    if offline and remote:
        raise Missing(f"{path}: damaged, and its source is out of reach; run this again without --offline")
    source: Source | None = None
    try:
        if location is not None:
            source = source_of(location, policy)
    except (NotFound, Refused) as e:
        log.warning("%s; what the damaged catalog says of its source may be damaged, too", e)
    source = source or ref.source(policy)
    try:
        build_catalog(source, path, ref.name)
    finally:
        source.close()
    return path


def _location_in(path: Path) -> Location | None:
    """Where a damaged catalog's model is, as far as its bytes still say so."""
    try:
        found = re.search(rb'"location":(\{[^{}]{0,4000}\})', path.read_bytes())
        fields: dict[str, str | None] = json.loads(found[1]) if found else {}
        location = Location(**fields)
    except (OSError, ValueError, TypeError):
        return None
    known = location.path is not None or (location.repo is not None and location.commit is not None)
    return location if known and all(v is None or isinstance(v, str) for v in fields.values()) else None


# ---- logs ---------------------------------------------------------------------------------------------------


def mend_logs(store: Store) -> Mended:
    """Corrects and cleans the logs of the roots that are written to. Before a verification: it counts on them."""
    done = [mend_log(root.log) for root in store.roots if root.writable]
    return Mended(sum(m.corrected for m in done), sum(m.dropped_nbytes for m in done))


# ---- objects, shards and packs ------------------------------------------------------------------------------


def plan_repair(store: Store, report: VerifyReport) -> RepairPlan:
    """What has to be done about a verification's findings. Records of lost log lines that others know are put back.

    What something else here has, another root or an original shard, is not lost.
    """
    plan = RepairPlan(doubtful_shards=list(report.doubtful_shards), beyond_repair=list(report.beyond_repair))
    plan.rerecorded = _rerecord(store, report)
    for format, layer in sorted(set(report.lost_packs)):
        plan.packs.setdefault(format, []).append(layer)
    table = span_table(store.catalog).with_rest(store.catalog)
    roots, wrong = store.writable_roots, set(report.wrong_spans)
    doubtful = set(report.doubtful_shards)
    strangers = Counter(nbytes for root in roots for nbytes in report.strangers.get(root.path, {}).values())
    absent: dict[int, list[Item]] = defaultdict(list)
    for row, key in enumerate(table.keys(store.shard_ids)):
        span = table.span(row)
        entries = [entry for root in roots if (entry := root.log.entries.get(key)) is not None]
        here = store.object_of(span)
        if span.shard in doubtful and not any(entry.proven for entry in entries):
            plan.doubtful_nbytes += span.nbytes
        if here is not None:
            continue
        expert = int(table.expert[row])
        item = Item(span, int(table.layer[row]), None if expert == SPINE else expert)
        if span in wrong:
            plan.fetch.append(item)
        elif store.is_local(span):
            continue
        elif any(entry.held for entry in entries):
            plan.fetch.append(item)
        elif span.nbytes in strangers:
            absent[span.nbytes].append(item)
    # An object without a record may be any absent span of its size; fetching tells which, if they are not too many.
    for nbytes, items in absent.items():
        if len(items) <= strangers[nbytes]:
            plan.fetch += items
    plan.fetch.sort(key=lambda item: (item.span.shard, item.span.offset))
    return plan


def repair(store: Store, plan: RepairPlan, progress: Progress | None = None) -> RepairReport:
    """Does what a plan says; what cannot be done is said in `unrepaired`.

    `progress` is told bytes that were fetched. What comes over the network must have the digest on record if that is
    proven; if not, it is believed and a difference is said.
    """
    report = RepairReport(rerecorded=plan.rerecorded, unrepaired=list(plan.beyond_repair))
    before = store.requests
    told = progress or (lambda nbytes: None)
    if plan.fetch:
        _fetch(store, plan.fetch, told, report)
    shards = {item.span.shard for item in plan.fetch} - set(plan.doubtful_shards)
    with Prover(store, shards=sorted(shards)) as prover:
        verdicts = prover.finish()
    verdicts += [Verdict(number, False, 0) for number in plan.doubtful_shards]
    for verdict in verdicts:
        if verdict.proven:
            report.proven_shards += 1
            continue
        try:
            settle(store, verdict, told)
            report.proven_shards += 1
        except DeltafinError as e:
            report.unrepaired.append(str(e))
    for format, layers in plan.packs.items():
        try:
            report.packs += write_packs(store, plan_packs(store, format, layers)).layers
        except DeltafinError as e:
            report.unrepaired.append(f"packs of {format}: {e}")
    report.requests = store.requests - before
    return report


def _rerecord(store: Store, report: VerifyReport) -> int:
    """Records what unnamed objects are, in each root that is written to, if another's log knows; returns how many."""
    added = 0
    for root in store.writable_roots:
        if not (strangers := report.strangers.get(root.path)):
            continue
        known = [
            (key, entry._replace(held=True))
            for other in store.roots
            if other is not root
            for key, entry in other.log.entries.items()
            if strangers.get(entry.sha256.hex()) == entry.nbytes and key not in root.log.entries
        ]
        try:
            added += root.log.append_all(known)
        except OSError as e:
            raise disk_error(e, root.log.path) from None
        for _, entry in known:
            strangers.pop(entry.sha256.hex(), None)
    return added


def _fetch(store: Store, items: list[Item], told: Progress, report: RepairReport) -> None:
    before = {item: store.known(item.span) for item in items}
    done = set[Item]()

    def landed(item: Item) -> None:
        done.add(item)
        report.spans += 1
        report.nbytes += item.span.nbytes
        told(item.span.nbytes)

    try:
        fetch(store, items, landed, anew=True)
    except Corrupt:
        # One span that comes wrong is not to keep the others away.
        for item in (item for item in items if item not in done and store.object_of(item.span) is None):
            try:
                fetch(store, [item], landed, anew=True)
            except Corrupt as e:
                report.unrepaired.append(str(e))
            except DeltafinError as e:
                report.unrepaired.append(str(e))
                break
    except DeltafinError as e:
        report.unrepaired.append(f"{len(items) - len(done)} spans: {e}")
    changed: list[ObjectEntry] = []
    for item, old in before.items():
        now = store.known(item.span)
        if old is not None and now is not None and now.sha256 != old.sha256:
            changed.append(old)
            report.changed.append(f"{item.label}: other bytes came than the first time; neither is proven")
    set_aside(store, changed)
