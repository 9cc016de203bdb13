"""What a batch is measured by: counts that must be exact, and what is computed from them."""

from __future__ import annotations

from collections import Counter

import pytest

import deltafin
from deltafin.errors import DeltafinError
from deltafin.indexer import k3_config, parse_config
from deltafin.runtime import LayerTimes, PassTimes, batchbench
from deltafin.runtime.batchbench import BatchCost, BatchPass
from deltafin.store import make_standin, open_store


@pytest.fixture(scope="module")
def standin(tmp_path_factory, tiny_dir):
    config = (tiny_dir / "config.json").read_bytes()
    return make_standin(tmp_path_factory.mktemp("standin") / "s", distinct_experts=12, config_json=config)


@pytest.fixture(params=["streamed", "resident"])
def model(request, standin):
    with open_store(standin.model, cache_dir=standin.cache_dir, offline=True) as store:
        plan = getattr(batchbench, request.param)(store, 16)
        with deltafin.Model(store, plan=plan, spine="released") as model:
            yield model


def test_a_pass_reads_the_union_of_what_its_rows_chose_and_each_sequence_goes_on(model):
    begun = model.store.stats.expert_reads.copy()
    found = batchbench.measure_batches(model, [1, 16, 4])
    assert [p.sequences for p in found] == [1, 16, 4]
    span = model.store.catalog.expert_nbytes
    for p in found:
        assert p.expert_nbytes == sum(p.unions) * span
        assert all(model.config.top_k <= count <= model.config.num_experts for count in p.unions)
        assert p.times.rows == p.sequences
    assert max(found[1].unions) > model.config.top_k
    assert (model.store.stats.expert_reads - begun).total() > sum(sum(p.unions) for p in found), "and one before them"


def test_a_store_that_reads_an_expert_again_or_one_that_nobody_chose_fails_it(model, monkeypatch):
    visit = model.store.stats.visit_expert

    def twice(layer, expert):
        visit(layer, expert)
        visit(layer, expert)

    monkeypatch.setattr(model.store.stats, "visit_expert", twice)
    with pytest.raises(DeltafinError, match="experts were asked for"):
        batchbench.measure_batches(model, [2])


def test_counts_that_do_not_agree_are_an_error():
    chosen = {1: {3, 4}, 2: {0}}
    visits = Counter({(1, 3): 1, (1, 4): 1, (2, 0): 1})
    batchbench._check(chosen, visits, 30, 10)
    for wrong, nbytes in ((visits, 31), (visits + Counter([(1, 3)]), 30), (visits + Counter([(1, 5)]), 30)):
        with pytest.raises(DeltafinError):
            batchbench._check(chosen, wrong, nbytes, 10)
    with pytest.raises(DeltafinError):
        batchbench._check({**chosen, 2: {0, 1}}, visits, 30, 10)


def test_uniform_routing_of_k3_gives_the_published_unions():
    config = parse_config(k3_config())
    assert batchbench.uniform_union(config, 1) == pytest.approx(16)
    assert round(batchbench.uniform_union(config, 64)) == 613


def _cost(sequences, *walls, layers=()):
    times = [PassTimes(rows=sequences, total_s=wall, head_s=0.5, layers=list(layers)) for wall in walls]
    return BatchCost(tuple(BatchPass(sequences, (16, 18), 34, 5, None, t) for t in times))


def test_a_cost_is_the_median_and_each_further_sequence_takes_its_share():
    one, eight = _cost(1, 2.0, 9.0, 1.0), _cost(8, 4.0, 3.0, 5.5)
    assert (one.wall_s, one.walls, one.tokens_s) == (2.0, [1.0, 2.0, 9.0], 0.5)
    assert batchbench.marginal_s(one, eight) == pytest.approx(2 / 7)
    assert one.union == 17 and one.device_nbytes is None
    assert [c.sequences for c in batchbench.costs([*eight.passes, *one.passes])] == [1, 8]


def test_all_layers_are_computed_by_their_kind_or_not_at_all():
    whole, few = parse_config(k3_config()), parse_config(k3_config(6))
    seconds = [5.0, 1.0, 1.0, 3.0, 1.0, 1.0]  # dense, KDA, KDA, MLA, KDA, KDA
    layers = [LayerTimes(attention_s=s / 2, expert_wait_s=s / 2) for s in seconds]
    assert _cost(8, 1.0, layers=layers).all_layers_s(few, whole) == 0.5 + 5 + 68 * 1 + 24 * 3
    assert _cost(8, 1.0, layers=layers[:3]).all_layers_s(parse_config(k3_config(3)), whole) is None
