"""The headers of a checkpoint that is nowhere."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from deltafin.indexer import (
    Blueprint,
    Catalog,
    Location,
    build_catalog,
    k3_config,
    k3_ignored,
    parse_config,
    parse_model,
)

PLACE = Location(repo="nobody/nothing", commit="0" * 40)


@pytest.fixture(scope="module")
def k3() -> Blueprint:
    return Blueprint(PLACE, k3_config(), k3_ignored())


def test_the_config_of_the_package_says_what_the_released_one_says(golden):
    ours, released = parse_config(k3_config()), parse_config((golden / "k3_config.json").read_bytes())
    for field in fields(ours):
        assert getattr(ours, field.name) == getattr(released, field.name), field.name


def test_k3_has_the_published_files(k3, make_fullsize):
    files = k3.shard_files()
    assert [f.name for f in files] == [make_fullsize.shard_name(n) for n in range(1, 97)]
    assert sum(f.nbytes for f in files) == make_fullsize.FILE_BYTES
    assert int.from_bytes(k3.read(files[1], 0, 8)[0], "little") == make_fullsize.SHARD_2_HEADER_LENGTH


@pytest.mark.parametrize("number", [1, 2, 4, 46, 93, 94, 95, 96])
def test_k3_s_headers_are_those_of_the_sparse_files_byte_for_byte(k3, make_fullsize, number):
    """Two programs that share nothing: one writes the roster out, the other derives it from the config."""
    header, data_nbytes = make_fullsize._header(make_fullsize.shard_tensors(number))
    file = k3.shard_files()[number - 1]
    assert file.nbytes == 8 + len(header) + data_nbytes
    assert k3.read(file, 8, len(header))[0] == header


def test_a_small_checkpoint_in_k3_s_order_is_catalogued_alike(make_checkpoint, tmp_path):
    folder = tmp_path / "checkpoint"
    make_checkpoint.generate(folder, "tiny", order=make_checkpoint.Order.SPINE_FIRST)
    raw = (folder / "config.json").read_bytes()
    build_catalog(Blueprint(PLACE, raw), tmp_path / "blueprint.catalog", "blueprint")
    build_catalog(parse_model(str(folder), tmp_path).source(), tmp_path / "real.catalog", "real")
    with Catalog(tmp_path / "blueprint.catalog") as ours, Catalog(tmp_path / "real.catalog") as real:
        assert ours.config == real.config
        assert ours.totals.experts == real.totals.experts
        assert ours.totals.spine_nbytes == real.totals.spine_nbytes
        for layer in range(ours.config.num_layers):
            assert sizes(ours, layer) == sizes(real, layer)


def sizes(catalog: Catalog, layer: int) -> tuple[list[int], list[str]]:
    group = catalog.spine(layer)
    return [s.nbytes for s in group.spans], [t.name for t in group.tensors]


def test_reading_stays_inside_the_file_and_weights_are_zeros(tiny_dir):
    blueprint = Blueprint(PLACE, (tiny_dir / "config.json").read_bytes())
    file = blueprint.shard_files()[0]
    assert file.nbytes is not None
    whole, _ = blueprint.read(file, 0, 2 * file.nbytes)
    assert len(whole) == file.nbytes
    start = 8 + int.from_bytes(whole[:8], "little")
    assert json.loads(whole[8:start])
    assert not any(whole[start:])
    assert blueprint.read(file, start + 100, 50)[0] == bytes(50)
