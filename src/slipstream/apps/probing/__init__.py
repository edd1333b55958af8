"""The available bandwidth of a network, measured with bursts of packets."""
