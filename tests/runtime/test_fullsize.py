"""What a token costs, counted on a stand-in of tiny."""

from __future__ import annotations

import numpy as np
import pytest

import deltafin
from deltafin.runtime import Segment, fullsize
from deltafin.store import make_standin


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_dir):
    config = (tiny_dir / "config.json").read_bytes()
    standin = make_standin(tmp_path_factory.mktemp("standin") / "s", distinct_experts=12, config_json=config)
    with deltafin.open(standin.model, cache_dir=standin.cache_dir, offline=True) as model:
        yield model


def test_a_stand_in_computes_sane_logits_that_differ_by_token(model):
    logits = model.forward([Segment(model.sequence(), [1, 2, 300])])
    assert np.isfinite(logits).all()
    assert logits.std(axis=1).min() > 0.5 and np.abs(logits).max() < 50
    assert np.abs(np.corrcoef(logits) - np.eye(3)).max() < 0.9


def test_experts_vary_by_layer_and_token(model):
    chosen: dict[int, np.ndarray] = {}

    class Routes(deltafin.Observer):
        def routes(self, layer, ids, weights):
            chosen[layer] = np.sort(ids, axis=1)

    model.forward([Segment(model.sequence(), [1, 2, 300, 77])], observer=Routes())
    assert len({tuple(ids[0]) for ids in chosen.values()}) == len(chosen) == 8
    assert len({tuple(row) for row in chosen[1]}) == 4


def test_a_token_asks_for_its_experts_and_the_whole_spine(model):
    config, catalog = model.config, model.store.catalog
    report = fullsize.measure(model, tokens=3, start_id=5)
    assert report.start_id == 5 and len(report.tokens) == 3
    tables = catalog.embedding().tensor.nbytes + catalog.head().tensor.nbytes
    for cost in report.tokens:
        assert cost.wall_s > 0
        assert cost.expert_nbytes == len(config.moe_layers) * config.top_k * catalog.expert_nbytes
        assert cost.spine_nbytes == catalog.totals.spine_nbytes - tables
        assert cost.head_nbytes == catalog.head().tensor.nbytes
        assert cost.row_nbytes == 2 * config.hidden_size
        assert cost.parts.experts == len(config.moe_layers) * config.top_k
        assert cost.device_nbytes is None or cost.device_nbytes >= 0
    assert report.peak_rss_nbytes > 10_000_000


def test_it_generates_what_generate_does_past_end_tokens_and_counts_layers(model):
    layers: list[int] = []
    report = fullsize.measure(model, tokens=4, progress=layers.append)
    wanted = list(model.generate(model.sequence(), [model.config.bos_id], max_new=4, stop_ids=()))
    assert [cost.id for cost in report.tokens] == wanted
    assert layers == sorted(layers) and layers[-1] == 4 * model.config.num_layers


def test_a_system_that_counts_no_device_bytes_is_no_error(model, monkeypatch):
    monkeypatch.setattr(fullsize, "device_nbytes", lambda: None)
    assert fullsize.measure(model, tokens=1).tokens[0].device_nbytes is None
