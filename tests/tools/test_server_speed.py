"""The comparison of server and df-run measures what it says."""

from __future__ import annotations

import pytest

from deltafin.runtime.tokenizer import Tokenizer


@pytest.mark.parametrize("vocab", [512, 2048, 163_840])
def test_a_model_without_words_gets_as_many_as_its_vocabulary_has(server_speed, vocab):
    tokenizer = Tokenizer(*server_speed.made_up_words(vocab), vocab)
    assert tokenizer.decode(tokenizer.encode("Kimi, früh um 3")) == "Kimi, früh um 3"
    assert tokenizer.special_id("[BOS]") == vocab - 256
    assert tokenizer.special_id("<|end_of_msg|>") == vocab - 254


@pytest.mark.slow
@pytest.mark.parametrize("model", ["demo", "k93"])
def test_all_arms_write_the_same_text_and_are_reported_with_their_ratio(server_speed, capsys, model):
    server_speed.measure_overhead(model, tokens=12, rounds=1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith(f"{model} round 1: df-run ")
    assert "by rounds streamed " in lines[1] and " of df-run, whole " in lines[1]
