"""Two levels, inside a host: workers sum in shared memory, and one of them represents all."""
