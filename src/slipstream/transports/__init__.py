"""All I/O: messages over ZeroMQ, collectives over torch.distributed, memory for tests."""
