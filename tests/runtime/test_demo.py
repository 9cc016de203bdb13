"""The trained demo model says what the official code makes it say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deltafin.runtime import Segment, StreamDecoder

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "demo.json").read_text())
CASES = [pytest.param(case, id=case["name"]) for case in GOLDEN["cases"]]
RAW = [pytest.param(case, id=case["name"]) for case in GOLDEN["cases"] if case["kind"] == "raw"]


def test_all_eighteen_cases_are_here():
    assert len(CASES) == 18


def test_the_demo_stops_where_its_files_say(demo):
    assert demo.stop_ids == frozenset(GOLDEN["stop_ids"])


@pytest.mark.parametrize("case", CASES)
def test_the_demo_answers_as_the_official_code_does(demo, case):
    found = list(demo.generate(demo.sequence(), case["prompt_ids"], max_new=len(case["ids"]) + case["stopped"]))
    assert found == case["ids"]
    assert demo.tokenizer.decode(found) == case["text"]
    stream = StreamDecoder(demo.tokenizer)
    assert "".join(map(stream.push, found)) + stream.finish() == case["text"]


@pytest.mark.parametrize("case", CASES)
def test_the_first_five_logits_are_the_official_ones(demo, case):
    logits = demo.forward([Segment(demo.sequence(), case["prompt_ids"])], logits="last")[0]
    ids, values = zip(*case["first_top5"], strict=True)
    assert (-logits).argsort(kind="stable")[:5].tolist() == list(ids)
    assert np.abs(logits[list(ids)] - values).max() < 2e-4


@pytest.mark.parametrize("case", RAW)
def test_raw_prompts_encode_to_the_golden_ids(demo, case):
    assert demo.tokenizer.encode(case["prompt"]) == case["prompt_ids"]
    assert demo.tokenizer.decode(case["prompt_ids"]) == case["prompt"]
