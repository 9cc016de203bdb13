"""What cannot be an expert is refused; what was released never is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafin.indexer import expert_layout
from deltafin.store.plausible import implausible


@pytest.fixture
def expert(opened, tiny_dir, tiny_truth):
    """(layout, the bytes of a real expert)"""
    layout = expert_layout(opened(tiny_dir).catalog.config)
    return layout, np.frombuffer(tiny_truth.expert(2, 7), np.uint8).copy()


def _scales(layout):
    return [part for part in layout if part.name.endswith("scale")]


@pytest.mark.parametrize("name", ["tiny", "demo"])
def test_every_real_expert_is_plausible(opened, truth, request, name):
    directory = request.getfixturevalue(f"{name}_dir")
    config = opened(directory).catalog.config
    layout, known = expert_layout(config), truth(directory)
    for layer in config.moe_layers:
        for number in range(config.num_experts):
            assert implausible(np.frombuffer(known.expert(layer, number), np.uint8), layout) is None


def test_zeros_in_any_matrix_are_refused_by_name(expert):
    layout, raw = expert
    for part in _scales(layout):
        spoiled = raw.copy()
        spoiled[part.offset : part.offset + part.nbytes] = 0
        assert implausible(spoiled, layout) == f"{part.name} is all zeros"
    assert implausible(np.zeros_like(raw), layout) is not None


def test_a_scale_that_is_no_number_is_refused_by_name(expert):
    layout, raw = expert
    for part in _scales(layout):
        for at in (part.offset, part.offset + part.nbytes - 1):
            spoiled = raw.copy()
            spoiled[at] = 255
            assert implausible(spoiled, layout) == f"{part.name} holds a scale of 255, which is no number"


def test_scales_too_far_apart_for_one_matrix_are_refused(expert):
    layout, raw = expert
    part = _scales(layout)[1]
    spoiled = raw.copy()
    spoiled[part.offset : part.offset + part.nbytes] = 120
    for lowest, sound in ((56, True), (55, False), (0, False)):
        spoiled[part.offset + 3] = lowest
        assert (implausible(spoiled, layout) is None) == sound


def test_a_zeroed_end_is_refused_wherever_it_begins(expert):
    """An interrupted transfer: as soon as it reaches a scale that counts."""
    layout, raw = expert
    last = layout[-1]
    for keep in range(0, last.offset + last.nbytes, 97):
        spoiled = raw.copy()
        spoiled[keep:] = 0
        assert implausible(spoiled, layout) is not None


@given(st.binary(min_size=1, max_size=200))
def test_text_in_place_of_weights_is_refused(page):
    """A web page that a proxy sends: letters repeat too little for a matrix of scales and lie too close to zeros."""
    from deltafin.indexer import ExpertPart

    layout = (ExpertPart("w1.weight_scale", (1, len(page)), 0, len(page)),)
    found = implausible(np.frombuffer(page, np.uint8), layout)
    spread = max(page) - min(page)
    assert (found is None) == (max(page) not in (0, 255) and spread <= 64)
