"""Server processes: their configuration, their shards, their answers."""
