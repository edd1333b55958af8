"""A process's part of a job: over a network, in shared memory, or as the only process."""
