"""The running parts: members, aggregators, channels, servers, launcher, checkpoints."""
