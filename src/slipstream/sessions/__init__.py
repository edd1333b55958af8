"""What a job is to one of its processes: over a network, in shared memory, or alone."""
