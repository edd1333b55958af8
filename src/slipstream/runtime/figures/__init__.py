"""Figures of a run: summaries, outputs of metrics, and what workers report of replicas."""
