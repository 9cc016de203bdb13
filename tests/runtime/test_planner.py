"""df-plan's arithmetic: by hand where that is possible, and what must hold whatever the machine."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafin.cext import _math
from deltafin.errors import BadRequest
from deltafin.indexer import K3_REPO, Sketch, Span, k3_config, parse_config
from deltafin.runtime import MemoryPlan
from deltafin.runtime import memory as memory_module
from deltafin.runtime.planner import (
    Changes,
    Figures,
    Kernels,
    Outcome,
    Overheads,
    Rates,
    cold_token_time,
    compare,
    load_figures,
    load_outcomes,
    make_plan,
    median_error,
    model_shape,
    open_subject,
    parse_changes,
    parse_rate,
    pass_time,
    present,
    prompt_time,
    save_figures,
    spread,
    together,
    token_time,
)
from deltafin.runtime.planner.remembered import FIGURES_FILE, MOST_OUTCOMES, OUTCOMES_FILE, add_outcome
from deltafin.runtime.planner.schedule import LayerWork, waits
from deltafin.runtime.planner.timing import hit_share, miss_share, union
from deltafin.store import DriveProbe, LayerPieces, PackFormat
from deltafin.store.spine import Piece

GB = 10**9
NOTHING = Overheads(0, 0, 0, 0, 0, 0, 0)
KERNELS = Kernels(
    "scalar",
    2,
    {
        "mxfp4": (40e-12, 200e-12, 1300e-12),
        "bf16": (80e-12, 300e-12, 1400e-12),
        "bf12": (60e-12, 300e-12, 1400e-12),
        "int8": (40e-12, 200e-12, 1300e-12),
    },
    20e9,
    20e9,
)
FIGURES = Figures(1.0, KERNELS, Overheads(2e-4, 2e-4, 1e-4, 4e-5, 5e-4, 6e-5, 8e-5))


@pytest.fixture(autouse=True)
def small_program(monkeypatch) -> None:
    """Whatever else the tests have left in memory."""
    monkeypatch.setattr(memory_module, "own_nbytes", lambda: 60_000_000)


@pytest.fixture(scope="module")
def k3():
    return model_shape(Sketch(parse_config(k3_config())), published_skew=True)


def memory(shape, budget: int, rows: int = 1) -> MemoryPlan:
    want = memory_module.Want(rows=rows, tokens=rows + 64)
    return memory_module.plan_memory(budget, shape, shape.pieces, want, 2)


# ---- drives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "only", "everywhere", "found"),
    [
        ([1.0, 2.0, 4.0], [0, 0, 0], 70, 7.0),  # all hold everything: rates add up
        ([1.0, 2.0, 4.0], [10, 10, 10], 0, 3.0),  # the slowest takes 10 s of 30 bytes
        ([1.0, 2.0, 4.0], [10, 20, 40], 0, 7.0),  # laid out by their rates
        ([1.0, 4.0], [10, 0], 40, 5.0),  # 10 s for both: the slow one with its own, the fast one with the rest
        ([1.0, 4.0], [10, 0], 10, 2.0),  # the slow one still takes 10 s
        ([2.0, 3.0], [0, 0], 0, 5.0),
    ],
)
def test_roots_add_up_where_they_hold_the_same_bytes_and_else_the_largest_share_decides(rates, only, everywhere, found):
    assert together(rates, only, everywhere) == pytest.approx(found)


@given(
    nbytes=st.integers(0, 10**13),
    drives=st.lists(st.tuples(st.floats(1e6, 1e10), st.integers(0, 10**13)), min_size=1, max_size=5),
)
def test_a_spread_fills_no_drive_beyond_its_room_and_leaves_nothing_out_that_fits(nbytes, drives):
    rates, room = [rate for rate, _ in drives], [most for _, most in drives]
    shares = spread(nbytes, rates, room)
    assert all(0 <= share <= most for share, most in zip(shares, room, strict=True))
    assert sum(shares) == min(nbytes, sum(room))


def test_a_spread_is_in_proportion_to_the_rates_until_a_drive_is_full():
    assert spread(700, [1.0, 2.0, 4.0], [1000, 1000, 1000]) == [100, 200, 400]
    assert spread(700, [1.0, 2.0, 4.0], [1000, 1000, 100]) == [200, 400, 100]


# ---- terms ----------------------------------------------------------------------------------------------


def test_a_weight_takes_what_lies_between_the_measured_numbers_of_rows():
    assert KERNELS.per_weight("bf16", 1) == 80e-12
    assert KERNELS.per_weight("bf16", 4.5) == pytest.approx(190e-12)
    assert KERNELS.per_weight("bf16", 64) == 1400e-12
    assert KERNELS.per_weight("bf16", 640) == pytest.approx(14000e-12)
    assert KERNELS.with_threads(4).per_weight("bf16", 1) == 40e-12


def test_a_token_of_kimi_k3_meets_its_published_weights_and_bytes(k3):
    config = k3.config
    matrices = [w for layer in (*k3.layers, k3.head) for w in (*layer.matrices.values(), layer.sliced)]
    weights = sum(sum(w.values()) for w in matrices)
    experts = k3.moe_layers * config.top_k * k3.expert_weights
    assert 2 * (weights + experts) == pytest.approx(208e9, rel=0.03), "the 208 GFLOP of a row"
    assert k3.token_expert_nbytes == 25_829_572_608
    assert k3.walk_nbytes == 108_811_877_376 + 43_008 + 2_348_810_240
    assert k3.full_nbytes == k3.walk_nbytes + 2_348_810_240 + 82_432 * 17_547_264


def test_packs_that_nobody_has_made_have_the_length_that_packs_have(k3):
    bf12, int8 = (model_shape(Sketch(k3.config), foreseen=f) for f in (PackFormat.BF12, PackFormat.INT8))
    assert bf12.walk_nbytes - bf12.head.nbytes == pytest.approx(81_832_417_210, rel=1e-3), "as measured, docs/log.md"
    assert int8.walk_nbytes < 0.55 * k3.walk_nbytes


def test_a_union_and_what_hot_experts_take_are_the_published_numbers(k3):
    assert union(k3.config, 1) == 16
    assert union(k3.config, 64) == pytest.approx(613, abs=1)
    assert hit_share(0.32, skewed=True) == pytest.approx(0.665)
    assert hit_share(0.32, skewed=False) == 0.32
    assert hit_share(1.0, skewed=True) == 1.0


def test_experts_are_missed_until_they_have_been_seen(tmp_path):
    with open_subject("demo", cache=tmp_path, roots=[], revision=None) as subject:
        shape = model_shape(subject.catalog)
    roomy = memory(shape, GB)
    assert roomy.resident_experts == shape.experts
    assert miss_share(shape, roomy, 0) == 1
    assert miss_share(shape, roomy, 2) == pytest.approx((1 - 4 / 32) ** 2)
    assert miss_share(shape, replace(roomy, resident_experts=0), 1000) == 1


# ---- the schedule, by hand ------------------------------------------------------------------------------


def _piece(nbytes: int, matrix: str) -> Piece:
    return Piece(Span(0, 0, nbytes), nbytes, matrix, 0, 1, 1)


def _layers(*names: str, nbytes: int = 8192) -> list[LayerPieces]:
    one = LayerPieces(0, (), tuple(_piece(nbytes, name) for name in names), (), "")
    return [one, LayerPieces(-1, (), (), (), "")]


def _plan(**changes) -> MemoryPlan:
    nothing = dict.fromkeys(MemoryPlan.__slots__, 0) | {"rows": 1, "slots": 16, "resident": ()}
    return MemoryPlan(**(nothing | changes))


def _work(seconds: dict[str, float], **changes) -> LayerWork:
    nothing = LayerWork(seconds, 0.0, 0.0, None, None, 0.0, 0.0, 0.0, 0.0)
    return replace(nothing, **changes)


def _waits(layers, work, plan, **changes):
    settings = {"expert_nbytes": 3, "rate": 1.0, "piece_s": 0.0, "head_s": 0.0, "cold": False}
    return waits(layers, [work], plan, **(settings | changes))


def test_reads_of_experts_go_on_while_shared_work_is_done():
    # Asked for at 1 s, here at 4 and 7 s; shared work until 3 s, an expert takes 1 s, and what follows 1 s.
    work = _work({"router": 1.0, "beside": 2.0, "after": 1.0}, router="router", after="after", chosen=2.0, reads=2.0,
                 expert_s=1.0)  # fmt: skip
    found = _waits(_layers("router", "beside", "after"), work, _plan(resident=(0, 1)))
    assert (found.end_s, found.expert_s, found.spine_s) == (9.0, 3.0, 0.0)


def test_experts_in_memory_are_multiplied_before_those_that_are_read():
    work = _work({"router": 1.0, "after": 1.0}, router="router", after="after", chosen=3.0, reads=1.0, expert_s=1.0)
    found = _waits(_layers("router", "after"), work, _plan(resident=(0, 1)))
    assert (found.end_s, found.expert_s) == (6.0, 1.0), "two until 3 s, the read one is here at 4 s"


def test_with_one_slot_the_next_expert_is_asked_for_when_the_last_is_through():
    work = _work({"router": 1.0, "after": 1.0}, router="router", after="after", chosen=2.0, reads=2.0, expert_s=1.0)
    found = _waits(_layers("router", "after"), work, _plan(resident=(0, 1), slots=1))
    assert found.end_s == 1 + 3 + 1 + 3 + 1 + 1


def test_a_prompts_many_experts_are_read_while_others_are_multiplied():
    work = _work({"router": 0.0, "after": 0.0}, router="router", after="after", chosen=200.0, reads=200.0, expert_s=3.0)
    found = _waits(_layers("router", "after"), work, _plan(resident=(0, 1)))
    assert found.end_s == pytest.approx(200 * 3 + 3 * 4), "both take 3 s; only the first bundle is waited for"
    quick = _waits(_layers("router", "after"), replace(work, expert_s=1.0), _plan(resident=(0, 1)))
    assert quick.end_s == pytest.approx(200 * 3 + 1 * 4), "the drive decides, and the last bundle follows"


def test_pieces_stream_through_a_ring_that_has_room_for_two():
    # Read in 1 s each and computed in 0.5 s; the third is asked for when the first is through, at 1.5 s.
    work = _work({"a": 0.5, "b": 0.5, "c": 0.5})
    found = _waits(_layers("a", "b", "c"), work, _plan(), rate=8192.0)
    assert (found.end_s, found.spine_s) == (3.5, 2.0)


def test_experts_overtake_pieces_that_were_not_accepted_yet():
    names = ["router", *(f"m{i}" for i in range(12)), "after"]
    work = _work(dict.fromkeys(names, 0.0), router="router", after="after", chosen=1.0, reads=1.0, expert_s=0.0)
    ring = _plan(ring_nbytes=14 * 12288)
    found = _waits(_layers(*names), work, ring, rate=8192.0, expert_nbytes=8192)
    assert found.end_s == pytest.approx(15), "a drive does one after the other, whatever the order"
    assert found.spine_s == pytest.approx(15), "the expert was here long before the pieces"


def test_a_slow_drive_decides_alone_and_a_fast_one_not_at_all(k3):
    plan = memory(k3, 4 * GB)
    slow = pass_time(k3, plan, Rates(KERNELS, NOTHING, 1e6), miss=1.0)
    assert slow.total_s == pytest.approx(slow.read_nbytes / 1e6, rel=0.01)
    assert slow.bound == "read"
    fast = pass_time(k3, plan, Rates(KERNELS, NOTHING, 1e15), miss=1.0)
    products = (k3.moe_layers * 16 * k3.expert_weights * 40 + (k3.walk_nbytes / 2) * 80) * 1e-12
    assert fast.total_s == pytest.approx(products, rel=0.02)
    assert fast.wait_s == pytest.approx(0, abs=0.01)
    assert fast.bound == "compute"


def test_what_the_program_adds_is_counted_for_each_layer_expert_read_and_piece(k3):
    plan = memory(k3, 4 * GB)
    add = Overheads(0.25, 0.5, 1.0, 0.125, 2.0, 0.0625, 0.03125)
    bare, with_program = (pass_time(k3, plan, Rates(KERNELS, o, float("inf")), miss=1.0) for o in (NOTHING, add))
    away = [n for n in range(len(k3.layers) + 1) if n not in plan.resident]
    pieces = sum([*k3.layers, k3.head][n].pieces for n in away)
    expected = 69 * 0.25 + 24 * 0.5 + 93 * 1.0 + 1472 * (0.125 + 0.0625) + pieces * 0.03125 + 2.0
    assert with_program.total_s - bare.total_s == pytest.approx(expected, rel=1e-6)
    assert with_program.program_s == pytest.approx(expected, rel=1e-6)


def test_causes_add_up(k3):
    for time_ in (
        token_time(k3, memory(k3, 8 * GB), Rates(KERNELS, FIGURES.overheads, 2e9)),
        prompt_time(k3, memory(k3, 8 * GB, rows=500), Rates(KERNELS, FIGURES.overheads, 2e9), 500),
    ):
        said = time_.as_json()
        causes = sum(v for n, v in said.items() if n.endswith("_s") and n not in ("total_s", "read_s"))
        assert said["total_s"] == pytest.approx(causes)
        assert time_.total_s >= 0.999 * time_.read_s, "no schedule beats the drive"


# ---- what must hold on every machine --------------------------------------------------------------------


def test_more_memory_and_faster_drives_never_make_a_token_slower(k3):
    def token(budget: int, rate: float) -> float:
        return token_time(k3, memory(k3, budget), Rates(KERNELS, FIGURES.overheads, rate), first=512).total_s

    for rate in (0.5e9, 2e9, 7e9, 28e9):
        found = [token(gb * GB, rate) for gb in (2, 4, 8, 16, 32, 64, 100, 120, 180, 400)]
        # Which layers stay changes with each one more: a pass may wait at another place.
        assert all(more <= less * 1.01 for less, more in pairwise(found)), (rate, found)
        assert rate > 2e9 or found[-1] < 0.3 * found[0]
    for budget in (2 * GB, 16 * GB, 130 * GB):
        found = [token(budget, rate) for rate in (0.2e9, 0.5e9, 1e9, 2e9, 4e9, 8e9, 16e9)]
        assert found == sorted(found, reverse=True)


def test_a_first_token_is_never_faster_than_a_warm_one_and_a_longer_prompt_never_sooner_through(k3):
    rates = Rates(KERNELS, FIGURES.overheads, 3e9)
    for budget in (4 * GB, 130 * GB):
        plan = memory(k3, budget)
        assert cold_token_time(k3, plan, rates).total_s >= token_time(k3, plan, rates, first=512).total_s
        times = [prompt_time(k3, memory(k3, budget, rows=n), rates, n).total_s for n in (1, 10, 100, 500, 2000)]
        assert times == sorted(times)


# ---- what if --------------------------------------------------------------------------------------------


def test_changes_are_read_from_lists_and_repetitions():
    found = parse_changes(["ram=128GB,drive=7GB/s", "drive=3.5GB/s, cores=16", "line=100Mbit/s,spine=bf12"])
    assert found == Changes(128 * GB, (7e9, 3.5e9), None, 16, 12.5e6, "bf12")
    assert not parse_changes([]).any


@pytest.mark.parametrize(
    "text",
    ["ram", "ram=", "ram=lots", "ram=0", "disk=7GB/s", "drive=7", "drive=7Gb/s", "drive=0MB/s", "cores=0", "cores=2.5",
     "line=fast", "spine=fp8", "ram=1GB,ram=2GB", "drives=7GB/s,drive=1GB/s", ",", "=", "ram=1e999GB", "line=1Gibit/s"],
)  # fmt: skip
def test_a_change_that_makes_no_sense_is_one_line(text):
    with pytest.raises(BadRequest) as caught:
        parse_changes([text])
    assert "\n" not in str(caught.value) and "--what-if" in str(caught.value)


def test_rates_are_lines_in_bits_and_drives_in_bytes():
    assert parse_rate("100Mbit/s", "--line") == 12.5e6
    assert parse_rate("1Gbit", "--line") == 125e6
    assert parse_rate("7GB/s", "--line") == 7e9
    assert parse_rate("1GiB/s", "--line") == 1 << 30


# ---- the whole plan -------------------------------------------------------------------------------------


def _drive(path: str, rate: float | None, free: int = 2000 * GB, device: int = 1) -> DriveProbe:
    return DriveProbe(path, device, "ext4", free, True, rate is not None, 8, rate, "objects", "")


@pytest.fixture
def subject(tmp_path):
    with open_subject(None, cache=tmp_path, roots=[], revision=None) as found:
        yield found


def test_a_plan_is_there_before_anything_is_indexed(subject, tmp_path):
    assert (subject.model, subject.indexed, subject.store) == (K3_REPO, False, None)
    plan = make_plan(subject, None, replace(FIGURES, drives=(_drive("/a", 2e9),)), budget=16 * GB)
    assert plan.drive == pytest.approx(2e9) and not plan.drive_assumed
    assert plan.install is not None and plan.streaming is not None
    assert plan.install.full_nbytes == plan.install.missing_nbytes == pytest.approx(1.56e12, rel=1e-3)
    assert plan.install.full_s == {rate: plan.install.missing_nbytes / rate for rate in (12.5e6, 125e6)}
    assert plan.install.partial_reads == pytest.approx(0.665)
    assert plan.streaming.full_after_tokens == 56
    assert [p.tokens for p in plan.prompts] == [10, 500, 5000]
    assert list(tmp_path.iterdir()) == [], "a plan writes nothing"


def test_levers_are_measured_against_the_same_machine(subject):
    plan = make_plan(subject, None, replace(FIGURES, drives=(_drive("/a", 2e9),)), budget=16 * GB)
    more, richer, bf12, int8 = plan.levers
    assert all(lever.token_s < plan.warm.total_s for lever in plan.levers)
    faster = make_plan(subject, None, FIGURES, budget=16 * GB, changes=Changes(drives=4e9))
    assert more.token_s == pytest.approx(faster.warm.total_s)
    other = make_plan(subject, None, FIGURES, budget=80 * GB, changes=Changes(drives=2e9))
    assert richer.token_s == pytest.approx(other.warm.total_s)
    packed = make_plan(subject, None, FIGURES, budget=16 * GB, spine="bf12", changes=Changes(drives=2e9))
    assert bf12.token_s == pytest.approx(packed.warm.total_s)
    assert packed.spine == "bf12, to be packed" and packed.as_released
    assert bf12.as_released and not int8.as_released


def test_without_a_drive_that_can_be_measured_a_rate_is_assumed_and_said(subject):
    plan = make_plan(subject, None, replace(FIGURES, drives=(_drive("/tmp", None),)), budget=16 * GB)
    assert plan.drive_assumed


def test_directories_on_one_device_share_its_rate_and_its_space(subject):
    same, apart = (
        make_plan(subject, None, replace(FIGURES, drives=drives), budget=16 * GB)
        for drives in (
            (_drive("/a", 2e9, device=1), _drive("/b", 1.9e9, device=1)),
            (_drive("/a", 2e9, device=1), _drive("/b", 1e9, device=2)),
        )
    )
    assert (same.drive, apart.drive) == (pytest.approx(2e9), pytest.approx(3e9))
    assert same.install.free_nbytes == 2000 * GB and apart.install.free_nbytes == 4000 * GB
    assert [*same.install.shares] == ["/a"]
    assert apart.install.shares["/a"] == pytest.approx(2 * apart.install.shares["/b"], rel=1e-6)


def test_changes_say_what_another_machine_would_do(subject):
    figures = replace(FIGURES, drives=(_drive("/a", 2e9),))
    here = make_plan(subject, None, figures, budget=16 * GB)
    there = make_plan(subject, None, figures, budget=16 * GB, changes=parse_changes(["ram=128GB,drive=7GB/s,cores=8"]))
    assert (there.budget, there.drive, there.threads) == (128 * GB, 9e9, 8)
    assert there.warm.total_s < here.warm.total_s / 3


def test_too_little_memory_is_refused_with_what_is_needed(subject):
    with pytest.raises(BadRequest, match="--ram"):
        make_plan(subject, None, FIGURES, budget=GB)


def test_what_is_here_is_found_where_it_is(tmp_path):
    with open_subject("demo", cache=tmp_path, roots=[], revision=None) as subject:
        here = present(subject.store)
        shape = model_shape(subject.catalog)
        plan = make_plan(subject, here, FIGURES, budget=GB)
    assert here.experts == shape.experts and here.spine_nbytes == shape.spine_nbytes
    assert [h.only_nbytes for h in here.holdings] == [0, shape.full_nbytes], "in its directory, not in the cache"
    assert plan.install is None and plan.drive is None, "all here, and small enough to stay in the page cache"


# ---- remembering ----------------------------------------------------------------------------------------


def _figures() -> Figures:
    kernels = replace(KERNELS, isa=_math.isa(), threads=_math.threads())
    return replace(FIGURES, measured_at=time.time(), kernels=kernels, drives=(_drive("/a", 2e9), _drive("/b", None)))


def test_figures_are_what_was_saved_for_the_same_kernels_and_threads(tmp_path):
    figures = _figures()
    save_figures(tmp_path / "new", figures)
    isa, threads = figures.kernels.isa, figures.kernels.threads
    assert load_figures(tmp_path / "new", isa=isa, threads=threads) == figures
    assert load_figures(tmp_path / "new", isa=isa, threads=threads + 1) is None
    assert load_figures(tmp_path / "new", isa=isa, threads=threads, fresh_s=0) is None
    assert load_figures(tmp_path, isa=isa, threads=threads) is None
    assert [p.name for p in (tmp_path / "new").iterdir()] == [FIGURES_FILE], "nothing half-written is left"


def test_figures_of_another_machine_are_not_used(tmp_path):
    figures = _figures()
    save_figures(tmp_path, figures)
    file = tmp_path / FIGURES_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"machine": {"host": "another"}}))
    assert load_figures(tmp_path, isa=figures.kernels.isa, threads=figures.kernels.threads) is None


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", '{"version": 1}', "\x00" * 40, "[" * 100_000, "nan", "-1", "x"]
)
def test_damaged_files_are_ignored_with_a_line(tmp_path, caplog, damage):
    figures = _figures()
    isa, threads = figures.kernels.isa, figures.kernels.threads
    save_figures(tmp_path, figures)
    add_outcome(tmp_path, Outcome(1.0, "df-run", "it", 3, 2.0, 1.0))
    for name, key in ((FIGURES_FILE, "memory_rate"), (OUTCOMES_FILE, "measured_s")):
        text = (tmp_path / name).read_text()
        if damage in ("nan", "-1", "x"):
            value = json.loads(text)
            record = value["kernels"] if key == "memory_rate" else value["runs"][0]
            record[key] = {"nan": float("nan"), "-1": -1}.get(damage, "x")
            damaged = json.dumps(value)
        else:
            damaged = damage
        (tmp_path / name).write_text(damaged)
    assert load_figures(tmp_path, isa=isa, threads=threads) is None
    assert load_outcomes(tmp_path) == []
    assert sum("ignored" in r.message for r in caplog.records) >= (1 if damage == '{"version": 1}' else 2)
    add_outcome(tmp_path, Outcome(1.0, "df-run", "it", 3, 2.0, 1.0))
    assert len(load_outcomes(tmp_path)) == 1, "it is written anew"


def test_outcomes_are_bounded_and_their_median_error_is_of_sizes(tmp_path):
    for number in range(MOST_OUTCOMES + 5):
        add_outcome(tmp_path, Outcome(1.0 + number, "df-run", "it", 3, 1.0, 1.0))
    kept = load_outcomes(tmp_path)
    assert len(kept) == MOST_OUTCOMES and kept[-1].at == 1.0 + MOST_OUTCOMES + 4
    assert median_error([]) is None
    some = [Outcome(1.0, "df-run", "it", 1, p, 1.0) for p in (0.8, 1.1, 1.5)]
    assert median_error(some) == pytest.approx(0.2)


def test_a_run_is_compared_only_with_figures_of_this_machine(open_model, tmp_path):
    with open_model("demo") as model:
        model.forward([_segment(model)], logits="last")
        how = {"rows": 1, "tokens": 4, "measured_s": 0.01}
        assert compare(model, tmp_path, "df-run", **how) is None
        assert not (tmp_path / OUTCOMES_FILE).exists()
        save_figures(tmp_path, _figures())
        found = compare(model, tmp_path, "df-run", **how)
        assert found is not None
        outcome, predicted = found
        assert outcome.measured_s == 0.01 and outcome.predicted_s == predicted.total_s > 0
        assert load_outcomes(tmp_path) == [outcome]
        assert compare(model, tmp_path, "df-run", rows=1, tokens=0, measured_s=0.0) is None


def test_a_cache_that_cannot_be_written_costs_a_run_nothing_but_a_line(open_model, tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    save_figures(tmp_path, _figures())
    monkeypatch.setattr("deltafin.runtime.planner.remembered.publish", full)
    with open_model("demo") as model:
        model.forward([_segment(model)], logits="last")
        assert compare(model, tmp_path, "df-run", rows=1, tokens=4, measured_s=0.01) is not None
    assert "not remembered" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == [FIGURES_FILE], "no part is left"


def _segment(model):
    from deltafin.runtime import Segment

    return Segment(model.sequence(), [model.config.bos_id])
