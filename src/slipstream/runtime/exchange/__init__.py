"""The two ends of a round, gossip between peers, and the hand-over of state."""
