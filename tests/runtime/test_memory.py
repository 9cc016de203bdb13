"""The budget: what a plan adds up to, what comes first, and what a control group allows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from deltafin.errors import BadRequest, NoMemory
from deltafin.indexer import Sketch, k3_config, parse_config
from deltafin.runtime import Segment, Want
from deltafin.runtime import memory as m
from deltafin.runtime.native import opening
from deltafin.runtime.native.passes import matrices
from deltafin.store import slot_nbytes, spine_pieces

GB = 10**9
SPINE_NBYTES = 108_811_877_376
SLOT = 17_547_264 + 4096


@pytest.fixture(scope="module")
def k3():
    """What K3's catalog would say of its spine, and that in pieces."""
    sketch = Sketch(parse_config(k3_config()))
    return sketch, spine_pieces(sketch, lambda layer: matrices(sketch.config, layer))


@pytest.fixture(autouse=True)
def small_program(request, monkeypatch) -> None:
    """Whatever else the tests have left in memory."""
    if "k3" in request.fixturenames:
        monkeypatch.setattr(m, "own_nbytes", lambda: 60_000_000)


def plan(k3, budget, **want):
    return m.plan_memory(budget, *k3, Want(**{"rows": 1, "tokens": 64, **want}), 2)


@pytest.mark.parametrize("gb", [2, 4, 8, 16, 64, 128, 256, 2000])
@pytest.mark.parametrize("rows", [1, 512])
def test_a_plan_never_adds_up_to_more_than_the_budget(k3, gb, rows):
    if gb == 2 and rows == 512:
        pytest.skip("that is refused or planned a row at a time; see below")
    found = plan(k3, gb * GB, rows=rows)
    assert found.total <= gb * GB
    if found.resident_experts < 82_432:
        assert found.total > (gb - 2.4) * GB, "what is left is less than the largest layer"


def test_memory_goes_to_the_spine_first_and_then_to_experts(k3):
    before = (0, 0)
    for gb in (4, 8, 16, 64, 100):
        found = plan(k3, gb * GB)
        assert len(found.resident) >= before[0]
        assert found.resident_experts_nbytes < 2.4 * GB, "what is less than a layer"
        before = (len(found.resident), found.resident_experts)
    all_of_it = plan(k3, 128 * GB)
    assert len(all_of_it.resident) == all_of_it.spine_layers == 94
    assert all_of_it.resident_nbytes >= SPINE_NBYTES
    assert all_of_it.ring_nbytes == all_of_it.held_nbytes == 0
    assert all_of_it.resident_experts > 300
    assert plan(k3, 1600 * GB).resident_experts == 82_432


def test_resident_layers_are_spread_over_the_pass(k3):
    resident = np.array(plan(k3, 40 * GB).resident)
    assert 20 < len(resident) < 40
    assert np.diff(resident).max() - np.diff(resident).min() <= 1


def test_every_read_of_a_row_can_be_on_its_way_in_four_gigabytes(k3):
    found = plan(k3, 4 * GB)
    assert found.slots == 16 and found.slots_nbytes == 16 * SLOT
    assert found.ring_nbytes > 4 * (32 << 20)


def test_a_long_prompt_gets_rows_before_layers_stay(k3):
    found = plan(k3, 4 * GB, rows=512, tokens=512)
    assert found.rows == 512
    fewer = plan(k3, 2 * GB + 700_000_000, rows=4096, tokens=4096)
    assert 1 < fewer.rows < 4096


def test_a_budget_that_cannot_work_is_refused_with_numbers_and_what_to_give(k3):
    with pytest.raises(
        BadRequest, match=r"1,000 MB of memory are too little: 1,\d\d\d MB are needed at least.*--ram (\d+)MB"
    ):
        plan(k3, GB)
    least = m.least_budget(*k3, Want(rows=1, tokens=64), 2)
    assert plan(k3, least + (1 << 20)).total <= least + (1 << 20)
    with pytest.raises(BadRequest):
        plan(k3, least - (64 << 20))


def test_latents_grow_in_blocks_and_kda_does_not_grow(k3):
    config = k3[0].config
    assert m.kda_state_nbytes(config) == 4 * 69 * (96 * 128 * 128 + 3 * 3 * 12288)
    assert m.latents_nbytes(config, 1) == m.latents_nbytes(config, 256) == 24 * 256 * 576 * 4
    assert m.latents_nbytes(config, 257) == 2 * m.latents_nbytes(config, 256)


@pytest.mark.parametrize("gb", [2, 4, 24, 128])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 2), (100_000, 300), (100_000, 20_000)])
def test_scoring_takes_one_layers_state_whatever_the_number_of_texts(k3, gb, rows, tokens):
    if (gb, tokens) == (2, 20_000):
        pytest.skip("that is refused; see below")
    found = plan(k3, gb * GB, rows=rows, tokens=tokens, scoring=True)
    assert found.total <= gb * GB
    layer = m.scoring_nbytes(k3[0].config, tokens)
    assert layer < 7_000_000 + 2 * (tokens // 256 + 1) * 600_000
    if tokens - 1 <= found.rows:
        assert found.sequences == layer
    else:  # one text at a time goes on from pass to pass
        assert found.sequences == layer + m.divided_nbytes(k3[0].config, tokens)
    together = plan(k3, gb * GB, rows=min(rows, 400), tokens=2 * 400, sequences=2) if gb > 2 else None
    assert together is None or found.sequences < together.sequences or tokens == 20_000
    assert found.rows == rows or found.rows > gb * 50


def test_a_text_whose_state_does_not_fit_between_two_passes_is_refused_with_what_to_give(k3):
    with pytest.raises(BadRequest, match=r"longest text has 20,000 tokens, .* give --ram (\d+)MB or more") as refused:
        plan(k3, 2 * GB, rows=100_000, tokens=20_000, scoring=True)
    enough = int(str(refused.value).partition("--ram ")[2].partition("MB")[0]) * 10**6
    assert plan(k3, enough, rows=100_000, tokens=20_000, scoring=True).total <= enough
    # Fewer rows a pass than a text has are the caller's wish, and mean the same.
    assert plan(k3, 8 * GB, rows=10, tokens=20, scoring=True).sequences > m.kda_state_nbytes(k3[0].config)


@pytest.mark.parametrize("field", ["rows", "tokens", "sequences"])
def test_wanting_nothing_or_less_is_refused(field):
    for value in (0, -3):
        with pytest.raises(BadRequest, match=f"want.{field} is {value}; expected at least 1"):
            Want(**{field: value})


def test_what_the_kernels_work_with_at_once_is_what_is_planned_for():
    from deltafin.runtime.native import head, mla

    assert (m.KEY_BLOCK, m._QUERIES, m.HEAD_TILE) == (mla.KEY_BLOCK, mla.QUERY_BLOCK, head.SUM_TILE)


# ---- control groups ---------------------------------------------------------------------------------------


def _group(top, name, **files):
    folder = top / name
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file.replace("_", ".", 1)).write_text(text)


def test_the_smallest_of_all_groups_above_counts(tmp_path):
    _group(tmp_path, "a/b", memory_max="max\n", memory_current="1000\n")
    (tmp_path / "a" / "memory.max").write_text("5000\n")
    (tmp_path / "a" / "memory.current").write_text("4500\n")
    (tmp_path / "a" / "memory.stat").write_text("anon 4000\ninactive_file 300\n")
    proc = tmp_path / "cgroup"
    proc.write_text("0::/a/b\n")
    assert m.cgroup_left(proc, tmp_path) == [800]


def test_groups_of_the_older_kind_and_none_at_all(tmp_path):
    folder = tmp_path / "memory" / "docker"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("9000")
    (folder / "memory.usage_in_bytes").write_text("2000")
    proc = tmp_path / "cgroup"
    proc.write_text("5:cpu,cpuacct:/docker\n4:memory:/docker\n")
    assert m.cgroup_left(proc, tmp_path) == [7000]
    (folder / "memory.limit_in_bytes").write_text(str(1 << 62))  # how "none" looks there
    assert m.cgroup_left(proc, tmp_path) == []
    assert m.cgroup_left(tmp_path / "none", tmp_path) == []


def test_the_default_is_within_what_is_available():
    assert 0 < m.default_budget() < m.available_nbytes() + (1 << 30)


# ---- sequences ---------------------------------------------------------------------------------------------


def test_sequences_beyond_the_plan_take_the_memory_of_experts_and_then_are_refused(open_model, tiny_dir):
    with open_model(tiny_dir) as model:
        least = model.memory.total - model.memory.resident_experts_nbytes
    experts = 60 * slot_nbytes(model.store.catalog.expert_nbytes)
    want = Want(rows=4, tokens=256, sequences=1)
    with open_model(tiny_dir, ram=least + experts, want=want) as model:
        room = model.memory.resident_experts
        assert room > 0
        sequences, refused = [], None
        for _ in range(2000):
            seq = model.sequence()
            try:
                model.forward([Segment(seq, [1, 2])], logits="none")
            except NoMemory as e:
                refused = e
                break
            sequences.append(seq)
        assert refused is not None and "left for them; drop some" in str(refused)
        assert model.store.resident_experts[1] < room
        assert len(seq) == 0
        held = len(sequences)
        del sequences[: held // 2]
        model.forward([Segment(seq, [1, 2])], logits="none")
        assert len(seq) == 2


@pytest.fixture
def exactly(open_model, tiny_dir, monkeypatch):
    """`exactly(want)` opens a model for what is wanted, with memory for that and no more."""

    def plan(*args):
        found = real(*args)
        least = replace(found, resident_experts=0, resident_experts_nbytes=0)
        return replace(least, budget=least.total)

    real = opening.plan_memory
    monkeypatch.setattr(opening, "plan_memory", plan)
    return lambda want: open_model(tiny_dir, want=want)


def test_proposals_that_were_planned_for_fit(exactly):
    want = Want(rows=5, tokens=512, sequences=2, drafts=4)
    with exactly(want) as model:
        seqs = [model.sequence() for _ in range(2)]
        drafts = [Segment(seq, [1, 2, 3, 4, 5], tail=5, drafted=4) for seq in seqs]
        model.forward([Segment(seq, [7] * 250) for seq in seqs], logits="last")
        assert len(model.forward(drafts, logits="tails")) == 10
        with pytest.raises(NoMemory):
            model.forward([*drafts, Segment(model.sequence(), [1])], logits="tails")


def test_rows_that_nobody_has_decided_on_count(exactly):
    """They stay in memory, also while other sequences are computed."""
    with exactly(Want(rows=5, tokens=1024, sequences=4, drafts=1)) as model:
        one, other = model.sequence(), model.sequence()
        model.forward([Segment(one, [1, 2, 3, 4, 5], drafted=4)], logits="none")
        assert one.undecided_rows == 5
        draft = Segment(other, [1, 2, 3, 4, 5], drafted=4)
        with pytest.raises(NoMemory):
            model.forward([draft, *(Segment(model.sequence(), [1]) for _ in range(2))], logits="none")
        one.accept(4)
        assert one.undecided_rows == 0
        model.forward([draft, *(Segment(model.sequence(), [1]) for _ in range(2))], logits="none")


def test_a_fork_is_a_sequence_more(exactly):
    with exactly(Want(rows=2, tokens=512, sequences=2)) as model:
        one = model.sequence()
        model.forward([Segment(one, [1, 2])], logits="none")
        other = model.fork(one)
        with pytest.raises(NoMemory):
            model.fork(one)
        model.forward([Segment(seq, [3]) for seq in (one, other)], logits="last")


def test_rows_come_before_proposals(k3):
    """Memory for proposals of many sequences is no use where it leaves their rows to many passes."""
    want = {"rows": 288, "tokens": 32 * 256, "sequences": 32}
    least = m.least_budget(*k3, Want(**want, drafts=8), 2)
    for extra in (0, 10**6, 50 * 10**6):
        found, without = plan(k3, least + extra, **want, drafts=8), plan(k3, least + extra, **want)
        assert found == without and found.rows > 100
    roomy = plan(k3, least + GB, **want, drafts=8)
    assert (roomy.rows, roomy.logits_rows) == (288, 288)
    assert roomy.sequences > plan(k3, least + GB, **want).sequences


# ---- what it really takes ------------------------------------------------------------------------------------

# All in a process of its own: what it takes at least is measured there, and its peak since it began (not what
# getrusage says, which counts the parent's memory from before the program was loaded).
_PEAK = """
import re, sys, deltafin
from pathlib import Path
from deltafin.cext import _math
from deltafin.runtime import Segment, Want, memory
from deltafin.runtime.native.passes import matrices
from deltafin.store import spine_pieces
model, cache, extra, rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
want = Want(rows=rows, tokens=rows)
with deltafin.open(model, cache_dir=cache, want=want) as m:
    layers = spine_pieces(m.store.catalog, lambda layer: matrices(m.config, layer))
    ram = memory.least_budget(m.store.catalog, layers, want, _math.threads()) + extra
with deltafin.open(model, cache_dir=cache, ram=ram, want=want) as m:
    m.forward([Segment(m.sequence(), [i % m.config.vocab_size for i in range(rows)])], logits="last")
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    print(peak, ram, m.times.passes, m.memory.rows)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("extra", [4 << 20, 16 << 20])
@pytest.mark.parametrize("rows", [1, 700])
def test_the_peak_stays_below_the_budget(demo_dir, tmp_path, rows, extra):
    words = [sys.executable, "-c", _PEAK, str(demo_dir), str(tmp_path), str(extra), str(rows)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    peak, ram, passes, most_rows = map(int, done.stdout.split())
    assert peak <= ram
    assert passes == -(-rows // most_rows)
