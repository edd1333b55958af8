from __future__ import annotations

import math

import pytest
import torch

from slipstream.apps.bench.data.markov import MarkovSource, markov_text


def test_a_source_of_even_shares_has_the_logarithm_of_their_number() -> None:
    source = MarkovSource.drawn(alphabet="abcde", followers=3, seed=0)
    even = MarkovSource("abcde", source.followers, torch.full_like(source.shares, 1 / 3))
    assert even.entropy() == pytest.approx(math.log(3))


def test_a_source_without_a_choice_has_no_entropy() -> None:
    certain = MarkovSource.drawn(alphabet="abcde", followers=1, seed=0)
    assert certain.entropy() == pytest.approx(0)


def test_the_true_probabilities_have_the_entropy_as_their_loss() -> None:
    """On a drawn text, what the source itself would have predicted; the law of large numbers."""
    source = MarkovSource.drawn(seed=3)
    drawn = source.draw(40_000, seed=4).long()
    size = len(source.alphabet)
    pairs, following = drawn[:-2] * size + drawn[1:-1], drawn[2:]
    chosen = source.followers[pairs] == following.unsqueeze(1)
    assert chosen.any(1).all()  # nothing else ever follows
    loss = -source.shares[pairs][chosen].log().mean()
    assert float(loss) == pytest.approx(source.entropy(), rel=0.02)


def test_a_single_character_tells_less_than_a_pair() -> None:
    """Otherwise counting pairs would do, and nothing had to be attended to."""
    text = markov_text(count=60_000)
    size = len(text.alphabet)
    pairs = text.characters[:-1].long() * size + text.characters[1:].long()
    counts = torch.bincount(pairs, minlength=size * size).view(size, size).double()
    shares = counts / counts.sum(1, keepdim=True)
    loss = -(counts * shares.clamp_min(1e-12).log()).sum() / counts.sum()
    assert text.entropy is not None
    assert 1.2 * text.entropy < float(loss) < math.log(size)


def test_the_same_seed_gives_the_same_text() -> None:
    first, again, other = (markov_text(count=500, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.characters, again.characters)
    assert not torch.equal(first.characters, other.characters)
    assert len(first.characters) == 500
    assert int(first.characters.max()) < len(first.alphabet)
