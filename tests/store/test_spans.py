"""Every byte comes from the right place, wherever the store finds it and however the checkpoint lies."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, nullcontext

import numpy as np
import pytest

from deltafin.errors import BadRequest, NotFound
from deltafin.indexer import expert_layout
from deltafin.store import all_items, fetch, open_store

DTYPES = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}

# Where the bytes are, and how the checkpoint lies.
CASES = [
    ("shards", "tiny"),
    ("shards", "spine_first"),
    ("shards", "odd"),
    ("shards", "small_spans"),
    ("shards", "demo"),
    ("http", "odd"),
    ("http", "small_spans"),
    ("objects", "small_spans"),
    ("copied root", "spine_first"),
]


@pytest.fixture(scope="module", params=CASES, ids=[" ".join(case) for case in CASES])
def case(request, tmp_path_factory, range_server, truth, small_spans, policy):
    """(store, truth) for each case; all tests below hold for every one."""
    place, layout = request.param
    directory = request.getfixturevalue({"small_spans": "tiny"}.get(layout, layout) + "_dir")
    cache = tmp_path_factory.mktemp("cache")
    with ExitStack() as stack:
        stack.enter_context(small_spans() if layout == "small_spans" else nullcontext())
        keywords = {"cache_dir": cache, "policy": policy}
        if place == "shards":
            store = open_store(str(directory), **keywords)
        else:
            server = stack.enter_context(range_server.FaultServer(root=str(directory)))
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("HF_ENDPOINT", server.url)
            store = open_store("test/model", **keywords)
            if place != "http":
                fetch(store, all_items(store.catalog))
                store.close()
                if place == "copied root":
                    keywords["cache_dir"] = shutil.move(cache, tmp_path_factory.mktemp("moved") / "elsewhere")
                store = open_store("test/model", offline=True, **keywords)
        stack.enter_context(store)
        yield store, truth(directory)
        counts = store.stats.snapshot()
        if place in ("objects", "copied root"):
            assert counts["object_spans"] > 0
            assert counts["shard_spans"] == counts["http_spans"] == 0
        assert (counts["http_spans"] > 0) == (place == "http")


def _check(found: dict[str, np.ndarray], expected: dict[str, object]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        array = found[name]
        assert (array.dtype, array.shape) == (DTYPES[tensor.dtype], tensor.shape), name
        assert array.flags.aligned and array.flags.c_contiguous, name
        assert array.tobytes() == tensor.raw, name


def test_the_spine_of_every_layer_is_the_shards_bytes(case):
    store, truth = case
    for layer in range(store.catalog.config.num_layers):
        _check(store.spine(layer), truth.spine(layer))


def test_the_final_norms_are_the_shards_bytes(case):
    store, truth = case
    names = ("norm.weight", "output_attn_res_norm.weight", "output_attn_res_proj.weight")
    _check(store.final(), {name: truth.tensors[f"language_model.model.{name}"] for name in names})


def test_every_expert_of_every_layer_is_the_shards_bytes(case):
    store, truth = case
    config = store.catalog.config
    for layer in config.moe_layers:
        ids = list(range(config.num_experts))[::-1]
        found = {expert: slot.tobytes() for expert, slot in store.experts(layer, ids)}
        assert found == {expert: truth.expert(layer, expert) for expert in ids}


def test_rows_of_the_embedding_are_the_shards_bytes_in_the_order_asked_for(case):
    store, truth = case
    table = truth.table("language_model.model.embed_tokens.weight")
    last = len(table) - 1
    for ids in ([0], [last], [5, 5, 5], [last, 0, 31, 32, 33, 7, 32, 0], list(range(len(table)))):
        assert (store.embedding(ids) == table[ids]).all()
    assert store.embedding([]).shape == (0, table.shape[1])


def test_the_tiles_of_the_head_cover_the_vocabulary_once_in_order(case):
    store, truth = case
    table = truth.table("language_model.lm_head.weight")
    row = 0
    for first, tile in store.head():
        assert first == row
        assert (tile == table[row : row + len(tile)]).all()
        row += len(tile)
    assert row == len(table)


def test_a_token_outside_the_vocabulary_is_refused(case):
    store, _ = case
    vocab = store.catalog.config.vocab_size
    for token in (-1, vocab):
        with pytest.raises(BadRequest, match=f"token id {token} .* {vocab}"):
            store.embedding([1, token])


def test_what_the_model_does_not_have_is_not_found(case):
    store, _ = case
    config = store.catalog.config
    for layer, expert in ((1, config.num_experts), (0, 0), (config.num_layers, 0), (-1, 0), (1, -1), (70_000, 0)):
        with pytest.raises(NotFound, match=f"no expert {expert} in layer {layer}"):
            list(store.experts(layer, [expert]))
    with pytest.raises(NotFound):
        store.spine(config.num_layers)


# ---- only what is needed --------------------------------------------------------------------------------


def test_a_row_of_the_embedding_fetches_its_span_and_no_other(hub_store, small_spans, ranges):
    with small_spans():
        store, server = hub_store(index=True)
    table = store.catalog.embedding()
    assert len(table.spans) == 16
    store.embedding([3 * table.rows_per_span, 3 * table.rows_per_span + 1, 9 * table.rows_per_span])
    name = store.catalog.shards[table.tensor.shard].name
    assert ranges(server) == {(name, table.spans[i].offset, table.spans[i].nbytes): 1 for i in (3, 9)}


def test_a_spine_fetches_its_own_spans_and_no_other(hub_store, small_spans, ranges):
    with small_spans():
        store, server = hub_store(index=True)
    store.spine(4)
    spans = store.catalog.spine(4).spans
    assert len(spans) > 4
    assert ranges(server) == {(store.catalog.shards[s.shard].name, s.offset, s.nbytes): 1 for s in spans}
    store.spine(4)
    assert ranges(server).total() == len(spans), "the second visit comes from objects"


# ---- addresses in place of weights ------------------------------------------------------------------------


def _check_addresses(store, make_checkpoint, layers, experts) -> None:
    for layer in layers:
        landed = set()
        for expert, slot in store.experts(layer, experts):
            landed.add(expert)
            at = 0
            for number, part in enumerate(expert_layout(store.catalog.config)):
                expected = make_checkpoint.address_bytes(layer, expert, number, part.nbytes)
                assert slot[at : at + part.nbytes].tobytes() == expected, (layer, expert, part.name)
                at += part.nbytes
            assert at == len(slot)
        assert landed == set(experts)


CORNERS = [0, 1, 9, 10, 11, 99, 100, 101, 255, 256, 511, 512, 894, 895]


def test_each_of_896_experts_is_the_one_that_was_asked_for(tmp_path, hub, opened, make_checkpoint):
    """NU-04: experts lie in the order of their numbers as text, so that expert 2 lies behind expert 199."""
    directory = tmp_path / "ckpt"
    make_checkpoint.generate(directory, "roster", overrides={"layers": 3}, encode_address=True, vision=False)
    store = opened(directory)
    _check_addresses(store, make_checkpoint, (1, 2), range(896))
    hub(directory)
    remote = opened()
    _check_addresses(remote, make_checkpoint, (1, 2), CORNERS)
    assert remote.stats.snapshot()["http_spans"] == 2 * len(CORNERS)
    _check_addresses(remote, make_checkpoint, (1, 2), CORNERS)
    assert remote.stats.snapshot()["object_spans"] == 2 * len(CORNERS)
    with pytest.raises(NotFound):
        list(remote.experts(0, [0]))


@pytest.mark.slow
def test_every_corner_of_the_full_roster_is_the_one_that_was_asked_for(tmp_path, hub, opened, make_checkpoint):
    directory = tmp_path / "ckpt"
    make_checkpoint.generate(directory, "roster", encode_address=True, vision=False)
    _check_addresses(opened(directory), make_checkpoint, range(1, 93), range(896))
    hub(directory)
    _check_addresses(opened(), make_checkpoint, (1, 2, 91, 92), CORNERS)
