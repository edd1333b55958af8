"""Both ends of a round, partial exchange between peers, and the transfer of state."""
