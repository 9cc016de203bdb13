"""Shard headers, believed in nothing: the damaged shards of tests/faults, and headers that hypothesis makes up."""

from __future__ import annotations

import json
import math
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltafin.errors import BadCheckpoint
from deltafin.indexer.headers import MAX_HEADER_NBYTES, HeaderTensor, header_nbytes, parse_header
from deltafin.indexer.layout import read_header
from deltafin.indexer.sources import DirectorySource, ShardFile

FIRST = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"
EXPERT_0 = "language_model.model.layers.1.block_sparse_moe.experts.0."

# file of bad_safetensors.py -> what its error has to say
REJECTED = {
    "len_zero": "header length 0 ",
    "len_max": f"header length {2**64 - 1} ",
    "len_sign": f"header length {2**63} ",
    "len_3gib": f"header length {3 << 30} ",
    "len_past_end": "header length",
    "len_into_data": "header",
    "file_empty": "empty|0 bytes",
    "file_5_bytes": "5 bytes",
    "file_header_only": f"{FIRST} .*cut short",
    "json_broken": "not JSON",
    "json_list": "does not start with",
    "json_not_utf8": "not UTF-8",
    "json_deep": "nested too deeply",
    "json_duplicate_key": f"{FIRST} twice",
    "meta_not_strings": "__metadata__",
    "t_past_eof": f"{FIRST} .*2048 bytes",
    "t_reversed": f"{FIRST} .*2048 to 0",
    "t_negative": rf"{FIRST} .*-2048",
    "t_fraction": rf"{FIRST} .*2048\.0",
    "t_text": f"{FIRST} .*'2048'",
    "t_three": rf"{FIRST} .*\[0, 1, 2048\]",
    "t_no_span": f"{FIRST} .*data_offsets None",
    "t_no_shape": f"{FIRST} .*shape None",
    "t_shape_big": rf"{FIRST} .*\[64, 64\] needs 4096",
    "t_shape_wrap": f"{FIRST} .*no file can hold",
    "t_shape_negative": f"{FIRST} .*-64",
    "t_dtype": f"{FIRST} .*Q4_K",
    "all_aliased": rf"{EXPERT_0}w2.weight_packed .*overlaps {EXPERT_0}w1.weight_packed",
    "all_overlap": rf"{EXPERT_0}w1.weight_scale .*overlaps {EXPERT_0}w1.weight_packed",
    "all_hole": rf"{EXPERT_0}w2.weight_scale .*gap after {EXPERT_0}w2.weight_packed",
    "all_late_start": f"{FIRST} .*gap after the header",
    "all_trailing": "11 too many",
    "is_html": "web page",
    "is_lfs_pointer": "git-lfs",
    "is_gzip": "gzip",
}
ACCEPTED = ["ok_plain", "ok_unsorted", "ok_padded", "ok_metadata", "ok_odd_start", "ok_zero_size", "ok_text_order"]
# Sound headers: wrong bytes are found by verifying them, a wrong set of tensors by the layout.
FOUND_LATER = ["data_zero_tail", "data_one_bit", "set_missing_scale", "set_missing_expert"]


def read(folder: Path, name: str) -> list[HeaderTensor]:
    path = folder / f"{name}.safetensors"
    return read_header(DirectorySource(folder), ShardFile(path.name, path.stat().st_size))[2]


def described(tensors: list[HeaderTensor], data_start: int) -> dict[str, dict]:
    """As the JSON says it."""
    return {
        t.name: {
            "dtype": t.dtype,
            "shape": list(t.shape),
            "data_offsets": [t.offset - data_start, t.offset + t.nbytes - data_start],
        }
        for t in tensors
    }


def test_every_file_of_the_fault_tool_is_tried_here(bad_shards):
    rows = json.loads((bad_shards / "manifest.json").read_text())
    expect = {row["file"].split(".")[0]: row["expect"] for row in rows}
    assert len(expect) == 46
    assert {n for n, e in expect.items() if e == "reject"} == set(REJECTED)
    assert {n for n, e in expect.items() if e == "accept"} == set(ACCEPTED)
    assert {n for n, e in expect.items() if e in ("data", "set")} == set(FOUND_LATER)


@pytest.mark.parametrize("name", REJECTED)
def test_a_damaged_header_is_refused_at_once_with_file_and_cause_and_without_memory(bad_shards, name):
    tracemalloc.start()
    start = time.monotonic()
    try:
        with pytest.raises(BadCheckpoint, match=REJECTED[name]) as refusal:
            read(bad_shards, name)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 1
    assert str(refusal.value).startswith(f"{name}.safetensors: ")
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize("name", ACCEPTED + FOUND_LATER)
def test_a_sound_header_is_read_to_the_byte(bad_shards, name):
    blob = (bad_shards / f"{name}.safetensors").read_bytes()
    (n,) = struct.unpack_from("<Q", blob)
    wanted = json.loads(blob[8 : 8 + n])
    wanted.pop("__metadata__", None)
    tensors = read(bad_shards, name)
    assert described(tensors, 8 + n) == wanted
    assert_exact_cover(tensors, 8 + n, len(blob))


# ---- through df-index -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tiny_dir, tmp_path_factory, range_server):
    """The tiny checkpoint in a folder and on a hub; the third shard is for the taking."""
    folder = Path(shutil.copytree(tiny_dir, tmp_path_factory.mktemp("served") / "ckpt"))
    with range_server.FaultServer(root=str(folder)) as server:
        yield folder, server


@pytest.mark.parametrize("source", ["directory", "hub"])
@pytest.mark.parametrize("name", [*REJECTED, "set_missing_scale"])
def test_one_damaged_shard_stops_df_index_with_one_line_that_names_it(
    bad_shards, served, df_index, monkeypatch, tmp_path, name, source
):
    folder, server = served
    server.set_mode("ok")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    shard = folder / "model-00003-of-000012.safetensors"
    shutil.copy(bad_shards / f"{name}.safetensors", shard)
    start = time.monotonic()
    result = df_index("build", folder if source == "directory" else "some/model")
    assert time.monotonic() - start < 5
    assert result.status == 1
    assert result.stdout == ""
    assert result.line.startswith(f"df-index: {shard.name}")
    assert not list(tmp_path.rglob("*.catalog")) and not list(tmp_path.rglob("*.part"))
    if source == "hub":
        assert server.stats()["bytes_sent"] < 2_000_000


@pytest.mark.parametrize("word", [0, 1, 2**63, 2**64 - 1, 3 << 30, MAX_HEADER_NBYTES + 1, 20_000_000_000 - 7])
def test_an_impossible_length_in_a_large_remote_file_costs_one_small_read(tmp_path, hub, build, word):
    for number in (1, 2):
        with open(tmp_path / f"model-0000{number}-of-000002.safetensors", "wb") as f:
            f.write(struct.pack("<Q", word) + b'{"a":')
            f.truncate(20_000_000_000)
    (tmp_path / "config.json").write_bytes((Path(__file__).parents[1] / "golden/tiny/ckpt/config.json").read_bytes())
    server = hub(tmp_path)
    with pytest.raises(BadCheckpoint, match=rf"model-0000[12]-of-000002\.safetensors: header length {word} "):
        build("some/model")
    assert server.stats()["bytes_sent"] < 2 * (64 << 10) + 5_000


@pytest.mark.parametrize("name", ["len_3gib", "json_deep", "t_shape_wrap"])
def test_a_header_is_judged_within_1_gib_of_address_space(bad_shards, tiny_copy, fault_tool, tmp_path, name):
    shutil.copy(bad_shards / f"{name}.safetensors", tiny_copy.path(3))
    command = [
        sys.executable, fault_tool("run_limited").__file__, "--memory", str(1 << 30), "--",
        Path(sys.executable).with_name("df-index"), "build", tiny_copy.folder, "--cache-dir", tmp_path / "cache",
    ]  # fmt: skip
    row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (row["rc"], row["traceback"], row["killed"]) == (1, False, False)
    assert row["stderr_end"].startswith("df-index: model-00003-of-000012.safetensors: ")


# ---- made-up headers ------------------------------------------------------------------------------

BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

names = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
metadata = st.none() | st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)
relaxed = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def assert_exact_cover(tensors: list[HeaderTensor], data_start: int, file_nbytes: int) -> None:
    """Sorted, gap-free, in range, and every length what shape and dtype need."""
    at = data_start
    for t in tensors:
        assert t.offset == at
        assert all(type(d) is int and d >= 0 for d in t.shape)
        assert t.nbytes * 8 == math.prod(t.shape) * BITS[t.dtype]
        at += t.nbytes
    assert at == file_nbytes
    assert len({t.name for t in tensors}) == len(tensors)


@st.composite
def entries(draw) -> tuple[dict[str, dict], int]:
    """Tensors of a legal header in the order of their data, and how many bytes they have."""
    header: dict[str, dict] = {}
    at = 0
    for name in draw(st.lists(names, max_size=6, unique=True)):
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        if BITS[dtype] < 8:
            shape.append(4)  # whole bytes
        end = at + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    return header, at


@st.composite
def texts(draw, header: dict[str, object]) -> bytes:
    """A header as some other program may write it: order, spaces, escapes, metadata and padding are free."""
    items = draw(st.permutations([*header.items()]))
    if (notes := draw(metadata)) is not None:
        items.insert(draw(st.integers(0, len(items))), ("__metadata__", notes))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]))
    text = json.dumps(dict(items), separators=separators, ensure_ascii=draw(st.booleans()))
    return text.encode() + b" " * draw(st.integers(0, 9))


@relaxed
@given(st.data())
def test_any_legal_header_is_read_to_the_byte_in_whatever_order_it_lists_its_tensors(data):
    header, nbytes = data.draw(entries())
    raw = data.draw(texts(header))
    tensors = parse_header(raw, 8 + len(raw) + nbytes, "a shard")
    start = 8 + len(raw)
    assert described(tensors, start) == header
    assert_exact_cover(tensors, start, start + nbytes)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([10**30, 2**63]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def damaged_entries(draw) -> tuple[bytes, int]:
    """Offsets, shapes and types changed inside sound JSON."""
    header, nbytes = draw(entries().filter(lambda drawn: len(drawn[0]) > 0))
    names = sorted(header)
    for _ in range(draw(st.integers(1, 3))):
        entry = header[draw(st.sampled_from(names))]
        kind = draw(st.sampled_from(["swap", "shift", "grow", "alias", "dims", "dtype", "any", "lose"]))
        other = header[draw(st.sampled_from(names))]
        if kind == "swap":
            entry["data_offsets"], other["data_offsets"] = other.get("data_offsets"), entry.get("data_offsets")
        elif kind == "alias":
            entry["data_offsets"] = other.get("data_offsets")
        elif kind in ("shift", "grow") and isinstance(entry.get("data_offsets"), list):
            by = draw(st.integers(-9, 9) | st.sampled_from([2**31, 2**32, 2**63, 2**64, 10**4299, -(10**30)]))
            first = 0 if kind == "shift" else 1
            entry["data_offsets"] = [
                o + by if i >= first and type(o) is int and abs(o) < 10**40 else o
                for i, o in enumerate(entry["data_offsets"])
            ]
        elif kind == "dims":
            entry["shape"] = draw(st.lists(st.integers(-1, 6) | st.sampled_from([2**32, 2**63, 10**4299]), max_size=4))
        elif kind == "dtype":
            entry["dtype"] = draw(st.sampled_from([*sorted(BITS), "Q4_K", ""]))
        elif kind == "any":
            entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "extra"]))] = draw(anything)
        else:
            entry.pop(draw(st.sampled_from(["dtype", "shape", "data_offsets"])), None)
    return json.dumps(header).encode(), nbytes


@st.composite
def damaged_texts(draw) -> tuple[bytes, int]:
    """Bytes of the JSON flipped, lost, doubled or added."""
    header, nbytes = draw(entries())
    raw = bytearray(draw(texts(header)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(raw)))
        kind = draw(st.sampled_from(["flip", "set", "cut", "lose", "add", "double", "deep", "digits"]))
        if kind == "flip" and at < len(raw):
            raw[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set" and at < len(raw):
            raw[at] = draw(st.sampled_from(b'0123456789-+.eE[]{}":, \x00\xff'))
        elif kind == "cut":
            del raw[at:]
        elif kind == "lose":
            del raw[at : at + draw(st.integers(1, 9))]
        elif kind == "add":
            raw[at:at] = draw(st.binary(max_size=9))
        elif kind == "double":
            raw[at:at] = raw[at : at + draw(st.integers(1, 60))]
        elif kind == "deep":
            raw[at:at] = draw(st.sampled_from([b"[", b'{"x":'])) * draw(st.sampled_from([10, 500, 990, 1000, 5000]))
        elif kind == "digits":
            raw[at:at] = b"9" * draw(st.sampled_from([1, 20, 4300, 5000]))
    return bytes(raw), nbytes


@settings(relaxed, max_examples=400)
@given(damaged_entries() | damaged_texts(), st.integers(-9, 9) | st.just(0))
def test_a_damaged_header_is_refused_or_still_an_exact_cover_and_costs_no_memory(damaged, longer):
    raw, nbytes = damaged
    file_nbytes = 8 + len(raw) + max(0, nbytes + longer)  # `header_nbytes` has seen that the header fits
    tracemalloc.start()
    try:
        tensors = parse_header(raw, file_nbytes, "a shard")
    except BadCheckpoint as e:
        assert str(e).startswith("a shard: ")
        assert len(str(e)) < 700
    else:
        assert_exact_cover(tensors, 8 + len(raw), file_nbytes)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < (2 << 20) + 100 * len(raw)


@relaxed
@given(st.binary(max_size=40), st.integers(0, 1 << 40))
def test_a_header_length_is_one_that_the_file_has_room_for_or_refused(prefix, file_nbytes):
    try:
        n = header_nbytes(prefix, file_nbytes, "a shard")
    except BadCheckpoint as e:
        assert str(e).startswith("a shard: ")
    else:
        assert n == int.from_bytes(prefix[:8], "little")
        assert 2 <= n <= min(file_nbytes - 8, MAX_HEADER_NBYTES)


@pytest.mark.parametrize("kind", ["offset", "length", "dimension"])
def test_numbers_of_thousands_of_digits_are_refused_like_any_other(kind):
    """Python refuses to print integers of more than 4,300 digits, so an error that shows one must not fail."""
    huge = "9" * 4300
    shape, span = {
        "offset": ("[0]", f"[{huge},{huge}]"),
        "length": ("[1]", f"[0,{huge}]"),
        "dimension": (f"[{huge},{huge}]", "[0,1]"),
    }[kind]
    raw = b'{"a":{"dtype":"U8","shape":%s,"data_offsets":%s}}' % (shape.encode(), span.encode())
    with pytest.raises(BadCheckpoint, match="a shard: tensor a ") as refusal:
        parse_header(raw, 8 + len(raw) + 1, "a shard")
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets", "entry", "metadata"])
@pytest.mark.parametrize("depth", [3, 300, 900, 960, 980, 990, 1000, 20_000])
def test_values_nested_to_any_depth_are_refused(field, depth):
    """Just below the depth at which JSON is refused, showing the value must not be too deep either."""
    value = "[" * depth + "]" * depth
    sound = {"dtype": '"U8"', "shape": "[1]", "data_offsets": "[0,1]"}
    fields = ",".join(f'"{key}":{v}' for key, v in {**sound, field: value}.items())
    text = {"entry": f'{{"a":{value}}}', "metadata": f'{{"__metadata__":{{"x":{value}}}}}'}.get(field)
    raw = (text or f'{{"a":{{{fields}}}}}').encode()
    with pytest.raises(BadCheckpoint):
        parse_header(raw, 8 + len(raw) + 1, "a shard")


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ('{"dtype":"F4","shape":[3],"data_offsets":[0,1]}', "no file can hold"),
        ('{"dtype":"F6_E2M3","shape":[1],"data_offsets":[0,0]}', "no file can hold"),
        ('{"dtype":"U8","shape":[true],"data_offsets":[0,1]}', "shape"),
        ('{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}', "shape"),
        ('{"dtype":"U8","shape":1,"data_offsets":[0,1]}', "shape"),
        ('{"dtype":"U8","shape":[1],"data_offsets":[false,true]}', "data_offsets"),
        ('{"dtype":"U8","shape":[1],"data_offsets":{"0":0,"1":1}}', "data_offsets"),
        ('{"dtype":"u8","shape":[1],"data_offsets":[0,1]}', "dtype u8"),
        ('{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}', "dtype"),
        ('{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":NaN}', "NaN"),
        ('{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":-Infinity}', "-Infinity"),
        ('{"dtype":"U8","shape":[1],"data_offsets":[0,1],"dtype":"I8"}', "dtype twice"),
        ("[0,1]", "not described by an object"),
        ("null", "not described by an object"),
    ],
)
def test_an_entry_that_is_almost_right_is_refused(entry, complaint):
    raw = f'{{"a":{entry}}}'.encode()
    with pytest.raises(BadCheckpoint, match=complaint):
        parse_header(raw, 8 + len(raw) + 1, "a shard")


def test_a_shape_of_a_hundred_thousand_sizes_is_refused_at_once():
    raw = json.dumps({"a": {"dtype": "U8", "shape": [3] * 100_000, "data_offsets": [0, 9]}}).encode()
    start = time.monotonic()
    with pytest.raises(BadCheckpoint, match="no file can hold"):
        parse_header(raw, 8 + len(raw) + 9, "a shard")
    assert time.monotonic() - start < 1


def test_a_name_that_would_spoil_a_terminal_is_shown_escaped():
    name = "\x1b[2J\n\udc80" + "x" * 500
    raw = json.dumps({name: {"dtype": "Q", "shape": [], "data_offsets": [0, 0]}}).encode()
    with pytest.raises(BadCheckpoint) as refusal:
        parse_header(raw, 8 + len(raw), "a shard")
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 300
