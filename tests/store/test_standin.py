"""A full shape over few bytes: what is there, what is shared, and what an interruption leaves."""

from __future__ import annotations

import json
from collections import Counter, namedtuple
from pathlib import Path

import numpy as np
import pytest

from deltafin.errors import BadRequest, NoSpace
from deltafin.indexer import expert_layout, k3_config, parse_config
from deltafin.store import Standin, all_items, make_standin, open_store, read_status, verify
from deltafin.store.invented import Invented, Inventor
from deltafin.store.roots import Root

EXPERTS = 12  # distinct ones; tiny has 128
Q_PROJ = Invented("kda moe 0", "self_attn.q_proj.weight", "BF16", (512, 7168))


@pytest.fixture(scope="session")
def tiny_config(tiny_dir) -> bytes:
    return (tiny_dir / "config.json").read_bytes()


@pytest.fixture
def make(tiny_config, tmp_path):
    """`make(..)` makes a stand-in of tiny in one folder."""

    def make_(**keywords) -> Standin:
        return make_standin(tmp_path / "s", **{"distinct_experts": EXPERTS, "config_json": tiny_config, **keywords})

    return make_


def opened(standin: Standin):
    return open_store(standin.model, cache_dir=standin.cache_dir, offline=True)


def contents(standin: Standin) -> list[str]:
    """The digest behind every span, in order."""
    with opened(standin) as store:
        items = all_items(store.catalog)
        return [store.roots[0].log.entries[store.key(item.span)].sha256.hex() for item in items]


# ---- what is there --------------------------------------------------------------------------------------


def test_every_span_is_there_and_whole(make):
    standin = make()
    with opened(standin) as store:
        status, report = read_status(store), verify(store)
        assert status.layers_whole == status.layers == 9
        assert status.experts_present == status.experts == 9 * 16 - 16
        assert status.spine_present_nbytes == status.spine_nbytes
        assert not report.damaged and not report.vanished and not report.unknown and not report.bad_records
        assert report.whole == status.cache_objects == standin.distinct_objects
        assert report.whole_nbytes == status.cache_nbytes == standin.distinct_nbytes
        assert len(all_items(store.catalog)) == standin.spans


def test_few_objects_stand_behind_many_spans_and_each_span_has_a_key_of_its_own(make):
    standin = make()
    with opened(standin) as store:
        items = all_items(store.catalog)
        assert len({store.key(item.span) for item in items}) == len(items) == standin.spans
        behind = Counter(store.roots[0].log.entries[store.key(i.span)].sha256 for i in items if i.expert is not None)
        assert len(behind) == EXPERTS
        assert max(behind.values()) - min(behind.values()) <= 1, "all are used equally often"
    assert standin.distinct_objects < standin.spans / 5


def test_layers_of_a_kind_share_objects_wherever_the_spine_is_cut(make, small_spans):
    with small_spans():
        standin = make()
    with opened(standin) as store:
        entries = store.roots[0].log.entries

        def objects(layer: int) -> set[bytes]:
            return {entries[store.key(span)].sha256 for span in store.catalog.spine(layer).spans}

        first, second, third = (objects(layer) for layer in (1, 2, 4))
        assert not first & second
        assert len(first - third) == len(third - first) == 1, "all but the span with the router's bias"


def test_each_layer_has_a_router_s_bias_of_its_own(make):
    with opened(make()) as store:
        name = "block_sparse_moe.gate.e_score_correction_bias"
        assert len({store.spine(layer)[name].tobytes() for layer in range(1, 9)}) == 8


def test_a_layer_kind_has_two_variants_and_the_dense_layer_its_own(make):
    with opened(make()) as store:
        mlp = {layer: store.spine(layer) for layer in range(store.catalog.config.num_layers)}
    attention = {layer: spine["self_attn.o_proj.weight"].tobytes() for layer, spine in mlp.items()}
    kinds = {layer: "q_a" if "self_attn.q_a_proj.weight" in spine else "kda" for layer, spine in mlp.items()}
    assert [layer for layer, kind in kinds.items() if kind == "q_a"] == [3, 7, 8]
    assert len({attention[layer] for layer in (3, 7, 8)}) == 2
    assert len({attention[layer] for layer in (1, 2, 4, 5, 6)}) == 2
    assert attention[0] not in {attention[layer] for layer in range(1, 9)}


def test_it_is_the_same_every_time(make, tiny_config, tmp_path):
    again = make_standin(tmp_path / "other", distinct_experts=EXPERTS, config_json=tiny_config)
    assert contents(make()) == contents(again)


def test_however_the_spine_is_cut_its_tensors_hold_the_same(make, tiny_config, tmp_path, small_spans):
    with small_spans():
        other = make_standin(tmp_path / "other", distinct_experts=EXPERTS, config_json=tiny_config)
    standin = make()
    assert other.spans > standin.spans
    with opened(standin) as a, opened(other) as b:
        for layer in range(a.catalog.config.num_layers):
            left, right = a.spine(layer), b.spine(layer)
            assert all(np.array_equal(left[name], right[name]) for name in left), layer


# ---- making it ------------------------------------------------------------------------------------------


def test_a_finished_one_is_found_at_once_and_nothing_is_written(make, monkeypatch):
    first = make()
    before = {p: p.stat().st_mtime_ns for p in first.cache_dir.rglob("*")}
    monkeypatch.setattr("deltafin.store.standin.build_catalog", None)
    monkeypatch.setattr("deltafin.store.standin.open_store", None)
    assert make() == first
    assert {p: p.stat().st_mtime_ns for p in first.cache_dir.rglob("*")} == before


def test_progress_counts_the_distinct_bytes(make):
    seen: list[tuple[int, int]] = []
    standin = make(progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {standin.distinct_nbytes}
    assert seen[-1][0] == standin.distinct_nbytes
    assert len(seen) == standin.distinct_objects


@pytest.mark.parametrize("objects", [0, 1, 7, 15])
def test_an_interrupted_one_is_continued_where_it_stopped(make, monkeypatch, objects):
    publish, made = Root.publish, []

    def interrupted(self, key, view):
        if len(made) == objects:
            raise KeyboardInterrupt
        made.append(key)
        return publish(self, key, view)

    monkeypatch.setattr(Root, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make()
    monkeypatch.setattr(Root, "publish", lambda self, key, view: (made.append(key), publish(self, key, view))[1])
    standin = make()
    assert len(made) == len(set(made)) == standin.distinct_objects, "no object was made twice"
    with opened(standin) as store:
        assert read_status(store).layers_whole == 9
        assert not verify(store).damaged


def test_another_cut_makes_only_what_it_needs_and_leaves_nothing_behind(make, small_spans, tiny_config, tmp_path):
    with small_spans():
        make()
    for path in (tmp_path / "s" / "catalogs").glob("*.catalog"):
        path.unlink()  # as a catalog of another version
    made: list[int] = []
    standin = make(progress=lambda done, total: made.append(done))
    assert len(made) <= standin.distinct_objects - EXPERTS, "the experts are cut as before"
    fresh = make_standin(tmp_path / "fresh", distinct_experts=EXPERTS, config_json=tiny_config)
    assert contents(standin) == contents(fresh)
    with opened(standin) as store:
        report = verify(store)
        assert (report.whole, report.unknown, report.vanished) == (standin.distinct_objects, 0, 0)


@pytest.mark.parametrize("damage", ["gone", "cut short"])
def test_an_object_that_was_lost_later_is_made_again(make, damage):
    first = make()
    victim = sorted(first.cache_dir.glob("objects/*/*"))[3]
    whole = victim.read_bytes()
    victim.unlink() if damage == "gone" else victim.write_bytes(whole[:-1])
    made: list[int] = []
    assert make(progress=lambda done, total: made.append(done)) == first
    assert len(made) == 1
    assert victim.read_bytes() == whole


def test_other_parameters_make_it_anew(make):
    first = make()
    second = make(distinct_experts=5)
    assert second.distinct_objects == first.distinct_objects - EXPERTS + 5
    with opened(second) as store:
        report = verify(store)
        assert (report.whole, report.unknown) == (second.distinct_objects, 0)


def test_a_folder_with_anything_else_is_left_alone(make, tmp_path):
    (tmp_path / "s" / "objects").mkdir(parents=True)
    (tmp_path / "s" / "objects.log").write_bytes(b"precious")
    with pytest.raises(BadRequest, match="holds something other than a stand-in"):
        make()
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == ["objects", "objects.log"]


@pytest.mark.parametrize("marker", ["", "[]", "{}", "nonsense", json.dumps({"version": 1})])
def test_a_marker_that_says_nothing_is_no_licence_to_remove(make, tmp_path, marker):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "stand-in.json").write_text(marker)
    with pytest.raises(BadRequest, match="holds something other than a stand-in"):
        make()


def test_too_little_space_is_said_with_numbers_before_an_object_is_written(make, monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(NoSpace, match=r"needs 2,3\d\d,\d{3} more bytes and 1,000 are free"):
        make()
    assert list((tmp_path / "s").glob("objects/*/*")) == []


def test_no_distinct_experts_are_refused(make):
    with pytest.raises(BadRequest, match="0 distinct experts"):
        make(distinct_experts=0)


# ---- what is in it --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inventor() -> Inventor:
    return Inventor(parse_config(k3_config()))


def filled(inventor: Inventor, tensor: Invented, begin: int, nbytes: int) -> np.ndarray:
    out = np.empty(nbytes, np.uint8)
    inventor.fill(out, tensor, begin)
    return out


def floats(bits: np.ndarray) -> np.ndarray:
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("begin", [0, 1, 2 << 20, (3 << 20) - 3, 5_000_001])
def test_any_piece_of_a_tensor_is_as_in_the_whole(inventor, begin):
    whole = filled(inventor, Q_PROJ, 0, 512 * 7168 * 2)
    assert np.array_equal(filled(inventor, Q_PROJ, begin, 1_100_000), whole[begin : begin + 1_100_000])


def test_matrices_are_normal_to_their_tails_in_bf16(inventor):
    """A code for exponents is measured on them: each exponent must be about as frequent as it is by rounding."""
    values = filled(inventor, Q_PROJ, 0, 512 * 7168 * 2)
    wanted = np.random.default_rng(1).standard_normal(512 * 7168, np.float32) / np.float32(7168**0.5)
    assert floats(values).std() * 7168**0.5 == pytest.approx(1, abs=0.003)
    assert abs(floats(values).mean()) * 7168**0.5 < 0.003
    found = np.bincount(values.view(np.uint16) >> 7 & 255, minlength=256)
    expected = np.bincount((wanted.view(np.uint32) + np.uint32(0x8000)) >> 23 & 255, minlength=256)
    assert np.all(np.abs(found - expected) < 6 * np.sqrt(found + expected + 1))
    assert np.count_nonzero(found) >= 20
    assert len(np.unique(values.view(np.uint16) & 127)) == 128


def test_tensors_that_differ_in_variant_name_or_place_differ(inventor):
    nbytes = 1 << 20
    pieces = [filled(inventor, Q_PROJ, begin, nbytes) for begin in (0, nbytes, 2 * nbytes)]
    pieces += [
        filled(inventor, Invented(variant, name, "BF16", Q_PROJ.shape), 0, nbytes)
        for variant, name in (("kda moe 1", Q_PROJ.name), ("kda moe 0", "self_attn.k_proj.weight"))
    ]
    for i, a in enumerate(pieces):
        for b in pieces[i + 1 :]:
            assert np.mean(a.view(np.uint16) == b.view(np.uint16)) < 0.01


def test_experts_keep_the_size_of_what_they_multiply(inventor):
    layout = expert_layout(parse_config(k3_config()))
    span = filled(inventor, Invented("7", "expert", "MXFP4", ()), 0, 17_547_264)
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for packed, scale in zip(layout[::2], layout[1::2], strict=True):
        code = span[packed.offset : packed.offset + packed.nbytes]
        scales = span[scale.offset : scale.offset + scale.nbytes]
        assert len(np.unique(scales)) == 4 and scales.max() < 130
        square = np.mean(codes[code & 15] ** 2) * np.mean(4.0 ** (scales.astype(float) - 127))
        gain = (square * packed.shape[1] * 2) ** 0.5
        assert gain == pytest.approx(1.0 if packed.name.startswith("w2") else 2.5, rel=0.42)


def test_a_log_ends_in_zeros(inventor):
    a_log = filled(inventor, Invented("kda moe 0", "self_attn.A_log", "F32", (128,)), 0, 512).view(np.float32)
    assert np.all(a_log[:96] != 0) and not a_log[96:].any()
    assert a_log.min() >= -0.5 and a_log.max() < 1


def test_norms_are_near_one_and_biases_small(inventor):
    norm = floats(filled(inventor, Invented("v", "input_layernorm.weight", "BF16", (7168,)), 0, 2 * 7168))
    bias = filled(inventor, Invented("v", "block_sparse_moe.gate.e_score_correction_bias", "F32", (896,)), 0, 4 * 896)
    assert norm.mean() == pytest.approx(1, abs=0.02) and norm.std() == pytest.approx(0.2, rel=0.1)
    assert np.abs(bias.view(np.float32)).max() < 0.1


@pytest.mark.slow
def test_k3_s_plan_is_about_ten_gigabytes_behind_87_thousand_spans(tmp_path, monkeypatch):
    """Everything but the writing: the catalog of the full shape and what would stand behind it."""
    plans = []
    monkeypatch.setattr("deltafin.store.standin._publish", lambda store, plan, progress: plans.append(plan))
    standin = make_standin(Path(tmp_path) / "s")
    assert 10e9 < standin.distinct_nbytes < 12e9
    assert sum(piece.tensor.dtype == "MXFP4" for content in plans[0] for piece in content) == 200
    with opened(standin) as store:
        assert store.catalog.totals.experts == 82_432
        assert standin.spans == len(all_items(store.catalog))
