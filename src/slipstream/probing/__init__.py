"""What a network carries, measured with bursts of packets."""
