"""A sequence saved to a file goes on as if it had never stopped; a file that is not exactly right is never used."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import time
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import xxhash

from deltafin.errors import BadRequest, Corrupt, DeltafinError, NoMemory, NoSpace, NotFound
from deltafin.runtime import Model, Segment
from deltafin.runtime.states import identifying, identity, layout, load_state, reading, save_state, saving, state_nbytes
from deltafin.store import PackFormat, PackSet, open_store, plan_packs, write_packs

SHORT = [3, 141, 59, 26, 5, 35, 89]
PENDING = [42]
LONG = [(7 * n * n + 3 * n) % 199 + 1 for n in range(530)]  # over two borders of key blocks


def _fed(model, ids):
    seq = model.sequence()
    model.forward([Segment(seq, ids)], logits="none")
    return seq


def _goes_on_equally(model, path, ids, cut, expected):
    save_state(path, model, _fed(model, ids[:cut]))
    restored = load_state(path, model).seq
    path.unlink()  # nothing of the file is needed any more
    assert restored.ids == ids[:cut]
    found = model.forward([Segment(restored, ids[cut:])])
    assert found.tobytes() == expected[cut:].tobytes(), f"cut at {cut}"
    return restored


@pytest.fixture
def saved(tiny, tmp_path):
    """A small state of tiny, which other tests damage."""
    path = tmp_path / "small.state"
    save_state(path, tiny, _fed(tiny, SHORT), PENDING)
    return path


def _is_refused(path, model, *kinds) -> str:
    """The one line with which a file is refused."""
    before = len(model._live)
    with pytest.raises(kinds or DeltafinError) as refusal:
        load_state(path, model)
    line = str(refusal.value)
    assert str(path) in line and "\n" not in line and len(line) < 600
    assert len(model._live) == before
    return line


# ---- what is restored ------------------------------------------------------------------------------------


def test_a_restored_sequence_goes_on_with_the_same_bytes_wherever_it_was_cut(tiny, tmp_path):
    expected = tiny.forward([Segment(tiny.sequence(), LONG)])
    for cut in (1, 2, 255, 256, 257, 512, 529):
        _goes_on_equally(tiny, tmp_path / "a.state", LONG, cut, expected)


@pytest.mark.parametrize("name", ["demo", "k93"])
def test_a_trained_model_and_one_of_ninety_three_layers_are_restored_to_the_bit(request, name, tmp_path):
    model = request.getfixturevalue(name)
    expected = model.forward([Segment(model.sequence(), LONG[:265])])
    _goes_on_equally(model, tmp_path / "a.state", LONG[:265], 253, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "demo", "k93"])
def test_any_cut_any_number_of_times_leaves_no_trace(request, name, tmp_path):
    """Saved and restored again and again, over pieces of random length."""
    model = request.getfixturevalue(name)
    random = np.random.default_rng(6)
    expected = model.forward([Segment(model.sequence(), LONG)])
    for _ in range(6):
        seq, at = model.sequence(), 0
        while at < len(LONG):
            step = int(random.integers(1, 200))
            found = model.forward([Segment(seq, LONG[at : at + step])])
            assert found.tobytes() == expected[at : at + step].tobytes()
            at += step
            save_state(tmp_path / "a.state", model, seq)
            seq = load_state(tmp_path / "a.state", model).seq


def test_the_same_state_is_the_same_file_and_has_the_promised_length(tiny, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    nbytes = save_state(one, tiny, _fed(tiny, LONG[:300]))
    save_state(two, tiny, load_state(one, tiny).seq)
    assert one.read_bytes() == two.read_bytes()
    assert nbytes == one.stat().st_size == state_nbytes(identity(tiny), tiny.config, 300)


def test_tokens_that_were_chosen_but_not_fed_come_back_beside_the_sequence(tiny, tmp_path):
    path = tmp_path / "a"
    for pending in ((), (7,), (9, 8, 7)):
        nbytes = save_state(path, tiny, _fed(tiny, SHORT), pending)
        saved = load_state(path, tiny)
        assert (saved.seq.ids, saved.pending) == (SHORT, pending)
        assert nbytes == path.stat().st_size
    for bad in (-1, tiny.config.vocab_size):
        with pytest.raises(BadRequest, match="vocabulary"):
            save_state(path, tiny, _fed(tiny, SHORT), [bad])
    assert load_state(path, tiny).pending == (9, 8, 7)


def test_two_sequences_from_one_file_and_the_saved_one_do_not_share_memory(tiny, tmp_path):
    seq = _fed(tiny, LONG[:300])
    save_state(tmp_path / "a", tiny, seq)
    all_of_them = [seq, *(load_state(tmp_path / "a", tiny).seq for _ in range(2))]
    tails = [LONG[300:310], LONG[310:330], LONG[330:340]]
    for each, tail in zip(all_of_them, tails, strict=True):
        tiny.forward([Segment(each, tail)], logits="none")
    for each, tail in zip(all_of_them, tails, strict=True):
        expected = tiny.forward([Segment(_fed(tiny, LONG[:300] + tail), [1, 2])])
        assert tiny.forward([Segment(each, [1, 2])]).tobytes() == expected.tobytes()


def test_a_sequence_that_is_forked_by_an_older_state_keeps_only_its_own_rows(tiny, tmp_path):
    """Latents share blocks with longer ones; what lies beyond the length belongs to nobody."""
    seq = _fed(tiny, LONG[:100])
    old = seq.state
    tiny.forward([Segment(seq, LONG[100:300])], logits="none")
    latents = [(a, b) for a, b in zip(old, seq.state, strict=True) if hasattr(a, "blocks")]
    assert all(sum(map(len, layout.layer_bytes(a))) < sum(map(len, layout.layer_bytes(b))) for a, b in latents)
    for short, long in latents:
        fork = type(short)(long.blocks, 100)
        assert [bytes(v) for v in layout.layer_bytes(fork)] == [bytes(v) for v in layout.layer_bytes(short)]


# ---- the file --------------------------------------------------------------------------------------------


def test_the_file_lies_byte_by_byte_as_documented(tiny, tmp_path):
    """Read as docs/state.md says, with nothing of the package's own reader."""
    seq, config = _fed(tiny, LONG[:300]), tiny.config
    save_state(tmp_path / "a", tiny, seq, [9])
    data = (tmp_path / "a").read_bytes()
    magic, version, nbytes, digest = struct.unpack("<8sII16s", data[:32])
    text, rest = data[32 : 32 + nbytes], data[32 + nbytes :]
    assert (magic, version, digest) == (b"DfStat\r\n", 1, xxhash.xxh3_128_digest(text))
    about = json.loads(text)
    assert text == json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
    assert (
        about["tokens"] == 300 and about["pending"] == 1 and about["spine"] == "released" and about["arithmetic"] == 1
    )
    assert about["model"] == tiny.store.catalog.identity
    assert np.frombuffer(rest[:1204], "<u4").tolist() == [*LONG[:300], 9]
    at, digests = 1204, []
    for kind, state in zip(about["layers"], seq.state, strict=True):
        if kind == "K":
            arrays = [state.history, state.memory]
            assert [list(a.shape) for a in arrays] == [about["history"], about["memory"]]
        else:
            arrays = [np.concatenate(state.blocks)[:300]]
            assert arrays[0].shape == (300, about["latent"])
        raw = b"".join(a.astype("<f4").tobytes() for a in arrays)
        assert rest[at : at + len(raw)] == raw
        at += len(raw)
        digests.append(xxhash.xxh3_128_digest(raw))
    assert rest[at:-16] == b"".join(digests) and len(digests) == config.num_layers
    assert rest[-16:] == xxhash.xxh3_128_digest(data[: 32 + nbytes + 1204] + rest[at:-16])


def test_only_its_owner_may_read_a_state_and_the_old_file_is_replaced_whole(tiny, tmp_path):
    path = tmp_path / "a.state"
    path.write_text("old")
    path.chmod(0o644)
    save_state(path, tiny, _fed(tiny, SHORT))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a.state"]


def test_a_full_disk_says_so_and_leaves_the_old_state(tiny, small_disk, monkeypatch):
    seq = _fed(tiny, LONG)
    small, large = (state_nbytes(identity(tiny), tiny.config, n) for n in (len(SHORT), len(LONG)))
    where = small_disk(small + large // 2, "disk")
    path = where / "a.state"
    save_state(path, tiny, _fed(tiny, SHORT))
    old = path.read_bytes()
    with pytest.raises(NoSpace, match="are free there; free some space"):
        save_state(path, tiny, seq)
    monkeypatch.setattr("deltafin.runtime.states.writing.free_nbytes", lambda _: 1 << 40)  # others take it meanwhile
    with pytest.raises(NoSpace, match="No space left on device; free some space"):
        save_state(path, tiny, seq)
    assert os.listdir(where) == ["a.state"] and path.read_bytes() == old


def test_what_killed_writers_of_the_same_file_left_is_removed(tiny, tmp_path):
    from deltafin.indexer import this_host

    dead, other = (tmp_path / f".{name}.{this_host()}.999999999.0.part" for name in ("a.state", "b.state"))
    dead.write_bytes(b"half"), other.write_bytes(b"half")
    save_state(tmp_path / "a.state", tiny, _fed(tiny, SHORT))
    assert sorted(os.listdir(tmp_path)) == sorted([other.name, "a.state"])


@pytest.mark.parametrize("place", ["folder", "pipe", "device"])
def test_what_is_no_file_is_neither_read_nor_replaced(tiny, tmp_path, place):
    path = tmp_path / "odd"
    if place == "folder":
        path.mkdir()
    elif place == "pipe":
        os.mkfifo(path)
    else:
        path = type(tmp_path)("/dev/null")
    mode = path.stat().st_mode
    _is_refused(path, tiny, BadRequest)
    with pytest.raises(BadRequest, match="not a file"):
        save_state(path, tiny, _fed(tiny, SHORT))
    assert path.stat().st_mode == mode


def test_a_state_that_is_not_there_or_nothing_to_save_is_one_line(tiny, tiny_torch, k93, tmp_path):
    _is_refused(tmp_path / "none", tiny, NotFound)
    for model, seq, complaint in (
        (tiny, tiny.sequence(), "seen no token"),
        (k93, tiny.sequence(), "another model"),
        (tiny_torch, tiny_torch.sequence(), "native kernels only"),
    ):
        with pytest.raises(BadRequest, match=complaint):
            save_state(tmp_path / "a", model, seq)
    assert os.listdir(tmp_path) == []
    save_state(tmp_path / "a", tiny, _fed(tiny, SHORT))
    with pytest.raises(BadRequest, match="native kernels only"):
        load_state(tmp_path / "a", tiny_torch)


# ---- damage ----------------------------------------------------------------------------------------------


def _regions(path, model):
    data = path.read_bytes()
    head = layout.PREFIX.size + layout.PREFIX.unpack(data[: layout.PREFIX.size])[2]
    size = layout.sizes(head, model.config, len(SHORT), len(PENDING))
    assert size.whole == len(data)
    return data, size


def test_a_flipped_bit_is_noticed_wherever_it_is(saved, tiny):
    data, size = _regions(saved, tiny)
    random = np.random.default_rng(1)
    ends = np.cumsum(size)
    places = [int(p) for begin, end in pairwise([0, *ends]) for p in random.integers(begin, end, 70)]
    for place in [*places, 0, len(data) - 1]:
        spoiled = bytearray(data)
        spoiled[place] ^= 1 << int(random.integers(8))
        saved.write_bytes(spoiled)
        _is_refused(saved, tiny, Corrupt, BadRequest)
    saved.write_bytes(data)
    assert load_state(saved, tiny).seq.ids == SHORT


@pytest.mark.slow
def test_every_bit_of_header_ids_and_digests_is_noticed_and_thousands_of_the_layers(saved, tiny):
    data, size = _regions(saved, tiny)
    layers = range(size.head + size.ids, size.head + size.ids + size.layers)
    outside = [(place, bit) for place in range(len(data)) if place not in layers for bit in range(8)]
    random = np.random.default_rng(2)
    inside = [(int(random.choice(layers)), int(random.integers(8))) for _ in range(3000)]
    for place, bit in outside + inside:
        spoiled = bytearray(data)
        spoiled[place] ^= 1 << bit
        saved.write_bytes(spoiled)
        _is_refused(saved, tiny, Corrupt, BadRequest)


def test_a_file_that_was_cut_short_or_grew_is_noticed(saved, tiny):
    data, size = _regions(saved, tiny)
    random = np.random.default_rng(3)
    borders = {int(end) + d for end in np.cumsum(size) for d in (-1, 0, 1)} | {0, 1, layout.PREFIX.size}
    for length in borders | set(random.integers(0, len(data), 100).tolist()):
        if length != len(data):
            saved.write_bytes(data[:length].ljust(length, b"\0"))
            _is_refused(saved, tiny, Corrupt)
    os.truncate(saved, len(data) // 2)
    os.truncate(saved, len(data))  # its length, and zeros from the middle on
    _is_refused(saved, tiny, Corrupt)


def test_parts_of_another_state_are_noticed(saved, tiny, tmp_path):
    """Ids, layers and digests of two sound states of one length, in every mixture."""
    save_state(tmp_path / "b", tiny, _fed(tiny, SHORT[::-1]), PENDING)
    data, size = _regions(saved, tiny)
    other = (tmp_path / "b").read_bytes()
    ends = [0, *np.cumsum(size).tolist()]
    last = len(data) - layout.DIGEST_NBYTES
    ends = [*ends[:4], last, len(data)]  # head, ids, layers, their digests, the last digest
    for mixture in range(2, 30):
        parts = [(other if mixture >> n & 1 else data)[a:b] for n, (a, b) in enumerate(pairwise(ends))]
        mixed = b"".join(parts)
        if mixed not in (data, other):
            saved.write_bytes(mixed)
            _is_refused(saved, tiny, Corrupt)


def test_layers_that_changed_places_are_noticed(saved, tiny):
    data, size = _regions(saved, tiny)
    at = size.head + size.ids
    nbytes = layout.layer_nbytes(tiny.config, 0, len(SHORT))
    assert nbytes == layout.layer_nbytes(tiny.config, 1, len(SHORT))
    first, second = data[at : at + nbytes], data[at + nbytes : at + 2 * nbytes]
    saved.write_bytes(data[:at] + second + first + data[at + 2 * nbytes :])
    assert "layer 0" in _is_refused(saved, tiny, Corrupt)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(saved, tiny, monkeypatch):
    make_room = tiny.make_room
    monkeypatch.setattr(tiny, "make_room", lambda tokens: (make_room(tokens), os.truncate(saved, 5000)))
    assert "became shorter" in _is_refused(saved, tiny, Corrupt)


# ---- of something else -----------------------------------------------------------------------------------


def test_a_state_of_another_model_is_refused_by_name(saved, tiny, k93, demo):
    for model in (k93, demo):
        line = _is_refused(saved, model, BadRequest)
        assert tiny.store.catalog.identity in line and model.store.catalog.identity in line


def test_a_state_of_equal_layout_but_other_weights_is_refused(saved, tiny, tiny_dir, tmp_path, open_model):
    """Names, sizes and headers are the same; only the time of a shard tells."""
    copy = shutil.copytree(tiny_dir, tmp_path / "ckpt")  # as cp -p: the times too
    with open_model(copy, cache_dir=tmp_path / "cache") as model:
        assert load_state(saved, model).seq.ids == SHORT
    shard = next(copy.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with open_model(copy, cache_dir=tmp_path / "cache") as model:
        assert "written to or copied since" in _is_refused(saved, model, BadRequest)


def test_a_state_of_another_arithmetic_or_format_is_refused(saved, tiny, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(identifying.Identity.__init__, "__defaults__", (2,))
        assert "arithmetic 1, and this Deltafin computes with 2" in _is_refused(saved, tiny, BadRequest)
    monkeypatch.setattr(reading, "VERSION", 2)
    assert "format 1, and this Deltafin reads format 2" in _is_refused(saved, tiny, BadRequest)


@pytest.fixture(scope="module")
def packed_cache(tmp_path_factory, tiny_dir):
    cache = tmp_path_factory.mktemp("packed")
    with open_store(str(tiny_dir), cache_dir=cache) as store:
        for format in PackFormat:
            write_packs(store, plan_packs(store, format, range(store.catalog.config.num_layers)))
    return cache


def test_states_pass_between_spines_of_the_same_bits_and_no_others(
    saved, tiny, tiny_dir, tmp_path, open_model, packed_cache
):
    expected = tiny.forward([Segment(_fed(tiny, SHORT), [1, 2, 3])])
    for spine in ("released", "bf16", "bf12"):
        with open_model(tiny_dir, cache_dir=packed_cache, spine=spine) as model:
            found = model.forward([Segment(load_state(saved, model).seq, [1, 2, 3])])
            assert found.tobytes() == expected.tobytes(), spine
    rounded = tmp_path / "rounded.state"
    with open_model(tiny_dir, cache_dir=packed_cache, spine="int8") as model:
        line = _is_refused(saved, model, BadRequest)
        assert "released spine" in line and "open with int8" in line and "--spine released" in line
        save_state(rounded, model, _fed(model, SHORT))
        load_state(rounded, model)
    assert "--spine int8" in _is_refused(rounded, tiny, BadRequest)


def test_a_spine_that_is_rounded_in_some_layers_is_a_class_of_its_own(
    saved, tiny, tiny_dir, tmp_path, open_model, packed_cache
):
    spines = set()
    for layers in ([0], [1], [0, 1], list(range(tiny.config.num_layers))):
        store = open_store(str(tiny_dir), cache_dir=packed_cache)
        every = store.packs(PackFormat.INT8)
        packs = PackSet(every.format, {layer: every.packs[layer] for layer in layers}, ())
        with Model(store, spine=packs) as model:
            spines.add(identity(model).spine)
            _is_refused(saved, model, BadRequest)
    assert spines == {"int8", "int8 in layers 0", "int8 in layers 1", "int8 in layers 0,1"}


# ---- hostile ---------------------------------------------------------------------------------------------


def _forged(data: bytes, text: bytes, model, ids=SHORT, pending=PENDING) -> bytes:
    """A file whose digests are right, whatever it says; its layers are those of `data`, for so many tokens."""
    nbytes = layout.PREFIX.unpack(data[: layout.PREFIX.size])[2]
    at, layers = layout.PREFIX.size + nbytes + 4 * len(SHORT + PENDING), []
    for layer in range(model.config.num_layers):
        kept = layout.layer_nbytes(model.config, layer, len(ids))
        layers.append(data[at : at + kept])
        at += layout.layer_nbytes(model.config, layer, len(SHORT))
    head = layout.PREFIX.pack(layout.MAGIC, 1, len(text), xxhash.xxh3_128_digest(text)) + text
    head += np.array([*ids, *pending], "<u4").tobytes()
    digests = b"".join(map(xxhash.xxh3_128_digest, layers))
    return head + b"".join(layers) + digests + xxhash.xxh3_128_digest(head + digests)


def _text(data: bytes, **changes) -> bytes:
    nbytes = layout.PREFIX.unpack(data[: layout.PREFIX.size])[2]
    known = json.loads(data[layout.PREFIX.size : layout.PREFIX.size + nbytes])
    return layout.encode_json({**known, **changes})


def test_a_file_that_says_too_much_takes_no_memory(saved, tiny):
    data = saved.read_bytes()
    most = tiny.config.max_positions
    texts = [_text(data, tokens=n) for n in (0, -1, 1 << 31, most, most + 1, 10**30, 7.0, True, "7", None, [7])]
    texts += [_text(data, memory=[1 << 40] * 3), _text(data, latent=-1), _text(data, layers="K" * 100_000)]
    texts += [_text(data, more=1), _text(data, model=["x"] * 5), _text(data, spine={}), _text(data, shards=None)]
    texts += [_text(data, pending=n) for n in (-1, -7, 0, 2, 1 << 40, "1", None, 1.0)]
    texts += [_text(data, tokens=9, pending=-1), _text(data, tokens=8, pending=0)]
    texts += [b"", b"{}", b"[]", b"null", b"[" * 200_000, b'{"a":' * 40_000, b"\xff\xfe", b"1" * 5000, b"NaN"]
    texts += [_text(data).replace(b'"tokens":7', b'"tokens":7,"tokens":7'), _text(data) + b" "]
    texts += [b"[" * (layout.MOST_JSON_NBYTES + 1)]
    tracemalloc.start()
    try:
        for text in texts:
            saved.write_bytes(_forged(data, text, tiny))
            line = _is_refused(saved, tiny, Corrupt, BadRequest)
            assert line.isprintable()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_header_whose_length_is_huge_takes_no_memory(saved, tiny):
    data = saved.read_bytes()
    for nbytes in (0, 1, 0xFFFFFFFF, 0x7FFFFFFF, len(data)):
        saved.write_bytes(data[:12] + struct.pack("<I", nbytes) + data[16:])
        _is_refused(saved, tiny, Corrupt)


def test_ids_outside_the_vocabulary_are_refused_though_every_digest_is_right(saved, tiny):
    data = saved.read_bytes()
    for bad in (tiny.config.vocab_size, 0xFFFFFFFF, 1 << 31):
        saved.write_bytes(_forged(data, _text(data), tiny, [*SHORT[:-1], bad]))
        assert "vocabulary" in _is_refused(saved, tiny, Corrupt)
        saved.write_bytes(_forged(data, _text(data), tiny, SHORT, [bad]))
        assert "vocabulary" in _is_refused(saved, tiny, Corrupt)
    assert _forged(data, _text(data), tiny) == data
    saved.write_bytes(_forged(data, _text(data, model="another name"), tiny))
    assert load_state(saved, tiny).seq.ids == SHORT, "the name is for people"


def test_a_state_of_no_tokens_is_refused_though_every_digest_is_right(saved, tiny):
    data = saved.read_bytes()
    saved.write_bytes(_forged(data, _text(data, tokens=0), tiny, []))
    assert "a state of 0 tokens" in _is_refused(saved, tiny, Corrupt)


def test_a_name_that_would_move_the_cursor_is_shown_as_text(saved, tiny):
    data = saved.read_bytes()
    saved.write_bytes(_forged(data, _text(data, model="\x1b[2Jx\n" * 50, shards="0" * 64), tiny))
    assert _is_refused(saved, tiny, BadRequest).isprintable()


def test_a_state_that_does_not_fit_into_the_budget_is_refused_before_it_is_read(saved, tiny, monkeypatch):
    def none(tokens):
        assert tokens == len(SHORT)
        raise NoMemory("no")

    monkeypatch.setattr(tiny, "make_room", none)
    monkeypatch.setattr(saving.StateReader, "layers", lambda _: pytest.fail("read all the same"))
    with pytest.raises(NoMemory):
        load_state(saved, tiny)


def test_memory_of_experts_is_given_up_for_a_restored_sequence_and_no_more_than_there_is(tiny, monkeypatch):
    tiny.make_room(1000)
    with pytest.raises(NoMemory, match="open the model with more ram"):
        tiny.make_room(10**9)


# ---- kills -----------------------------------------------------------------------------------------------

SAVING = """
import sys
import deltafin
from deltafin.runtime.states import save_state
with deltafin.open(sys.argv[1], cache_dir=sys.argv[2]) as model:
    both = [model.sequence(), model.sequence()]
    for seq, length in zip(both, (400, 500)):
        model.forward([deltafin.Segment(seq, [(7 * n * n + 3 * n) % 199 + 1 for n in range(length)])], logits="none")
    save_state(sys.argv[3], model, both[0])
    print("first", flush=True)
    while True:
        for seq in reversed(both):
            save_state(sys.argv[3], model, seq)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(tiny, tiny_dir, tmp_path):
    path, random = tmp_path / "states" / "a.state", np.random.default_rng(9)
    path.parent.mkdir()
    expected = tiny.forward([Segment(tiny.sequence(), LONG)])
    seen = set()
    for _ in range(15):
        words = [sys.executable, "-c", SAVING, tiny_dir, tmp_path / "cache", path]
        with subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "first\n"
            time.sleep(random.random() * 0.1)
            process.kill()
        seq = load_state(path, tiny).seq
        length = len(seq)
        seen.add(length)
        assert tiny.forward([Segment(seq, LONG[length:])]).tobytes() == expected[length:].tobytes()
        assert len(os.listdir(path.parent)) <= 2, "at most one temporary file, that of the last kill"
    assert seen == {400, 500}
    save_state(path, tiny, seq)
    assert os.listdir(path.parent) == ["a.state"]
