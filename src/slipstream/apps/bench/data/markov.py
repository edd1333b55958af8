"""Generated text whose entropy is known: a Markov source of the second order.

The last character determines which few may follow, the last two how likely each of them is: a model
learns the former soon, and the latter with time. With π the stationary distribution over pairs, a
character has

    H = − Σ_pair π(pair) Σ_next P(next | pair) ln P(next | pair)   nats,

which is the least loss that any model can have on this text.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.apps.bench.data.characters import CharacterText

ALPHABET = " abcdefghijklmnopqrstuvwxyz"
FOLLOWERS = 6
STATIONARY_STEPS = 500


@dataclass(frozen=True, slots=True)
class MarkovSource:
    """A source of text: ``followers[pair]`` may come next, with probabilities ``shares[pair]``."""

    alphabet: str
    followers: Tensor
    shares: Tensor

    @classmethod
    def drawn(
        cls, *, alphabet: str = ALPHABET, followers: int = FOLLOWERS, seed: int
    ) -> MarkovSource:
        """Draw which characters follow which, from this seed."""
        generator = torch.Generator().manual_seed(seed)
        size = len(alphabet)
        by_last = torch.rand(size, size, generator=generator).argsort(1)[:, :followers]
        uniform = torch.rand(size * size, followers, generator=generator, dtype=torch.float64)
        weights = uniform**3 + 0.01  # uneven: one of them is likely
        return cls(alphabet, by_last.repeat(size, 1), weights / weights.sum(1, keepdim=True))

    def next_pairs(self) -> Tensor:
        """Return the pairs that may follow each pair, which lose the first of two characters."""
        size = len(self.alphabet)
        last = torch.arange(size * size).remainder(size).unsqueeze(1)
        return last * size + self.followers

    def entropy(self) -> float:
        """Return the entropy H in nats per character, with π by power iteration."""
        after = self.next_pairs()
        at = torch.full((len(after),), 1 / len(after), dtype=torch.float64)
        for _ in range(STATIONARY_STEPS):
            next_weights = (at.unsqueeze(1) * self.shares).flatten()
            # Halfway: a source that alternates would never converge otherwise.
            at = (at + torch.zeros_like(at).index_add_(0, after.flatten(), next_weights)) / 2
        each = -(self.shares * self.shares.log()).sum(1)
        return float((at * each).sum())

    def draw(self, count: int, *, seed: int) -> Tensor:
        """Draw ``count`` characters, by their numbers."""
        bounds: list[list[float]] = self.shares.cumsum(1)[:, :-1].tolist()
        after: list[list[int]] = self.next_pairs().tolist()
        uniform = torch.rand(count, generator=torch.Generator().manual_seed(seed))
        pairs = itertools.accumulate(
            uniform.tolist(),
            lambda pair, number: after[pair][bisect.bisect(bounds[pair], number)],
            initial=0,
        )
        number = torch.tensor([*itertools.islice(pairs, 1, None)], dtype=torch.int32)
        return number.remainder(len(self.alphabet))


def markov_text(*, count: int = 300_000, seed: int = 0) -> CharacterText:
    """Return text of a source of this seed, with its entropy."""
    source = MarkovSource.drawn(seed=seed)
    entropy = source.entropy()
    origin = f"generated text of {entropy:.3f} nats a character"
    return CharacterText(source.draw(count, seed=seed + 1), source.alphabet, origin, entropy)
