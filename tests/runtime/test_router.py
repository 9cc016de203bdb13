"""Which experts a row chooses, and how they count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltafin.runtime.reference.moe import route


@pytest.fixture(scope="module")
def script(faults):
    return faults("router_cases")


def _tensors(case):
    return torch.tensor(case["logits"], dtype=torch.float32), torch.tensor(case["bias"], dtype=torch.float32)


@pytest.mark.parametrize("rows", [1, 5])
def test_the_listed_experts_are_chosen_with_the_listed_weights(script, rows):
    for case in script.build(seed=3):
        logits, bias = _tensors(case)
        routes = route(logits.expand(rows, -1), bias, script.CHOSEN, 1.0)
        expected = sorted(zip(case["ids"], case["weights"], strict=True))
        for row in range(rows):
            assert routes.ids[row].tolist() == [i for i, _ in expected], case["name"]
            assert routes.weights[row].numpy() == pytest.approx([w for _, w in expected], abs=1e-6), case["name"]


@pytest.mark.parametrize("experts", [1, 2, 15, 17, 512, 895, 896])
def test_any_number_of_experts_is_routed(experts):
    rng = np.random.default_rng(experts)
    logits = rng.standard_normal((3, experts)).astype(np.float32)
    bias = (rng.standard_normal(experts) * 0.2).astype(np.float32)
    top_k = min(16, experts)
    routes = route(torch.from_numpy(logits), torch.from_numpy(bias), top_k, 2.5)
    for row in range(3):
        score = 1 / (1 + np.exp(-logits[row].astype(np.float64)))
        ids = np.sort(np.lexsort((np.arange(experts), -(score + bias)))[:top_k])
        assert routes.ids[row].tolist() == ids.tolist()
        assert routes.weights[row].numpy() == pytest.approx(2.5 * score[ids] / score[ids].sum(), rel=1e-5)


def test_of_equal_keys_the_lowest_numbers_are_chosen():
    routes = route(torch.zeros(2, 896), torch.zeros(896), 16, 1.0)
    assert routes.ids.tolist() == [list(range(16))] * 2
    logits = torch.full((1, 896), -5.0)
    logits[0, [700, 300, 800]] = 1.0
    assert route(logits, torch.zeros(896), 2, 1.0).ids.tolist() == [[300, 700]]


def test_saturated_scores_tie_and_the_lowest_numbers_are_chosen():
    logits = torch.tensor([[-100.0, 50.0, 60.0, 70.0, 40.0]])
    assert route(logits, torch.zeros(5), 2, 1.0).ids.tolist() == [[1, 2]]


def test_scores_that_vanish_give_finite_weights():
    routes = route(torch.full((1, 8), -200.0), torch.zeros(8), 4, 1.0)
    assert routes.weights.isfinite().all()


def test_the_union_of_experts_names_each_once_in_order():
    logits = torch.eye(6)[[5, 2, 5]] * 10
    assert route(logits, torch.zeros(6), 1, 1.0).experts() == [2, 5]
