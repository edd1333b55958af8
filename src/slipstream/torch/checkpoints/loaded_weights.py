"""Weights that a loop loads before its first step, where outer rounds follow.

A worker measures its outer gradients from the outer weights. If one rank alone began with others,
workers would differ from then on, round after round. So every rank posts a digest of the weights
with which it begins, and one that has loaded some compares; the others need not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from slipstream.errors import RuntimeFault
from slipstream.runtime.members.joining import Membership
from slipstream.torch.checkpoints.outer_weights import OuterWeights
from slipstream.torch.tensors.fingerprint import digest_of


class Digests(Protocol):
    """One digest of each rank."""

    def post(self, digest: str) -> None:
        """This rank's; every rank calls it once."""
        ...

    def read(self) -> Sequence[str]:
        """Wait for all ranks' and return them."""
        ...


class PostedDigests:
    """Digests over the job's links; implements ``Digests``.

    Args:
        key: A name that no other gathering has.
    """

    def __init__(self, membership: Membership, key: str) -> None:
        self._membership, self._key = membership, key

    def post(self, digest: str) -> None:
        rank = self._membership.env.rank
        self._membership.gathering.post(f"{self._key}/{rank}", digest)

    def read(self) -> Sequence[str]:
        """Those of the ranks that are not lost."""
        membership, member = self._membership, self._membership.member
        ranks = range(membership.env.world_size)
        live = [rank for rank in ranks if f"rank {rank}" not in member.lost]
        with membership.gathering.watched(lambda _: member.check()):
            return [membership.gathering.read(f"{self._key}/{r}", r, str) for r in live]


class LoadedWeights:
    """Takes the weights of the first step for the outer ones."""

    def __init__(self, model: nn.Module, outer: OuterWeights, digests: Digests) -> None:
        # Another pair's parameters may have made steps, and tables with max_norm change by
        # themselves, so neither is compared.
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._outer, self._digests = outer, digests
        self._states = list(map(state_of, self._frozen))

    def take(self) -> list[int]:
        """Go on from the weights that all ranks have loaded, if they have.

        Returns:
            The tensors of which they have.

        Raises:
            RuntimeFault: Not all ranks have the same.
        """
        own, loaded = digest_of([*self._outer.constant, *self._frozen]), self._outer.loaded()
        self._digests.post(own)
        writes_frozen = self._states != list(map(state_of, self._frozen))
        if (loaded or writes_frozen) and set(self._digests.read()) != {own}:
            raise RuntimeFault(
                "weights were changed after job.distribute, and not alike on all ranks: load the "
                "same ones everywhere, or change them before job.distribute, which gives rank 0's "
                "to all"
            )
        self._outer.follow(loaded)
        return loaded


def state_of(parameter: Tensor) -> tuple[int, int]:
    """What changes when a loop writes a parameter, or replaces it."""
    return parameter._version, parameter.data_ptr()
