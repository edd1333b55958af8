"""What waits and what runs: members, holders, exchanges, servers, launch, checkpoints."""
