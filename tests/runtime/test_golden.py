"""What Moonshot's own code computes in float64, within the tolerances of the golden data's README."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from deltafin.runtime import Model, Segment

NEW = 32


@dataclass
class Set:
    name: str
    model: Model
    golden: dict[str, np.ndarray]
    logits: list[np.ndarray]
    seen: list
    max_error: float
    rms_error: float
    weight_error: float
    trace_error: float

    def moe_layers(self):
        return list(enumerate(self.golden["trace_moe_layers"].tolist()))


LIMITS = {"tiny": (1e-3, 1e-4, 3e-5, 1e-4), "k93": (2e-2, 1e-3, 3e-4, 3e-4)}


@pytest.fixture(scope="module", params=["tiny", "k93", "tiny-torch", "k93-torch"])
def computed(request, golden, new_recorder) -> Set:
    """Every prompt once, as one pass from an empty sequence, with all that an observer sees."""
    name, _, torch = request.param.partition("-")
    model = request.getfixturevalue(f"{name}_torch" if torch else name)
    arrays = dict(np.load(golden / name / "golden.npz"))
    logits, seen = [], []
    for k in range(4):
        recorder = new_recorder()
        segment = Segment(model.sequence(), arrays[f"p{k}_ids"])
        logits.append(model.forward([segment], logits="all", observer=recorder))
        seen.append(recorder)
    return Set(name, model, arrays, logits, seen, *LIMITS[name])


def test_every_logit_is_the_golden_one(computed):
    for k, logits in enumerate(computed.logits):
        error = np.abs(logits - computed.golden[f"p{k}_logits"])
        assert logits.dtype == np.float32
        assert error.max() < computed.max_error
        assert np.sqrt(np.mean(np.square(error))) < computed.rms_error


def test_the_most_likely_token_is_the_golden_one_at_every_position(computed):
    for k, logits in enumerate(computed.logits):
        assert (logits.argmax(1) == computed.golden[f"p{k}_logits"].argmax(1)).all()


def test_every_row_chooses_the_golden_experts_in_every_layer(computed):
    for k, seen in enumerate(computed.seen):
        expected = np.sort(computed.golden[f"p{k}_route_ids"], axis=2)
        for index, layer in computed.moe_layers():
            assert (np.sort(seen.route_ids[layer], axis=1) == expected[index]).all()


def test_routing_weights_are_the_golden_ones_in_falling_order(computed):
    seen = computed.seen[2]
    for index, layer in computed.moe_layers():
        assert (seen.route_ids[layer] == computed.golden["p2_route_ids"][index]).all()
        error = np.abs(seen.route_weights[layer] - computed.golden["trace_route_weights"][index])
        assert error.max() < computed.weight_error


@pytest.mark.parametrize("point", ["attn_in", "attn_out", "mlp_in", "mlp_out", "layer_out"])
def test_hidden_vectors_are_the_golden_ones_in_every_layer(computed, point):
    for layer, expected in enumerate(computed.golden[f"trace_{point}"]):
        assert _relative_rms(computed.seen[2].vectors[point, layer], expected) < computed.trace_error


def test_the_final_norm_is_the_golden_one(computed):
    found = computed.seen[2].vectors["final_norm", computed.model.config.num_layers]
    assert _relative_rms(found, computed.golden["trace_final_norm"]) < computed.trace_error


@pytest.mark.parametrize(
    "computed", ["tiny", "k93", "tiny-torch", pytest.param("k93-torch", marks=pytest.mark.slow)], indirect=True
)
def test_four_prompts_continued_side_by_side_give_the_golden_ids(computed):
    model = computed.model
    sequences = [model.sequence() for _ in range(4)]
    feed = [computed.golden[f"p{k}_ids"] for k in range(4)]
    found = [[], [], [], []]
    for _ in range(NEW):
        logits = model.forward([Segment(*pair) for pair in zip(sequences, feed, strict=True)], logits="last")
        feed = [[int(row.argmax())] for row in logits]
        for ids, new in zip(found, feed, strict=True):
            ids += new
    assert found == [computed.golden[f"p{k}_greedy"].tolist() for k in range(4)]


@pytest.mark.parametrize("k", range(4))
def test_generate_gives_the_golden_ids(tiny, golden, k):
    arrays = np.load(golden / "tiny" / "golden.npz")
    found = list(tiny.generate(tiny.sequence(), arrays[f"p{k}_ids"], max_new=NEW, stop_ids=()))
    assert found == arrays[f"p{k}_greedy"].tolist()


def _relative_rms(found, expected) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
