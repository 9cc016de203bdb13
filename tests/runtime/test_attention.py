"""The two kinds of attention against their equations, at the edges that small models do not reach."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from deltafin.errors import BadCheckpoint
from deltafin.runtime.reference import kda
from deltafin.runtime.reference.mla import KEY_BLOCK, Latents, attend


def test_the_decay_gate_follows_its_formula_from_minus_80_to_80():
    z = torch.arange(-80, 80.5, 0.5)
    rate = torch.tensor([0.5, 1.0, 2.0])
    found = kda.log_decay(z.view(-1, 1, 1).expand(-1, 3, 1), rate, -5.0).squeeze(-1).double().numpy()
    with np.errstate(over="ignore"):
        expected = -5 / (1 + np.exp(-np.outer(z.numpy().astype(np.float64), rate.numpy())))
    assert (found >= -5).all() and (found <= 0).all()
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-37)


def test_a_log_is_read_per_head():
    stored = torch.tensor([0.1, 0.2, 0.3, 0.0, 0.0])
    assert kda.per_head(stored, 3, layer=0).tolist() == stored[:3].tolist()
    assert kda.per_head(stored[:3], 3, layer=0).tolist() == stored[:3].tolist()
    with pytest.raises(BadCheckpoint, match=r"layers\.4\.self_attn\.A_log: entry 2 is 0\.3"):
        kda.per_head(stored, 2, layer=4)


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 7])
def test_the_convolution_remembers_across_a_cut(kernel, cut):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 5, generator=generator)
    taps = torch.randn(5, kernel, generator=generator)
    history = torch.zeros(kernel - 1, 5)
    first, between = kda.causal_conv(x[:cut], history, taps), kda.shifted(history, x[:cut])
    second, after = kda.causal_conv(x[cut:], between, taps), kda.shifted(between, x[cut:])
    padded = np.concatenate([np.zeros((kernel - 1, 5)), x.numpy()])
    expected = [(padded[t : t + kernel].T * taps.numpy()).sum(1) for t in range(7)]
    assert np.allclose(torch.cat([first, second]).numpy(), expected, atol=1e-6)
    assert (after.numpy() == padded[7:].astype(np.float32)).all()


def test_the_recurrence_decays_then_corrects_then_reads():
    """Two tokens of one head with two channels, by hand."""
    memory = torch.zeros(1, 2, 2)
    k = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    v = torch.tensor([[[2.0, 4.0]], [[8.0, 8.0]]])
    q = torch.tensor([[[1.0, 1.0]], [[1.0, 0.0]]])
    decay = torch.tensor([[[1.0, 1.0]], [[0.5, 1.0]]])
    beta = torch.tensor([[1.0], [0.25]])
    read = kda.recur(memory, q, k, v, decay, beta)
    assert read[0, 0].tolist() == [2.0, 4.0]
    # decayed to [1, 2]; a quarter of the way from there to [8, 8]
    assert read[1, 0].tolist() == [2.75, 3.5]
    assert memory[0].tolist() == [[2.75, 3.5], [0.0, 0.0]]


@pytest.mark.parametrize("length", [1, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 3 * KEY_BLOCK + 5])
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_attention_over_key_blocks_is_a_plain_softmax(length, rows):
    generator = torch.Generator().manual_seed(length)
    cached = torch.randn(length + rows, 6, generator=generator)
    keys = Latents().extended(cached[:length]).extended(cached[length:])
    query = torch.randn(rows, 2, 6, generator=generator)
    found = attend(query, keys, length, rank=4)
    scores = torch.einsum("rhc,sc->rhs", query.double(), cached.double())
    visible = torch.arange(length + rows) <= torch.arange(length, length + rows)[:, None]
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    assert torch.allclose(found.double(), weights @ cached[:, :4].double(), atol=1e-5)


def test_growing_a_cache_leaves_the_older_one_as_it_was():
    rows = torch.arange(2.0 * (KEY_BLOCK + 9)).view(-1, 2)
    old = Latents().extended(rows[:5])
    failed = old.extended(torch.full((KEY_BLOCK, 2), -1.0))
    assert (old.length, len(old.blocks)) == (5, 1)
    assert (failed.length, len(failed.blocks)) == (KEY_BLOCK + 5, 2)
    new = old.extended(rows[5:])
    assert (torch.cat(new.blocks)[: new.length] == rows).all()


def test_a_long_context_agrees_with_itself_however_it_is_cut(tiny):
    """More tokens than a key block holds, so that every block boundary is crossed."""
    from deltafin.runtime import Segment

    rng = np.random.default_rng(5)
    ids = rng.integers(0, 512, 2 * KEY_BLOCK + 40).tolist()
    whole = tiny.forward([Segment(tiny.sequence(), ids)])
    seq = tiny.sequence()
    edges = [0, 100, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 2 * KEY_BLOCK + 3, len(ids)]
    parts = [tiny.forward([Segment(seq, ids[a:b])]) for a, b in pairwise(edges)]
    assert np.abs(np.concatenate(parts) - whole).max() < 1e-2
