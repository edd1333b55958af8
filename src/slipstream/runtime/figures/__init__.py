"""Figures of a run: summaries, outputs of metrics, and reports on replicas."""
