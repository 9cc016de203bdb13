"""A sketch says of a spine what the catalog of the same config says."""

from __future__ import annotations

import pytest

from deltafin.indexer import GLOBALS, Catalog, Sketch, build_catalog, k3_config, parse_config, parse_model


@pytest.fixture
def catalog(demo_dir, tmp_path):
    source = parse_model(str(demo_dir), tmp_path).source()
    build_catalog(source, tmp_path / "it.catalog", "it")
    with Catalog(tmp_path / "it.catalog") as found:
        yield found


def test_spans_and_tensors_are_those_of_the_catalog(catalog):
    sketch = Sketch(catalog.config)
    assert sketch.expert_nbytes == catalog.expert_nbytes
    for layer in [*range(catalog.config.num_layers), GLOBALS]:
        ours, theirs = sketch.spine(layer), catalog.spine(layer)
        assert [s.nbytes for s in ours.spans] == [s.nbytes for s in theirs.spans]
        assert _tensors(ours) == _tensors(theirs)
    for ours, theirs in ((sketch.head(), catalog.head()), (sketch.embedding(), catalog.embedding())):
        assert ours.rows_per_span == theirs.rows_per_span
        assert [s.nbytes for s in ours.spans] == [s.nbytes for s in theirs.spans]


def _tensors(group):
    return [(t.name, t.dtype, t.shape, t.nbytes) for t in group.tensors]


def test_kimi_k3_has_its_published_sizes_before_anything_is_indexed():
    sketch = Sketch(parse_config(k3_config()))
    spine = sum(s.nbytes for n in range(sketch.config.num_layers) for s in sketch.spine(n).spans)
    assert spine == 108_811_877_376
    assert sum(s.nbytes for s in sketch.head().spans) == 2_348_810_240
    assert sketch.expert_nbytes == 17_547_264
