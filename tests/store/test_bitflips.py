"""One flipped bit anywhere in a store: noticed or without effect, never in the arithmetic, and repaired to the byte.

`pytest tests/store/test_bitflips.py -s -m slow` flips 300 and prints what came of each kind of place.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import deltafin
from deltafin.errors import DeltafinError
from deltafin.indexer import catalog_path
from deltafin.store import (
    PackFormat,
    Prover,
    all_items,
    fetch,
    mend_logs,
    open_store,
    plan_packs,
    plan_repair,
    read_status,
    rebuild_catalog,
    repair,
    rest_items,
    verify,
    write_packs,
)
from deltafin.store.arena import own_slot

REPO = "test/flips"
KINDS = {"objects": 150, "log": 60, "catalog": 45, "packs": 45}  # of 300
IDS = [3, 141, 59, 26, 5]


@dataclass
class Row:
    """What came of the flips in one kind of place."""

    flips: int = 0
    detected: int = 0
    harmless: int = 0
    repaired: int = 0
    fetched: int = 0
    requests: int = 0
    by_whom: Counter[str] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, make_checkpoint) -> Path:
    """tiny with 22 experts a layer: 202 objects in all."""
    out = tmp_path_factory.mktemp("flips") / "ckpt"
    make_checkpoint.generate(out, "tiny", overrides={"experts": 22})
    return out


@pytest.fixture
def whole(checkpoint, hub, policy, tmp_path):
    """A cache with all of it, proven, and packs; the hub; and what every span is."""
    server = hub(checkpoint)
    cache, truth = tmp_path / "cache", {}
    with open_store(REPO, cache_dir=cache, policy=policy) as store:
        items = [*all_items(store.catalog), *rest_items(store.catalog)]
        items.sort(key=lambda item: (item.span.shard, item.span.offset))
        with Prover(store, (item.span for item in items)) as prover:
            fetch(store, items, take=prover.take)
            assert all(verdict.proven for verdict in prover.finish())
        write_packs(store, plan_packs(store, PackFormat.BF12, range(store.catalog.config.num_layers)))
        for item in items:
            with open(checkpoint / store.catalog.shards[item.span.shard].name, "rb") as f:
                f.seek(item.span.offset)
                truth[item.span] = f.read(item.span.nbytes)
        assert store.roots[0].log.path.stat().st_size == 2 * 128 * len(items)
    return cache, server, truth


def _files(cache: Path) -> dict[str, list[Path]]:
    return {
        "objects": sorted((cache / "objects").rglob("*/*")),
        "log": [cache / "objects.log"],
        "catalog": [catalog_path(cache, REPO.replace("/", "--"))],
        "packs": sorted((cache / "packs").rglob("*.pack")),
    }


def _read_everything(cache: Path, truth) -> str | None:
    """Reads every span and every packed piece as a run would; who noticed that something is wrong, or None.

    Whatever is returned at all must be the truth: this is the promise.
    """
    try:
        store = open_store(REPO, cache_dir=cache, offline=True)
    except DeltafinError:
        return "opening"
    noticed = None
    with store:
        if store.roots[0].log.bad_records:
            noticed = "reading the log"
        for span, expected in truth.items():
            try:
                assert store.read(span, own_slot(span.nbytes)).tobytes() == expected, "a wrong byte"
            except DeltafinError:
                noticed = noticed or "first use"
        found = store.packs(PackFormat.BF12)
        if found.complaints:
            noticed = "opening the pack"
        for layer in found.packs:
            for packed in found.layer(layer).values():
                try:
                    store.roots[0].read_packed(packed, own_slot(packed.piece.nbytes))
                except DeltafinError:
                    noticed = noticed or "first use"
    return noticed


def _logits(cache: Path) -> np.ndarray | None:
    """What the model computes from the cache alone; None if it says that it cannot."""
    try:
        with deltafin.open(REPO, cache_dir=cache, offline=True, threads=1) as model:
            return np.array(model.forward([deltafin.Segment(model.sequence(), IDS)], logits="last"))
    except DeltafinError:
        return None


def _repair(cache: Path, policy):
    """What `df-fetch verify --repair` does."""
    rebuilt = rebuild_catalog(REPO, cache, offline=False, policy=policy)
    with open_store(REPO, cache_dir=cache, policy=policy) as store:
        records = mend_logs(store)
        report = verify(store)
        done = repair(store, plan_repair(store, report))
        status = read_status(store)
        assert (done.unrepaired, done.changed) == ([], [])
        assert (status.layers_whole, status.experts_present, status.unproven_spans) == (9, 176, 0)
        assert len(status.packs) == 1 and status.packs[0].layers == 9
    return rebuilt, records, report, done


def _sweep(rounds: dict[str, int], whole, policy, ranges, seed: int, logits_every: int) -> dict[str, Row]:
    cache, server, truth = whole
    server.set_mode("ok")
    before = {path: path.read_bytes() for kind in KINDS for path in _files(cache)[kind]}
    assert len(_files(cache)["objects"]) >= 200
    logits = _logits(cache)
    rows: dict[str, Row] = defaultdict(Row)
    numbers = random.Random(seed)
    plan = [kind for kind, count in rounds.items() for _ in range(count)]
    numbers.shuffle(plan)
    for number, kind in enumerate(plan):
        row, path = rows[kind], numbers.choice(_files(cache)[kind])
        data = bytearray(path.read_bytes())
        bit = numbers.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        if number % logits_every == 0:
            got = _logits(cache)
            assert got is None or (got == logits).all(), "wrong bytes reached the arithmetic"
            _put_back(path, before, cache, data)
        noticed = _read_everything(cache, truth)
        _put_back(path, before, cache, data)
        asked = ranges(server)
        rebuilt, records, report, done = _repair(cache, policy)
        wrong = bool(rebuilt or records.corrected or records.dropped_nbytes or report.damaged)
        assert not noticed or wrong, "verify sees whatever a run would"
        row.flips += 1
        row.detected += wrong
        row.harmless += not wrong
        row.repaired += wrong
        row.by_whom[noticed or ("verify alone" if wrong else "nobody")] += 1
        row.fetched += done.spans
        requests = ranges(server) - asked
        row.requests += requests.total()
        assert len(requests) == done.spans + (0 if rebuilt is None else _HEADERS)
        assert done.spans <= (kind == "objects"), "only what was damaged is fetched"
        _compare(cache, before, kind == "catalog" and wrong)
        shutil.rmtree(cache / "quarantine", ignore_errors=True)
    assert (_logits(cache) == logits).all()
    return rows


_HEADERS = 12  # of the shards, read when a catalog is built


def _put_back(path: Path, before: dict[Path, bytes], cache: Path, data: bytes) -> None:
    """A reader moves a damaged object aside: put it where it was, so that the next one meets it, too."""
    if not path.exists():
        shutil.rmtree(cache / "quarantine")
        path.write_bytes(data)


def _compare(cache: Path, before: dict[Path, bytes], rebuilt: bool) -> None:
    now = {path: path.read_bytes() for kind in KINDS for path in _files(cache)[kind]}
    assert now.keys() == before.keys()
    differ = {path.name for path in now if now[path] != before[path]}
    # A catalog that was built again says when; what it says of the model was compared by opening it.
    assert differ <= ({catalog_path(cache, REPO.replace("/", "--")).name} if rebuilt else set())
    before.update(now)


def _print(rows: dict[str, Row]) -> None:
    print(f"\n{'place':10}{'flips':>7}{'detected':>10}{'harmless':>10}{'repaired':>10}{'fetched':>9}{'requests':>10}")
    for kind, row in rows.items():
        figures = f"{row.flips:7}{row.detected:10}{row.harmless:10}{row.repaired:10}{row.fetched:9}{row.requests:10}"
        print(f"{kind:10}{figures}  {dict(row.by_whom)}")


def test_a_few_flipped_bits_of_each_kind_are_noticed_and_repaired(whole, policy, ranges, caplog):
    caplog.set_level(logging.ERROR)
    rows = _sweep({"objects": 3, "log": 3, "catalog": 1, "packs": 2}, whole, policy, ranges, 11, 4)
    assert {kind: row.flips for kind, row in rows.items()} == {"objects": 3, "log": 3, "catalog": 1, "packs": 2}
    assert (rows["objects"].detected, rows["objects"].fetched, rows["log"].fetched) == (3, 3, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_300_flipped_bits_are_noticed_or_harmless_and_all_are_repaired(whole, policy, ranges, caplog, record_property):
    caplog.set_level(logging.ERROR)
    rows = _sweep(KINDS, whole, policy, ranges, 300, 15)
    _print(rows)
    record_property("flips", {kind: str(row) for kind, row in rows.items()})
    assert sum(row.flips for row in rows.values()) == 300
    assert all(row.detected + row.harmless == row.flips for row in rows.values())
    assert rows["objects"].detected == rows["objects"].fetched == KINDS["objects"]
    assert rows["log"].fetched == rows["packs"].fetched == rows["catalog"].fetched == 0
