"""Counters of what the core has too much of: see ``limits.json`` and ``CONTRIBUTING.md``."""
