"""Channels of torch tensors: collectives, host memory, and the speeds of links."""
