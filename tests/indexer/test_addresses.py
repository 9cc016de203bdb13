"""The bytes behind a span are those of the layer and expert asked for: here they say so themselves."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from deltafin.indexer import EXPERT_PARTS, Catalog, expert_layout


def read_span(catalog: Catalog, folder: Path, layer: int, expert: int) -> bytes:
    (span,) = catalog.expert_spans(layer, [expert])
    with open(folder / catalog.shards[span.shard].name, "rb") as f:
        f.seek(span.offset)
        return f.read(span.nbytes)


def assert_address(make_checkpoint, catalog: Catalog, raw: bytes, layer: int, expert: int) -> None:
    """Every byte is where it belongs, and the first record of each tensor says so itself."""
    assert len(raw) == catalog.expert_nbytes
    for number, part in enumerate(expert_layout(catalog.config)):
        piece = raw[part.offset : part.offset + part.nbytes]
        record = piece[: 16 if number % 2 else 8]
        assert make_checkpoint.read_address(record) == make_checkpoint.Address(layer, expert, number, 0)
        assert piece == make_checkpoint.address_bytes(layer, expert, number, part.nbytes), (layer, expert, part.name)


@pytest.mark.parametrize("order", ["name", "spine-first"])
def test_every_expert_of_a_small_model_has_its_own_bytes(make_checkpoint, tmp_path, build, order):
    folder = tmp_path / "ckpt"
    sizes, _, _ = make_checkpoint.generate(
        folder, "tiny", order=make_checkpoint.Order(order), encode_address=True, overrides={"experts": 24}
    )
    catalog = build(folder)
    assert make_checkpoint.EXPERT_TENSORS == EXPERT_PARTS
    for layer, expert in itertools.product(range(1, sizes["layers"]), range(sizes["experts"])):
        assert_address(make_checkpoint, catalog, read_span(catalog, folder, layer, expert), layer, expert)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["name", "spine-first"])
def test_all_82432_experts_of_a_model_shaped_like_kimi_k3_have_their_own_bytes(make_checkpoint, tmp_path, build, order):
    folder = tmp_path / "ckpt"
    make_checkpoint.generate(folder, "roster", order=make_checkpoint.Order(order), encode_address=True)
    catalog = build(folder)
    assert catalog.totals.experts == 82_432
    for layer, expert in itertools.product((1, 2, 91, 92), (0, 255, 256, 511, 512, 895)):
        assert_address(make_checkpoint, catalog, read_span(catalog, folder, layer, expert), layer, expert)
    for layer in range(1, 93):
        spans = catalog.expert_spans(layer, range(896))
        blob = (folder / catalog.shards[spans[0].shard].name).read_bytes()
        for expert, span in enumerate(spans):
            first = make_checkpoint.read_address(blob[span.offset : span.offset + 8])
            assert (first.layer, first.expert, first.tensor, first.position) == (layer, expert, 0, 0)
            assert span.shard == spans[0].shard
    for path in folder.iterdir():
        path.unlink()  # 260 MB
