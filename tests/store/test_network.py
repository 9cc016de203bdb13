"""Ranges from servers that misbehave: the exact bytes, or an error that names file and cause; never rubbish kept."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time

import pytest

from deltafin.errors import Corrupt, NetworkError, NoSpace, Refused
from deltafin.indexer import RetryPolicy
from deltafin.store import all_items, bulk, expert_items, fetch, pair_items, parallelism, spine_items

SHARD = "model-00004-of-000012.safetensors"  # holds layer 3
LAYER = 3


def _fetch_all(store):
    fetch(store, all_items(store.catalog))


def _some(store):
    """The spine of a layer and the experts of two: enough for a fault to meet, and quick."""
    return [i for i in spine_items(store.catalog) if i.layer == LAYER] + expert_items(
        store.catalog, [LAYER - 1, LAYER], range(16)
    )


def _check(store, items, directory, span_bytes, new_slot) -> None:
    for item in items:
        assert store.is_local(item.span)
        content = store.read(item.span, new_slot(item.span.nbytes), expert=item.address)
        assert content.tobytes() == span_bytes(store, directory, item.span), item.label


def _only_right_objects(cache, directory, objects) -> int:
    """Whatever was kept is whole and is bytes of this checkpoint. Returns how many there are."""
    blobs = [path.read_bytes() for path in directory.glob("*.safetensors")]
    for name, path in objects(cache).items():
        content = path.read_bytes()
        assert hashlib.sha256(content).hexdigest() == name
        assert any(content in blob for blob in blobs), name
    assert list((cache / "tmp").glob("*")) == []
    return len(objects(cache))


# ---- faults that pass -----------------------------------------------------------------------------------

PASSING = [
    ("ok", {}),
    ("truncate", {"times": 10}),
    ("truncate", {"times": 3, "keep": 0}),
    ("reset_midway", {"times": 10}),
    ("wrong_length", {"times": 10}),
    ("short_206", {"times": 20}),
    ("short_206", {"keep": 0.6, "path": SHARD}),  # for ever, honestly labelled: always a little further
    ("503_burst", {"times": 8}),
    ("ignore_range", {"times": 3}),
    ("gzip_range", {}),
    ("gzip_forced", {"times": 3}),
    ("416", {"times": 3}),
    ("no_content_range", {"times": 3}),
    ("wrong_content_range", {"times": 3}),
    ("stall", {"times": 3, "hold": 2}),
    ("slow_drip", {"bytes": 16384, "every": 0.001, "path": SHARD}),
    ("mirror_bare", {}),
]


@pytest.mark.parametrize(("mode", "args"), PASSING, ids=[f"{m} {a}" for m, a in PASSING])
def test_a_fault_that_passes_costs_time_and_nothing_else(
    hub_store, tiny_dir, span_bytes, new_slot, objects, mode, args
):
    store, server = hub_store(mode, **args)
    items = _some(store)
    fetch(store, items)
    _check(store, items, tiny_dir, span_bytes, new_slot)
    assert _only_right_objects(store.roots[0].path, tiny_dir, objects) == len(items)
    needed = sum(item.span.nbytes for item in items)
    whole_shards = 3 * max(shard.nbytes for shard in store.catalog.shards)  # that somebody sent unasked
    assert server.stats()["bytes_sent"] < 1.5 * needed + whole_shards
    assert server.stats()["accept_encoding_seen"] == ["identity"]


def test_a_cut_body_is_continued_where_it_ended(hub_store, tiny_truth):
    store, server = hub_store("truncate", times=1, keep=0.25)
    ((_, slot),) = [(e, s.tobytes()) for e, s in store.experts(LAYER, [5])]
    assert slot == tiny_truth.expert(LAYER, 5)
    span = store.catalog.expert_spans(LAYER, [5])[0]
    first, last = span.offset, span.offset + span.nbytes - 1
    asked = [row["range"] for row in server.state.log]
    assert asked == [f"bytes={first}-{last}", f"bytes={first + span.nbytes // 4}-{last}"]
    assert server.stats()["bytes_sent"] == span.nbytes


# ---- faults that stay -----------------------------------------------------------------------------------

LASTING = [
    ("truncate", {"keep": 0}, "broke off"),
    ("reset_midway", {"keep": 0}, "broke off"),
    ("wrong_length", {"delta": 10**9}, "are missing"),
    ("503_burst", {"times": 10**9}, "status 503"),
    ("ignore_range", {}, "ignored the range"),
    ("gzip_forced", {}, "encoded as 'gzip'"),
    ("416", {}, "status 416"),
    ("no_content_range", {}, "without a usable Content-Range"),
    ("wrong_content_range", {}, "asked for bytes"),
    ("stall", {"keep": 0, "hold": 2}, "fell silent"),
    ("redirect_loop", {}, "redirects without end"),
    ("gone_404", {}, "no such file on the server"),
    ("gated_401", {}, "access refused .* HF_TOKEN"),
    ("zero_tail", {}, "all zeros"),
]


@pytest.mark.parametrize(("mode", "args", "cause"), LASTING, ids=[f"{m} {a}" for m, a, _ in LASTING])
def test_a_fault_that_stays_ends_in_bounded_time_with_file_and_cause(hub_store, tiny_dir, objects, mode, args, cause):
    store, server = hub_store()
    fetch(store, expert_items(store.catalog, [1], range(4)))
    server.set_mode(mode, **{"path": SHARD, **args} if mode != "redirect_loop" else args)
    started = time.monotonic()
    with pytest.raises((NetworkError, Corrupt), match=cause) as caught:
        fetch(store, expert_items(store.catalog, [1, LAYER], range(6)))
    assert time.monotonic() - started < 8
    assert SHARD in str(caught.value) or "model-00002" in str(caught.value)
    assert "127.0.0.1" in str(caught.value) or isinstance(caught.value, Corrupt)
    assert "\n" not in str(caught.value)
    kept = _only_right_objects(store.roots[0].path, tiny_dir, objects)
    assert 4 <= kept <= 6
    assert server.stats()["requests"] < 150
    assert not any(store.is_local(i.span) for i in expert_items(store.catalog, [LAYER], range(16)))
    server.set_mode("ok")
    fetch(store, expert_items(store.catalog, [LAYER], range(6)))


def test_a_server_that_is_gone_is_given_up_after_what_landed_was_kept(hub_store, tiny_dir, objects):
    store, server = hub_store()
    fetch(store, expert_items(store.catalog, [1], range(4)))
    server.__exit__(None, None, None)
    with pytest.raises(NetworkError, match="connection"):
        _fetch_all(store)
    assert _only_right_objects(store.roots[0].path, tiny_dir, objects) == 4


def test_the_first_failure_stops_a_fetch_and_what_landed_stays(hub_store, tiny_dir, objects):
    store, server = hub_store("gone_404", path=SHARD)
    landed = []
    with pytest.raises(Refused, match=SHARD):
        fetch(store, all_items(store.catalog), landed.append)
    assert all(store.is_local(item.span) for item in landed)
    before = len(landed)
    assert before < 100, "the rest was not asked for"
    assert _only_right_objects(store.roots[0].path, tiny_dir, objects) >= before
    server.set_mode("ok")
    missing = [i for i in all_items(store.catalog) if not store.is_local(i.span)]
    fetch(store, missing)
    assert server.stats()["requests"] == len(missing)


def test_a_reader_of_experts_sees_the_same_error(hub_store):
    store, _ = hub_store("gone_404", path=SHARD)
    with pytest.raises(Refused, match=f"{SHARD}.*no such file"):
        list(store.experts(LAYER, range(16)))
    assert len(list(store.experts(LAYER - 1, range(16)))) == 16


# ---- bytes that cannot be right -------------------------------------------------------------------------


def test_an_expert_of_zeros_is_refused_after_three_transfers_and_named(hub_store, objects):
    store, server = hub_store("zero_tail", path=SHARD)
    span = store.catalog.expert_spans(LAYER, [5])[0]
    last = span.offset + span.nbytes - 1
    with pytest.raises(
        Corrupt,
        match=rf"{SHARD}: bytes {span.offset} to {last} \(expert 5 of layer 3\): w2.weight_scale is all zeros, "
        "in 3 transfers; nothing of it was kept",
    ):
        list(store.experts(LAYER, [5]))
    assert server.stats()["requests"] == 3
    assert objects(store.roots[0].path) == {}


def test_an_expert_of_zeros_that_came_once_is_fetched_again(hub_store, tiny_truth):
    store, server = hub_store("zero_tail", times=1)
    assert [s.tobytes() for _, s in store.experts(LAYER, [5])] == [tiny_truth.expert(LAYER, 5)]
    assert store.stats.snapshot()["refused_spans"] == 1
    assert server.stats()["requests"] == 2


def test_an_expert_with_a_scale_that_is_no_number_is_refused(hub_store, opened, tiny_dir, tmp_path, objects):
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    with opened(model) as local:
        span = local.catalog.expert_spans(LAYER, [5])[0]
    blob = bytearray((model / SHARD).read_bytes())
    blob[span.offset + span.nbytes - 1] = 255
    (model / SHARD).write_bytes(blob)
    store, server = hub_store(directory=model)
    with pytest.raises(Corrupt, match=r"expert 5 of layer 3.*w3.weight_scale holds a scale of 255"):
        list(store.experts(LAYER, [5]))
    with pytest.raises(Corrupt, match="scale of 255"):
        fetch(store, expert_items(store.catalog, [LAYER], [5]))
    assert server.stats()["requests"] == 6
    assert objects(store.roots[0].path) == {}


@pytest.mark.parametrize("which", ["expert", "spine"])
def test_bytes_that_contradict_a_digest_on_record_are_refused(full, tiny_dir, which):
    """The object is gone, but its record says what the bytes must be: one changed bit is enough."""
    store, server = full
    item = expert_items(store.catalog, [LAYER], [5])[0] if which == "expert" else spine_items(store.catalog)[0]
    root = store.roots[0]
    path = root.object_path(root.log.entries[store.key(item.span)])
    path.unlink()
    server.set_mode("corrupt_byte", at=3)
    with pytest.raises(Corrupt, match=r"contradict the digest on record in .*objects.log.*, in 3 transfers"):
        fetch(store, [item])
    assert server.stats()["requests"] == 3
    assert not path.exists()
    server.set_mode("corrupt_byte", at=3, times=2)
    fetch(store, [item])
    assert path.exists() and server.stats()["requests"] == 3


# ---- a repository that moves ----------------------------------------------------------------------------


def test_a_file_that_changes_during_a_fetch_stops_it_and_nothing_new_is_kept(hub_store, tiny_dir, objects):
    store, server = hub_store("etag_change", after=40)
    with pytest.raises(Refused, match=r"model-0.*changed on the server .*rebuild the catalog with df-index build"):
        _fetch_all(store)
    assert 30 <= _only_right_objects(store.roots[0].path, tiny_dir, objects) <= 40
    assert server.stats()["requests"] < 60


def test_a_run_a_day_later_at_a_moved_server_is_refused_at_once(hub_store, tiny_dir, objects):
    store, server = hub_store()
    fetch(store, expert_items(store.catalog, [1], range(4)))
    server.set_mode("etag_change", after=0)
    with pytest.raises(Refused, match="changed on the server"):
        list(store.experts(LAYER, range(16)))
    assert len(list(store.experts(1, range(4)))) == 4, "what was fetched of the old commit is still used"
    assert _only_right_objects(store.roots[0].path, tiny_dir, objects) == 4


def test_everything_is_asked_for_at_the_commit_of_the_catalog(hub_store, range_server):
    store, server = hub_store()
    fetch(store, expert_items(store.catalog, [1], range(4)))
    assert {row["path"].split("/")[4] for row in server.state.log} == {range_server.COMMIT_A}


@pytest.mark.parametrize("said", ["digests", "nothing"])
def test_spans_of_two_commits_never_share_a_record(
    hub, opened, policy, tiny_dir, tmp_path, monkeypatch, range_server, said
):
    """One byte of one expert differs. A bare mirror says nothing that tells them apart but the commit."""
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    with opened(model) as local:
        span = local.catalog.expert_spans(LAYER, [5])[0]
    stores = {}
    for commit in ("a" * 40, "b" * 40):
        monkeypatch.setattr(range_server.Handler, "commit", lambda self, commit=commit: commit)
        hub(model, "ok" if said == "digests" else "mirror_bare")
        stores[commit] = opened(f"org/tiny@{commit}")
        fetch(stores[commit], expert_items(stores[commit].catalog, [LAYER], [5]))
        blob = bytearray((model / SHARD).read_bytes())
        blob[span.offset] ^= 1
        (model / SHARD).write_bytes(blob)
    first, second = (stores[c].key(span) for c in stores)
    assert first != second
    read = [next(s.tobytes() for _, s in store.experts(LAYER, [5])) for store in stores.values()]
    assert read[0] != read[1] and read[0][1:] == read[1][1:]
    assert len(stores["b" * 40].roots[0].log.entries) == 2


# ---- how many at once -----------------------------------------------------------------------------------


def test_a_line_that_carries_more_gets_more_transfers(hub_store, at_once, monkeypatch):
    """Every request takes a while to be answered, however little is asked: two at once are twice as fast."""
    monkeypatch.setattr(parallelism, "_SETTLE_S", 0.1)
    monkeypatch.setattr(parallelism, "_MEASURE_S", 0.3)
    monkeypatch.setattr(bulk, "_LOOK_EVERY_S", 0.02)
    store, _ = hub_store("redirect_cross_host_expiring", life=60, delay=0.05)
    fetch(store, expert_items(store.catalog, [1, 2, 3, 4, 5, 6, 7], range(16)))
    assert max(at_once[:12]) == parallelism.START
    assert parallelism.START < max(at_once) <= parallelism.MOST


def test_a_server_that_throttles_gets_fewer(hub_store, at_once):
    store, _ = hub_store("429_retry_after", after=20, times=1, seconds=0.1)
    fetch(store, expert_items(store.catalog, [1, 2, 3], range(16)))
    assert max(at_once[:16]) == parallelism.START
    assert max(at_once[32:]) == parallelism.START // 2


# ---- links and tokens -----------------------------------------------------------------------------------


def test_links_that_expire_are_asked_for_again_and_the_token_stays_at_home(
    hub_store, tiny_dir, span_bytes, new_slot, monkeypatch, caplog
):
    monkeypatch.setenv("HF_TOKEN", "hf_dummy_token")
    store, server = hub_store("redirect_cross_host_expiring", life=0.3, delay=0.06)
    caplog.set_level("DEBUG", "deltafin")
    # Expert by expert over all layers: each shard is come back to when its link has expired.
    items = list(pair_items(store.catalog, [(layer, expert) for expert in range(16) for layer in range(1, 9)]))
    fetch(store, items)
    _check(store, items, tiny_dir, span_bytes, new_slot)
    stats = server.stats()
    assert stats["by_status"]["206"] == len(items)
    refused = stats["by_status"].get("403", 0)
    assert 1 <= refused <= 60
    assert stats["auth_seen_on_hub"] and not stats["auth_seen_on_cdn"]
    said = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("deltafin"))
    assert "refused with status 403" in said
    assert "hf_dummy_token" not in said and "Signature=" not in said


def test_a_link_is_asked_for_once_a_shard_while_it_lives(hub_store):
    store, server = hub_store("redirect_cross_host_expiring", life=60)
    fetch(store, expert_items(store.catalog, [LAYER], range(16)))
    statuses = server.stats()["by_status"]
    assert statuses["206"] == 16
    assert statuses["302"] <= 8, "at most once for each worker that started before the first link was known"


def test_links_that_are_dead_at_once_are_given_up_in_bounded_time(hub_store, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_dummy_token")
    store, server = hub_store("redirect_cross_host_expiring", life=-1)
    started = time.monotonic()
    with pytest.raises(NetworkError, match="link that the hub gave was refused with status 403") as caught:
        list(store.experts(LAYER, [5]))
    assert time.monotonic() - started < 5
    assert server.stats()["requests"] <= 12
    assert "Signature" not in str(caught.value) and "hf_dummy_token" not in str(caught.value)


# ---- servers that ask for patience ----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_all_workers_wait_together_as_long_as_the_server_asks(hub_store, form):
    # A date has whole seconds: 2 means at least 1.
    store, server = hub_store("429_retry_after", seconds=1 if form == "seconds" else 2, form=form, times=1, after=20)
    fetch(store, expert_items(store.catalog, [1, 2, 3], range(16)))
    log = sorted((row["t"], row["status"]) for row in server.state.log)
    ((at, _),) = [row for row in log if row[1] == 429]
    later = [t - at for t, _ in log if t > at + 0.1]
    assert min(later) >= 0.9
    assert len(log) == 3 * 16 + 1
    assert store.remote.stats.pauses == 1


def test_a_pause_is_shown_while_it_lasts_and_an_absurd_one_is_cut(hub_store, policy):
    """max_pause_s of the tests is 1.5 s; the server asks for a day."""
    store, _ = hub_store("429_retry_after", seconds=86400, times=1)
    seen = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            seen.append(store.pause_left_s)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    fetch(store, expert_items(store.catalog, [1], [0]))
    done.set()
    watcher.join()
    assert 1.4 < time.monotonic() - started < 4
    assert 1 < max(seen) <= policy.max_pause_s
    assert store.pause_left_s == 0


def test_a_store_can_be_interrupted_while_it_waits(hub_store, opened):
    hub_store("429_retry_after", seconds=60)
    store = opened(policy=RetryPolicy(max_pause_s=60))
    threading.Timer(0.3, store.interrupt).start()
    started = time.monotonic()
    with pytest.raises(NetworkError):
        list(store.experts(LAYER, range(16)))
    assert time.monotonic() - started < 2


# ---- a disk that is full --------------------------------------------------------------------------------


def test_a_fetch_onto_a_full_disk_stops_and_keeps_what_it_has(hub_store, small_disk, tiny_dir, objects):
    cache = small_disk(1_200_000, "cache")
    store, _ = hub_store()
    with pytest.raises(NoSpace, match=f"{cache}.*(No space left|full: .* free on its disk)"):
        _fetch_all(store)
    kept = _only_right_objects(cache, tiny_dir, objects)
    assert kept > 10
    present = sum(store.is_local(item.span) for item in all_items(store.catalog))
    assert kept - 8 <= present <= kept


def test_reading_goes_on_without_keeping_and_one_warning_says_so(
    hub_store, small_disk, tiny_dir, tiny_truth, objects, caplog
):
    cache = small_disk(500_000, "cache")
    store, _ = hub_store()
    for _ in range(2):
        for layer in range(1, 9):
            for expert, slot in store.experts(layer, range(16)):
                assert slot.tobytes() == tiny_truth.expert(layer, expert)
    kept = _only_right_objects(cache, tiny_dir, objects)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1 and "going on without keeping what is fetched" in warnings[0]
    counts = store.stats.snapshot()
    assert counts["unkept_spans"] + kept >= 128
    assert counts["http_spans"] + counts["object_spans"] == 2 * 128
